"""Linear layers and attention whose result for a token has the same bits in any batch.

    out = exact_linear(x, weight, bias)                             # forward in a fixed order; backward by cuBLAS
    out = exact_attention(query, key, value, mask, scale=scale)     # packed rows in training
    out = attend_in_order(query, keys, values, spans, scale=scale)  # the same without autograd, also over a paged cache

A sum of floats depends on the order of its terms, and libraries choose the order by the shape of the batch. Here it
depends only on the token, so training, prefill and decoding agree bit for bit:
- A matmul sums over the input features in blocks of 64, first to last, in one program per output tile. The size of the
  tile depends on the number of rows, the order of the sum does not.
- Attention visits the keys of a query by their position in the sequence, in tiles of 64 from position 0, in one
  program. Where they are stored does not matter: `spans` (kernels/attention.py) and page tables only give addresses.
  All uses share one tile shape. Keys that a query does not see leave its sums unchanged: their weight is 0.

Norms, rotations and activations are per token in any case (kernels/block.py), as is the head
(kernels/linear_logprob_triton.py). On a CPU, torch chooses the order even for them. There the same functions, and the
modules in `by_row`, compute one token at a time, which is slow but independent of the batch by construction.

Backward passes are ordinary: matmuls, and flex or dense attention, computed again from the inputs.
Shapes: N = tokens, D = in features, O = out features, R = rows, T = tokens per row, H = heads, H_kv = key heads, K =
head size, S = slots.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask

from kernels.attention import Spans, dense_attend, dense_mask, flex_attend

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # CPU builds of torch may lack Triton; tokens are computed one at a time there
    triton = None

BLOCK_K = 64  # features per step of a matmul's sum
WIDTHS = (256, 128, 64, 32, 16)  # columns of an output tile
PROGRAMS = 128  # the widest tile with this many programs is chosen; a GPU has about as many multiprocessors
LINES = 64  # queries times heads per program of the attention, also for a single query
KEYS = 64  # keys per tile


# Linear layers


class ExactLinear(nn.Linear):
    """nn.Linear by exact_linear, in the dtype of autocast. Modules change their class, see trainer/policy/fuse.py."""

    _unfused = nn.Linear

    def forward(
        self,
        x: Tensor,  # (..., D)
    ) -> Tensor:  # (..., O)
        kind, weight = x.device.type, _casts.get(self)
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        weight = self.weight.to(dtype) if weight is None else weight
        return exact_linear(x.to(dtype), weight, None if self.bias is None else self.bias.to(dtype))


_casts: Mapping[nn.Module, Tensor] = {}


@contextlib.contextmanager
def with_casts(
    casts: Mapping[nn.Module, Tensor],  # (O, D) each
) -> Iterator[None]:
    """Context manager: ExactLinear layers use these casts of their weights instead of casting them."""
    global _casts
    before, _casts = _casts, casts
    try:
        yield
    finally:
        _casts = before


def exact_linear(
    x: Tensor,  # (..., D)
    weight: Tensor,  # (O, D) in the dtype of x
    bias: Tensor | None = None,  # (O,)
) -> Tensor:  # (..., O)
    """x @ weight.T + bias, rounded once."""
    if not _runs_kernels(x):
        return row_by_row(lambda row: F.linear(row, weight, bias), x, weight, *([] if bias is None else [bias]))
    return _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], len(weight))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_x = grad @ weight if needs_x else None
        grad_weight = grad.t() @ x if needs_weight else None
        return grad_x, grad_weight, grad.sum(0) if needs_bias else None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # (N, O)
    (num_rows, width), num_out = x.shape, weight.shape[0]
    assert weight.dtype == x.dtype and weight.shape[1] == width and width * x.element_size() % 16 == 0, weight.shape
    out = torch.empty(num_rows, num_out, dtype=x.dtype, device=x.device)
    if num_rows:
        m, n, warps = linear_tile(num_rows, num_out)
        left, right = (TensorDescriptor.from_tensor(_aligned(a), [b, BLOCK_K]) for a, b in ((x, m), (weight, n)))
        _linear[triton.cdiv(num_rows, m) * triton.cdiv(num_out, n),](
            left, right, bias, out, num_rows, num_out, width, BIAS=bias is not None, UPCAST=not x.is_cuda, BLOCK_M=m,
            BLOCK_N=n, BLOCK_K=BLOCK_K, GROUP=8, num_warps=warps, num_stages=3, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def linear_tile(num_rows: int, num_out: int) -> tuple[int, int, int]:
    """Return rows and columns of an output tile, and warps. At least 64 rows, so that all sizes use one instruction."""
    m = 64 if num_rows <= 64 else 128
    fits = (n for n in WIDTHS if -(-num_rows // m) * -(-num_out // n) >= PROGRAMS)
    n = next(fits, WIDTHS[-1])
    return m, n, 8 if m * n >= 1 << 14 else 4


def _aligned(x: Tensor) -> Tensor:
    is_aligned = x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    return x if is_aligned else x.clone(memory_format=torch.contiguous_format)


# Attention


def exact_attention(
    query: Tensor,  # (R, H, T, K)
    key: Tensor,  # (R, H_kv, T, K)
    value: Tensor,  # (R, H_kv, T, K)
    mask: BlockMask,  # shape (R, 1, T, T), from kernels.attention.block_mask
    *,
    scale: float,
) -> Tensor:  # (R, H, T, K)
    """Attend within packed rows, with gradients."""
    return _Attention.apply(query, key, value, mask, scale)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.mask, ctx.scale = mask, scale
        return attend_in_order(query, key, value, mask.mask_mod.spans, scale=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            if grad.is_cuda:
                out = flex_attend(*inputs, ctx.mask, scale=ctx.scale)
            else:
                out = dense_attend(*inputs, dense_mask(ctx.mask.mask_mod.spans, grad.shape[2]), scale=ctx.scale)
            return *torch.autograd.grad(out, inputs, grad), None, None


def attend_in_order(
    query: Tensor,  # (R, H, T, K)
    keys: Tensor,  # (R, H_kv, S, K); with a table (H_kv, S, K)
    values: Tensor,  # (R, H_kv, S, K); with a table (H_kv, S, K)
    spans: Spans,  # prefix_start, prefix_stop, own_start, own_stop: (R, T) int32 each
    *,
    scale: float,
    table: Tensor | None = None,  # (R, pages) the pages of each row; slots in `spans` count within them
    page: int = 1,  # slots per page
) -> Tensor:  # (R, H, T, K)
    """Attend to the keys of each query in the order of their positions; both runs of `spans` may be in pages."""
    assert len(spans) == 4, f"{len(spans)} bounds: a tree of sequences has more than one prefix run"
    run = _attend_by_kernel if _runs_kernels(query) else _attend_one_by_one
    return run(query, keys, values, spans, scale, table, page)


def _runs_kernels(x: Tensor) -> bool:
    return x.is_cuda


def _attend_one_by_one(
    query: Tensor, keys: Tensor, values: Tensor, spans: Spans, scale: float, table: Tensor | None, page: int
) -> Tensor:  # (R, H, T, K)
    """Plain torch, in float32 or wider: each query is a computation of its own, over exactly the keys that it sees."""
    wide, out = torch.promote_types(query.dtype, torch.float32), torch.empty_like(query)
    for row, bounds in enumerate(torch.stack(spans, dim=-1).tolist()):
        pair = [x if table is not None else x[row] for x in (keys, values)]
        for token, (first, stop, own_first, own_stop) in enumerate(bounds):
            place = torch.tensor([*range(first, stop), *range(own_first, own_stop)])
            if table is not None:
                place = table[row].long()[place // page] * page + place % page
            key, value = (x.index_select(1, place).to(wide) for x in pair)  # (H_kv, keys, K)
            one = query[row, :, token].to(wide).reshape(len(key), -1, query.shape[3])  # (H_kv, H / H_kv, K)
            weights = (one @ key.transpose(1, 2) * scale).softmax(dim=-1)
            out[row, :, token] = (weights @ value).flatten(0, 1)
    return out


def _attend_by_kernel(
    query: Tensor, keys: Tensor, values: Tensor, spans: Spans, scale: float, table: Tensor | None, page: int
) -> Tensor:  # (R, H, T, K)
    (rows, num_heads, num_tokens, head_dim), key_heads = query.shape, keys.shape[-3]
    group = num_heads // key_heads
    heads = triton.next_power_of_2(group)
    assert heads <= LINES and head_dim <= 256, f"{group} query heads per key head, head size {head_dim}"
    query, keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, keys, values))
    bounds = [x.to(torch.int32).contiguous() for x in spans]
    out = torch.empty(rows, num_tokens, num_heads, head_dim, dtype=query.dtype, device=query.device)
    strides = [s for x in (keys, values) for s in ((0 if table is not None else x.stride(0)), *x.stride()[-3:-1])]
    if rows * num_tokens:
        _attend[triton.cdiv(num_tokens, LINES // heads), key_heads, rows](
            query, keys, values, table, *bounds, out, num_tokens, 0 if table is None else table.stride(0),
            *query.stride()[:3], *strides, scale / math.log(2.0), GROUP=group, HEADS=heads, K=head_dim,
            WIDTH=max(16, triton.next_power_of_2(head_dim)), PAGE=0 if table is None else page, LINES=LINES, KEYS=KEYS,
            UPCAST=not query.is_cuda, num_warps=4, num_stages=2, enable_fp_fusion=False,
        )  # fmt: skip
    return out.transpose(1, 2)


# One token at a time


def row_by_row(
    function: Callable[[Tensor], Tensor],  # (N, D) -> (N, O)
    x: Tensor,  # (..., D)
    *parameters: Tensor,  # (...) that `function` reads and that need a gradient
) -> Tensor:  # (..., O)
    """Apply a function of tokens to each token alone: no library sees the size of the batch."""
    return _RowByRow.apply(function, x, *parameters)


class _RowByRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x, *parameters)
        ctx.function = function
        # Copies, because kernels may also depend on the alignment of a row in memory.
        rows = [row.clone() for row in x.reshape(-1, x.shape[-1]).split(1)] if x.numel() else [x.flatten(0, -2)]
        out = torch.cat([function(row) for row in rows])
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.function(x)
        needs = ctx.needs_input_grad[1:]
        inputs = [tensor for tensor, needed in zip((x, *parameters), needs, strict=True) if needed]
        grads = iter(torch.autograd.grad(out, inputs, grad.to(out.dtype)))
        return None, *(next(grads) if needed else None for needed in needs)


if triton is not None:
    NOTHING = tl.constexpr(-1e30)  # the maximum over no keys: finite, so that the difference of two is 0

    @triton.jit(do_not_specialize=["num_rows"])
    def _linear(
        x, weight, bias, out, num_rows, num_out, width, BIAS: tl.constexpr, UPCAST: tl.constexpr, BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    ):  # fmt: skip
        """Compute a tile. x and weight are tensor descriptors. Tiles cover GROUP row blocks before the next columns."""
        num_m, num_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_out, BLOCK_N)
        tile = tl.program_id(0)
        first = tile // (GROUP * num_n) * GROUP
        height = min(num_m - first, GROUP)
        within = tile % (GROUP * num_n)
        m, n = (first + within % height) * BLOCK_M, within // height * BLOCK_N
        y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(tl.cdiv(width, BLOCK_K)):
            a = x.load([m, k * BLOCK_K])
            b = weight.load([n, k * BLOCK_K])
            if UPCAST:  # Triton's interpreter would multiply bfloat16 bit patterns as integers
                a, b = a.to(tl.float32), b.to(tl.float32)
            y = tl.dot(a, b.T, y, input_precision="ieee")
        row, column = (m + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None], n + tl.arange(0, BLOCK_N)[None, :]
        if BIAS:
            y += tl.load(bias + column, mask=column < num_out, other=0.0).to(tl.float32)
        tl.store(out + row * num_out + column, y.to(out.dtype.element_ty), mask=(row < num_rows) & (column < num_out))

    @triton.jit(do_not_specialize=["num_tokens", "table_row"])
    def _attend(
        query, keys, values, table, prefix_start, prefix_stop, own_start, own_stop, out, num_tokens, table_row,
        query_row, query_head, query_token, key_row, key_head, key_place, value_row, value_head, value_place, scale2,
        GROUP: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
        LINES: tl.constexpr, KEYS: tl.constexpr, UPCAST: tl.constexpr,
    ):  # fmt: skip
        """Some tokens of a row, with the query heads of one key head; a line is one head of one token.

        Neighbouring tokens may belong to different sequences. Each turn of the outer loop computes all lines with the
        runs of the first line that is left; the other lines see none of these keys and keep their sums.
        """
        kv_head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
        line, column = tl.arange(0, LINES), tl.arange(0, WIDTH)[None, :]
        token, head = tl.program_id(0) * (LINES // HEADS) + line // HEADS, line % HEADS
        used = (token < num_tokens) & (head < GROUP)
        at = row * num_tokens + token
        first = tl.load(prefix_start + at, mask=used, other=0)
        shared = tl.load(prefix_stop + at, mask=used, other=0) - first  # keys in the prefix
        own = tl.load(own_start + at, mask=used, other=0)
        count = shared + tl.load(own_stop + at, mask=used, other=0) - own
        head = kv_head * GROUP + head
        inside = used[:, None] & (column < K)
        place = query + row * query_row + head[:, None].to(tl.int64) * query_head
        queries = tl.load(place + token[:, None].to(tl.int64) * query_token + column, mask=inside, other=0.0)
        queries = queries.to(keys.dtype.element_ty)
        if UPCAST:
            queries = queries.to(tl.float32)
        keys += row * key_row + kv_head.to(tl.int64) * key_head
        values += row * value_row + kv_head.to(tl.int64) * value_head
        top = tl.full((LINES,), NOTHING, tl.float32)
        total = tl.zeros((LINES,), tl.float32)
        acc = tl.zeros((LINES, WIDTH), tl.float32)
        left = used
        while tl.max(left.to(tl.int32), 0) > 0:
            leader = line == tl.min(tl.where(left, line, LINES), 0)
            run_start = tl.sum(tl.where(leader, first, 0), 0)
            run_length = tl.sum(tl.where(leader, shared, 0), 0)
            run_own = tl.sum(tl.where(leader, own, 0), 0)
            mine = left & (first == run_start) & (shared == run_length) & (own == run_own)
            seen = tl.where(mine, count, 0)
            length = tl.max(seen, 0)
            for start in range(0, length, KEYS):
                position = start + tl.arange(0, KEYS)
                slot = tl.where(position < run_length, run_start + position, run_own + position - run_length)
                if PAGE > 0:
                    pages = tl.load(table + row * table_row + slot // PAGE, mask=position < length, other=0)
                    slot = pages.to(tl.int32) * PAGE + slot % PAGE
                slot = slot.to(tl.int64)[:, None]
                exists = (position < length)[:, None] & (column < K)  # other slots may contain NaN
                key = tl.load(keys + slot * key_place + column, mask=exists, other=0.0)
                value = tl.load(values + slot * value_place + column, mask=exists, other=0.0)
                if UPCAST:
                    key, value = key.to(tl.float32), value.to(tl.float32)
                visible = position[None, :] < seen[:, None]
                scores = tl.where(visible, tl.dot(queries, key.T, input_precision="ieee") * scale2, NOTHING)
                new_top = tl.maximum(top, tl.max(scores, 1))
                weights = tl.where(visible, tl.exp2(scores - new_top[:, None]), 0.0)
                shrink = tl.exp2(top - new_top)
                total = total * shrink + tl.sum(weights, 1)
                acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
                top = new_top
            left = left & (mine == 0)
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        place = out + (at[:, None] * (tl.num_programs(1) * GROUP) + head[:, None]) * K + column
        tl.store(place, result.to(out.dtype.element_ty), mask=inside)
