"""bfloat16 weights and 8-bit moments: training, checkpoints, rejected settings."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trainer.config.blocks import LoraConfig, ModelConfig, OptimConfig, RunConfig
from trainer.policy.load import load_policy
from trainer.policy.optim import build_optimizer
from trainer.run.checkpoint import load_checkpoint, save_checkpoint
from trainer.run.run import open_run

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a warning on CPUs without bfloat16 matmuls


@pytest.fixture
def torchao():
    """torchao without compilation, which takes a minute on a CPU."""
    module = pytest.importorskip("torchao", reason="torchao is not installed; it is an extra, pip install torchao")
    with torch.compiler.set_stance("force_eager"):
        yield module


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, schedule, steps: int) -> list[float]:
    losses = []
    generator = torch.Generator().manual_seed(steps)
    for _ in range(steps):
        x = torch.randn(32, 64, generator=generator)
        loss = (model(x.to(next(model.parameters()).dtype)).float() - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        losses.append(loss.item())
    return losses


KINDS = [("adamw", torch.bfloat16), ("adamw_8bit", torch.float32), ("adamw_8bit", torch.bfloat16)]


@pytest.mark.parametrize(("optim", "dtype"), KINDS)
def test_small_state_learns_like_plain_adamw(request, optim, dtype):
    if optim == "adamw_8bit":
        request.getfixturevalue("torchao")
    exact, small = network(), network(dtype)
    losses = {}
    for name, model, kind in (("exact", exact, "adamw"), ("small", small, optim)):
        optimizer, schedule = build_optimizer(model, OptimConfig(learning_rate=3e-3, optim=kind), 60)
        losses[name] = train(model, optimizer, schedule, 60)
    assert losses["exact"][-1] < 0.7 * losses["exact"][0]
    assert losses["small"][-1] == pytest.approx(losses["exact"][-1], rel=0.03)


def test_8_bit_moments_take_a_byte_each(torchao):
    model = network()
    optimizer, schedule = build_optimizer(model, OptimConfig(optim="adamw_8bit"), 2)
    train(model, optimizer, schedule, 1)
    slots = optimizer.state[model[0].weight]
    assert slots["exp_avg"].codes.dtype == torch.uint8 and slots["exp_avg"].codes.shape == (96, 64)
    assert len(slots["exp_avg"].scale) == 96 * 64 // 256
    assert optimizer.state[model[0].bias]["exp_avg"].dtype == torch.float32  # too small to quantise


def test_stochastic_rounding_keeps_updates_below_bfloat16_resolution_on_average():
    start, rate, steps = 1.0, 1e-4, 100
    weights = {}
    for name, make in (("stochastic", build_optimizer), ("nearest", None)):
        torch.manual_seed(0)
        model = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
        nn.init.constant_(model.weight, start)
        cfg = OptimConfig(learning_rate=rate, lr_scheduler_type="constant")
        optimizer = make(model, cfg, steps)[0] if make else torch.optim.AdamW(model.parameters(), rate, weight_decay=0)
        for _ in range(steps):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
        weights[name] = model.weight.detach().float().mean().item()
    assert weights["nearest"] == start  # half a bfloat16 step below 1 is 2e-3: every update is lost
    # 4,096 weights, each a sum of random roundings with a standard deviation of at most 0.004 * sqrt(0.025 * 100) / 2
    assert weights["stochastic"] == pytest.approx(start - steps * rate, abs=5 * 0.004 * 1.6 / 64)


@pytest.mark.parametrize(("optim", "dtype"), KINDS)
def test_resumed_training_matches_uninterrupted_training_bit_for_bit(request, tmp_path, optim, dtype):
    if optim == "adamw_8bit":
        request.getfixturevalue("torchao")
    cfg = OptimConfig(learning_rate=3e-3, optim=optim, warmup_ratio=0.5)
    model = network(dtype)
    optimizer, schedule = build_optimizer(model, cfg, 20)
    train(model, optimizer, schedule, 5)
    folder = save_checkpoint(tmp_path, 5, model, optimizer, schedule, {}, keep=1)
    expected = train(model, optimizer, schedule, 6)

    other = network(dtype)
    other_optimizer, other_schedule = build_optimizer(other, cfg, 20)
    train(other, other_optimizer, other_schedule, 2)  # its earlier state must not matter
    load_checkpoint(folder, other, other_optimizer, other_schedule)
    assert train(other, other_optimizer, other_schedule, 6) == expected
    assert float(other_schedule.get_last_lr()[0]) == float(schedule.get_last_lr()[0])
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("before", "after"), [("adamw", "adamw_8bit"), ("adamw_8bit", "adamw")])
def test_run_may_continue_with_another_kind_of_state(torchao, tmp_path, before, after, dtype):
    model, other = network(dtype), network(dtype)
    optimizer, schedule = build_optimizer(model, OptimConfig(learning_rate=3e-3, optim=before), 20)
    train(model, optimizer, schedule, 5)
    folder = save_checkpoint(tmp_path, 5, model, optimizer, schedule, {}, keep=1)
    other_optimizer, other_schedule = build_optimizer(other, OptimConfig(learning_rate=3e-3, optim=after), 20)
    load_checkpoint(folder, other, other_optimizer, other_schedule)
    expected = train(model, optimizer, schedule, 6)
    assert train(other, other_optimizer, other_schedule, 6) == pytest.approx(expected, rel=0.02)


def test_missing_torchao_is_reported_before_the_run_folder_is_created(monkeypatch, tmp_path):
    for name in ("torchao.optim", "torchao"):
        monkeypatch.setitem(sys.modules, name, None)
    run, optim = RunConfig(method="sft", output_dir=str(tmp_path / "run")), OptimConfig(optim="adamw_8bit")
    for call in (lambda: open_run(SimpleNamespace(run=run, optim=optim)), lambda: build_optimizer(network(), optim, 1)):
        with pytest.raises(ValueError, match=r"optim=adamw_8bit.*pip install -e '\.\[small\]'"):
            call()
    assert not (tmp_path / "run").exists()


def test_bfloat16_weights_without_effect_are_rejected():
    with pytest.raises(ValueError, match="trained_dtype=bfloat16.*dtype=float32"):
        ModelConfig(model="builtin:tiny", trained_dtype="bfloat16", dtype="float32")
    cfg = ModelConfig(model="builtin:tiny", trained_dtype="bfloat16")
    with pytest.raises(ValueError, match="--dtype bfloat16"):  # auto is float32 on a CPU
        load_policy(cfg, LoraConfig(), CPU, with_reference=False)
    with pytest.raises(ValueError, match="remove --trained-dtype"):
        load_policy(cfg, LoraConfig(r=4), CPU, with_reference=False)


def test_trained_weights_are_bfloat16():
    cfg = ModelConfig(model="builtin:tiny", trained_dtype="bfloat16", dtype="bfloat16")
    policy = load_policy(cfg, LoraConfig(), CPU, with_reference=True)
    assert {p.dtype for p in policy.model.parameters()} == {torch.bfloat16}
    assert all(p.requires_grad for p in policy.model.parameters())
