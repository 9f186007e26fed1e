"""Route requests over several vLLM servers, retry failures, track weight versions and restart dead servers.

    pool = Pool([VllmServer(url) for url in urls], max_in_flight=256)
    await pool.connect()                      # every server is "out" until it has weights
    await pool.empty(member)                  # drain and pause, so that its weights may change
    await pool.refill(member, version=12)     # send requests to it again
    sampled = await pool.generate(Request(prompt_ids=[5, 6, 7], seed=11), Sampling(max_tokens=8, stop_ids=(2,)))
    -> Sampled(ids=[9, 8, 2], logps=[..], finish_reason="stop", versions=[(11, 1), (12, 2)], resumes=1)

A member is "ready" (takes requests), "updating" (drained while its weights change) or "out" (failed, or without
weights). A request goes to a ready member. If that member is drained or fails, another member continues the completion,
and `versions` records which weights sampled which tokens. Everything runs in one asyncio loop, so state changes only at
awaits.

The watch checks every few seconds, and immediately after a bad reply, that the workers of every server respond: /health
alone returns 200 while the engine hangs. Dead and hung servers are put out. The watch restarts servers that the run
started and waits for others. A server that was restarted by any process, or is found paused, stays "out: needs weights"
until the thread that owns the weights has sent them (engines/vllm.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from rollout.engine import Request, Sampling
from rollout.servers.client import (
    RefusedError,
    Segment,
    ServerError,
    ServerStatus,
    VllmServer,
    allow_connections,
    check_sampling,
)
from rollout.servers.command import BASE
from rollout.servers.lease import RENEW_S, LeaseError
from rollout.servers.loop import together

NEEDS_WEIGHTS = "needs weights"
QUIET_S = 0.25  # no reply for this long after a pause: the remaining requests are stuck in the server's queue
EMPTY_S = 10.0  # maximum time to drain a server
STICKY = 4096  # number of prompts whose server is remembered
SLACK = 8  # extra requests that a prompt's previous server may have, compared with the least busy server
PATIENCE_S = 900.0  # a dead server may need minutes to restart
GOLDEN = 0x9E3779B97F4A7C15
STRIKES = 3  # consecutive bad replies, with every check in between passed, after which a server counts as broken
RESTARTS = 5  # consecutive restarts without a good reply, after which a server is lost
LONGEST_WAIT_S = 60.0


@dataclass(eq=False)
class Member:
    """A server and its state in the pool."""

    index: int
    server: VllmServer
    state: Literal["ready", "updating", "out"] = "out"
    reason: str = NEEDS_WEIGHTS  # why it is out
    version: int | None = None  # weight version
    model: str = BASE  # the `model` field of requests: the base or an adapter
    in_flight: int = 0
    tasks: set[asyncio.Task[Segment]] = field(default_factory=set)
    changes: int = 0  # number of state changes; a check that started before the last change is ignored
    strikes: int = 0  # failures since the last good reply
    restarts: int = 0  # restarts since the last good reply
    not_before: float = 0.0  # earliest time of the next check
    lost: bool = False  # no longer checked or restarted
    last_reply: float = 0.0

    @property
    def needs_weights(self) -> bool:
        return self.state == "out" and self.reason == NEEDS_WEIGHTS


@dataclass(slots=True)
class Sampled:
    """A completion before it is decoded; in progress until finish()."""

    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None
    versions: list[tuple[int, int]] = field(default_factory=list)  # (weight version, tokens it sampled), in order
    resumes: int = 0  # number of interruptions by a weight update
    failures: int = 0
    routes: list[np.ndarray] = field(default_factory=list)  # experts that each server reported, from the prompt on
    sets: list[np.ndarray] = field(default_factory=list)  # of each segment: rollout/sets.py

    def add(self, segment: Segment, version: int) -> None:
        if not segment.ids:
            return
        self.routes += [] if segment.routes is None else [segment.routes]
        self.sets += [] if segment.sets is None else [segment.sets]
        self.ids += segment.ids
        self.logps += segment.logps
        if self.versions and self.versions[-1][0] == version:
            self.versions[-1] = (version, self.versions[-1][1] + len(segment.ids))
        else:
            self.versions.append((version, len(segment.ids)))


def finish(done: Sampled, reason: Literal["stop", "length"], length: int | None = None) -> Sampled:
    """Return the result, truncated to `length` tokens if joining the segments completed a stop string."""
    versions, left = [], len(done.ids) if length is None else length
    for version, count in done.versions:
        if left > 0:
            versions.append((version, min(count, left)))
        left -= count
    return replace(done, ids=done.ids[:length], logps=done.logps[:length], finish_reason=reason, versions=versions)


def stop_end(ids: list[int], sampling: Sampling, decode: Callable[[list[int]], str] | None) -> int | None:
    """Return the number of tokens up to the token that completes a stop string; None if there is no stop string."""
    if decode is None or not any(text in decode(ids) for text in sampling.stop):
        return None
    low, high = 1, len(ids)  # binary search: a longer prefix contains every string of a shorter prefix
    while low < high:
        middle = (low + high) // 2
        if any(text in decode(ids[:middle]) for text in sampling.stop):
            high = middle
        else:
            low = middle + 1
    return high


# the pool --------------------------------------------------------------------------------------------------------


class Pool:
    def __init__(
        self,
        servers: Sequence[VllmServer],
        *,
        max_in_flight: int = 256,
        timeout: float = 240.0,
        retries: int = 3,
        log: Callable[[str], None] = print,
        restart: Callable[[int], VllmServer] | None = None,  # restarts server i (blocking); None: servers at --vllm.url
        seeded: bool = True,
        patience: float = PATIENCE_S,
    ) -> None:
        self.members = [Member(index=i, server=server) for i, server in enumerate(servers)]
        self.max_in_flight, self.timeout, self.retries = max_in_flight, timeout, retries
        self.log, self.restart, self.seeded, self.patience = log, restart, seeded, patience
        self.version: int | None = None  # current version; a server that comes back with another version needs weights
        self.counts: Counter[str] = Counter()
        self.alarm = asyncio.Event()  # wakes the watch
        self._waiting: deque[tuple[asyncio.Future[Member], int]] = deque()
        self._home: OrderedDict[int, int] = OrderedDict()  # prompt -> member with its prefix cache
        self._patience_timer: asyncio.TimerHandle | None = None
        self._failure: str | None = None  # error for new requests, while no server can become ready
        allow_connections(64 + 2 * max_in_flight * len(servers))

    async def connect(self) -> None:
        """Connect to every server; all must be usable at the start of a run."""
        await asyncio.gather(*(member.server.connect() for member in self.members))

    async def generate_all(
        self, requests: Sequence[Request], sampling: Sampling, *, training: bool = True, **options: Any
    ) -> list[Sampled]:
        """Return one result per request, in order; the first error cancels all other requests."""
        check_sampling(sampling, training=training)
        return await together([self._complete(request, sampling, **options) for request in requests])

    async def generate(self, request: Request, sampling: Sampling, *, training: bool = True, **options: Any) -> Sampled:
        """Return exactly one completion, even if servers fail in the meantime. See _complete for options."""
        check_sampling(sampling, training=training)
        return await self._complete(request, sampling, **options)

    async def empty(self, member: Member) -> None:
        """Drain and pause a server: when this returns, the server has no requests of this pool.

        The server returns the tokens sampled so far. A request that arrives after the pause stays in its queue until
        the server is resumed, so once replies stop, these requests are cancelled and sent to other servers.
        """
        self._set(member, "updating", "weights are changing")
        try:
            await member.server.pause()
        except (ServerError, RefusedError) as error:
            await self.fail(member, str(error))
            raise
        start = member.last_reply = time.monotonic()
        while member.in_flight and time.monotonic() - member.last_reply < QUIET_S:
            if time.monotonic() - start > EMPTY_S:
                break
            await asyncio.sleep(0.005)
        await self._cancel_tasks(member)

    async def refill(self, member: Member, version: int, model_name: str = BASE) -> bool:
        """Send requests to a server again, which has weights `version` as `model_name`. Return whether it is ready.

        A drained server is resumed. A server that loaded an adapter was never stopped: only new requests use the new
        name. A server that is out stays out: it failed during the sync, or was restarted with other weights.
        """
        if member.state == "out":
            return False
        try:
            if member.state == "updating":
                await member.server.set_version(version)
                await member.server.resume()
        except (ServerError, RefusedError) as error:
            await self.fail(member, str(error))
            raise
        if member.state == "out":  # it failed during the awaits
            return False
        self.version = version
        member.version, member.model, member.strikes = version, model_name, 0
        self._set(member, "ready", "")
        return True

    async def fail(self, member: Member, reason: str) -> None:
        """Put the server out and send its requests to other servers. The watch brings it back."""
        if member.state != "out" or member.reason != reason:
            self.record("out", member, reason)
        self._set(member, "out", reason)
        for task in member.tasks:
            task.cancel()
        self.alarm.set()

    async def watch(self, *, heartbeat_s: float = 10.0, check_s: float = 30.0) -> None:
        """Check and restart servers, and mark servers that need weights, until cancelled."""
        checks: dict[int, asyncio.Task[None]] = {}
        leases = asyncio.ensure_future(_renew(self))
        try:
            while True:
                for member in self.members:
                    busy = member.index in checks and not checks[member.index].done()
                    if not busy and not member.lost and time.monotonic() >= member.not_before:
                        checks[member.index] = asyncio.ensure_future(_check(self, member, check_s))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(heartbeat_s):  # wait_for of Python 3.11 can lose a cancellation
                        await self.alarm.wait()
                self.alarm.clear()
                for task in (leases, *checks.values()):
                    if task.done():
                        task.result()  # raises on a bug, or if another trainer has taken a server
        finally:
            for task in (leases, *checks.values()):
                task.cancel()

    def record(self, event: str, member: Member, reason: str) -> None:
        """Count and log an event."""
        self.counts[f"server_{event}"] += 1
        self.log(f"server {member.index} ({member.server.url}): {event}{': ' if reason else ''}{reason}")

    def metrics(self) -> dict[str, float]:
        """Return totals since the start and the number of ready servers."""
        names = ("retries", "resumed_samples", "server_out", "server_restarts")
        totals = {f"rollout/{name}": float(self.counts[name]) for name in names}
        totals["rollout/servers_ready"] = float(sum(member.state == "ready" for member in self.members))
        return totals

    async def close(self) -> None:
        """Fail all waiting and running requests; the servers keep running."""
        if self._patience_timer is not None:
            self._patience_timer.cancel()
        for member in self.members:
            member.lost = True
            self._set(member, "out", "the pool is closed")
        await asyncio.gather(*(self._cancel_tasks(member) for member in self.members))
        # If this fails, the lease expires a minute later.
        await asyncio.gather(*(member.server.release() for member in self.members), return_exceptions=True)
        await asyncio.gather(*(member.server.close() for member in self.members))

    async def _complete(
        self, request: Request, sampling: Sampling, *, decode: Callable[[list[int]], str] | None = None
    ) -> Sampled:
        """Sample one completion. `decode` (ids to text) finds stop strings that span an interruption; without `decode`,
        an interrupted completion with stop strings starts again from its prompt.
        """
        key = hash(tuple(request.prompt_ids))
        done = Sampled()
        while True:
            member = await self._take(key)
            try:
                segment, version = await self._send(member, request, sampling, done)
            finally:
                self._release(member)
            if segment is None:
                await asyncio.sleep(0)  # yield to other tasks: the calls above may not have awaited
                continue
            first = not done.ids
            done.add(segment, version)
            if sampling.stop and not first and (cut := stop_end(done.ids, sampling, decode)) is not None:
                return finish(done, "stop", cut)
            if segment.finish != "abort":
                return finish(done, segment.finish)
            if len(done.ids) >= sampling.max_tokens:
                return finish(done, "length")
            if done.ids and done.ids[-1] in sampling.stop_ids:
                return finish(done, "stop")
            if sampling.stop and decode is None:
                done = Sampled(failures=done.failures, resumes=done.resumes)
            if segment.ids:
                done.resumes += 1
                self.counts["resumed_samples"] += done.resumes == 1

    async def _send(
        self, member: Member, request: Request, sampling: Sampling, done: Sampled
    ) -> tuple[Segment | None, int]:
        """Continue a completion on one server; return (segment, weight version). A segment of None must be resent."""
        if member.state != "ready" or member.version is None:
            return None, 0  # the server was drained or failed while this request was queued
        version = member.version
        work = member.server.generate(
            request.prompt_ids + done.ids,
            sampling,
            seed=request.seed + GOLDEN * done.resumes if self.seeded else None,
            max_tokens=sampling.max_tokens - len(done.ids),
            model=member.model,
            version=version,
            timeout=self.timeout,
        )
        task = asyncio.ensure_future(work)
        member.tasks.add(task)
        try:
            segment = await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            return None, version  # cancelled because the server is being drained or has failed
        except (ServerError, RefusedError) as error:
            # 404: the adapter is gone, for example because another process restarted the server.
            if isinstance(error, RefusedError) and not (error.status == 404 and member.model != BASE):
                raise
            self._failed(member, error, done)
            return None, version
        finally:
            member.tasks.discard(task)
            member.last_reply = time.monotonic()
        member.strikes = member.restarts = 0
        if segment.finish == "abort" and not segment.ids and member.state == "ready":
            self._failed(member, ServerError("the server aborted a request by itself"), done)
        return segment, version

    def _failed(self, member: Member, error: Exception, done: Sampled) -> None:
        """Put a server out after a bad reply; its other requests continue until the watch has checked it."""
        done.failures += 1
        if member.state == "ready":
            member.strikes += 1
            if member.strikes >= STRIKES and self.restart is None:
                member.not_before = time.monotonic() + min(60.0, 2.0**member.strikes)
            self.record("doubted", member, str(error))
            self._set(member, "out", str(error))
            self.alarm.set()
        if done.failures > self.retries:
            raise ServerError(f"vllm: a completion failed {done.failures} times; last error: {error}") from error
        self.counts["retries"] += 1

    async def _cancel_tasks(self, member: Member) -> None:
        while member.in_flight:
            for task in member.tasks:
                task.cancel()
            await asyncio.sleep(0)

    def _set(self, member: Member, state: Literal["ready", "updating", "out"], reason: str) -> None:
        """Change a member's state, then serve or fail the waiting requests."""
        member.state, member.reason = state, reason
        member.changes += 1
        self._update_patience()
        self._wake()

    def _update_patience(self) -> None:
        """Start or cancel the timer that limits the wait for a ready server, or fail if all servers are lost."""
        if any(member.state != "out" for member in self.members):
            self._failure = None
            if self._patience_timer is not None:
                self._patience_timer.cancel()
                self._patience_timer = None
        elif all(member.lost for member in self.members):
            self._fail_waiting("no server is left")
        elif self._patience_timer is None:
            problem = f"no server was ready for {self.patience:g} s"
            self._patience_timer = asyncio.get_running_loop().call_later(self.patience, self._fail_waiting, problem)

    def _fail_waiting(self, problem: str) -> None:
        """Fail all waiting requests with one error."""
        reasons = "; ".join(f"{member.server.url}: {member.reason}" for member in self.members)
        self._failure = f"vllm: {problem} ({reasons}); see the server logs"
        while self._waiting:
            future, _ = self._waiting.popleft()
            if not future.done():
                future.set_exception(ServerError(self._failure))

    async def _take(self, key: int) -> Member:
        """Reserve a request slot on a server; waiting requests are served in order."""
        self._update_patience()
        if self._failure is not None:
            raise ServerError(self._failure)
        if not self._waiting and (member := self._choose(key)) is not None:
            member.in_flight += 1
            return member
        future: asyncio.Future[Member] = asyncio.get_running_loop().create_future()
        self._waiting.append((future, key))
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._release(future.result())
            raise

    def _release(self, member: Member) -> None:
        member.in_flight -= 1
        self._wake()

    def _wake(self) -> None:
        while self._waiting:
            future, key = self._waiting[0]
            if not future.done():
                member = self._choose(key)
                if member is None:
                    return
                member.in_flight += 1
                future.set_result(member)
            self._waiting.popleft()

    def _choose(self, key: int) -> Member | None:
        """Return the least busy server, or the server that had this prompt before if it has at most SLACK more."""
        candidates = [m for m in self.members if m.state == "ready" and m.in_flight < self.max_in_flight]
        if not candidates:
            return None
        best = min(candidates, key=lambda member: member.in_flight)
        home = self.members[self._home[key]] if key in self._home else None
        if home in candidates and home.in_flight <= best.in_flight + SLACK:
            best = home
        self._home[key] = best.index
        self._home.move_to_end(key)
        if len(self._home) > STICKY:
            self._home.popitem(last=False)
        return best


