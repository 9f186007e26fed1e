"""Looks after the servers of a pool: the dead and the hung are put out, ours are started again, others waited for.

A server is asked every few seconds for a sign of its workers, not only of its API: /health says 200 while the engine
hangs. After a bad reply it is asked at once. One that was started anew, by us or by someone else, or that stands
paused, gets weights before it gets requests: it is "out: needs weights", and whoever owns the weights sees to that.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from rollout.vllm_lease import RENEW_S, LeaseError
from rollout.vllm_member import NEEDS_WEIGHTS, Member
from rollout.vllm_server import Pulse, RefusedError, ServerError

if TYPE_CHECKING:
    from rollout.vllm_pool import Pool

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
