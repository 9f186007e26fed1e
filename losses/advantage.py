"""Advantages from groups of completions of the same prompt (GRPO, Shao et al. 2024, arXiv:2402.03300).

    A_pg = (r_pg - mean_g r_p) / (std_g r_p + 1e-4)

The mean and the sample standard deviation (ddof = 1) leave out completions without a reward (NaN); those get
advantage 0, as does a group in which fewer than two completions have one, or all have the same.

Several rewards R_pgk with weights w_k become one advantage in one of two orders:

    sum_then_normalize   r = sum_k w_k R_k, then A as above; rewards of equal sum cannot be told apart
    normalize_then_sum   z_k = (R_k - mean_g R_k) / (std_g R_k + 1e-4),   a = sum_k w_k z_k
                         A = (a - mean a) / (std a + 1e-4) over the whole batch, all groups and ranks
                         (GDPO, Liu et al. 2026, arXiv:2601.05242)

A reward that does not apply (NaN) adds nothing to the sum; a completion to which none applies has total NaN.
Statistics of the batch come in as sums (losses.advantage), added over ranks by the caller: with groups scored one at a
time the batch is still the batch. With one reward GDPO is not GRPO: the last line enlarges the advantages that are left
as more and more groups become all equal.

REINFORCE++ with a baseline is group_advantage of scale "none", then normalize_batch with sums weighted by length.

Shapes: P prompts, G completions per prompt, K rewards (not head size here).

Mean, deviation and effective sample size from sums that ranks can add.

A statistic over a whole optimizer step is taken in two moves: each rank sums what it has into one (3,) tensor,

    moments(x) = [sum w, sum w x, sum w x^2]        w = 1 unless given

the caller adds those tensors over micro-batches, groups and ranks, and the functions below read the statistic off the
total. The sums are float64, where a mean a million times the deviation still leaves half of the digits.

Shapes: B = any number of values.

Completions that ran out of room: leave them out of the loss, or make length cost something before they do.

    soft overlong penalty (DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 13), L = max_length, C = margin, n = length:
        0 up to L - C,  (L - C - n) / C between,  -1 from L on

Shapes: N = packed tokens, B = completions.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


@torch.no_grad()
def moments(
    x: Tensor,  # (...) values; NaN = absent
    weight: Tensor | None = None,  # (...) how often each value counts, e.g. the tokens of its completion; None: once
) -> Tensor:  # (3,) float64: count, sum, sum of squares
    there = ~x.isnan()
    value = torch.where(there, x, 0.0).double()
    weight = there.double() if weight is None else torch.where(there, weight, 0).double()
    return torch.stack([weight.sum(), (weight * value).sum(), (weight * value.square()).sum()])


def mean_of(
    sums: Tensor,  # (3,) from moments, added over everything
) -> Tensor:  # ()
    """NaN where nothing was counted."""
    return sums[1] / sums[0]


def std_of(
    sums: Tensor,  # (3,) from moments, added over everything
) -> Tensor:  # ()
    """Sample standard deviation (ddof = 1); NaN where fewer than two values were counted."""
    count, total, squares = sums.unbind()
    variance = (squares - total.square() / count) / (count - 1)
    return torch.where(count > 1, variance.clamp(min=0).sqrt(), torch.nan)


def effective_sample_frac(
    sums: Tensor,  # (3,) moments of importance weights, added over everything
) -> Tensor:  # ()
    """(sum w)^2 / (n sum w^2): 1 when all weights are equal, 1/n when one has everything; NaN of nothing."""
    count, total, squares = sums.unbind()
    return total.square() / (count * squares)


EPSILON = 1e-4  # keeps a group of nearly equal rewards from blowing noise up to unit size


def group_advantage(
    reward: Tensor,  # (P, G) total reward; NaN = this completion has none
    *,
    scale: Literal["group", "batch", "none"] = "group",
    batch: Tensor | None = None,  # (3,) moments of the rewards of all ranks, for scale "batch"; None: these are all
) -> Tensor:  # (P, G)
    centred = reward - reward.nanmean(dim=1, keepdim=True)  # (P, G)
    if scale == "group":
        centred = centred / (nan_std(reward, dim=1).unsqueeze(1) + EPSILON)
    elif scale == "batch":
        deviation = nan_std(reward.flatten(), dim=0) if batch is None else std_of(batch).to(reward.dtype)
        centred = centred / (deviation + EPSILON)
    return torch.where(has_signal(reward).unsqueeze(1), centred, 0.0).nan_to_num(nan=0.0)


def leave_one_out_advantage(
    reward: Tensor,  # (P, G) total reward; NaN = this completion has none
) -> Tensor:  # (P, G)
    """r minus the mean of the other rewards of its group (RLOO, Ahmadian et al. 2024, arXiv:2402.14740).

    The same as n / (n - 1) (r - mean), n rewards in the group.
    """
    count = (~reward.isnan()).sum(dim=1, keepdim=True)
    others = (reward.nansum(dim=1, keepdim=True) - reward) / (count - 1)
    return torch.where(has_signal(reward).unsqueeze(1), reward - others, 0.0).nan_to_num(nan=0.0)


def weighted_sum(
    rewards: Tensor,  # (..., K) NaN = this reward does not apply
    weights: Tensor,  # (K,)
) -> Tensor:  # (...) NaN where none applies
    assert rewards.shape[-1:] == weights.shape, f"rewards {tuple(rewards.shape)} vs weights {tuple(weights.shape)}"
    total = torch.where(rewards.isnan(), 0.0, rewards * weights).sum(dim=-1)
    return torch.where(rewards.isnan().all(dim=-1), torch.nan, total)


def sum_then_normalize(
    rewards: Tensor,  # (P, G, K) NaN = this reward does not apply
    weights: Tensor,  # (K,)
    *,
    scale: Literal["group", "batch", "none"] = "group",
    batch: Tensor | None = None,  # (3,) moments of the sums of all ranks, for scale "batch"; None: these are all
) -> Tensor:  # (P, G)
    return group_advantage(weighted_sum(rewards, weights), scale=scale, batch=batch)


def normalize_then_sum(
    rewards: Tensor,  # (P, G, K) NaN = this reward does not apply
    weights: Tensor,  # (K,)
) -> Tensor:  # (P, G) NaN where none applies
    """GDPO up to the batch: the first two of its three stages. `normalize_batch` is the third."""
    z = group_advantage(rewards.transpose(1, 2).flatten(0, 1))  # (P * K, G)
    z = z.unflatten(0, (rewards.shape[0], rewards.shape[2])).transpose(1, 2)  # (P, G, K)
    return weighted_sum(torch.where(rewards.isnan(), torch.nan, z), weights)


def normalize_batch(
    advantage: Tensor,  # (P, G) NaN = the completion has no reward
    sums: Tensor,  # (3,) moments of the advantages of the whole batch and all ranks
) -> Tensor:  # (P, G)
    """(a - mean) / (std + 1e-4), 0 where there is no reward, and everywhere if the batch holds fewer than two.

    Sums weighted by completion length give every token one vote instead of every completion.
    """
    mean, deviation = mean_of(sums), std_of(sums)
    return ((advantage.double() - mean) / (deviation + EPSILON)).nan_to_num(nan=0.0).to(advantage.dtype)


def gdpo_advantage(
    rewards: Tensor,  # (P, G, K) the whole batch; NaN = this reward does not apply
    weights: Tensor,  # (K,)
) -> Tensor:  # (P, G)
    """All three stages, where one process holds the whole batch."""
    advantage = normalize_then_sum(rewards, weights)
    return normalize_batch(advantage, moments(advantage))


def nan_std(
    x: Tensor,  # (..., G) values; NaN = absent
    *,
    dim: int,
) -> Tensor:
    """Sample standard deviation (ddof = 1) over the values that are there; NaN where fewer than two are."""
    count = (~x.isnan()).sum(dim=dim)
    centred = x - x.nanmean(dim=dim, keepdim=True)
    variance = centred.square().nansum(dim=dim) / (count - 1)
    return torch.where(count > 1, variance.sqrt(), torch.nan)


def has_signal(
    reward: Tensor,  # (P, G) one reward or their sum; NaN = this completion has none
) -> Tensor:  # (P,) bool
    """True where two completions of a group differ. Exact, where r - mean of equal rewards may round to a residue."""
    highest = torch.where(reward.isnan(), -torch.inf, reward).amax(dim=1)
    lowest = torch.where(reward.isnan(), torch.inf, reward).amin(dim=1)
    return highest > lowest


def zero_std_frac(
    reward: Tensor,  # (P, G) total reward, or one of several; NaN = this completion has none
) -> Tensor:  # ()
    """Fraction of groups that teach nothing: all rewards equal, or fewer than two of them."""
    std = nan_std(reward, dim=1)
    return (std.isnan() | (std < 1e-8)).to(reward.dtype).mean()


def drop_truncated(
    mask: Tensor,  # (N,) bool, True = trained
    truncated: Tensor,  # (N,) bool, True = the token's completion did not end by itself
) -> Tensor:  # (N,) bool
    """Apply it before anything is counted: a dropped token is in no denominator, statistic or length."""
    return mask & ~truncated


def overlong_penalty(
    length: Tensor,  # (B,) tokens of each completion
    *,
    max_length: int,
    margin: int,
) -> Tensor:  # (B,) to add to the reward
    if not 0 < margin <= max_length:
        raise ValueError(f"margin={margin}: must be above 0 and at most max_length={max_length}")
    return ((max_length - margin - length.float()) / margin).clamp(-1, 0)
