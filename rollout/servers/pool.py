"""Many vLLM servers as one: routing, retries, and the gate that keeps every token on one version of the weights.

    pool = Pool([VllmServer(url) for url in urls], max_in_flight=256)
    await pool.connect()                      # every server is "out" until it has been given weights
    await pool.empty(member)                  # no request of ours is on it; now its weights may change
    await pool.refill(member, version=12)     # requests go to it again
    sampled = await pool.generate(Request(prompt_ids=[5, 6, 7], seed=11), Sampling(max_tokens=8, stop_ids=(2,)))
    -> Sampled(ids=[9, 8, 2], logps=[..], finish_reason="stop", versions=[(11, 1), (12, 2)], resumes=1)

All of it runs in one asyncio loop, so state changes only between awaits.

What the pool keeps about one server, and about one completion on its way. Plain data, no connection.

Looks after the servers of a pool: the dead and the hung are put out, ours are started again, others waited for.

A server is asked every few seconds for a sign of its workers, not only of its API: /health says 200 while the engine
hangs. After a bad reply it is asked at once. One that was started anew, by us or by someone else, or that stands
paused, gets weights before it gets requests: it is "out: needs weights", and whoever owns the weights sees to that.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rollout.engine import Request, Sampling
from rollout.servers.client import (
    Pulse,
    RefusedError,
    Segment,
    ServerError,
    VllmServer,
    allow_connections,
    check_sampling,
)
from rollout.servers.command import BASE
from rollout.servers.lease import RENEW_S, LeaseError

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


QUIET_S = 0.25  # after a pause: no reply for this long means that the rest is stuck in the server's queue
EMPTY_S = 10.0  # and this is the longest it may take for all replies to arrive
STICKY = 4096  # prompts whose server is remembered
SLACK = 8  # requests by which a prompt's own server may be ahead of the emptiest one
PATIENCE_S = 900.0  # a server of ours that died may need minutes to start again
GOLDEN = 0x9E3779B97F4A7C15


class Pool:
    def __init__(
        self,
        servers: Sequence[VllmServer],
        *,
        max_in_flight: int = 256,
        timeout: float = 240.0,
        retries: int = 3,
        log: Callable[[str], None] = print,
        restart: Callable[[int], VllmServer] | None = None,  # blocking: starts server i anew; None: not ours
        seeded: bool = True,
        patience: float = PATIENCE_S,
    ) -> None:
        if not servers:
            raise ValueError("vllm.url=(): a pool needs at least one server")
        self.members = [Member(index=i, server=server) for i, server in enumerate(servers)]
        self.max_in_flight, self.timeout, self.retries = max_in_flight, timeout, retries
        self.log, self.restart, self.seeded, self.patience = log, restart, seeded, patience
        self.version: int | None = None  # what servers should hold; one that holds less gets weights before requests
        self.events: list[dict[str, Any]] = []
        self.counts: Counter[str] = Counter()
        self.alarm = asyncio.Event()  # wakes the watch
        self._waiting: deque[tuple[asyncio.Future[Member], int]] = deque()
        self._home: OrderedDict[int, int] = OrderedDict()  # prompt -> member that has its keys and values cached
        self._give_up: asyncio.TimerHandle | None = None
        self._hopeless: str | None = None
        allow_connections(64 + 2 * max_in_flight * len(servers))

    async def connect(self) -> None:
        """Every server must answer and be usable at the beginning of a run."""
        await asyncio.gather(*(member.server.connect() for member in self.members))

    async def generate_all(
        self, requests: Sequence[Request], sampling: Sampling, *, training: bool = True, **options: Any
    ) -> list[Sampled]:
        """One result per request, in order; the first error cancels the rest."""
        check_sampling(sampling, training=training)
        tasks = [asyncio.ensure_future(self._complete(request, sampling, **options)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def generate(self, request: Request, sampling: Sampling, *, training: bool = True, **options: Any) -> Sampled:
        """Exactly one completion, whatever happens to servers on the way. See _complete for options."""
        check_sampling(sampling, training=training)
        return await self._complete(request, sampling, **options)

    async def empty(self, member: Member) -> None:
        """Close the gate: no new requests, and none of ours is left on the server when this returns.

        The server hands back what it has of each request. One that reached it after the pause would sit in its queue
        until it is resumed, so once replies stop coming those requests are taken back.
        """
        self._set(member, "updating", "its weights change")
        try:
            await member.server.pause()
        except (ServerError, RefusedError) as error:
            await self.fail(member, str(error))
            raise
        begin = member.last_reply = time.monotonic()
        while member.in_flight and time.monotonic() - member.last_reply < QUIET_S:
            if time.monotonic() - begin > EMPTY_S:
                break
            await asyncio.sleep(0.005)
        await self._take_back(member)

    async def refill(self, member: Member, version: int, model_name: str = BASE) -> bool:
        """Open the gate: the server holds `version`, and requests ask it for `model_name`. Whether it is open now.

        A server that was emptied is resumed. One that took an adapter was never stopped: only new requests change.
        One that is out stays out: it failed while it was given weights, or was started anew and holds others.
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
        if member.state == "out":  # since it was asked
            return False
        self.version = version
        member.version, member.model, member.strikes = version, model_name, 0
        self._set(member, "ready", "")
        return True

    async def expect(self, version: int) -> None:
        """From now on a server that comes back with older weights needs new ones first."""
        self.version = version

    async def fail(self, member: Member, reason: str) -> None:
        """The server is out; what was running on it goes elsewhere. The watch sees to its return."""
        if member.state != "out" or member.reason != reason:
            self.record("out", member, reason)
        self._set(member, "out", reason)
        for task in member.tasks:
            task.cancel()
        self.alarm.set()

    async def rejoin(self, member: Member) -> None:
        """It was in doubt, and is well and holds the weights it should."""
        self.record("back", member, "")
        self._set(member, "ready", "")

    async def watch(self, *, heartbeat_s: float = 10.0, check_s: float = 30.0) -> None:
        """Look after the servers until cancelled: doubt, restart, and say which need weights."""
        await watch(self, heartbeat_s=heartbeat_s, check_s=check_s)

    def record(self, event: str, member: Member, reason: str) -> None:
        """For the metrics and the console."""
        self.counts[f"server_{event}"] += 1
        self.events.append({"time": time.time(), "event": event, "server": member.server.url, "reason": reason})
        self.log(f"server {member.index} ({member.server.url}): {event}{': ' if reason else ''}{reason}")

    def metrics(self) -> dict[str, float]:
        """Totals since the start, and how things stand."""
        names = ("retries", "resumed_samples", "server_out", "server_restarts")
        totals = {f"rollout/{name}": float(self.counts[name]) for name in names}
        totals["rollout/servers_ready"] = float(sum(member.state == "ready" for member in self.members))
        return totals

    async def close(self) -> None:
        """Requests that still wait or run fail; the servers are left as they are."""
        if self._give_up is not None:
            self._give_up.cancel()
        for member in self.members:
            member.lost = True
            self._set(member, "out", "the pool is closed")
        await asyncio.gather(*(self._take_back(member) for member in self.members))
        # A server that cannot be told is free a minute later.
        await asyncio.gather(*(member.server.release() for member in self.members), return_exceptions=True)
        await asyncio.gather(*(member.server.close() for member in self.members))

    async def _complete(
        self, request: Request, sampling: Sampling, *, decode: Callable[[list[int]], str] | None = None
    ) -> Sampled:
        """`decode` (ids to text) is for stop strings of which an interruption may leave one half on each side.

        Without it, a completion with stop strings that is interrupted starts again from its prompt.
        """
        key = hash(tuple(request.prompt_ids))
        done = Progress()
        while True:
            member = await self._take(key)
            try:
                segment, version = await self._send(member, request, sampling, done)
            finally:
                self._release(member)
            if segment is None:
                await asyncio.sleep(0)  # perhaps nothing was waited for, and then nobody else would ever run
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
                done = Progress(failures=done.failures, resumes=done.resumes)
            if segment.ids:
                done.resumes += 1
                self.counts["resumed_samples"] += done.resumes == 1

    async def _send(
        self, member: Member, request: Request, sampling: Sampling, done: Progress
    ) -> tuple[Segment | None, int]:
        """What one server makes of the rest of a completion, and by which weights; None: to be sent again."""
        if member.state != "ready" or member.version is None:
            return None, 0  # the gate closed while this one was waiting for its turn
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
            return None, version  # taken back from a server that is emptied or has failed
        except (ServerError, RefusedError) as error:
            # 404: the adapter is gone, as after a restart by someone else.
            if isinstance(error, RefusedError) and not (error.status == 404 and member.model != BASE):
                raise
            self._failed(member, error, done)
            return None, version
        finally:
            member.tasks.discard(task)
            member.last_reply = time.monotonic()
        member.strikes = member.restarts = 0
        if segment.finish == "abort" and not segment.ids and member.state == "ready":
            self._failed(member, ServerError("it ended a request that we had not ended"), done)
        return segment, version

    def _failed(self, member: Member, error: Exception, done: Progress) -> None:
        """Doubt a server after a bad reply; other requests on it go on until the watch has looked at it."""
        done.failures += 1
        if member.state == "ready":
            member.strikes += 1
            if member.strikes >= STRIKES and self.restart is None:
                member.not_before = time.monotonic() + min(60.0, 2.0**member.strikes)
            self.record("doubted", member, str(error))
            self._set(member, "out", str(error))
            self.alarm.set()
        if done.failures > self.retries:
            raise ServerError(f"vllm: a completion failed {done.failures} times, last: {error}") from error
        self.counts["retries"] += 1

    async def _take_back(self, member: Member) -> None:
        while member.in_flight:
            for task in member.tasks:
                task.cancel()
            await asyncio.sleep(0)

    def _set(self, member: Member, state: Literal["ready", "updating", "out"], reason: str) -> None:
        """Change a state, and what depends on it: who waits, and for how long."""
        member.state, member.reason = state, reason
        member.changes += 1
        self._mind()
        self._wake()

    def _mind(self) -> None:
        """Requests wait for a server, but not for ever."""
        if any(member.state != "out" for member in self.members):
            self._hopeless = None
            if self._give_up is not None:
                self._give_up.cancel()
                self._give_up = None
        elif all(member.lost for member in self.members):
            self._abandon("no server is left")
        elif self._give_up is None:
            words = f"no server was ready for {self.patience:g} s"
            self._give_up = asyncio.get_running_loop().call_later(self.patience, self._abandon, words)

    def _abandon(self, words: str) -> None:
        """Everyone who waits gets one clear error."""
        reasons = "; ".join(f"{member.server.url}: {member.reason}" for member in self.members)
        self._hopeless = f"vllm: {words} ({reasons}); the servers' logs may say more"
        while self._waiting:
            future, _ = self._waiting.popleft()
            if not future.done():
                future.set_exception(ServerError(self._hopeless))

    async def _take(self, key: int) -> Member:
        """A place on a server, in the order of asking."""
        self._mind()
        if self._hopeless is not None:
            raise ServerError(self._hopeless)
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
        """The emptiest server; the one that had this prompt before, while it is hardly fuller."""
        open_ = [m for m in self.members if m.state == "ready" and m.in_flight < self.max_in_flight]
        if not open_:
            return None
        best = min(open_, key=lambda member: member.in_flight)
        home = self.members[self._home[key]] if key in self._home else None
        if home in open_ and home.in_flight <= best.in_flight + SLACK:
            best = home
        self._home[key] = best.index
        self._home.move_to_end(key)
        if len(self._home) > STICKY:
            self._home.popitem(last=False)
        return best


