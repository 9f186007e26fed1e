"""Estimators of the KL divergence: values and gradients. tests/losses/test_policy.py has golden values of the term."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from losses.kl import KL_ESTIMATORS, MAX_LOG_RATIO, k1, k2, k3, reward_minus_kl, token_kl


def random_case(n: int = 41, seed: int = 0) -> Tensor:  # (3, n)
    generator = torch.Generator().manual_seed(seed)
    return -3 * torch.rand(3, n, generator=generator, dtype=torch.float64)


def test_estimators_of_one_token():
    logp, ref = torch.tensor([-1.0], dtype=torch.float64), torch.tensor([-1.5], dtype=torch.float64)
    assert k1(logp, ref).item() == pytest.approx(0.5)
    assert k2(logp, ref).item() == pytest.approx(0.125)
    assert k3(logp, ref).item() == pytest.approx(math.exp(-0.5) + 0.5 - 1)


def test_estimators_of_a_model_that_is_its_own_reference_are_zero():
    logp = random_case()[0]
    for estimate in (k1, k2, k3):
        assert torch.equal(estimate(logp, logp), torch.zeros_like(logp))


def test_k1_and_k3_have_the_true_divergence_as_expectation():
    generator = torch.Generator().manual_seed(1)
    logp, ref = torch.randn(2, 9, generator=generator, dtype=torch.float64).log_softmax(dim=1)
    exact = (logp.exp() * (logp - ref)).sum()
    for estimate in (k1, k3):
        torch.testing.assert_close((logp.exp() * estimate(logp, ref)).sum(), exact)
    assert (k3(logp, ref) >= 0).all() and (k1(logp, ref) < 0).any()


@pytest.mark.parametrize("weighted", [True, False])
def test_k3_gradient_is_the_closed_form(weighted):
    logp, old, ref = random_case()
    logp.requires_grad_()
    token_kl(logp, old, ref, ratio_weighted=weighted).sum().backward()
    with torch.no_grad():
        expected = (logp - old).exp() * (logp - ref) if weighted else 1 - (ref - logp).exp()
    torch.testing.assert_close(logp.grad, expected, atol=1e-12, rtol=1e-12)


def test_k3_is_bounded_above_and_exact_below():
    logp, ref = torch.zeros(2, dtype=torch.float64, requires_grad=True), torch.tensor([1e3, -1e3], dtype=torch.float64)
    far = k3(logp, ref)
    assert far.tolist() == pytest.approx([math.exp(MAX_LOG_RATIO) - MAX_LOG_RATIO - 1, 999.0])
    far.sum().backward()
    assert logp.grad.tolist() == pytest.approx([1 - math.exp(MAX_LOG_RATIO), 1.0])
    near = k3(torch.zeros(5), torch.tensor([1e-2, -1e-2, 1e-3, -1e-3, 1e-5]))  # in float32 exp(d) - 1 - d is noise here
    assert near.tolist() == pytest.approx([5.017e-5, 4.983e-5, 5e-7, 5e-7, 5e-11], rel=1e-2, abs=1e-9)
    assert (near >= 0).all()


def exact_formula(name: str, logp: Tensor, old: Tensor, ref: Tensor, weighted: bool) -> Tensor:
    """The estimators as in their formulas, in float64, with autograd's gradient."""
    d, ratio = ref - logp, (logp - old).exp()
    estimate = {"k1": -d, "k2": d.square() / 2, "k3": d.exp() - d - 1}[name]
    return estimate * (ratio.detach() if name == "k2" else ratio) if weighted else estimate


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_value_and_gradient_are_those_of_the_formula_for_models_far_apart(name, weighted, dtype):
    """d from -60 to 60. Only k3 above 20 differs: its value always, its gradient only if unweighted.

    Differentiating the clamped product would give +4.85e8, 19 and 1.1e26 for the weighted k3 at 20.1, -25 and 60 nats.
    """
    d = torch.linspace(-60, 60, 61, dtype=torch.float64)
    for ratio in (0.1, 1.0, 10.0):
        logp = torch.full_like(d, -70.0, requires_grad=True)
        old, ref = logp.detach() - math.log(ratio), logp.detach() + d
        each = exact_formula(name, logp, old, ref, weighted)
        (formula,) = torch.autograd.grad(each.sum(), logp)
        want = -ratio * d if name == "k3" and weighted else formula  # autograd of the product cancels above 30 nats
        torch.testing.assert_close(want[d < 20], formula[d < 20], rtol=1e-6, atol=1e-6)  # and agrees below

        ours = logp.detach().to(dtype).requires_grad_()
        options = {"ratio_weighted": weighted, "estimator": KL_ESTIMATORS[name]}
        got = token_kl(ours, old.to(dtype), ref.to(dtype), **options)
        got.sum().backward()
        beyond = (d > MAX_LOG_RATIO) if name == "k3" else torch.zeros(len(d), dtype=torch.bool)
        cap = math.exp(MAX_LOG_RATIO)
        value = torch.where(beyond, (cap - MAX_LOG_RATIO - 1) * (ratio if weighted else 1.0), each.detach())
        gradient = want if weighted else torch.where(beyond, 1 - cap, want)
        tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 2e-5, "atol": 2e-5}
        torch.testing.assert_close(got.double().detach(), value, **tolerance)
        torch.testing.assert_close(ours.grad.double(), gradient, **tolerance)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_beyond_its_clamp_the_ratio_stays_the_same_in_value_and_gradient(name):
    logp = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    old, ref = torch.tensor([-31.0], dtype=torch.float64), torch.tensor([-1.5], dtype=torch.float64)
    term = token_kl(logp, old, ref, estimator=KL_ESTIMATORS[name]).sum()
    term.backward()
    cap = math.exp(MAX_LOG_RATIO)
    assert term.item() == pytest.approx(cap * KL_ESTIMATORS[name](logp, ref).item())
    assert logp.grad.item() == pytest.approx(cap * (1.5 if name == "k1" else 0.5))


