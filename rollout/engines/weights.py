"""Send weights to the servers of a pool: drain and pause, push, resume; with retries.

Whatever goes wrong on the way, a server ends in one of two states: it serves the new version, or it is out and stays
paused until a complete push to it has succeeded. Runs in the thread that owns the weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from data.errors import UserError
from rollout.servers.client import RefusedError, ServerError
from rollout.servers.loop import Loop
from rollout.servers.pool import Member, Pool
from rollout.sync.base import SyncError, SyncReport, WeightSync

MAX_PUSHES = 3  # of one version, each without the servers that failed before
RETRY_S = 60.0  # how long to retry when only the connection fails (a proxy that restarts, a 503)
PAUSE_S = (0.5, 8.0)  # first and longest pause between attempts
LOOK_S = 0.5
MARGIN = 0.1  # of a shared GPU's memory that must stay free beside a server that does not sleep
GB = 1e9


class Weights:
    """Brings weights to the servers, and keeps track of sleeping ones."""

    def __init__(self, pool: Pool, loop: Loop, sync: WeightSync, check: Callable[[], None]) -> None:
        self.pool, self.loop, self.sync = pool, loop, sync
        self.check = check  # raises if the pool's watch has ended
        self.asleep: set[int] = set()  # members, by index
        self.report: SyncReport | None = None  # of the last push

    def give_all(self, members: list[Member], version: int) -> None:
        """Push until at least one server serves this version; servers that fail are put out on the way.

        If a worker fails, MAX_PUSHES attempts are made; if only the connection fails, attempts continue for RETRY_S,
        with growing pauses. An attempt always repeats everything: pause, wake, push, mark, resume. Pausing, waking,
        marking and resuming are idempotent. Joining and receiving weights are not, so those requests are never resent:
        the next push calls the workers to a new store with a new name, whatever became of the last call, and replaces
        every weight, so nothing is left of an interrupted push.
        """
        begun, pause, pushes = time.monotonic(), PAUSE_S[0], 0
        while True:
            members, trouble, may_pass = self.give(members, version)
            if not members and any(m.state == "ready" for m in self.pool.members):
                return
            pushes += 1
            seconds = time.monotonic() - begun
            if pushes >= MAX_PUSHES and (not may_pass or seconds > RETRY_S):
                raise UserError(
                    f"sync: version {version} could not be sent to any server in {pushes} attempts within "
                    f"{seconds:.0f} s (last: {trouble}); the servers' logs may say more"
                )
            if not members:
                time.sleep(pause if may_pass else 0.0)
                pause = min(2 * pause, PAUSE_S[1])
                members = self._wait_for_one()

    def give(self, members: list[Member], version: int) -> tuple[list[Member], str, bool]:
        """One attempt: drain and pause, push, resume. No server is resumed before a push to it has succeeded.

        Returns the servers that are still paused because the push failed on others, the reason, and whether another
        attempt may work, that is, no worker failed.
        """
        stopped = [m for m in members if (self.sync.needs_pause or m.state != "ready") and m.state != "updating"]
        trouble = self.on_all(self.pool.empty, stopped)
        members = [m for m in members if m not in trouble]
        if any(m.index in self.asleep for m in members):
            # Memory for the weights before they are sent, for the KV cache after: before, both may not fit.
            torch.cuda.empty_cache()
            failed = self.on_all(lambda m: m.server.wake("weights"), [m for m in members if m.index in self.asleep])
            members = [m for m in members if m not in failed]
            trouble |= failed
        if not members:
            return [], *describe_failures(trouble)
        try:
            self.report = self.sync.push([m.server for m in members], version)
        except SyncError as error:
            for i, reason in error.failed.items():
                self.loop.run(self.pool.fail(members[i], reason))
            return [m for i, m in enumerate(members) if i not in error.failed], str(error), error.may_pass
        return [], *describe_failures(trouble | self.open(members, version))

    def open(self, members: list[Member], version: int) -> dict[Member, Exception]:
        """Let requests go to these servers; returns those that failed, with the error."""
        asleep = [m for m in members if m.index in self.asleep]
        failed = self.on_all(lambda m: m.server.wake("kv_cache"), asleep)
        self.asleep -= {m.index for m in asleep if m not in failed}
        name = self.sync.model_name(version)
        members = [m for m in members if m not in failed]
        return failed | self.on_all(lambda m: self.pool.refill(m, version, name), members)

    def _wait_for_one(self) -> list[Member]:
        """Wait for servers that came back without weights; ValueError if none will."""
        deadline = time.monotonic() + self.pool.patience
        while True:
            self.check()
            members = [member for member in self.pool.members if member.needs_weights]
            if members:
                return members
            if time.monotonic() > deadline or all(member.lost for member in self.pool.members):
                reasons = "; ".join(f"{m.server.url}: {m.reason}" for m in self.pool.members)
                raise UserError(f"vllm: no server is left ({reasons}); their logs may say more")
            time.sleep(LOOK_S)

    def sleep(self, members: list[Member]) -> None:
        failed = self.on_all(self.pool.empty, members)
        members = [m for m in members if m not in failed]
        # Level 2 drops the weights, which the next push sends anyway. With adapters the base is never sent: level 1.
        level = 2 if self.sync.needs_pause else 1
        failed = self.on_all(lambda m: m.server.sleep(level), members)
        self.asleep |= {m.index for m in members if m not in failed}

    def on_all(self, work: Callable[[Member], Any], members: Sequence[Member]) -> dict[Member, Exception]:
        """Run `work` on several servers at the same time; those that fail are put out and returned with the error."""
        futures = [(member, self.loop.start(work(member))) for member in members]
        failed: dict[Member, Exception] = {}
        for member, future in futures:
            try:
                future.result()
            except (ServerError, RefusedError) as error:
                failed[member] = error
                self.loop.run(self.pool.fail(member, str(error)))
        return failed


class Room:
    """Whether a server on the trainer's GPU can stay awake while the trainer works: do both fit?

    Asked while the server is awake, after the trainer's second step: then what other processes hold of the GPU, and the
    most that the trainer has ever held, are known and not guessed. A later step that needs more changes the answer.
    """

    def __init__(self, device: torch.device, log: Callable[[str], None]) -> None:
        self.device, self.log = device, log
        self.peak = 0  # bytes that the trainer's allocator held at most
        self.fits: bool | None = None  # the last answer

    def is_enough(self) -> bool:
        self.peak = max(self.peak, torch.cuda.max_memory_reserved(self.device))
        free, total = torch.cuda.mem_get_info(self.device)
        others = total - free - torch.cuda.memory_reserved(self.device)
        fits = self.peak + others <= (1 - MARGIN) * total
        if fits != self.fits:
            self.fits = fits
            what = "stays awake" if fits else "sleeps"
            self.log(
                f"vLLM: the server {what} while the trainer works: training needs {self.peak / GB:.1f} GB, the server "
                f"and others hold {others / GB:.1f} GB, and {(1 - MARGIN) * total / GB:.1f} GB are to be shared"
            )
        return fits


def describe_failures(failed: dict[Member, Exception]) -> tuple[str, bool]:
    """The errors in one line, and whether another attempt may work: a refusal would be repeated."""
    return "; ".join(map(str, failed.values())), not any(isinstance(error, RefusedError) for error in failed.values())
