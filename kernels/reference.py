"""Slow references: the specification of the kernels in plain torch, for any float dtype, for tests."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kernels.linear_kl import Head


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
    logp = _logits(hidden, weight, bias, scale, softcap, temperature).log_softmax(dim=-1)  # (N, V)
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
    """Log of the sum of squared probabilities."""
    return _logits(hidden, weight, bias, scale, softcap, temperature).softmax(dim=-1).square().sum(dim=-1).log()


def linear_kl(
    hidden: Tensor,  # (N, D) student
    head: Head,
    teacher_hidden: Tensor,  # (N, E)
    teacher_head: Head,
    *,
    beta: float,
    temperature: float = 1.0,
) -> Tensor:  # (N,)
    """beta KL(p || m) + (1 - beta) KL(q || m) for student q and teacher p, with m = beta p + (1 - beta) q.

    beta 0 is KL(p || q), and beta 1 is KL(q || p).
    """
    q = _logits(hidden, *head, temperature).log_softmax(dim=-1)  # (N, V) log-probs
    p = _logits(teacher_hidden, *teacher_head, temperature).log_softmax(dim=-1)
    if beta == 0:
        return (p.exp() * (p - q)).sum(dim=-1)
    if beta == 1:
        return (q.exp() * (q - p)).sum(dim=-1)
    m = torch.logaddexp(p + math.log(beta), q + math.log(1 - beta))
    return (beta * p.exp() * (p - m) + (1 - beta) * q.exp() * (q - m)).sum(dim=-1)


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float, softcap: float | None, temperature: float
) -> Tensor:  # (N, V)
    z = hidden @ weight.T
    z = (z if bias is None else z + bias) * scale
    return (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature


def attention_mask(
    document: Tensor,  # (R, T) index of the document
    branch: Tensor,  # (R, T) index of the continuation; -1 = prompt, or a document without continuations
    position_ids: Tensor,  # (R, T) position in prompt + continuation
    *,
    window: int | None = None,
) -> Tensor:  # (R, 1, T, T) bool, True = visible
    """Build the mask of packed prompts and continuations: each position sees what it would see without packing."""
    rows, length = document.shape
    mask = torch.zeros(rows, 1, length, length, dtype=torch.bool)
    for r in range(rows):
        tokens = list(zip(document[r].tolist(), branch[r].tolist(), position_ids[r].tolist(), strict=True))
        for q, (q_document, q_branch, q_position) in enumerate(tokens):
            fork = min(position for doc, line, position in tokens if (doc, line) == (q_document, q_branch))
            for k, (doc, line, position) in enumerate(tokens):
                is_past = position <= q_position if line == q_branch else line == -1 and position < fork
                is_near = window is None or q_position - position < window
                mask[r, 0, q, k] = doc == q_document and is_past and is_near
    return mask


def attention(
    query: Tensor,  # (R, H, Q, K)
    key: Tensor,  # (R, H_kv, keys, K); H a multiple of H_kv
    value: Tensor,  # (R, H_kv, keys, K)
    mask: Tensor,  # (R, 1, Q, keys) bool, True = visible
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # (H,)
) -> Tensor:  # (R, H, Q, K)
    """softmax(scale * query @ key.T where the mask is True) @ value; each key head serves H / H_kv query heads.

    With sinks the softmax has one more column, the head's sink, which has no value.
    """
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    scores = scale * query @ key.transpose(2, 3)  # (R, H, Q, keys)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is None:
        return scores.softmax(dim=-1) @ value
    column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1] @ value
