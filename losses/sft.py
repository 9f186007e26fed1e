"""Masked negative log-likelihood.

    loss = -sum_n mask_n logp_n / sum_n mask_n

Shapes: N = packed tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from losses.types import LossOut, Term, wide


def sft_loss(
    logp: Tensor,  # (N,) policy log-prob of each token
    mask: Tensor,  # (N,) bool, True = trained
) -> LossOut:
    # where() and not a product: a masked position may hold anything, even NaN.
    nll = -torch.where(mask, wide(logp), 0.0)  # (N,)
    count = mask.sum()
    return LossOut({"nll": Term(1.0, nll.sum(), count)}, {})
