"""Routing, the checks of replies and the HTTP client; vLLM itself is met in tests/rollout/vllm."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from rollout.engine import Request, Sampling
from rollout.engines.weights import Weights
from rollout.servers import client as http_client
from rollout.servers import pool as vllm_watch
from rollout.servers.client import (
    GENERATE,
    GENERATE_ROUTE,
    ROUTES,
    VERSION_ROUTE,
    HttpClient,
    RefusedError,
    Segment,
    ServerError,
    ServerStatus,
    VllmServer,
    check_sampling,
    error_text,
    is_awake,
    read_scores,
    read_segment,
    sampling_params,
)
from rollout.servers.lease import LeaseError, Owner
from rollout.servers.loop import Loop
from rollout.servers.pool import NEEDS_WEIGHTS, SLACK, Pool, Progress, finish, stop_end

SAMPLING = Sampling(max_tokens=3, stop_ids=(2,))


def reply_32(ids=(9, 8, 2), logps=(-0.1, -1.2, -0.3), finish_reason="stop", **choice):
    """As vLLM 0.32 answers."""
    content = [{"token_id": i, "logprob": p, "rank": 1, "top_logprobs": []} for i, p in zip(ids, logps, strict=False)]
    return {
        "request_id": "generate-tokens-1",
        "choices": [
            {"index": 0, "finish_reason": finish_reason, "token_ids": list(ids), "logprobs": {"content": content}}
            | choice
        ],
        "prompt_logprobs": None,
    }


def reply_24():
    """As vLLM 0.24 answers: ids inside strings, no weight versions."""
    content = [
        {"token": f"token_id:{i}", "logprob": p, "bytes": None, "top_logprobs": []}
        for i, p in ((9, -0.1), (8, -1.2), (2, -0.3))
    ]
    choice = {
        "index": 0,
        "logprobs": {"content": content},
        "finish_reason": "stop",
        "token_ids": [9, 8, 2],
        "routed_experts": None,
    }
    return {"request_id": "x", "choices": [choice], "prompt_logprobs": None, "kv_transfer_params": None}


def read(reply, sampling=SAMPLING, **options):
    return read_segment(reply, sampling, max_tokens=3, vocab_size=10, **options)


def test_both_releases_replies_are_read():
    for reply in (reply_24(), reply_32()):
        assert read(reply) == Segment([9, 8, 2], [-0.1, -1.2, -0.3], "stop")


def test_an_aborted_request_may_have_no_tokens():
    assert read(reply_32((), (), "abort")) == Segment([], [], "abort")
    assert read(reply_32((9,), (-0.1,), "abort", logprobs={"content": [{"logprob": -0.1}]})).ids == [9]


def test_garbage_is_named():
    for reply, message in (
        ({}, "another shape"),
        ({"choices": []}, "another shape"),
        ({"choices": [None]}, "another shape"),
        (reply_32(logps=(-0.1, -1.2)), "2 log-probs for 3 tokens"),
        (reply_32(logps=(-0.1, float("nan"), -0.3)), "not finite"),
        (reply_32(logps=(-0.1, float("-inf"), -0.3)), "not finite"),
        (reply_32(logps=(-0.1, -9999.0, -0.3)), "not finite"),
        (reply_32(logps=(-0.1, 0.5, -0.3)), "a log-prob of 0.5, above 0"),
        (reply_32(logps=(-0.1, "x", -0.3)), "are not numbers"),
        (reply_32(logps=(-0.1, None, -0.3)), "are not numbers"),
        (reply_32(ids=(9, 10, 2)), "outside the vocabulary of 10"),
        (reply_32(ids=(9, -1, 2)), "outside the vocabulary of 10"),
        (reply_32(ids=(9, "8", 2)), "are not integers"),
        (reply_32(ids=(9, 8, 7)), "stopped at token [7]"),
        (reply_32(ids=(), logps=()), "stopped at token []"),
        (reply_32(finish_reason="error"), "finish_reason='error'"),
        (reply_32(finish_reason=None), "finish_reason=None"),
        (reply_32((9, 8), (-0.1, -0.2), "length"), "2 tokens (finish_reason=length) where 3 were asked for"),
        (reply_32((9, 8, 7, 2), (-0.1,) * 4), "4 tokens"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            read(reply)


def test_a_stop_string_may_end_with_any_token():
    assert read(reply_32((9, 8), (-0.1, -0.2)), Sampling(stop=("x",))).ids == [9, 8]


def test_scores_are_those_of_the_ids_asked_for():
    entries = [None, {"6": {"logprob": -1.0, "rank": 3}}, {"7": {"logprob": -2.0}, "1": {"logprob": -0.1}}]
    assert read_scores({"prompt_logprobs": entries}, [5, 6, 7]) == [-1.0, -2.0]
    for broken in (None, entries[:2], [None, {"5": {"logprob": -1.0}}, entries[2]]):
        with pytest.raises(ValueError, match="another shape"):
            read_scores({"prompt_logprobs": broken}, [5, 6, 7])


def test_what_is_sent_follows_the_sampling():
    params = sampling_params(Sampling(temperature=0.7, max_tokens=9, stop_ids=(2, 3)), -1, 4)
    assert params == {
        "temperature": 0.7,
        "max_tokens": 4,
        "logprobs": 0,
        "stop_token_ids": [2, 3],
        "ignore_eos": True,
        "detokenize": False,
        "output_kind": 2,
        "seed": 2**63 - 1,
    }
    params = sampling_params(Sampling(stop=("###",), top_p=0.9, top_k=5), None, 4)
    assert (params["stop"], params["detokenize"], params["top_p"], params["top_k"]) == (["###"], True, 0.9, 5)
    assert "seed" not in params


def test_training_samples_come_from_the_whole_distribution():
    check_sampling(Sampling(temperature=0.7), training=True)
    check_sampling(Sampling(top_p=0.9, top_k=5, temperature=0.0), training=False)
    for setting, message in (
        ({"top_p": 0.9}, "top_p=0.9: .* set 1"),
        ({"top_k": 5}, "top_k=5: .* set 0"),
        ({"temperature": 0.005}, "temperature=0.005: vLLM samples at 0.01 or above"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"stop": ("",)}, "stop=''"),
    ):
        with pytest.raises(ValueError, match=message):
            check_sampling(Sampling(**setting), training=True)


def test_error_replies_are_told_in_one_line():
    assert error_text(b'{"error":{"message":"no such\\n model","code":404}}') == "no such model"
    assert error_text(b'{"detail":"nope"}') == "nope"
    assert error_text(b"Bad\n Gateway") == "Bad Gateway"


def pool_of(count, **options):
    return Pool([VllmServer(f"http://127.0.0.1:{9 + i}") for i in range(count)], log=lambda text: None, **options)


def ready(pool, *loads):
    for member, load in zip(pool.members, loads, strict=True):
        member.state, member.version, member.in_flight = "ready", 1, load
    return pool


def test_the_emptiest_server_is_chosen_unless_it_is_full_or_the_prompt_has_been_elsewhere():
    pool = ready(pool_of(3, max_in_flight=9), 5, 2, 9)
    assert pool._choose(1).index == 1
    pool.members[1].state = "out"
    assert pool._choose(2).index == 0
    pool.members[0].in_flight = 9
    assert pool._choose(3) is None

    pool = ready(pool_of(2), 0, 1)
    assert pool._choose(7).index == 0
    pool.members[0].in_flight = 1 + SLACK
    assert pool._choose(7).index == 0  # its keys and values are cached there
    pool.members[0].in_flight = 2 + SLACK
    assert pool._choose(7).index == 1
    pool.members[0].in_flight = 0
    assert pool._choose(7).index == 1  # this is where it lives now


def test_places_are_given_in_the_order_of_asking():
    async def work():
        pool = ready(pool_of(1, max_in_flight=1), 0)
        order = []

        async def take(name):
            member = await pool._take(name)
            order.append(name)
            await asyncio.sleep(0)
            pool._release(member)

        tasks = [asyncio.ensure_future(take(i)) for i in range(6)]
        await asyncio.sleep(0)
        tasks[3].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == [0, 1, 2, 4, 5]
        assert pool.members[0].in_flight == 0

    asyncio.run(work())


def test_waiting_for_a_server_ends_with_one_clear_error():
    async def work():
        pool = pool_of(2, patience=0.1)
        tasks = [pool.generate(Request(prompt_ids=[1], seed=i), SAMPLING) for i in range(3)]
        begin = time.monotonic()
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert 0.05 < time.monotonic() - begin < 5
        assert {str(error) for error in errors} == {
            "vllm: no server was ready for 0.1 s (http://127.0.0.1:9: needs weights; http://127.0.0.1:10: needs "
            "weights); the servers' logs may say more"
        }
        with pytest.raises(ServerError, match="no server was ready"):
            await pool.generate(Request(prompt_ids=[1], seed=1), SAMPLING)

    asyncio.run(work())


def test_a_closed_pool_lets_nobody_wait():
    async def work():
        pool = pool_of(1)
        task = asyncio.ensure_future(pool.generate(Request(prompt_ids=[1], seed=1), SAMPLING))
        await asyncio.sleep(0)
        await pool.close()
        with pytest.raises(ServerError, match="no server is left .*the pool is closed"):
            await task

    asyncio.run(work())


def test_nothing_listens_at_a_dead_address():
    async def work():
        for url in ("http://127.0.0.1:9", "http://localhost:9"):  # the second has several addresses
            server = VllmServer(url)
            said = f"^vllm.url={re.escape(url)}: cannot be reached \\(connection refused\\); is the server up\\?$"
            for call in (server.connect(), server.check(1), server.pause(), server.rpc("strop_info", timeout=1)):
                with pytest.raises(ServerError, match=said):
                    await call

    asyncio.run(work())


def test_an_address_that_takes_no_connection_is_not_called_slow(monkeypatch):
    monkeypatch.setattr(http_client, "CONNECT_S", 0.2)

    async def work():
        with socket.socket() as full:  # nobody accepts, and there is room for one who waits
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            url = f"http://127.0.0.1:{full.getsockname()[1]}"
            kept = [await asyncio.open_connection("127.0.0.1", full.getsockname()[1])]
            server = VllmServer(url)
            begin = time.monotonic()
            with pytest.raises(
                ServerError, match=r"cannot be reached \(no connection within 0.2 s\); is the server up"
            ):
                await server.generate([5], SAMPLING, seed=1, max_tokens=3)
            assert time.monotonic() - begin < 5
            kept[0][1].close()

    asyncio.run(work())


def test_a_name_that_is_not_known_says_so():
    async def work():
        with pytest.raises(
            ServerError, match="^vllm.url=http://no.invalid:1: cannot be reached \\([a-z ,]+\\); is the"
        ):
            await VllmServer("http://no.invalid:1").connect()

    asyncio.run(work())


PLAIN = {"paths": dict.fromkeys((GENERATE, *ROUTES), {})}  # as 0.24 lists them


class Scripted(VllmServer):
    """Answers control calls from a table {(method, path): (status, JSON or text)}; 404 for the rest."""

    def __init__(self, **answers):
        super().__init__("http://127.0.0.1:9")
        self.asked = []
        self.answers = {
            "/version": {"version": "0.32.0"},
            "/server_info?config_format=json": {
                "vllm_config": {
                    "model_config": {
                        "logprobs_mode": "processed_logprobs",
                        "max_model_len": 64,
                        "dtype": "torch.float32",
                    }
                    | {"model": "m", "enable_sleep_mode": True},
                    "parallel_config": {},
                    "lora_config": None,
                    "instance_id": "a",
                }
            },
            "/get_world_size": {"world_size": 1},
            "/openapi.json": {"paths": dict.fromkeys((GENERATE, VERSION_ROUTE, *ROUTES), {})},
        } | answers

    async def _send(self, method, path, data, *, timeout, reuse=False):
        self.asked.append((method, path))
        answer = self.answers.get(path)
        if answer is None:
            return 404, b'{"detail": "Not Found"}'
        return 200, answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()


def test_connect_looks_the_route_for_token_ids_up_and_sends_it_nothing():
    async def work():
        server = Scripted()
        await server.connect()
        assert server.info.sleep_mode and server.info.model_len == 64
        assert ("GET", "/openapi.json") in server.asked and not [ask for ask in server.asked if ask[0] == "POST"]
        await Scripted(**{"/openapi.json": None}).connect()  # --disable-fastapi-docs: the first request finds out
        with pytest.raises(RefusedError, match="does not take token ids; start it with --enable-scale-out"):
            await Scripted(**{"/openapi.json": {"paths": dict.fromkeys(ROUTES, {})}}).connect()
        with pytest.raises(RefusedError, match="vLLM 0.32.0 has no /pause, which weight sync needs; install vllm 0.24"):
            await Scripted(**{"/openapi.json": {"paths": {GENERATE: {}}}}).connect()
        with pytest.raises(ServerError, match="came back without a list of routes"):
            await Scripted(**{"/openapi.json": {"paths": None}}).connect()
        for version in ("0.24.0", "0.28.1"):  # without that route, tokens are not marked
            plain = Scripted(**{"/version": {"version": version}, "/openapi.json": PLAIN})
            await plain.connect()
            assert not plain.info.marks_tokens

    asyncio.run(work())


def test_idle_connections_are_kept_as_long_as_a_server_of_ours_keeps_them():
    async def kept(url, answer):
        server = Scripted(**{GENERATE_ROUTE: answer})
        server._http.host = url
        await server.connect()
        return server._http.keep_s

    async def work():
        assert await kept("127.0.0.1", {"keep_alive": 120.0}) == 60.0
        assert await kept("10.0.0.1", {"keep_alive": 120.0}) == 2.0  # a network between may forget connections
        assert await kept("127.0.0.1", {"route": GENERATE_ROUTE}) == 2.0  # an older server of ours
        assert await kept("127.0.0.1", None) == 2.0  # a plain vLLM

    asyncio.run(work())


def gauges(*awake):
    lines = ["# HELP vllm:engine_sleep_state Engine sleep state; awake = 0 means engine is sleeping"]
    for i, value in enumerate(awake):
        labels = f'engine="{i}",model_name="base",sleep_state='
        lines += [f'vllm:engine_sleep_state{{{labels}"weights_offloaded"}} {1 - value}']
        lines += [f'vllm:engine_sleep_state{{{labels}"awake"}} {value}']
    return "\n".join(lines)


def test_a_paused_server_is_told_from_one_that_sleeps():
    assert is_awake(gauges(1.0)) and is_awake(gauges(1.0, 1.0))
    assert not is_awake(gauges(0.0)) and not is_awake(gauges(1.0, 0.0)) and not is_awake(gauges())

    async def sleeps(version, says, awake):
        answers = {"/version": {"version": version}, "/is_sleeping": {"is_sleeping": says}, "/metrics": gauges(awake)}
        server = Scripted(**answers | ({"/openapi.json": PLAIN} if version == "0.24.0" else {}))
        await server.connect()
        return await server.is_sleeping()

    async def work():
        assert not await sleeps("0.32.0", says=False, awake=1.0)
        assert not await sleeps("0.32.0", says=True, awake=1.0)  # it is only paused
        assert await sleeps("0.32.0", says=True, awake=0.0)
        assert not await sleeps("0.24.0", says=False, awake=1.0)
        assert await sleeps("0.24.0", says=True, awake=1.0)  # perhaps only its weights woke up

    asyncio.run(work())


def test_a_prompt_that_does_not_fit_is_refused_before_it_is_sent():
    async def work():
        server = VllmServer("http://127.0.0.1:9", vocab_size=10)
        for ids, message in (([], "empty prompt"), ([1, 10], "vocabulary of 10"), ([-1], "vocabulary of 10")):
            with pytest.raises(RefusedError, match=message):
                await server.generate(ids, SAMPLING, seed=1, max_tokens=3)

    asyncio.run(work())


def test_a_request_that_finds_no_weights_lets_others_run():
    async def work():
        pool = ready(pool_of(1), 0)
        pool.members[0].version = None
        task = asyncio.ensure_future(pool.generate(Request(prompt_ids=[1], seed=1), SAMPLING))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert pool.members[0].in_flight == 0

    asyncio.run(work())


def test_a_server_someone_started_again_is_out_before_it_is_asked_what_it_is():
    async def work():
        pool = ready(pool_of(1), 0)
        (member,) = pool.members
        member.server.info = SimpleNamespace(instance="old")
        seen = []

        async def connect():
            task = asyncio.ensure_future(pool.generate(Request(prompt_ids=[1], seed=1), SAMPLING))
            for _ in range(5):
                await asyncio.sleep(0)
            seen.append((member.state, member.reason, member.version, member.in_flight, task.done()))
            task.cancel()

        member.server.connect = connect
        async with asyncio.timeout(5):
            await vllm_watch._is_alive(pool, member, ServerStatus(instance="new", paused=False, dirty=False))
        assert seen == [("out", "someone restarted it", None, 0, False)]
        assert member.needs_weights

    asyncio.run(work())


def test_leases_are_renewed_over_failures_and_a_lost_one_ends_the_watch(monkeypatch):
    monkeypatch.setattr(vllm_watch, "RENEW_S", 0.01)
    answers = [
        ServerError("503"),
        RefusedError("401"),
        None,
        ServerError("late"),
        LeaseError("another run trains on it"),
    ]

    async def work():
        pool = pool_of(1)
        (member,) = pool.members
        pool._set(member, "updating", "a transfer that takes long")  # nobody looks at it meanwhile

        async def renew():
            answer = answers.pop(0)
            if answer is not None:
                raise answer

        member.server.renew = renew
        with pytest.raises(LeaseError, match="another run trains on it"):
            async with asyncio.timeout(5):
                await pool.watch(heartbeat_s=60.0, check_s=1.0)
        assert answers == []

    asyncio.run(work())


def test_only_marks_of_this_run_are_its_own():
    async def work():
        for tag, expected in ((None, None), ("aa:1", None), ("aa:7", None), ("bb:1", "bb:1"), ("7", "7")):
            results = {"results": [{"tag": tag, "dirty": False}]}
            server = Scripted(**{"/health": {}, "/is_paused": {"is_paused": False}, "/collective_rpc": results})
            server.owner = Owner.here("aa")
            await server.connect()
            server.mark = "aa:1"
            assert (await server.check(1.0)).foreign == expected
            server.mark = tag  # as it was found: an earlier run's
            assert (await server.check(1.0)).foreign is None

    asyncio.run(work())


def test_a_worker_that_fails_would_fail_again_so_the_run_ends_after_three_pushes():
    """A route that fails for a while is in tests/rollout/vllm/test_engine.py."""
    loop, pushes = Loop(), []

    class Failing(Weights):
        def give(self, members, version):
            pushes.append(version)
            return [], "worker 0: no such tensor", False

    try:
        with pytest.raises(ValueError, match="version 4 after 3 attempts .*worker 0: no such tensor"):
            weights = Failing(pool_of(1), loop, sync=None, check=lambda: None)
            weights.give_all(weights.pool.members, 4)
    finally:
        loop.close()
    assert pushes == [4, 4, 4]


def test_a_server_that_is_out_is_not_opened_by_refill():
    async def work():
        pool = pool_of(1)
        (member,) = pool.members
        assert not await pool.refill(member, 2)  # it was never given weights
        assert (member.state, member.version, member.reason, pool.version) == ("out", None, NEEDS_WEIGHTS, None)

        ready(pool, 0)
        assert await pool.refill(member, 3, "policy-v3")  # an adapter: it was never stopped
        assert (member.state, member.version, member.model, pool.version) == ("ready", 3, "policy-v3", 3)

        async def nothing(*_):
            return None

        async def fails_meanwhile():
            await pool.fail(member, "its engine has not answered for 30 s")

        member.server.set_version = member.server.resume = nothing
        pool._set(member, "updating", "")
        assert await pool.refill(member, 4) and member.state == "ready"
        pool._set(member, "updating", "")
        member.server.resume = fails_meanwhile
        assert not await pool.refill(member, 5)
        assert (member.state, member.version, pool.version) == ("out", 4, 4)

    asyncio.run(work())


def test_spans_join_and_split_by_version():
    done = Progress()
    for ids, version in (([5, 6], 1), ([7], 1), ([], 2), ([8, 9], 3)):
        done.add(Segment(ids, [-1.0] * len(ids), "abort"), version)
    assert done.versions == [(1, 3), (3, 2)]
    assert finish(done, "length").versions == [(1, 3), (3, 2)]
    cut = finish(done, "stop", 4)
    assert (cut.ids, len(cut.logps), cut.versions) == ([5, 6, 7, 8], 4, [(1, 3), (3, 1)])
    assert finish(done, "stop", 3).versions == [(1, 3)]


def test_a_stop_string_in_two_halves_is_found():
    words = ["a", "b#", "##", "c", "###"]

    def decode(ids):
        return "".join(words[i] for i in ids)

    sampling = Sampling(stop=("###",))
    assert stop_end([0, 1, 3, 3], sampling, decode) is None
    assert stop_end([0, 1, 2, 3, 4], sampling, decode) == 3
    assert stop_end([0, 1, 2], sampling, None) is None


async def serve(*replies: bytes):
    """A server that answers each connection with the next of these bytes and closes it."""
    queue = list(replies)

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(queue.pop(0))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    return server, HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")


def test_http_replies_come_in_three_kinds():
    async def work():
        server, client = await serve(
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\nTrailer: 1\r\n\r\n",
            b"HTTP/1.0 404 No\r\n\r\nhello",
        )
        async with server:
            assert [await client.send("GET", "/", timeout=5) for _ in range(3)] == [
                (200, b"hello"),
                (201, b"hello"),
                (404, b"hello"),
            ]

    asyncio.run(work())


def test_a_broken_reply_is_a_failed_server():
    broken = (
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"x" * 3_000_000,
    )

    async def work():
        server, client = await serve(*broken)
        async with server:
            vllm = VllmServer(f"http://127.0.0.1:{client.port}")
            for reply in broken:
                with pytest.raises(ServerError, match="/pause failed"):
                    await vllm.pause()
                    pytest.fail(f"{reply[:60]!r} was taken for a reply")

    asyncio.run(work())


def test_an_address_must_be_one():
    for url in ("127.0.0.1:8000", "ftp://x", "http://"):
        with pytest.raises(ValueError, match="is not an address"):
            HttpClient(url)
    with pytest.raises(ValueError, match="STROP_VLLM_TOKEN"):
        HttpClient("http://127.0.0.1", "a\r\nb")


def test_loop_runs_starts_and_cancels():
    loop = Loop()
    cancelled = threading.Event()

    async def wait():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def add(a, b):
        await asyncio.sleep(0)
        return a + b

    assert loop.run(add(1, 2)) == 3
    future = loop.start(add(3, 4))
    assert future.result(5) == 7
    with pytest.raises(TimeoutError):
        loop.run(wait(), timeout=0.05)
    assert cancelled.wait(5)
    cancelled.clear()
    loop.start(wait())
    loop.run(add(0, 0))
    loop.close()
    assert cancelled.is_set()
    loop.close()
    with pytest.raises(RuntimeError, match="is closed"):
        loop.start(add(1, 1))
