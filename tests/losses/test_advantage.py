"""Golden values to four digits, as other GRPO implementations give them (sample deviation, epsilon 1e-4)."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from losses.advantage import EPSILON, group_advantage, nan_std, zero_std_frac

NAN = math.nan
SCALES = ("group", "batch", "none")

reward_or_none = st.one_of(st.none(), st.floats(-10, 10, width=32))
groups = st.integers(1, 5).flatmap(
    lambda size: st.lists(st.lists(reward_or_none, min_size=size, max_size=size), min_size=1, max_size=4)
)


def tensor(rows: list[list[float | None]]) -> torch.Tensor:
    return torch.tensor([[NAN if x is None else x for x in row] for row in rows], dtype=torch.float64)


def naive(rows: list[list[float | None]], scale: str) -> list[list[float]]:
    """The formula in plain Python: one loop over groups, one over completions."""
    everything = [x for row in rows for x in row if x is not None]
    out = []
    for row in rows:
        there = [x for x in row if x is not None]
        if len(there) < 2:
            out.append([0.0] * len(row))
            continue
        mean = statistics.fmean(there)
        divisor = {
            "group": lambda values=there: statistics.stdev(values) + EPSILON,
            "batch": lambda: statistics.stdev(everything) + EPSILON,
            "none": lambda: 1.0,
        }[scale]()
        out.append([0.0 if x is None else (x - mean) / divisor for x in row])
    return out


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("group", [[1.2246, 0, 0, -1.2246], [1.4997, -0.4999, -0.4999, -0.4999]]),
        ("batch", [[1.5601, 0, 0, -1.5601], [1.1701, -0.39, -0.39, -0.39]]),
        ("none", [[1, 0, 0, -1], [0.75, -0.25, -0.25, -0.25]]),
    ],
)
def test_advantage_of_two_groups(scale, expected):
    reward = torch.tensor([[2.0, 1.0, 1.0, 0.0], [2.0, 1.0, 1.0, 1.0]])
    torch.testing.assert_close(group_advantage(reward, scale=scale), torch.tensor(expected), atol=6e-5, rtol=0)


def test_advantage_of_one_hot_rewards_uses_the_sample_deviation():
    got = group_advantage(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    torch.testing.assert_close(got, torch.tensor([[1.4997, -0.4999, -0.4999, -0.4999]]), atol=6e-5, rtol=0)


def test_advantage_divides_by_the_group_unless_told_otherwise():
    reward = torch.tensor([[3.0, 1.0, 0.0], [5.0, 5.5, 0.0]])
    assert torch.equal(group_advantage(reward), group_advantage(reward, scale="group"))


def test_advantage_leaves_completions_without_reward_out():
    got = group_advantage(torch.tensor([[1.0, 1.0, NAN, 0.0]]))
    torch.testing.assert_close(got, torch.tensor([[0.5773, 0.5773, 0.0, -1.1545]]), atol=6e-5, rtol=0)


def test_advantage_of_a_pair():
    half = 0.5 / (math.sqrt(0.5) + EPSILON)
    got = group_advantage(torch.tensor([[1.0, 0.0]], dtype=torch.float64))
    torch.testing.assert_close(got, torch.tensor([[half, -half]], dtype=torch.float64))


@pytest.mark.parametrize("scale", SCALES)
def test_advantage_is_zero_where_there_is_nothing_to_compare(scale):
    reward = torch.tensor([
        [3.0, NAN, NAN],  # one scorable completion
        [NAN, NAN, NAN],
        [2.0, 2.0, 2.0],
        [1.0, 0.0, NAN],  # the only group that teaches
    ])  # fmt: skip
    got = group_advantage(reward, scale=scale)
    assert torch.equal(got[:3], torch.zeros(3, 3))
    assert got[3, 0] > 0 and got[3, 1] == -got[3, 0] and got[3, 2] == 0


@pytest.mark.parametrize("scale", SCALES)
def test_advantage_of_all_nan_or_one_lonely_reward_is_zero(scale):
    assert torch.equal(group_advantage(torch.full((2, 3), NAN), scale=scale), torch.zeros(2, 3))
    assert torch.equal(group_advantage(torch.tensor([[NAN, 4.0], [NAN, NAN]]), scale=scale), torch.zeros(2, 2))


def test_advantage_batch_scale_counts_lonely_rewards_but_keeps_group_means():
    reward = torch.tensor([[1.0, 0.0], [5.0, NAN]], dtype=torch.float64)
    deviation = statistics.stdev([1.0, 0.0, 5.0]) + EPSILON
    expected = torch.tensor([[0.5 / deviation, -0.5 / deviation], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(group_advantage(reward, scale="batch"), expected)


def test_advantage_of_nearly_equal_rewards_is_not_blown_up():
    reward = torch.tensor([[0.3, 0.3 + 1e-7, 0.3 - 1e-7, 0.3]])  # rounding noise, not a signal
    assert group_advantage(reward).abs().max() < 0.01


@pytest.mark.parametrize("scale", SCALES)
@settings(max_examples=60, deadline=None)
@given(rows=groups)
def test_advantage_agrees_with_a_float64_loop(scale, rows):
    expected = torch.tensor(naive(rows, scale), dtype=torch.float64)
    torch.testing.assert_close(group_advantage(tensor(rows), scale=scale), expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("scale", SCALES)
@settings(max_examples=30, deadline=None)
@given(rows=groups, shift=st.floats(-5, 5))
def test_advantage_sums_to_zero_in_a_group_and_ignores_a_constant(scale, rows, shift):
    reward = tensor(rows)
    got = group_advantage(reward, scale=scale)
    torch.testing.assert_close(got.sum(dim=1), torch.zeros(len(rows), dtype=torch.float64), atol=1e-8, rtol=0)
    torch.testing.assert_close(group_advantage(reward + shift, scale=scale), got, atol=1e-8, rtol=1e-8)


def test_nan_std_is_the_sample_deviation_of_what_is_there():
    got = nan_std(torch.tensor([[1.0, 3.0, NAN], [2.0, NAN, NAN], [NAN, NAN, NAN]]), dim=1)
    torch.testing.assert_close(got, torch.tensor([math.sqrt(2.0), NAN, NAN]), equal_nan=True)


def test_zero_std_frac_counts_groups_that_teach_nothing():
    reward = torch.tensor([[1.0, 1.0, 1.0], [0.0, 1.0, NAN], [2.0, NAN, NAN], [NAN, NAN, NAN]])
    assert zero_std_frac(reward).item() == 0.75
    assert zero_std_frac(torch.tensor([[0.0, 1.0]])).item() == 0.0
