"""Golden values of KTO from TRL 1.16.0 (four completions, beta 0.1)."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from losses.kto import reward_auc
from losses.types import Metrics
from trainer.methods import kto

BETA = 0.1
LOGP = (-2.0, -3.0, -3.0, -2.5)
REF = (-3.0, -2.9, -2.2, -2.9)  # log-ratios 1.0, -0.1 (desirable), -0.8, 0.4 (undesirable)
LABEL = (True, True, False, False)
LOSSES = {"kto": 0.3, "apo_zero_unpaired": 0.0}  # z0


def run(logp: Tensor, ref: Tensor, label: Tensor, z0: float | Tensor = 0.3, **weights: float) -> tuple[Tensor, Metrics]:
    cfg = SimpleNamespace(beta=BETA, **{"desirable_weight": 1.0, "undesirable_weight": 1.0, **weights})
    return kto.sequence_losses(cfg, logp, ref, label, torch.as_tensor(z0))


def golden(**weights: float) -> tuple[Tensor, Metrics]:
    return run(torch.tensor(LOGP), torch.tensor(REF), torch.tensor(LABEL), 0.225, **weights)


def random_case(n: int = 13, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logp, ref = -20 * torch.rand(2, n, generator=generator, dtype=torch.float64)
    return logp.requires_grad_(), ref, torch.rand(n, generator=generator) < 0.6


@pytest.mark.parametrize(("weights", "value"), [({}, 0.491883), ({"undesirable_weight": 1.33}, 0.572632)])
def test_golden_values(weights, value):
    assert golden(**weights)[0].mean().item() == pytest.approx(value, abs=1e-6)


def test_kto_and_apo_differ_if_the_classes_are_unbalanced():
    rows = (torch.tensor(LOGP[:3]), torch.tensor(REF[:3]), torch.tensor(LABEL[:3]))
    with_z0, without = (run(*rows, z0)[0].sum().item() for z0 in (0.225, 0.0))
    assert with_z0 - without == pytest.approx(0.225 * BETA / 4, rel=0.02)  # one more desirable completion, slope 1/4


@pytest.mark.parametrize(("mismatched", "expected"), [((0.5, -0.1), 0.2), ((0.1, -0.5), 0.0), ((), 0.0)])
def test_reference_point_is_the_mean_clamped_after_averaging(mismatched, expected, monkeypatch):
    ratios = torch.tensor(mismatched, requires_grad=True)
    monkeypatch.setattr(kto, "sequence_logps", lambda *_: (ratios, torch.zeros_like(ratios), None))
    step = SimpleNamespace(items=[], label=[], mismatched=[None] if mismatched else [])
    z0 = kto.reference_point(SimpleNamespace(device="cpu"), None, step)
    assert z0.item() == pytest.approx(expected) and not z0.requires_grad


def naive(logp: Tensor, ref: Tensor, label: Tensor, z0: float, weights: tuple[float, float]) -> float:
    sig = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    total = 0.0
    for lp, lr, good in zip(logp.tolist(), ref.tolist(), label.tolist(), strict=True):
        x = lp - lr
        total += weights[0] * (1 - sig(BETA * (x - z0))) if good else weights[1] * (1 - sig(BETA * (z0 - x)))
    return total


@pytest.mark.parametrize("z0", LOSSES.values(), ids=LOSSES)
def test_agrees_with_a_float64_loop(z0):
    case = random_case()
    exact = torch.tensor(z0, dtype=torch.float64)
    got = run(*case, exact, desirable_weight=1.2, undesirable_weight=0.3)[0].sum().item()
    assert got == pytest.approx(naive(*case, z0, (1.2, 0.3)), rel=1e-13)


def test_gradient_raises_desirable_and_lowers_undesirable_completions():
    logp, ref, label = random_case()
    (grad,) = torch.autograd.grad(run(logp, ref, label)[0].sum(), logp)
    assert torch.equal(grad < 0, label)
    (grad,) = torch.autograd.grad(run(logp, ref, label, undesirable_weight=0.0)[0].sum(), logp)
    assert (grad[~label] == 0).all() and (grad[label] < 0).all()


def test_metrics_are_per_class():
    means = {name: (total / count).item() for name, (total, count) in golden()[1].items()}
    assert means == pytest.approx({
        "reward/chosen": 0.045, "reward/rejected": -0.02, "policy/logp_chosen": -2.5, "policy/logp_rejected": -2.75
    }, abs=1e-6)  # fmt: skip
    for good in (True, False):  # a class may be absent
        loss, metrics = run(torch.tensor(LOGP), torch.tensor(REF), torch.full((4,), good))
        total, count = metrics["reward/rejected" if good else "reward/chosen"]
        assert total.item() == 0.0 and count.item() == 0 and loss.isfinite().all()


@pytest.mark.parametrize("ratio", [1e4, -1e4])
@pytest.mark.parametrize("good", [True, False])
def test_finite_at_extremes(ratio, good):
    logp = torch.tensor([ratio], requires_grad=True)
    loss = run(logp, torch.zeros(1), torch.tensor([good]))[0].sum()
    loss.backward()
    assert loss.item() == pytest.approx(float((ratio > 0) != good)) and logp.grad.isfinite().all()


def test_auc_counts_ties_as_half_and_is_nan_for_one_class():
    reward, label = torch.tensor([2.0, 1.0, 1.0, 0.0]), torch.tensor([True, True, False, False])
    assert reward_auc(reward, label).item() == pytest.approx((2 + 1.5) / 4)  # 2 wins twice; 1 wins once and ties once
    assert reward_auc(reward, torch.ones(4, dtype=torch.bool)).isnan()
