"""Hand-computed values of the smallest losses (sft, entropy), the top-entropy mask, and merging."""

from __future__ import annotations

import math

import pytest
import torch

from losses.entropy import entropy_bonus, keep_top_entropy
from losses.sft import dft_loss, sft_loss
from losses.types import LossOut, Term, merge


def test_sft_by_hand():
    logp = torch.tensor([-1.0, -0.5, -2.0, -0.7], requires_grad=True)
    out = sft_loss(logp, torch.tensor([True, False, True, True]))
    term = out.terms["nll"]
    assert list(out.terms) == ["nll"] and term.weight == 1.0
    assert term.sum.item() == pytest.approx(1.0 + 2.0 + 0.7) and term.count.item() == 3
    term.sum.backward()
    assert logp.grad.tolist() == [-1.0, 0.0, -1.0, -1.0]


def test_dft_weighs_each_token_by_its_probability_without_a_gradient_through_it():
    logp = torch.tensor([-1.0, -0.5, -2.0, -0.7], requires_grad=True)
    out = dft_loss(logp, torch.tensor([True, False, True, True]))
    term = out.terms["dft"]
    weights = [math.exp(-1.0), 0.0, math.exp(-2.0), math.exp(-0.7)]
    assert term.sum.item() == pytest.approx(weights[0] + 2.0 * weights[2] + 0.7 * weights[3]) and term.count.item() == 3
    assert out.metrics["loss/nll"][0].item() == pytest.approx(3.7)
    term.sum.backward()
    assert logp.grad.tolist() == pytest.approx([-weight for weight in weights])


def test_sft_sums_bfloat16_in_float32():
    logp = torch.full((4096,), -1.0, dtype=torch.bfloat16)  # bfloat16 cannot count beyond 256
    assert sft_loss(logp, torch.ones(4096, dtype=torch.bool)).terms["nll"].sum.item() == 4096.0


def test_entropy_bonus_is_minus_the_mean_entropy_of_the_kept_tokens():
    entropy = torch.tensor([0.5, 1.5, 2.5, 0.1, math.nan], requires_grad=True)
    mask = torch.tensor([True] * 4 + [False])
    term = entropy_bonus(entropy, mask, coef=0.01).terms["entropy"]
    assert (term.sum / term.count).item() == pytest.approx(1.15)
    (gradient,) = torch.autograd.grad(term.weight * term.sum / term.count, entropy)
    assert gradient.tolist() == pytest.approx([-0.0025] * 4 + [0.0])
    keep = keep_top_entropy(entropy, torch.tensor(1.0))
    assert keep.tolist() == [False, True, True, False, False]
    term = entropy_bonus(entropy, mask, coef=1.0, keep=keep).terms["entropy"]
    assert term.count.item() == 2 and term.sum.item() == pytest.approx(4.0)


def make(name: str, value: float) -> LossOut:
    term = Term(0.5, torch.tensor(value, requires_grad=True), torch.tensor(4))
    return LossOut({name: term}, {f"policy/{name}": (torch.tensor(value), torch.tensor(4))})


def test_merge_keeps_every_term_and_metric_and_leaves_its_inputs_alone():
    policy, kl = make("policy", 3.0), make("kl", 2.0)
    out = merge(policy, kl)
    assert out.terms == {"policy": policy.terms["policy"], "kl": kl.terms["kl"]}
    assert out.metrics == policy.metrics | kl.metrics and merge(kl) == kl
    out.metrics["policy/entropy"] = (torch.tensor(1.0), torch.tensor(1))
    assert list(policy.terms) == ["policy"] and list(policy.metrics) == ["policy/policy"]
    with pytest.raises(AssertionError, match="kl"):
        merge(make("kl", 1.0), make("kl", 2.0))
