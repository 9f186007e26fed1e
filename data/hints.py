"""The valid name closest to what was typed, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def suggest(name: str, valid: Iterable[str]) -> str:
    """A hint: "did you mean 'split'? (format, name, split, weight)"."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
    return f"did you mean {close[0]!r}? ({', '.join(names)})"
