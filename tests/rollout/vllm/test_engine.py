"""The vLLM engine with a real server: log-prob parity, syncs during sampling, the probe, and several trainers."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch

from rollout.engine import Request, Sampling
from rollout.engines import weights as vllm_weights
from rollout.engines.local import LocalEngine
from rollout.engines.vllm import VllmEngine
from rollout.servers.client import VllmServer
from rollout.servers.command import TOKEN
from rollout.servers.lease import LeaseError, Owner
from rollout.servers.loop import Loop
from rollout.servers.options import SyncConfig, VllmConfig
from rollout.sync.base import SyncReport
from tests.rollout.vllm.conftest import slowed, wait_for
from tests.rollout.vllm.scripted import Proxy
from trainer.config.blocks import LoraConfig, ModelConfig
from trainer.policy.load import load_policy
from trainer.policy.logps import Policy
from trainer.policy.weights import PolicyWeights

CPU = torch.device("cpu")
LIMIT = 1e-3  # float32 on any machine, even for very unlikely tokens


def make_policy(folder: Any, *, rank: int = 0, dropout: float = 0.0) -> Policy:
    lora = LoraConfig(r=rank, dropout=dropout) if rank else LoraConfig()
    return load_policy(ModelConfig(model=str(folder)), lora, CPU, with_reference=False)


def change(policy: Policy, seed: int, size: float = 0.02) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def make_engine(
    server: Any, policy: Policy, backend: str, monkeypatch: Any, *, owner: Owner | None = None, url: str | None = None,
    log: Any = lambda line: None, **sync: Any,
) -> VllmEngine:  # fmt: skip
    monkeypatch.setenv(TOKEN, server.token)
    return VllmEngine(
        VllmConfig(url=(url or server.url,)), SyncConfig(backend=backend, **sync), model=policy.source,
        source=PolicyWeights(policy, torch.float32), local=LocalEngine(policy.model, policy.tokenizer), device=CPU,
        owner=owner, dtype="float32", lora_rank=0, log_dir=None, vocab_size=275, log=log,
    )  # fmt: skip


def own_weights(server: Any, monkeypatch: Any) -> None:
    """Restore the server's initial weights, which earlier tests have changed: an adapter needs its base."""
    policy = make_policy(server.model_folder)
    with contextlib.closing(make_engine(server, policy, "process_group", monkeypatch)) as engine:
        engine.load(0)


@pytest.fixture
def requests_() -> list[Request]:
    return [Request(prompt_ids=[5, 17, 30 + i], seed=1000 + i) for i in range(12)]


@pytest.fixture(params=["process_group", "lora"])
def engine(request: Any, tied_server: Any, monkeypatch: Any) -> Iterator[VllmEngine]:
    if request.param == "lora":
        own_weights(tied_server, monkeypatch)
    rank, dropout = (8, 0.1) if request.param == "lora" else (0, 0.0)
    policy = make_policy(tied_server.model_folder, rank=rank, dropout=dropout)
    engine = make_engine(tied_server, policy, request.param, monkeypatch, probe_every=1)
    engine.policy = policy
    yield engine
    engine.close()


def own_logps(engine: VllmEngine, completions: Any, temperature: float) -> list[list[float]]:
    return engine.local.logps([(c.prompt_ids, c.ids) for c in completions], temperature)


def largest_gap(a: list[list[float]], b: list[list[float]]) -> float:
    return max(abs(x - y) for row, other in zip(a, b, strict=True) for x, y in zip(row, other, strict=True))