STRIKES = 3  # bad replies in a row, each from a server that seemed well: it is not
RESTARTS = 5  # in a row without one good reply in between: it will not get better
LONGEST_WAIT_S = 60.0


async def watch(pool: Pool, *, heartbeat_s: float, check_s: float) -> None:
    looks: dict[int, asyncio.Task[None]] = {}
    leases = asyncio.ensure_future(_renew(pool))
    try:
        while True:
            for member in pool.members:
                busy = member.index in looks and not looks[member.index].done()
                if not busy and not member.lost and time.monotonic() >= member.not_before:
                    looks[member.index] = asyncio.ensure_future(_look(pool, member, check_s))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(heartbeat_s):  # wait_for of Python 3.11 can lose a cancellation
                    await pool.alarm.wait()
            pool.alarm.clear()
            for task in (leases, *looks.values()):
                if task.done():
                    task.result()  # an error of ours, or a server lost to another trainer, ends the watch
    finally:
        for task in (leases, *looks.values()):
            task.cancel()


async def _renew(pool: Pool) -> None:
    """Keep the leases, whatever the servers' states: a transfer of weights may take longer than a lease lasts."""
    try:
        while True:
            await asyncio.sleep(RENEW_S)
            renewals = [member.server.renew() for member in pool.members]
            for result in await asyncio.gather(*renewals, return_exceptions=True):
                # One that does not answer is the watch's business, and the lease outlasts three renewals.
                if isinstance(result, BaseException) and not isinstance(result, ServerError | RefusedError):
                    raise result
    finally:
        pool.alarm.set()


