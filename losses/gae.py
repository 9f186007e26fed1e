"""Per-token advantages from a critic (PPO): generalised advantage estimation, and the loss of the critic.

    delta_t = r_t + gamma V_t+1 - V_t,      V is 0 after the last token
    A_t     = delta_t + gamma lam A_t+1                                  (Schulman et al. 2015, arXiv:1506.02438)
    R_t     = A_t + V_t                                                  the target of the critic

lam 0 gives delta_t; lam 1 gives the discounted return from t on, minus V_t. V_t is the value before token t is sampled,
so it does not depend on that token.

Only tokens that the policy sampled are time steps. Across a gap in the mask (tool output between two turns), V_t+1 and
A_t+1 belong to the next trained token, and the gap is not discounted. Rewards in a gap are ignored.

A completion that was truncated at its maximum length ends there: no value is bootstrapped, because its reward was
given for the truncated text.

Shapes: B completions, T tokens of the longest completion, N = packed trained tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from losses.advantage import mean_of, std_of
from losses.types import wide

EPSILON = 1e-8


class Estimate(NamedTuple):
    advantage: Tensor  # (B, T) 0 where masked
    target: Tensor  # (B, T) the critic's target, advantage + value; 0 where masked


def token_rewards(
    reward: Tensor,  # (B,) completion reward
    mask: Tensor,  # (B, T) bool, True = trained
    kl: Tensor | None = None,  # (B, T) k1 to the reference; None: no KL cost
    *,
    beta: float = 0.0,
) -> Tensor:  # (B, T) 0 where masked
    """Put the completion reward at the last trained token, and subtract beta times the KL of each token."""
    num_remaining = mask.flip(1).cumsum(1).flip(1)  # trained tokens from here on
    rewards = torch.where(mask & (num_remaining == 1), wide(reward).unsqueeze(1), 0.0)
    return rewards if kl is None else rewards - torch.where(mask, beta * wide(kl), 0.0)


def estimate_advantage(
    reward: Tensor,  # (B, T) token rewards
    value: Tensor,  # (B, T) value of the state before each token
    mask: Tensor,  # (B, T) bool, True = trained; masked rewards and values may be NaN
    *,
    gamma: float,
    lam: float,
) -> Estimate:
    dtype = torch.promote_types(wide(reward).dtype, wide(value).dtype)
    reward, value = (torch.where(mask, x.to(dtype), 0.0) for x in (reward, value))
    advantage = torch.zeros_like(value)
    next_value = next_advantage = value.new_zeros(len(value))  # (B,)
    for t in reversed(range(value.shape[1])):
        delta = reward[:, t] + gamma * next_value - value[:, t]
        current = delta + gamma * lam * next_advantage
        advantage[:, t] = torch.where(mask[:, t], current, 0.0)
        next_advantage = torch.where(mask[:, t], current, next_advantage)
        next_value = torch.where(mask[:, t], value[:, t], next_value)
    return Estimate(advantage, advantage + value)


def rewards_to_go(
    reward: Tensor,  # (B, T) token rewards
    mask: Tensor,  # (B, T) bool, True = trained
    *,
    gamma: float,
) -> Tensor:  # (B, T) 0 where masked
    """Return the discounted return from each token on; it does not depend on the critic."""
    return estimate_advantage(reward, torch.zeros_like(reward), mask, gamma=gamma, lam=1.0).target


def whiten(
    advantage: Tensor,  # (...)
    total_moments: Tensor,  # (3,) losses.advantage.moments of the advantages of all trained tokens and ranks
) -> Tensor:  # (...)
    """Scale to mean 0 and standard deviation 1; unchanged if fewer than two advantages or all of them equal."""
    mean, deviation = mean_of(total_moments), std_of(total_moments)
    if not deviation > 0:
        return advantage
    return ((advantage.double() - mean) / (deviation + EPSILON)).to(advantage.dtype)


def explained_variance(
    errors: Tensor,  # (3,) losses.advantage.moments of (return - value) over all trained tokens and ranks
    returns: Tensor,  # (3,) losses.advantage.moments of the returns
) -> Tensor:  # ()
    """1 - var(return - value) / var(return): 1 for a perfect critic, 0 for a constant; NaN if all returns are equal."""
    return torch.where(std_of(returns) > 0, 1 - (std_of(errors) / std_of(returns)).square(), torch.nan)
