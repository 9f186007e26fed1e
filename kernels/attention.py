"""Attention masks for packed batches.

Sequences lie end to end in one row; each position may look only at earlier positions of its own sequence. The mask is
dense here, (R, 1, T, T) booleans: right on every device and with a backward everywhere, at T^2 memory per row.

Padding (segment -1) looks at padding: a row of the mask with nothing to look at would make the softmax NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor


def packed_mask(
    segment_ids: Tensor,  # (R, T) sequence number of each position, -1 = padding
    *,
    window: int | None = None,
) -> Tensor:  # (R, 1, T, T) bool, True = may look
    """Block-diagonal causal mask; `window` limits how far back a position looks (sliding-window layers)."""
    length = segment_ids.shape[1]
    same = segment_ids.unsqueeze(2) == segment_ids.unsqueeze(1)  # (R, T, T)
    position = torch.arange(length, device=segment_ids.device)
    distance = position.unsqueeze(1) - position.unsqueeze(0)  # (T, T) how far back k lies from q
    allowed = distance >= 0
    if window is not None:
        allowed &= distance < window
    return (same & allowed).unsqueeze(1)
