"""A process that has torch, transformers and the trainer loaded, and forks a copy of itself for each command.

`python -m trainer` takes several seconds to import what it needs. Many tests run it, so they share one import:

    {"argv": ["-m", "trainer", ...], "cwd": ..., "env": [{...}], "out": FILE, "err": FILE, "timeout": seconds}  one line
    0                                                                                            the exit code on stdout

The copy then does what Python does for `-m MODULE` or `SCRIPT`. What is read when Python starts differs
(PYTHONHASHSEED, OMP_NUM_THREADS, /proc/PID/environ): a test of those starts a real process. There is a copy for each
environment: several are the ranks of one run, and as under torchrun the first that fails ends the others.
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
import time
import traceback
from collections.abc import Iterable
from typing import Any, NoReturn

TIMED_OUT = "timeout"


def serve() -> dict[str, Any]:
    """Answer requests until stdin ends; returns only in a forked copy, with the request to carry out."""
    for line in sys.stdin.buffer:
        request = json.loads(line)
        pids = []
        for env in request["env"]:
            pids.append(os.fork())
            if pids[-1] == 0:
                return request | {"env": env}
        print(json.dumps(outcome(pids, time.monotonic() + request["timeout"])), flush=True)
    raise SystemExit(0)


def outcome(pids: list[int], deadline: float) -> int | str:
    """0 if all have ended well, else the exit code of the first that has not; none of them is left alive."""
    code: int | str = 0
    alive = {os.pidfd_open(pid): pid for pid in pids}
    while alive:
        ready, _, _ = select.select(list(alive), [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            code, ready = code or TIMED_OUT, list(alive)
            end(alive.values())
        for pidfd in ready:
            status = os.waitstatus_to_exitcode(os.waitpid(alive.pop(pidfd), 0)[1])
            os.close(pidfd)
            if status and not code:
                code = status
                end(alive.values())
    return code


def end(pids: Iterable[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def become(request: dict[str, Any]) -> None:
    """Take over the folder, environment, output and module path of a fresh Python."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
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
