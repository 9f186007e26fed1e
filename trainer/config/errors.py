"""Errors in one line: whether an error is ours to show as a sentence, and what a library reported."""

from __future__ import annotations

import dis
from pathlib import Path

from data.user_code import printable
from strop_names import is_ours


def first_line(error: Exception) -> str:
    first, _, rest = str(error).strip().partition("\n")
    if first.rstrip().endswith(":"):  # a list follows
        return " ".join(f"{first} {rest}".split())[:300]
    return first or type(error).__name__


def load_error(error: Exception, path: str) -> str:
    """A library's error when loading `path`, in one line."""
    kind = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: "
    where = "" if Path(path).is_dir() else f"{path} is no folder here, and as a hub id: "
    remedy = "; if you trust its code, pass --trust-remote-code" if "trust_remote_code" in str(error) else ""
    return f"{where}{kind}{first_line(error)}{remedy}"


def one_line(error: Exception) -> str:
    return printable(" ".join(str(error).splitlines())) or type(error).__name__  # values may hold anything


def raised_on_purpose(error: Exception) -> bool:
    """Whether a raise statement of ours raised it: then it is a sentence for the user.

    An error inside a call, such as int("x") or a tensor operation, is a bug, and one of the user's own code is theirs
    to find: both keep the traceback.
    """
    traceback = error.__traceback__
    assert traceback is not None, "an error that was caught has a traceback"
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    code = traceback.tb_frame.f_code
    return is_ours(code.co_filename) and dis.opname[code.co_code[traceback.tb_lasti]] == "RAISE_VARARGS"
