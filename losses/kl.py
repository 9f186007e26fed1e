"""Per-token estimators of KL(policy || reference) from samples of the policy (Schulman 2020, "Approximating KL").

    d  = ref_logp - logp
    k1 = -d                unbiased, may be negative
    k2 = d^2 / 2           biased, low variance, its gradient is that of the true KL
    k3 = exp(d) - d - 1    unbiased, never negative

As a loss term alone, on policy, k2 has the gradient of the KL; k3 has a biased one, beta (1 - exp(d)); k1 has none, its
gradient is 1 for every token and averages to nothing. Weighted by the ratio r = exp(logp - old_logp) to the policy that
sampled, each has the gradient of the reverse KL itself, on policy or off:

    k1  r k1        gradient r (1 - d), the 1 being noise of mean zero
    k2  sg[r] k2    gradient -r d; with a gradient through r it would be another quantity's
    k3  r k3        gradient -r d

Where numbers are large, with L = 20 nats (fp32 overflows at 88 in exp, at 44 in its square):

    d > L           k3 takes exp(L) for exp(d): its value stays at exp(L) - L - 1, its gradient at 1 - exp(L)
    d < -L          k3 is exact: value |d| - 1, gradient 1
    |log r| > L     r stays at exp(L) or exp(-L), in values and gradients
    any d           k1 and k2 are exact, and so is the gradient -r d of the weighted k3, whose value takes k3 as above

Shapes: N = packed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from losses.types import LossOut, Term

Estimator = Callable[[Tensor, Tensor], Tensor]  # (N,) policy, (N,) reference -> (N,)

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
    """Clamped above only. Beyond the clamp the gradient is that at the clamp, so a token far off is still pulled back.

    Below there is nothing to overflow: exp(d) goes to 0 and the gradient to 1.
    """
    d = ref_logp - logp
    low = d.clamp(max=MAX_LOG_RATIO)
    slope = math.expm1(MAX_LOG_RATIO) * torch.relu(d - MAX_LOG_RATIO)  # 0 up to the clamp
    return torch.expm1(low) - low + (slope - slope.detach())  # never below zero, also where exp(d) - 1 would round


KL_ESTIMATORS: dict[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3}


def kl_penalty(
    logp: Tensor,  # (N,) policy, with gradient
    old_logp: Tensor,  # (N,) policy that sampled
    ref_logp: Tensor,  # (N,) reference
    mask: Tensor,  # (N,) bool, True = trained
    *,
    beta: float,
    ratio_weighted: bool = True,
    estimator: Estimator = k3,
    share: Tensor | None = None,  # (N,) what each token counts, from losses.policy; None: 1
    count: Tensor | None = None,  # () what these tokens add to the term's count; None: their number
) -> LossOut:
    """beta * estimate, weighted by the ratio to the sampling policy so that its gradient is unbiased.

    The ratio is that of the token also where the policy loss uses one of the sequence, and no importance weight or
    off-policy mask applies. `share` and `count` give it the average of the policy term beside it.
    """
    dtype = torch.promote_types(logp.dtype, torch.float32)
    logp, old_logp, ref_logp = (torch.where(mask, x.to(dtype), 0.0) for x in (logp, old_logp, ref_logp))
    weighted = estimator(logp, ref_logp)  # (N,)
    if ratio_weighted:
        weighted = _weighted(weighted, logp, old_logp, ref_logp, estimator)
    if share is not None:
        weighted = weighted * torch.where(mask, share.to(dtype), 0.0)
    num_tokens = mask.sum()
    estimate = k3(logp.detach(), ref_logp)
    return LossOut(
        {"kl": Term(beta, weighted.sum(), num_tokens if count is None else count)},
        {"policy/ref_kl_k3": (estimate.sum(), num_tokens)},
    )


def _weighted(estimate: Tensor, logp: Tensor, old_logp: Tensor, ref_logp: Tensor, estimator: Estimator) -> Tensor:
    """The value is ratio * estimate. The gradient is written out, as differentiating the product cancels.

    For k3 the product rule gives r (exp(d) - d - 1) + r (1 - exp(d)), two large numbers whose sum is -r d: the gradient
    of sg[r] k2. For k1 it gives r (1 - d): the gradient of sg[r] (k1 + k2).
    """
    ratio = (logp - old_logp).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    slope = k2(logp, ref_logp) + (k1(logp, ref_logp) if estimator is k1 else 0.0)
    return ratio * (estimate.detach() + (slope - slope.detach()))


def reward_minus_kl(
    reward: Tensor,  # (B,) total reward; NaN = this completion has none
    kl: Tensor,  # (B,) k1 of the sampling policy, summed over each completion's trained tokens
    *,
    beta: float,
) -> Tensor:  # (B,)
    """KL as a cost in the reward, before the advantage (RLOO, Ahmadian et al. 2024): then the loss has no KL term."""
    return reward - beta * kl
