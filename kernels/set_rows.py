"""Products of each token's state with the rows of the head that its set names, and back.

    y  = dot_rows(hidden, weight, sets)          # y_nk  = sum_d h_nd w_id,d, where id = sets_nk
    dh = sum_rows(dy, weight, sets)              # dh_nd = sum_k dy_nk w_id,d

Sets are padded with -1. The kernels skip padding, so their cost is that of the ids in the sets, and add in float32 in a
fixed order. They run on CUDA, the `*_reference` functions elsewhere.
Shapes: N = tokens, K = ids per set, D = model width, V = vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch may lack Triton; the references run there
    triton = None

TILE_IDS, TILE_WIDTH = 16, 256


def dot_rows(
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    sets: Tensor,  # (N, K) int32
) -> Tensor:  # (N, K) float32 or wider; any finite number for padding
    return (dot_rows_kernel if _fits(weight) else dot_rows_reference)(hidden, weight, sets)


def sum_rows(
    dy: Tensor,  # (N, K) float32 or wider; 0 for padding
    weight: Tensor,  # (V, D)
    sets: Tensor,  # (N, K) int32
) -> Tensor:  # (N, D) in the dtype of the weight
    return (sum_rows_kernel if _fits(weight) else sum_rows_reference)(dy, weight, sets)


def dot_rows_reference(
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    sets: Tensor,  # (N, K) int32
) -> Tensor:  # (N, K)
    y = torch.bmm(weight[ids_of(sets)], hidden.unsqueeze(2)).squeeze(2)
    return y.to(torch.promote_types(y.dtype, torch.float32))


def sum_rows_reference(
    dy: Tensor,  # (N, K)
    weight: Tensor,  # (V, D)
    sets: Tensor,  # (N, K) int32
) -> Tensor:  # (N, D)
    return torch.bmm(dy.to(weight.dtype).unsqueeze(1), weight[ids_of(sets)]).squeeze(1)


def ids_of(
    sets: Tensor,  # (N, K) int32
) -> Tensor:  # (N, K) int64
    """The ids, with the first of a set as padding."""
    return torch.where(sets < 0, sets[:, :1], sets).long()


def _fits(weight: Tensor) -> bool:
    return weight.is_cuda and weight.dtype != torch.float64 and triton is not None


def dot_rows_kernel(
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    sets: Tensor,  # (N, K) int32
) -> Tensor:  # (N, K) float32
    hidden, sets = hidden.contiguous(), sets.contiguous()
    y = torch.zeros(sets.shape, dtype=torch.float32, device=sets.device)
    if y.numel():
        _dot_rows[len(sets), triton.cdiv(sets.shape[1], TILE_IDS)](
            hidden, weight.contiguous(), sets, y, *_sizes(weight, sets), num_warps=4
        )
    return y


def sum_rows_kernel(
    dy: Tensor,  # (N, K)
    weight: Tensor,  # (V, D)
    sets: Tensor,  # (N, K) int32
) -> Tensor:  # (N, D)
    sets = sets.contiguous()
    total = torch.empty(len(sets), weight.shape[1], dtype=weight.dtype, device=sets.device)
    if total.numel():
        _sum_rows[len(sets), triton.cdiv(weight.shape[1], TILE_WIDTH)](
            dy.contiguous(), weight.contiguous(), sets, total, *_sizes(weight, sets), num_warps=4
        )
    return total


def _sizes(weight: Tensor, sets: Tensor) -> tuple[int, ...]:
    return sets.shape[1], weight.shape[1], TILE_IDS, TILE_WIDTH


if triton is not None:

    @triton.jit
    def _rows(weight, ids, d, D):
        inside = (ids >= 0)[:, None] & (d < D)[None, :]
        return tl.load(weight + ids[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)

    @triton.jit
    def _dot_rows(hidden, weight, sets, y, K, D, TILE_IDS: tl.constexpr, TILE_WIDTH: tl.constexpr):
        token = tl.program_id(0).to(tl.int64)
        k = tl.program_id(1) * TILE_IDS + tl.arange(0, TILE_IDS)
        ids = tl.load(sets + token * K + k, mask=k < K, other=-1).to(tl.int64)
        if tl.max(ids, 0) >= 0:
            total = tl.zeros((TILE_IDS,), tl.float32)
            for first in range(0, D, TILE_WIDTH):
                d = first + tl.arange(0, TILE_WIDTH)
                h = tl.load(hidden + token * D + d, mask=d < D, other=0.0).to(tl.float32)
                total += tl.sum(_rows(weight, ids, d, D) * h[None, :], 1)
            tl.store(y + token * K + k, total, mask=k < K)

    @triton.jit
    def _sum_rows(dy, weight, sets, total, K, D, TILE_IDS: tl.constexpr, TILE_WIDTH: tl.constexpr):
        token = tl.program_id(0).to(tl.int64)
        d = tl.program_id(1) * TILE_WIDTH + tl.arange(0, TILE_WIDTH)
        out = tl.zeros((TILE_WIDTH,), tl.float32)
        for first in range(0, K, TILE_IDS):
            k = first + tl.arange(0, TILE_IDS)
            ids = tl.load(sets + token * K + k, mask=k < K, other=-1).to(tl.int64)
            if tl.max(ids, 0) >= 0:
                g = tl.load(dy + token * K + k, mask=k < K, other=0.0).to(tl.float32)
                out += tl.sum(_rows(weight, ids, d, D) * g[:, None], 0)
        tl.store(total + token * D + d, out, mask=d < D)