# the watch -------------------------------------------------------------------------------------------------------


async def _renew(pool: Pool) -> None:
    """Renew the leases in every state: a weight transfer may take longer than a lease lasts."""
    try:
        while True:
            await asyncio.sleep(RENEW_S)
            renewals = [member.server.renew() for member in pool.members]
            for result in await asyncio.gather(*renewals, return_exceptions=True):
                # The watch handles servers that do not respond, and a lease survives three lost renewals.
                if isinstance(result, BaseException) and not isinstance(result, ServerError | RefusedError):
                    raise result
    finally:
        pool.alarm.set()


async def _check(pool: Pool, member: Member, check_s: float) -> None:
    """Check a server once, and again if its state changed during the check. Skips servers that load weights."""
    while member.state != "updating":
        changes = member.changes
        try:
            status = await member.server.check(check_s)
        except ServerError as error:
            if member.changes == changes:
                await _handle_failure(pool, member, str(error))
                return
        else:
            if member.changes == changes:
                await _handle_status(pool, member, status)
                return


async def _handle_status(pool: Pool, member: Member, status: ServerStatus) -> None:
    assert member.server.info is not None, "servers are connected before they are watched"
    if status.instance != member.server.info.instance:
        await _handle_restart(pool, member)
    elif status.foreign is not None:
        raise LeaseError(
            f"vllm.url={member.server.url}: another trainer has replaced its weights (tag {status.foreign}), so it no "
            "longer samples from this run's policy; stop that run or use separate servers, then continue with --resume"
        )
    elif member.needs_weights:
        return
    elif status.paused or status.dirty:
        pool.record("paused", member, "a weight transfer was interrupted" if status.dirty else "by another process")
        await pool.fail(member, NEEDS_WEIGHTS)
    elif member.state == "out" and member.strikes >= STRIKES and pool.restart is not None:
        await _handle_failure(pool, member, f"{member.strikes} consecutive bad replies, last: {member.reason}")
    elif member.state == "out" and (member.version is None or member.version != pool.version):
        await pool.fail(member, NEEDS_WEIGHTS)
    elif member.state == "out":  # its weights are current
        pool.record("back", member, "")
        pool._set(member, "ready", "")


