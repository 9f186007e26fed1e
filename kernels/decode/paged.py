"""What the kernels of decode attention share: the rows of a step, and attention to one block of keys."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch may lack Triton
    triton = None

TILE_ROWS = 8
MAX_HEADS = 8  # query heads per program: 64 accumulator rows for a tile


class Rows(NamedTuple):
    """Tokens that each decode row attends to; tensors on the device, so that a captured step reads new values."""

    table: Tensor  # (B, pages) int32: pages of the prefix, then the row's own pages
    prefix_len: Tensor  # (B,) int32 tokens of the prefix; may be 0
    own_len: Tensor  # (B,) int32 own tokens, including the current one: at least 1
    tiles: Tensor  # (B, TILE_ROWS) int32 indices of rows that share a prefix, -1 = none; each row is in one tile


class Share(NamedTuple):
    """How programs divide the query heads. A tile has up to TILE_ROWS queries per head."""

    group: int  # query heads per key head
    heads: int  # per program, all of one key head
    programs: int  # for all heads
    lines: int  # queries of a tile per program, with those that only fill a product
    width: int  # head size in registers


def divide_heads(num_heads: int, key_heads: int, head_dim: int) -> Share:
    group = num_heads // key_heads
    heads = min(group, MAX_HEADS)
    lines, width = (max(16, 1 << (n - 1).bit_length()) for n in (TILE_ROWS * heads, head_dim))
    return Share(group, heads, key_heads * -(-group // heads), lines, width)


def scales(scale: float, softcap: float | None) -> tuple[float, float]:
    """Return factors of scores in units of log2: softcap2 * tanh(scale2 * query @ keys), without a cap the first."""
    return (scale / math.log(2.0), 1.0) if softcap is None else (scale / softcap, softcap / math.log(2.0))


@functools.cache
def counters(device: torch.device, number: int) -> Tensor:  # (number,) int32
    """Return zeros, which every call leaves as zeros. Calls on a device must not overlap."""
    return torch.zeros(number, dtype=torch.int32, device=device)


if triton is not None:
    HIDDEN = tl.constexpr(-1e30)  # added to the scores of keys that a line does not see
    NOTHING = tl.constexpr(
        -1e29
    )  # maximum over no keys: above hidden scores, finite, so that the difference of two is 0
    LN2 = tl.constexpr(math.log(2.0))

    @triton.jit
    def _attend_block(
        query, keys, values, slot, seen, bias, top, total, acc, key_place, value_place, scale2, softcap2,
        K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr,
    ):  # fmt: skip
        """Attend to consecutive slots: those `seen` (BLOCK,) by some line. `bias` (LINES, BLOCK) is 0, or hides keys.

        Exponents are in units of log2.
        """
        line, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, WIDTH)[None, :]
        seen = seen[:, None]  # other slots may contain NaN
        if K < WIDTH:
            seen = seen & (column < K)
        key = tl.load(keys + slot * key_place + (line * key_place + column), mask=seen, other=0.0)
        value = tl.load(values + slot * value_place + (line * value_place + column), mask=seen, other=0.0)
        if UPCAST:
            query, key, value = query.to(tl.float32), key.to(tl.float32), value.to(tl.float32)
        scores = tl.dot(query, key.T, input_precision="ieee") * scale2
        if SOFTCAP:
            shrunk = tl.exp2(tl.abs(scores) * (-2.0 / LN2))
            bound = (1.0 - shrunk) / (1.0 + shrunk) * softcap2
            scores = tl.where(scores < 0, -bound, bound)
        scores += bias
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
        return new_top, total, acc
