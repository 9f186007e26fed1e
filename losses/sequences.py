"""Numbers of whole completions, for losses that see only some tokens at a time.

The head hands a loss a slice of trained tokens, cut anywhere (kernels.linear_logprob_loss). Whatever the loss must know
of a completion as a whole is therefore computed before the pass, over whole completions and without gradient, and given
to it once per token: `sequence_sum(x, mask, sequence, num_sequences=B)[sequence]`.

Shapes: N = packed tokens, B = completions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from losses.preference import wide


@torch.no_grad()
def sequence_sum(
    x: Tensor,  # (N,) per token; masked positions may hold anything
    mask: Tensor,  # (N,) bool, True = trained
    sequence: Tensor,  # (N,) int64, which completion a token is of
    *,
    num_sequences: int,
) -> Tensor:  # (B,)
    value = torch.where(mask, wide(x), 0.0)
    return value.new_zeros(num_sequences).index_add(0, sequence, value)


@torch.no_grad()
def sequence_length(
    mask: Tensor,  # (N,) bool, True = trained
    sequence: Tensor,  # (N,) int64, which completion a token is of
    *,
    num_sequences: int,
) -> Tensor:  # (B,) int64 trained tokens of each completion
    return torch.zeros(num_sequences, dtype=torch.int64, device=mask.device).index_add(0, sequence, mask.long())


def sequence_mean(
    x: Tensor,  # (N,) per token; masked positions may hold anything
    mask: Tensor,  # (N,) bool, True = trained
    sequence: Tensor,  # (N,) int64, which completion a token is of
    *,
    num_sequences: int,
) -> Tensor:  # (B,) 0 where a completion has no trained token
    total = sequence_sum(x, mask, sequence, num_sequences=num_sequences)
    return total / sequence_length(mask, sequence, num_sequences=num_sequences).clamp(min=1)
