"""Clipped surrogate at token level (PPO, Schulman et al. 2017; GRPO, Shao et al. 2024; clip-higher, Yu et al. 2025).

    ratio_n = exp(logp_n - old_logp_n)
    loss_n  = -min(ratio_n A_n, clip(ratio_n, 1 - epsilon_low, 1 + epsilon_high) A_n)

The sum is over trained tokens. Divided by the number of trained tokens of the whole step, it is DAPO's normaliser:
every token weighs the same, whatever the length of its completion.

Shapes: N = packed tokens.
"""

from __future__ import annotations

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
) -> LossOut:
    dtype = torch.promote_types(logp.dtype, torch.float32)
    # Zero the log-ratio before exp: a masked position may hold any value, even NaN.
    log_ratio = torch.where(mask, logp.to(dtype) - old_logp.to(dtype), 0.0)  # (N,)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()  # (N,)
    advantage = torch.where(mask, advantage.to(dtype), 0.0)
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    loss = -torch.minimum(ratio * advantage, clipped * advantage)  # (N,)
    count = mask.sum()
    with torch.no_grad():
        # A token is clipped when its gradient is: beyond the edge in the direction its advantage pushes.
        outside = ((ratio > 1 + epsilon_high) & (advantage > 0)) | ((ratio < 1 - epsilon_low) & (advantage < 0))
        metrics = {
            "policy/clip_frac": ((outside & mask).to(dtype).sum(), count),
            "policy/ratio": ((ratio * mask).sum(), count),
        }
    return LossOut({"policy": Term(1.0, loss.sum(), count)}, metrics)
