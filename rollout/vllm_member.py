"""What the pool keeps about one server, and about one completion on its way. Plain data, no connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from rollout.engine import Sampling
from rollout.vllm_command import BASE
from rollout.vllm_replies import Segment
from rollout.vllm_server import VllmServer

NEEDS_WEIGHTS = "needs weights"


@dataclass(eq=False)
class Member:
    """A server and what the pool knows about it."""

    index: int
    server: VllmServer
    state: Literal["ready", "updating", "out"] = "out"
    reason: str = NEEDS_WEIGHTS  # why it is out
    version: int | None = None  # of the weights it serves
    model: str = BASE  # what requests ask for: the base or an adapter
    in_flight: int = 0
    tasks: set[asyncio.Task[Segment]] = field(default_factory=set)
    changes: int = 0  # counts empty, refill and restart: an answer from before one of them says nothing
    strikes: int = 0  # failures since the last good reply
    restarts: int = 0  # since the last good reply
    not_before: float = 0.0  # time at which it may be tried again
    lost: bool = False  # given up on
    last_reply: float = 0.0

    @property
    def needs_weights(self) -> bool:
        return self.state == "out" and self.reason == NEEDS_WEIGHTS


@dataclass(frozen=True, slots=True)
class Sampled:
    """A completion before it is decoded."""

    ids: list[int]
    logps: list[float]
    finish_reason: Literal["stop", "length"]
    versions: list[tuple[int, int]]  # (weight version, number of tokens it made), in order
    resumes: int  # how often it was interrupted by an update of the weights and went on


@dataclass(slots=True)
class Progress:
    """One completion on its way."""

    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    resumes: int = 0
    failures: int = 0

    def add(self, segment: Segment, version: int) -> None:
        if not segment.ids:
            return
        self.ids += segment.ids
        self.logps += segment.logps
        if self.versions and self.versions[-1][0] == version:
            self.versions[-1] = (version, self.versions[-1][1] + len(segment.ids))
        else:
            self.versions.append((version, len(segment.ids)))


def finish(done: Progress, reason: Literal["stop", "length"], length: int | None = None) -> Sampled:
    """Cut to `length` tokens, where a stop string was found only after both halves were joined."""
    if length is None:
        return Sampled(done.ids, done.logps, reason, done.versions, done.resumes)
    versions, left = [], length
    for version, count in done.versions:
        if left > 0:
            versions.append((version, min(count, left)))
        left -= count
    return Sampled(done.ids[:length], done.logps[:length], reason, versions, done.resumes)


def stop_end(ids: list[int], sampling: Sampling, decode: Callable[[list[int]], str] | None) -> int | None:
    """Number of tokens up to the one that completes a stop string; None: there is none."""
    if decode is None or not any(text in decode(ids) for text in sampling.stop):
        return None
    low, high = 1, len(ids)  # a longer prefix holds every string that a shorter one holds
    while low < high:
        middle = (low + high) // 2
        if any(text in decode(ids[:middle]) for text in sampling.stop):
            high = middle
        else:
            low = middle + 1
    return high
