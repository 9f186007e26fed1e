"""The entropy threshold over all ranks, lowered by more than rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from losses.entropy import entropy_threshold
from trainer.parallel.comm import all_gather

# Float32 entropies of the same token differ between layouts (shared prompts, micro-batch size, padding) by a relative
# error of up to 1e-5; this is ten times that. A relative bound also fits small entropies: a logit error has the same
# relative size in 1 - p, and therefore in the entropy.
TOLERANCE = 1e-4


def tolerance_of(dtype: torch.dtype) -> float:
    """Return the relative rounding error of an entropy, for a model that computes in `dtype`.

    It is at least one rounding of that dtype: 0.8 % for bfloat16. In bfloat16 the entropy of a token may differ between
    layouts by a few percent, like its log-prob, so the layout affects which tokens pass the threshold.
    """
    return max(TOLERANCE, torch.finfo(dtype).eps)


@torch.no_grad()
def top_threshold(
    x: Tensor,  # (N,) this rank's values
    *,
    top: float,
    tolerance: float = 0.0,
) -> Tensor:  # ()
    """Return the (1 - top) quantile over all ranks, interpolated linearly; -inf if there are no values.

    The threshold is lowered by the relative `tolerance`, so that values just below it count as equal.
    """
    threshold = entropy_threshold(torch.cat(all_gather(x, "entropies")), top=top)
    return torch.where(threshold.isinf(), threshold, threshold - tolerance * threshold.abs())
