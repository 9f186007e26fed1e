"""Golden values of SimPO, AlphaPO, CPO (two pairs) and ORPO from TRL 1.16.0."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from losses.reference_free import (
    CLOSEST_TO_ZERO,
    CPO_LOSSES,
    FreeScores,
    alpha_reward,
    cpo_loss,
    log1mexp,
    log_odds_ratio,
    orpo_loss,
)
from losses.types import LossOut, options_of

MEAN_W = (-1.0, -0.8)
MEAN_L = (-1.2, -0.5)
OPTIONS = {"beta": 2.0, "gamma": 1.0, "alpha": 0.25, "label_smoothing": 0.1}


def per_pair(s: FreeScores, name: str, **options: float) -> Tensor:
    options = {**OPTIONS, **options}
    return CPO_LOSSES[name](s, **{key: options[key] for key in options_of(CPO_LOSSES[name])})


def one_token_pairs(mean_w: tuple[float, ...], mean_l: tuple[float, ...]) -> FreeScores:
    """Responses of one token, so that sum and mean are equal."""
    ones = torch.ones(len(mean_w), dtype=torch.long)
    return FreeScores(*(torch.tensor(x, requires_grad=True) for x in (mean_w, mean_l)), ones, ones)


def random_scores(num_pairs: int = 9, seed: int = 0) -> FreeScores:
    generator = torch.Generator().manual_seed(seed)
    logp = -8 * torch.rand(2, num_pairs, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, 9, (2, num_pairs), generator=generator)
    return FreeScores(*(x.requires_grad_() for x in logp.unbind()), *lengths)


def run(s: FreeScores, name: str, cpo_alpha: float = 1.0, **options: float) -> LossOut:
    return cpo_loss(s, loss_type=name, cpo_alpha=cpo_alpha, **{**OPTIONS, **options})


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("simpo", {"beta": 0.1, "gamma": 0.5, "label_smoothing": 0.0}, (0.961675, 0.992856)),
        ("simpo", {"label_smoothing": 0.0}, (1.037488, 1.783901)),
        ("simpo", {"label_smoothing": 0.1}, (0.977488, 1.623901)),
        ("alphapo", {"alpha": 0.25, "label_smoothing": 0.0}, (0.957561, 1.872891)),
        ("sigmoid", {"beta": 0.1, "label_smoothing": 0.0}, (0.683197, 0.708260)),
        ("hinge", {"beta": 0.1}, (0.98, 1.03)),
        ("ipo", {"beta": 0.1}, (23.04, 28.09)),
    ],
)
def test_cpo_golden_values(name, options, expected):
    loss = per_pair(one_token_pairs(MEAN_W, MEAN_L), name, **options)
    assert loss.tolist() == pytest.approx(expected, abs=2e-6, rel=1e-6)


@pytest.mark.parametrize("name", CPO_LOSSES)
def test_cpo_compares_means_or_sums(name):
    """Longer responses with the same mean change only sigmoid and hinge."""
    short = one_token_pairs(MEAN_W, MEAN_L)
    len_w, len_l = torch.tensor([3, 2]), torch.tensor([2, 4])
    long = FreeScores(short.logp_w * len_w, short.logp_l * len_l, len_w, len_l)
    same = torch.allclose(per_pair(short, name), per_pair(long, name), atol=1e-6)
    assert same == (name in ("simpo", "alphapo", "ipo"))


def test_cpo_terms_and_metrics():
    s = FreeScores(torch.tensor([-3.0, -1.6]), torch.tensor([-2.4, -2.0]), torch.tensor([3, 2]), torch.tensor([2, 4]))
    out = run(s, "simpo", cpo_alpha=0.5, label_smoothing=0.0)
    assert list(out.terms) == ["simpo", "nll"]
    assert out.terms["simpo"].weight == 1.0 and out.terms["simpo"].count.item() == 2
    assert (out.terms["simpo"].sum / 2).item() == pytest.approx((1.037488 + 1.783901) / 2, abs=1e-6)
    nll = out.terms["nll"]
    assert (nll.weight, nll.sum.item(), nll.count.item()) == (0.5, pytest.approx(4.6), 5)
    means = {name: (total / count).item() for name, (total, count) in out.metrics.items()}
    assert means == pytest.approx({
        "reward/chosen": -1.8, "reward/rejected": -1.7, "reward/margin": -0.1, "reward/accuracy": 0.5,
        "policy/logp_chosen": -2.3, "policy/logp_rejected": -2.2,
    }, abs=1e-6)  # fmt: skip
    sums = run(s, "sigmoid").metrics
    assert (sums["reward/chosen"][0] / 2).item() == pytest.approx(-4.6)


def test_simpo_without_nll_has_only_the_preference_gradient():
    s = random_scores()
    pure, mixed = run(s, "simpo", cpo_alpha=0.0), run(s, "simpo")
    total = sum(term.weight * term.sum for term in pure.terms.values())
    (grad,) = torch.autograd.grad(total, s.logp_w, retain_graph=True)
    (expected,) = torch.autograd.grad(pure.terms["simpo"].sum, s.logp_w)
    torch.testing.assert_close(grad, expected)
    (nll,) = torch.autograd.grad(mixed.terms["nll"].sum, s.logp_w)
    assert torch.equal(nll, torch.full_like(nll, -1.0))


def naive(name: str, lw: float, ll: float, nw: int, nl: int) -> float:
    beta, gamma, alpha, eps = OPTIONS["beta"], OPTIONS["gamma"], OPTIONS["alpha"], OPTIONS["label_smoothing"]
    smooth = lambda m: (1 - eps) * math.log1p(math.exp(-m)) + eps * math.log1p(math.exp(m))  # noqa: E731
    reshape = lambda x: (1 - math.exp(-alpha * x)) / alpha  # noqa: E731
    return {
        "simpo": lambda: smooth(beta * (lw / nw - ll / nl) - gamma),
        "alphapo": lambda: smooth(beta * (reshape(lw / nw) - reshape(ll / nl)) - gamma),
        "sigmoid": lambda: smooth(beta * (lw - ll)),
        "hinge": lambda: max(0.0, 1 - beta * (lw - ll)),
        "ipo": lambda: (lw / nw - ll / nl - 1 / (2 * beta)) ** 2,
    }[name]()


def test_cpo_agrees_with_a_float64_loop():
    s = random_scores()
    for name in CPO_LOSSES:
        expected = sum(naive(name, *row) for row in zip(*(x.tolist() for x in s), strict=True))
        assert run(s, name).terms[name].sum.item() == pytest.approx(expected, rel=1e-12), name


def test_alpha_reward_by_hand_and_in_the_limit():
    x = torch.tensor([-0.7, -1.3], dtype=torch.float64)
    torch.testing.assert_close(alpha_reward(x, alpha=-0.5), (1 - (0.5 * x).exp()) / -0.5)
    assert torch.equal(alpha_reward(x, alpha=0.0), x)
    torch.testing.assert_close(alpha_reward(x, alpha=1e-5), x, atol=1e-4, rtol=0)
    s = random_scores()
    torch.testing.assert_close(per_pair(s, "alphapo", alpha=0.0), per_pair(s, "simpo"))


@pytest.mark.parametrize("alpha", [0.25, -0.5])
def test_alphapo_logs_the_rewards_that_its_loss_compares(alpha):
    s = FreeScores(torch.tensor([-3.0, -1.6]), torch.tensor([-2.4, -2.0]), torch.tensor([3, 2]), torch.tensor([2, 4]))
    out = run(s, "alphapo", alpha=alpha, label_smoothing=0.0)
    shaped = [[2.0 * (1 - math.exp(-alpha * mean)) / alpha for mean in side] for side in ((-1.0, -0.8), (-1.2, -0.5))]
    means = {name: (total / count).item() for name, (total, count) in out.metrics.items()}
    margins = [chosen - rejected for chosen, rejected in zip(*shaped, strict=True)]
    assert means["reward/chosen"] == pytest.approx(sum(shaped[0]) / 2)
    assert means["reward/rejected"] == pytest.approx(sum(shaped[1]) / 2)
    assert means["reward/margin"] == pytest.approx(sum(margins) / 2) and means["reward/accuracy"] == 0.5
    loss = sum(math.log1p(math.exp(OPTIONS["gamma"] - margin)) for margin in margins)
    assert out.terms["alphapo"].sum.item() == pytest.approx(loss, rel=1e-6)


def test_identical_pairs_cost_softplus_of_gamma():
    s = one_token_pairs(MEAN_W, MEAN_W)
    expected = math.log1p(math.exp(1.0))
    assert per_pair(s, "simpo", label_smoothing=0.0).tolist() == pytest.approx([expected] * 2)
    assert per_pair(s, "sigmoid").tolist() == pytest.approx([math.log(2)] * 2)


# ORPO; alpha is beta in TRL.

ALPHA = 0.1
ORPO_MEAN_W = (-1.0, -0.3, -1e-4)
ORPO_MEAN_L = (-1.5, -0.9, -0.5)
LEN_W = (2, 3, 1)
LEN_L = (1, 2, 4)


def orpo_golden() -> FreeScores:
    len_w, len_l = torch.tensor(LEN_W), torch.tensor(LEN_L)
    return FreeScores(torch.tensor(ORPO_MEAN_W) * len_w, torch.tensor(ORPO_MEAN_L) * len_l, len_w, len_l)


def orpo_scores(num_pairs: int = 9, seed: int = 0) -> FreeScores:
    generator = torch.Generator().manual_seed(seed)
    len_w, len_l = torch.randint(1, 7, (2, num_pairs), generator=generator)
    mean = -2 * torch.rand(2, num_pairs, generator=generator, dtype=torch.float64) - 0.05
    return FreeScores((mean[0] * len_w).requires_grad_(), (mean[1] * len_l).requires_grad_(), len_w, len_l)


def orpo(s: FreeScores) -> LossOut:
    return orpo_loss(s, -s.logp_w.sum(), s.len_w.sum(), alpha=ALPHA)


def one_pair(mean_w: float, mean_l: float, dtype: torch.dtype = torch.float32) -> FreeScores:
    one = torch.ones(1, dtype=torch.long)
    return FreeScores(*(torch.tensor([x], dtype=dtype, requires_grad=True) for x in (mean_w, mean_l)), one, one)


def test_orpo_golden_values():
    s = orpo_golden()
    log_odds = log_odds_ratio(s)
    assert log_odds.tolist() == pytest.approx([0.706193, 1.428390, 8.777538], abs=2e-5)
    weighted = ALPHA * F.logsigmoid(log_odds)
    assert weighted.tolist() == pytest.approx([-0.040114, -0.021486, -1.54e-5], abs=1e-6)
    odds = orpo(s).terms["odds"]
    assert odds.weight == ALPHA and odds.count.item() == 3
    assert (odds.sum / odds.count).item() == pytest.approx(0.205385, abs=1e-6)


def test_orpo_terms_and_metrics():
    out = orpo_loss(orpo_golden(), torch.tensor(12.0), torch.tensor(8), alpha=ALPHA)
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
    s = orpo_scores()
    total = 0.0
    for lw, ll, nw, nl in zip(*(x.tolist() for x in s), strict=True):
        p, q = math.exp(lw / nw), math.exp(ll / nl)
        ratio = (p / (1 - p)) / (q / (1 - q))
        total -= math.log(ratio / (1 + ratio))
    assert orpo(s).terms["odds"].sum.item() == pytest.approx(total, rel=1e-12)


def test_log1mexp_is_accurate_on_both_sides():
    for a in (-1e-5, -1e-3, -0.3, -math.log(2), -0.7, -1.0, -5.0, -40.0):
        value = log1mexp(torch.tensor(a, dtype=torch.float64))
        assert value.item() == pytest.approx(math.log(-math.expm1(a)), rel=1e-12), a
        exact = math.log(-math.expm1(torch.tensor(a).item()))
        assert log1mexp(torch.tensor(a)).item() == pytest.approx(exact, rel=1e-5), a


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log1mexp_and_its_gradient_are_finite_everywhere(dtype):
    for a in (0.0, -1e-9, -6e-8, -1e-7, -1e-6, -1e-4, -0.6931471805599453, -80.0, -1e4):
        x = torch.tensor(a, dtype=dtype, requires_grad=True)
        value = log1mexp(x)
        value.backward()
        assert value.isfinite() and x.grad.isfinite(), a
        if a > CLOSEST_TO_ZERO:
            assert value.item() == pytest.approx(math.log(1e-6), rel=1e-5) and x.grad.item() == 0.0, a
        elif a < CLOSEST_TO_ZERO:
            assert x.grad.item() == pytest.approx(-math.exp(a) / -math.expm1(a), rel=1e-2), a


@pytest.mark.parametrize("mean", [-3.0, -0.5, -1e-3])
def test_identical_pairs_have_log_odds_zero(mean):
    s = one_pair(mean, mean, torch.float64)
    odds = orpo(s).terms["odds"].sum
    grad_w, grad_l = torch.autograd.grad(odds, [s.logp_w, s.logp_l])
    assert odds.item() == pytest.approx(math.log(2))
    assert grad_w.item() == pytest.approx(-0.5 / -math.expm1(mean), rel=1e-9) and grad_l.item() == -grad_w.item()


def test_empty_response_scores_zero():
    logp, length = torch.zeros(1, requires_grad=True), torch.zeros(1, dtype=torch.long)
    empty = FreeScores(logp, torch.zeros(1), length, length)
    assert empty.mean_w.item() == empty.mean_l.item() == 0.0
    odds = orpo_loss(empty, -logp.sum(), length.sum(), alpha=0.1).terms["odds"].sum
    assert odds.item() == pytest.approx(math.log(2)) and torch.autograd.grad(odds, logp)[0].isfinite().all()
