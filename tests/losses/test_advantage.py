"""Golden values to four digits, as other GRPO implementations give them (sample deviation, epsilon 1e-4)."""

from __future__ import annotations

import itertools
import math
import statistics
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from losses.advantage import (
    EPSILON,
    effective_sample_frac,
    gdpo,
    group,
    group_advantage,
    has_signal,
    leave_one_out_advantage,
    max_rl,
    mean_of,
    moments,
    nan_std,
    normalize_batch,
    normalize_then_sum,
    opo,
    overlong_penalty,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    std_of,
    weighted_sum,
    zero_std_frac,
)
from losses.importance import sequence_length, sequence_mean, sequence_sum

NAN = math.nan
SCALES = ("group", "batch", "none")

reward_or_none = st.one_of(st.none(), st.floats(-10, 10, width=32))
groups = st.integers(1, 5).flatmap(
    lambda size: st.lists(st.lists(reward_or_none, min_size=size, max_size=size), min_size=1, max_size=4)
)


def rewards_of(rewards: torch.Tensor, weights: torch.Tensor) -> Any:
    """What an estimator reads, in one process."""
    summed = weighted_sum(rewards, weights)
    return SimpleNamespace(rewards=rewards, weights=weights, reward=summed, all_sum=lambda x: x)


def gdpo_of(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return gdpo(rewards_of(rewards, weights))


def sum_then_normalize(rewards: torch.Tensor, weights: torch.Tensor, scale: str = "group") -> torch.Tensor:
    return group(rewards_of(rewards, weights), scale_rewards=scale)


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


GOLDEN = {
    "group": [[1.2246, 0, 0, -1.2246], [1.4997, -0.4999, -0.4999, -0.4999]],
    "batch": [[1.5601, 0, 0, -1.5601], [1.1701, -0.39, -0.39, -0.39]],
    "none": [[1, 0, 0, -1], [0.75, -0.25, -0.25, -0.25]],
}


def test_golden_values():
    """Of two groups of four completions, with one reward and with the same as the sum of two."""
    for scale, expected in GOLDEN.items():
        reward = torch.tensor([[2.0, 1.0, 1.0, 0.0], [2.0, 1.0, 1.0, 1.0]])
        close(group_advantage(reward, scale=scale), expected)
        close(sum_then_normalize(torch.tensor(TWO_REWARDS, dtype=torch.float32), EQUAL, scale=scale), expected)


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
@settings(max_examples=15, deadline=None)
@given(rows=groups)
def test_advantage_agrees_with_a_float64_loop(scale, rows):
    expected = torch.tensor(naive(rows, scale), dtype=torch.float64)
    torch.testing.assert_close(group_advantage(tensor(rows), scale=scale), expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("scale", SCALES)
@settings(max_examples=10, deadline=None)
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


# Several rewards: two groups of four completions, two rewards each.
TWO_REWARDS = (((1, 1), (1, 0), (0, 1), (0, 0)), ((1, 1), (1, 0), (1, 0), (1, 0)))
EQUAL = torch.tensor([1.0, 1.0])


def close(got: torch.Tensor, expected: list, atol: float = 6e-5) -> None:
    torch.testing.assert_close(got, torch.tensor(expected, dtype=got.dtype), atol=atol, rtol=0)


def test_sum_then_normalize_of_missing_rewards():
    rewards = torch.tensor([[[1.0, NAN], [0.0, 1.0], [NAN, NAN], [0.0, 0.0]]])
    close(sum_then_normalize(rewards, EQUAL), [[0.5773, 0.5773, 0.0, -1.1545]])


def test_weighted_sum_leaves_out_what_does_not_apply():
    rewards = torch.tensor([[1.0, NAN], [0.5, 2.0], [NAN, NAN]])
    got = weighted_sum(rewards, torch.tensor([2.0, 0.5]))
    torch.testing.assert_close(got, torch.tensor([2.0, 2.0, NAN]), equal_nan=True)


def test_group_advantage_batch_scale_over_ranks():
    """Two ranks with one group each get what one rank with both would give them."""
    reward = torch.tensor([[2.0, 1.0, 1.0, 0.0], [2.0, 1.0, NAN, 1.0]], dtype=torch.float64)
    batch = sum(moments(row) for row in reward)
    parts = [group_advantage(row.unsqueeze(0), scale="batch", batch=batch) for row in reward]
    torch.testing.assert_close(torch.cat(parts), group_advantage(reward, scale="batch"), atol=1e-12, rtol=1e-12)


def test_advantage_of_equal_rewards_is_exactly_zero():
    """A residue of r - mean would keep a batch that teaches nothing from being skipped."""
    reward = torch.full((1, 7), 0.7)
    assert (reward - reward.nanmean(dim=1, keepdim=True)).abs().max() > 0  # the trap is there
    for scale in SCALES:
        assert torch.equal(group_advantage(reward, scale=scale), torch.zeros(1, 7))
    assert not has_signal(reward).any()
    assert torch.equal(leave_one_out_advantage(reward), torch.zeros(1, 7))


def test_has_signal_needs_two_rewards_that_differ():
    reward = torch.tensor([[1.0, 0.0, NAN], [1.0, 1.0, NAN], [1.0, NAN, NAN], [NAN, NAN, NAN]])
    assert has_signal(reward).tolist() == [True, False, False, False]


def test_leave_one_out_golden_values():
    close(leave_one_out_advantage(torch.tensor([[1.0, 0.0, 0.0, 0.5]])), [[0.8333, -0.5, -0.5, 0.1667]])


def test_leave_one_out_is_the_scaled_centred_reward_and_ignores_missing_ones():
    reward = torch.tensor([[3.0, 1.0, NAN, 0.5], [2.0, NAN, NAN, NAN], [NAN] * 4], dtype=torch.float64)
    got = leave_one_out_advantage(reward)
    expected = group_advantage(reward, scale="none") * 3 / 2
    torch.testing.assert_close(got[:1], expected[:1], atol=1e-12, rtol=1e-12)
    assert torch.equal(got[1:], torch.zeros(2, 4, dtype=torch.float64))


def estimator_input(rewards: list[list[float]], lengths: list[list[int]] | None = None) -> Any:
    """One reward of weight 1, and completions of these lengths."""
    made = rewards_of(torch.tensor(rewards, dtype=torch.float64).unsqueeze(2), torch.ones(1))
    made.completions = [SimpleNamespace(trained=n) for row in lengths or () for n in row]
    return made


def test_max_rl_golden_values():
    """prime-rl pull request 2778 has [1, 0, 0, 0] -> [3, -1, -1, -1]."""
    r = estimator_input([[1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, NAN, 0, NAN], [NAN] * 3 + [1]])
    third = 1 / 3
    close(max_rl(r), [[3, -1, -1, -1], [third, third, third, -1], [0] * 4, [0] * 4, [1, 0, -1, 0], [0] * 4], atol=1e-12)


def test_max_rl_estimates_the_likelihood_up_to_order_n_minus_1():
    """All outcomes of N completions that succeed with probability p = sigmoid(theta), weighted by their probability."""
    n, theta = 4, torch.tensor(-0.7, dtype=torch.float64, requires_grad=True)
    p = theta.sigmoid()
    outcomes = torch.tensor(list(itertools.product([0.0, 1.0], repeat=n)), dtype=torch.float64)
    probability = torch.where(outcomes == 1, p, 1 - p)  # (16, N)
    advantage = max_rl(estimator_input(outcomes.tolist()))
    surrogate = (probability.prod(1).detach() * (advantage * probability.log()).mean(1)).sum()
    likelihood = sum((1 - (1 - p) ** k) / k for k in range(1, n))
    (got,), (expected,) = (torch.autograd.grad(x, theta, retain_graph=True) for x in (surrogate, likelihood))
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-12)


def test_opo_golden_values():
    """The baseline of the first group is (1 * 10 + 0 * 30) / 40."""
    rewards = [[1, 0], [1, NAN], [1, 1], [1, 0]]
    r = estimator_input([[*row, NAN] for row in rewards], [[10, 30, 5], [2, 9, 9], [3, 4, 5], [0, 0, 0]])
    close(opo(r), [[0.75, -0.25, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]], atol=1e-12)
    equal = [[3.0, 1.0, 0.5]]
    close(opo(estimator_input(equal, [[7] * 3])), group_advantage(torch.tensor(equal), scale="none").tolist())


def test_reinforce_plus_plus_golden_values():
    """Tokens of the first case: three of reward 1, one of 0, two of 1. Their mean is 5/6, their deviation 0.40825."""
    r = estimator_input([[1, 0], [1, NAN]], [[3, 1], [2, 9]])
    high, low = (1 - 5 / 6) / (math.sqrt(1 / 6) + EPSILON), -5 / 6 / (math.sqrt(1 / 6) + EPSILON)
    close(reinforce_plus_plus(r), [[high, low], [high, 0]], atol=1e-12)  # a group with one reward has signal
    tokens = [0.5, 0.5, 0.5, -0.5, 0.0, 0.0]
    mean, deviation = statistics.fmean(tokens), statistics.stdev(tokens) + EPSILON
    expected = [[(0.5 - mean) / deviation, (-0.5 - mean) / deviation], [-mean / deviation, 0]]
    close(reinforce_plus_plus_baseline(r), expected, atol=1e-12)
    for estimate in (reinforce_plus_plus, reinforce_plus_plus_baseline):
        equal = estimator_input([[0.7] * 7] * 2, [[3, 5, 7, 1, 1, 2, 9]] * 2)
        equal.reward = equal.reward.float()  # 0.7 - mean is not 0
        assert torch.equal(estimate(equal), torch.zeros(2, 7))


@pytest.mark.parametrize("estimate", [reinforce_plus_plus, reinforce_plus_plus_baseline])
def test_reinforce_plus_plus_of_ranks_is_that_of_the_whole_rollout(estimate):
    rewards, lengths = [[1, 0, 0.5], [0, 0, 1]], [[3, 1, 4], [2, 9, 6]]
    ranks = [estimator_input([r], [n]) for r, n in zip(rewards, lengths, strict=True)]
    sums: list[torch.Tensor] = []
    for rank in ranks:
        rank.all_sum = lambda x: sums.append(x) or x
        estimate(rank)
    for rank in ranks:
        rank.all_sum = lambda _: sum(sums)
    parts, whole = torch.cat([estimate(rank) for rank in ranks]), estimate(estimator_input(rewards, lengths))
    torch.testing.assert_close(parts, whole, atol=1e-12, rtol=1e-12)


def test_gdpo_golden_values():
    rewards = torch.tensor(TWO_REWARDS, dtype=torch.float32)
    close(normalize_then_sum(rewards, EQUAL), [[1.7318, 0, 0, -1.7318], [1.4997, -0.4999, -0.4999, -0.4999]])
    close(gdpo_of(rewards, EQUAL), [[1.5274, 0, 0, -1.5274], [1.3227, -0.4409, -0.4409, -0.4409]])


@pytest.mark.parametrize("second", [((0, 1), (1, 1)), ((0, 0), (1, 0))])
def test_gdpo_keeps_a_distinction_that_grpo_collapses(second):
    """Must-show 2: one reward of two got better in one group, both in the other."""
    rewards = torch.tensor([second, ((0, 0), (1, 1))], dtype=torch.float32)
    close(sum_then_normalize(rewards, EQUAL), [[-0.7071, 0.7071], [-0.7071, 0.7071]], atol=1.1e-4)
    close(normalize_then_sum(rewards, EQUAL), [[-0.7070, 0.7070], [-1.4140, 1.4140]], atol=1.1e-4)
    close(gdpo_of(rewards, EQUAL), [[-0.5477, 0.5477], [-1.0954, 1.0954]], atol=1.1e-4)


def test_gdpo_of_one_reward_is_not_grpo_where_groups_are_all_equal():
    reward = torch.tensor([[1.0, 0, 0, 1], [1, 1, 1, 1]])
    close(group_advantage(reward), [[0.8659, -0.8659, -0.8659, 0.8659], [0, 0, 0, 0]])
    got = gdpo_of(reward.unsqueeze(2), torch.ones(1))
    close(got, [[1.3227, -1.3227, -1.3227, 1.3227], [0, 0, 0, 0]])


def test_gdpo_of_rewards_with_a_constant_sum_and_equal_weights_is_zero():
    rewards = torch.tensor([[(0.0, 3.0), (1.0, 2.0), (2.0, 1.0), (3.0, 0.0)]])
    assert gdpo_of(rewards, EQUAL).abs().max() < 1e-6
    assert gdpo_of(rewards, torch.tensor([1.0, 0.5])).abs().max() > 1


def test_gdpo_weights_scale_the_normalised_reward_not_the_raw_one():
    rewards = torch.tensor(TWO_REWARDS, dtype=torch.float64)
    large = rewards * torch.tensor([1.0, 1000.0])  # the unit of a reward does not matter
    weights = torch.tensor([1.0, 0.5])
    got, expected = normalize_then_sum(large, weights), normalize_then_sum(rewards, weights)
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=0)


