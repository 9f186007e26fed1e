"""python -m trainer: parse flags, then run the method."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import NoReturn

from data.command.flags import error_lines
from data.errors import UserError
from trainer.cli import DRY_RUN, parse
from trainer.config.blocks import MethodConfig
from trainer.config.errors import one_line
from trainer.metrics.startup import importing, keep_compiled_code, startup
from trainer.parallel.ranks import TIMEOUT_S
from trainer.plan import blocks_to_recompute, is_out_of_memory, out_of_memory
from trainer.run.stop import EXIT_CODE, Stopped, end_on_sigterm

INTERRUPTED = 130  # exit code after Ctrl-C


def main(argv: list[str] | None = None) -> int:
    """Return the exit code of a run: 0 finished, 2 an error the user can fix, 143 stopped by SIGTERM, 130 by Ctrl-C.

    A UserError is printed as a sentence; any other error keeps its traceback.
    """
    # torch warns about its C++ code when a CPU without bfloat16 falls back to another matmul.
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    debug = os.environ.get("STROP_DEBUG") == "1"
    cfg = None
    keep_compiled_code()
    startup.begin()
    with end_on_sigterm() as stop:
        try:
            argv = sys.argv[1:] if argv is None else argv
            with importing():
                module, cfg, _ = parse(argv, starts_run=True)
            if DRY_RUN in argv:
                from trainer.dry_run import describe  # imports torch

                describe(cfg)
                return 0
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
        except BrokenPipeError:  # --help | head; a training run must not stop silently
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            print("stopped: the output pipe is closed", file=sys.stderr)
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
    """Return the message; Run (trainer/run/run.py) puts its folder and step into the interrupt."""
    if interrupt.args:
        return str(interrupt)
    return "interrupted; continue with --resume" if began else "interrupted before the run began"


def train(module: ModuleType, cfg: MethodConfig, *, tell: Callable[[], bool]) -> int:
    """Return the exit code; if `tell()`, log errors inside the process group, so that only one rank logs them."""
    from trainer.parallel.comm import log_once, name_lost_rank, process_group  # imports torch, which takes seconds
    from trainer.policy.load import recomputing

    parallel = getattr(cfg, "parallel", None)  # a custom method may not have the block
    timeout_s, context = (parallel.timeout_s, parallel.context) if parallel else (TIMEOUT_S, 1)
    with process_group(timeout_s, context):
        try:
            with recomputing(blocks_to_recompute(cfg)):
                module.train(cfg)
        except Exception as raised:
            error = name_lost_rank(raised)
            if isinstance(error, UserError) and tell():
                log_once(f"error: {one_line(error)}")
                return 2
            if error is raised:
                raise
            raise error from raised
    return 0


def end_at_once(code: int) -> NoReturn:
    """Exit after Ctrl-C, when everything is closed; Python's own shutdown would take seconds."""
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
