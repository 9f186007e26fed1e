"""Learning rate schedules, AdamW and Muon steps, gradient norms and the total loss."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from losses.types import LossOut, Term
from tests.clip import clip_gradients
from trainer.config.blocks import OptimConfig
from trainer.metrics.metrics import MetricSums
from trainer.policy.optim import build_optimizer, launch_step, lr_factor, term_metrics, total_loss
from trainer.policy.sharding import gradient_norm


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def set_gradients(model: nn.Module, value: float) -> None:
    for p in model.parameters():
        p.grad = torch.full_like(p, value)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lr_scheduler_type": "constant"}, [1.0] * 10),
        ({"lr_scheduler_type": "constant", "warmup_ratio": 0.4}, [0.25, 0.5, 0.75, *[1.0] * 7]),
        ({"lr_scheduler_type": "constant", "warmup_steps": 4}, [0.25, 0.5, 0.75, *[1.0] * 7]),
        ({"lr_scheduler_type": "linear", "warmup_steps": 0}, [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
        (
            {"lr_scheduler_type": "linear", "warmup_ratio": 0.2},
            [0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8],
        ),
        ({"lr_scheduler_type": "cosine"}, [(1 + math.cos(math.pi * t / 10)) / 2 for t in range(10)]),
        (
            {"lr_scheduler_type": "cosine", "warmup_ratio": 0.5},
            [0.2, 0.4, 0.6, 0.8, 1.0, *((1 + math.cos(math.pi * t / 5)) / 2 for t in range(5))],
        ),
        ({"warmup_steps": 20}, [(step + 1) / 20 for step in range(10)]),  # longer than the run
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "min_lr_ratio": 0.2, "warmup_steps": 2},
            [0.5, 1.0, *(0.2 + 0.4 * (1 + math.cos(math.pi * t / 8)) for t in range(8))],
        ),
        (
            {"lr_scheduler_type": "warmup_stable_decay", "decay_ratio": 0.4, "warmup_steps": 2, "min_lr_ratio": 0.1},
            [0.5, 1, 1, 1, 1, 1, *(0.1 + 0.45 * (1 + math.cos(math.pi * t / 4)) for t in range(4))],
        ),
        (  # the warm-up comes first
            {"lr_scheduler_type": "warmup_stable_decay", "decay_ratio": 1.0, "warmup_steps": 8},
            [*((step + 1) / 8 for step in range(8)), 1.0, 0.5],
        ),
        (
            {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 4},
            [0.25, 0.5, 0.75, 1.0, *(math.sqrt(4 / step) for step in range(4, 10))],
        ),
        ({"lr_scheduler_type": "inverse_sqrt"}, [math.sqrt(10_000 / (10_000 + step)) for step in range(10)]),
    ],
)
def test_schedules_of_ten_steps(settings, expected):
    factor = lr_factor(OptimConfig(**settings), 10)
    assert [factor(step) for step in range(10)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "kwargs"),
    [
        ({"lr_scheduler_type": "cosine_with_min_lr", "min_lr_ratio": 0.3}, {"min_lr_rate": 0.3}),
        (
            {"lr_scheduler_type": "warmup_stable_decay", "min_lr_ratio": 0.3, "decay_ratio": 0.5},
            {"min_lr_ratio": 0.3, "num_decay_steps": 20},
        ),
        ({"lr_scheduler_type": "inverse_sqrt"}, {}),
    ],
)
def test_schedules_match_transformers_after_the_warmup(settings, kwargs):
    """transformers starts the warm-up at 0 and ends it a step later, at the same peak."""
    from transformers import get_scheduler

    optimizer = torch.optim.SGD(make_model().parameters(), lr=1.0)
    kind = settings["lr_scheduler_type"]
    schedule = get_scheduler(kind, optimizer, 6, 40, scheduler_specific_kwargs=kwargs)
    expected = []
    for _ in range(40):
        expected.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    factor = lr_factor(OptimConfig(warmup_steps=6, **settings), 40)
    assert [factor(step) for step in range(6, 40)] == pytest.approx(expected[6:])


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_lr_factor_ends_at_zero_and_stays_there(kind):
    factor = lr_factor(OptimConfig(lr_scheduler_type=kind, warmup_ratio=0.2), 10)
    assert factor(10) == pytest.approx(0.0, abs=1e-12) and factor(15) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup_ratio", [0.0, 0.3, 1.0])
def test_lr_factor_is_above_zero_in_every_step(kind, warmup_ratio):
    for total in (1, 2, 7):
        factor = lr_factor(OptimConfig(lr_scheduler_type=kind, warmup_ratio=warmup_ratio), total)
        assert all(0 < factor(step) <= 1 for step in range(total))


def test_learning_rate_follows_the_schedule():
    model = make_model()
    optimizer, schedule = build_optimizer(model, OptimConfig(learning_rate=0.1, lr_scheduler_type="linear"), 4)
    rates = []
    for _ in range(4):
        rates.append(schedule.get_last_lr()[0])
        assert [group["lr"] for group in optimizer.param_groups] == [rates[-1]] * 2
        set_gradients(model, 1.0)
        launch_step(model, optimizer, schedule, 1.0, "step 1").wait()
    assert rates == pytest.approx([0.1, 0.075, 0.05, 0.025])


def test_only_matrices_decay_and_frozen_weights_are_excluded():
    model = make_model()
    model[2].weight.requires_grad_(False)
    cfg = OptimConfig(weight_decay=0.3, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6)
    optimizer, _ = build_optimizer(model, cfg, 10)
    decayed, plain = optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert [id(p) for p in decayed["params"]] == [id(model[0].weight)]
    assert {id(p) for p in plain["params"]} == {id(p) for p in model.parameters() if p.ndim == 1}
    assert decayed["betas"] == plain["betas"] == (0.8, 0.95) and decayed["eps"] == 1e-6


def test_first_step_matches_adamw_by_hand():
    model = make_model()
    cfg = OptimConfig(learning_rate=0.01, lr_scheduler_type="constant", weight_decay=0.1, max_grad_norm=0.0)
    optimizer, schedule = build_optimizer(model, cfg, 10)
    before = [p.detach().clone() for p in model.parameters()]
    set_gradients(model, 0.5)
    launch_step(model, optimizer, schedule, 0.0, "step 1").wait()
    # The first Adam step moves every weight by the learning rate, for any size of gradient.
    for old, new in zip(before, model.parameters(), strict=True):
        decay = 0.01 * 0.1 if old.ndim == 2 else 0.0
        torch.testing.assert_close(new.detach(), old * (1 - decay) - 0.01, atol=1e-6, rtol=0)
    assert all(p.grad is None for p in model.parameters())


def test_total_loss_divides_every_term_by_its_count_over_the_step():
    policy, kl = torch.tensor(6.0, requires_grad=True), torch.tensor(8.0, requires_grad=True)
    # The divisors are the step's 12 tokens and 4 pairs, not the micro-batch's 2 tokens.
    out = LossOut({"policy": Term(1.0, policy, torch.tensor(2)), "kl": Term(0.5, kl, torch.tensor(2))}, {})
    total = total_loss(out, {"policy": torch.tensor(12.0), "kl": torch.tensor(4.0), "unused": torch.tensor(1.0)})
    total.backward()
    assert total.item() == pytest.approx(6.0 / 12 + 0.5 * 8.0 / 4)
    assert policy.grad.item() == pytest.approx(1 / 12) and kl.grad.item() == pytest.approx(0.5 / 4)


def test_total_loss_without_trained_tokens_is_zero():
    nll = torch.tensor(0.0, requires_grad=True)
    total = total_loss(LossOut({"nll": Term(1.0, nll, torch.tensor(0))}, {}), {"nll": torch.tensor(0.0)})
    total.backward()
    assert total.item() == 0.0 and nll.grad.isfinite()


def test_total_loss_needs_a_count_for_every_term():
    out = LossOut({"kl": Term(1.0, torch.tensor(1.0), torch.tensor(1))}, {})
    with pytest.raises(AssertionError, match="kl"):
        total_loss(out, {"policy": torch.tensor(1.0)})


def test_term_metrics_are_unweighted_and_detached():
    total = torch.tensor(8.0, requires_grad=True)
    metrics = term_metrics(LossOut({"kl": Term(0.1, total, torch.tensor(4))}, {}))
    (value, count) = metrics["loss/kl"]
    assert list(metrics) == ["loss/kl"] and (value.item(), count.item()) == (8.0, 4) and not value.requires_grad


def test_norm_of_bfloat16_gradients_is_not_rounded():
    model = make_model().bfloat16()
    set_gradients(model, 0.5)
    norm = 0.5 * math.sqrt(sum(p.numel() for p in model.parameters()))
    assert clip_gradients(model.parameters(), math.inf) == pytest.approx(norm, rel=1e-6)
    assert float(torch.tensor(norm).bfloat16()) != pytest.approx(norm, rel=1e-4)  # torch's rounded norm
    assert clip_gradients(model.parameters(), 1.0) == pytest.approx(norm, rel=1e-6)
    assert clip_gradients(model.parameters(), 1.0) == pytest.approx(1.0, rel=1e-2)


def lm_like() -> nn.Module:
    """An embedding, blocks and a head, like a language model."""
    torch.manual_seed(0)
    return nn.ModuleDict(
        {"body": nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6, bias=False)),
         "head": nn.Linear(6, 7, bias=False)}
    )  # fmt: skip


def test_muon_steps_matrices_and_adamw_other_parameters():
    """Compared with torch's two optimizers over three steps of a schedule."""
    cfg = OptimConfig(optim="muon", learning_rate=0.02, weight_decay=0.1, lr_scheduler_type="linear", adam_beta2=0.9)
    model, twin = lm_like(), lm_like()
    optimizer, schedule = build_optimizer(model, cfg, 4)
    matrices = [twin["body"][1].weight, twin["body"][3].weight]
    decayed = [twin["body"][0].weight, twin["head"].weight]
    plain = [twin["body"][1].bias, *twin["body"][2].parameters()]
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.9))
    for step in range(3):
        torch.manual_seed(step)
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for group in (*muon.param_groups, *adamw.param_groups):
            group["lr"] = 0.02 * (1 - step / 4)
        launch_step(model, optimizer, schedule, 0.0, "step").wait()
        muon.step()
        adamw.step()
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    slots = {name: sorted(optimizer.state[p]) for name, p in model.named_parameters()}
    assert slots["body.1.weight"] == ["momentum_buffer"] and "exp_avg" in slots["head.weight"]


