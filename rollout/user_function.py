"""A function or class of the user's by the name that was typed: my_module.fn in the working folder, or FILE.py:fn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data.user_code import attribute_of, load_file, load_module


def find_callable(spec: str, label: str) -> tuple[str, Any]:
    """(its own name, what it names); `label` is what the user typed, as the sentences about it begin."""
    path, colon, attribute = spec.rpartition(":")
    if colon and path.endswith(".py"):
        module = load_file(Path(path).expanduser().resolve(), label)
    else:
        name, dot, attribute = spec.rpartition(".")
        if not dot or colon:
            raise ValueError(f"{label}: names no function; give my_module.function or path/to/file.py:function")
        module = load_module(name, label)
    found = attribute_of(module, attribute, label)
    if not callable(found):
        raise ValueError(f"{label}: is a {type(found).__name__}, not a function; name something callable")
    return attribute, found
