"""Golden values of SimPO, AlphaPO and CPO, checked against TRL 1.16.0 (two pairs)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from losses.preference import options_of
from losses.reference_free import CPO_LOSSES, FreeScores, alpha_reward, cpo_loss
from losses.types import LossOut

MEAN_W = (-1.0, -0.8)
MEAN_L = (-1.2, -0.5)
OPTIONS = {"beta": 2.0, "gamma": 1.0, "alpha": 0.25, "label_smoothing": 0.1}


def per_pair(s: FreeScores, name: str, **options: float) -> Tensor:
    options = {**OPTIONS, **options}
    return CPO_LOSSES[name](s, **{key: options[key] for key in options_of(CPO_LOSSES[name])})


def one_token_pairs(mean_w: tuple[float, ...], mean_l: tuple[float, ...]) -> FreeScores:
    """One token each, so that sum and mean are equal for every variant."""
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
    """Longer responses of the same mean change only sigmoid and hinge."""
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
    bent = lambda x: (1 - math.exp(-alpha * x)) / alpha  # noqa: E731
    return {
        "simpo": lambda: smooth(beta * (lw / nw - ll / nl) - gamma),
        "alphapo": lambda: smooth(beta * (bent(lw / nw) - bent(ll / nl)) - gamma),
        "sigmoid": lambda: smooth(beta * (lw - ll)),
        "hinge": lambda: max(0.0, 1 - beta * (lw - ll)),
        "ipo": lambda: (lw / nw - ll / nl - 1 / (2 * beta)) ** 2,
    }[name]()


@pytest.mark.parametrize("name", CPO_LOSSES)
def test_cpo_agrees_with_a_float64_loop(name):
    s = random_scores()
    expected = sum(naive(name, *row) for row in zip(*(x.tolist() for x in s), strict=True))
    assert run(s, name).terms[name].sum.item() == pytest.approx(expected, rel=1e-12)
    low = FreeScores(s.logp_w.detach().float(), s.logp_l.detach().float(), s.len_w, s.len_l)
    assert run(low, name).terms[name].sum.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", CPO_LOSSES)
def test_cpo_gradcheck(name):
    s = random_scores(num_pairs=5, seed=1)

    def total(w: Tensor, r: Tensor) -> Tensor:
        out = run(FreeScores(w, r, s.len_w, s.len_l), name, cpo_alpha=0.3)
        return sum(term.weight * term.sum for term in out.terms.values())

    assert torch.autograd.gradcheck(total, (s.logp_w, s.logp_l))


def test_alpha_reward_by_hand_and_in_the_limit():
    x = torch.tensor([-0.7, -1.3], dtype=torch.float64)
    torch.testing.assert_close(alpha_reward(x, alpha=-0.5), (1 - (0.5 * x).exp()) / -0.5)
    assert torch.equal(alpha_reward(x, alpha=0.0), x)
    torch.testing.assert_close(alpha_reward(x, alpha=1e-5), x, atol=1e-4, rtol=0)
    s = random_scores()
    torch.testing.assert_close(per_pair(s, "alphapo", alpha=0.0), per_pair(s, "simpo"))


@pytest.mark.parametrize("name", CPO_LOSSES)
@pytest.mark.parametrize("sizes", [(9,), (1,) * 9, (4, 5), (6, 0, 3)])
def test_cpo_micro_batches_sum_to_the_whole(name, sizes):
    s = random_scores()
    whole = run(s, name)
    parts = [run(FreeScores(*(x[index] for x in s)), name) for index in torch.arange(9).split(sizes)]
    for term_name, term in whole.terms.items():
        total = torch.stack([part.terms[term_name].sum for part in parts]).sum()
        assert total.item() == pytest.approx(term.sum.item(), rel=1e-13)
        assert sum(part.terms[term_name].count.item() for part in parts) == term.count.item()
        ours, theirs = (torch.autograd.grad(x, s.logp_w, retain_graph=True)[0] for x in (total, term.sum))
        torch.testing.assert_close(ours, theirs, atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("alpha", [0.25, -0.5])
def test_rewards_of_alphapo_are_those_its_loss_compares(alpha):
    """beta (1 - exp(-alpha mean)) / alpha. The margin of the unshaped reward would differ, here only in size."""
    s = FreeScores(torch.tensor([-3.0, -1.6]), torch.tensor([-2.4, -2.0]), torch.tensor([3, 2]), torch.tensor([2, 4]))
    out = run(s, "alphapo", alpha=alpha, label_smoothing=0.0)
    shaped = [[2.0 * (1 - math.exp(-alpha * mean)) / alpha for mean in side] for side in ((-1.0, -0.8), (-1.2, -0.5))]
    means = {name: (total / count).item() for name, (total, count) in out.metrics.items()}
    margins = [chosen - rejected for chosen, rejected in zip(*shaped, strict=True)]
    assert means["reward/chosen"] == pytest.approx(sum(shaped[0]) / 2)
    assert means["reward/rejected"] == pytest.approx(sum(shaped[1]) / 2)
    assert means["reward/margin"] == pytest.approx(sum(margins) / 2) and means["reward/accuracy"] == 0.5
    loss = sum(math.log1p(math.exp(OPTIONS["gamma"] - margin)) for margin in margins)
    assert out.terms["alphapo"].sum.item() == pytest.approx(loss, rel=1e-6)  # of the same margins that are logged


@pytest.mark.parametrize("name", CPO_LOSSES)
@pytest.mark.parametrize(("logp_w", "logp_l"), [(0.0, -1e4), (-1e4, 0.0), (-1e4, -1e4), (0.0, 0.0)])
def test_cpo_is_finite_at_extremes(name, logp_w, logp_l):
    s = one_token_pairs((logp_w,), (logp_l,))
    loss = run(s, name).terms[name].sum
    assert loss.isfinite() and all(g.isfinite().all() for g in torch.autograd.grad(loss, [s.logp_w, s.logp_l]))


def test_identical_pairs_cost_softplus_of_gamma():
    s = one_token_pairs(MEAN_W, MEAN_W)
    expected = math.log1p(math.exp(1.0))
    assert per_pair(s, "simpo", label_smoothing=0.0).tolist() == pytest.approx([expected] * 2)
    assert per_pair(s, "sigmoid").tolist() == pytest.approx([math.log(2)] * 2)


@pytest.mark.parametrize("name", CPO_LOSSES)
def test_no_pairs_and_no_tokens(name):
    s = random_scores(num_pairs=0)
    out = run(s, name)
    total = out.terms[name].sum + out.terms["nll"].sum
    assert total.item() == 0.0 and torch.autograd.grad(total, s.logp_w)[0].shape == (0,)
    assert out.terms[name].count.item() == 0 and out.terms["nll"].count.item() == 0
    empty = FreeScores(torch.zeros(1, requires_grad=True), torch.zeros(1), *torch.zeros(2, 1, dtype=torch.long))
    loss = run(empty, name).terms[name].sum
    assert loss.isfinite() and torch.autograd.grad(loss, empty.logp_w)[0].isfinite().all()


@pytest.mark.parametrize("name", CPO_LOSSES)
def test_bfloat16_inputs_are_computed_in_float32(name):
    s = random_scores()
    low = FreeScores(s.logp_w.detach().bfloat16(), s.logp_l.detach().bfloat16(), s.len_w, s.len_l)
    exact = FreeScores(low.logp_w.float(), low.logp_l.float(), s.len_w, s.len_l)
    loss = run(low, name).terms[name].sum
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(run(exact, name).terms[name].sum.item())
