"""Weights for the servers of a pool: ready -> emptied and paused -> new weights -> resumed.

Everything that a server can do wrong on the way ends in one of two states: it serves the new version, or it is out and
stays paused until a whole push to it has gone through. Runs in the thread that owns the weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rollout.loop import Loop
from rollout.sync.base import SyncError, SyncReport, WeightSync
from rollout.vllm_member import Member
from rollout.vllm_pool import Pool
from rollout.vllm_server import RefusedError, ServerError

MAX_PUSHES = 3  # of one version, each after a server that failed was left out
LOOK_S = 0.5


class Weights:
    """What the servers hold, and how they get something else."""

    def __init__(self, pool: Pool, loop: Loop, sync: WeightSync, check: Callable[[], None]) -> None:
        self.pool, self.loop, self.sync = pool, loop, sync
        self.check = check  # raises when nobody looks after the servers any more
        self.asleep: set[int] = set()  # members, by index
        self.report: SyncReport | None = None  # of the last push

    def give_all(self, members: list[Member], version: int) -> None:
        """Weights for these, until at least one server serves them; those that fail are put out on the way."""
        for _ in range(MAX_PUSHES):
            members, trouble = self.give(members, version)
            if not members and any(m.state == "ready" for m in self.pool.members):
                return
            members = members or self._wait_for_one()
        raise ValueError(
            f"sync: version {version} could not be brought to any server in {MAX_PUSHES} attempts ({trouble}); "
            "the servers' logs may say more"
        )

    def give(self, members: list[Member], version: int) -> tuple[list[Member], str]:
        """ready -> emptied and paused -> weights -> resumed; none is resumed before a push to it has gone through.

        Returns the servers that are stopped still, since the push failed because of others, and why.
        """
        stopped = [m for m in members if (self.sync.needs_pause or m.state != "ready") and m.state != "updating"]
        failed = self.on_all(self.pool.empty, stopped)
        members = [m for m in members if m not in failed]
        if any(m.index in self.asleep for m in members):
            # Memory for the weights before they are sent, and for keys and values after: both may not fit before.
            torch.cuda.empty_cache()
            failed = self.on_all(lambda m: m.server.wake("weights"), [m for m in members if m.index in self.asleep])
            members = [m for m in members if m not in failed]
        if not members:
            return [], "no server could be stopped to take them"
        try:
            self.report = self.sync.push([m.server for m in members], version)
        except SyncError as error:
            for i, reason in error.failed.items():
                self.loop.run(self.pool.fail(members[i], reason))
            return [m for i, m in enumerate(members) if i not in error.failed], str(error)
        self.open(members, version)
        return [], ""

    def open(self, members: list[Member], version: int) -> None:
        asleep = [m for m in members if m.index in self.asleep]
        failed = self.on_all(lambda m: m.server.wake("kv_cache"), asleep)
        self.asleep -= {m.index for m in asleep if m not in failed}
        name = self.sync.model_name(version)
        members = [m for m in members if m not in failed]
        self.on_all(lambda m: self.pool.refill(m, version, name), members)

    def _wait_for_one(self) -> list[Member]:
        """Servers that came back without weights; the pool says when there is no hope."""
        deadline = time.monotonic() + self.pool.patience
        while True:
            self.check()
            members = [member for member in self.pool.members if member.needs_weights]
            if members:
                return members
            if time.monotonic() > deadline or all(member.lost for member in self.pool.members):
                reasons = "; ".join(f"{m.server.url}: {m.reason}" for m in self.pool.members)
                raise ValueError(f"vllm: no server is left ({reasons}); their logs may say more")
            time.sleep(LOOK_S)

    def sleep(self, members: list[Member]) -> None:
        failed = self.on_all(self.pool.empty, members)
        members = [m for m in members if m not in failed]
        # Level 2 forgets the weights, which the next push sends anyway; an adapter's base is never sent: level 1.
        level = 2 if self.sync.needs_pause else 1
        failed = self.on_all(lambda m: m.server.sleep(level), members)
        self.asleep |= {m.index for m in members if m not in failed}

    def on_all(self, work: Callable[[Member], Any], members: Sequence[Member]) -> list[Member]:
        """Do the same on several servers at a time; those that failed are out."""
        futures = [(member, self.loop.start(work(member))) for member in members]
        failed = []
        for member, future in futures:
            try:
                future.result()
            except (ServerError, RefusedError) as error:
                failed.append(member)
                self.loop.run(self.pool.fail(member, str(error)))
        return failed
