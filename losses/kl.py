"""Per-token estimators of KL(policy || reference) from samples of the policy (Schulman 2020, "Approximating KL").

    d  = ref_logp - logp
    k1 = -d                unbiased, may be negative
    k2 = d^2 / 2           biased, low variance, its gradient is that of the true KL
    k3 = exp(d) - d - 1    unbiased, never negative

As an unweighted loss term, on policy, k2 has the gradient of the KL; k3 has a biased one, beta (1 - exp(d)); k1 has
none: its gradient is 1 for every token, which is zero on average. Weighted by the ratio r = exp(logp - old_logp) to the
sampling policy, each has the gradient of the reverse KL, on policy or off:

    k1  r k1        gradient r (1 - d), where the 1 is noise of mean zero
    k2  sg[r] k2    gradient -r d; without sg[] it would be the gradient of another quantity
    k3  r k3        gradient -r d

Large values, with L = 20 nats (in fp32, exp overflows at 88 and its square at 44):

    d > L           k3 uses exp(L) for exp(d): its value stays at exp(L) - L - 1, its gradient at 1 - exp(L)
    d < -L          k3 is exact: value |d| - 1, gradient 1
    |log r| > L     r stays at exp(L) or exp(-L), in values and gradients
    any d           k1 and k2 are exact, and so is the gradient -r d of the weighted k3; its value uses k3 as above

Shapes: N = packed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Estimator = Callable[[Tensor, Tensor], Tensor]  # (N,) policy, (N,) reference -> (N,)

MAX_LOG_RATIO = 20.0  # exp(20) is 5e8: larger ratios carry no information, and fp32 would overflow


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
    """Clamped above only; beyond the clamp the gradient keeps its value there, so the token is still pulled back.

    Below, nothing overflows: exp(d) goes to 0 and the gradient to 1.
    """
    d = ref_logp - logp
    low = d.clamp(max=MAX_LOG_RATIO)
    slope = math.expm1(MAX_LOG_RATIO) * torch.relu(d - MAX_LOG_RATIO)  # 0 up to the clamp
    return torch.expm1(low) - low + (slope - slope.detach())  # expm1: never negative, even where exp(d) - 1 would round


KL_ESTIMATORS: dict[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3}


def _weighted(estimate: Tensor, logp: Tensor, old_logp: Tensor, ref_logp: Tensor, estimator: Estimator) -> Tensor:
    """ratio * estimate, with its gradient written out because autograd's product rule would cancel.

    For k3 the product rule gives r (exp(d) - d - 1) + r (1 - exp(d)), two large numbers whose sum is -r d: the gradient
    of sg[r] k2. For k1 it gives r (1 - d): the gradient of sg[r] (k1 + k2).
    """
    ratio = (logp - old_logp).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    slope = k2(logp, ref_logp) + (k1(logp, ref_logp) if estimator is k1 else 0.0)
    return ratio * (estimate.detach() + (slope - slope.detach()))


def token_kl(
    logp: Tensor,  # (N,) policy, with gradient
    old_logp: Tensor,  # (N,) sampling policy
    ref_logp: Tensor,  # (N,) reference
    *,
    estimator: Estimator = k3,
    ratio_weighted: bool = True,
) -> Tensor:  # (N,)
    """KL estimate of each token, weighted by its ratio to the sampling policy so that the gradient is unbiased."""
    estimate = estimator(logp, ref_logp)
    return _weighted(estimate, logp, old_logp, ref_logp, estimator) if ratio_weighted else estimate


def reward_minus_kl(
    reward: Tensor,  # (B,) total reward; NaN = this completion has none
    kl: Tensor,  # (B,) k1 of the sampling policy, summed over each completion's trained tokens
    *,
    beta: float,
) -> Tensor:  # (B,)
    """KL as a cost in the reward, before the advantage (RLOO, Ahmadian et al. 2024); the loss then has no KL term."""
    return reward - beta * kl