def test_muon_rejects_bfloat16_and_lora():
    adapted = lm_like()
    adapted.peft_config = {}
    for model, flag in ((lm_like().bfloat16(), "--trained-dtype bfloat16"), (adapted, "--lora.r 0")):
        with pytest.raises(ValueError, match=f"^optim=muon: .*{flag}"):
            build_optimizer(model, OptimConfig(optim="muon"), 4)


def test_norm_covers_gradients_of_all_dtypes():
    model = nn.Sequential(nn.Linear(3, 4).bfloat16(), nn.Linear(4, 2).double(), nn.LayerNorm(2))
    model[2].bias.requires_grad_(False)
    set_gradients(model, 0.5)
    model[2].bias.grad = None
    count = sum(p.numel() for p in model.parameters()) - 2
    norm = gradient_norm(model.parameters())
    assert norm.dtype == torch.float64 and norm.item() == pytest.approx(0.5 * math.sqrt(count), rel=1e-7)
    assert clip_gradients(model.parameters(), 1.0) == norm.item()
    assert clip_gradients(model.parameters(), 1.0) == pytest.approx(1.0, rel=1e-2)  # some are rounded to bfloat16
    assert clip_gradients([], 1.0) == 0.0


@pytest.mark.gpu
def test_step_on_a_gpu_is_one_launch_for_all_weights_and_waits_only_for_norm_and_loss():
    """The wait for norm and loss is on an event, which torch does not count as a synchronisation."""
    model = nn.Sequential(*(nn.Linear(65, 65) for _ in range(100))).to("cuda", torch.bfloat16)
    optimizer, schedule = build_optimizer(model, OptimConfig(lr_scheduler_type="constant"), 4)
    metrics = MetricSums()
    metrics.add({"loss/total": (torch.ones((), device="cuda"), torch.ones((), device="cuda"))})
    set_gradients(model, 1.0)
    launch_step(model, optimizer, schedule, 1.0, "step 1", metrics).wait()  # compiles and builds the chunk list
    set_gradients(model, 1.0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            launch_step(model, optimizer, schedule, 1.0, "step 2", metrics).wait()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    launched = [event.name for event in profile.events() if event.device_type == on_device]
    assert launched.count("_step") == 1 and len(launched) < 60, launched  # there are 200 tensors
