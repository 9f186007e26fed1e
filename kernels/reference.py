"""The specification of every kernel: plain torch, no tricks, any float dtype. Tests compare the fast ones to these."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_logprob(
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    target: Tensor,  # (N,) int64
    *,
    bias: Tensor | None = None,  # (V,)
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:  # (N,) log-prob, (N,) entropy
    """log softmax(softcap(scale * (hidden @ weight.T + bias)) / temperature) at the target, and its entropy."""
    z = hidden @ weight.T
    z = (z if bias is None else z + bias) * scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    logp = (z / temperature).log_softmax(dim=-1)  # (N, V)
    entropy = -(logp.exp() * logp).sum(dim=-1)
    return logp.gather(1, target.unsqueeze(1)).squeeze(1), entropy


def linear_log_collision(
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    *,
    bias: Tensor | None = None,  # (V,)
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> Tensor:  # (N,)
    """log of the sum of squared probabilities."""
    z = hidden @ weight.T
    z = (z if bias is None else z + bias) * scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return (z / temperature).softmax(dim=-1).square().sum(dim=-1).log()


def packed_mask(
    segment_ids: Tensor,  # (R, T) sequence number of each position, -1 = padding
    *,
    window: int | None = None,
) -> Tensor:  # (R, 1, T, T) bool, True = may look
    """Position q sees position k when both belong to one sequence, k is not later, and lies within the window."""
    rows, length = segment_ids.shape
    mask = torch.zeros(rows, 1, length, length, dtype=torch.bool)
    for r in range(rows):
        for q in range(length):
            for k in range(q + 1):
                near = window is None or q - k < window
                mask[r, 0, q, k] = bool(segment_ids[r, q] == segment_ids[r, k]) and near
    return mask
