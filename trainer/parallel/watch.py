"""Hang detection: each rank publishes its current collective; a rank that waits too long logs all of them and exits.

trainer/parallel/comm.py calls Watch at the start and end of each collective and pass.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainer.parallel.ranks import rank, world_size

HUNG = 75  # exit code of a rank that waited too long: a launcher may restart it
BEAT_S = 1.0  # seconds between reports of a rank
SILENT_BEATS = 5  # reports that may be late


def record_flight() -> None:
    """Turn on torch's flight recorder for NCCL, dumped on a timeout; existing environment variables win."""
    if not {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"} & os.environ.keys():
        os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    if not {"TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"} & os.environ.keys():
        prefix = f"strop-nccl-{os.environ['MASTER_PORT']}-rank-"  # torch adds the rank
        os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str(Path(tempfile.gettempdir()) / prefix)


def dump_flight() -> None:
    """Dump NCCL's last collectives as JSON, because this process exits before torch would dump them."""
    import torch.distributed as dist

    if dist.get_backend() != "nccl":
        return
    prefix = os.environ.get("TORCH_FR_DUMP_TEMP_FILE") or os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"]
    path = Path(f"{prefix}{rank()}.json")
    try:
        path.write_bytes(torch._C._distributed_c10d._dump_nccl_trace_json())
        log(f"rank {rank()}: wrote its last NCCL collectives to {path}")
    except Exception as error:  # any error: this process is about to exit
        log(f"rank {rank()}: could not write its last NCCL collectives to {path} ({error})")


class Activity(NamedTuple):
    """The current or last collective or pass of a rank."""

    name: str
    number: int = 0  # collectives entered so far
    since: float | None = None  # time of entry; None after exit
    is_pass: bool = False  # a forward and backward pass, not a collective


@dataclass
class OnDevice:
    """A launched collective: it runs between two events of the stream, after all work launched before it."""

    activity: Activity
    begin: Any = field(default_factory=lambda: torch.cuda.current_stream().record_event())
    end: Any = None
    since: float | None = None  # when the thread first saw that `begin` had passed


class Seen(NamedTuple):
    """A report of another rank. Its age is measured by this rank's clock: clocks of machines differ, and may jump."""

    report: str
    since: float  # when this rank first read it
    is_new: bool  # it replaced an earlier report, so it was fresh then


class Watch:
    """Publishes this rank's activity from a thread, because the main thread blocks in the collective.

    Another thread measures time and never calls the store: if the store's host disappears without closing its
    connections, every call blocks, for about 15 minutes with Linux's defaults, and torch's timeouts do not end it.

    CUDA collectives return before they run: the thread times them with events, without a host sync. torch's watchdog
    would also end the process, 30 s later (comm.SPARE_S), but it does not name the missing rank and does not support
    gloo.
    """

    def __init__(self, timeout_s: float, store: Any, *, on_cuda: bool) -> None:
        self.timeout_s, self.store, self.on_cuda = timeout_s, store, on_cuda
        self.commands = 0  # number of commands sent or received
        self.command_store: Any = None  # separate connection to the store: a wait for a command blocks it
        self.rank0_alone = False  # the other ranks wait for commands
        self.number = 0  # collectives entered so far
        self.passes = 0  # passes started since the last collective
        self.activity = Activity("start")
        self.launched: deque[OnDevice] = deque()
        self.seen: dict[int, Seen] = {}  # last report of each other rank
        self.now = self.activity  # result of current() at the last beat
        self.unanswered = 0  # beats since the store last answered
        self._stopped = threading.Event()
        loops = {"dist-watch": self._run, "dist-reports": self._exchange}
        self._threads = [threading.Thread(target=loop, name=name, daemon=True) for name, loop in loops.items()]

    @contextlib.contextmanager
    def inside(self, name: str, *, timed: bool = True) -> Iterator[None]:
        """Context manager: a collective. `timed`: on CUDA the time limit covers its run time, not only its launch."""
        outer, self.number, self.passes = self.activity, self.number + 1, 0
        self.activity = Activity(name, self.number, time.monotonic())
        launched = OnDevice(self.activity) if self.on_cuda and timed else None
        try:
            yield
            if launched is not None:
                launched.end = torch.cuda.current_stream().record_event()
                self.launched.append(launched)
        finally:
            # A pass continues after a collective within it.
            self.activity = outer if outer.is_pass else Activity(name, self.number)

    @contextlib.contextmanager
    def passing(self, name: str) -> Iterator[None]:
        self.passes += 1
        self.activity = Activity(name, self.number, time.monotonic(), is_pass=True)
        try:
            yield
        finally:
            self.activity = Activity(name, self.number)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(timeout=2 * BEAT_S)

    def current(self) -> Activity:
        """Return the oldest collective that the device has started but not finished, otherwise the host's activity."""
        while self.launched and self.launched[0].end.query():
            self.launched.popleft()
        if self.launched:
            first = self.launched[0]
            if first.since is None and first.begin.query():
                first.since = time.monotonic()
            if first.since is not None:
                return first.activity._replace(since=first.since)
        return self.activity

    def _run(self) -> None:
        while not self._stopped.wait(BEAT_S):
            activity = self.now = self.current()
            waited = 0.0 if activity.since is None else time.monotonic() - activity.since
            late = waited > self.timeout_s and (not activity.is_pass or self._is_behind())
            self.unanswered += 1
            if late or self.unanswered > max(self.timeout_s / BEAT_S, SILENT_BEATS):
                log(self.report(activity))
                dump_flight()
                os._exit(HUNG)

    def _exchange(self) -> None:
        """Publish this rank's report and, if the rank waits, read the other ranks' reports."""
        for beat in itertools.count():
            if self._stopped.wait(BEAT_S):
                return
            name, number, since, _ = self.now
            waited = None if since is None else time.monotonic() - since
            status = {"number": self.number, "passes": self.passes, "beat": beat}
            status |= {"name": name, "collective": number, "waited_s": waited}
            with contextlib.suppress(Exception):  # the store ends with rank 0
                self.store.set(str(rank()), json.dumps(status))
                if self.store.check([str(rank())]):  # set() does not wait for an answer
                    self.unanswered = 0
                if waited is not None and waited > self.timeout_s / 2:
                    self._observe()

    def _observe(self) -> None:
        """Read the reports of the other ranks."""
        for other in range(world_size()):
            if other == rank() or not self.store.check([str(other)]):
                continue
            report, seen = self.store.get(str(other)), self.seen.get(other)
            if seen is None or seen.report != report:
                self.seen[other] = Seen(report, time.monotonic(), seen is not None)

    def _is_behind(self) -> bool:
        """Return whether another rank has not started this rank's pass; a long computation alone is not a hang.

        A rank counts only if its last report is fresh or half the timeout old: otherwise it may have started since.
        """
        for other in range(world_size()):
            if other == rank():
                continue
            if other not in self.seen:
                return True
            seen = self.seen[other]
            status, age = json.loads(seen.report), time.monotonic() - seen.since
            known = (seen.is_new and age < 3 * BEAT_S) or age > max(self.timeout_s / 2 - BEAT_S, 3 * BEAT_S)
            if known and (status["number"], status["passes"]) < (self.number, self.passes):
                return True
        return False

    def report(self, activity: Activity) -> str:
        """Describe the activity of all ranks, from their last reports."""
        waits = "is busy, its last collective was" if activity.since is None else f"has waited {self.timeout_s:g} s in"
        ranks = [f"rank {rank()}: {waits} {activity.name!r} (collective {activity.number})"]
        if self.unanswered > SILENT_BEATS:
            silent = f"MASTER_ADDR={os.environ['MASTER_ADDR']} has not answered for {self.unanswered * BEAT_S:.0f} s"
            ranks.append(f"{silent}: rank 0's host is down or unreachable")
        else:
            others = (other for other in range(world_size()) if other != rank())
            ranks += [f"rank {other} {self._last_report(other)}" for other in others]
        return "; ".join(ranks) + "; exiting; restart all ranks with --resume"

    def _last_report(self, other: int) -> str:
        if other not in self.seen:
            return "has not reported"
        seen = self.seen[other]
        status, age = json.loads(seen.report), time.monotonic() - seen.since
        collective = f"{status['name']!r} (collective {status['collective']})"
        if age > SILENT_BEATS * BEAT_S + 1:
            return f"has not reported for {age:.0f} s, last in {collective}"
        if status["waited_s"] is None:
            return f"is busy elsewhere, its last collective was {collective}"
        return f"has waited {status['waited_s']:.0f} s in {collective}"


def log(text: str) -> None:
    """Print a line to stderr."""
    print(text, file=sys.stderr, flush=True)
