"""Reward model losses against hand-computed values and float64 loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from losses.reward_model import bradley_terry, confusion, f1_scores, macro_f1, stepwise_loss
from losses.types import LossOut

CHOSEN = (1.0, 0.2)
REJECTED = (0.0, 0.5)


def mean(out: LossOut) -> float:
    return sum(term.weight * (term.sum / term.count).item() for term in out.terms.values())


def random_case(n: int = 11, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    w, r, margin = 3 * torch.randn(3, n, generator=generator, dtype=torch.float64)
    return w.requires_grad_(), r.requires_grad_(), margin.abs()


@pytest.mark.parametrize(
    ("margin", "center", "value"), [(None, None, 0.583808), ((0.5, 0.0), None, 0.664216), (None, 0.01, 0.591258)]
)
def test_bradley_terry_golden_values(margin, center, value):
    margin = None if margin is None else torch.tensor(margin)
    out = bradley_terry(torch.tensor(CHOSEN), torch.tensor(REJECTED), margin, center_coefficient=center)
    assert mean(out) == pytest.approx(value, abs=1e-6)
    assert list(out.terms) == (["bradley_terry"] if center is None else ["bradley_terry", "center"])
    assert all(term.count.item() == 2 for term in out.terms.values())


def test_bradley_terry_metrics():
    metrics = bradley_terry(torch.tensor(CHOSEN), torch.tensor(REJECTED), torch.tensor([0.5, 0.0])).metrics
    means = {name: (total / count).item() for name, (total, count) in metrics.items()}
    assert means == pytest.approx({
        "reward/chosen": 0.6, "reward/rejected": 0.25, "reward/mean": 0.425, "reward/margin": 0.35,
        "reward/accuracy": 0.5,
    })  # fmt: skip


def test_bradley_terry_agrees_with_a_float64_loop():
    w, r, margin = random_case()
    out = bradley_terry(w, r, margin, center_coefficient=0.3)
    rows = list(zip(w.tolist(), r.tolist(), margin.tolist(), strict=True))
    pair = sum(math.log1p(math.exp(-(a - b - m))) for a, b, m in rows)
    assert out.terms["bradley_terry"].sum.item() == pytest.approx(pair, rel=1e-12)
    assert out.terms["center"].sum.item() == pytest.approx(sum((a + b) ** 2 for a, b, _ in rows), rel=1e-12)
    assert out.terms["center"].weight == 0.3


def test_equal_scores_cost_log_two_and_count_as_inaccurate():
    out = bradley_terry(torch.ones(3), torch.ones(3))
    assert mean(out) == pytest.approx(math.log(2)) and out.metrics["reward/accuracy"][0].item() == 0.0


def test_constant_offset_of_all_scores_changes_only_the_center_term():
    w, r, margin = random_case()
    base, shifted = (bradley_terry(w + k, r + k, margin, center_coefficient=0.1).terms for k in (0.0, 5.0))
    assert base["bradley_terry"].sum.item() == pytest.approx(shifted["bradley_terry"].sum.item())
    assert shifted["center"].sum.item() > base["center"].sum.item()


@pytest.mark.parametrize("distance", [1e4, -1e4])
def test_bradley_terry_is_finite_at_extremes(distance):
    w, r = torch.tensor([distance], requires_grad=True), torch.zeros(1, requires_grad=True)
    loss = bradley_terry(w, r).terms["bradley_terry"].sum
    grad_w, grad_l = torch.autograd.grad(loss, [w, r])
    assert loss.item() == max(0.0, -distance)
    assert grad_w.item() == (-1.0 if distance < 0 else 0.0) and grad_l.item() == -grad_w.item()


@pytest.mark.parametrize(("chosen", "margin"), [((3, 1), (3,)), ((3,), (3, 1))])
def test_shapes_that_would_broadcast_are_rejected(chosen, margin):
    with pytest.raises(AssertionError):
        bradley_terry(torch.zeros(chosen), torch.zeros(3), torch.zeros(margin))


# Process reward models

LOGITS = ((0.0, 2.0), (5.0, -5.0), (1.0, 0.0), (0.0, 3.0), (2.0, 2.5))
LABEL = (1, -100, 0, 0, 1)  # the second position has no label; the fourth is misclassified


def random_steps(n: int = 23, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, 2, generator=generator, dtype=torch.float64)
    label = torch.randint(0, 2, (n,), generator=generator)
    return logits.requires_grad_(), torch.where(torch.rand(n, generator=generator) < 0.5, -100, label)


def test_stepwise_hand_computed_value_and_gradient():
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    out = stepwise_loss(logits, torch.tensor(LABEL))
    term = out.terms["steps"]
    margins = (2.0, 1.0, -3.0, 0.5)  # logit of the label minus the other, at the labelled positions
    assert list(out.terms) == ["steps"] and term.weight == 1.0 and term.count.item() == 4
    assert term.sum.item() == pytest.approx(sum(math.log1p(math.exp(-m)) for m in margins), rel=1e-14)
    term.sum.backward()
    push = [1 / (1 + math.exp(m)) for m in margins]
    expected = [[push[0], -push[0]], [0.0, 0.0], [-push[1], push[1]], [-push[2], push[2]], [push[3], -push[3]]]
    torch.testing.assert_close(logits.grad, torch.tensor(expected, dtype=torch.float64))
    right, count = out.metrics["reward/step_accuracy"]
    assert (right.item(), count.item()) == (3, 4)


def test_stepwise_agrees_with_a_float64_loop():
    logits, label = random_steps()
    rows = [(z, y) for z, y in zip(logits.tolist(), label.tolist(), strict=True) if y != -100]
    expected = sum(math.log(math.exp(z[0]) + math.exp(z[1])) - z[y] for z, y in rows)
    out = stepwise_loss(logits, label)
    assert out.terms["steps"].sum.item() == pytest.approx(expected, rel=1e-12)
    assert out.metrics["reward/step_accuracy"][0].item() == sum((z[1] > z[0]) == y for z, y in rows)


def test_uniform_logits_cost_log_two():
    term = stepwise_loss(torch.zeros(5, 2), torch.tensor([0, 1, -100, 1, 0])).terms["steps"]
    assert (term.sum / term.count).item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("gap", [1e4, -1e4])
@pytest.mark.parametrize("label", [0, 1])
def test_stepwise_is_finite_at_extremes(gap, label):
    logits = torch.tensor([[0.0, gap]], requires_grad=True)
    loss = stepwise_loss(logits, torch.tensor([label])).terms["steps"].sum
    loss.backward()
    assert loss.item() == (0.0 if (gap > 0) == label else 1e4) and logits.grad.isfinite().all()


def test_confusion_counts_label_by_prediction():
    assert confusion(torch.tensor(LOGITS), torch.tensor(LABEL)).tolist() == [[1, 1], [0, 2]]
    tie = confusion(torch.zeros(2, 2), torch.tensor([0, 1]))
    assert tie.tolist() == [[1, 0], [1, 0]]


@pytest.mark.parametrize(
    ("matrix", "expected", "macro"),
    [
        ([[1, 1], [0, 2]], (2 / 3, 4 / 5), 11 / 15),
        ([[0, 3], [0, 5]], (0.0, 10 / 13), 5 / 13),  # always predicts right: half the F1 of the majority class
        ([[0, 0], [0, 5]], (math.nan, 1.0), 1.0),  # wrong is neither labelled nor predicted: average of one class
        ([[4, 0], [0, 5]], (1.0, 1.0), 1.0),
        ([[0, 0], [0, 0]], (math.nan, math.nan), 0.0),  # no labels
    ],
)
def test_f1_by_hand(matrix, expected, macro):
    assert f1_scores(torch.tensor(matrix)).tolist() == pytest.approx(expected, nan_ok=True)
    assert macro_f1(torch.tensor(matrix)).item() == pytest.approx(macro)


def test_logits_of_the_wrong_width_are_rejected():
    with pytest.raises(AssertionError):
        stepwise_loss(torch.zeros(3, 1), torch.zeros(3, dtype=torch.long))