def expected_gradient(estimator, ratio_weighted: bool, old: Tensor, logits: Tensor, ref: Tensor) -> Tensor:
    """Expectation over every token of a small vocabulary, sampled from the sampling policy."""
    leaf = logits.clone().requires_grad_()
    each = token_kl(leaf.log_softmax(dim=0), old, ref, ratio_weighted=ratio_weighted, estimator=estimator)
    return torch.autograd.grad((old.exp() * each).sum(), leaf)[0]


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_every_estimator_weighted_by_the_ratio_has_the_gradient_of_the_divergence(name):
    generator = torch.Generator().manual_seed(3)
    logits, ref, old = torch.randn(3, 9, generator=generator, dtype=torch.float64)
    ref, old = ref.log_softmax(dim=0), old.log_softmax(dim=0)
    leaf = logits.clone().requires_grad_()
    logp = leaf.log_softmax(dim=0)
    true = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), leaf)[0]
    got = expected_gradient(KL_ESTIMATORS[name], True, old, logits, ref)
    torch.testing.assert_close(got, true, atol=1e-12, rtol=1e-12)


def test_unweighted_on_policy_k2_is_exact_k1_is_zero_and_k3_is_biased():
    generator = torch.Generator().manual_seed(4)
    logits, ref = torch.randn(2, 9, generator=generator, dtype=torch.float64)
    ref, old = ref.log_softmax(dim=0), logits.log_softmax(dim=0)
    right = expected_gradient(k3, True, old, logits, ref)
    torch.testing.assert_close(expected_gradient(k2, False, old, logits, ref), right, atol=1e-12, rtol=1e-12)
    assert expected_gradient(k1, False, old, logits, ref).abs().max() < 1e-12
    assert (expected_gradient(k3, False, old, logits, ref) - right).abs().max() > 1e-2


def test_kl_in_the_reward_is_subtracted_per_completion():
    reward = torch.tensor([1.0, math.nan, 0.0])
    got = reward_minus_kl(reward, torch.tensor([2.0, 1.0, -4.0]), beta=0.05)
    torch.testing.assert_close(got, torch.tensor([0.9, math.nan, 0.2]), equal_nan=True)