async def _look(pool: Pool, member: Member, check_s: float) -> None:
    """One look; again when the server's state changed in the meantime. Not while its workers load weights."""
    while member.state != "updating":
        changes = member.changes
        try:
            pulse = await member.server.check(check_s)
        except ServerError as error:
            if member.changes == changes:
                await _is_bad(pool, member, str(error))
                return
        else:
            if member.changes == changes:
                await _is_alive(pool, member, pulse)
                return


async def _is_alive(pool: Pool, member: Member, pulse: Pulse) -> None:
    assert member.server.info is not None, "servers are connected before they are watched"
    if pulse.instance != member.server.info.instance:
        await _is_another(pool, member)
    elif pulse.foreign is not None:
        raise LeaseError(
            f"vllm.url={member.server.url}: another trainer has loaded its weights there (they are marked "
            f"{pulse.foreign}), so what it samples is not this run's policy; end that run or give each its own server, "
            "then continue with --resume"
        )
    elif member.needs_weights:
        return
    elif pulse.paused or pulse.dirty:
        pool.record("paused", member, "half a model is in it" if pulse.dirty else "not by us")
        await pool.fail(member, NEEDS_WEIGHTS)
    elif member.state == "out" and member.strikes >= STRIKES and pool.restart is not None:
        await _is_bad(pool, member, f"{member.strikes} bad replies in a row, last: {member.reason}")
    elif member.state == "out" and (member.version is None or member.version != pool.version):
        await pool.fail(member, NEEDS_WEIGHTS)
    elif member.state == "out":
        await pool.rejoin(member)


