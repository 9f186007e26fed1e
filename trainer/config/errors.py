"""Whose an error is, and in one line what it says: an error of ours, or what a library said when something failed."""

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
    """What a library said when it could not load `path`, in one line."""
    kind = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: "
    where = "" if Path(path).is_dir() else f"{path} is no folder here, and as a hub id: "
    remedy = "; if you trust its code, pass --trust-remote-code" if "trust_remote_code" in str(error) else ""
    return f"{where}{kind}{first_line(error)}{remedy}"


def one_line(error: Exception) -> str:
    return printable(" ".join(str(error).splitlines())) or type(error).__name__  # whatever a value holds


def raised_on_purpose(error: Exception) -> bool:
    """Whether a raise statement of ours made it: then it is a sentence for the user.

    int("x") or a tensor library failing inside a call is a bug report, not advice, and what the user's own code raises
    is the user's to find: both keep the traceback.
    """
    traceback = error.__traceback__
    assert traceback is not None, "an error that was caught has a traceback"
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    code = traceback.tb_frame.f_code
    return is_ours(code.co_filename) and dis.opname[code.co_code[traceback.tb_lasti]] == "RAISE_VARARGS"
