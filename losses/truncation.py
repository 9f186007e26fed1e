"""Completions that ran out of room: leave them out of the loss, or make length cost something before they do.

    soft overlong penalty (DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 13), L = max_length, C = margin, n = length:
        0 up to L - C,  (L - C - n) / C between,  -1 from L on

Shapes: N = packed tokens, B = completions.
"""

from __future__ import annotations

from torch import Tensor


def drop_truncated(
    mask: Tensor,  # (N,) bool, True = trained
    truncated: Tensor,  # (N,) bool, True = the token's completion did not end by itself
) -> Tensor:  # (N,) bool
    """Apply it before anything is counted: a dropped token is in no denominator, statistic or length."""
    return mask & ~truncated


def overlong_penalty(
    length: Tensor,  # (B,) tokens of each completion
    *,
    max_length: int,
    margin: int,
) -> Tensor:  # (B,) to add to the reward
    if not 0 < margin <= max_length:
        raise ValueError(f"margin={margin}: must be above 0 and at most max_length={max_length}")
    return ((max_length - margin - length.float()) / margin).clamp(-1, 0)
