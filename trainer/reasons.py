"""What a library said when something failed, in one line fit for an error of ours."""

from __future__ import annotations

from pathlib import Path


def first_line(error: Exception) -> str:
    first, _, rest = str(error).strip().partition("\n")
    if first.rstrip().endswith(":"):  # a list follows
        return " ".join(f"{first} {rest}".split())[:300]
    return first or type(error).__name__


def why(error: Exception, path: str) -> str:
    """What a library said when it could not load `path`, in one line."""
    kind = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: "
    where = "" if Path(path).is_dir() else f"{path} is no folder here, and as a hub id: "
    remedy = "; if you trust its code, pass --trust-remote-code" if "trust_remote_code" in str(error) else ""
    return f"{where}{kind}{first_line(error)}{remedy}"
