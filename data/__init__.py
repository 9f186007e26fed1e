"""Rows in, token ids and masks out."""

import strop_names

strop_names.take()
