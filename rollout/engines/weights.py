"""Send weights to the servers of a pool, with retries: drain and pause, push, resume.

After any failure a server either serves the new version, or is out and stays paused until a complete push to it
succeeds. All of this runs in the thread that owns the weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from data.errors import UserError
from rollout.engine import POLL_S
from rollout.servers.client import RefusedError, ServerError
from rollout.servers.loop import Loop
from rollout.servers.pool import Member, Pool
from rollout.sync.base import SyncError, SyncReport, WeightSync

MAX_PUSHES = 3  # per version, each without the servers that failed before
RETRY_S = 60.0  # retry for this long if only the connection fails (proxy restart, 503)
PAUSE_S = (0.5, 8.0)  # first and longest pause between attempts
MARGIN = 0.1  # fraction of a shared GPU that must stay free if the server stays awake
GB = 1e9


class Weights:
    """Sends weights to the servers and tracks which servers are asleep."""

    def __init__(self, pool: Pool, loop: Loop, sync: WeightSync, check: Callable[[], None]) -> None:
        self.pool, self.loop, self.sync = pool, loop, sync
        self.check = check  # raises if the pool's watch has ended
        self.asleep: set[int] = set()  # member indices
        self.report: SyncReport | None = None  # report of the last push

    def give_all(self, members: list[Member], version: int) -> None:
        """Push until at least one server serves this version; servers that fail are marked as out.

        If a worker fails, there are MAX_PUSHES attempts. If only the connection fails, attempts continue for RETRY_S
        with growing pauses. Every attempt repeats all steps: pause, wake, push, mark, resume. Pausing, waking, marking
        and resuming are idempotent. Joining and receiving weights are not, so those requests are never resent: the next
        push sets up a new store with a new name and replaces every weight, so an interrupted push leaves no trace.
        """
        started, pause, pushes = time.monotonic(), PAUSE_S[0], 0
        while True:
            members, reason, may_pass = self.give(members, version)
            if not members and any(m.state == "ready" for m in self.pool.members):
                return
            pushes += 1
            seconds = time.monotonic() - started
            if pushes >= MAX_PUSHES and (not may_pass or seconds > RETRY_S):
                raise UserError(
                    f"sync: no server accepted weight version {version} after {pushes} attempts in {seconds:.0f} s "
                    f"(last error: {reason}); see the server logs"
                )
            if not members:
                time.sleep(pause if may_pass else 0.0)
                pause = min(2 * pause, PAUSE_S[1])
                members = self._wait_for_one()

    def give(self, members: list[Member], version: int) -> tuple[list[Member], str, bool]:
        """Make one attempt: drain and pause, push, resume. A server is resumed only after a successful push.

        Return the servers that stay paused because the push failed on others, the reason, and whether a retry may
        succeed because no worker failed.
        """
        stopped = [m for m in members if (self.sync.needs_pause or m.state != "ready") and m.state != "updating"]
        failed = self.on_all(self.pool.empty, stopped)
        members = [m for m in members if m not in failed]
        if any(m.index in self.asleep for m in members):
            # Allocate the weights now and the KV cache after the push: during the push both may not fit.
            torch.cuda.empty_cache()
            asleep = [m for m in members if m.index in self.asleep]
            failed |= self.on_all(lambda m: m.server.wake("weights"), asleep)
            members = [m for m in members if m not in failed]
        if not members:
            return [], *describe_failures(failed)
        try:
            self.report = self.sync.push([m.server for m in members], version)
        except SyncError as error:
            for i, reason in error.failed.items():
                self.loop.run(self.pool.fail(members[i], reason))
            return [m for i, m in enumerate(members) if i not in error.failed], str(error), error.may_pass
        return [], *describe_failures(failed | self.open(members, version))

    def open(self, members: list[Member], version: int) -> dict[Member, Exception]:
        """Resume requests to these servers; return the servers that failed, with the error."""
        asleep = [m for m in members if m.index in self.asleep]
        failed = self.on_all(lambda m: m.server.wake("kv_cache"), asleep)
        self.asleep -= {m.index for m in asleep if m not in failed}
        name = self.sync.model_name(version)
        members = [m for m in members if m not in failed]
        return failed | self.on_all(lambda m: self.pool.refill(m, version, name), members)

    def _wait_for_one(self) -> list[Member]:
        """Wait for restarted servers that need weights; raise UserError if none will come."""
        deadline = time.monotonic() + self.pool.patience
        while True:
            self.check()
            members = [member for member in self.pool.members if member.needs_weights]
            if members:
                return members
            if time.monotonic() > deadline or all(member.lost for member in self.pool.members):
                reasons = "; ".join(f"{m.server.url}: {m.reason}" for m in self.pool.members)
                raise UserError(f"vllm: no server is left ({reasons}); see the server logs")
            time.sleep(POLL_S)

    def sleep(self, members: list[Member]) -> None:
        failed = self.on_all(self.pool.empty, members)
        members = [m for m in members if m not in failed]
        # Level 2 drops the weights, which the next push replaces. With adapters the base is never sent, so level 1.
        level = 2 if self.sync.needs_pause else 1
        failed = self.on_all(lambda m: m.server.sleep(level), members)
        self.asleep |= {m.index for m in members if m not in failed}

    def on_all(self, work: Callable[[Member], Any], members: Sequence[Member]) -> dict[Member, Exception]:
        """Run `work` on several servers in parallel; mark failing servers as out and return them with the error."""
        futures = [(member, self.loop.start(work(member))) for member in members]
        failed: dict[Member, Exception] = {}
        for member, future in futures:
            try:
                future.result()
            except (ServerError, RefusedError) as error:
                failed[member] = error
                self.loop.run(self.pool.fail(member, str(error)))
        return failed


class ColocatedMemory:
    """Decides whether a server on the trainer's GPU can stay awake during training.

    Used while the server is awake, after the second training step: then the memory of other processes and the trainer's
    peak are measured, not estimated. A later step with a higher peak changes the answer.
    """

    def __init__(self, device: torch.device, log: Callable[[str], None]) -> None:
        self.device, self.log = device, log
        self.peak = 0  # peak bytes reserved by the trainer's allocator
        self.fits: bool | None = None  # the last answer

    def has_room(self) -> bool:
        self.peak = max(self.peak, torch.cuda.max_memory_reserved(self.device))
        free, total = torch.cuda.mem_get_info(self.device)
        others = total - free - torch.cuda.memory_reserved(self.device)
        fits = self.peak + others <= (1 - MARGIN) * total
        if fits != self.fits:
            self.fits = fits
            self.log(
                f"vLLM: the server {'stays awake' if fits else 'sleeps'} during training: training peak "
                f"{self.peak / GB:.1f} GB, server and other processes {others / GB:.1f} GB, usable "
                f"{(1 - MARGIN) * total / GB:.1f} GB"
            )
        return fits


def describe_failures(failed: dict[Member, Exception]) -> tuple[str, bool]:
    """Return the errors in one line, and whether a retry may succeed: a rejected request would be rejected again."""
    return "; ".join(map(str, failed.values())), not any(isinstance(error, RefusedError) for error in failed.values())
