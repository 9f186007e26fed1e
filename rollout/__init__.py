"""Completions of prompts, and their rewards."""

import strop_names

strop_names.take()
