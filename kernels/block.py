"""Elementwise operations of a Llama-like block for training, one kernel per operation and direction.

    out = rms_norm(x, weight, eps)                     # or dtype=torch.bfloat16: rounded for matmuls
    query, key = rotate(query, key, cos, sin)          # likewise, for attention
    out = silu_mul(gate, up)
    out = gated_rms_norm(x, gate, weight, eps)         # of gated delta nets

transformers' eager modules launch 3 to 12 memory-bound kernels for each. These kernels round where the eager modules
do, so the loss matches up to the order of sums. Gradients are computed in float32 and rounded once. The same kernel
runs with and without gradients, so both give the same bits. There are no atomic additions. The kernels run on CUDA,
the `*_reference` functions elsewhere. decode/block.py is the counterpart for decoding.

Shapes: B = rows, T = tokens per row, N = all tokens, D = width, H = query heads, H_kv = key heads, K = head size.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.decode.block import half_rotated, normalised

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch may lack Triton; the references run there
    triton = None

TILE = 2048  # elements per program of the norms; more if a row is longer
PROGRAMS = 512  # maximum programs of a trained norm's backward; each sums a part of the weight's gradient
HEADS = 8  # heads that a program of _rotate processes at a time
BLOCK = 1024  # columns per program of the activation


def rms_norm(
    x: Tensor,  # (..., D)
    weight: Tensor,  # (D,)
    eps: float,
    plus_one: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:  # (..., D) in `dtype`; by default the one that x and weight promote to, with plus_one x's
    """weight * x / sqrt(mean(x^2) + eps), normalised in float32 and rounded to x's dtype before the product.

    plus_one: the factor is 1 + weight, and only the product is rounded (Gemma, Qwen3.5). The backward pass needs x
    alone.
    """
    if not _fits(x, weight):
        out = rms_norm_reference(x, weight, eps, plus_one)
        return out if dtype is None else out.to(dtype)
    return (_RmsNorm.apply if torch.is_grad_enabled() else _normed)(x, weight, eps, plus_one, dtype)


def rotate(
    query: Tensor,  # (B, H, T, K)
    key: Tensor,  # (B, H_kv, T, K)
    cos: Tensor,  # (B or 1, T, K)
    sin: Tensor,  # (B or 1, T, K)
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # the same shapes, in `dtype`; by default in those that they promote to with cos
    """x * cos + cat(-x[K/2:], x[:K/2]) * sin, each product rounded. In memory, the heads of a token are adjacent."""
    if not _fits(query, key, cos, sin) or query.shape[-1] % 2 or cos.requires_grad or sin.requires_grad:
        query, key = rotate_reference(query, key, cos, sin)
        return (query, key) if dtype is None else (query.to(dtype), key.to(dtype))
    if torch.is_grad_enabled():
        return _Rotate.apply(query, key, cos, sin, dtype)
    return _rotated(query, key, cos, sin, (dtype, dtype))


def silu_mul(
    gate: Tensor,  # (..., D)
    up: Tensor,  # (..., D)
) -> Tensor:  # (..., D)
    """silu(gate) * up; the silu is computed in float32 and rounded before the product. The backward pass needs both."""
    if not _fits(gate, up):
        return silu_mul_reference(gate, up)
    return (_SiluMul.apply if torch.is_grad_enabled() else _activated)(gate, up)


def gated_rms_norm(
    x: Tensor,  # (..., D)
    gate: Tensor,  # (..., D)
    weight: Tensor,  # (D,)
    eps: float,
) -> Tensor:  # (..., D) in x's dtype
    """rms_norm(x, weight) * silu(gate); the silu and its product are computed in float32. The backward pass needs x and
    gate."""
    if not _fits(x, gate, weight):
        return gated_rms_norm_reference(x, gate, weight, eps)
    return (_GatedRmsNorm.apply if torch.is_grad_enabled() else _gated)(x, gate, weight, eps)


def _fits(*tensors: Tensor) -> bool:
    return triton is not None and all(x.is_cuda and x.dtype != torch.float64 for x in tensors)


# Plain torch


def rms_norm_reference(
    x: Tensor,  # (..., D)
    weight: Tensor,  # (D,)
    eps: float,
    plus_one: bool = False,
) -> Tensor:  # (..., D)
    if plus_one:
        return (normalised(x, eps) * (1.0 + weight.to(torch.promote_types(weight.dtype, torch.float32)))).to(x.dtype)
    return weight * normalised(x, eps).to(x.dtype)


def rotate_reference(
    query: Tensor,  # (B, H, T, K)
    key: Tensor,  # (B, H_kv, T, K)
    cos: Tensor,  # (B or 1, T, K)
    sin: Tensor,  # (B or 1, T, K)
) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return query * cos + half_rotated(query) * sin, key * cos + half_rotated(key) * sin


def silu_mul_reference(
    gate: Tensor,  # (..., D)
    up: Tensor,  # (..., D)
) -> Tensor:  # (..., D)
    return torch.nn.functional.silu(gate) * up


def gated_rms_norm_reference(
    x: Tensor,  # (..., D)
    gate: Tensor,  # (..., D)
    weight: Tensor,  # (D,)
    eps: float,
) -> Tensor:  # (..., D)
    gate = gate.to(torch.promote_types(gate.dtype, torch.float32))
    return (rms_norm_reference(x, weight, eps) * torch.nn.functional.silu(gate)).to(x.dtype)


# Autograd around the kernels, on CUDA or under TRITON_INTERPRET=1. A step calls these thousands of times and the GPU
# must not wait for the host, so they run little Python and save few tensors.


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, plus_one: bool, dtype: torch.dtype | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.plus_one = eps, plus_one
        return _normed(x, weight, eps, plus_one, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x, width, trains = _empty_like(x, x.dtype), x.shape[-1], ctx.needs_input_grad[1]
        num_rows, (tile, options) = x.numel() // width, _tiles(width, TILE)
        programs = -(-num_rows // tile)
        if trains:
            programs = min(programs, PROGRAMS)
        parts = torch.empty(programs, width, dtype=torch.float32, device=x.device) if trains else None
        if programs:
            (x, row), (grad, grad_row) = _rows(x), _rows(grad)
            _rms_norm_backward[programs,](
                grad, x, weight.contiguous(), grad_x, parts, num_rows, width, grad_row, row, ctx.eps, TRAINS=trains,
                PLUS_ONE=ctx.plus_one, **options,
            )  # fmt: skip
        return grad_x, None if parts is None else parts.sum(0).to(weight.dtype), None, None, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor]:
        ctx.angles = cos, sin  # not saved for backward: all layers share them, so they need no offloading
        ctx.dtypes = query.dtype, key.dtype
        return _rotated(query, key, cos, sin, (dtype, dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_query: Tensor, grad_key: Tensor) -> tuple[Tensor | None, ...]:
        return *_rotated(grad_query, grad_key, *ctx.angles, ctx.dtypes, backward=True), None, None, None


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _activated(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up, width = _empty_like(gate, gate.dtype), _empty_like(up, up.dtype), gate.shape[-1]
        num_rows = gate.numel() // width
        if num_rows:
            (gate, gate_row), (up, up_row), (grad, grad_row) = _rows(gate), _rows(up), _rows(grad)
            _silu_mul_backward[num_rows, -(-width // BLOCK)](
                grad, gate, up, grad_gate, grad_up, width, grad_row, gate_row, up_row, BLOCK=BLOCK, num_warps=4
            )
        return grad_gate, grad_up


class _GatedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, gate, weight)
        ctx.eps = eps
        return _gated(x, gate, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight = ctx.saved_tensors
        grad_x, grad_gate, width = _empty_like(x, x.dtype), _empty_like(gate, gate.dtype), x.shape[-1]
        num_rows, (tile, options) = x.numel() // width, _tiles(width, TILE)
        programs = min(-(-num_rows // tile), PROGRAMS)
        parts = torch.empty(programs, width, dtype=torch.float32, device=x.device)
        if programs:
            (x, row), (gate, gate_row), (grad, grad_row) = _rows(x), _rows(gate), _rows(grad)
            _gated_rms_norm_backward[programs,](
                grad, x, gate, weight.contiguous(), grad_x, grad_gate, parts, num_rows, width, grad_row, row, gate_row,
                ctx.eps, **options,
            )  # fmt: skip
        return grad_x, grad_gate, parts.sum(0).to(weight.dtype) if ctx.needs_input_grad[2] else None, None


def _normed(x: Tensor, weight: Tensor, eps: float, plus_one: bool, dtype: torch.dtype | None) -> Tensor:  # (..., D)
    out = _empty_like(x, dtype or (x.dtype if plus_one else torch.promote_types(x.dtype, weight.dtype)))
    width = x.shape[-1]
    num_rows = x.numel() // width
    if num_rows:
        x, row = _rows(x)
        tile, options = _tiles(width, TILE)
        _rms_norm[-(-num_rows // tile),](
            x, weight.contiguous(), out, num_rows, width, row, eps, PLUS_ONE=plus_one, **options
        )
    return out


def _rotated(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, dtypes: tuple[torch.dtype | None, torch.dtype | None],
    *, backward: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (batch, heads, length, size), key_heads, device = query.shape, key.shape[1], query.device
    assert size % 2 == 0 and cos.shape == sin.shape and cos.shape[1:] == (length, size), f"cos {tuple(cos.shape)}"
    dtypes = [dtype or torch.promote_types(x.dtype, cos.dtype) for x, dtype in zip((query, key), dtypes, strict=True)]
    query, key = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key))
    new_query = torch.empty((batch, length, heads, size), dtype=dtypes[0], device=device)
    new_key = torch.empty((batch, length, key_heads, size), dtype=dtypes[1], device=device)
    if batch * length:
        _rotate[batch * length,](
            query, key, cos.contiguous(), sin.contiguous(), new_query, new_key, length,
            0 if len(cos) == 1 else length, *query.stride()[:3], *key.stride()[:3], NUM_HEADS=heads,
            KEY_HEADS=key_heads, K=size, HEADS=HEADS, HALF=1 << (size // 2 - 1).bit_length(),
            BACKWARD=backward, num_warps=4,
            enable_fp_fusion=False,  # a bfloat16 FMA would leave one of the two products unrounded
        )  # fmt: skip
    return new_query.transpose(1, 2), new_key.transpose(1, 2)


def _activated(gate: Tensor, up: Tensor) -> Tensor:  # (..., D)
    out, width = _empty_like(gate, torch.promote_types(gate.dtype, up.dtype)), gate.shape[-1]
    num_rows = gate.numel() // width
    if num_rows:
        (gate, gate_row), (up, up_row) = _rows(gate), _rows(up)
        _silu_mul[num_rows, -(-width // BLOCK)](gate, up, out, width, gate_row, up_row, BLOCK=BLOCK, num_warps=4)
    return out


def _gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:  # (..., D)
    out, width = _empty_like(x, x.dtype), x.shape[-1]
    num_rows = x.numel() // width
    if num_rows:
        (x, row), (gate, gate_row) = _rows(x), _rows(gate)
        tile, options = _tiles(width, TILE)
        _gated_rms_norm[-(-num_rows // tile),](
            x, gate, weight.contiguous(), out, num_rows, width, row, gate_row, eps, **options
        )
    return out


def _empty_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """Return the tensor with dense rows, and its row stride."""
    if x.is_contiguous():
        return x, x.shape[-1]
    x = x.reshape(-1, x.shape[-1])
    x = x if x.stride(1) == 1 else x.contiguous()
    return x, x.stride(0)


@functools.cache
def _tiles(width: int, tile: int) -> tuple[int, dict[str, int]]:
    """Return the rows per program of the norms, and the launch options."""
    block = triton.next_power_of_2(width)
    rows = max(1, tile // block)
    return rows, {"ROWS": rows, "BLOCK": block, "num_warps": min(16, max(1, rows * block // 512))}


if triton is not None:

    @triton.jit
    def _rounded(x, dtype: tl.constexpr):
        return x.to(dtype).to(tl.float32)

    @triton.jit(do_not_specialize=["num_rows"])
    def _rms_norm(
        x, weight, out, num_rows, width, x_row, eps, PLUS_ONE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
    ):
        row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
        column = tl.arange(0, BLOCK)[None, :]
        inside = (row < num_rows) & (column < width)
        value = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
        root = tl.rsqrt(tl.sum(value * value, 1) / width + eps)[:, None]
        dtype: tl.constexpr = tl.float32 if PLUS_ONE else x.dtype.element_ty
        normed = _rounded(value * root, dtype)
        scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
        normed *= 1.0 + scale if PLUS_ONE else scale
        tl.store(out + row * width + column, normed.to(out.dtype.element_ty), mask=inside)

    @triton.jit(do_not_specialize=["num_rows"])
    def _rms_norm_backward(
        grad, x, weight, grad_x, parts, num_rows, width, grad_row, x_row, eps, TRAINS: tl.constexpr,
        PLUS_ONE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """With r = 1 / sqrt(mean(x^2) + eps), n = x r, g = grad weight: grad_x = r (g - n mean(g n)); grad_weight =
        sum(grad n). r is recomputed because x is read anyway."""
        column = tl.arange(0, BLOCK)[None, :]
        scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
        if PLUS_ONE:
            scale += 1.0
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        dtype: tl.constexpr = tl.float32 if PLUS_ONE else x.dtype.element_ty
        stages: tl.constexpr = 2 if TRAINS and BLOCK <= 8192 else 1  # prefetch the next iteration if it fits
        for first in tl.range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS, num_stages=stages):
            row = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
            inside = (row < num_rows) & (column < width)
            slope = tl.load(grad + row * grad_row + column, mask=inside, other=0.0).to(tl.float32)
            value = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
            root = tl.rsqrt(tl.sum(value * value, 1) / width + eps)[:, None]
            normed = value * root
            if TRAINS:
                total += slope * _rounded(normed, dtype)
            slope *= scale
            mean = tl.sum(slope * value, 1)[:, None] * root / width  # mean(g n)
            new = ((slope - normed * mean) * root).to(grad_x.dtype.element_ty)
            tl.store(grad_x + row * width + column, new, mask=inside)
        if TRAINS:
            at = parts + tl.program_id(0) * width + column
            tl.store(at, tl.sum(total, 0)[None, :], mask=column < width)

    @triton.jit
    def _product(normed, scale, x, weight):
        """normed * scale, rounded as torch multiplies tensors of these dtypes."""
        dtype: tl.constexpr = x.dtype.element_ty
        return _rounded(normed * scale, dtype if dtype == weight.dtype.element_ty else tl.float32)

    @triton.jit(do_not_specialize=["num_rows"])
    def _gated_rms_norm(
        x, gate, weight, out, num_rows, width, x_row, gate_row, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr
    ):
        row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
        column = tl.arange(0, BLOCK)[None, :]
        inside = (row < num_rows) & (column < width)
        value = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gate + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
        root = tl.rsqrt(tl.sum(value * value, 1) / width + eps)[:, None]
        product = _product(_rounded(value * root, x.dtype.element_ty), scale, x, weight)
        tl.store(out + row * width + column, (product * (g / (1.0 + tl.exp(-g)))).to(out.dtype.element_ty), mask=inside)

    @triton.jit(do_not_specialize=["num_rows"])
    def _gated_rms_norm_backward(
        grad, x, gate, weight, grad_x, grad_gate, parts, num_rows, width, grad_row, x_row, gate_row, eps,
        ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """As _rms_norm_backward, with the gate's silu as in _silu_mul_backward."""
        column = tl.arange(0, BLOCK)[None, :]
        scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for first in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
            row = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
            inside = (row < num_rows) & (column < width)
            slope = tl.load(grad + row * grad_row + column, mask=inside, other=0.0).to(tl.float32)
            value = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
            g = tl.load(gate + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
            root = tl.rsqrt(tl.sum(value * value, 1) / width + eps)[:, None]
            normed = value * root
            rounded = _rounded(normed, x.dtype.element_ty)
            sigmoid = 1.0 / (1.0 + tl.exp(-g))
            new_gate = slope * _product(rounded, scale, x, weight) * sigmoid * (1.0 + g * (1.0 - sigmoid))
            tl.store(grad_gate + row * width + column, new_gate.to(grad_gate.dtype.element_ty), mask=inside)
            slope *= g * sigmoid
            total += slope * rounded
            slope *= scale
            mean = tl.sum(slope * value, 1)[:, None] * root / width
            new = ((slope - normed * mean) * root).to(grad_x.dtype.element_ty)
            tl.store(grad_x + row * width + column, new, mask=inside)
        tl.store(parts + tl.program_id(0) * width + column, tl.sum(total, 0)[None, :], mask=column < width)

    @triton.jit
    def _turn(
        x, out, head_stride, cos, sin, NUM: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
        BACKWARD: tl.constexpr,
    ):  # fmt: skip
        """Rotate all heads of one token, in halves. Backward rotates by the opposite angle and rounds only once."""
        half = tl.arange(0, HALF)[None, :]
        inside = half < K // 2
        cos_first = tl.load(cos + half, mask=inside, other=0.0).to(tl.float32)
        cos_second = tl.load(cos + K // 2 + half, mask=inside, other=0.0).to(tl.float32)
        sin_first = tl.load(sin + half, mask=inside, other=0.0).to(tl.float32)
        sin_second = tl.load(sin + K // 2 + half, mask=inside, other=0.0).to(tl.float32)
        if BACKWARD:
            sin_first, sin_second = -sin_second, -sin_first
        is_wide: tl.constexpr = x.dtype.element_ty == tl.float32 or cos.dtype.element_ty == tl.float32
        dtype: tl.constexpr = tl.float32 if BACKWARD or is_wide else out.dtype.element_ty
        for start in tl.static_range(0, NUM, HEADS):
            head = (start + tl.arange(0, HEADS))[:, None]
            used = inside & (head < NUM)
            at = x + head.to(tl.int64) * head_stride + half
            first = tl.load(at, mask=used, other=0.0).to(tl.float32)
            second = tl.load(at + K // 2, mask=used, other=0.0).to(tl.float32)
            turned_first = _rounded(first * cos_first, dtype) - _rounded(second * sin_first, dtype)
            turned_second = _rounded(second * cos_second, dtype) + _rounded(first * sin_second, dtype)
            to = out + head * K + half
            tl.store(to, turned_first.to(out.dtype.element_ty), mask=used)
            tl.store(to + K // 2, turned_second.to(out.dtype.element_ty), mask=used)

    @triton.jit(do_not_specialize=["length", "cos_length"])
    def _rotate(
        query, key, cos, sin, new_query, new_key, length, cos_length, query_row, query_head, query_token, key_row,
        key_head, key_token, NUM_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr,
        HALF: tl.constexpr, BACKWARD: tl.constexpr,
    ):  # fmt: skip
        """Rotate one token."""
        at = tl.program_id(0).to(tl.int64)
        row, token = at // length, at % length
        angle = (row * cos_length + token) * K
        _turn(
            query + row * query_row + token * query_token, new_query + at * NUM_HEADS * K, query_head, cos + angle,
            sin + angle, NUM_HEADS, K, HEADS, HALF, BACKWARD,
        )  # fmt: skip
        _turn(
            key + row * key_row + token * key_token, new_key + at * KEY_HEADS * K, key_head, cos + angle,
            sin + angle, KEY_HEADS, K, HEADS, HALF, BACKWARD,
        )  # fmt: skip

    @triton.jit
    def _silu_mul(gate, up, out, width, gate_row, up_row, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        g = tl.load(gate + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + row * up_row + column, mask=inside, other=0.0).to(tl.float32)
        dtype: tl.constexpr = gate.dtype.element_ty
        silu = _rounded(g / (1.0 + tl.exp(-g)), dtype)
        tl.store(out + row * width + column, (silu * u).to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _silu_mul_backward(
        grad, gate, up, grad_gate, grad_up, width, grad_row, gate_row, up_row, BLOCK: tl.constexpr
    ):  # fmt: skip
        """With s = sigmoid(gate): silu' = s (1 + gate (1 - s))."""
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        slope = tl.load(grad + row * grad_row + column, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gate + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + row * up_row + column, mask=inside, other=0.0).to(tl.float32)
        sigmoid = 1.0 / (1.0 + tl.exp(-g))
        dtype: tl.constexpr = gate.dtype.element_ty
        silu = _rounded(g * sigmoid, dtype)
        to = row * width + column
        tl.store(grad_up + to, (slope * silu).to(grad_up.dtype.element_ty), mask=inside)
        slope *= u * sigmoid * (1.0 + g * (1.0 - sigmoid))
        tl.store(grad_gate + to, slope.to(grad_gate.dtype.element_ty), mask=inside)
