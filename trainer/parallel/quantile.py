"""Order statistics of numbers that lie on several ranks, exact, from sums over ranks alone.

The k-th smallest is found digit by digit: floats are mapped to integers of the same order, all ranks count how many of
theirs have each leading digit of 16 bits, the sum of the counts tells the digit, and what has another is set aside.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainer.parallel.comm import all_sum

DIGIT = 1 << 16
# Between layouts (shared prompts or not, micro-batches of any size, padding) float32 entropies of the same token differ
# by up to 1e-5 of their size: ten times that. A relative bound fits small entropies too, where an error in a logit is
# one of the same relative size in 1 - p, and so in the entropy.
TOLERANCE = 1e-4


def tolerance_of(dtype: torch.dtype) -> float:
    """Part of an entropy that rounding may change, for a model that computes in `dtype`.

    At least one rounding of that dtype: 0.8 % for bfloat16. There the same token differs by a few percent now and then,
    as its log-prob does, so which tokens lie close to the threshold depends on the layout as the gradient does.
    """
    return max(TOLERANCE, torch.finfo(dtype).eps)


@torch.no_grad()
def top_threshold(
    x: Tensor,  # (N,) of this rank
    *,
    top: float,
    tolerance: float = 0.0,
) -> Tensor:  # ()
    """losses.entropy.entropy_threshold over all ranks: the (1 - top) quantile, interpolated; -inf of nothing.

    `tolerance` is the part of itself that it is lowered by: what lies that close below counts as equal.
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
    """Bits that order like the numbers when read without a sign."""
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
    whole = torch.int64 if size == 64 else torch.int32
    return torch.tensor(signed, dtype=whole, device=like.device).view(like.dtype)
