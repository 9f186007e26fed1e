"""Per-token estimators of KL(policy || reference) from samples of the policy (Schulman 2020, "Approximating KL").

    d  = ref_logp - logp
    k1 = -d                unbiased, may be negative
    k2 = d^2 / 2           biased, low variance, its gradient is that of the true KL
    k3 = exp(d) - d - 1    unbiased, never negative

As a loss term k3 alone has a biased gradient, beta (1 - exp(d)); weighted by the differentiable ratio
exp(logp - old_logp) the gradient becomes beta * ratio * (logp - ref_logp), that of the reverse KL itself.

Shapes: N = packed tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from losses.types import LossOut, Term

MAX_LOG_RATIO = 20.0  # exp(20) is 5e8: beyond it a ratio says only "far away", and fp32 would overflow


def k1(
    logp: Tensor,  # (N,) policy
    ref_logp: Tensor,  # (N,) reference
) -> Tensor:  # (N,)
    return logp - ref_logp


def k2(
    logp: Tensor,  # (N,) policy
    ref_logp: Tensor,  # (N,) reference
) -> Tensor:  # (N,)
    return (ref_logp - logp).square() / 2


def k3(
    logp: Tensor,  # (N,) policy
    ref_logp: Tensor,  # (N,) reference
) -> Tensor:  # (N,)
    d = (ref_logp - logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(d) - d  # never below zero, also where exp(d) - 1 would round


def kl_penalty(
    logp: Tensor,  # (N,) policy, with gradient
    old_logp: Tensor,  # (N,) policy that sampled
    ref_logp: Tensor,  # (N,) reference
    mask: Tensor,  # (N,) bool, True = trained
    *,
    beta: float,
    ratio_weighted: bool = True,
) -> LossOut:
    """beta * k3, weighted by the ratio to the sampling policy so that its gradient is unbiased."""
    dtype = torch.promote_types(logp.dtype, torch.float32)
    logp, old_logp, ref_logp = (torch.where(mask, x.to(dtype), 0.0) for x in (logp, old_logp, ref_logp))
    estimate = k3(logp, ref_logp)  # (N,)
    weighted = estimate
    if ratio_weighted:
        weighted = estimate * (logp - old_logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    count = mask.sum()
    return LossOut(
        {"kl": Term(beta, weighted.sum(), count)},
        {"policy/ref_kl_k3": (estimate.detach().sum(), count)},
    )