def test_engine_matches_the_trainer(engine, requests_, monkeypatch):
    """Log-probs at the trainer's temperature after every sync, texts and seeds; then a sync that sends nothing."""
    completions: list[Any] = []
    for version in range(2):
        change(engine.policy, seed=version)
        if completions:  # completions of the previous weights differ clearly
            assert largest_gap([c.logps for c in completions], own_logps(engine, completions, 0.7)) > 30 * LIMIT
        engine.load(version)
        completions = engine.generate(requests_, Sampling(temperature=0.7, max_tokens=12, for_training=True))
        assert largest_gap([c.logps for c in completions], own_logps(engine, completions, 0.7)) < LIMIT
        assert [c.versions for c in completions] == [[(version, len(c.ids))] for c in completions]
        assert engine.version == version

    greedy = Sampling(temperature=0.0, max_tokens=10, stop_ids=(2,))
    served, local = (
        [(c.prompt_ids, c.ids, c.text, c.finish_reason) for c in sampler.generate(requests_, greedy)]
        for sampler in (engine, engine.local)
    )
    assert served == local

    # More prompt tokens than the server computes per step: chunked prefill once crashed the engine, because CPU
    # generators cannot rewind.
    many = [Request(prompt_ids=[5 + (i + j) % 200 for j in range(180)], seed=i) for i in range(48)]
    first = engine.generate(many, Sampling(max_tokens=4, for_training=True))
    assert [len(c.ids) for c in first] == [4] * len(many)
    assert [c.ids for c in engine.generate(many, Sampling(max_tokens=4, for_training=True))] == [c.ids for c in first]
    assert engine.metrics()["rollout/retries"] == 0

    change(engine.policy, seed=3, size=0.01)
    nothing, name = SyncReport(2, "none", 0, 0.0), engine.weights.sync.model_name(1)
    with monkeypatch.context() as patched:
        patched.setattr(engine.weights.sync, "push", lambda servers, version: nothing)
        patched.setattr(engine.weights.sync, "model_name", lambda version: name)
        with pytest.raises(ValueError, match=r"version 2, .*log-probs differ"):
            engine.load(2)


def test_missing_tensor_stops_the_run_and_the_next_sync_repairs_the_server(tied_server, monkeypatch):
    policy = make_policy(tied_server.model_folder)
    left_out = "model.layers.1.mlp.down_proj.weight"
    specs, tensors = PolicyWeights.specs, PolicyWeights.tensors
    with monkeypatch.context() as patched:
        patched.setattr(PolicyWeights, "specs", lambda self: [s for s in specs(self) if s.name != left_out])
        patched.setattr(PolicyWeights, "tensors", lambda self: (row for row in tensors(self) if row[0] != left_out))
        engine = make_engine(tied_server, policy, "process_group", monkeypatch)
        try:
            with pytest.raises(ValueError, match=r"version 1 .*layers\.1\.mlp\.down_proj"):
                engine.load(1)
            assert engine.metrics()["rollout/servers_ready"] == 0
        finally:
            engine.close()
    engine = make_engine(tied_server, policy, "process_group", monkeypatch)
    engine.load(2)  # compares log-probs
    assert engine.metrics()["rollout/servers_ready"] == 1
    engine.close()


def test_adapter_with_another_base_stops_the_run(tied_server, monkeypatch):
    other = make_policy(tied_server.model_folder)
    change(other, seed=9)
    for policy, backend in ((other, "process_group"), (make_policy(tied_server.model_folder, rank=8), "lora")):
        engine = make_engine(tied_server, policy, backend, monkeypatch)
        try:
            if backend == "lora":
                with pytest.raises(ValueError, match="replaced the base weights"):
                    engine.load(0)
            else:
                engine.load(0)
        finally:
            engine.close()


def num_sampled(server: Any) -> float:
    """Return the server's count of sampled tokens since its start."""
    text = httpx.get(f"{server.url}/metrics", headers=server.headers, timeout=30).text
    return sum(float(x.split()[-1]) for x in text.splitlines() if x.startswith("vllm:generation_tokens_total{"))


