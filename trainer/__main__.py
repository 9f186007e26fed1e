"""python -m trainer: parse flags, then run the method."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

from data.command.flags import error_lines
from data.errors import UserError
from trainer.cli import parse
from trainer.config.errors import one_line
from trainer.parallel.comm import log_once, process_group
from trainer.parallel.ranks import TIMEOUT_S
from trainer.plan import is_out_of_memory, out_of_memory
from trainer.run.stop import EXIT_CODE, Stopped, end_on_sigterm

INTERRUPTED = 130  # exit code after Ctrl-C


def main(argv: list[str] | None = None) -> int:
    """Exit code of one run: 0 finished, 2 an error the user can fix, 143 stopped by SIGTERM, 130 by Ctrl-C.

    An error the user can fix is one sentence; a bug, ours or in the user's code, keeps its traceback.
    """
    # On a CPU without bfloat16 torch falls back to another product, with a warning about its C++ code.
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    debug = os.environ.get("STROP_DEBUG") == "1"
    cfg = None
    with end_on_sigterm() as stop:
        try:
            module, cfg, _ = parse(sys.argv[1:] if argv is None else argv)
            stop.grace_s = cfg.run.stop_grace_s
            return train(module, cfg, tell=lambda: not (debug or stop.signalled))
        except Stopped as stopped:
            print(stopped, file=sys.stderr)
            return EXIT_CODE
        except KeyboardInterrupt as interrupt:
            if debug:
                raise
            if os.environ.get("RANK", "0") == "0":
                print(interrupted(interrupt, began=cfg is not None), file=sys.stderr)
            return INTERRUPTED
        except BrokenPipeError:  # --help | head; a training run must not stop silently either
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            print("stopped: nobody reads the output any more", file=sys.stderr)
            return 1
        except Exception as error:
            if debug:
                raise
            if stop.signalled:  # the servers may have been stopped too
                print(f"stopped by SIGTERM, the step could not end ({one_line(error)}); continue with --resume",
                      file=sys.stderr)  # fmt: skip
                return EXIT_CODE
            if is_out_of_memory(error):
                print("error:", out_of_memory(error, cfg), file=sys.stderr)
                return 2
            if not isinstance(error, UserError):
                raise
            if os.environ.get("LOCAL_RANK", "0") == "0":  # all processes have the same flags
                print("\n".join(f"error: {line}" for line in error_lines(error)), file=sys.stderr)
            return 2


def interrupted(interrupt: KeyboardInterrupt, *, began: bool) -> str:
    """The Run in trainer/run/run.py puts its folder and step into the interrupt; a method without one cannot."""
    if interrupt.args:
        return str(interrupt)
    return "interrupted; continue with --resume" if began else "interrupted before the run began"


def train(module: ModuleType, cfg: Any, *, tell: Callable[[], bool]) -> int:
    """Exit code. Errors are logged, if `tell()`, inside the process group, so that only one rank logs them."""
    parallel = getattr(cfg, "parallel", None)  # a method outside the repository may not have the block
    timeout_s, context = (parallel.timeout_s, parallel.context) if parallel else (TIMEOUT_S, 1)
    with process_group(timeout_s, context):
        try:
            module.train(cfg)
        except UserError as error:
            if not tell():
                raise
            log_once(f"error: {one_line(error)}")
            return 2
    return 0


def end_at_once(code: int) -> NoReturn:
    """After Ctrl-C. Our things are closed by then; Python's own shutdown would take seconds."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader is gone
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    code = main()
    if code == INTERRUPTED:
        end_at_once(code)
    sys.exit(code)
