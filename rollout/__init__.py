"""Sample completions for prompts and reward them."""

import strop_names

strop_names.take()