def test_completions_across_syncs_record_the_version_of_every_token(untied_server, monkeypatch):
    policy = make_policy(untied_server.model_folder)
    engine = make_engine(untied_server, policy, "process_group", monkeypatch)
    requests = [Request(prompt_ids=[5, 17, 30 + i], seed=i) for i in range(16)]
    sampling = Sampling(max_tokens=200, stop_ids=(), for_training=True)
    weights, completions, at_sync = {}, [], 0.0
    worker = threading.Thread(target=lambda: completions.extend(engine.generate(requests, sampling)))
    refill = engine.pool.refill

    async def count_and_refill(*args: Any, **options: Any) -> bool:  # the server is paused
        nonlocal at_sync
        at_sync = num_sampled(untied_server)
        return await refill(*args, **options)

    monkeypatch.setattr(engine.pool, "refill", count_and_refill)
    try:
        with slowed(untied_server):
            for version in range(3):
                change(policy, seed=version)
                weights[version] = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
                engine.load(version)
                if version == 0:
                    worker.start()
                if version < 2:  # at the next load, every completion has started and none has finished
                    wait_for(lambda: num_sampled(untied_server) >= at_sync + 3 * len(requests))
        worker.join()
        spans = [c.versions for c in completions]
        assert sum(len(row) > 1 for row in spans) >= 8, spans
        assert engine.metrics()["rollout/resumed_samples"] == sum(len(row) > 1 for row in spans)
        for version in range(3):
            with torch.no_grad():
                for name, p in policy.model.named_parameters():
                    p.copy_(weights[version][name])
            for c, row in zip(completions, own_logps(engine, completions, 1.0), strict=True):
                start = 0
                for sampled_by, count in c.versions:
                    pairs = zip(c.logps[start : start + count], row[start : start + count], strict=True)
                    # Relative for unlikely tokens: float32 has 7 digits, and these contexts are long.
                    gaps = [abs(a - b) / max(1.0, abs(a)) for a, b in pairs]
                    if sampled_by == version:
                        assert max(gaps) < LIMIT
                    start += count
                assert start == len(c.ids) == 200
    finally:
        engine.close()


# several trainers ------------------------------------------------------------------------------------------------


def leased_to(holder: Owner, url: str) -> str:
    who = re.escape(f"{holder.folder} (host {holder.host}, pid {holder.pid}, user {holder.user})")
    return rf"^vllm\.url={re.escape(url)}: {who} .* since 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC; .* in (60|5\d|4\d) s"


def test_second_trainer_on_a_server_is_rejected(tied_server, monkeypatch, requests_):
    policy = make_policy(tied_server.model_folder)
    first, second = Owner.here("aa" * 8, "/runs/a"), Owner.here("bb" * 8, "/runs/b")
    loop = Loop()
    guest = VllmServer(tied_server.url, token=tied_server.token)  # only samples
    engine = make_engine(tied_server, policy, "process_group", monkeypatch, owner=first)
    try:
        with contextlib.closing(engine):
            engine.load(3)
            with pytest.raises(LeaseError, match=leased_to(first, tied_server.url)):
                make_engine(tied_server, policy, "process_group", monkeypatch, owner=second)
            loop.run(guest.connect())
            assert guest.mark == f"{first.run}:3"
            segment = loop.run(guest.generate([5, 6, 7], Sampling(max_tokens=4), seed=1, max_tokens=4))
            assert len(segment.ids) == 4
            for changes in (guest.pause(), guest.rpc("strop_reload", timeout=30, path="/x", version=1)):
                with pytest.raises(LeaseError, match=leased_to(first, tied_server.url)):
                    loop.run(changes)
            completions = engine.generate(requests_, Sampling(max_tokens=4, for_training=True))
            assert largest_gap([c.logps for c in completions], own_logps(engine, completions, 1.0)) < LIMIT
    finally:
        loop.run(guest.close())
        loop.close()


def test_killed_trainers_server_is_leased_for_a_minute_except_to_its_resume(tied_server, monkeypatch):
    killed, other = Owner.here("aa" * 8, "/runs/a"), Owner.here("bb" * 8, "/runs/b")
    policy, loop = make_policy(tied_server.model_folder), Loop()
    gone = VllmServer(tied_server.url, token=tied_server.token, owner=killed)
    try:
        loop.run(gone.connect())  # its last request
        with pytest.raises(LeaseError, match=leased_to(killed, tied_server.url)):
            make_engine(tied_server, policy, "process_group", monkeypatch, owner=other)
        resumed = make_engine(
            tied_server, policy, "process_group", monkeypatch, owner=Owner.here(killed.run, "/runs/a")
        )
        with contextlib.closing(resumed):
            resumed.load(0)
            with pytest.raises(LeaseError, match=r"this run was resumed elsewhere \(/runs/a"):
                loop.run(gone.pause())  # it was still alive
            with pytest.raises(LeaseError, match=r"this run was resumed elsewhere \(/runs/a"):
                loop.run(gone.renew())
        make_engine(tied_server, policy, "process_group", monkeypatch, owner=other).close()  # the lease was released
    finally:
        loop.run(gone.close())
        loop.close()


