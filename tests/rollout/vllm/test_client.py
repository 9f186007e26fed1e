"""The client and the pool with a real server: log-probs, seeds, stops and interruptions."""

from __future__ import annotations

import asyncio
from functools import cache

import numpy as np
import pytest
import torch

from rollout.engine import Request, Sampling
from rollout.engines.stop import StopCheck
from rollout.servers.client import GENERATE, GENERATE_ROUTE, RefusedError, ServerError, VllmServer
from rollout.servers.pool import Pool
from tests.rollout.vllm.conftest import slowed
from tests.rollout.vllm.scripted import proxies, rewrite

VOCAB = 275
EOS = 2


@cache
def model_at(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@cache
def tokenizer_at(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def logps_by_transformers(folder, prompt, ids, temperature):
    with torch.no_grad():
        logits = model_at(folder)(torch.tensor([prompt + ids])).logits[0].float() / (temperature or 1.0)
    rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return rows[torch.arange(len(ids)), torch.tensor(ids)].tolist()


def largest_gap(a, b):
    assert len(a) == len(b)
    return max((abs(x - y) for x, y in zip(a, b, strict=True)), default=0.0)


def prompts(folder, count=8):
    tokenizer = tokenizer_at(folder)
    return [tokenizer(f"[{i}1,{i + 2}]", add_special_tokens=False)["input_ids"] for i in range(count)]


def with_server(fixture, work, **options):
    """Run `work(server)` with a connected client."""

    async def body():
        server = VllmServer(fixture.url, token=fixture.token, vocab_size=VOCAB, **options)
        await server.connect()
        try:
            return await work(server)
        finally:
            await server.close()

    return asyncio.run(body())


async def ready_pool(servers, **options):
    pool = Pool(servers, log=lambda text: None, **options)
    for member in pool.members:
        await pool.empty(member)
        await pool.refill(member, 1)
    return pool


def test_connect_reads_the_server_settings(tied_server, untied_server):
    log = tied_server.log_path
    size = log.stat().st_size

    async def info(server):
        return server.info

    tied, untied = with_server(tied_server, info), with_server(untied_server, info)
    assert (tied.lora, untied.lora) == (True, False)
    assert tied.version.startswith("0.")
    assert (tied.dtype, tied.workers) == ("float32", 1)
    assert (tied.extension, tied.model_len) == (True, 256)
    assert tied.instance != untied.instance and not tied.sleep_mode
    assert b"ERROR" not in log.read_bytes()[size:]


def test_completion_logps_match_transformers(tied_server, untied_server):
    for fixture, temperature in ((tied_server, 0.7), (untied_server, 1.0), (untied_server, 0.0)):
        sampling = Sampling(temperature=temperature, max_tokens=24, stop_ids=(EOS,))

        async def work(server, folder=fixture.model_folder, sampling=sampling):
            calls = [
                server.generate(prompt, sampling, seed=i, max_tokens=24) for i, prompt in enumerate(prompts(folder))
            ]
            return await asyncio.gather(*calls)

        folder = fixture.model_folder
        for prompt, segment in zip(prompts(folder), with_server(fixture, work), strict=True):
            assert segment.finish == ("stop" if segment.ids[-1] == EOS else "length")
            expected = logps_by_transformers(folder, prompt, segment.ids, temperature)
            assert largest_gap(segment.logps, expected) <= 1e-4


def test_kept_ids_explain_the_log_probs(untied_server):
    """Over the ids that the server says it kept, transformers computes the server's log-probs."""
    folder = untied_server.model_folder
    for filters in ({"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.9, "min_p": 0.02}):
        sampling = Sampling(temperature=0.7, max_tokens=24, stop_ids=(EOS,), for_training=True, **filters)

        async def work(server, sampling=sampling):
            return await asyncio.gather(
                *(server.generate(prompt, sampling, seed=i, max_tokens=24) for i, prompt in enumerate(prompts(folder)))
            )

        sizes = []
        for prompt, segment in zip(prompts(folder), with_server(untied_server, work), strict=True):
            with torch.no_grad():
                logits = model_at(folder)(torch.tensor([prompt + segment.ids])).logits[0, len(prompt) - 1 : -1] / 0.7
            parts = np.split(segment.sets, np.flatnonzero(segment.sets < 0))[1:]
            kept = [[i if i >= 0 else ~i for i in part.tolist()] for part in parts]
            sizes += map(len, kept)
            expected = [float(row[ids].log_softmax(-1)[0]) for row, ids in zip(logits, kept, strict=True)]
            assert largest_gap(segment.logps, expected) <= 1e-4
        assert max(sizes) > 1 and ("top_k" not in filters or max(sizes) <= filters["top_k"])

    async def without_route(server):
        server.has_generate_route = False
        await server.generate([5, 6], sampling, seed=0, max_tokens=2)

    with pytest.raises(RefusedError, match="top_k=40.*rollout.serve"):
        with_server(untied_server, without_route)


def test_strop_route_matches_vllms_route(untied_server):
    samplings = [
        Sampling(max_tokens=24, **options)
        for options in (
            {"temperature": 0.0},
            {"temperature": 1.0, "stop_ids": (EOS, 30, 31, 32)},
            {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
            {"temperature": 0.0, "stop": ("1",)},
        )
    ]

    async def work(server):
        assert server.has_generate_route
        segments = []
        for server.has_generate_route in (True, False):
            calls = [
                server.generate(prompt, sampling, seed=i, max_tokens=24, version=3)
                for sampling in samplings
                for i, prompt in enumerate(prompts(untied_server.model_folder))
            ]
            segments.append(await asyncio.gather(*calls))
        return segments

    for strop, vllm in zip(*with_server(untied_server, work), strict=True):
        assert (strop.ids, strop.finish) == (vllm.ids, vllm.finish)
        assert largest_gap(strop.logps, vllm.logps) <= 1e-5


def test_strop_route_rejects_invalid_requests(tied_server):
    async def work(server):
        good = {"model": "base", "token_ids": [5, 6], "sampling_params": {"max_tokens": 2, "logprobs": 0}}
        for change, status, message in (
            ({"model": "missing"}, 404, "missing: not found"),
            ({"sampling_params": {"temperature": -1.0}}, 400, "temperature"),
            ({"sampling_params": {"warmth": 1.0}}, 400, "warmth"),
            ({"token_ids": [5] * 300}, 400, "256"),
        ):
            with pytest.raises(RefusedError, match=message) as caught:
                await server._json("POST", GENERATE_ROUTE, good | change, timeout=30)
            assert caught.value.status == status
        assert len((await server._json("POST", GENERATE_ROUTE, good, timeout=30))["choices"][0]["logps"]) == 2

    with_server(tied_server, work)


async def server_metric(server, name):
    text = (await server._call("GET", "/metrics", None, timeout=30)).decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"vllm:{name}{{"))


async def num_sampled(server):
    return await server_metric(server, "generation_tokens_total")


async def some_tokens(server, task, before):
    """Wait until the server has sampled tokens for a task; `before`: num_sampled at its start."""
    while await num_sampled(server) <= before + 8:
        assert not task.done(), "the completion finished too early"
        await asyncio.sleep(0.02)


def test_completion_ends_when_its_client_disconnects(untied_server):
    async def work(server):
        for server.has_generate_route in (True, False):
            task = asyncio.ensure_future(server.generate([5, 6, 7], Sampling(max_tokens=240), seed=1, max_tokens=240))
            while not await server_metric(server, "num_requests_running"):
                assert not task.done(), "the completion finished too early"
            task.cancel()
            async with asyncio.timeout(30):
                while await server_metric(server, "num_requests_running"):
                    pass
            count = await num_sampled(server)
            assert count == await num_sampled(server)

    with slowed(untied_server):
        with_server(untied_server, work)


def test_prompt_logps_match_transformers_at_temperature_1(untied_server):
    folder = untied_server.model_folder
    ids = [*range(5, 45), EOS, 7, 8]
    logps = with_server(untied_server, lambda server: server.logps(ids))
    assert largest_gap(logps, logps_by_transformers(folder, ids[:1], ids[1:], 1.0)) <= 1e-4


def test_seed_determines_the_completion(tied_server):
    sampling = Sampling(temperature=1.5, max_tokens=24)
    prompt = prompts(tied_server.model_folder)[0]

    async def work(server):
        seeds = [3, 3, 4, 2**64 + 3, -5, None, None]
        return await asyncio.gather(*(server.generate(prompt, sampling, seed=s, max_tokens=24) for s in seeds))

    a, b, c, folded, negative, free, other_free = (segment.ids for segment in with_server(tied_server, work))
    assert a == b == folded
    assert a != c and c != negative and free != other_free


def test_only_sampling_stop_ids_end_a_completion(tied_server):
    """The model's generation_config has an end-of-text id; a Sampling without it does not stop there."""
    prompt = prompts(tied_server.model_folder)[1]

    async def work(server):
        free = await server.generate(prompt, Sampling(temperature=0.0, max_tokens=64), seed=1, max_tokens=64)
        stops = Sampling(temperature=0.0, max_tokens=64, stop_ids=(EOS,))
        return free, await server.generate(prompt, stops, seed=1, max_tokens=64)

    free, stopped = with_server(tied_server, work)
    assert (free.finish, len(free.ids)) == ("length", 64)
    assert EOS in free.ids
    end = free.ids.index(EOS) + 1
    assert (stopped.finish, stopped.ids) == ("stop", free.ids[:end])  # includes the stop token


def test_stop_string_ends_a_completion_at_its_last_token(tied_server):
    folder = tied_server.model_folder
    tokenizer, prompt = tokenizer_at(folder), prompts(folder)[0]
    sampling = Sampling(temperature=1.5, max_tokens=64)

    async def work(server):
        free = await server.generate(prompt, sampling, seed=5, max_tokens=64)
        text = tokenizer.decode(free.ids, skip_special_tokens=True)
        stops = Sampling(temperature=1.5, max_tokens=64, stop=(text[4:6], "not there"))
        return free, stops, await server.generate(prompt, stops, seed=5, max_tokens=64)

    free, stops, stopped = with_server(tied_server, work)
    whole = tokenizer.decode(stopped.ids, skip_special_tokens=True)
    assert stopped.finish == "stop"
    assert stopped.ids == free.ids[: len(stopped.ids)] and len(stopped.logps) == len(stopped.ids)
    assert stops.stop[0] in whole
    assert stops.stop[0] not in tokenizer.decode(stopped.ids[:-1], skip_special_tokens=True)
    check = StopCheck(tokenizer, stops)
    assert check.texts([stopped.ids], [True]) == [whole[: whole.index(stops.stop[0])]]


def test_invalid_requests_are_not_retried(tied_server):
    prompt = prompts(tied_server.model_folder)[0]

    async def work(server):
        with pytest.raises(RefusedError, match="max_tokens=256: .*context of 256"):
            await server.generate(prompt, Sampling(max_tokens=256), seed=1, max_tokens=256)
        with pytest.raises(RefusedError, match="404 .*missing"):
            await server.generate(prompt, Sampling(), seed=1, max_tokens=3, model="missing")
        with pytest.raises(RefusedError, match="rejected /v1/load_lora_adapter"):
            await server.load_adapter("x", "/nowhere")
        pool = await ready_pool([server])
        pool.members[0].server.vocab_size = None
        with pytest.raises(RefusedError, match="400 .*vocabulary"):
            await pool.generate(Request(prompt_ids=[5, 7000], seed=1), Sampling(max_tokens=3))
        assert pool.counts["retries"] == 0 and pool.members[0].state == "ready"

    with_server(tied_server, work)


def test_connect_rejects_unusable_servers(tied_server):
    def raw_logprobs(value):
        value["vllm_config"]["model_config"]["logprobs_mode"] = "raw_logprobs"

    info = "/server_info?config_format=json"

    async def work():
        with pytest.raises(RefusedError, match="wrong token; set STROP_VLLM_TOKEN"):
            await VllmServer(tied_server.url, token="wrong").connect()
        async with proxies(tied_server.url, tied_server.token) as (proxy,):
            for change, message in (
                (rewrite("/openapi.json", lambda value: value["paths"].pop("/pause")), "lacks the route /pause"),
                (rewrite("/openapi.json", lambda value: value["paths"].pop(GENERATE)), "--enable-scale-out"),
                (rewrite(info, raw_logprobs), "logprobs_mode=raw_logprobs.*--logprobs-mode processed_logprobs"),
                (lambda path, status, body: (404 if path == info else status, body), "VLLM_SERVER_DEV_MODE"),
            ):
                proxy.change = change
                with pytest.raises(RefusedError, match=message):
                    await VllmServer(proxy.url).connect()

    asyncio.run(work())


def test_interrupted_greedy_completions_equal_uninterrupted_ones(untied_server):
    """The server is drained twice, each time for a new version; `versions` records which version sampled what."""
    requests = [Request(prompt_ids=prompt, seed=i) for i, prompt in enumerate(prompts(untied_server.model_folder))]
    sampling = Sampling(temperature=0.0, max_tokens=200)

    async def work(server):
        pool = await ready_pool([server])
        expected = await pool.generate_all(requests, sampling)
        (member,) = pool.members
        with slowed(untied_server):
            before = await num_sampled(server)
            task = asyncio.ensure_future(pool.generate_all(requests, sampling))
            for version in (2, 3):
                await some_tokens(server, task, before)
                await pool.empty(member)
                assert (member.state, member.in_flight, member.tasks) == ("updating", 0, set())
                before = await num_sampled(server)
                await pool.refill(member, version)
        interrupted = await task
        server.tag = None
        return pool, expected, interrupted

    pool, expected, interrupted = with_server(untied_server, work)
    for a, b in zip(expected, interrupted, strict=True):
        assert b.ids == a.ids
        assert largest_gap(b.logps, a.logps) <= 1e-4
        assert a.versions == [(1, 200)] and a.resumes == 0
        versions = [version for version, _ in b.versions]
        assert versions == sorted(set(versions)) and set(versions) <= {1, 2, 3}
        assert sum(count for _, count in b.versions) == 200
    resumed = [sampled for sampled in interrupted if sampled.resumes]
    assert len(resumed) == pool.counts["resumed_samples"] > 0
    assert any(len(sampled.versions) > 1 for sampled in resumed)


def test_paused_completion_returns_tokens_and_marking_collects_garbage(untied_server):
    async def work(server):
        sampling = Sampling(temperature=0.0, max_tokens=240)
        with slowed(untied_server):
            before = await num_sampled(server)
            task = asyncio.ensure_future(server.generate([5, 6, 7], sampling, seed=1, max_tokens=240))
            await some_tokens(server, task, before)
            await server.pause()
        segment = await task
        (info,) = await server.rpc("strop_info", timeout=30)
        (marked,) = await server.rpc("strop_mark", timeout=30, tag=info["tag"])
        await server.resume()
        return segment, marked

    segment, marked = with_server(untied_server, work)
    assert segment.finish == "abort" and 0 < len(segment.ids) == len(segment.logps)
    assert marked["freed"] >= 0
    assert b"strop_scheduler.scheduler" in untied_server.log_path.read_bytes()


def test_resumed_completions_use_another_seed(untied_server):
    request = Request(prompt_ids=prompts(untied_server.model_folder)[0], seed=7)
    sampling = Sampling(temperature=1.5, max_tokens=200)

    async def work(server):
        async with proxies(untied_server.url, untied_server.token) as (proxy,):
            through = VllmServer(proxy.url, vocab_size=VOCAB)
            await through.connect()
            proxy.seen.clear()
            pool = await ready_pool([through])
            with slowed(untied_server):
                before = await num_sampled(server)
                task = asyncio.ensure_future(pool.generate(request, sampling))
                await some_tokens(server, task, before)
                await pool.empty(pool.members[0])
                await pool.refill(pool.members[0], 2)
            return await task, [body for path, body in proxy.seen if path == GENERATE_ROUTE and body]

    sampled, (first, second) = with_server(untied_server, work)
    count = sampled.versions[0][1]
    assert first["sampling_params"]["seed"] == 7 != second["sampling_params"]["seed"]
    assert second["token_ids"] == request.prompt_ids + sampled.ids[:count]
    assert second["sampling_params"]["max_tokens"] == 200 - count
    assert (first["cache_salt"], second["cache_salt"]) == ("v1", "v2")
    expected = logps_by_transformers(untied_server.model_folder, request.prompt_ids, sampled.ids, 1.5)
    # Three times the usual limit: the second segment starts with a prefill, which rounds differently.
    assert largest_gap(sampled.logps, expected) <= 3e-4


@pytest.mark.parametrize("decodes", [True, False])
def test_stop_string_across_an_interruption_is_found(untied_server, decodes):
    """The proxy interrupts a greedy completion in the middle of the stop string."""
    folder = untied_server.model_folder
    tokenizer, prompt = tokenizer_at(folder), prompts(folder)[2]

    def decode(ids):
        return tokenizer.decode(ids, skip_special_tokens=True)

    async def work(server):
        free = await server.generate(prompt, Sampling(temperature=0.0, max_tokens=64), seed=1, max_tokens=64)
        visible = [i for i, token in enumerate(free.ids) if decode([token])]
        middle = visible[2]
        stop = decode(free.ids[: visible[3] + 1])[-2:]
        cuts = iter([middle + 1])

        def interrupt(value):
            (choice,) = value["choices"]
            if (count := next(cuts, None)) is not None:
                choice["token_ids"], choice["finish_reason"] = choice["token_ids"][:count], "abort"
                choice["logps"] = choice["logps"][:count]

        async with proxies(untied_server.url, untied_server.token) as (proxy,):
            proxy.change = lambda path, status, body: (status, body)
            through = VllmServer(proxy.url, vocab_size=VOCAB)
            await through.connect()
            proxy.change = rewrite(GENERATE_ROUTE, interrupt)
            pool = await ready_pool([through])
            sampling = Sampling(temperature=0.0, max_tokens=64, stop=(stop,))
            whole = await server.generate(prompt, sampling, seed=1, max_tokens=64)
            options = {"decode": decode} if decodes else {}
            return whole, await pool.generate(Request(prompt_ids=prompt, seed=1), sampling, **options)

    whole, sampled = with_server(untied_server, work)
    assert (sampled.ids, sampled.finish_reason) == (whole.ids, "stop")
    assert largest_gap(sampled.logps, whole.logps) <= 1e-4


def test_tokens_of_another_weight_version_are_detected(tied_server):
    prompt, sampling = prompts(tied_server.model_folder)[0], Sampling(max_tokens=3)

    async def work(server):
        if not server.info.marks_tokens:
            pytest.skip(f"vLLM {server.info.version} does not mark tokens")
        await server.set_version(5)
        assert (await server.generate(prompt, sampling, seed=1, max_tokens=3)).finish == "length"
        other = VllmServer(tied_server.url, token=tied_server.token)
        await other.connect()
        await other.set_version(6)
        with pytest.raises(ServerError, match="weight version 6, expected 5"):
            await server.generate(prompt, sampling, seed=1, max_tokens=3)

    with_server(tied_server, work)


@pytest.mark.parametrize("has_metrics", [True, False])
def test_sleep_and_wake(tied_server, untied_server, has_metrics):
    fixture = untied_server if has_metrics else tied_server
    prompt = prompts(fixture.model_folder)[0]

    async def work(server):
        distinguishes_pause = has_metrics and server.info.marks_tokens
        assert not await server.is_sleeping()
        await server.pause()
        assert await server.is_sleeping() is not distinguishes_pause
        await server.resume()
        await server.sleep(1)
        assert await server.is_sleeping()
        await server.wake("weights")
        assert await server.is_sleeping()  # without its KV cache
        await server.wake()
        assert not await server.is_sleeping()
        await server.resume()
        assert not (await server.check(30)).paused
        return await server.generate(prompt, Sampling(max_tokens=3), seed=1, max_tokens=3)

    assert len(with_server(fixture, work).ids) == 3


def test_512_concurrent_requests(untied_server):
    folder = untied_server.model_folder
    tokens = [prompt for prompt in prompts(folder, 16) for _ in range(32)]
    requests = [Request(prompt_ids=prompt, seed=i) for i, prompt in enumerate(tokens)]
    sampling = Sampling(max_tokens=4, stop_ids=(EOS,))

    async def work(server):
        pool = await ready_pool([server], max_in_flight=512)
        return pool, await pool.generate_all(requests, sampling)

    pool, sampled = with_server(untied_server, work)
    assert len(sampled) == 512 and pool.members[0].in_flight == 0 and pool.counts["retries"] == 0
    for request, completion in list(zip(requests, sampled, strict=True))[::37]:
        expected = logps_by_transformers(folder, request.prompt_ids, completion.ids, 1.0)
        assert largest_gap(completion.logps, expected) <= 1e-4
