"""Entropy bonus and the top-entropy mask; test_policy.py tests the policy losses."""

from __future__ import annotations

import math

import pytest
import torch

from losses.entropy import entropy_bonus, entropy_threshold, keep_top_entropy

ENTROPY = (0.5, 1.5, 2.5, 0.1)


def test_bonus_is_minus_the_mean_entropy_with_gradient():
    entropy = torch.tensor(ENTROPY, requires_grad=True)
    term = entropy_bonus(entropy, torch.tensor([True] * 4), coef=0.01).terms["entropy"]
    assert (term.sum / term.count).item() == pytest.approx(1.15)
    (term.weight * term.sum / term.count).backward()
    assert entropy.grad.tolist() == pytest.approx([-0.0025] * 4)


def test_bonus_counts_only_kept_tokens_and_never_padding():
    entropy = torch.tensor([*ENTROPY, math.nan], requires_grad=True)
    mask = torch.tensor([True] * 4 + [False])
    keep = keep_top_entropy(entropy, entropy_threshold(entropy[mask], top=0.5))
    term = entropy_bonus(entropy, mask, coef=1.0, keep=keep).terms["entropy"]
    assert term.count.item() == 2 and term.sum.item() == pytest.approx(4.0)
    term.sum.backward()
    assert entropy.grad.tolist() == [0.0, 1.0, 1.0, 0.0, 0.0]


def test_bonus_of_pieces_sums_to_the_whole():
    entropy, mask = torch.linspace(0, 2, 20, dtype=torch.float64), torch.arange(20) % 3 > 0
    whole = entropy_bonus(entropy, mask, coef=0.1).terms["entropy"]
    pieces = zip(entropy.split(7), mask.split(7), strict=True)
    parts = [entropy_bonus(*piece, coef=0.1).terms["entropy"] for piece in pieces]
    assert sum(p.sum for p in parts).item() == pytest.approx(whole.sum.item(), rel=1e-14)
    assert sum(p.count for p in parts).item() == whole.count.item()


@pytest.mark.parametrize("top", [0.01, 0.2, 0.5, 0.8, 0.999, 1.0])
@pytest.mark.parametrize("n", [1, 2, 7, 1000])
def test_threshold_is_the_interpolated_quantile(top, n):
    entropy = torch.rand(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    expected = torch.quantile(entropy, 1 - top)
    torch.testing.assert_close(entropy_threshold(entropy, top=top), expected, atol=1e-12, rtol=1e-12)


def test_threshold_takes_more_than_torch_quantile_does():
    entropy = torch.arange(2**24 + 2, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(entropy, 0.5)
    assert entropy_threshold(entropy, top=0.25).item() == pytest.approx(0.75 * (2**24 + 1), rel=1e-6)


def test_top_one_keeps_everything_and_nothing_has_no_threshold():
    entropy = torch.rand(50)
    assert keep_top_entropy(entropy, entropy_threshold(entropy, top=1.0)).all()
    assert entropy_threshold(torch.zeros(0), top=0.2).item() == -math.inf
    assert keep_top_entropy(entropy, entropy_threshold(entropy, top=0.2)).sum().item() == 10


@pytest.mark.parametrize("top", [0.0, -0.1, 1.5])
def test_threshold_refuses_what_is_no_fraction(top):
    with pytest.raises(ValueError, match="top_entropy_quantile="):
        entropy_threshold(torch.rand(3), top=top)
