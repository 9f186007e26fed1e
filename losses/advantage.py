"""Advantages from groups of completions of the same prompt, one record per estimator.

    group               A = (r - mean_g r) / (std_g r + 1e-4)                           (GRPO, arXiv:2402.03300)
    leave_one_out       A = r - mean of the other rewards of the group                  (RLOO, arXiv:2402.14740)
    normalize_then_sum  z_k = (R_k - mean_g R_k) / (std_g R_k + 1e-4),  a = sum_k w_k z_k
                        A = (a - mean a) / (std a + 1e-4) over the whole batch          (GDPO, arXiv:2601.05242)

r is the weighted sum of the rewards R_k. Adding first makes different mixtures of rewards with the same sum the same;
GDPO normalises each first. With one reward GDPO is not GRPO: its last line enlarges the advantages that are left as
more and more groups become all equal. Means and sample standard deviations (ddof = 1) leave out completions without a
reward (NaN); those get advantage 0, as does a group in which fewer than two completions have one, or all have the same.

An estimator is a function of GroupRewards that returns (P, G), or for advantages per token a list with one tensor of
len(completion.ids) for each completion. Its keyword-only parameters are keys of --advantage-kwargs; scale_rewards is a
flag. To add one, enter it in ADVANTAGE_ESTIMATORS; `--advantage-estimator my_module.my_estimator` takes one from
outside. The trainer calls the same function to train, to judge which groups teach nothing (dynamic sampling, replay)
and to rank groups for replay.

A statistic over a whole optimizer step is taken in two moves: each rank sums what it has into one (3,) tensor of
float64, `moments(x) = [sum w, sum w x, sum w x^2]`, the sums are added over ranks (GroupRewards.all_sum), and mean_of,
std_of and effective_sample_frac read the statistic off the total.

Shapes: P prompts, G completions per prompt, K rewards (not head size here), B = P G.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from losses.types import options_of

NOTHING = 1e-6  # advantages below this are rounding
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


# The registry.


def _itself(x: Tensor) -> Tensor:
    return x


class GroupRewards(NamedTuple):
    """What an advantage estimator may use of some groups."""

    rewards: Tensor  # (P, G, K) each reward of each completion; NaN = it does not apply
    weights: Tensor  # (K,)
    total: Tensor  # (P, G) weighted sum, less beta times the KL with kl_in_reward; NaN = no reward applies
    completions: Sequence[Any] = ()  # B of them, group after group: ids, mask, text, columns of each
    all_sum: Callable[[Tensor], Tensor] = _itself  # adds a tensor over all ranks that hold groups of the batch

    @classmethod
    def of(
        cls,
        rewards: Tensor,  # (P, G, K) NaN = the reward does not apply
        weights: Tensor,  # (K,)
    ) -> GroupRewards:
        """Where one process holds the whole batch."""
        return cls(rewards, weights, weighted_sum(rewards, weights))


Advantage = Tensor | Sequence[Any]  # (P, G), or for each of the B completions one number per id


@dataclass(frozen=True)
class AdvantageEstimator:
    """One estimator, and what follows from it."""

    estimate: Callable[..., Advantage]
    """(GroupRewards, *, options) -> (P, G), or one tensor per completion with a number for each of its ids."""
    reads_total: bool = True
    """False: it reads each reward apart, so a KL penalty cannot be taken off their sum (kl_in_reward)."""

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        """Keyword-only parameters of the function: flags, or keys of --advantage-kwargs."""
        return options_of(self.estimate)

    def __call__(self, r: GroupRewards, **options: Any) -> Advantage:
        return self.estimate(r, **options)


def group(r: GroupRewards, *, scale_rewards: Literal["group", "batch", "none"] = "group") -> Tensor:  # (P, G)
    batch = r.all_sum(moments(r.total)) if scale_rewards == "batch" else None
    return group_advantage(r.total, scale=scale_rewards, batch=batch)


def leave_one_out(r: GroupRewards) -> Tensor:  # (P, G)
    return leave_one_out_advantage(r.total)


def gdpo(r: GroupRewards) -> Tensor:  # (P, G)
    summed = normalize_then_sum(r.rewards, r.weights)
    advantage = normalize_batch(summed, r.all_sum(moments(summed)))
    return torch.where(advantage.abs() < NOTHING, 0.0, advantage)  # the mean of a batch is 0 up to rounding only


ADVANTAGE_ESTIMATORS = {
    "group": AdvantageEstimator(group),
    "leave_one_out": AdvantageEstimator(leave_one_out),
    "normalize_then_sum": AdvantageEstimator(gdpo, reads_total=False),
}


# Statistics of groups.


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


# Statistics of the whole batch, over all ranks.


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


# A penalty in the reward.


def overlong_penalty(
    length: Tensor,  # (B,) tokens of each completion
    *,
    max_length: int,
    margin: int,
) -> Tensor:  # (B,) to add to the reward
    """0 up to max_length - margin, then falling to -1 at max_length: DAPO (arXiv:2503.14476)."""
    if not 0 < margin <= max_length:
        raise ValueError(f"margin={margin}: must be above 0 and at most max_length={max_length}")
    return ((max_length - margin - length.float()) / margin).clamp(-1, 0)
