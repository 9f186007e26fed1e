"""Masked negative log-likelihood, and DFT, which weighs each token by its own probability.

    nll = -sum_n mask_n logp_n / sum_n mask_n
    dft = -sum_n mask_n sg(exp(logp_n)) logp_n / sum_n mask_n

DFT: Wu et al. 2025 (arXiv:2508.05629); sg stops the gradient, so unlikely tokens pull less.

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


def dft_loss(
    logp: Tensor,  # (N,) policy log-prob of each token
    mask: Tensor,  # (N,) bool, True = trained
) -> LossOut:
    out = sft_loss(logp, mask)
    held = torch.where(mask, wide(logp), 0.0)  # (N,)
    nll, count = out.terms["nll"].sum, out.terms["nll"].count
    weighted = -(held.detach().exp() * held)  # (N,)
    return LossOut({"dft": Term(1.0, weighted.sum(), count)}, {"loss/nll": (nll.detach(), count)})
