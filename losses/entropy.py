"""Adaptive entropy coefficient, and training on the most uncertain tokens only.

    bonus     -coef * mean of H over the tokens that count (trainer/methods/grpo.py)
    adaptive  after a step with mean entropy e: coef + delta if e < target, coef - delta if e > target, at least 0; the
              next step has a bonus only if e <= target (He et al. 2025, Skywork-OR1, arXiv:2505.22312)
    top mask  keep a token if H >= threshold, the (1 - top) quantile of H over all trained tokens of the step
              (Wang et al. 2025, arXiv:2506.01939)

The threshold is computed once per step, over all micro-batches and ranks, before the loss runs. Dropped tokens have
weight 0 in the policy loss but still count in its divisor; the bonus counts kept tokens only.

Two copies of a completion have equal entropies up to rounding, so an exact comparison with the threshold would keep
one copy and drop the other. trainer/parallel/quantile.py therefore lowers the threshold by slightly more than the
rounding error.

Shapes: N = trained tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from losses.types import wide


def adapted_coef(coef: float, entropy: float, *, target: float, delta: float, most: float | None = None) -> float:
    """Coefficient for the next step, from the mean entropy of this one."""
    coef += delta * ((entropy < target) - (entropy > target))
    return min(max(coef, 0.0), math.inf if most is None else most)


@torch.no_grad()
def entropy_threshold(
    entropy: Tensor,  # (N,) of every trained token of the step, over all ranks
    *,
    top: float,
) -> Tensor:  # ()
    """The (1 - top) quantile, interpolated linearly; -inf for no tokens. torch.quantile limits the input size."""
    if not 0 < top <= 1:
        raise ValueError(f"top_entropy_quantile={top}: must be above 0 and at most 1; 1 trains on every token")
    if len(entropy) == 0:
        return wide(entropy).new_full((), -math.inf)
    position = (1 - top) * (len(entropy) - 1)
    below = math.floor(position)
    ordered = wide(entropy).sort().values  # kthvalue has no deterministic form on CUDA
    low, high = ordered[below], ordered[min(below + 1, len(entropy) - 1)]
    return torch.lerp(low, high, position - below)


def keep_top_entropy(
    entropy: Tensor,  # (N,)
    threshold: Tensor,  # () from entropy_threshold
) -> Tensor:  # (N,) bool
    return entropy.detach() >= threshold
