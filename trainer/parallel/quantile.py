"""Exact order statistics over all ranks, from sums over ranks alone.

The k-th smallest is found by radix selection: floats are mapped to integers of the same order, all ranks count the
leading 16-bit digits of their values, the summed counts give the digit, and values with another digit are dropped.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainer.parallel.comm import all_sum

DIGIT = 1 << 16
# Float32 entropies of the same token differ between layouts (shared prompts, micro-batch size, padding) by up to 1e-5
# relative; this is ten times that. A relative bound also fits small entropies: a logit error has the same relative size
# in 1 - p, and so in the entropy.
TOLERANCE = 1e-4


def tolerance_of(dtype: torch.dtype) -> float:
    """Relative error of an entropy from rounding, for a model that computes in `dtype`.

    At least one rounding of that dtype: 0.8 % for bfloat16. There the same token sometimes differs by a few percent, as
    its log-prob does, so which tokens are close to the threshold depends on the layout, as the gradient does.
    """
    return max(TOLERANCE, torch.finfo(dtype).eps)


@torch.no_grad()
def top_threshold(
    x: Tensor,  # (N,) of this rank
    *,
    top: float,
    tolerance: float = 0.0,
) -> Tensor:  # ()
    """The (1 - top) quantile of the values of all ranks, interpolated linearly; -inf if there is no value.

    The threshold is lowered by `tolerance`, relative, so that values just below it count as equal.
    """
    count = int(all_sum(torch.tensor(len(x), device=x.device)))
    if count == 0:
        return x.new_tensor(-math.inf)
    position = (1 - top) * (count - 1)
    below = math.floor(position)
    low, high = kth_smallest(x, below), kth_smallest(x, min(below + 1, count - 1))
    found = torch.lerp(low, high, position - below)
    return found - tolerance * found.abs()


@torch.no_grad()
def kth_smallest(
    x: Tensor,  # (N,) of this rank, float32 or float64
    k: int,  # counts from 0, over all ranks
) -> Tensor:  # ()
    left, value = _to_ordered(x), 0
    for shift in range(x.element_size() * 8 - 16, -1, -16):
        digit = (left >> shift) & (DIGIT - 1)
        counts = all_sum(torch.bincount(digit, minlength=DIGIT)).cumsum(0)  # (DIGIT,) numbers up to each digit
        found = int((counts <= k).sum())
        assert found < DIGIT, (k, int(counts[-1]))
        k -= int(counts[found - 1]) if found else 0
        left, value = left[digit == found], value << 16 | found
    return _from_ordered(value, x)


def _to_ordered(x: Tensor) -> Tensor:  # (N,) int64
    """Unsigned integers in the order of the floats."""
    if x.dtype == torch.float64:
        bits, sign = x.view(torch.int64), -(1 << 63)
        return torch.where(bits < 0, ~bits, bits ^ sign)
    assert x.dtype == torch.float32, x.dtype
    bits = x.view(torch.int32).long() & 0xFFFFFFFF
    return torch.where(bits >> 31 == 1, ~bits & 0xFFFFFFFF, bits ^ (1 << 31))


def _from_ordered(value: int, like: Tensor) -> Tensor:  # ()
    size = like.element_size() * 8
    top = 1 << (size - 1)
    bits = value ^ top if value & top else ~value & ((1 << size) - 1)
    signed = bits - (1 << size) if bits & top else bits
    dtype = torch.int64 if size == 64 else torch.int32
    return torch.tensor(signed, dtype=dtype, device=like.device).view(like.dtype)
