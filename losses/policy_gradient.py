"""Clipped surrogate at token level (PPO, Schulman et al. 2017; GRPO, Shao et al. 2024; clip-higher, Yu et al. 2025).

    ratio_n = exp(logp_n - old_logp_n)
    loss_n  = -min(ratio_n A_n, clip(ratio_n, 1 - epsilon_low, 1 + epsilon_high) A_n)

Neither branch bounds a bad token (A < 0) that has become far more likely: its loss is ratio * |A|. Two options do:

    delta      two-sided clip (INTELLECT-2, arXiv:2505.07291): min(ratio, delta) instead of ratio in the first branch
    dual_clip  dual clip (Ye et al. 2020, arXiv:1912.09729): the loss is at most dual_clip * |A| where A < 0

Beyond the bound such a token has no gradient. Above 1 + epsilon_high the two are the same function.

The sum is over trained tokens. Divided by the number of trained tokens of the whole step, it is DAPO's normaliser:
every token weighs the same, whatever the length of its completion. Other normalisers: losses.group_policy.

Shapes: N = packed tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from losses.kl import MAX_LOG_RATIO
from losses.types import LossOut, Term


def clipped_surrogate(
    logp: Tensor,  # (N,) policy, with gradient
    old_logp: Tensor,  # (N,) policy that sampled
    advantage: Tensor,  # (N,) advantage of each token's completion
    mask: Tensor,  # (N,) bool, True = trained
    *,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None = None,
    dual_clip: float | None = None,
) -> LossOut:
    dtype = torch.promote_types(logp.dtype, torch.float32)
    ratio = token_log_ratio(logp, old_logp, mask).exp()  # (N,)
    advantage = torch.where(mask, advantage.to(dtype), 0.0)
    bounds = {"epsilon_low": epsilon_low, "epsilon_high": epsilon_high, "delta": delta, "dual_clip": dual_clip}
    loss = clip_loss(ratio, advantage, **bounds)  # (N,)
    count = mask.sum()
    with torch.no_grad():
        metrics = {
            "policy/clip_frac": (torch.stack(clipped_tokens(ratio, advantage, **bounds)).any(0).to(dtype).sum(), count),
            "policy/ratio": ((ratio * mask).sum(), count),
        }
    return LossOut({"policy": Term(1.0, loss.sum(), count)}, metrics)


def decoupled_surrogate(
    logp: Tensor,  # (N,) policy, with gradient
    proximal_logp: Tensor,  # (N,) policy the step starts from: where the clip range is centred
    behaviour_logp: Tensor,  # (N,) policy that sampled, possibly several steps older
    advantage: Tensor,  # (N,) advantage of each token's completion
    mask: Tensor,  # (N,) bool, True = trained
    *,
    epsilon_low: float,
    epsilon_high: float,
    cap: float,
) -> LossOut:
    """Decoupled PPO (Hilton et al. 2021, arXiv:2110.00641; AReaL, arXiv:2505.24298) for stale samples.

        loss_n = -sg[min(exp(proximal - behaviour), cap)] min(r A, clip(r) A),   r = exp(logp - proximal)

    The same as losses.group_policy.dapo with the log-ratio to the proximal policy and the weight token_truncate of the
    mismatch between proximal and behaviour; written out here once as a whole.
    """
    dtype = torch.promote_types(logp.dtype, torch.float32)
    ratio = token_log_ratio(logp, proximal_logp, mask).exp()  # (N,)
    weight = token_log_ratio(proximal_logp, behaviour_logp, mask).exp().detach().clamp(max=cap)  # (N,)
    advantage = torch.where(mask, advantage.to(dtype), 0.0)
    loss = weight * clip_loss(ratio, advantage, epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    return LossOut({"policy": Term(1.0, loss.sum(), mask.sum())}, {})


def token_log_ratio(
    logp: Tensor,  # (N,) policy, with gradient
    old_logp: Tensor,  # (N,) policy to compare with
    mask: Tensor,  # (N,) bool, True = trained
) -> Tensor:  # (N,) 0 where masked
    # Zero it before exp: a masked position may hold any value, even NaN.
    dtype = torch.promote_types(logp.dtype, torch.float32)
    return torch.where(mask, logp.to(dtype) - old_logp.to(dtype), 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clip_loss(
    ratio: Tensor,  # (N,) of token or sequence, with gradient
    advantage: Tensor,  # (N,)
    *,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None = None,
    dual_clip: float | None = None,
) -> Tensor:  # (N,)
    """-min(ratio A, clip(ratio) A), bounded for A < 0 by delta or dual_clip if given."""
    if delta is not None and delta <= 1 + epsilon_high:
        raise ValueError(f"delta={delta}: must be above 1 + epsilon_high = {1 + epsilon_high}; INTELLECT-2 has 4")
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip={dual_clip}: must be above 1, else tokens on policy have no gradient; try 3")
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    loss = -torch.minimum(bounded * advantage, ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * advantage)
    if dual_clip is not None:
        loss = torch.where(advantage < 0, torch.minimum(loss, -dual_clip * advantage), loss)
    return loss


class ClippedTokens(NamedTuple):
    """Tokens without gradient: beyond the edge in the direction their advantage pushes. All (N,) bool."""

    low: Tensor  # ratio below the range, A < 0
    high: Tensor  # ratio above the range, A > 0
    capped: Tensor  # ratio above delta or dual_clip, A < 0


@torch.no_grad()
def clipped_tokens(
    ratio: Tensor,  # (N,)
    advantage: Tensor,  # (N,) 0 where masked
    *,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None = None,
    dual_clip: float | None = None,
) -> ClippedTokens:
    cap = min((x for x in (delta, dual_clip) if x is not None), default=float("inf"))
    return ClippedTokens(
        low=(ratio < 1 - epsilon_low) & (advantage < 0),
        high=(ratio > 1 + epsilon_high) & (advantage > 0),
        capped=(ratio > cap) & (advantage < 0),
    )
