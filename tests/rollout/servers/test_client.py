"""Routing, reply checks and the HTTP client, without vLLM (see tests/rollout/vllm)."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import socket
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from rollout.engine import Request, Sampling
from rollout.engines.weights import Weights
from rollout.servers import client as http_client
from rollout.servers import pool as server_pool
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
from rollout.servers.pool import NEEDS_WEIGHTS, SLACK, Pool, Sampled, finish, stop_end
from rollout.sets import join

SAMPLING = Sampling(max_tokens=3, stop_ids=(2,))


def reply_32(ids=(9, 8, 2), logps=(-0.1, -1.2, -0.3), finish_reason="stop", **choice):
    """A reply of vLLM 0.32."""
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
    """A reply of vLLM 0.24: ids inside strings, no weight versions."""
    content = [
        {"token": f"token_id:{i}", "logprob": p, "bytes": None, "top_logprobs": []}
        for i, p in ((9, -0.1), (8, -1.2), (2, -0.3))
    ]
    choice = {"index": 0, "logprobs": {"content": content}, "finish_reason": "stop", "token_ids": [9, 8, 2]}
    choice["routed_experts"] = None
    return {"request_id": "x", "choices": [choice], "prompt_logprobs": None, "kv_transfer_params": None}


def read(reply, sampling=SAMPLING, **options):
    return read_segment(reply, sampling, max_tokens=3, vocab_size=10, **options)


def test_read_segment():
    for reply in (reply_24(), reply_32()):
        assert read(reply) == Segment([9, 8, 2], [-0.1, -1.2, -0.3], "stop")
    assert read(reply_32((), (), "abort")) == Segment([], [], "abort")
    assert read(reply_32((9,), (-0.1,), "abort", logprobs={"content": [{"logprob": -0.1}]})).ids == [9]
    assert read(reply_32((9, 8), (-0.1, -0.2)), Sampling(stop=("x",))).ids == [9, 8]  # a stop string ends anywhere
    experts = np.arange(5 * 2 * 3, dtype=np.uint8).reshape(5, 2, 3)  # of --enable-return-routed-experts
    reply = reply_24()
    np.save(text := io.BytesIO(), experts)
    reply["choices"][0]["routed_experts"] = base64.b64encode(text.getvalue()).decode()
    assert np.array_equal(read(reply).routes, experts)


def as_text(*numbers):
    np.save(buffer := io.BytesIO(), np.array(numbers, np.int32))
    return base64.b64encode(buffer.getvalue()).decode()


def test_kept_ids_are_requested_and_read():
    """The ids that top-k, top-p or min-p kept come with training samples, and stay with their tokens."""
    plain = {"max_tokens": 3, "stop_ids": (2,)}
    for filters, count in (({"top_k": 5}, 26), ({"top_p": 0.9}, 1025), ({"min_p": 0.1}, 1025), ({"top_k": 900}, 1025)):
        params = sampling_params(Sampling(**plain, **filters, for_training=True), None, 4)
        assert params["logprobs"] == count and filters.items() <= params.items()
    limited = Sampling(**plain, top_p=0.9, for_training=True)
    sets = (~9, 4, 7, ~8, ~2, 1)
    segment = read(reply_32(sets=as_text(*sets)), limited)
    assert segment.sets.tolist() == list(sets)
    for wrong in (None, as_text(*sets[:-2]), as_text(~9, 4, ~7, ~2)):
        with pytest.raises(ValueError, match="3 sampled ids come without"):
            read(reply_32(sets=wrong), limited)
    done = Sampled()
    done.add(segment, 1)
    done.add(read(reply_32((), (), "abort"), limited), 1)
    done.add(read(reply_32((5,), (-0.1,), "abort", sets=as_text(~5, 3)), limited), 2)
    assert join(finish(done, "stop").sets, 4).tolist() == [*sets, ~5, 3]
    assert join(finish(done, "stop", 2).sets, 2).tolist() == list(sets[:4])


def test_invalid_replies_are_rejected():
    for reply, message in (
        ({}, "malformed"),
        ({"choices": []}, "malformed"),
        ({"choices": [None]}, "malformed"),
        (reply_32(logps=(-0.1, -1.2)), "2 log-probs for 3 tokens"),
        (reply_32(logps=(-0.1, float("nan"), -0.3)), "not finite"),
        (reply_32(logps=(-0.1, float("-inf"), -0.3)), "not finite"),
        (reply_32(logps=(-0.1, -9999.0, -0.3)), "not finite"),
        (reply_32(logps=(-0.1, 0.5, -0.3)), "0.5 is above 0"),
        (reply_32(logps=(-0.1, -(10**400), -0.3)), "not finite"),
        (reply_32(logps=(-0.1, "x", -0.3)), "not numbers"),
        (reply_32(logps=(-0.1, None, -0.3)), "not numbers"),
        (reply_32(ids=(9, 10, 2)), "vocabulary of 10"),
        (reply_32(ids=(9, -1, 2)), "vocabulary of 10"),
        (reply_32(ids=(9, "8", 2)), "not integers"),
        (reply_32(token_ids=5), "not integers"),
        (reply_32(ids=(9, 8, 7)), "stopped at token [7]"),
        (reply_32(ids=(), logps=()), "stopped at token []"),
        (reply_32(finish_reason="error"), "finish_reason='error'"),
        (reply_32(finish_reason=None), "finish_reason=None"),
        (reply_32((9, 8), (-0.1, -0.2), "length"), "2 tokens with finish_reason=length and max_tokens=3"),
        (reply_32((9, 8, 7, 2), (-0.1,) * 4), "4 tokens"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            read(reply)


def test_read_scores():
    entries = [None, {"6": {"logprob": -1.0, "rank": 3}}, {"7": {"logprob": -2.0}, "1": {"logprob": -0.1}}]
    assert read_scores({"prompt_logprobs": entries}, [5, 6, 7]) == [-1.0, -2.0]
    for broken in (None, entries[:2], [None, {"5": {"logprob": -1.0}}, entries[2]]):
        with pytest.raises(ValueError, match="prompt_logprobs"):
            read_scores({"prompt_logprobs": broken}, [5, 6, 7])


def test_sampling_params():
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


def test_check_sampling():
    check_sampling(Sampling(temperature=0.7), training=True)
    check_sampling(Sampling(top_p=0.9, top_k=5, temperature=0.0), training=False)
    for setting, message in (
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_k": 1025}, "top_k=1025: .*1,024"),
        ({"min_p": 1.5}, "min_p=1.5"),
        ({"temperature": 0.005}, "temperature=0.005: .*0.01"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"stop": ("",)}, "stop=''"),
    ):
        with pytest.raises(ValueError, match=message):
            check_sampling(Sampling(**setting), training=True)


def test_error_text_is_one_line():
    assert error_text(b'{"error":{"message":"no such\\n model","code":404}}') == "no such model"
    assert error_text(b'{"detail":"nope"}') == "nope"
    assert error_text(b"Bad\n Gateway") == "Bad Gateway"
    assert error_text(b"[" * 100_000) == "[" * 400


def pool_of(count, **options):
    return Pool([VllmServer(f"http://127.0.0.1:{9 + i}") for i in range(count)], log=lambda text: None, **options)


def ready(pool, *loads):
    for member, load in zip(pool.members, loads, strict=True):
        member.state, member.version, member.in_flight = "ready", 1, load
    return pool


def test_routing_prefers_the_least_busy_server_or_the_prompts_previous_server():
    pool = ready(pool_of(3, max_in_flight=9), 5, 2, 9)
    assert pool._choose(1).index == 1
    pool.members[1].state = "out"
    assert pool._choose(2).index == 0
    pool.members[0].in_flight = 9
    assert pool._choose(3) is None

    pool = ready(pool_of(2), 0, 1)
    assert pool._choose(7).index == 0
    pool.members[0].in_flight = 1 + SLACK
    assert pool._choose(7).index == 0  # with its prefix cache
    pool.members[0].in_flight = 2 + SLACK
    assert pool._choose(7).index == 1
    pool.members[0].in_flight = 0
    assert pool._choose(7).index == 1  # its previous server has changed


def test_waiting_requests_are_served_in_order():
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


def test_requests_fail_when_no_server_becomes_ready():
    async def work():
        pool = pool_of(2, patience=0.1)
        tasks = [pool.generate(Request(prompt_ids=[1], seed=i), SAMPLING) for i in range(3)]
        start = time.monotonic()
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert 0.05 < time.monotonic() - start < 5
        (message,) = {str(error) for error in errors}
        reasons = "http://127.0.0.1:9: needs weights; http://127.0.0.1:10: needs weights"
        assert message.startswith(f"vllm: no server was ready for 0.1 s ({reasons})")
        with pytest.raises(ServerError, match="no server was ready"):
            await pool.generate(Request(prompt_ids=[1], seed=1), SAMPLING)

    asyncio.run(work())


def test_closing_the_pool_fails_waiting_requests():
    async def work():
        pool = pool_of(1)
        task = asyncio.ensure_future(pool.generate(Request(prompt_ids=[1], seed=1), SAMPLING))
        await asyncio.sleep(0)
        await pool.close()
        with pytest.raises(ServerError, match="no server is left .*the pool is closed"):
            await task

    asyncio.run(work())


def test_unreachable_servers_are_reported(monkeypatch):
    monkeypatch.setattr(http_client, "CONNECT_S", 0.2)

    async def work():
        for url in ("http://127.0.0.1:9", "http://localhost:9"):  # localhost has several addresses
            server = VllmServer(url)
            message = f"^vllm.url={re.escape(url)}: cannot be reached \\(connection refused\\)"
            for call in (server.connect(), server.check(1), server.pause(), server.rpc("strop_info", timeout=1)):
                with pytest.raises(ServerError, match=message):
                    await call
        with pytest.raises(ServerError, match="^vllm.url=http://no.invalid:1: cannot be reached \\([a-z ,]+\\)"):
            await VllmServer("http://no.invalid:1").connect()
        with socket.socket() as full:  # accepts no connection; its queue of one is full
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            port = full.getsockname()[1]
            _, queued = await asyncio.open_connection("127.0.0.1", port)
            start = time.monotonic()
            with pytest.raises(ServerError, match=r"cannot be reached \(no connection within 0.2 s\)"):
                await VllmServer(f"http://127.0.0.1:{port}").generate([5], SAMPLING, seed=1, max_tokens=3)
            assert time.monotonic() - start < 5
            queued.close()

    asyncio.run(work())


PLAIN = {"paths": dict.fromkeys((GENERATE, *ROUTES), {})}  # the routes of 0.24


class Scripted(VllmServer):
    """Answers control calls from a table {path: JSON or text}; 404 for other paths."""

    def __init__(self, **answers):
        super().__init__("http://127.0.0.1:9")
        self.requests = []
        model = {"logprobs_mode": "processed_logprobs", "max_model_len": 64, "dtype": "torch.float32"}
        model |= {"model": "m", "enable_sleep_mode": True}
        config = {"model_config": model, "parallel_config": {}, "lora_config": None, "instance_id": "a"}
        self.answers = {
            "/version": {"version": "0.32.0"},
            "/server_info?config_format=json": {"vllm_config": config},
            "/get_world_size": {"world_size": 1},
            "/openapi.json": {"paths": dict.fromkeys((GENERATE, VERSION_ROUTE, *ROUTES), {})},
        } | answers

    async def _send(self, method, path, data, *, timeout, reuse=False):
        self.requests.append((method, path))
        answer = self.answers.get(path)
        if answer is None:
            return 404, b'{"detail": "Not Found"}'
        return 200, answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()


def test_connect_reads_the_list_of_routes():
    async def work():
        server = Scripted()
        await server.connect()
        assert server.info.sleep_mode and server.info.model_len == 64
        assert ("GET", "/openapi.json") in server.requests
        assert not [path for method, path in server.requests if method == "POST"], "connect must not sample"
        await Scripted(**{"/openapi.json": None}).connect()  # --disable-fastapi-docs
        for paths, error, message in (
            (dict.fromkeys(ROUTES, {}), RefusedError, "--enable-scale-out"),
            ({GENERATE: {}}, RefusedError, "vLLM 0.32.0 lacks the route /pause"),
            (None, ServerError, "/openapi.json"),
        ):
            with pytest.raises(error, match=message):
                await Scripted(**{"/openapi.json": {"paths": paths}}).connect()
        for version in ("0.24.0", "0.28.1"):  # without VERSION_ROUTE, tokens are not marked
            plain = Scripted(**{"/version": {"version": version}, "/openapi.json": PLAIN})
            await plain.connect()
            assert not plain.info.marks_tokens

    asyncio.run(work())


def test_keep_alive_follows_the_server():
    async def keep_s(url, answer):
        server = Scripted(**{GENERATE_ROUTE: answer})
        server._http.host = url
        await server.connect()
        return server._http.keep_s

    async def work():
        assert await keep_s("127.0.0.1", {"keep_alive": 120.0}) == 60.0
        assert await keep_s("10.0.0.1", {"keep_alive": 120.0}) == 2.0  # the network may drop idle connections
        assert await keep_s("127.0.0.1", {"route": GENERATE_ROUTE}) == 2.0  # an older strop server
        assert await keep_s("127.0.0.1", None) == 2.0  # vLLM without strop's route

    asyncio.run(work())


def gauges(*awake):
    lines = ["# HELP vllm:engine_sleep_state Engine sleep state; awake = 0 means engine is sleeping"]
    for i, value in enumerate(awake):
        labels = f'engine="{i}",model_name="base",sleep_state='
        lines += [f'vllm:engine_sleep_state{{{labels}"weights_offloaded"}} {1 - value}']
        lines += [f'vllm:engine_sleep_state{{{labels}"awake"}} {value}']
    return "\n".join(lines)


def test_is_sleeping_distinguishes_sleep_from_pause():
    assert is_awake(gauges(1.0)) and is_awake(gauges(1.0, 1.0))
    assert not is_awake(gauges(0.0)) and not is_awake(gauges(1.0, 0.0)) and not is_awake(gauges())

    async def sleeps(version, route, awake):
        answers = {"/version": {"version": version}, "/is_sleeping": {"is_sleeping": route}, "/metrics": gauges(awake)}
        server = Scripted(**answers | ({"/openapi.json": PLAIN} if version == "0.24.0" else {}))
        await server.connect()
        return await server.is_sleeping()

    async def work():
        assert not await sleeps("0.32.0", route=False, awake=1.0)
        assert not await sleeps("0.32.0", route=True, awake=1.0)  # only paused
        assert await sleeps("0.32.0", route=True, awake=0.0)
        assert not await sleeps("0.24.0", route=False, awake=1.0)
        assert await sleeps("0.24.0", route=True, awake=1.0)  # perhaps only its weights are awake

    asyncio.run(work())


def test_invalid_prompts_are_not_sent():
    async def work():
        server = VllmServer("http://127.0.0.1:9", vocab_size=10)
        for ids, message in (([], "empty prompt"), ([1, 10], "vocabulary of 10"), ([-1], "vocabulary of 10")):
            with pytest.raises(RefusedError, match=message):
                await server.generate(ids, SAMPLING, seed=1, max_tokens=3)

    asyncio.run(work())


def test_request_to_a_server_without_weights_yields_to_other_tasks():
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


def test_restarted_server_is_put_out_before_connecting():
    async def work():
        pool = ready(pool_of(1), 0)
        (member,) = pool.members
        member.server.info = SimpleNamespace(instance="old")
        states = []

        async def connect():
            task = asyncio.ensure_future(pool.generate(Request(prompt_ids=[1], seed=1), SAMPLING))
            for _ in range(5):
                await asyncio.sleep(0)
            states.append((member.state, member.version, member.in_flight, task.done()))
            task.cancel()

        member.server.connect = connect
        async with asyncio.timeout(5):
            await server_pool._handle_status(pool, member, ServerStatus(instance="new", paused=False, dirty=False))
        assert states == [("out", None, 0, False)]
        assert member.needs_weights

    asyncio.run(work())


def test_lease_renewal_survives_failures_and_a_lost_lease_ends_the_watch(monkeypatch):
    monkeypatch.setattr(server_pool, "RENEW_S", 0.01)
    answers = [ServerError("503"), RefusedError("401"), None, ServerError("late"), LeaseError("lost")]

    async def work():
        pool = pool_of(1)
        (member,) = pool.members
        pool._set(member, "updating", "a long transfer")  # the watch does not check it

        async def renew():
            answer = answers.pop(0)
            if answer is not None:
                raise answer

        member.server.renew = renew
        with pytest.raises(LeaseError, match="lost"):
            async with asyncio.timeout(5):
                await pool.watch(heartbeat_s=60.0, check_s=1.0)
        assert answers == []

    asyncio.run(work())


def test_tags_of_other_runs_are_foreign():
    async def work():
        for tag, expected in ((None, None), ("aa:1", None), ("aa:7", None), ("bb:1", "bb:1"), ("7", "7")):
            results = {"results": [{"tag": tag, "dirty": False}]}
            server = Scripted(**{"/health": {}, "/is_paused": {"is_paused": False}, "/collective_rpc": results})
            server.owner = Owner.here("aa")
            await server.connect()
            server.mark = "aa:1"
            assert (await server.check(1.0)).foreign == expected
            server.mark = tag  # already set when the server was connected, by an earlier run
            assert (await server.check(1.0)).foreign is None

    asyncio.run(work())


def test_run_ends_after_three_failed_weight_syncs():
    """For a route that fails for a while, see tests/rollout/vllm/test_engine.py."""
    loop, pushes = Loop(), []

    class Failing(Weights):
        def give(self, members, version):
            pushes.append(version)
            return [], "worker 0: no such tensor", False

    try:
        with pytest.raises(ValueError, match="version 4 .* 3 attempts .*no such tensor"):
            weights = Failing(pool_of(1), loop, sync=None, check=lambda: None)
            weights.give_all(weights.pool.members, 4)
    finally:
        loop.close()
    assert pushes == [4, 4, 4]


def test_refill_does_not_open_a_server_that_is_out():
    async def work():
        pool = pool_of(1)
        (member,) = pool.members
        assert not await pool.refill(member, 2)  # never received weights
        assert (member.state, member.version, member.reason, pool.version) == ("out", None, NEEDS_WEIGHTS, None)

        ready(pool, 0)
        assert await pool.refill(member, 3, "policy-v3")  # an adapter, so the server was never stopped
        assert (member.state, member.version, member.model, pool.version) == ("ready", 3, "policy-v3", 3)

        async def nothing(*_):
            return None

        async def fail():
            await pool.fail(member, "no response")

        member.server.set_version = member.server.resume = nothing
        pool._set(member, "updating", "")
        assert await pool.refill(member, 4) and member.state == "ready"
        pool._set(member, "updating", "")
        member.server.resume = fail
        assert not await pool.refill(member, 5)
        assert (member.state, member.version, pool.version) == ("out", 4, 4)

    asyncio.run(work())


def test_progress_merges_and_truncates_versions():
    done = Sampled()
    for ids, version in (([5, 6], 1), ([7], 1), ([], 2), ([8, 9], 3)):
        done.add(Segment(ids, [-1.0] * len(ids), "abort"), version)
    assert done.versions == [(1, 3), (3, 2)]
    assert finish(done, "length").versions == [(1, 3), (3, 2)]
    cut = finish(done, "stop", 4)
    assert (cut.ids, len(cut.logps), cut.versions) == ([5, 6, 7, 8], 4, [(1, 3), (3, 1)])
    assert finish(done, "stop", 3).versions == [(1, 3)]


def test_stop_end_finds_a_stop_string_across_tokens():
    words = ["a", "b#", "##", "c", "###"]

    def decode(ids):
        return "".join(words[i] for i in ids)

    sampling = Sampling(stop=("###",))
    assert stop_end([0, 1, 3, 3], sampling, decode) is None
    assert stop_end([0, 1, 2, 3, 4], sampling, decode) == 3
    assert stop_end([0, 1, 2], sampling, None) is None


async def serve(*replies: bytes):
    """Start a server that sends the next reply to each connection and closes it."""
    queue = list(replies)

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(queue.pop(0))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    return server, HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")


def test_http_reply_formats():
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


def test_only_completions_keep_their_connection():
    """A connection that a weight sync or a check opened is never used again."""

    async def work():
        server, client = await serve(*[b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"] * 4)
        async with server:
            for reuse, kept in ((False, 0), (True, 1), (False, 1)):
                await client.send("POST", "/pause", timeout=5, reuse=reuse)
                assert len(client.idle) == kept
            client.close()

    asyncio.run(work())


def test_broken_http_replies_are_server_errors(monkeypatch):
    monkeypatch.setattr(http_client, "BODY_LIMIT", 2**20)
    broken = (
        b"HTTP/1.0 200 OK\r\n\r\n" + b"x" * 2**21,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + (b"80000\r\n" + b"x" * 2**19 + b"\r\n") * 4,
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
                    pytest.fail(f"{reply[:60]!r} was accepted")

    asyncio.run(work())


def test_http_client_rejects_urls_and_tokens():
    for url in ("127.0.0.1:8000", "ftp://x", "http://"):
        with pytest.raises(ValueError, match=f"vllm.url={url}: not a URL"):
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
