"""Advantages of single tokens from a critic (PPO): generalised advantage estimation, and the loss of the critic itself.

    delta_t = r_t + gamma V_t+1 - V_t,      V behind the last token is 0
    A_t     = delta_t + gamma lam A_t+1                                  (Schulman et al. 2015, arXiv:1506.02438)
    R_t     = A_t + V_t                                                  the target of the critic

lam 0 gives delta_t; lam 1 gives what was earned from t on, discounted, minus V_t. V_t is the value before token t is
chosen, so it never sees that token.

Only tokens that the policy chose are steps in time. Where the mask has a gap (text that a tool wrote between two
turns), V_t+1 and A_t+1 are those of the next trained token, and the gap discounts nothing. Rewards in a gap are not
read: token_rewards puts none there.

A completion that was cut off at its maximal length ends there like any other: no value is added for what might have
followed, because its reward was given for the text as it is.

Shapes: B completions, T tokens of the longest, N = packed trained tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from losses.advantage import mean_of, std_of
from losses.types import LossOut, Term, wide

EPSILON = 1e-8


class Estimate(NamedTuple):
    """All (B, T), 0 where masked."""

    advantage: Tensor
    target: Tensor  # of the critic: advantage + value


def token_rewards(
    reward: Tensor,  # (B,) of each whole completion
    mask: Tensor,  # (B, T) bool, True = trained
    kl: Tensor | None = None,  # (B, T) k1 to the reference, as a cost; None: no cost
    *,
    beta: float = 0.0,
) -> Tensor:  # (B, T) 0 where masked
    """The reward of a completion at its last trained token, less beta times the KL of each token."""
    later = mask.flip(1).cumsum(1).flip(1)  # trained tokens from here on
    found = torch.where(mask & (later == 1), wide(reward).unsqueeze(1), 0.0)
    return found if kl is None else found - torch.where(mask, beta * wide(kl), 0.0)


def estimate_advantage(
    reward: Tensor,  # (B, T) of each token
    value: Tensor,  # (B, T) of the state before each token
    mask: Tensor,  # (B, T) bool, True = trained; other places may hold anything
    *,
    gamma: float,
    lam: float,
) -> Estimate:
    dtype = torch.promote_types(wide(reward).dtype, wide(value).dtype)
    reward, value = (torch.where(mask, x.to(dtype), 0.0) for x in (reward, value))
    advantage = torch.zeros_like(value)
    ahead_value = ahead = torch.zeros_like(value[:, 0]) if value.shape[1] else value.sum(1)  # (B,) of the next token
    for t in reversed(range(value.shape[1])):
        delta = reward[:, t] + gamma * ahead_value - value[:, t]
        here = delta + gamma * lam * ahead
        advantage[:, t] = torch.where(mask[:, t], here, 0.0)
        ahead = torch.where(mask[:, t], here, ahead)
        ahead_value = torch.where(mask[:, t], value[:, t], ahead_value)
    return Estimate(advantage, advantage + value)


def rewards_to_go(
    reward: Tensor,  # (B, T) of each token
    mask: Tensor,  # (B, T) bool, True = trained
    *,
    gamma: float,
) -> Tensor:  # (B, T) 0 where masked
    """What was earned from each token on, whatever the critic says."""
    return estimate_advantage(reward, torch.zeros_like(reward), mask, gamma=gamma, lam=1.0).target


def whiten(
    advantage: Tensor,  # (...)
    sums: Tensor,  # (3,) losses.advantage.moments of the advantages of all trained tokens and ranks
) -> Tensor:  # (...)
    """Mean 0 and deviation 1 over the rollout; as it is where fewer than two tokens are trained, or all are equal."""
    mean, deviation = mean_of(sums), std_of(sums)
    if not deviation > 0:
        return advantage
    return ((advantage.double() - mean) / (deviation + EPSILON)).to(advantage.dtype)


def clipped_value_loss(
    value: Tensor,  # (N,) with gradient
    old_value: Tensor,  # (N,) of the weights that the rollout started with
    target: Tensor,  # (N,)
    *,
    clip: float | None,  # how far a value may move from the old one; None: any distance
    coef: float = 1.0,
) -> LossOut:
    """0.5 max((v - R)^2, (clip(v) - R)^2) of each token, clip(v) within `clip` of the old value."""
    value = wide(value)
    old_value, target = old_value.to(value.dtype), target.to(value.dtype)
    error, count = (value - target).square(), torch.full((), float(len(value)), device=value.device)
    metrics = {}
    if clip is not None:
        near = torch.maximum(torch.minimum(value, old_value + clip), old_value - clip)
        clipped = (near - target).square()
        metrics["value/clip_frac"] = ((clipped > error).sum(), count)
        error = torch.maximum(error, clipped)
    return LossOut({"value": Term(coef, 0.5 * error.sum(), count)}, metrics)


def explained_variance(
    errors: Tensor,  # (3,) losses.advantage.moments of (what was earned - value), all trained tokens and ranks
    earned: Tensor,  # (3,) the same of what was earned
) -> Tensor:  # ()
    """1 - var(earned - value) / var(earned): 1 is a perfect critic, 0 one that is constant; NaN of equal returns."""
    return torch.where(std_of(earned) > 0, 1 - (std_of(errors) / std_of(earned)).square(), torch.nan)
