"""A process that has torch, transformers and the trainer loaded, and forks a copy of itself for each command.

`python -m trainer` takes several seconds to import what it needs. Many tests run it, so they share one import:

    {"argv": ["-m", "trainer", ...], "cwd": ..., "env": {...}, "out": FILE, "err": FILE, "timeout": seconds}    one line
    0                                                                                            the exit code on stdout

The copy then does what Python does for `-m MODULE` or `SCRIPT`. What is read when Python starts differs
(PYTHONHASHSEED, OMP_NUM_THREADS, /proc/PID/environ): a test of those starts a real process.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import signal
import sys
import threading
import traceback
from typing import Any, NoReturn

TIMED_OUT = "timeout"


def serve() -> dict[str, Any]:
    """Answer requests until stdin ends; returns only in a forked copy, with the request to carry out."""
    for line in sys.stdin.buffer:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            return request
        print(json.dumps(outcome(pid, request["timeout"])), flush=True)
    raise SystemExit(0)


def outcome(pid: int, timeout: float) -> int | str:
    pidfd = os.pidfd_open(pid)
    try:
        ready, _, _ = select.select([pidfd], [], [], timeout)
        if not ready:
            os.kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return status if ready else TIMED_OUT
    finally:
        os.close(pidfd)


def become(request: dict[str, Any]) -> None:
    """Take over the folder, environment, output and module path of a fresh Python."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    added = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder not in sys.path]
    sys.path[:1] = [os.getcwd(), *filter(None, added)]


def run_and_exit(argv: list[str]) -> NoReturn:
    """Run the command, and end without the tear-down of every module, which takes two seconds."""
    code = 0
    sys.argv = argv[1:] if argv[0] == "-m" else argv
    try:
        if argv[0] == "-m":
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    import torch  # noqa: F401
    import torch._dynamo  # noqa: F401  an optimizer imports it on its first step
    import transformers.models.llama.modeling_llama  # noqa: F401

    from trainer.methods import dpo, ebft, grpo, kto, online_dpo, orpo, prm, rm, sft, simpo  # noqa: F401

    gc.freeze()  # a collection in a copy would write to, and so copy, every page
    request = serve()
    become(request)
    run_and_exit(request["argv"])
