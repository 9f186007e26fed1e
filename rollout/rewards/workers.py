"""Worker processes for reward functions: a call that hangs, dies or runs out of memory fails its rows, not the run.

    pool = WorkerPool(["my_rewards.polite"], num_workers=4, timeout=60, memory_gb=None, stop=True)
    future = pool.submit(0, {"completions": [...]}, 8, TrainerState())      # function 0, arguments by name
    future.result().scores

Each worker is a new interpreter that loads the functions by name and runs them in its main thread, where verifiers that
use signal.alarm work. Requests and replies are JSON lines over a socket pair. Values that JSON would change are
pickled, only from the trainer to its own child. One thread per worker feeds it and replaces it when necessary.

Why not a library: concurrent.futures and loky cannot kill a single hanging call. pebble can, but it starts workers
through multiprocessing, which imports the trainer's main module (torch) again, and it stops neither a function's child
processes nor a worker whose trainer was killed. Limits, bisection and the protocol would remain here.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import pickle
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, NamedTuple

from data.errors import UserError
from data.limits import WorkLimit, process_seconds
from data.types import Prompt
from rollout.rewards.calls import CallLog, CallScores, Fault, Outcome, TrainerState, score_rows
from strop_names import ROOT

START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from rollout.rewards.worker_child import main; main()"
START_SECONDS = 300.0  # to import the functions and their dependencies
POLL_SECONDS = 0.2  # between checks that the process is alive
CHUNK = 2**16
CLOSED = "the rewards were closed while rows were being scored"


class Task(NamedTuple):
    function: int
    arguments: dict[str, list[Any]]
    num_rows: int
    state: TrainerState
    future: Future[CallScores]


class WorkerPool:
    """`num_workers` processes with the same functions, and a queue of calls."""

    def __init__(
        self, specs: Sequence[str], *, num_workers: int, timeout: float, memory_gb: float | None, stop: bool
    ) -> None:
        self.num_workers = num_workers
        self._timeout = timeout
        self._memory_gb = memory_gb
        self._stop = stop
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._workers = [Worker(specs, memory_gb) for _ in range(num_workers)]
        self._threads = [
            threading.Thread(target=self._serve, args=(worker,), name=f"reward-worker-{i}", daemon=True)
            for i, worker in enumerate(self._workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, function: int, arguments: dict[str, list[Any]], num_rows: int, state: TrainerState
    ) -> Future[CallScores]:
        assert not self._closed.is_set(), "submit after close"
        future: Future[CallScores] = Future()
        self._tasks.put(Task(function, arguments, num_rows, state, future))
        return future

    def close(self) -> None:
        """Kill the processes and cancel pending calls."""
        self._closed.set()
        for worker in self._workers:
            worker.close()  # a running call ends immediately, as if the worker had died
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self, worker: Worker) -> None:
        while (task := self._tasks.get()) is not None:
            if self._closed.is_set() or not task.future.set_running_or_notify_cancel():
                task.future.cancel()
                continue
            try:
                task.future.set_result(self._score(worker, task))
            except BaseException as error:  # raised by future.result()
                task.future.set_exception(error)

    def _score(self, worker: Worker, task: Task) -> CallScores:
        logs: list[tuple[int, CallLog]] = []

        def call(low: int, high: int, seconds: float) -> Outcome:
            part = {name: values[low:high] for name, values in task.arguments.items()}
            outcome, log = worker.call(task.function, part, high - low, seconds, task.state)
            if self._closed.is_set():
                raise RuntimeError(CLOSED)
            outcome = log.check(self._name_limit(outcome), high - low)
            if not isinstance(outcome, Fault):
                logs.append((low, log))
            return outcome

        first = call(0, task.num_rows, self._timeout)
        scored = score_rows(call, task.num_rows, first=first, timeout=self._timeout, stop=self._stop)
        return scored._replace(logs=logs)

    def _name_limit(self, outcome: Outcome) -> Outcome:
        """Name the setting in faults that a limit caused."""
        if isinstance(outcome, Fault) and outcome.kind == "timeout":
            what = f"did not return within reward_timeout={self._timeout:g} s"
            return Fault("timeout", what, "; raise --reward-timeout, or return earlier")
        if isinstance(outcome, Fault) and outcome.kind == "memory" and self._memory_gb is not None:
            return outcome._replace(what=f"ran out of memory (reward_memory_gb={self._memory_gb:g})")
        return outcome


class Worker:
    """One process, restarted whenever it dies."""

    def __init__(self, specs: Sequence[str], memory_gb: float | None) -> None:
        self._setup = {"specs": list(specs), "memory_gb": memory_gb}
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._unread = b""
        self._lock = threading.Lock()  # close() is called from another thread
        self._ready = self._closed = False
        self._folder = os.getcwd()  # base of relative paths, even if the trainer changes its working folder
        self._start()

    def call(
        self, function: int, arguments: dict[str, list[Any]], num_rows: int, seconds: float, state: TrainerState
    ) -> tuple[Outcome, CallLog]:
        """Return (outcome, log) of one call; an exception of the function is a fault in the outcome."""
        self._await_start()
        request = {"function": function, "rows": num_rows, "state": asdict(state), **_packed(arguments)}
        reply = self._ask(request, seconds)
        if isinstance(reply, Fault):
            self.kill()
            return reply, CallLog()
        if "fault" in reply:
            fault = Fault(*reply["fault"])
            if fault.kind == "memory":
                self.kill()  # free its memory
            return fault, CallLog()
        assert len(reply["scores"]) == num_rows, (len(reply["scores"]), num_rows)
        scores = [Fault(*score) if isinstance(score, list) else score for score in reply["scores"]]
        return scores, CallLog(reply["extra"], reply["metrics"])

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self.kill()

    def kill(self) -> None:
        """Kill the worker and everything it started."""
        with self._lock:
            process, self._process, self._ready = self._process, None, False
            if process is None:
                return
            kill_group(process)
            process.wait()
            if self._socket is not None:
                self._socket.close()
            self._socket, self._unread = None, b""

    def _start(self) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError(CLOSED)
            self._socket, child_socket = socket.socketpair()
            with child_socket:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", START, json.dumps(search_path()), str(child_socket.fileno())],
                    cwd=self._folder,
                    stdin=subprocess.DEVNULL,
                    pass_fds=[child_socket.fileno()],
                    start_new_session=True,  # the trainer handles Ctrl-C
                )
            self._unread, self._ready = b"", False

    def _await_start(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            self.kill()  # it ended between two calls, so no row is to blame
        if self._process is None:
            self._start()
        if self._ready:
            return
        reply = self._ask(self._setup, START_SECONDS)
        if isinstance(reply, Fault):
            self.kill()
            raise UserError(
                f"reward_funcs={self._setup['specs']}: a worker {reply.what} while loading the functions; run with "
                "--reward-num-workers 0 to see why"
            )
        if "error" in reply:
            self.kill()
            raise UserError(f"{reply['error']} (in a worker)")
        self._ready = True

    def _ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any] | Fault:
        """Send a line and read the reply; return a fault on a timeout or if the process is dead."""
        process, connection = self._process, self._socket
        if process is None or connection is None:
            return _death(None)
        before = process_seconds(process.pid)
        limit = WorkLimit(seconds, lambda: process_seconds(process.pid) - before)
        try:
            connection.settimeout(START_SECONDS)
            connection.sendall(json.dumps(request).encode() + b"\n")
            while b"\n" not in self._unread:
                left = limit.left()
                if left <= 0:
                    return Fault("timeout", f"did not return within {seconds:g} s", "")
                readable, _, _ = select.select([connection], [], [], min(left, POLL_SECONDS))
                received = connection.recv(CHUNK) if readable else None
                if received == b"" or (received is None and process.poll() is not None):
                    return _death(process)
                self._unread += received or b""
        except TimeoutError:
            return Fault("timeout", f"did not return within {seconds:g} s", "")
        except (OSError, ValueError):  # the child closed its end, or kill() closed this one
            return _death(process)
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)


def search_path() -> list[str]:
    """Return strop's packages, then installed packages, then the user's folders.

    A user's data.py or random.py must not shadow the module of that name, which the trainer imported earlier.
    """
    installed = [entry for entry in sys.path if entry.startswith((sys.prefix, sys.base_prefix))]
    return list(dict.fromkeys([str(ROOT), *installed, *sys.path]))


def _death(process: subprocess.Popen[bytes] | None) -> Fault:
    status = None
    if process is not None:
        kill_group(process)  # it may have closed its socket and still be running
        status = process.wait()
    if status is not None and status < 0:
        how = f"lost its process (killed by {signal.Signals(-status).name})"
        return Fault("died", how, "; find the crash, or check whether the machine ran out of memory")
    return Fault("died", f"ended its process (exit status {status})", "; a reward function must return")


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process group leader and everything it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is empty
        os.killpg(process.pid, signal.SIGKILL)


def shards(prompts: Sequence[Prompt], num_workers: int) -> list[tuple[int, int]]:
    """Return (start, end) of at most num_workers shards of similar size that contain whole groups.

    A group is the consecutive rows of one prompt.
    """
    starts = [i for i, prompt in enumerate(prompts) if i == 0 or prompt.source != prompts[i - 1].source]
    if not starts:
        return []
    size = math.ceil(len(starts) / num_workers)
    edges = [*starts[::size], len(prompts)]
    return list(zip(edges[:-1], edges[1:], strict=True))


def _packed(arguments: dict[str, list[Any]]) -> dict[str, Any]:
    if all(name == "completion_ids" or _is_plain(values) for name, values in arguments.items()):
        return {"arguments": arguments}
    return {"pickled": base64.b64encode(pickle.dumps(arguments)).decode()}


def _is_plain(value: Any) -> bool:
    """Return whether a round trip through JSON leaves the value unchanged."""
    if type(value) is list:
        return all(_is_plain(item) for item in value)
    if type(value) is dict:
        return all(type(key) is str and _is_plain(item) for key, item in value.items())
    return value is None or type(value) in (str, int, float, bool)
