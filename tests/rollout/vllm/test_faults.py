"""Servers that die, hang, cut connections or send garbage: every request still gets exactly one correct completion."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import asynccontextmanager

import pytest

from rollout.engine import Request, Sampling
from rollout.servers.client import GENERATE_ROUTE, ServerError, VllmServer
from rollout.servers.pool import Pool
from tests.rollout.vllm.conftest import engine_pids
from tests.rollout.vllm.scripted import Proxy, proxies, rewrite

REQUESTS = [Request(prompt_ids=[5, 6, 7 + i % 5], seed=i) for i in range(8)]
GREEDY = Sampling(temperature=0.0, max_tokens=32)


@asynccontextmanager
async def watched(servers, **options):
    """A watched pool of connected servers with version 1, and its log lines."""
    lines = []
    pool = Pool(servers, log=lines.append, **options)
    await pool.connect()
    for member in pool.members:
        await pool.empty(member)
        await pool.refill(member, 1)
    watch = asyncio.ensure_future(pool.watch(heartbeat_s=0.2, check_s=2.0))
    try:
        yield pool, lines
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await pool.close()


async def until(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"timed out after {seconds} s"
        await asyncio.sleep(0.02)


def client(proxy, **options):
    return VllmServer(proxy.url, vocab_size=275, **options)


@pytest.fixture(scope="module")
def expected(untied_server):
    """Completions of REQUESTS from an undisturbed server."""

    async def work():
        server = VllmServer(untied_server.url, token=untied_server.token)
        await server.connect()
        pool = Pool([server], log=lambda text: None)
        await pool.empty(pool.members[0])
        await pool.refill(pool.members[0], 1)
        return [sampled.ids for sampled in await pool.generate_all(REQUESTS, GREEDY)]

    return asyncio.run(work())


def test_killed_server_loses_no_request(untied_server, expected):
    async def work():
        async with (
            proxies(untied_server.url, untied_server.token, 2) as (one, two),
            watched([client(one), client(two)]) as (pool, lines),
        ):
            task = asyncio.ensure_future(pool.generate_all(REQUESTS, GREEDY))
            await until(lambda: any(path == GENERATE_ROUTE and body for path, body in two.seen))
            await two.kill()
            sampled = await task
            assert pool.members[1].state == "out" and pool.members[0].state == "ready"
            assert any("out" in line and two.url in line for line in lines)
            assert pool.metrics()["rollout/server_out"] >= 1 and pool.metrics()["rollout/servers_ready"] == 1
            await two.start()  # the same server at the same address
            await until(lambda: pool.members[1].state == "ready")
            return [one.ids for one in sampled]

    assert asyncio.run(work()) == expected


def test_server_restarted_by_another_process_gets_weights_first(untied_server):
    def other(value):
        value["vllm_config"]["instance_id"] = "another"

    async def work():
        async with (
            proxies(untied_server.url, untied_server.token) as (proxy,),
            watched([client(proxy)]) as (pool, lines),
        ):
            (member,) = pool.members
            proxy.change = rewrite("/server_info?config_format=json", other)
            await until(lambda: member.needs_weights)
            assert member.version is None and member.server.info.instance == "another"
            assert any("restarted: by another process" in line for line in lines)
            task = asyncio.ensure_future(pool.generate(REQUESTS[0], GREEDY))
            await until(lambda: pool._waiting)
            assert not task.done() and member.needs_weights
            await pool.empty(member)
            await pool.refill(member, 4)
            assert (await task).versions == [(4, 32)]
            member.server.tag = None

    asyncio.run(work())


def test_dead_server_is_restarted_and_gets_weights_first(untied_server, expected):
    async def work():
        async with proxies(untied_server.url, untied_server.token, 2) as (one, two):
            spare = two.port
            await two.kill()
            loop = asyncio.get_running_loop()

            def restart(index):
                assert index == 0 and two.port == spare
                asyncio.run_coroutine_threadsafe(two.start(), loop).result(10)
                return client(two)

            async with watched([client(one)], restart=restart) as (pool, lines):
                (member,) = pool.members
                task = asyncio.ensure_future(pool.generate_all(REQUESTS, GREEDY))
                await until(lambda: member.in_flight == len(REQUESTS))
                await one.kill()
                await until(lambda: member.needs_weights)
                assert member.server.url == two.url and not task.done()
                assert pool.metrics()["rollout/server_restarts"] == 1
                assert not await pool.refill(member, 2) and member.needs_weights  # was not drained
                await pool.empty(member)
                assert await pool.refill(member, 2)
                sampled = await task
                assert {version for one in sampled for version, _ in one.versions} == {2}
                assert any("restarting" in line for line in lines)
                await one.start()
                return [one.ids for one in sampled]

    assert asyncio.run(work()) == expected


def test_server_that_cannot_restart_is_lost(untied_server, monkeypatch):
    monkeypatch.setattr("rollout.servers.pool.RESTARTS", 1)

    def restart(index):
        raise ValueError("vllm.port=8000: in use")

    async def work():
        async with proxies(untied_server.url, untied_server.token) as (proxy,):
            async with watched([client(proxy)], restart=restart) as (pool, lines):
                await proxy.kill()
                with pytest.raises(ServerError, match="no server is left"):
                    await pool.generate(REQUESTS[0], GREEDY)
                assert any("restart failed (vllm.port=8000: in use)" in line for line in lines)
                assert pool.members[0].lost
            await proxy.start()

    asyncio.run(work())


def spoil_body(body):
    return lambda path, status, old: (200, body) if path == GENERATE_ROUTE else (status, old)


def positive(value):
    value["choices"][0]["logps"][-1] = 1.5


GARBAGE = [
    (spoil_body(b"<html>"), "not JSON"),
    (spoil_body(b"[]"), "not a JSON object"),
    (spoil_body(b'{"choices": [{}]}'), "malformed reply"),
    (rewrite(GENERATE_ROUTE, positive), "log-prob 1.5 is above 0"),
    (lambda path, status, body: (502, b"Bad Gateway") if path == GENERATE_ROUTE else (status, body), "502 Bad Gateway"),
]


def test_garbage_and_cut_connections_are_retried_on_another_server(untied_server, expected):
    async def work():
        async with (
            proxies(untied_server.url, untied_server.token, 2) as (good, bad),
            watched([client(bad), client(good)]) as (pool, lines),
        ):
            member = pool.members[0]
            for change, message in GARBAGE:
                bad.change = change
                with pytest.raises(ServerError, match=message):
                    await member.server.generate([5, 6, 7], GREEDY, seed=1, max_tokens=32)
                retries = pool.counts["retries"]
                assert [one.ids for one in await pool.generate_all(REQUESTS, GREEDY)] == expected
                assert any("doubted" in line and message in line for line in lines)
                assert pool.counts["retries"] > retries
                bad.change = lambda path, status, body: (status, body)
                await until(lambda: member.state == "ready")
                member.strikes = 0  # as after a good reply
                pool._home.clear()  # route prompts to both servers again
            bad.cut.add(GENERATE_ROUTE)
            return [one.ids for one in await pool.generate_all(REQUESTS, GREEDY)]

    assert asyncio.run(work()) == expected


def test_request_fails_if_the_only_server_sends_garbage(untied_server):
    async def work():
        async with (
            proxies(untied_server.url, untied_server.token) as (bad,),
            watched([client(bad)], retries=1) as (pool, lines),
        ):
            bad.change = spoil_body(b"{}")
            with pytest.raises(ServerError, match="a completion failed 2 times; .*malformed reply"):
                await pool.generate(REQUESTS[0], GREEDY)
            bad.change = lambda path, status, body: (status, body)
            return (await pool.generate(REQUESTS[0], GREEDY)).finish_reason

    assert asyncio.run(work()) == "length"


def test_slow_request_is_retried_on_another_server(untied_server, expected, monkeypatch):
    monkeypatch.setattr("rollout.servers.client.SLOW", 160.0)  # tokens per second

    async def work():
        async with (
            proxies(untied_server.url, untied_server.token, 2) as (good, bad),
            watched([client(bad), client(good)], timeout=3.0) as (pool, lines),
        ):
            bad.hang.add(GENERATE_ROUTE)
            start = time.monotonic()
            sampled = await pool.generate_all(REQUESTS, GREEDY)
            assert 3.2 <= time.monotonic() - start < 30  # 3 s, plus 0.2 s for 32 tokens
            assert any("for 3.2 s" in line and "--vllm.timeout" in line for line in lines)
            return [one.ids for one in sampled]

    assert asyncio.run(work()) == expected


def test_request_that_reaches_a_paused_server_is_cancelled(untied_server):
    """It would stay in the server's queue until the update ends, and then run with unknown weights."""

    async def work():
        async with (
            proxies(untied_server.url, untied_server.token) as (proxy,),
            watched([client(proxy)]) as (pool, _),
        ):
            (member,) = pool.members
            proxy.hang.add(GENERATE_ROUTE)  # as if the request arrived late
            task = asyncio.ensure_future(pool.generate(REQUESTS[0], GREEDY))
            await until(lambda: any(path == GENERATE_ROUTE and body for path, body in proxy.seen))
            start = time.monotonic()
            await pool.empty(member)
            assert time.monotonic() - start < 20 and member.in_flight == 0
            proxy.hang.clear()
            await pool.refill(member, 2)
            sampled = await task
            await until(lambda: proxy.dropped == 1)
            member.server.tag = None
            assert (sampled.versions, sampled.resumes) == ([(2, 32)], 0)
            assert pool.counts["retries"] == 0

    asyncio.run(work())


