"""Hang detection: each rank publishes where it is, and one that has waited too long logs where all ranks are and exits.

trainer/parallel/comm.py calls Watch at the start and end of each collective and pass.
"""

from __future__ import annotations

import contextlib
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

HUNG = 75  # exit code of a process that has waited too long: a launcher may restart it
BEAT_S = 1.0  # how often a rank publishes where it is


def record_flight() -> None:
    """Turn on torch's flight recorder for NCCL, dumped on a timeout; environment variables already set win."""
    if not {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"} & os.environ.keys():
        os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    if not {"TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"} & os.environ.keys():
        start = f"strop-nccl-{os.environ['MASTER_PORT']}-rank-"  # torch adds the rank
        os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str(Path(tempfile.gettempdir()) / start)


def dump_flight() -> None:
    """Dump NCCL's last collectives as JSON, since this process exits before torch would do it."""
    import torch.distributed as dist

    if dist.get_backend() != "nccl":
        return
    start = os.environ.get("TORCH_FR_DUMP_TEMP_FILE") or os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"]
    path = Path(f"{start}{rank()}.json")
    try:
        path.write_bytes(torch._C._distributed_c10d._dump_nccl_trace_json())
        log(f"rank {rank()}: its last NCCL collectives are in {path}")
    except Exception as error:  # whatever it is, this process is about to end
        log(f"rank {rank()}: its last NCCL collectives could not be written to {path} ({error})")


class Place(NamedTuple):
    """The collective or pass that a rank is in, or was in last."""

    name: str
    number: int = 0  # collectives entered so far
    since: float | None = None  # when the rank entered it; None once it has left
    is_pass: bool = False  # a forward and backward pass, not a collective


@dataclass
class OnDevice:
    """A collective that was launched: it runs between two events of the stream, behind all that was launched before."""

    place: Place
    begin: Any = field(default_factory=lambda: torch.cuda.current_stream().record_event())
    end: Any = None
    since: float | None = None  # when `begin` was first seen to have passed


class Watch:
    """Publishes where this rank is; runs in a thread, because the main thread blocks in the collective.

    CUDA collectives return before they have run: the thread times them by events, so that nobody waits for the device.
    torch's own watchdog ends a process too, 30 s later (comm.SPARE_S), but does not say which rank was missing, and
    there is none for gloo.
    """

    def __init__(self, timeout_s: float, store: Any, *, on_cuda: bool) -> None:
        self.timeout_s, self.store, self.on_cuda = timeout_s, store, on_cuda
        self.commands = 0  # sent or received
        self.rank0_alone = False  # the other ranks wait for commands
        self.number = 0  # of the collective this rank is in, or was in last
        self.passes = 0  # started since then
        self.at = Place("start")
        self.launched: deque[OnDevice] = deque()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dist-watch", daemon=True)

    @contextlib.contextmanager
    def inside(self, name: str, *, timed: bool = True) -> Iterator[None]:
        """`timed`: on CUDA the collective itself has the time limit, not only its launch."""
        around, self.number, self.passes = self.at, self.number + 1, 0
        self.at = Place(name, self.number, time.monotonic())
        launched = OnDevice(self.at) if self.on_cuda and timed else None
        try:
            yield
            if launched is not None:
                launched.end = torch.cuda.current_stream().record_event()
                self.launched.append(launched)
        finally:
            # A pass continues after a collective within it.
            self.at = around if around.is_pass else Place(name, self.number)

    @contextlib.contextmanager
    def passing(self, name: str) -> Iterator[None]:
        self.passes += 1
        self.at = Place(name, self.number, time.monotonic(), is_pass=True)
        try:
            yield
        finally:
            self.at = Place(name, self.number)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=2 * BEAT_S)

    def place(self) -> Place:
        """Where this rank is: in the oldest collective that the device has begun and not ended, else by `at`."""
        while self.launched and self.launched[0].end.query():
            self.launched.popleft()
        if self.launched:
            first = self.launched[0]
            if first.since is None and first.begin.query():
                first.since = time.monotonic()
            if first.since is not None:
                return first.place._replace(since=first.since)
        return self.at

    def _run(self) -> None:
        while not self._stopped.wait(BEAT_S):
            at = self.place()
            with contextlib.suppress(Exception):  # the store ends with rank 0
                self.store.set(str(rank()), json.dumps(self._where(at)))
            late = at.since is not None and time.monotonic() - at.since > self.timeout_s
            if late and (not at.is_pass or self._is_behind()):
                log(self.report(at))
                dump_flight()
                os._exit(HUNG)

    def _where(self, at: Place) -> dict[str, Any]:
        waited = None if at.since is None else time.monotonic() - at.since
        own = {"number": self.number, "passes": self.passes, "at": time.time()}
        return {**own, "name": at.name, "collective": at.number, "waited_s": waited}

    def _is_behind(self) -> bool:
        """Whether some rank has not started the pass that this one is in; a long computation alone is no hang.

        Only ranks whose last report is fresh, or older than the timeout, count: any other may have started since.
        """
        try:
            others = [str(other) for other in range(world_size()) if other != rank()]
            reports = [json.loads(self.store.get(key)) for key in others] if self.store.check(others) else None
        except Exception:  # the store ended with rank 0
            return True
        if reports is None:
            return True
        ages = [time.time() - x["at"] for x in reports]
        known = [age < 3 * BEAT_S or age > self.timeout_s for age in ages]
        lower = [(x["number"], x["passes"]) < (self.number, self.passes) for x in reports]
        return any(a and b for a, b in zip(known, lower, strict=True))

    def report(self, at: Place) -> str:
        """Where all ranks are, by their last reports."""
        places = [f"rank {rank()}: has waited {self.timeout_s:g} s in {at.name!r} (collective {at.number})"]
        for other in range(world_size()):
            if other != rank():
                places.append(f"rank {other} {self._last_report(other)}")
        return "; ".join(places) + "; this process ends, start all again with --resume"

    def _last_report(self, other: int) -> str:
        try:
            if not self.store.check([str(other)]):
                return "never said where it is"
            found = json.loads(self.store.get(str(other)))
        except Exception:  # the store ended with the process that held it
            return "cannot be asked"
        place = f"{found['name']!r} (collective {found['collective']})"
        if time.time() - found["at"] > 5 * BEAT_S + 1:
            return f"was last heard of {time.time() - found['at']:.0f} s ago, at {place}"
        if found["waited_s"] is None:
            return f"is busy elsewhere, its last collective was {place}"
        return f"has waited {found['waited_s']:.0f} s in {place}"


def log(text: str) -> None:
    """One line on stderr."""
    print(text, file=sys.stderr, flush=True)
