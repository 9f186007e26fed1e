"""Golden values of KTO from TRL 1.16.0 (four completions, beta 0.1)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from losses.kto import apo_zero_unpaired, kl_reference_point, kto_loss, reward_auc
from losses.types import LossOut

BETA = 0.1
LOGP = (-2.0, -3.0, -3.0, -2.5)
REF = (-3.0, -2.9, -2.2, -2.9)  # log-ratios 1.0, -0.1 (desirable), -0.8, 0.4 (undesirable)
LABEL = (True, True, False, False)
MISMATCHED = (0.3, 0.2, 0.1, 0.3)
LOSSES = ("kto", "apo_zero_unpaired")


def golden_z0() -> Tensor:
    return kl_reference_point(torch.tensor(MISMATCHED).sum(), torch.tensor(4))


def run(name: str, logp: Tensor, ref: Tensor, label: Tensor, z0: float | Tensor = 0.3, **weights: float) -> LossOut:
    if name == "apo_zero_unpaired":
        return apo_zero_unpaired(logp, ref, label, beta=BETA, **weights)
    return kto_loss(logp, ref, label, torch.as_tensor(z0), beta=BETA, **weights)


def golden(name: str, **weights: float) -> LossOut:
    return run(name, torch.tensor(LOGP), torch.tensor(REF), torch.tensor(LABEL), golden_z0(), **weights)


def random_case(n: int = 13, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logp, ref = -20 * torch.rand(2, n, generator=generator, dtype=torch.float64)
    return logp.requires_grad_(), ref, torch.rand(n, generator=generator) < 0.6


@pytest.mark.parametrize(
    ("name", "weights", "value"),
    [
        ("kto", {}, 0.491883),
        ("kto", {"undesirable_weight": 1.33}, 0.572632),
        ("apo_zero_unpaired", {}, 0.491883),
    ],
)
def test_kto_golden_values(name, weights, value):
    term = golden(name, **weights).terms[name]
    assert golden_z0().item() == pytest.approx(0.225)
    assert (term.sum / term.count).item() == pytest.approx(value, abs=1e-6)
    assert term.weight == 1.0 and term.count.item() == 4


def test_kto_and_apo_differ_if_the_classes_are_unbalanced():
    rows = (torch.tensor(LOGP[:3]), torch.tensor(REF[:3]), torch.tensor(LABEL[:3]))
    kto, apo = (run(name, *rows, 0.225).terms[name].sum.item() for name in LOSSES)
    assert kto - apo == pytest.approx(0.225 * BETA / 4, rel=0.02)  # one more desirable completion, slope 1/4 each


@pytest.mark.parametrize(("mismatched", "expected"), [((0.5, -0.1), 0.2), ((0.1, -0.5), 0.0), ((), 0.0)])
def test_reference_point_is_the_mean_clamped_after_averaging(mismatched, expected):
    values = torch.tensor(mismatched, requires_grad=True)
    z0 = kl_reference_point(values.sum(), torch.tensor(len(mismatched)))
    assert z0.item() == pytest.approx(expected) and not z0.requires_grad


def naive(name: str, logp: Tensor, ref: Tensor, label: Tensor, z0: float, weights: tuple[float, float]) -> float:
    sig = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    total = 0.0
    for lp, lr, good in zip(logp.tolist(), ref.tolist(), label.tolist(), strict=True):
        x = lp - lr
        if name == "kto":
            total += weights[0] * (1 - sig(BETA * (x - z0))) if good else weights[1] * (1 - sig(BETA * (z0 - x)))
        else:
            total += weights[0] * (1 - sig(BETA * x)) if good else weights[1] * sig(BETA * x)
    return total


@pytest.mark.parametrize("name", LOSSES)
def test_kto_agrees_with_a_float64_loop(name):
    case = random_case()
    out = run(name, *case, 0.7, desirable_weight=1.2, undesirable_weight=0.3)
    assert out.terms[name].sum.item() == pytest.approx(naive(name, *case, 0.7, (1.2, 0.3)), rel=1e-7)
    exact = run(name, *case, torch.tensor(0.7, dtype=torch.float64), desirable_weight=1.2, undesirable_weight=0.3)
    assert exact.terms[name].sum.item() == pytest.approx(naive(name, *case, 0.7, (1.2, 0.3)), rel=1e-13)


@pytest.mark.parametrize("name", LOSSES)
def test_class_with_weight_zero_has_no_gradient(name):
    logp, ref, label = random_case()
    out = run(name, logp, ref, label, undesirable_weight=0.0)
    (grad,) = torch.autograd.grad(out.terms[name].sum, logp)
    assert (grad[~label] == 0).all() and (grad[label] < 0).all()
    assert out.terms[name].count.item() == 13  # the count ignores the weights
    zero = run(name, logp, ref, label, desirable_weight=0.0, undesirable_weight=0.0)
    assert zero.terms[name].sum.item() == 0.0


def test_gradient_raises_desirable_and_lowers_undesirable_completions():
    logp, ref, label = random_case()
    for name in LOSSES:
        (grad,) = torch.autograd.grad(run(name, logp, ref, label).terms[name].sum, logp)
        assert torch.equal(grad < 0, label)


def test_reference_point_gets_no_gradient():
    logp, ref, label = random_case()
    z0 = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    kto_loss(logp, ref, label, z0, beta=BETA).terms["kto"].sum.backward()
    assert z0.grad is None


def test_kto_metrics_are_per_class():
    metrics = golden("kto").metrics
    means = {name: (total / count).item() for name, (total, count) in metrics.items()}
    assert means == pytest.approx({
        "reward/chosen": 0.045, "reward/rejected": -0.02, "policy/logp_chosen": -2.5, "policy/logp_rejected": -2.75
    }, abs=1e-6)  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("good", [True, False])
def test_a_class_may_be_absent(name, good):
    label = torch.full((4,), good)
    out = run(name, torch.tensor(LOGP), torch.tensor(REF), label)
    absent = "rejected" if good else "chosen"
    total, count = out.metrics[f"reward/{absent}"]
    assert total.item() == 0.0 and count.item() == 0 and out.terms[name].sum.isfinite()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("ratio", [1e4, -1e4])
@pytest.mark.parametrize("good", [True, False])
def test_kto_is_finite_at_extremes(name, ratio, good):
    logp = torch.tensor([ratio], requires_grad=True)
    loss = run(name, logp, torch.zeros(1), torch.tensor([good])).terms[name].sum
    loss.backward()
    assert loss.item() == pytest.approx(float((ratio > 0) != good)) and logp.grad.isfinite().all()


def test_auc_counts_ties_as_half_and_is_nan_for_one_class():
    reward, label = torch.tensor([2.0, 1.0, 1.0, 0.0]), torch.tensor([True, True, False, False])
    assert reward_auc(reward, label).item() == pytest.approx((2 + 1.5) / 4)  # 2 wins twice; 1 wins once and ties once
    assert reward_auc(reward, torch.ones(4, dtype=torch.bool)).isnan()