def test_hung_engine_is_detected_although_health_returns_200(untied_server, expected):
    async def work():
        server = VllmServer(untied_server.url, token=untied_server.token)
        async with watched([server], timeout=60.0) as (pool, lines):
            (member,) = pool.members
            task = asyncio.ensure_future(pool.generate_all(REQUESTS, GREEDY))
            await until(lambda: member.in_flight == len(REQUESTS))
            for pid in engine_pids(untied_server):
                os.kill(pid, signal.SIGSTOP)
            try:
                status, _ = await server._http.send("GET", "/health", timeout=5)
                assert status == 200
                with pytest.raises(ServerError, match="engine for 1 s"):
                    await server.check(1.0)
                await until(lambda: member.state == "out")
                assert member.tasks == set() or all(task.cancelling() for task in member.tasks)
                assert not task.done()
            finally:
                for pid in engine_pids(untied_server):
                    os.kill(pid, signal.SIGCONT)
            sampled = await task  # continues in the same process with the same weights
            assert any("engine for 2 s" in line for line in lines)
            assert any(line.endswith("back") for line in lines)
            return [one.ids for one in sampled]

    assert asyncio.run(work()) == expected


def test_server_paused_by_another_process_is_put_out(untied_server):
    async def work():
        server = VllmServer(untied_server.url, token=untied_server.token)
        async with watched([server]) as (pool, lines):
            (member,) = pool.members
            await server.pause()
            try:
                await until(lambda: member.needs_weights)
                assert any("paused: by another process" in line for line in lines)
            finally:
                await server.resume()

    asyncio.run(work())


def test_server_that_missed_an_update_gets_weights_first(untied_server):
    async def work():
        async with (
            proxies(untied_server.url, untied_server.token, 2) as (one, two),
            watched([client(one), client(two)]) as (pool, _),
        ):
            first, second = pool.members
            await two.kill()
            await until(lambda: second.state == "out")
            pool.version = 2
            await pool.refill(first, 2)  # as for an adapter: without draining
            await two.start()
            await until(lambda: second.needs_weights)
            sampled = await pool.generate_all(REQUESTS, GREEDY)
            assert {version for one in sampled for version, _ in one.versions} == {2}
            assert second.in_flight == 0 and isinstance(two, Proxy)

    asyncio.run(work())
