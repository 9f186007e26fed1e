"""Distillation over the whole vocabulary: the divergence between a student q and a teacher p.

`generalized_jsd` is the generalised Jensen-Shannon divergence of GKD (Agarwal et al. 2023, arXiv:2306.13649):

    m = beta p + (1 - beta) q
    D = beta KL(p || m) + (1 - beta) KL(q || m)            0 < beta < 1
    D = KL(p || q), forward                                beta = 0
    D = KL(q || p), reverse                                beta = 1

The ends are the limits of D / beta and D / (1 - beta). D itself tends to 0 there, so its gradient is small at a beta
close to an end. kernels/linear_kl.py computes the same from hidden states without storing logits; this is its slow
reference. The reverse KL on sampled tokens is in trainer/methods/opd.py.

Reverse KL over the student's top-k tokens is omitted on purpose: it ignores the mass outside them, and training on it
collapses (verl, pull request 5041).

Shapes: V = vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from losses.types import wide


def generalized_jsd(
    student_logits: Tensor,  # (..., V) with gradient
    teacher_logits: Tensor,  # (..., V) its gradient is not computed
    *,
    beta: float,
    temperature: float = 1.0,
) -> Tensor:  # (...,) in nats, fp32 or wider
    """D of each position. A logit of -inf is a probability of 0, with 0 log 0 = 0.

    Infinite only where it is so by definition: forward where q = 0 < p, reverse where p = 0 < q.
    """
    if not 0 <= beta <= 1:
        raise ValueError(f"beta={beta}: must be from 0 (forward KL) to 1 (reverse KL)")
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: must be above 0")
    log_q = torch.log_softmax(wide(student_logits) / temperature, dim=-1)
    log_p = torch.log_softmax(wide(teacher_logits.detach()) / temperature, dim=-1)
    if beta == 0:
        return _kl(log_p, log_q)
    if beta == 1:
        return _kl(log_q, log_p)
    # Where both are -inf, the gradient of logaddexp is NaN even if nothing uses its value.
    neither = (log_p == -torch.inf) & (log_q == -torch.inf)
    of_p, of_q = (torch.where(neither, 0.0, x) for x in (log_p + math.log(beta), log_q + math.log1p(-beta)))
    log_m = torch.logaddexp(of_p, of_q)
    return beta * _kl(log_p, log_m) + (1 - beta) * _kl(log_q, log_m)


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:  # (...,)
    """sum_v a (log a - log b), over the v with a > 0."""
    is_empty = log_a == -torch.inf
    log_a, log_b = (torch.where(is_empty, 0.0, x) for x in (log_a, log_b))
    return torch.where(is_empty, 0.0, log_a.exp() * (log_a - log_b)).sum(dim=-1)