@contextlib.contextmanager
def proxies_of(server: Any, count: int, *, plain: bool) -> Iterator[list[Proxy]]:
    loop = Loop("proxies")
    started = [Proxy(server.url, server.token, plain=plain) for _ in range(count)]
    for proxy in started:
        loop.run(proxy.start())
    try:
        yield started
    finally:
        for proxy in started:
            loop.run(proxy.kill())
        loop.close()


def test_without_a_lease_another_trainers_weights_stop_the_run(tied_server, monkeypatch, requests_):
    """vLLM without strop's middleware accepts both trainers, and both call their weights version 1."""
    policies = [make_policy(tied_server.model_folder) for _ in range(2)]
    owners, lines = [Owner.here(letter * 16, f"/runs/{letter}") for letter in "ab"], []
    with proxies_of(tied_server, 2, plain=True) as proxies, contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(contextlib.closing(make_engine(
                tied_server, policy, "process_group", monkeypatch, owner=owner, url=proxy.url, log=lines.append
            )))
            for policy, owner, proxy in zip(policies, owners, proxies, strict=True)
        ]  # fmt: skip
        assert sum("has no lease" in line for line in lines) == 2
        sampling = Sampling(max_tokens=4, for_training=True)
        engines[0].load(1)
        assert len(engines[0].generate(requests_, sampling)) == len(requests_)
        change(policies[1], seed=5)
        engines[1].load(1)
        with pytest.raises(LeaseError, match=rf"{proxies[0].url}: another trainer .*{'b' * 16}:1"):
            engines[0].generate(requests_, sampling)
        with pytest.raises(LeaseError, match="another trainer"):
            engines[0].load(2)
        completions = engines[1].generate(requests_, sampling)
        assert largest_gap([c.logps for c in completions], own_logps(engines[1], completions, 1.0)) < LIMIT


def test_temporary_failure_of_a_control_route_does_not_end_the_run(tied_server, monkeypatch, requests_):
    """The server executes the request, but its reply is lost: the harder case."""
    policy = make_policy(tied_server.model_folder)
    monkeypatch.setattr(vllm_weights, "PAUSE_S", (0.05, 0.1))
    with proxies_of(tied_server, 1, plain=False) as (proxy,):
        engine = make_engine(tied_server, policy, "process_group", monkeypatch, url=proxy.url, probe_every=1)
        with contextlib.closing(engine):
            engine.load(0)
            left = {"/pause": 0}

            def fail(path: str, status: int, body: bytes) -> tuple[int, bytes]:
                (route,) = left
                if not path.startswith(route) or left[route] == 0:
                    return status, body
                left[route] -= 1
                return 503, b"down for repair"

            proxy.change = fail
            for version, route in enumerate(("/pause", "/collective_rpc", "/update_weight_version", "/resume"), 1):
                change(policy, seed=version)
                left = {route: 2}
                engine.load(version)  # compares log-probs at its end
                assert left == {route: 0}
            completions = engine.generate(requests_, Sampling(max_tokens=4, for_training=True))
            assert largest_gap([c.logps for c in completions], own_logps(engine, completions, 1.0)) < LIMIT
            assert {c.versions[0][0] for c in completions} == {4}
            monkeypatch.setattr(vllm_weights, "RETRY_S", 0.5)
            left = {"/pause": 1000}
            with pytest.raises(ValueError, match=r"version 5 .*/pause failed \(503 down for rep"):
                engine.load(5)
