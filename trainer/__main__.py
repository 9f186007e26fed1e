"""python -m trainer: parse, then hand over to the method."""

from __future__ import annotations

import dis
import os
import sys
import sysconfig
from pathlib import Path
from types import TracebackType

from trainer.cli import parse


def main(argv: list[str] | None = None) -> int:
    """Exit code of one run. What a user can put right is one sentence; a bug of ours keeps its traceback."""
    try:
        module, cfg, _ = parse(sys.argv[1:] if argv is None else argv)
        module.train(cfg)
    except ValueError as error:
        if os.environ.get("STROP_DEBUG") == "1" or not raised_on_purpose(error.__traceback__):
            raise
        print("error:", " ".join(str(error).splitlines()), file=sys.stderr)  # one line, whatever a value holds
        return 2
    except KeyboardInterrupt:
        if os.environ.get("STROP_DEBUG") == "1":
            raise
        print("interrupted; continue with --resume", file=sys.stderr)
        return 130
    except BrokenPipeError:  # --help | head; a training run must not stop without a word either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print("stopped: nobody reads the output any more", file=sys.stderr)
        return 1
    return 0


def raised_on_purpose(traceback: TracebackType | None) -> bool:
    """Whether the innermost frame is our code or the user's and stands on a raise statement.

    int("x") or a tensor library failing inside a call is a bug report, not advice: it keeps the traceback.
    """
    assert traceback is not None, "an error that was caught has a traceback"
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    code = traceback.tb_frame.f_code
    stdlib = tuple(os.path.join(sysconfig.get_paths()[key], "") for key in ("stdlib", "platstdlib"))
    installed = {"site-packages", "dist-packages"} & set(Path(code.co_filename).parts)
    if installed or code.co_filename.startswith((*stdlib, "<")):
        return False
    return dis.opname[code.co_code[traceback.tb_lasti]] == "RAISE_VARARGS"


if __name__ == "__main__":
    sys.exit(main())
