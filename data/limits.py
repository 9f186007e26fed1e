"""Limits on input from others; an environment variable changes each of them."""

from __future__ import annotations

import os

from data.errors import UserError

DEFAULTS = {
    "STROP_MAX_UNPACKED_GIB": 10.0,  # size of a .gz or .parquet data file when unpacked
    "STROP_MAX_YAML_NODES": 1e6,  # nodes of a YAML file, aliases expanded
    "STROP_MAX_PATTERN_S": 1.0,  # CPU seconds for the patterns of an adapter
}


def limit(name: str) -> float:
    """Return the value of a limit."""
    text = os.environ.get(name)
    try:
        value = DEFAULTS[name] if text is None else float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise UserError(f"{name}={text}: must be a number above 0; unset it for {DEFAULTS[name]:g}")
    return value
