from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from losses.reward_model import confusion, f1_scores, macro_f1, stepwise_loss

LOGITS = ((0.0, 2.0), (5.0, -5.0), (1.0, 0.0), (0.0, 3.0), (2.0, 2.5))
LABEL = (1, -100, 0, 0, 1)  # the second position has no label; the fourth is misclassified


def random_case(n: int = 23, seed: int = 0) -> tuple[Tensor, Tensor]:
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
    logits, label = random_case()
    rows = [(z, y) for z, y in zip(logits.tolist(), label.tolist(), strict=True) if y != -100]
    expected = sum(math.log(math.exp(z[0]) + math.exp(z[1])) - z[y] for z, y in rows)
    out = stepwise_loss(logits, label)
    assert out.terms["steps"].sum.item() == pytest.approx(expected, rel=1e-12)
    assert out.metrics["reward/step_accuracy"][0].item() == sum((z[1] > z[0]) == y for z, y in rows)


def test_uniform_logits_cost_log_two():
    term = stepwise_loss(torch.zeros(5, 2), torch.tensor([0, 1, -100, 1, 0])).terms["steps"]
    assert (term.sum / term.count).item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_stepwise_ignores_whatever_sits_in_positions_without_label(poison):
    label = torch.tensor(LABEL)
    clean = torch.tensor(LOGITS)
    logits = torch.where((label == -100).unsqueeze(1), poison, clean).requires_grad_()
    out = stepwise_loss(logits, label)
    out.terms["steps"].sum.backward()
    assert out.terms["steps"].sum.item() == stepwise_loss(clean, label).terms["steps"].sum.item()
    assert logits.grad.isfinite().all() and logits.grad[1].tolist() == [0.0, 0.0]
    assert torch.equal(confusion(logits, label), confusion(clean, label))


def test_stepwise_gradcheck():
    logits, label = random_case(n=8)
    assert torch.autograd.gradcheck(lambda x: stepwise_loss(x, label).terms["steps"].sum, logits)


@pytest.mark.parametrize("sizes", [(23,), (1,) * 23, (12, 11), (20, 0, 3)])
def test_stepwise_micro_batches_sum_to_the_whole(sizes):
    logits, label = random_case()
    whole = stepwise_loss(logits, label)
    rows = list(zip(logits.split(sizes), label.split(sizes), strict=True))
    parts = [stepwise_loss(*row) for row in rows]
    total = torch.stack([part.terms["steps"].sum for part in parts]).sum()
    assert total.item() == pytest.approx(whole.terms["steps"].sum.item(), rel=1e-13)
    assert sum(part.terms["steps"].count.item() for part in parts) == whole.terms["steps"].count.item()
    ours, theirs = (torch.autograd.grad(x, logits)[0] for x in (total, whole.terms["steps"].sum))
    torch.testing.assert_close(ours, theirs, atol=1e-14, rtol=1e-14)
    assert torch.equal(torch.stack([confusion(*row) for row in rows]).sum(0), confusion(logits, label))
    right = whole.metrics["reward/step_accuracy"][0].item()
    assert sum(part.metrics["reward/step_accuracy"][0].item() for part in parts) == right


@pytest.mark.parametrize("gap", [1e4, -1e4])
@pytest.mark.parametrize("label", [0, 1])
def test_stepwise_is_finite_at_extremes(gap, label):
    logits = torch.tensor([[0.0, gap]], requires_grad=True)
    loss = stepwise_loss(logits, torch.tensor([label])).terms["steps"].sum
    loss.backward()
    assert loss.item() == (0.0 if (gap > 0) == label else 1e4) and logits.grad.isfinite().all()


@pytest.mark.parametrize("n", [0, 4])
def test_nothing_labelled_is_a_differentiable_zero(n):
    logits = torch.randn(n, 2, generator=torch.Generator().manual_seed(0), requires_grad=True)
    out = stepwise_loss(logits, torch.full((n,), -100))
    out.terms["steps"].sum.backward()
    assert out.terms["steps"].sum.item() == 0.0 and out.terms["steps"].count.item() == 0
    assert torch.equal(logits.grad, torch.zeros(n, 2))
    assert out.metrics["reward/step_accuracy"][0].item() == 0
    assert macro_f1(confusion(logits, torch.full((n,), -100))).item() == 0.0


def test_bfloat16_logits_are_summed_in_float32():
    logits = torch.zeros(4096, 2, dtype=torch.bfloat16)
    total = stepwise_loss(logits, torch.ones(4096, dtype=torch.long)).terms["steps"].sum
    assert total.dtype == torch.float32 and total.item() == pytest.approx(4096 * math.log(2), rel=1e-5)


def test_confusion_counts_label_by_prediction():
    assert confusion(torch.tensor(LOGITS), torch.tensor(LABEL)).tolist() == [[1, 1], [0, 2]]
    tie = confusion(torch.zeros(2, 2), torch.tensor([0, 1]))
    assert tie.tolist() == [[1, 0], [1, 0]]


@pytest.mark.parametrize(
    ("matrix", "expected", "macro"),
    [
        ([[1, 1], [0, 2]], (2 / 3, 4 / 5), 11 / 15),
        ([[0, 3], [0, 5]], (0.0, 10 / 13), 5 / 13),  # always predicts right: half of the majority class's F1
        ([[0, 0], [0, 5]], (math.nan, 1.0), 1.0),  # no wrong step, none predicted: one class to average
        ([[4, 0], [0, 5]], (1.0, 1.0), 1.0),
    ],
)
def test_f1_by_hand(matrix, expected, macro):
    assert f1_scores(torch.tensor(matrix)).tolist() == pytest.approx(expected, nan_ok=True)
    assert macro_f1(torch.tensor(matrix)).item() == pytest.approx(macro)


def test_logits_of_another_width_are_refused():
    with pytest.raises(AssertionError):
        stepwise_loss(torch.zeros(3, 1), torch.zeros(3, dtype=torch.long))