def test_gdpo_missing_reward_adds_nothing_and_a_completion_without_any_gets_zero():
    rewards = torch.tensor([[[1.0, NAN], [0.0, 1.0], [NAN, NAN], [0.0, 0.0]]], dtype=torch.float64)
    z = [group_advantage(rewards[:, :, k])[0] for k in range(2)]
    stage_two = normalize_then_sum(rewards, EQUAL)
    assert stage_two[0, 2].isnan()
    expected = torch.stack([z[0][0], z[0][1] + z[1][1], z[0][3] + z[1][3]])
    torch.testing.assert_close(stage_two[0, [0, 1, 3]], expected)
    got = gdpo_of(rewards, EQUAL)
    there = stage_two[0, [0, 1, 3]]
    assert got[0, 2] == 0
    torch.testing.assert_close(got[0, [0, 1, 3]], (there - there.mean()) / (there.std() + EPSILON))


def test_gdpo_batch_statistics_of_groups_and_ranks_add_up():
    """Streaming: groups scored one at a time, normalised by the batch, equal the whole batch at once."""
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(6, 4, 3, generator=generator, dtype=torch.float64)
    rewards[torch.rand(6, 4, 3, generator=generator) < 0.2] = NAN
    weights = torch.tensor([1.0, 0.3, 2.0], dtype=torch.float64)
    groups = [normalize_then_sum(group.unsqueeze(0), weights) for group in rewards]
    sums = sum(moments(group) for group in groups)
    parts = torch.cat([normalize_batch(group, sums) for group in groups])
    torch.testing.assert_close(parts, gdpo_of(rewards, weights), atol=1e-12, rtol=1e-12)
    alone = torch.cat([normalize_batch(group, moments(group)) for group in groups])
    assert (alone - parts).abs().max() > 0.05  # per group would be another method


