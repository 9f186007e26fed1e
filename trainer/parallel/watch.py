"""Ranks that do not come: each says where it is now and then, and one that has waited too long says where all are.

trainer/parallel/comm.py tells a Watch when a collective or a pass begins and ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainer.parallel.ranks import rank, world_size

HUNG = 75  # exit code of a process that has waited too long: a launcher may start it again
BEAT_S = 1.0  # how often a rank says where it is


def record_flight() -> None:
    """Have torch keep the last collectives of NCCL, and write them down when one does not end; what is set stays."""
    if not {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"} & os.environ.keys():
        os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    if not {"TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"} & os.environ.keys():
        start = f"strop-nccl-{os.environ['MASTER_PORT']}-rank-"  # torch adds the rank
        os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str(Path(tempfile.gettempdir()) / start)


def dump_flight() -> None:
    """Write down NCCL's last collectives, as JSON, and say where: this process ends before torch would do it."""
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
    """Where a rank is, or was last."""

    name: str
    since: float | None = None  # when it was entered; None: it was left
    is_pass: bool = False  # not a collective of ours


class Watch:
    """Where this rank is, told to the others now and then; a thread, as the one that waits cannot look at a clock."""

    def __init__(self, timeout_s: float) -> None:
        from torch.distributed import PrefixStore
        from torch.distributed.distributed_c10d import _get_default_store

        self.timeout_s = timeout_s
        self.store = PrefixStore("strop-watch", _get_default_store())
        self.commands = 0  # sent or received
        self.rank0_alone = False  # the other ranks wait for commands
        self.number = 0  # of the collective this rank is in, or was in last
        self.passes = 0  # begun since then
        self.at = Place("start")
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dist-watch", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        around, self.number, self.passes = self.at, self.number + 1, 0
        self.at = Place(name, time.monotonic())
        try:
            yield
        finally:
            self.at = around if around.is_pass else Place(name)  # a pass goes on after a collective within it

    @contextlib.contextmanager
    def passing(self, name: str) -> Iterator[None]:
        self.passes += 1
        self.at = Place(name, time.monotonic(), is_pass=True)
        try:
            yield
        finally:
            self.at = Place(name)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=2 * BEAT_S)

    def _run(self) -> None:
        while not self._stopped.wait(BEAT_S):
            with contextlib.suppress(Exception):  # the store goes with rank 0
                self.store.set(str(rank()), json.dumps(self._where()))
            at = self.at
            late = at.since is not None and time.monotonic() - at.since > self.timeout_s
            if late and (not at.is_pass or self._is_behind()):
                log(self.report())
                dump_flight()
                os._exit(HUNG)

    def _where(self) -> dict[str, Any]:
        at, own = self.at, {"number": self.number, "passes": self.passes}
        waited = None if at.since is None else time.monotonic() - at.since
        return {**own, "name": at.name, "waited_s": waited, "at": time.time()}

    def _is_behind(self) -> bool:
        """Whether some rank has not begun the pass that this one is in: no computing, however long, is waited for.

        News must be fresh, or have ceased: one that had no time to say so lately may have begun since.
        """
        try:
            others = [str(other) for other in range(world_size()) if other != rank()]
            told = [json.loads(self.store.get(key)) for key in others] if self.store.check(others) else None
        except Exception:  # the store went with rank 0
            return True
        if told is None:
            return True
        ages = [time.time() - x["at"] for x in told]
        known = [age < 3 * BEAT_S or age > self.timeout_s for age in ages]
        lower = [(x["number"], x["passes"]) < (self.number, self.passes) for x in told]
        return any(a and b for a, b in zip(known, lower, strict=True))

    def report(self) -> str:
        """Where all ranks are, as far as they have said."""
        places = [f"rank {rank()}: has waited {self.timeout_s:g} s in {self.at.name!r} (collective {self.number})"]
        for other in range(world_size()):
            if other != rank():
                places.append(f"rank {other} {self._last_report(other)}")
        return "; ".join(places) + "; this process ends, start all again with --resume"

    def _last_report(self, other: int) -> str:
        try:
            if not self.store.check([str(other)]):
                return "never said where it is"
            found = json.loads(self.store.get(str(other)))
        except Exception:  # the store is gone with the process that kept it
            return "cannot be asked"
        place = f"{found['name']!r} (collective {found['number']})"
        if time.time() - found["at"] > 5 * BEAT_S + 1:
            return f"was last heard of {time.time() - found['at']:.0f} s ago, at {place}"
        if found["waited_s"] is None:
            return f"is busy elsewhere, its last collective was {place}"
        return f"has waited {found['waited_s']:.0f} s in {place}"


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
