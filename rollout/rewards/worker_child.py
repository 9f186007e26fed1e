"""Main program of a reward worker, started by workers.py: read a line, call a function in the main thread, reply."""

from __future__ import annotations

import base64
import inspect
import json
import os
import pickle
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

from rollout.rewards.calls import CallLog, Fault, TrainerState, check_scores, fault_of
from rollout.rewards.loading import find_reward

GIB = 2**30


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[2]))
    connection.set_inheritable(False)  # otherwise a function's child process would keep it open
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, requests), daemon=True).start()
    setup = requests.get()
    try:
        calls = [find_reward(spec)[1] for spec in setup["specs"]]
    except ValueError as error:
        _reply(connection, {"error": str(error)})
        return
    if setup["memory_gb"] is not None:
        _limit_memory(setup["memory_gb"])
    _reply(connection, {"ready": True})
    while True:
        request = requests.get()
        _reply(connection, _answer(calls[request["function"]], request))


def _read(connection: socket.socket, requests: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Read even while a function runs, to notice that the trainer has ended: nothing else would stop a hanging call."""
    try:
        with connection.makefile("rb") as lines:
            for line in lines:
                requests.put(json.loads(line))
    finally:
        os.killpg(0, signal.SIGKILL)  # this process and everything its functions started


def _answer(call: Callable[..., Any], request: dict[str, Any]) -> dict[str, Any]:
    log = CallLog()
    try:
        arguments = request.get("arguments")
        if arguments is None:
            arguments = pickle.loads(base64.b64decode(request["pickled"]))  # from the parent process
        returned = call(**arguments, **log.arguments(call, TrainerState(**request["state"])))
        if inspect.isawaitable(returned):
            returned = _loop().run_until_complete(_awaited(returned))
        outcome = check_scores(returned, request["rows"])
    except BaseException as error:  # user code may raise anything
        outcome = fault_of(error, call)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # a leftover alarm would interrupt the next call
    if isinstance(outcome, Fault):
        return {"fault": list(outcome)}
    return {"scores": outcome, "extra": log.extra, "metrics": log.metrics}


@cache
def _loop() -> Any:
    """Return one loop for all calls, so that clients can keep connections."""
    import asyncio  # slow to import and rarely needed

    return asyncio.new_event_loop()


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def _reply(connection: socket.socket, reply: dict[str, Any]) -> None:
    connection.sendall(json.dumps(reply).encode() + b"\n")


def _limit_memory(gigabytes: float) -> None:
    """Limit the address space beyond what is mapped now by the interpreter and imported libraries."""
    try:
        import resource

        with open("/proc/self/statm") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):  # no such limit, or no /proc
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = mapped + int(gigabytes * GIB)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
