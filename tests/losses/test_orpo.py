"""Golden values of ORPO's odds term, checked against TRL 1.16.0 (beta there is alpha here)."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from losses.reference_free import CLOSEST_TO_ZERO, FreeScores, log1mexp, log_odds_ratio, orpo_loss
from losses.types import LossOut

ALPHA = 0.1
MEAN_W = (-1.0, -0.3, -1e-4)
MEAN_L = (-1.5, -0.9, -0.5)
LEN_W = (2, 3, 1)
LEN_L = (1, 2, 4)


def golden_scores() -> FreeScores:
    len_w, len_l = torch.tensor(LEN_W), torch.tensor(LEN_L)
    return FreeScores(torch.tensor(MEAN_W) * len_w, torch.tensor(MEAN_L) * len_l, len_w, len_l)


def random_scores(num_pairs: int = 9, seed: int = 0) -> FreeScores:
    generator = torch.Generator().manual_seed(seed)
    len_w, len_l = torch.randint(1, 7, (2, num_pairs), generator=generator)
    mean = -2 * torch.rand(2, num_pairs, generator=generator, dtype=torch.float64) - 0.05
    return FreeScores((mean[0] * len_w).requires_grad_(), (mean[1] * len_l).requires_grad_(), len_w, len_l)


def run(s: FreeScores) -> LossOut:
    return orpo_loss(s, -s.logp_w.sum(), s.len_w.sum(), alpha=ALPHA)


def one_pair(mean_w: float, mean_l: float, dtype: torch.dtype = torch.float32) -> FreeScores:
    one = torch.ones(1, dtype=torch.long)
    return FreeScores(*(torch.tensor([x], dtype=dtype, requires_grad=True) for x in (mean_w, mean_l)), one, one)


def test_orpo_golden_values():
    s = golden_scores()
    log_odds = log_odds_ratio(s)
    assert log_odds.tolist() == pytest.approx([0.706193, 1.428390, 8.777538], abs=2e-5)
    weighted = ALPHA * F.logsigmoid(log_odds)
    assert weighted.tolist() == pytest.approx([-0.040114, -0.021486, -1.54e-5], abs=1e-6)
    odds = run(s).terms["odds"]
    assert odds.weight == ALPHA and odds.count.item() == 3
    assert (odds.sum / odds.count).item() == pytest.approx(0.205385, abs=1e-6)


def test_orpo_terms_and_metrics():
    out = orpo_loss(golden_scores(), torch.tensor(12.0), torch.tensor(8), alpha=ALPHA)
    assert list(out.terms) == ["nll", "odds"]
    assert (out.terms["nll"].weight, out.terms["nll"].sum.item(), out.terms["nll"].count.item()) == (1.0, 12.0, 8)
    means = {name: (total / count).item() for name, (total, count) in out.metrics.items()}
    chosen, rejected = -0.1 * 1.3001 / 3, -0.1 * 2.9 / 3
    assert means == pytest.approx({
        "reward/chosen": chosen, "reward/rejected": rejected, "reward/margin": chosen - rejected,
        "reward/accuracy": 1.0, "policy/logp_chosen": -2.9001 / 3, "policy/logp_rejected": -5.3 / 3,
        "policy/log_odds": (0.706193 + 1.428390 + 8.777538) / 3,
    }, abs=1e-5)  # fmt: skip


def test_orpo_agrees_with_a_float64_loop():
    s = random_scores()
    total = 0.0
    for lw, ll, nw, nl in zip(*(x.tolist() for x in s), strict=True):
        p, q = math.exp(lw / nw), math.exp(ll / nl)
        ratio = (p / (1 - p)) / (q / (1 - q))
        total -= math.log(ratio / (1 + ratio))
    assert run(s).terms["odds"].sum.item() == pytest.approx(total, rel=1e-12)
    low = FreeScores(s.logp_w.detach().float(), s.logp_l.detach().float(), s.len_w, s.len_l)
    assert run(low).terms["odds"].sum.item() == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("a", [-1e-5, -1e-3, -0.3, -math.log(2), -0.7, -1.0, -5.0, -40.0])
def test_log1mexp_is_accurate_on_both_sides(a):
    value = log1mexp(torch.tensor(a, dtype=torch.float64))
    assert value.item() == pytest.approx(math.log(-math.expm1(a)), rel=1e-12)
    exact = math.log(-math.expm1(torch.tensor(a).item()))
    assert log1mexp(torch.tensor(a)).item() == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("a", [0.0, -1e-9, -6e-8, -1e-7, -1e-6, -1e-4, -0.6931471805599453, -80.0, -1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log1mexp_and_its_gradient_are_finite_everywhere(a, dtype):
    x = torch.tensor(a, dtype=dtype, requires_grad=True)
    value = log1mexp(x)
    value.backward()
    assert value.isfinite() and x.grad.isfinite()
    if a > CLOSEST_TO_ZERO:
        assert value.item() == pytest.approx(math.log(1e-6), rel=1e-5) and x.grad.item() == 0.0
    elif a < CLOSEST_TO_ZERO:
        assert x.grad.item() == pytest.approx(-math.exp(a) / -math.expm1(a), rel=1e-2)


@pytest.mark.parametrize(
    ("mean_w", "mean_l"), [(0.0, 0.0), (0.0, -1e4), (-1e4, 0.0), (-1e-9, -1.0), (-1.0, -1e-9), (-1e4, -1e4)]
)
def test_orpo_is_finite_at_extremes(mean_w, mean_l):
    s = one_pair(mean_w, mean_l)
    out = run(s)
    odds = out.terms["odds"].sum
    grads = torch.autograd.grad(odds, [s.logp_w, s.logp_l])
    assert odds.isfinite() and all(grad.isfinite().all() for grad in grads)
    assert all(total.isfinite() for total, _ in out.metrics.values())


@pytest.mark.parametrize("mean", [-3.0, -0.5, -1e-3])
def test_identical_pairs_have_log_odds_zero(mean):
    s = one_pair(mean, mean, torch.float64)
    odds = run(s).terms["odds"].sum
    grad_w, grad_l = torch.autograd.grad(odds, [s.logp_w, s.logp_l])
    assert odds.item() == pytest.approx(math.log(2))
    assert grad_w.item() == pytest.approx(-0.5 / -math.expm1(mean), rel=1e-9) and grad_l.item() == -grad_w.item()


def test_orpo_gradcheck():
    s = random_scores(num_pairs=5)

    def total(w: Tensor, r: Tensor) -> Tensor:
        out = run(FreeScores(w, r, s.len_w, s.len_l))
        return sum(term.weight * term.sum for term in out.terms.values())

    assert torch.autograd.gradcheck(total, (s.logp_w, s.logp_l))


@pytest.mark.parametrize("sizes", [(9,), (1,) * 9, (4, 5), (6, 0, 3)])
def test_orpo_micro_batches_sum_to_the_whole(sizes):
    s = random_scores()
    whole = run(s)
    parts = [run(FreeScores(*(x[index] for x in s))) for index in torch.arange(9).split(sizes)]
    for name, term in whole.terms.items():
        total = torch.stack([part.terms[name].sum for part in parts]).sum()
        assert total.item() == pytest.approx(term.sum.item(), rel=1e-13)
        assert sum(part.terms[name].count.item() for part in parts) == term.count.item()
        ours, theirs = (torch.autograd.grad(x, s.logp_w, retain_graph=True)[0] for x in (total, term.sum))
        torch.testing.assert_close(ours, theirs, atol=1e-13, rtol=1e-13)
    for name, (value, count) in whole.metrics.items():
        assert sum(part.metrics[name][0].item() for part in parts) == pytest.approx(value.item(), rel=1e-12)
        assert sum(part.metrics[name][1].item() for part in parts) == count.item()


def test_no_pairs_and_no_tokens_give_a_differentiable_zero():
    s = random_scores(num_pairs=0)
    out = run(s)
    total = out.terms["nll"].sum + out.terms["odds"].sum
    assert total.item() == 0.0 and torch.autograd.grad(total, s.logp_w)[0].shape == (0,)
    empty = FreeScores(torch.zeros(1, requires_grad=True), torch.zeros(1), *torch.zeros(2, 1, dtype=torch.long))
    odds = run(empty).terms["odds"].sum
    (grad,) = torch.autograd.grad(odds, empty.logp_w)
    assert odds.item() == pytest.approx(math.log(2)) and grad.isfinite().all()


def test_bfloat16_inputs_are_computed_in_float32():
    s = random_scores()
    low = FreeScores(s.logp_w.detach().bfloat16(), s.logp_l.detach().bfloat16(), s.len_w, s.len_l)
    odds = run(low).terms["odds"].sum
    exact = FreeScores(low.logp_w.float(), low.logp_l.float(), s.len_w, s.len_l)
    assert odds.dtype == torch.float32 and odds.item() == pytest.approx(run(exact).terms["odds"].sum.item())
