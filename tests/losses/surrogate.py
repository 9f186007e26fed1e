"""PPO's clipped surrogate of whole tensors in one call, by the record of dapo, and decoupled PPO written out."""

from __future__ import annotations

import torch
from torch import Tensor

from losses.policy import Tokens, clip_loss, dapo, token_log_ratio
from losses.types import LossOut, Term


def clipped_surrogate(
    logp: Tensor, old_logp: Tensor, advantage: Tensor, mask: Tensor, *, epsilon_low: float, **bounds: float
) -> LossOut:
    log_ratio = token_log_ratio(logp, old_logp, mask)
    return dapo(Tokens(logp, log_ratio, advantage, mask, torch.ones_like(log_ratio)), epsilon=epsilon_low, **bounds)


def decoupled_surrogate(
    logp: Tensor, proximal_logp: Tensor, behaviour_logp: Tensor, advantage: Tensor, mask: Tensor, *,
    epsilon_low: float, epsilon_high: float, cap: float,
) -> LossOut:  # fmt: skip
    """Decoupled PPO (Hilton et al. 2021, arXiv:2110.00641; AReaL, arXiv:2505.24298) for stale samples.

    loss_n = -sg[min(exp(proximal - behaviour), cap)] min(r A, clip(r) A),   r = exp(logp - proximal)
    """
    ratio = token_log_ratio(logp, proximal_logp, mask).exp()
    weight = token_log_ratio(proximal_logp, behaviour_logp, mask).exp().detach().clamp(max=cap)
    advantage = torch.where(mask, advantage, 0.0)
    loss = weight * clip_loss(ratio, advantage, epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    return LossOut({"policy": Term(1.0, loss.sum(), mask.sum())}, {})