async def _handle_restart(pool: Pool, member: Member) -> None:
    """Reconnect to a server that another process restarted at the same address."""
    member.version = None
    await pool.fail(member, "restarted by another process")  # before the await: its weights are unknown
    try:
        await member.server.connect()
    except (ServerError, RefusedError) as error:
        await pool.fail(member, str(error))
        return
    pool.record("restarted", member, "by another process")
    await pool.fail(member, NEEDS_WEIGHTS)


async def _handle_failure(pool: Pool, member: Member, reason: str) -> None:
    """Put a server out; if the run started it, restart it with growing delays."""
    member.not_before = time.monotonic() + 1.0  # fail() sets the alarm: do not check again immediately
    await pool.fail(member, reason)
    if pool.restart is None:
        return
    if member.restarts >= RESTARTS:
        member.lost = True
        pool.record("lost", member, f"no good reply after {RESTARTS} restarts")
        await pool.fail(member, reason)
        return
    await asyncio.sleep(min(LONGEST_WAIT_S, 2.0**member.restarts - 1))
    member.restarts += 1
    pool.record("restarting", member, "")
    member.version = None
    try:
        server = await asyncio.to_thread(pool.restart, member.index)
        await server.connect()
    except (ServerError, OSError, ValueError) as error:
        await pool.fail(member, f"restart failed ({error})")
        return
    await member.server.close()
    member.server, member.strikes = server, 0
    pool.counts["server_restarts"] += 1
    await pool.fail(member, NEEDS_WEIGHTS)
