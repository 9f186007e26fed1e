"""World size and rank, from the environment only: flags are parsed without importing torch."""

from __future__ import annotations

import os

from data.errors import UserError

TIMEOUT_S = 600.0  # default time that a rank waits for other ranks


def world_size() -> int:
    value = os.environ.get("WORLD_SIZE") or "1"
    if not value.isdecimal() or int(value) < 1:
        raise UserError(f"WORLD_SIZE={value}: must be an integer of at least 1; torchrun sets it")
    return int(value)


def local_world_size() -> int:
    """Return the number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or "1")


def rank() -> int:
    return int(os.environ.get("RANK") or "0")


def is_main() -> bool:
    """Return whether this rank writes the run folder and the console."""
    return rank() == 0
