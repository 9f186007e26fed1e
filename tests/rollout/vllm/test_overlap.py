"""Async rollouts with a real server: weights change while groups run, and every token records its version."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from data.loader import Loader
from data.types import Prompt
from rollout.engine import Completion, EngineSource, Group, Request, Sampling
from rollout.engines.local import LocalEngine
from rollout.engines.vllm import VllmEngine
from rollout.schedule.planner import Planner
from rollout.schedule.producer import Producer, sync_due
from rollout.servers.command import TOKEN
from rollout.servers.options import SyncConfig, VllmConfig
from tests.rollout.schedule.test_producer import take
from tests.rollout.vllm.conftest import slowed
from trainer.config.blocks import LoraConfig, ModelConfig
from trainer.policy.load import load_policy
from trainer.policy.logps import Policy
from trainer.policy.weights import PolicyWeights

CPU = torch.device("cpu")
LIMIT = 1e-3  # float32 on any machine, with contexts of 80 tokens and weights changed several times; see wrong_version
STEPS = 4
LONG = Sampling(max_tokens=80, for_training=True)  # no stop ids, so that a completion outlasts several loads


def make_engine(server: Any, monkeypatch: Any, *, backend: str, rank: int = 0) -> tuple[VllmEngine, Policy]:
    monkeypatch.setenv(TOKEN, server.token)
    lora = LoraConfig(r=rank) if rank else LoraConfig()
    policy = load_policy(ModelConfig(model=str(server.model_folder)), lora, CPU, with_reference=False)
    engine = VllmEngine(
        VllmConfig(url=(server.url,)), SyncConfig(backend=backend, probe_every=10 if rank else 1), model=policy.source,
        source=PolicyWeights(policy, torch.float32), local=LocalEngine(policy.model, policy.tokenizer), device=CPU,
        dtype="float32", lora_rank=0, log_dir=None, vocab_size=275, log=print,
    )  # fmt: skip
    return engine, policy


@pytest.fixture(params=["process_group", "lora"])
def pair(request: Any, tied_server: Any, monkeypatch: Any) -> Iterator[tuple[VllmEngine, Policy]]:
    if request.param == "lora":  # an adapter needs its base, which earlier tests may have changed
        base, _ = make_engine(tied_server, monkeypatch, backend="process_group")
        base.load(0)
        base.close()
    engine, policy = make_engine(
        tied_server, monkeypatch, backend=request.param, rank=8 if request.param == "lora" else 0
    )
    yield engine, policy
    engine.close()


def make_producer(engine: VllmEngine, sampling: Sampling, **options: Any) -> Producer:
    prompts = [Prompt(source=f"rows:{i}", prompt="", ids=[5, 17, 30 + i]) for i in range(8)]
    planner = Planner(Loader(prompts, batch_size=2, seed=0), num_generations=4, seed=0)
    return Producer(EngineSource(engine, sampling), planner, poll=engine.poll, **options)


def train(policy: Policy, step: int) -> dict[str, torch.Tensor]:
    """Change the weights; return a copy of the previous weights."""
    weights = {name: p.detach().clone() for name, p in policy.model.named_parameters() if p.requires_grad}
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
    time.sleep(0.1)
    return weights


def gaps(engine: VllmEngine, completions: list[Completion], version: int) -> list[float]:
    """Return log-prob differences between server and trainer for the tokens sampled by this version."""
    differences = []
    expected = engine.local.logps([(c.prompt_ids, c.ids) for c in completions], 1.0)
    for completion, row in zip(completions, expected, strict=True):
        start = 0
        for sampled_by, count in completion.versions:
            pairs = zip(completion.logps[start : start + count], row[start : start + count], strict=True)
            # Relative for unlikely tokens: float32 has 7 digits, and these contexts are long.
            differences += [abs(a - b) / max(1.0, abs(a)) for a, b in pairs if sampled_by == version]
            start += count
        assert start == len(completion.ids)
    return differences


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_async_groups_stay_within_max_staleness_and_record_versions(pair, tied_server):
    engine, policy = pair
    interval = 1 if engine.weights.sync.needs_pause else 2
    producer = make_producer(engine, LONG, depth=2, max_staleness=2, last_step=STEPS)
    batches: list[list[Group]] = []
    weights: dict[int, dict[str, torch.Tensor]] = {}
    stale, loaded, in_use, num_tokens = [], [], [], 0
    with slowed(tied_server):
        for step in range(STEPS):
            if step == 0 or sync_due(step, engine.version, interval):
                engine.load(step)
                loaded.append(step)
            batches.append(take(producer, step, engine.version))
            stale.append(producer.metrics()["rollout/staleness_max"])
            in_use.append(set(engine.in_use()))
            weights[step] = train(policy, step)
            producer.done()
    producer.close()

    assert loaded == list(range(0, STEPS, interval))
    assert max(stale) == 2.0 and stale[0] == 0.0, stale
    completions = [c for batch in batches for group in batch for c in group.completions]
    for step, batch in enumerate(batches):
        for version, count in (span for group in batch for c in group.completions for span in c.versions):
            assert step - 2 <= version <= step and version in loaded and count > 0
            assert version in set().union(*in_use)
    spans = [len(c.versions) for c in completions]
    if engine.weights.sync.needs_pause:
        assert max(spans) > 1
    else:  # not interrupted: a completion keeps its first adapter
        assert set(spans) == {1}
    for version in loaded:
        with torch.no_grad():
            for name, p in policy.model.named_parameters():
                if p.requires_grad:
                    p.copy_(weights[version][name])
        differences = gaps(engine, completions, version)
        assert max(differences, default=0.0) < LIMIT, f"version {version}: {max(differences)}"
        num_tokens += len(differences)
        wrong_version = [gap for other in loaded if other != version for gap in gaps(engine, completions, other)]
        assert max(wrong_version) > 30 * LIMIT, f"version {version}: {max(wrong_version)}"
    assert num_tokens == sum(len(c.ids) for c in completions) == STEPS * 8 * 80


@pytest.mark.parametrize("pair", ["process_group"], indirect=True)
def test_close_ends_running_requests_and_leaks_nothing(pair):
    engine, policy = pair
    engine.load(0)
    engine.generate([Request(prompt_ids=[5], seed=0)], Sampling(max_tokens=2))  # opens connections
    threads, files = threading.active_count(), open_files()
    for step in range(1, 3):
        producer = make_producer(engine, LONG, depth=1)
        engine.load(step)
        producer.begin(step)
        next(producer.arrived())
        producer.close()
        deadline = time.monotonic() + 10
        while any(m.in_flight for m in engine.pool.members) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert [m.in_flight for m in engine.pool.members] == [0]
        assert len(producer.planner.pending) == 4 and list(engine.in_use()) == [step]
        train(policy, step)
    assert threading.active_count() <= threads
    assert open_files() <= files + 32  # idle connections of two batches of 16 requests


@pytest.mark.parametrize("pair", ["process_group"], indirect=True)
def test_group_rejected_by_the_server_stops_the_run_with_its_prompt(pair):
    engine, _ = pair
    engine.load(0)
    producer = make_producer(engine, Sampling(max_tokens=100_000, for_training=True))
    with pytest.raises(ValueError, match=r"^prompt=rows:\d: .*max_tokens"):
        take(producer, 0)
    producer.close()


@pytest.mark.parametrize("pair", ["process_group"], indirect=True)
def test_coroutines_in_the_loop_sample_several_turns(pair):
    engine, _ = pair
    engine.load(7)

    async def two_turns(seed: int) -> list[Completion]:
        first = await engine.complete(Request(prompt_ids=[5, 17], seed=seed), Sampling(max_tokens=3))
        later = Request(prompt_ids=[*first.prompt_ids, *first.ids, 9], seed=seed)
        return [first, await engine.complete(later, Sampling(max_tokens=4))]

    async def everyone() -> list[list[Completion]]:
        return await asyncio.gather(*(two_turns(seed) for seed in range(4)))

    episodes = engine.loop.run(everyone())
    assert [[len(c.ids) for c in turns] for turns in episodes] == [[3, 4]] * 4
    assert {version for turns in episodes for c in turns for version, _ in c.versions} == {7}
    again = engine.generate([Request(prompt_ids=[5, 17], seed=seed) for seed in range(4)], Sampling(max_tokens=3))
    assert [turns[0] for turns in episodes] == again


@pytest.mark.parametrize("pair", ["lora"], indirect=True)
def test_probe_interrupts_running_groups_which_then_continue(pair, tied_server):
    engine, policy = pair
    engine.load(0)
    sampling = Sampling(max_tokens=240, for_training=True)  # fills the context
    requests = [Request(prompt_ids=[5, 17, 30 + i], seed=i) for i in range(6)]
    # The server's speed is unknown: try delays until a probe interrupts a group between its tokens.
    for delay in (0.2, 0.1, 0.3, 0.05, 0.5, 0.15, 0.4, 0.8):
        with slowed(tied_server):
            future = engine.submit(requests, sampling)
            time.sleep(delay)
            for _ in range(2):
                assert engine.probe(engine.pool.members)  # without an interruption, vLLM with adapters would crash
        completions = future.result(60)
        assert [c.versions for c in completions] == [[(0, 240)]] * 6
        assert engine.metrics()["rollout/server_out"] == 0
        differences = gaps(engine, completions, 0)
        assert len(differences) == 6 * 240 and max(differences) < LIMIT
        if engine.metrics()["rollout/resumed_samples"]:
            break
    assert engine.metrics()["rollout/resumed_samples"], "no probe interrupted a group; try other delays"


@pytest.mark.parametrize("pair", ["process_group"], indirect=True)
def test_server_that_returns_between_syncs_gets_the_current_weights(pair):
    engine, policy = pair
    engine.load(0)
    train(policy, 1)
    (member,) = engine.pool.members
    engine.loop.run(engine.pool.fail(member, "needs weights"))  # as after a restart
    engine.poll(1)
    assert (engine.version, member.version, member.state) == (1, 1, "ready")  # load() has compared log-probs
