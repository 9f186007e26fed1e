"""Golden values of the token-level surrogate with one global normaliser, checked against TRL 1.16.0 (its dapo loss)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from losses.types import LossOut
from tests.losses.surrogate import clipped_surrogate

# Two completions, of three tokens and of one; the padding of the second holds what must never count.
LOGP = ((-1.0, -0.5, -2.0), (-0.7, 9.0, 9.0))
OLD = ((-1.2, -0.5, -1.5), (-1.2, 9.0, 9.0))
ADVANTAGE = ((1.0, 1.0, 1.0), (-1.0, -1.0, -1.0))
MASK = ((True, True, True), (True, False, False))


def flat(rows: tuple) -> Tensor:
    return torch.tensor(rows).flatten()


def surrogate(logp: Tensor, old: Tensor, advantage: Tensor, mask: Tensor, low=0.2, high=0.2) -> LossOut:
    return clipped_surrogate(logp, old, advantage, mask, epsilon_low=low, epsilon_high=high)


def mean(out: LossOut) -> Tensor:
    term = out.terms["policy"]
    return term.weight * term.sum / term.count


def golden_logp() -> Tensor:
    return flat(LOGP).requires_grad_()


def random_case(n: int = 41, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(n, generator=generator, dtype=torch.float64)
    logp = old + 0.4 * torch.randn(n, generator=generator, dtype=torch.float64)
    advantage = torch.randn(n, generator=generator, dtype=torch.float64)
    return logp, old, advantage, torch.rand(n, generator=generator) < 0.7


def naive(logp: Tensor, old: Tensor, advantage: Tensor, mask: Tensor, low: float, high: float) -> tuple[float, float]:
    """Sum of the loss and number of clipped tokens, one token at a time."""
    total, clipped = 0.0, 0
    for lp, lo, a, m in zip(logp.tolist(), old.tolist(), advantage.tolist(), mask.tolist(), strict=True):
        if m:
            ratio = math.exp(lp - lo)
            bounded = min(max(ratio, 1 - low), 1 + high)
            total -= min(ratio * a, bounded * a)
            clipped += (a > 0 and ratio > 1 + high) or (a < 0 and ratio < 1 - low)
    return total, clipped


@pytest.mark.parametrize(
    ("high", "loss", "gradient"),
    [
        (0.2, -0.289452, [0, -0.25, -0.151633, 0.412180, 0, 0]),
        (0.28, -0.294803, [-0.305351, -0.25, -0.151633, 0.412180, 0, 0]),
    ],
)
def test_surrogate_golden_values(high, loss, gradient):
    logp = golden_logp()
    value = mean(surrogate(logp, flat(OLD), flat(ADVANTAGE), flat(MASK), high=high))
    value.backward()
    assert value.item() == pytest.approx(loss, abs=1e-6)
    torch.testing.assert_close(logp.grad, torch.tensor(gradient), atol=1e-6, rtol=0)


def test_surrogate_golden_value_on_policy():
    logp = golden_logp()
    value = mean(surrogate(logp, logp.detach(), flat(ADVANTAGE), flat(MASK)))
    value.backward()
    assert value.item() == pytest.approx(-0.5, abs=1e-6)
    torch.testing.assert_close(logp.grad, torch.tensor([-0.25, -0.25, -0.25, 0.25, 0, 0]))


def test_surrogate_metrics_of_the_golden_case():
    out = surrogate(golden_logp(), flat(OLD), flat(ADVANTAGE), flat(MASK))
    # Ratios 1.2214 (A > 0: clipped), 1, 0.6065 (A > 0: not clipped), 1.6487 (A < 0: not clipped).
    total, count = out.metrics["policy/clip_frac"]
    assert (total.item(), count.item()) == (1.0, 4)
    total, count = out.metrics["policy/ratio"]
    assert total.item() == pytest.approx(1.221403 + 1 + 0.606531 + 1.648721, abs=1e-5) and count.item() == 4
    assert not any(total.requires_grad for total, _ in out.metrics.values())


def test_surrogate_on_policy_gradient_is_reinforce():
    """At ratio 1 both arguments of the minimum tie; the gradient must still be all of -A, not half."""
    logp, _, advantage, mask = random_case()
    logp.requires_grad_()
    surrogate(logp, logp.detach(), advantage, mask).terms["policy"].sum.backward()
    torch.testing.assert_close(logp.grad, -(advantage * mask), atol=1e-15, rtol=1e-15)


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28), (0.1, 3.0), (1.0, 0.05)])
def test_surrogate_agrees_with_a_float64_loop(low, high):
    logp, old, advantage, mask = random_case()
    total, clipped = naive(logp, old, advantage, mask, low, high)
    out = surrogate(logp, old, advantage, mask, low, high)
    assert out.terms["policy"].sum.item() == pytest.approx(total, rel=1e-13)
    assert out.terms["policy"].sum.dtype == torch.float64
    assert out.terms["policy"].count.item() == mask.sum().item()
    assert out.metrics["policy/clip_frac"][0].item() == clipped
    in_fp32 = surrogate(logp.float(), old.float(), advantage.float(), mask, low, high)
    assert in_fp32.terms["policy"].sum.item() == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "gradient"),
    [
        (0.5, 2.0, 0.0),  # already more likely than the edge, and good: no more of it
        (0.5, -2.0, 2.0 * math.exp(0.5)),  # more likely, and bad: pushed back
        (-0.5, 2.0, -2.0 * math.exp(-0.5)),  # less likely, and good: pushed back
        (-0.5, -2.0, 0.0),  # already less likely than the edge, and bad: no more of it
    ],
)
def test_surrogate_clips_only_in_the_direction_the_advantage_pushes(log_ratio, advantage, gradient):
    logp = torch.tensor([-1.0 + log_ratio], dtype=torch.float64, requires_grad=True)
    old, a = torch.tensor([-1.0], dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    surrogate(logp, old, a, torch.tensor([True])).terms["policy"].sum.backward()
    assert logp.grad.item() == pytest.approx(gradient, abs=1e-14)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_surrogate_ignores_whatever_sits_in_masked_positions(poison):
    mask = flat(MASK)
    logp = torch.where(mask, flat(LOGP), poison).requires_grad_()
    old, advantage = (torch.where(mask, flat(rows), poison) for rows in (OLD, ADVANTAGE))
    out = surrogate(logp, old, advantage, mask)
    mean(out).backward()
    assert mean(out).item() == pytest.approx(-0.289452, abs=1e-6)
    torch.testing.assert_close(logp.grad, torch.tensor([0, -0.25, -0.151633, 0.412180, 0, 0]), atol=1e-6, rtol=0)
    assert out.metrics["policy/ratio"][0].item() == pytest.approx(4.476655, abs=1e-5)
    assert out.metrics["policy/clip_frac"][0].item() == 1.0


@pytest.mark.parametrize("sizes", [(41,), (1, 40), (13, 14, 14), (20, 0, 21)])
def test_surrogate_micro_batches_sum_to_the_whole(sizes):
    case = random_case()
    whole = surrogate(*case)
    parts = [surrogate(*pieces) for pieces in zip(*(x.split(sizes) for x in case), strict=True)]
    assert sum(p.terms["policy"].sum.item() for p in parts) == pytest.approx(
        whole.terms["policy"].sum.item(), rel=1e-13
    )
    assert sum(p.terms["policy"].count.item() for p in parts) == whole.terms["policy"].count.item()
    for name, (total, count) in whole.metrics.items():
        assert sum(p.metrics[name][0].item() for p in parts) == pytest.approx(total.item(), rel=1e-13)
        assert sum(p.metrics[name][1].item() for p in parts) == count.item()


def test_surrogate_with_zero_advantage_is_zero_and_has_no_gradient():
    logp, old, advantage, mask = random_case()
    logp.requires_grad_()
    out = surrogate(logp, old, torch.zeros_like(advantage), mask)
    out.terms["policy"].sum.backward()
    assert out.terms["policy"].sum.item() == 0.0
    assert torch.equal(logp.grad, torch.zeros_like(logp))
    assert out.metrics["policy/clip_frac"][0].item() == 0.0  # nothing is pushed, so nothing is clipped


@pytest.mark.parametrize("n", [0, 3])
def test_surrogate_with_nothing_trained_is_a_differentiable_zero(n):
    logp = torch.randn(n, requires_grad=True)
    out = surrogate(logp, torch.zeros(n), torch.ones(n), torch.zeros(n, dtype=torch.bool))
    assert out.terms["policy"].sum.item() == 0.0 and out.terms["policy"].count.item() == 0
    out.terms["policy"].sum.backward()
    assert logp.grad.tolist() == [0.0] * n


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("log_ratio", [-1e4, -200.0, -25.0, 25.0, 200.0, 1e4])
@pytest.mark.parametrize("advantage", [-3.0, 3.0])
def test_surrogate_of_extreme_ratios_stays_finite(dtype, log_ratio, advantage):
    logp = torch.tensor([log_ratio, -1.0], dtype=dtype, requires_grad=True)
    out = surrogate(logp, torch.tensor([0.0, -1.0]), torch.full((2,), advantage), torch.tensor([True, True]))
    out.terms["policy"].sum.backward()
    assert out.terms["policy"].sum.isfinite() and out.terms["policy"].sum.dtype == torch.float32
    assert logp.grad.isfinite().all() and logp.grad[1].item() == -advantage
    assert all(total.isfinite() for total, _ in out.metrics.values())


def test_surrogate_gradcheck():
    # Ratios on both sides of both edges and inside, none at a kink.
    log_ratio = torch.tensor([-0.6, -0.1, 0.05, 0.1, 0.6, 0.6, -0.6, -0.1], dtype=torch.float64)
    advantage = torch.tensor([1.0, -0.5, 2.0, -1.0, 1.5, -1.5, -0.7, 0.3], dtype=torch.float64)
    old = torch.linspace(-3, -1, 8, dtype=torch.float64)
    mask = torch.tensor([True] * 7 + [False])
    logp = (old + log_ratio).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: surrogate(x, old, advantage, mask).terms["policy"].sum, logp)


@pytest.mark.parametrize("name", ["delta", "dual_clip"])
def test_bound_of_bad_tokens_golden_values(name):
    logp = golden_logp()
    out = clipped_surrogate(
        logp, flat(OLD), flat(ADVANTAGE), flat(MASK), epsilon_low=0.2, epsilon_high=0.2, **{name: 1.5}
    )
    mean(out).backward()
    assert mean(out).item() == pytest.approx(-0.326633, abs=1e-6)
    torch.testing.assert_close(logp.grad, torch.tensor([0, -0.25, -0.151633, 0, 0, 0]), atol=1e-6, rtol=0)
    assert out.metrics["policy/clip_frac"][0].item() == 2.0  # one beyond the range, one beyond the bound
    assert out.metrics["policy/ratio"][0].item() == pytest.approx(4.476655, abs=1e-5)


@pytest.mark.parametrize("name", ["delta", "dual_clip"])
@pytest.mark.parametrize("bound", [1.3, 2.0, 4.0])
def test_bound_changes_only_bad_tokens_beyond_it(name, bound):
    logp, old, advantage, mask = random_case(seed=5)
    logp = old + 5 * (logp - old)
    plain, bounded = logp.clone().requires_grad_(), logp.clone().requires_grad_()
    surrogate(plain, old, advantage, mask).terms["policy"].sum.backward()
    clipped_surrogate(
        bounded, old, advantage, mask, epsilon_low=0.2, epsilon_high=0.2, **{name: bound}
    ).terms["policy"].sum.backward()  # fmt: skip
    beyond = mask & (advantage < 0) & ((logp - old).exp() > bound)
    assert beyond.any()
    torch.testing.assert_close(bounded.grad, torch.where(beyond, 0.0, plain.grad))


def test_delta_and_dual_clip_are_one_function_above_the_range():
    case = random_case(seed=6)
    a, b = (
        clipped_surrogate(*case, epsilon_low=0.2, epsilon_high=0.28, **{name: 1.4}) for name in ("delta", "dual_clip")
    )
    assert a.terms["policy"].sum.item() == pytest.approx(b.terms["policy"].sum.item(), rel=1e-14)
    assert a.metrics["policy/clip_frac"][0].item() == b.metrics["policy/clip_frac"][0].item()


def test_bounds_that_would_cut_inside_the_range_are_refused():
    with pytest.raises(ValueError, match="delta=1.1: must be above"):
        clipped_surrogate(*random_case(), epsilon_low=0.2, epsilon_high=0.2, delta=1.1)
    with pytest.raises(ValueError, match="dual_clip=1.0: must be above 1"):
        clipped_surrogate(*random_case(), epsilon_low=0.2, epsilon_high=0.2, dual_clip=1.0)


@pytest.mark.parametrize("name", ["delta", "dual_clip"])
def test_clip_frac_counts_exactly_the_tokens_without_gradient(name):
    logp, old, advantage, mask = random_case(seed=7)
    logp = (old + 3 * (logp - old)).requires_grad_()
    out = clipped_surrogate(logp, old, advantage, mask, epsilon_low=0.2, epsilon_high=0.2, **{name: 1.7})
    out.terms["policy"].sum.backward()
    assert out.metrics["policy/clip_frac"][0].item() == (mask & (logp.grad == 0)).sum().item()
