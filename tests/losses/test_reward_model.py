"""Worked example of the Bradley-Terry loss: scores 1.0 and 0.2 against 0.0 and 0.5."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from losses.reward_model import bradley_terry
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
    wanted = None if margin is None else torch.tensor(margin)
    out = bradley_terry(torch.tensor(CHOSEN), torch.tensor(REJECTED), wanted, center_coefficient=center)
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


def test_equal_scores_cost_log_two_and_are_not_accurate():
    out = bradley_terry(torch.ones(3), torch.ones(3))
    assert mean(out) == pytest.approx(math.log(2)) and out.metrics["reward/accuracy"][0].item() == 0.0


def test_a_constant_added_to_all_scores_changes_only_the_centring():
    w, r, margin = random_case()
    here, there = (bradley_terry(w + k, r + k, margin, center_coefficient=0.1).terms for k in (0.0, 5.0))
    assert here["bradley_terry"].sum.item() == pytest.approx(there["bradley_terry"].sum.item())
    assert there["center"].sum.item() > here["center"].sum.item()


def test_bradley_terry_gradcheck():
    w, r, margin = random_case(n=5)

    def total(a: Tensor, b: Tensor) -> Tensor:
        terms = bradley_terry(a, b, margin, center_coefficient=0.3).terms
        return sum(term.weight * term.sum for term in terms.values())

    assert torch.autograd.gradcheck(total, (w, r))


@pytest.mark.parametrize("sizes", [(11,), (1,) * 11, (4, 7), (9, 0, 2)])
def test_bradley_terry_micro_batches_sum_to_the_whole(sizes):
    w, r, margin = random_case()
    whole = bradley_terry(w, r, margin, center_coefficient=0.3)
    rows = zip(w.split(sizes), r.split(sizes), margin.split(sizes), strict=True)
    parts = [bradley_terry(*row, center_coefficient=0.3) for row in rows]
    for name, term in whole.terms.items():
        total = torch.stack([part.terms[name].sum for part in parts]).sum()
        assert total.item() == pytest.approx(term.sum.item(), rel=1e-13)
        assert sum(part.terms[name].count.item() for part in parts) == term.count.item()
        ours, theirs = (torch.autograd.grad(x, w, retain_graph=True)[0] for x in (total, term.sum))
        torch.testing.assert_close(ours, theirs, atol=1e-13, rtol=1e-13)
    for name, (value, count) in whole.metrics.items():
        assert sum(part.metrics[name][0].item() for part in parts) == pytest.approx(value.item(), rel=1e-12)
        assert sum(part.metrics[name][1].item() for part in parts) == count.item()


@pytest.mark.parametrize("distance", [1e4, -1e4])
def test_bradley_terry_is_finite_at_extremes(distance):
    w, r = torch.tensor([distance], requires_grad=True), torch.zeros(1, requires_grad=True)
    loss = bradley_terry(w, r).terms["bradley_terry"].sum
    grad_w, grad_l = torch.autograd.grad(loss, [w, r])
    assert loss.item() == max(0.0, -distance)
    assert grad_w.item() == (-1.0 if distance < 0 else 0.0) and grad_l.item() == -grad_w.item()


def test_no_pairs_give_a_differentiable_zero():
    w = torch.zeros(0, requires_grad=True)
    out = bradley_terry(w, torch.zeros(0), center_coefficient=0.1)
    (out.terms["bradley_terry"].sum + out.terms["center"].sum).backward()
    assert out.terms["bradley_terry"].sum.item() == 0.0 and out.terms["bradley_terry"].count.item() == 0
    assert w.grad.shape == (0,)


def test_bfloat16_scores_are_summed_in_float32():
    out = bradley_terry(torch.ones(4096, dtype=torch.bfloat16), torch.zeros(4096, dtype=torch.bfloat16))
    total = out.terms["bradley_terry"].sum
    assert total.dtype == torch.float32 and total.item() == pytest.approx(4096 * math.log1p(math.exp(-1)), rel=1e-5)
    assert out.metrics["reward/accuracy"][0].item() == 4096.0


@pytest.mark.parametrize(("chosen", "margin"), [((3, 1), (3,)), ((3,), (3, 1))])
def test_shapes_that_would_broadcast_are_refused(chosen, margin):
    with pytest.raises(AssertionError):
        bradley_terry(torch.zeros(chosen), torch.zeros(3), torch.zeros(margin))
