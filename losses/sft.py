"""Masked negative log-likelihood, and DFT, which weights each token by its probability.

    nll = -sum_n mask_n logp_n / sum_n mask_n
    dft = -sum_n mask_n sg(exp(logp_n)) logp_n / sum_n mask_n

DFT: Wu et al. 2025 (arXiv:2508.05629). sg stops the gradient, so unlikely tokens get smaller gradients.

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
    nll = -torch.where(mask, wide(logp), 0.0)  # (N,) select, do not multiply: a masked log-prob may be NaN
    return LossOut({"nll": Term(1.0, nll.sum(), mask.sum())}, {})


def dft_loss(
    logp: Tensor,  # (N,) policy log-prob of each token
    mask: Tensor,  # (N,) bool, True = trained
) -> LossOut:
    _, nll, count = sft_loss(logp, mask).terms["nll"]
    logp = torch.where(mask, wide(logp), 0.0)  # (N,)
    weighted = -(logp.detach().exp() * logp)  # (N,)
    return LossOut({"dft": Term(1.0, weighted.sum(), count)}, {"loss/nll": (nll.detach(), count)})
