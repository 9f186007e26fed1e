"""Statistics from sums, sums of completions, and completions that ran out of room."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from losses.advantage import effective_sample_frac, mean_of, moments, overlong_penalty, std_of
from losses.importance import sequence_length, sequence_mean, sequence_sum
from losses.policy import Tokens, dapo, grpo

NAN = math.nan
CLIP = {"epsilon": 0.2, "epsilon_high": 0.2}


def test_moments_give_mean_and_sample_deviation_of_what_is_there():
    values = [1.0, 4.0, -2.0, 0.5]
    sums = moments(torch.tensor([[1.0, NAN, 4.0], [-2.0, 0.5, NAN]]))
    assert sums.dtype == torch.float64 and sums[0].item() == 4
    assert mean_of(sums).item() == pytest.approx(statistics.fmean(values))
    assert std_of(sums).item() == pytest.approx(statistics.stdev(values))


def test_moments_of_ranks_add_up():
    x = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole, parts = moments(x), sum(moments(piece) for piece in x.split(11))
    torch.testing.assert_close(parts, whole, atol=1e-12, rtol=1e-12)


def test_moments_weighted_by_length_are_those_of_tokens():
    x, length = torch.tensor([2.0, -1.0, NAN]), torch.tensor([3, 2, 5])
    sums = moments(x, weight=length)
    tokens = [2.0] * 3 + [-1.0] * 2
    assert mean_of(sums).item() == pytest.approx(statistics.fmean(tokens))
    assert std_of(sums).item() == pytest.approx(statistics.stdev(tokens))


def test_moments_of_nothing_have_no_mean_and_of_one_no_deviation():
    assert math.isnan(mean_of(moments(torch.full((2,), NAN))).item())
    assert math.isnan(std_of(moments(torch.tensor([3.0, NAN]))).item())
    assert math.isnan(effective_sample_frac(moments(torch.zeros(0))).item())


def test_deviation_beside_a_large_mean_keeps_its_digits():
    x = 1e6 + torch.arange(5, dtype=torch.float64)
    assert std_of(moments(x)).item() == pytest.approx(statistics.stdev(range(5)), rel=1e-3)
    count, total, squares = moments(torch.full((3,), 0.1, dtype=torch.float64))
    assert squares - total.square() / count < 0  # rounding, of values that do not differ
    assert std_of(torch.stack([count, total, squares])).item() == 0.0


def test_sequence_numbers_of_packed_completions():
    x, mask = torch.tensor([1.0, 2.0, NAN, 4.0, 5.0]), torch.tensor([True, True, False, True, True])
    sequence = torch.tensor([0, 0, 0, 2, 3])
    assert sequence_sum(x, mask, sequence, num_sequences=5).tolist() == [3.0, 0.0, 4.0, 5.0, 0.0]
    assert sequence_mean(x, mask, sequence, num_sequences=5).tolist() == [1.5, 0.0, 4.0, 5.0, 0.0]
    assert sequence_length(mask, sequence, num_sequences=5).tolist() == [2, 0, 1, 1, 0]


def test_sequence_numbers_are_wide_and_without_gradient():
    x = torch.full((1000,), 0.1, dtype=torch.bfloat16, requires_grad=True)
    total = sequence_sum(x, torch.ones(1000).bool(), torch.zeros(1000).long(), num_sequences=1)
    assert total.dtype == torch.float32 and not total.requires_grad
    assert total.item() == pytest.approx(1000 * x[0].item(), rel=1e-5)


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (130, -1.0)]
)
def test_overlong_penalty(length, penalty):
    got = overlong_penalty(torch.tensor([length]), max_length=100, margin=20)
    assert got.item() == pytest.approx(penalty) and got.dtype == torch.float32


@pytest.mark.parametrize("margin", [0, -1, 101])
def test_overlong_penalty_refuses_a_margin_that_cannot_be(margin):
    with pytest.raises(ValueError, match="margin="):
        overlong_penalty(torch.tensor([3]), max_length=100, margin=margin)


@pytest.mark.parametrize("loss", [dapo, grpo])
def test_truncated_completions_are_in_no_sum_and_no_count(loss):
    """The loss is that of a batch without them, denominators included."""
    logp, old = torch.randn(2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 5
    advantage = torch.tensor([1.0] * 3 + [-1.0] * 3, dtype=torch.float64)
    sequence = torch.tensor([0, 0, 0, 1, 1, 1])
    truncated = torch.tensor([False, True])
    mask = ~truncated[sequence]
    length = sequence_length(mask, sequence, num_sequences=2)[sequence]
    got = loss(Tokens(logp, logp - old, advantage, mask, length), **CLIP).terms["policy"]
    alone = Tokens(logp[:3], (logp - old)[:3], advantage[:3], mask[:3], length[:3])
    expected = loss(alone, **CLIP).terms["policy"]
    assert got.sum.item() == expected.sum.item() and got.count.item() == expected.count.item()
