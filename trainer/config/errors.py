"""Errors in one line: a UserError, and what a library reported."""

from __future__ import annotations

from pathlib import Path

from data.user_code import printable


def first_line(error: Exception) -> str:
    first, _, rest = str(error).strip().partition("\n")
    if first.rstrip().endswith(":"):  # a list follows
        return " ".join(f"{first} {rest}".split())[:300]
    return first or type(error).__name__


def load_error(error: Exception, path: str) -> str:
    """A library's error when loading `path`, in one line."""
    kind = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: "
    where = "" if Path(path).is_dir() else f"{path} is not a folder, and as a hub id: "
    remedy = "; if you trust its code, pass --trust-remote-code" if "trust_remote_code" in str(error) else ""
    return f"{where}{kind}{first_line(error)}{remedy}"


def one_line(error: Exception) -> str:
    return printable(" ".join(str(error).splitlines())) or type(error).__name__  # values may contain anything
