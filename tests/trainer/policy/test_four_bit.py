"""--load-in-4bit: the policy vs. a twin with a dequantised full base, engines, files, and runs."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from data.packing import Batch, Item, make_batches
from kernels.nf4 import BYTES_PER_WEIGHT, Linear4bit, is_4bit, num_weights
from rollout.engine import Request, Sampling
from rollout.engines.forward import BlockForward, Forward, TransformersForward, block_obstacle
from rollout.engines.local import LocalEngine
from rollout.engines.probe import Probe
from tests.entry import ROOT, environment, metrics, repeatable, small_model
from tests.entry import run as run_trainer
from trainer.__main__ import main
from trainer.config.blocks import LoraConfig, ModelConfig, ParallelConfig, check_4bit
from trainer.policy.load import load_policy
from trainer.policy.logps import Policy, causal_lm, reference_logps, token_logps
from trainer.policy.reference import load_frozen
from trainer.policy.sharding import pick_mode
from trainer.policy.weights import PolicyWeights
from trainer.rl.engine_choice import engine_bytes
from trainer.run.export import ExportConfig, export_checkpoint

CPU = torch.device("cpu")
TINY = "builtin:tiny"
LORA = LoraConfig(r=4)
ROWS = ("--data", "task:addition:split=train,size=64", "--eval-data", "task:addition:split=eval,size=8")
DPO = ("--method", "dpo", *ROWS, "--per-device-train-batch-size", 8)
GRPO = ("--method", "grpo", *ROWS, "--per-device-train-batch-size", 16, "--num-generations", 4)
FOUR = ("--model", TINY, "--lora.r", 4, "--load-in-4bit", "--save-steps", 1)


def load(model: str = TINY, lora: LoraConfig = LORA, *, with_reference: bool = False, **settings: Any) -> Policy:
    torch.manual_seed(0)
    cfg = ModelConfig(model=model, **{"load_in_4bit": True, **settings})
    return load_policy(cfg, lora, CPU, with_reference=with_reference)


def shake(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.05 * torch.randn(p.shape, generator=generator))


@pytest.fixture
def policy() -> Policy:
    policy = load()
    shake(policy.model)
    return policy


@pytest.fixture
def twin() -> Policy:
    return twin_of(load())


def twin_of(policy: Policy) -> Policy:
    """The same adapter on a full base of the dequantised weights."""
    packed = {name: m for name, m in causal_lm(policy.model).named_modules() if isinstance(m, Linear4bit)}
    twin = load(load_in_4bit=False)
    with torch.no_grad():
        for name, layer in packed.items():
            causal_lm(twin.model).get_submodule(name).weight.copy_(layer.weight)
    shake(twin.model)
    return twin


def batch() -> Batch:
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randint(100, (n,), generator=generator).tolist() for n in (9, 4, 7)]
    return make_batches([Item(ids, [False] + [True] * (len(ids) - 1)) for ids in rows], max_tokens=64)[0]


def gradients(policy: Policy) -> tuple[Tensor, dict[str, Tensor]]:
    logp, entropy = token_logps(policy, batch())
    (logp * torch.linspace(-1, 1, len(logp)) + 0.3 * entropy).sum().backward()
    return logp.detach(), {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}


# ---- the policy ----


def test_linear_layers_are_packed_and_embeddings_are_not(policy):
    lm = causal_lm(policy.model)
    linear = {name for name, m in lm.named_modules() if isinstance(m, Linear4bit)}
    assert len(linear) == 7 * lm.config.num_hidden_layers and all(name.endswith(".base_layer") for name in linear)
    assert type(lm.get_output_embeddings()) is nn.Linear and is_4bit(policy.model)
    full = load(load_in_4bit=False)
    assert num_weights(policy.model) == num_weights(full.model) == sum(p.numel() for p in full.model.parameters())
    packed = [lm.get_submodule(name) for name in linear]
    num_bytes = sum(m.codes.nbytes + m.absmax.nbytes for m in packed)
    assert num_bytes == BYTES_PER_WEIGHT * sum(m.in_features * m.out_features for m in packed)
    trained = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
    assert all("lora_" in name and p.dtype == torch.float32 for name, p in trained.items())
    # A new adapter has the same initial weights as with a full base.
    a = {name: p for name, p in load().model.named_parameters() if "lora_A" in name}
    assert a and all(torch.equal(p, full.model.get_parameter(name)) for name, p in a.items())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_logps_and_gradients_match_the_dequantised_base(twin, checkpointing):
    policy = load(gradient_checkpointing=checkpointing)
    shake(policy.model)
    (logp, grads), (plain, expected) = gradients(policy), gradients(twin)
    torch.testing.assert_close(logp, plain)
    assert grads.keys() == expected.keys() and grads
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6)


def test_bfloat16_matmuls(twin):
    policy = load(dtype="bfloat16")
    shake(policy.model)
    layer = next(m for m in policy.model.modules() if isinstance(m, Linear4bit))
    assert layer.weight.dtype == torch.bfloat16
    logp, grads = gradients(policy)
    torch.testing.assert_close(logp, gradients(twin)[0], rtol=0.02, atol=0.1)
    assert all(g.dtype == torch.float32 for g in grads.values())


def test_reference_is_the_packed_base(policy):
    ref = reference_logps(policy, batch())
    torch.testing.assert_close(ref, token_logps(load(), batch()).logp)  # a new adapter has no effect
    full = token_logps(load(load_in_4bit=False), batch()).logp
    assert 1e-3 < (ref - full).abs().mean() < 0.5


def test_ref_model_is_not_quantised(policy):
    model = ModelConfig(model=TINY, load_in_4bit=True)
    other = load_frozen("ref_model", TINY, model, policy, None)
    assert not is_4bit(other.model) and not other.is_lora


@pytest.mark.slow
def test_compiled_blocks_match_eager_blocks(policy, monkeypatch):
    from torch._inductor.lowering import needs_realized_inputs  # takes seconds

    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda forward, options, **o: plain(forward, backend="aot_eager", **o))
    operators = {torch.ops.strop.nf4_linear.default, torch.ops.strop.nf4_linear_grad.default}
    for operator in operators:
        needs_realized_inputs.discard(operator)  # state before the first compilation
    compiled = load(compile=True)
    assert operators <= set(needs_realized_inputs), "registered before the first graph"
    shake(compiled.model)
    (logp, grads), (eager, expected) = gradients(compiled), gradients(policy)
    torch.testing.assert_close(logp, eager)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("four", [False, True], ids=["bfloat16", "4 bits"])
def test_on_a_gpu_a_compiled_policy_matches_its_reference_bit_for_bit(four, tmp_path):
    """In a separate process with an empty compiler cache: kernels may depend on what was compiled before.

    The model is so wide that the compiler may choose a norm's block size by timing. Timings are replaced by random
    numbers, and there are as many tokens as in a step.
    """
    model = small_model(tmp_path / "model", width=4096, heads=32, head_dim=128)
    code = f"""
        import torch
        from data.packing import Item, make_batches
        from trainer.config.blocks import LoraConfig, ModelConfig
        from trainer.policy.load import load_policy
        from trainer.policy.logps import reference_logps, token_logps

        cfg = ModelConfig(model={model!r}, compile=True, gradient_checkpointing=True, load_in_4bit={four})
        policy = load_policy(cfg, LoraConfig(r=4), torch.device("cuda"), with_reference=True)
        items = [Item(list(range(1, n)), [False] + [True] * (n - 2)) for n in (90, 77, 55) for _ in range(20)]
        (batch,) = make_batches(items, max_tokens=8192, multiple=policy.row_multiple)
        batch = batch.to("cuda")
        assert torch.equal(token_logps(policy, batch).logp.detach(), reference_logps(policy, batch))
    """
    env = environment() | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    env |= {"TORCHINDUCTOR_DISTORT_BENCHMARKING_RESULT": "random"}
    done = subprocess.run([sys.executable, "-c", dedent(code)], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


# ---- engines and servers ----


@pytest.mark.parametrize("way", ["blocks", "copy", "in place"])
def test_engine_samples_from_the_trained_weights(policy, way):
    lm = causal_lm(policy.model)
    assert block_obstacle(lm) is None
    ways: dict[str, Forward] = {
        "blocks": lambda: BlockForward(lm, torch.float32),
        "copy": lambda: TransformersForward(lm, torch.float32, copied=True),
        "in place": lambda: TransformersForward(lm, torch.float32),
    }
    engine = LocalEngine(policy.model, policy.tokenizer)
    engine._ways = lambda: [ways[way]]
    for version in range(2):
        engine.load(version)
        requests = [Request(prompt_ids=[5, 6, 7], seed=seed) for seed in range(4)]
        completions = engine.generate(requests, Sampling(max_tokens=6))
        expected = engine.logps([(c.prompt_ids, c.ids) for c in completions], 1.0)
        for completion, logps in zip(completions, expected, strict=True):
            assert completion.logps == pytest.approx(logps, abs=1e-4)
        shake(policy.model)
    assert type(engine._forward) is type(ways[way]())


def test_servers_get_merged_dequantised_weights(policy, twin, tmp_path):
    packed, plain = (PolicyWeights(p, torch.bfloat16) for p in (policy, twin))
    assert packed.specs() == plain.specs()
    for (name, tensor), (other, expected) in zip(packed.tensors(), plain.tensors(), strict=True):
        assert name == other and torch.equal(tensor, expected), name
    packed.save_adapter(tmp_path / "a")
    plain.save_adapter(tmp_path / "b")
    assert len({(tmp_path / x / "adapter_model.safetensors").read_bytes() for x in "ab"}) == 1


def test_probe_accepts_servers_with_the_full_base(policy):
    probe = Probe(LocalEngine(policy.model, policy.tokenizer), tolerance=None)
    rows = probe.sequences(32)
    full = load(load_in_4bit=False)
    shake(full.model)
    packed, unpacked = probe.logps(rows), Probe(LocalEngine(full.model, full.tokenizer), tolerance=None).logps(rows)
    gap, limit, _ = probe.gap(packed, unpacked, "float32")
    assert gap > limit
    probe.rounded = True
    gap, limit, kind = probe.gap(packed, unpacked, "float32")
    assert 0 < gap < limit and kind == "on average"


def test_engine_memory_counts_unpacked_weights(policy):
    cfg = type("Config", (), {"num_generations": 4, "max_completion_length": 8})
    assert engine_bytes(cfg, policy, 8) == engine_bytes(cfg, load(load_in_4bit=False), 8)


# ---- rejected settings ----


@pytest.mark.parametrize(
    ("settings", "lora", "parallel", "message"),
    [
        ({}, LoraConfig(), {}, "load_in_4bit=True: .*--lora.r 16"),
        ({"merge_lora": True}, LORA, {}, "trainer.export RUN OUT --merge-lora"),
        ({}, LORA, {"mode": "fsdp"}, "parallel.mode=fsdp"),
        ({}, LORA, {"shard": 2}, "parallel.shard=2"),
        ({}, LORA, {"cpu_offload": True}, "parallel.cpu_offload=True"),
        ({}, LORA, {"context": 2}, "parallel.context=2"),
    ],
)
def test_unsupported_settings_are_rejected(monkeypatch, settings, lora, parallel, message):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=message):
        check_4bit(ModelConfig(model=TINY, load_in_4bit=True, **settings), lora, ParallelConfig(**parallel))


def test_auto_replicates(monkeypatch, policy):
    monkeypatch.setenv("WORLD_SIZE", "2")
    parallel = ParallelConfig()
    check_4bit(ModelConfig(model=TINY, load_in_4bit=True), LORA, parallel)
    monkeypatch.setattr("trainer.policy.sharding.room_for_a_copy", lambda device: 0)
    monkeypatch.setattr("trainer.policy.sharding.is_main", lambda: False)
    assert pick_mode(parallel, policy) == "replicate"
    assert pick_mode(parallel, dataclasses.replace(policy, model=nn.Linear(3, 3))) == "fsdp"


# ---- runs ----


@pytest.mark.parametrize("method", [DPO, GRPO], ids=["dpo", "grpo"])
def test_run_exports_an_adapter_for_the_full_base(method, tmp_path):
    whole, merged = tmp_path / "whole", tmp_path / "merged"
    argv = [*map(str, (*method, *FOUR))]
    assert main([*argv, "--max-steps", "2", "--output-dir", str(whole)]) == 0
    rows = metrics(whole)
    if "grpo" in argv:
        gaps = [row["policy/behaviour_gap"] for row in rows if "policy/behaviour_gap" in row]
        assert len(gaps) == 2 and max(gaps) < 1e-4
    assert not (whole / "final" / "model.safetensors").exists()
    adapter = json.loads((whole / "final" / "adapter_config.json").read_text())
    assert Path(adapter["base_model_name_or_path"]).is_dir()

    export_checkpoint(ExportConfig(source=str(whole), out=str(merged), merge_lora=True))
    full = load(str(merged), LoraConfig(), load_in_4bit=False)
    continued = load(str(whole / "final"), LORA, load_in_4bit=False)
    torch.testing.assert_close(token_logps(full, batch()).logp, token_logps(continued, batch()).logp)
    again = load(str(whole / "final"), LORA)
    assert is_4bit(again.model)


def test_resume_repeats_the_steps(tmp_path):
    argv = (*DPO, *FOUR, "--max-steps", 2)
    assert main([*map(str, argv), "--output-dir", str(tmp_path / "run")]) == 0
    first = metrics(tmp_path / "run")
    last = max((tmp_path / "run" / "checkpoints").iterdir(), key=lambda path: path.name)
    shutil.rmtree(last)
    shutil.rmtree(tmp_path / "run" / "final")
    assert main(["--resume", str(tmp_path / "run")]) == 0
    assert last.is_dir() and (tmp_path / "run" / "final").is_dir()
    assert repeatable(metrics(tmp_path / "run")) == repeatable(first)


def test_conflicting_flags_give_a_one_line_error(tmp_path):
    done = run_trainer(*DPO, "--model", TINY, "--load-in-4bit", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") <= 1 and "--lora.r 16" in done.stderr
