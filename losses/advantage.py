"""Advantages from groups of completions of the same prompt, one record per --advantage-estimator.

    group               A = (r - mean_g r) / (std_g r + 1e-4)                           (GRPO, arXiv:2402.03300)
    leave_one_out       A = r - mean of the other rewards of the group                  (RLOO, arXiv:2402.14740)
    opo                 A = r - sum_g l r / sum_g l, l trained tokens of a completion   (OPO, arXiv:2505.23585)
    max_rl              A = (r - mean_g r) / mean_g r, for rewards of 0 or 1            (MaxRL, arXiv:2602.02710)
    reinforce_plus_plus A = (r - mean r) / (std r + 1e-4) over all tokens of the rollout
                        ..._baseline: of r - mean_g r instead of r                      (REINFORCE++, arXiv:2501.03262)
    normalize_then_sum  z_k = (R_k - mean_g R_k) / (std_g R_k + 1e-4),  a = sum_k w_k z_k
                        A = (a - mean a) / (std a + 1e-4) over the whole rollout        (GDPO, arXiv:2601.05242)

r is the weighted sum of the rewards R_k. Summing first cannot tell mixtures of rewards with the same sum apart; GDPO
normalises each reward first. With a single reward GDPO still differs from GRPO: as more groups become all equal, its
last line enlarges the remaining advantages. Means and sample standard deviations (ddof = 1) ignore completions without
a reward (NaN). Their advantage is 0, and so is that of a group with fewer than two rewards, or all equal ones, except
in reinforce_plus_plus, which compares all completions of a rollout.

An estimator is a function of Rewards that returns (P, G), or for advantages per token a list with one tensor of
len(completion.ids) per completion. Its keyword-only parameters are keys of --advantage-kwargs. To add one, enter it
into ADVANTAGE_ESTIMATORS, or name it on the command line: `--advantage-estimator my_module.my_estimator`. Dynamic
sampling and replay use the same function to find groups without signal and to rank groups, each group alone unless the
record has across_groups.

A statistic over a whole rollout takes two steps: each rank sums into `moments(x) = [sum w, sum w x, sum w x^2]`, a (3,)
float64 tensor; Rewards.all_sum adds those over ranks, and mean_of, std_of and effective_sample_frac read the total.

Shapes: P prompts, G completions per prompt, K rewards (not head size here), B = P G.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from losses.types import options_of

NOTHING = 1e-6  # advantages below this are rounding
EPSILON = 1e-4  # avoids scaling noise in nearly equal rewards up to unit size


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
    """GDPO up to the batch: the first two of its three stages; `normalize_batch` is the third."""
    z = group_advantage(rewards.transpose(1, 2).flatten(0, 1))  # (P * K, G)
    z = z.unflatten(0, (rewards.shape[0], rewards.shape[2])).transpose(1, 2)  # (P, G, K)
    return weighted_sum(torch.where(rewards.isnan(), torch.nan, z), weights)


def normalize_batch(
    advantage: Tensor,  # (P, G) NaN = the completion has no reward
    total_moments: Tensor,  # (3,) of the advantages of the whole rollout, all ranks
) -> Tensor:  # (P, G)
    """(a - mean) / (std + 1e-4); 0 without a reward, and everywhere if the batch has fewer than two.

    Sums weighted by completion length give every token one vote instead of every completion.
    """
    mean, deviation = mean_of(total_moments), std_of(total_moments)
    return ((advantage.double() - mean) / (deviation + EPSILON)).nan_to_num(nan=0.0).to(advantage.dtype)


# The registry.


class Rewards(Protocol):
    """Rewards of P groups that an estimator may read (trainer.rl.groups.Rollout has more)."""

    weights: Tensor  # (K,)
    reward: Tensor  # (P, G) weighted sum, minus beta KL with kl_in_reward; NaN = no reward applies

    @property
    def rewards(self) -> Tensor: ...  # (P, G, K) each reward of each completion; NaN = it does not apply
    @property
    def completions(self) -> Sequence[Any]: ...  # B completions in group order: ids, mask, trained, text
    @property
    def all_sum(self) -> Callable[[Tensor], Tensor]: ...  # sums a tensor over the ranks that have groups of the rollout


Advantage = Tensor | Sequence[Any]  # (P, G), or for each of the B completions one number per id


@dataclass(frozen=True)
class AdvantageEstimator:
    """One --advantage-estimator."""

    estimate: Callable[..., Advantage]
    """(Rewards, *, options) -> (P, G), or one tensor per completion with a number for each of its ids."""
    reads_total: bool = True
    """False: kl_in_reward, which changes the sum of rewards, is rejected."""
    nonnegative: bool = False
    """True: rewards below 0 are rejected."""
    across_groups: bool = False
    """True: a group alone does not determine its advantages; dynamic sampling and replay pass the whole rollout."""
    fewest_generations: int = 2
    """1: a completion need not be compared with others of its prompt."""

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        """Keyword-only parameters of the function: flags, or keys of --advantage-kwargs."""
        return options_of(self.estimate)

    def __call__(self, r: Rewards, **options: Any) -> Advantage:
        return self.estimate(r, **options)


def group(r: Rewards, *, scale_rewards: Literal["group", "batch", "none"] = "group") -> Tensor:  # (P, G)
    batch = r.all_sum(moments(r.reward)) if scale_rewards == "batch" else None
    return group_advantage(r.reward, scale=scale_rewards, batch=batch)


def leave_one_out(r: Rewards) -> Tensor:  # (P, G)
    return leave_one_out_advantage(r.reward)


def opo(r: Rewards) -> Tensor:  # (P, G)
    """r - b with b = sum l r / sum l over the group, l the trained tokens of a completion: OPO's optimal baseline.

    Hao et al. 2025 (arXiv:2505.23585; the authors' `opo` in verl, pull request 1796): the baseline with the least
    gradient variance weights each reward by |grad log pi(y)|^2. That is proportional to l if tokens have orthogonal
    gradients of equal size. A group with a single reward has advantage 0 here, and the reward in verl.
    """
    length = torch.where(r.reward.isnan(), 0.0, trained_tokens(r))
    baseline = (length * r.reward).nansum(dim=1, keepdim=True) / length.sum(dim=1, keepdim=True)
    return torch.where(has_signal(r.reward).unsqueeze(1), r.reward - baseline, 0.0).nan_to_num(nan=0.0)


def max_rl(r: Rewards) -> Tensor:  # (P, G)
    """(r_j - p) / p with p = mean_g r, 0 if p = 0: MaxRL (Tajwar et al. 2026, arXiv:2602.02710, Algorithm 1, line 8).

    With rewards of 0 and 1, p is the success rate of the N completions. The mean of r / p grad log pi, over successes
    alone, is an unbiased estimate of the gradient of sum_k pass@k / k over k <= N (Theorem 2), for N -> inf that of
    log p. Subtracting the mean of grad log pi would keep the order N; it is also 0 in groups without success, so the
    order is N - 1 (a test enumerates the outcomes). GRPO's divisor is sqrt(p (1 - p)), so MaxRL gives prompts that
    rarely succeed more weight. prime-rl computes the same (pull request 2778); the authors' code (tajwarfahim/maxrl)
    divides by p + 1e-6.
    """
    mean = r.reward.nanmean(dim=1, keepdim=True)
    return torch.where(has_signal(r.reward).unsqueeze(1), (r.reward - mean) / mean, 0.0).nan_to_num(nan=0.0)


def reinforce_plus_plus(r: Rewards) -> Tensor:  # (P, G)
    """(r - mean r) / std r, mean and deviation over all tokens of the rollout: REINFORCE++ without a KL.

    Hu et al. 2025 (arXiv:2501.03262; `reinforce_plus_plus` in verl with a discount of 1, and `reinforce` in OpenRLHF,
    whose deviation divides by n, not n - 1). Each token has the advantage of its completion and counts once, so the
    statistics weight a reward by the length of its completion. A group of equal rewards has signal if other groups of
    the rollout have other rewards. The paper subtracts the KL of a token and those after it from its reward before
    normalizing; here a KL is a term of the loss.
    """
    return _normalize_tokens(r, r.reward)


def reinforce_plus_plus_baseline(r: Rewards) -> Tensor:  # (P, G)
    """reinforce_plus_plus of r - mean_g r: REINFORCE++ with a group baseline, the variant for reasoning tasks.

    Section 3.2 of version 9, with a k2 KL in the loss; `reinforce_plus_plus_baseline` in verl.
    """
    centred = group_advantage(r.reward, scale="none")  # exactly 0 if all rewards are equal
    return _normalize_tokens(r, torch.where(r.reward.isnan(), torch.nan, centred))


def _normalize_tokens(r: Rewards, x: Tensor) -> Tensor:  # (P, G)
    total = r.all_sum(moments(x, weight=trained_tokens(r)))
    advantage = normalize_batch(x, total)
    return torch.where(advantage.abs() < NOTHING, 0.0, advantage)  # equal rewards differ from their mean by rounding


def gdpo(r: Rewards) -> Tensor:  # (P, G)
    summed = normalize_then_sum(r.rewards, r.weights)
    advantage = normalize_batch(summed, r.all_sum(moments(summed)))
    return torch.where(advantage.abs() < NOTHING, 0.0, advantage)  # the mean is 0 only up to rounding


def trained_tokens(r: Rewards) -> Tensor:  # (P, G)
    return torch.tensor([float(c.trained) for c in r.completions]).view_as(r.reward).to(r.reward)


ADVANTAGE_ESTIMATORS = {
    "group": AdvantageEstimator(group),
    "leave_one_out": AdvantageEstimator(leave_one_out),
    "opo": AdvantageEstimator(opo),
    "max_rl": AdvantageEstimator(max_rl, reads_total=False, nonnegative=True),
    "reinforce_plus_plus": AdvantageEstimator(
        reinforce_plus_plus, reads_total=False, across_groups=True, fewest_generations=1
    ),
    "reinforce_plus_plus_baseline": AdvantageEstimator(
        reinforce_plus_plus_baseline, reads_total=False, across_groups=True
    ),
    "normalize_then_sum": AdvantageEstimator(gdpo, reads_total=False),
}


# Statistics of groups.


def nan_std(
    x: Tensor,  # (..., G) values; NaN = absent
    *,
    dim: int,
) -> Tensor:
    """Sample standard deviation (ddof = 1) over the values present; NaN with fewer than two."""
    count = (~x.isnan()).sum(dim=dim)
    centred = x - x.nanmean(dim=dim, keepdim=True)
    variance = centred.square().nansum(dim=dim) / (count - 1)
    return torch.where(count > 1, variance.sqrt(), torch.nan)


def has_signal(
    reward: Tensor,  # (P, G) one reward or their sum; NaN = this completion has none
) -> Tensor:  # (P,) bool
    """True if two completions of the group differ. Exact: r - mean of equal rewards may leave a rounding residue."""
    highest = torch.where(reward.isnan(), -torch.inf, reward).amax(dim=1)
    lowest = torch.where(reward.isnan(), torch.inf, reward).amin(dim=1)
    return highest > lowest


def zero_std_frac(
    reward: Tensor,  # (P, G) total reward, or one of several; NaN = this completion has none
) -> Tensor:  # ()
    """Fraction of groups without signal: all rewards equal, or fewer than two of them."""
    std = nan_std(reward, dim=1)
    return (std.isnan() | (std < 1e-8)).to(reward.dtype).mean()


# Statistics of the whole batch, over all ranks.


@torch.no_grad()
def moments(
    x: Tensor,  # (...) values; NaN = absent
    weight: Tensor | None = None,  # (...) how often each value counts; None: once
) -> Tensor:  # (3,) float64: count, sum, sum of squares
    present = ~x.isnan()
    value = torch.where(present, x, 0.0).double()
    weight = present.double() if weight is None else torch.where(present, weight, 0).double()
    return torch.stack([weight.sum(), (weight * value).sum(), (weight * value.square()).sum()])


def mean_of(
    total_moments: Tensor,  # (3,) moments summed over everything
) -> Tensor:  # ()
    """Mean; NaN if nothing was counted."""
    return total_moments[1] / total_moments[0]


def std_of(
    total_moments: Tensor,  # (3,) moments summed over everything
) -> Tensor:  # ()
    """Sample standard deviation (ddof = 1); NaN with fewer than two values."""
    count, total, squares = total_moments.unbind()
    variance = (squares - total.square() / count) / (count - 1)
    return torch.where(count > 1, variance.clamp(min=0).sqrt(), torch.nan)


def effective_sample_frac(
    total_moments: Tensor,  # (3,) moments of importance weights, summed over everything
) -> Tensor:  # ()
    """(sum w)^2 / (n sum w^2): 1 if all weights are equal, 1/n if one has everything; NaN without weights."""
    count, total, squares = total_moments.unbind()
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
