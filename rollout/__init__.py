"""Sampling completions for prompts, and rewarding them."""

import strop_names

strop_names.take()