async def _is_another(pool: Pool, member: Member) -> None:
    """Someone started it again at the same address."""
    member.version = None
    await pool.fail(member, "someone started it again")  # before we wait: it holds no weights that we know of
    try:
        await member.server.connect()
    except (ServerError, RefusedError) as error:
        await pool.fail(member, str(error))
        return
    pool.record("restarted", member, "not by us")
    await pool.fail(member, NEEDS_WEIGHTS)


async def _is_bad(pool: Pool, member: Member, trouble: str) -> None:
    """Put it out; start it again if it is ours, with growing pauses."""
    member.not_before = time.monotonic() + 1.0  # the alarm that follows is this one
    await pool.fail(member, trouble)
    if pool.restart is None:
        return
    if member.restarts >= RESTARTS:
        member.lost = True
        pool.record("lost", member, f"started {RESTARTS} times without one good reply")
        await pool.fail(member, trouble)
        return
    await asyncio.sleep(min(LONGEST_WAIT_S, 2.0**member.restarts - 1))
    member.restarts += 1
    pool.record("restarting", member, "")
    member.version = None
    try:
        server = await asyncio.to_thread(pool.restart, member.index)
        await server.connect()
    except (ServerError, OSError, ValueError) as error:
        await pool.fail(member, f"could not be started again ({error})")
        return
    await member.server.close()
    member.server, member.strikes = server, 0
    pool.counts["server_restarts"] += 1
    await pool.fail(member, NEEDS_WEIGHTS)
