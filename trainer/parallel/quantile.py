"""The entropy threshold over all ranks, lowered by more than rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from losses.entropy import entropy_threshold
from trainer.parallel.comm import all_gather

# Float32 entropies of the same token differ between layouts (shared prompts, micro-batch size, padding) by up to 1e-5
# relative; this is ten times that. A relative bound also fits small entropies: a logit error has the same relative size
# in 1 - p, and so in the entropy.
TOLERANCE = 1e-4


def tolerance_of(dtype: torch.dtype) -> float:
    """Relative error of an entropy from rounding, for a model that computes in `dtype`.

    At least one rounding of that dtype: 0.8 % for bfloat16. There the same token sometimes differs by a few percent, as
    its log-prob does, so which tokens are close to the threshold depends on the layout, as the gradient does.
    """
    return max(TOLERANCE, torch.finfo(dtype).eps)


@torch.no_grad()
def top_threshold(
    x: Tensor,  # (N,) of this rank
    *,
    top: float,
    tolerance: float = 0.0,
) -> Tensor:  # ()
    """The (1 - top) quantile of the values of all ranks, interpolated linearly; -inf if there is no value.

    The threshold is lowered by `tolerance`, relative, so that values just below it count as equal.
    """
    found = entropy_threshold(torch.cat(all_gather(x, "entropies")), top=top)
    return torch.where(found.isinf(), found, found - tolerance * found.abs())
