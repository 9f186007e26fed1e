"""Golden values of the DPO family from TRL 1.16.0 (two pairs, beta 0.1), and properties of every variant."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from losses.preference import (
    DIVERGENCE_LOSSES,
    DIVERGENCES,
    MAX_EXPONENT,
    PAIR_LOSSES,
    AotTargets,
    PairScores,
    alpha_divergence,
    aot_targets,
    exo_pair,
    forward_kl,
    js_divergence,
    ld_weights,
    logistic,
    pair_metrics,
    reverse_kl,
    robust,
    same_rank,
    wpo_weight,
)
from losses.types import LossOut, Term, options_of
from trainer.methods import dpo

BETA = 0.1
# Token log-probs: chosen 0, chosen 1, rejected 0, rejected 1.
LOGP = ((-1.0, -0.5, -0.5), (-2.0, -1.0), (-1.5, -1.5), (-0.5, -1.0, -1.0))
REF = ((-1.2, -0.9, -0.9), (-1.8, -1.1), (-1.0, -1.2), (-0.7, -1.0, -1.2))
COLLISION = ((-0.9, -0.4, -0.6), (-1.5, -1.0), (-1.2, -1.1), (-0.6, -0.8, -0.9))  # log sum_v p^2
SMOOTHING = {"exo_pair": 1e-3, "robust": 0.1}
AOT = ("aot", "aot_unpaired")
POINTWISE = tuple(name for name in PAIR_LOSSES if name not in AOT)


def golden_scores(tokens: Tensor, divergence=reverse_kl) -> PairScores:
    """Scores of the two golden pairs from the ten policy token log-probs."""
    chosen_0, chosen_1, rejected_0, rejected_1 = tokens.split([3, 2, 2, 3])
    ref = [tokens.new_tensor(row).sum() for row in REF]
    return PairScores(
        torch.stack([chosen_0.sum(), chosen_1.sum()]),
        torch.stack([rejected_0.sum(), rejected_1.sum()]),
        torch.stack(ref[:2]),
        torch.stack(ref[2:]),
        torch.tensor([3, 2]),
        torch.tensor([2, 3]),
        divergence,
    )


def golden_tokens(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(sum(LOGP, ()), dtype=dtype, requires_grad=True)


def run(s: PairScores, name: str, **options) -> LossOut:
    options = {"beta": BETA, "label_smoothing": SMOOTHING.get(name, 0.0), **options}
    if name in AOT:
        options.setdefault("targets", aot_targets(s))
    return mixture(s, [name], [1.0], **options)


def mixture(s: PairScores, names: list[str], weights: list[float], **options) -> LossOut:
    """The terms of dpo.pair_losses with their counts, and the metrics of the pairs."""
    more = {name: options.pop(name) for name in ("pair_weight", "targets") if name in options}
    cfg = SimpleNamespace(losses=(names, weights), **{"label_smoothing": 0.0, "discopop_tau": 0.05, **options})
    terms = dpo.pair_losses(cfg, s, -s.logp_w.sum(), **more)
    counts = {name: s.len_w.sum() if name == "sft" else torch.tensor(len(s.c)) for name in names}
    metrics = pair_metrics(cfg.beta * s.c, cfg.beta * s.r, s.logp_w, s.logp_l)
    return LossOut({name: Term(w, terms[name], counts[name]) for name, w in zip(names, weights, strict=True)}, metrics)


def mean(out: LossOut) -> Tensor:
    return torch.stack([term.weight * term.sum / term.count for term in out.terms.values()]).sum()


def random_scores(num_pairs: int = 11, seed: int = 0, divergence=reverse_kl, dtype=torch.float64) -> PairScores:
    generator = torch.Generator().manual_seed(seed)
    logps = -20 * torch.rand(4, num_pairs, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, 9, (2, num_pairs), generator=generator)
    policy = [x.to(dtype).requires_grad_() for x in logps[:2]]
    return PairScores(*policy, *logps[2:].to(dtype), *lengths, divergence)


def select(s: PairScores, index: Tensor) -> PairScores:
    return PairScores(*(x[index] for x in s[:6]), s.divergence)


def gradients(s: PairScores, loss: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, [s.logp_w, s.logp_l])


GOLDEN = [
    ("sigmoid", 0.662826, 0.083945, {}),
    ("sigmoid", 0.669326, None, {"label_smoothing": 0.1}),
    ("hinge", 0.935000, 0.173205, {}),
    ("ipo", 22.535694, 6.987656, {}),
    ("exo_pair", 2.651578, 0.295051, {}),
    ("nca_pair", 1.371241, 0.041730, {}),
    ("robust", 0.654701, 0.105566, {}),
    ("bco_pair", 1.354925, 0.085235, {}),
    ("sppo_hard", 44.404999, 16.322683, {}),
    ("aot", 0.661328, 0.083803, {}),
    ("aot", 0.667828, 0.066487, {"label_smoothing": 0.1}),
    ("aot_unpaired", 0.661178, 0.083789, {}),
    ("apo_zero", 0.983765, 0.043252, {}),
    ("apo_down", 0.995049, 0.030486, {}),
    ("discopop", 0.818585, 0.117737, {}),
    ("sigmoid_norm", 0.679754, 0.036303, {}),
]


def test_pair_loss_golden_values():
    for name, value, grad_norm, options in GOLDEN:
        tokens = golden_tokens()
        s = golden_scores(tokens)
        out = run(s, name, **options)
        assert list(out.terms) == [name] and out.terms[name].weight == 1.0 and out.terms[name].count.item() == 2
        loss = mean(out)
        assert loss.item() == pytest.approx(value, abs=2e-6), name
        by_row = torch.cat(torch.autograd.grad(loss, [s.logp_w, s.logp_l], retain_graph=True))  # (4,)
        (by_token,) = torch.autograd.grad(loss, tokens)  # (10,)
        torch.testing.assert_close(by_token, by_row.repeat_interleave(torch.tensor([3, 2, 2, 3])))
        if grad_norm is not None:
            # The golden norms include the 2 padding positions of the padded grid of 4 rows x 3 positions.
            assert by_row.norm().item() * math.sqrt(3) == pytest.approx(grad_norm, abs=2e-6), name


def test_sft_golden_value_is_the_token_mean_of_the_chosen():
    tokens = golden_tokens()
    s = golden_scores(tokens)
    out = mixture(s, ["sft"], [1.0], beta=BETA)
    mean(out).backward()
    assert out.terms["sft"].count.item() == 5 and mean(out).item() == pytest.approx(1.0)
    assert tokens.grad.norm().item() == pytest.approx(0.447214, abs=1e-6)


def test_mixture_golden_value_and_terms():
    s = golden_scores(golden_tokens())
    out = mixture(s, ["sigmoid", "bco_pair", "sft"], [0.8, 0.2, 1.0], beta=BETA)
    assert mean(out).item() == pytest.approx(1.801246, abs=1e-6)
    assert {name: (term.weight, term.count.item()) for name, term in out.terms.items()} == {
        "sigmoid": (0.8, 2), "bco_pair": (0.2, 2), "sft": (1.0, 5)
    }  # fmt: skip


def test_divergence_golden_values():
    for divergence, value in (
        (reverse_kl, 0.662826),
        (forward_kl, 0.659849),
        (js_divergence, 0.677979),
        (alpha_divergence, 0.662601),
        (partial(alpha_divergence, alpha=0.0), 0.659849),
        (partial(alpha_divergence, alpha=1.0), 0.662826),
    ):
        out = run(golden_scores(golden_tokens(), divergence), "sigmoid")
        assert mean(out).item() == pytest.approx(value, abs=1e-6), divergence
        # Logged rewards are plain log-ratios.
        assert (out.metrics["reward/chosen"][0] / 2).item() == pytest.approx(0.045, abs=1e-6)


def test_divergences_by_hand_and_in_the_limit_of_alpha_one():
    x = torch.tensor([-0.7, 0.0, 1.3], dtype=torch.float64)
    torch.testing.assert_close(forward_kl(x), 1 - (-x).exp())
    torch.testing.assert_close(js_divergence(x), (2 * x.exp() / (1 + x.exp())).log())
    torch.testing.assert_close(alpha_divergence(x, alpha=0.3), ((-0.7 * x).exp() - 1) / -0.7)
    torch.testing.assert_close(alpha_divergence(x, alpha=1 + 1e-5), x, atol=1e-4, rtol=0)
    assert all(f(torch.zeros(1)).abs().item() < 1e-7 for f in DIVERGENCES.values())


def test_golden_metrics():
    out = run(golden_scores(golden_tokens()), "sigmoid")
    expected = {
        "reward/chosen": 0.045, "reward/rejected": -0.02, "reward/margin": 0.065, "reward/accuracy": 0.5,
        "policy/logp_chosen": -2.5, "policy/logp_rejected": -2.75,
    }  # fmt: skip
    assert out.metrics.keys() == expected.keys()
    for name, (total, count) in out.metrics.items():
        assert (total / count).item() == pytest.approx(expected[name], abs=1e-6)
        assert count.item() == 2 and not total.requires_grad


def test_accuracy_counts_a_tie_as_wrong():
    x = torch.tensor([-1.0, -2.0])
    lengths = torch.ones(2, dtype=torch.long)
    out = run(PairScores(x, x, x - 1, x - 1, lengths, lengths), "sigmoid")
    assert out.metrics["reward/accuracy"][0].item() == 0.0


def test_wpo_golden_value_without_clamp_and_the_clamp():
    s = golden_scores(golden_tokens())
    adjusted = [sum(a) / len(a) - sum(b) / len(b) for a, b in zip(LOGP, COLLISION, strict=True)]
    w, r = torch.tensor(adjusted[:2], requires_grad=True), torch.tensor(adjusted[2:])
    weight = wpo_weight(w, r, clamp=False)
    assert not weight.requires_grad
    out = run(s, "sigmoid", pair_weight=weight)
    assert mean(out).item() == pytest.approx(0.468652, abs=1e-6) and out.terms["sigmoid"].count.item() == 2
    clamped = wpo_weight(torch.tensor([-0.2, 0.3, 1e4]), torch.tensor([-0.1, 0.1, 0.0]))
    assert clamped.tolist() == pytest.approx([math.exp(-0.3), 1.0, 1.0])
    assert wpo_weight(torch.tensor([1e4]), torch.tensor([0.0]), clamp=False).isfinite().all()


def test_ld_weights_golden_value():
    """Tokens beyond the shorter response count half, for policy and reference."""
    position, shared = torch.tensor([0, 1, 2, 0, 1, 0, 1, 0, 1, 2]), torch.full((10,), 2)
    weight = ld_weights(position, shared, alpha=0.5)
    assert weight.tolist() == [1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5]
    rows = torch.tensor([0, 0, 0, 1, 1, 2, 2, 3, 3, 3])
    policy, ref = (torch.zeros(4).index_add(0, rows, weight * torch.tensor(sum(x, ()))) for x in (LOGP, REF))
    s = PairScores(policy[:2], policy[2:], ref[:2], ref[2:], torch.tensor([3, 2]), torch.tensor([2, 3]))
    assert mean(run(s, "sigmoid")).item() == pytest.approx(0.664845, abs=1e-6)


def test_sigmoid_gradient_of_one_token():
    tokens = golden_tokens(torch.float64)
    s = golden_scores(tokens)
    run(s, "sigmoid").terms["sigmoid"].sum.backward()
    push = BETA * torch.sigmoid(-BETA * s.delta.detach())
    expected = torch.cat([-push[0].expand(3), -push[1].expand(2), push[0].expand(2), push[1].expand(3)])
    torch.testing.assert_close(tokens.grad, expected)


def naive(name: str, c: float, r: float, nw: int, nl: int) -> float:
    """Each formula in plain float64 Python."""
    ls = lambda x: -math.log1p(math.exp(-x))  # noqa: E731
    sig = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    u, eps, tau = BETA * (c - r), SMOOTHING.get(name, 0.0), 0.05
    bc, br, gap = BETA * c, BETA * r, c / nw - r / nl
    return {
        "sigmoid": lambda: -ls(u),
        "sigmoid_norm": lambda: -ls(BETA * gap),
        "hinge": lambda: max(0.0, 1 - u),
        "ipo": lambda: (gap - 1 / (2 * BETA)) ** 2,
        "exo_pair": lambda: (
            sig(u) * (math.log(sig(u)) - math.log(1 - eps)) + sig(-u) * (math.log(sig(-u)) - math.log(eps))
        ),
        "nca_pair": lambda: -ls(bc) - 0.5 * ls(-bc) - 0.5 * ls(-br),
        "robust": lambda: (-(1 - eps) * ls(u) + eps * ls(-u)) / (1 - 2 * eps),
        "bco_pair": lambda: -ls(bc) - ls(-br),
        "sppo_hard": lambda: (c - 1 / (2 * BETA)) ** 2 + (r + 1 / (2 * BETA)) ** 2,
        "apo_zero": lambda: 1 - sig(bc) + sig(br),
        "apo_down": lambda: sig(bc) + 1 - sig(BETA * (c - r)),
        "discopop": lambda: (1 - sig(u / tau)) * -ls(u) + sig(u / tau) * math.exp(-u),
    }[name]()


def test_pair_loss_agrees_with_a_float64_loop():
    s = random_scores()
    rows = list(zip(s.c.tolist(), s.r.tolist(), s.len_w.tolist(), s.len_l.tolist(), strict=True))
    for name in POINTWISE:
        expected = sum(naive(name, *row) for row in rows)
        assert run(s, name).terms[name].sum.item() == pytest.approx(expected, rel=1e-12), name


def direct_aot(name: str, s: PairScores, eps: float) -> Tensor:
    """The formula as published: sort, subtract, sum over the batch."""
    if name == "aot":
        margin = (s.logp_w - s.logp_l).sort().values - (s.ref_w - s.ref_l).sort().values
    else:
        margin = s.c.sort().values - s.r.sort().values
    return logistic(BETA * margin, eps).sum()


@pytest.mark.parametrize("name", AOT)
@pytest.mark.parametrize(("eps", "sizes"), [(0.0, (11,)), (0.1, (1,) * 11), (0.1, (9, 0, 2))])
def test_aot_micro_batches_add_up_to_the_sorted_step(name, eps, sizes):
    s = random_scores(seed=1)
    expected = direct_aot(name, s, eps)
    targets = aot_targets(s)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(2))
    parts = [
        run(select(s, index), name, label_smoothing=eps, targets=targets.select(index)).terms[name]
        for index in order.split(sizes)
    ]
    total = torch.stack([part.sum for part in parts]).sum()
    assert total.item() == pytest.approx(expected.item(), rel=1e-12)
    assert sum(part.count.item() for part in parts) == 11
    torch.testing.assert_close(gradients(s, total), gradients(s, expected), atol=1e-12, rtol=1e-12)


def test_aot_of_one_pair_is_sigmoid_and_ties_are_harmless():
    s = random_scores(num_pairs=1)
    for name in AOT:
        assert run(s, name).terms[name].sum.item() == pytest.approx(run(s, "sigmoid").terms["sigmoid"].sum.item())
    x = torch.full((4,), -3.0, dtype=torch.float64, requires_grad=True)
    tied = PairScores(x, x, x.detach(), x.detach(), torch.ones(4), torch.ones(4))
    for name in AOT:
        assert run(tied, name).terms[name].sum.item() == pytest.approx(4 * math.log(2))


def test_same_rank_and_targets_carry_no_gradient():
    x, y = torch.tensor([3.0, -1.0, 2.0]), torch.tensor([10.0, 30.0, 20.0])
    assert same_rank(x, y).tolist() == [30.0, 10.0, 20.0]
    targets = aot_targets(random_scores())
    assert isinstance(targets, AotTargets) and not any(value.requires_grad for value in targets)


def extreme_scores(c: float, r: float, divergence=reverse_kl) -> PairScores:
    logp_w, logp_l = (torch.tensor([x], requires_grad=True) for x in (c, r))  # float32, one token
    zero, one = torch.zeros(1), torch.ones(1, dtype=torch.long)
    return PairScores(logp_w, logp_l, zero, zero, one, one, divergence)


@pytest.mark.parametrize(("c", "r"), [(1e4, 0.0), (-1e4, 0.0), (0.0, 1e4), (0.0, -1e4), (1e4, 1e4), (-1e4, 1e4)])
def test_pair_loss_and_gradient_are_finite_at_extremes(c, r):
    for name in PAIR_LOSSES:
        s = extreme_scores(c, r)
        loss = run(s, name, beta=10.0).terms[name].sum
        assert loss.isfinite() and all(grad.isfinite().all() for grad in gradients(s, loss)), name


EXTREMES = torch.linspace(-100, 100, 201, dtype=torch.float64)
TRANSFORMS = {  # name -> (transform, formula, the exponent that is capped)
    "forward_kl": (forward_kl, lambda x: 1 - (-x).exp(), lambda x: -x),
    "js": (js_divergence, lambda x: math.log(2) - torch.log1p((-x).exp()), None),
    "alpha 0.5": (alpha_divergence, lambda x: 2 * (1 - (-x / 2).exp()), lambda x: -x / 2),
    "alpha 2": (partial(alpha_divergence, alpha=2.0), lambda x: x.exp() - 1, lambda x: x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_divergences_match_the_formula_up_to_forty_nats_and_then_its_tangent(name):
    transform, formula, exponent = TRANSFORMS[name]
    exact = EXTREMES.clone().requires_grad_()
    want = formula(exact)
    (slope,) = torch.autograd.grad(want.sum(), exact)
    want, capped = want.detach(), torch.zeros(len(EXTREMES), dtype=torch.bool)
    if exponent is not None:
        capped = exponent(EXTREMES) > MAX_EXPONENT
        edge = EXTREMES[(exponent(EXTREMES) - MAX_EXPONENT).abs().argmin()].clone().requires_grad_()
        at_edge = formula(edge)
        slope = torch.where(capped, torch.autograd.grad(at_edge, edge)[0], slope)
        want = torch.where(capped, at_edge.detach() + slope * (EXTREMES - edge.detach()), want)
    x = EXTREMES.float().requires_grad_()
    got = transform(x)
    torch.testing.assert_close(got.double().detach(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), x)[0].double(), slope, rtol=1e-5, atol=1e-7)
    assert capped.any() == (exponent is not None)


@pytest.mark.parametrize("name", ["sigmoid", "sigmoid_norm", "hinge"])
@pytest.mark.parametrize("c", [-90.0, -120.0, -1e3])
def test_a_pair_with_both_log_ratios_beyond_the_cap_keeps_its_order(c, name):
    """As in the formula, loss and gradient are 0 if c > r, and the loss is huge if c < r."""
    for divergence in (forward_kl, alpha_divergence):
        right, wrong = extreme_scores(c, c - 15, divergence), extreme_scores(c - 15, c, divergence)
        loss = run(right, name).terms[name].sum
        assert loss.item() == 0.0 and all(grad.item() == 0.0 for grad in gradients(right, loss))
        loss = run(wrong, name).terms[name].sum
        grad_w, grad_l = gradients(wrong, loss)
        assert loss.item() > 1e16 and grad_w.item() == -grad_l.item() < -1e15


@pytest.mark.parametrize("c", [-39.0, -45.0, -1e3])
def test_ipo_of_the_forward_kl_has_a_finite_gradient_in_float32(c):
    """The exact gradient at c = -45 is 2.4e39 and overflows float32; the gradient at -40 nats replaces it."""
    s = extreme_scores(c, 0.0, forward_kl)
    loss = run(s, "ipo").terms["ipo"].sum
    grad_w, grad_l = (x.item() for x in gradients(s, loss))
    x = max(c, -MAX_EXPONENT)
    delta = 1 - math.exp(-x) - 1 / (2 * BETA)
    assert loss.item() == pytest.approx(delta**2, rel=1e-5)
    assert grad_w == pytest.approx(2 * delta * math.exp(-x), rel=1e-5) and grad_w < 0
    assert grad_l == pytest.approx(-2 * delta, rel=1e-5)


def test_many_worst_case_pairs_have_a_finite_sum():
    n = 1024
    logp = torch.full((n,), -1e4, requires_grad=True)
    zeros, ones = torch.zeros(n), torch.ones(n, dtype=torch.long)
    term = run(PairScores(logp, zeros, zeros, zeros, ones, ones, forward_kl), "ipo").terms["ipo"]
    assert term.sum.isfinite() and torch.autograd.grad(term.sum, logp)[0].isfinite().all()


def test_extreme_wrong_order_still_has_the_full_gradient():
    s = extreme_scores(-1e4, 1e4)
    for name in ("sigmoid", "hinge", "robust"):
        grad_w, grad_l = gradients(s, run(s, name, label_smoothing=0.0).terms[name].sum)
        assert grad_w.item() == pytest.approx(-BETA) and grad_l.item() == pytest.approx(BETA)


@pytest.mark.parametrize("tau", [0.05, 1.0, 2.0])
def test_discopop_far_from_zero(tau):
    """The limit of exp(-u) sigmoid(u / tau) for u -> -inf is 0 below tau 1, 1 at tau 1, clamped above."""
    value = run(extreme_scores(-1e4, 0.0), "discopop", beta=1.0, discopop_tau=tau).terms["discopop"].sum.item()
    assert math.isfinite(value)
    if tau <= 1:
        assert value == pytest.approx(1e4 + (tau == 1.0), rel=1e-7)


def test_identical_pairs_give_opposite_gradients_in_losses_of_the_difference():
    s = random_scores(num_pairs=3)
    same = PairScores(s.logp_w, s.logp_w, s.ref_w, s.ref_w, s.len_w, s.len_w)
    for name in PAIR_LOSSES:
        loss = run(same, name).terms[name].sum
        (grad,) = torch.autograd.grad(loss, s.logp_w, retain_graph=True)
        assert grad.isfinite().all(), name
        if name in DIVERGENCE_LOSSES | {"aot"}:
            assert grad.abs().max() < 1e-12, name
        if name in ("sigmoid", "sigmoid_norm", "aot"):
            assert loss.item() == pytest.approx(3 * math.log(2)), name


def test_empty_response_does_not_divide_by_zero():
    empty = torch.zeros(2, dtype=torch.long)
    for name in PAIR_LOSSES:
        zero = torch.zeros(2, requires_grad=True)
        loss = run(PairScores(zero, zero * 1.0, torch.zeros(2), torch.zeros(2), empty, empty), name).terms[name].sum
        (grad,) = torch.autograd.grad(loss, zero)
        assert loss.isfinite() and grad.isfinite().all(), name


def test_smoothing_zero_is_the_plain_loss_and_half_has_no_preference():
    s = random_scores()
    plain = run(s, "sigmoid").terms["sigmoid"].sum.item()
    assert run(s, "robust", label_smoothing=0.0).terms["robust"].sum.item() == pytest.approx(plain)
    half = run(s, "sigmoid", label_smoothing=0.5).terms["sigmoid"].sum
    flipped = PairScores(s.logp_l, s.logp_w, s.ref_l, s.ref_w, s.len_l, s.len_w)
    assert run(flipped, "sigmoid", label_smoothing=0.5).terms["sigmoid"].sum.item() == pytest.approx(half.item())


def test_robust_is_unbiased_under_flipped_labels():
    s, eps = random_scores(), 0.2
    flipped = PairScores(s.logp_l, s.logp_w, s.ref_l, s.ref_w, s.len_l, s.len_w)
    losses = [robust(x, beta=BETA, label_smoothing=eps) for x in (s, flipped)]
    torch.testing.assert_close((1 - eps) * losses[0] + eps * losses[1], logistic(BETA * s.delta))


def test_invalid_smoothing_is_rejected():
    for function, value in ((exo_pair, 0.0), (robust, 0.5)):
        with pytest.raises(ValueError, match=f"^label_smoothing={value}: {function.__name__}"):
            function(random_scores(), beta=BETA, label_smoothing=value)


def test_options_of_lists_the_options_of_a_loss():
    assert options_of(PAIR_LOSSES["hinge"]).keys() == {"beta"}
    assert {name for name in PAIR_LOSSES if "label_smoothing" in options_of(PAIR_LOSSES[name])} == {
        "sigmoid", "exo_pair", "robust", "aot", "aot_unpaired"
    }  # fmt: skip
    assert {name for name in PAIR_LOSSES if "targets" in options_of(PAIR_LOSSES[name])} == set(AOT)
    assert {name for name in PAIR_LOSSES if "discopop_tau" in options_of(PAIR_LOSSES[name])} == {"discopop"}


def test_shapes_that_would_broadcast_are_rejected():
    s = random_scores()
    with pytest.raises(AssertionError):
        run(s._replace(ref_w=s.ref_w.unsqueeze(1)), "sigmoid")