def test_normalize_batch_of_one_value_or_none_is_zero():
    for advantage in (torch.tensor([[1.0, NAN]]), torch.full((1, 2), NAN)):
        assert torch.equal(normalize_batch(advantage, moments(advantage)), torch.zeros(1, 2))


def test_normalize_batch_by_tokens_gives_long_completions_more_votes():
    advantage, length = torch.tensor([[2.0, -1.0]], dtype=torch.float64), torch.tensor([[3, 1]])
    tokens = [2.0, 2.0, 2.0, -1.0]
    mean, deviation = statistics.fmean(tokens), statistics.stdev(tokens) + EPSILON
    got = normalize_batch(advantage, moments(advantage, weight=length))
    close(got, [[(2.0 - mean) / deviation, (-1.0 - mean) / deviation]], atol=1e-12)


# Statistics from sums, sums of completions, and completions that ran out of room.


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
    x, sequence = torch.tensor([1.0, 2.0, 4.0, 5.0]), torch.tensor([0, 0, 2, 3])
    assert sequence_sum(x, sequence, num_sequences=5).tolist() == [3.0, 0.0, 4.0, 5.0, 0.0]
    assert sequence_mean(x, sequence, num_sequences=5).tolist() == [1.5, 0.0, 4.0, 5.0, 0.0]
    assert sequence_length(sequence, num_sequences=5).tolist() == [2, 0, 1, 1, 0]


def test_sequence_numbers_are_wide_and_without_gradient():
    x = torch.full((1000,), 0.1, dtype=torch.bfloat16, requires_grad=True)
    total = sequence_sum(x, torch.zeros(1000).long(), num_sequences=1)
    assert total.dtype == torch.float32 and not total.requires_grad
    assert total.item() == pytest.approx(1000 * x[0].item(), rel=1e-5)


def test_overlong_penalty():
    length = torch.tensor([0, 80, 81, 90, 100, 130])
    got = overlong_penalty(length, max_length=100, margin=20)
    assert got.tolist() == pytest.approx([0.0, 0.0, -0.05, -0.5, -1.0, -1.0]) and got.dtype == torch.float32
    for margin in (0, -1, 101):
        with pytest.raises(ValueError, match="margin="):
            overlong_penalty(length, max_length=100, margin=margin)
