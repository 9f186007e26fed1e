"""Elementwise operations of a Llama-like block for decoding, one kernel each, without autograd.

- `add_rms_norm`: the residual sum and the norm after it.
- `rotate_append`: norms of the query and key heads if the model has them, rotation by position, and the write of keys
  and values to their cache slots.
- `silu_mul`: the activation of a gated MLP.

They round where transformers rounds under autocast, so that sampled log-probs match the trainer's. The first two also
sum the parts of an output that linear.py leaves to them. Grids depend only on shapes, so a step can be captured in a
CUDA graph. The kernels run on CUDA, the `*_reference` functions elsewhere.

Shapes: N = tokens, D = model width, H = query heads, H_kv = key heads, K = head size, S = cache slots, P = parts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.decode.launch import launch_options

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch may lack Triton; the references run there
    triton = None

HEADS = 8  # most heads per program of _rotate_append
BLOCK = 1024  # columns per program of _silu_mul


def add_rms_norm(
    stream: Tensor,  # (N, D) float32
    delta: Tensor | None,  # (N, D) any float dtype, or (P, N, D) float32 parts, whose sum is rounded to out_dtype
    weight: Tensor,  # (D,) float32
    eps: float,
    out_dtype: torch.dtype,
) -> Tensor:  # (N, D) out_dtype
    """Add delta to the residual stream in place, and return rms_norm(stream) * weight.

    The stream is float32, as in training under autocast.
    """
    fits = stream.is_cuda and stream.dtype == torch.float32 and triton is not None
    return (add_rms_norm_kernel if fits else add_rms_norm_reference)(stream, delta, weight, eps, out_dtype)


def rotate_append(
    qkv: Tensor,  # (N, (H + 2 H_kv) K), or (P, N, (H + 2 H_kv) K) parts, whose sum is rounded to the dtype of keys
    cos: Tensor,  # (T, K) float32
    sin: Tensor,  # (T, K) float32
    position: Tensor,  # (N,) int32
    slot: Tensor,  # (N,) int64; nothing is written for padding (below 0)
    keys: Tensor,  # (H_kv, S, K)
    values: Tensor,  # (H_kv, S, K)
    *,
    num_heads: int,
    q_weight: Tensor | None,  # (K,) float32
    k_weight: Tensor | None,  # (K,) float32
    eps: float,
) -> Tensor:  # (N, H, K) rotated queries, in the dtype of keys
    """Normalise the query and key heads if there are weights, rotate them, and write keys and values to their slots.

    Heads are normalised in float32, rounded to qkv's dtype and multiplied by the float32 weight. The rotation is
    x * cos + cat(-x[K/2:], x[:K/2]) * sin in float32.
    """
    fits = qkv.is_cuda and keys.dtype != torch.float64 and triton is not None
    run = rotate_append_kernel if fits else rotate_append_reference
    return run(
        qkv, cos, sin, position, slot, keys, values, num_heads=num_heads, q_weight=q_weight, k_weight=k_weight, eps=eps
    )


def silu_mul(
    gate_up: Tensor,  # (N, 2 I)
) -> Tensor:  # (N, I)
    """silu(first half) * second half; the silu is computed in float32 and rounded before the product, as torch does."""
    fits = gate_up.is_cuda and gate_up.dtype != torch.float64 and triton is not None
    return (silu_mul_kernel if fits else silu_mul_reference)(gate_up)


# Plain torch


def add_rms_norm_reference(
    stream: Tensor,  # (N, D)
    delta: Tensor | None,  # (N, D) or (P, N, D)
    weight: Tensor,  # (D,)
    eps: float,
    out_dtype: torch.dtype,
) -> Tensor:  # (N, D)
    if delta is not None:
        stream += delta.sum(0).to(out_dtype) if delta.dim() == 3 else delta
    return (weight * normalised(stream, eps)).to(out_dtype)


def rotate_append_reference(
    qkv: Tensor,  # (N, (H + 2 H_kv) K) or (P, N, (H + 2 H_kv) K)
    cos: Tensor,  # (T, K)
    sin: Tensor,  # (T, K)
    position: Tensor,  # (N,)
    slot: Tensor,  # (N,)
    keys: Tensor,  # (H_kv, S, K)
    values: Tensor,  # (H_kv, S, K)
    *,
    num_heads: int,
    q_weight: Tensor | None,  # (K,)
    k_weight: Tensor | None,  # (K,)
    eps: float,
) -> Tensor:  # (N, H, K)
    key_heads, _, head_dim = keys.shape
    qkv = qkv.sum(0).to(keys.dtype) if qkv.dim() == 3 else qkv
    query, key, value = qkv.view(len(qkv), -1, head_dim).split([num_heads, key_heads, key_heads], dim=1)
    if q_weight is not None:
        query = normalised(query, eps).to(qkv.dtype) * q_weight
    if k_weight is not None:
        key = normalised(key, eps).to(qkv.dtype) * k_weight
    cos, sin = cos[position.long()].unsqueeze(1), sin[position.long()].unsqueeze(1)  # (N, 1, K)
    query, key = ((x * cos + half_rotated(x) * sin).to(keys.dtype) for x in (query, key))
    is_token = slot >= 0
    for cache, new in ((keys, key), (values, value.to(values.dtype))):
        cache[:, slot[is_token]] = new[is_token].transpose(0, 1)
    return query


def silu_mul_reference(
    gate_up: Tensor,  # (N, 2 I)
) -> Tensor:  # (N, I)
    gate, up = gate_up.chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


def normalised(
    x: Tensor,  # (..., D)
    eps: float,
) -> Tensor:  # (..., D) in float32 or wider
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)


def half_rotated(
    x: Tensor,  # (..., K)
) -> Tensor:  # (..., K)
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], dim=-1)


# Kernels, on CUDA or under TRITON_INTERPRET=1


def add_rms_norm_kernel(
    stream: Tensor,  # (N, D) float32
    delta: Tensor | None,  # (N, D) or (P, N, D) float32
    weight: Tensor,  # (D,)
    eps: float,
    out_dtype: torch.dtype,
) -> Tensor:  # (N, D)
    num_tokens, width = stream.shape
    assert stream.stride(1) == 1 and (delta is None or delta.stride(-1) == 1) and weight.is_contiguous()
    out = torch.empty(num_tokens, width, dtype=out_dtype, device=stream.device)
    if num_tokens:
        block, is_split = triton.next_power_of_2(width), delta is not None and delta.dim() == 3
        _add_rms_norm[num_tokens,](
            stream, delta, weight, out, width, stream.stride(0), 0 if delta is None else delta.stride(-2),
            delta.stride(0) if is_split else 0, eps, PARTS=0 if delta is None else len(delta) if is_split else 1,
            IS_SPLIT=is_split, BLOCK=block, num_warps=min(16, max(1, block // 512)), **launch_options(out),
        )  # fmt: skip
    return out


def rotate_append_kernel(
    qkv: Tensor,  # (N, (H + 2 H_kv) K) or (P, N, (H + 2 H_kv) K) float32
    cos: Tensor,  # (T, K) float32
    sin: Tensor,  # (T, K) float32
    position: Tensor,  # (N,) int32
    slot: Tensor,  # (N,) int64
    keys: Tensor,  # (H_kv, S, K)
    values: Tensor,  # (H_kv, S, K)
    *,
    num_heads: int,
    q_weight: Tensor | None,  # (K,) float32
    k_weight: Tensor | None,  # (K,) float32
    eps: float,
) -> Tensor:  # (N, H, K)
    (key_heads, _, head_dim), num_tokens, is_split = keys.shape, qkv.shape[-2], qkv.dim() == 3
    assert qkv.shape[-1] == (num_heads + 2 * key_heads) * head_dim and head_dim % 2 == 0, f"qkv {tuple(qkv.shape)}"
    assert qkv.stride(-1) == keys.stride(2) == values.stride(2) == 1 and keys.dtype == values.dtype
    assert cos.is_contiguous() and sin.is_contiguous() and cos.shape[1] == sin.shape[1] == head_dim
    assert (q_weight is None) == (k_weight is None)
    heads = math.gcd(HEADS, num_heads, key_heads)  # so that a program has queries, keys or values
    query = torch.empty(num_tokens, num_heads, head_dim, dtype=keys.dtype, device=qkv.device)
    if num_tokens:
        _rotate_append[num_tokens, (num_heads + 2 * key_heads) // heads](
            qkv, cos, sin, position, slot, keys, values, query, q_weight, k_weight, qkv.stride(-2),
            qkv.stride(0) if is_split else 0, keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), eps,
            NUM_HEADS=num_heads, KEY_HEADS=key_heads, NORM=q_weight is not None, PARTS=len(qkv) if is_split else 1,
            IS_SPLIT=is_split, K=head_dim, HEADS=heads, HALF=triton.next_power_of_2(head_dim // 2),
            num_warps=max(1, heads // 2), **launch_options(query),
        )  # fmt: skip
    return query


def silu_mul_kernel(
    gate_up: Tensor,  # (N, 2 I)
) -> Tensor:  # (N, I)
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = torch.empty(num_tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        grid = (num_tokens, triton.cdiv(width, BLOCK))
        _silu_mul[grid](gate_up, out, width, gate_up.stride(0), BLOCK=BLOCK, num_warps=4)
    return out


if triton is not None:

    @triton.jit
    def _add_rms_norm(
        stream, delta, weight, out, width, stream_row, delta_row, delta_part, eps, PARTS: tl.constexpr,
        IS_SPLIT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK)
        inside = column < width
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        x = tl.load(stream + row * stream_row + column, mask=inside, other=0.0)
        if PARTS:
            change = tl.load(delta + row * delta_row + column, mask=inside, other=0.0).to(tl.float32)
            for part in tl.static_range(1, PARTS):
                change += tl.load(delta + part * delta_part + row * delta_row + column, mask=inside, other=0.0)
            if IS_SPLIT:
                change = change.to(out.dtype.element_ty).to(tl.float32)
            x += change
            tl.store(stream + row * stream_row + column, x, mask=inside)
        x *= tl.rsqrt(tl.sum(x * x, 0) / width + eps)
        x *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * width + column, x.to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _normalised_halves(first, second, weight, half, inside, eps, dtype: tl.constexpr, K: tl.constexpr):
        """Normalise; round to `dtype` before the float32 weight. `half` (1, HALF) are the columns of one half."""
        inverse = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / K + eps)[:, None]
        first = (first * inverse).to(dtype).to(tl.float32)
        second = (second * inverse).to(dtype).to(tl.float32)
        first *= tl.load(weight + half, mask=inside, other=0.0).to(tl.float32)
        second *= tl.load(weight + K // 2 + half, mask=inside, other=0.0).to(tl.float32)
        return first, second

    @triton.jit
    def _rotate_append(
        qkv, cos, sin, position, place, keys, values, query, q_weight, k_weight, qkv_row, qkv_part, key_head, key_place,
        value_head, value_place, eps, NUM_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, NORM: tl.constexpr,
        PARTS: tl.constexpr, IS_SPLIT: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
        PDL: tl.constexpr,
    ):  # fmt: skip
        """Process HEADS heads of one token, in halves: queries, keys or values."""
        token = tl.program_id(0).to(tl.int64)
        start = tl.program_id(1) * HEADS
        head = (start + tl.arange(0, HEADS))[:, None]
        half = tl.arange(0, HALF)[None, :]
        inside = half < K // 2
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        at = qkv + token * qkv_row + head * K + half
        first_raw = tl.load(at, mask=inside, other=0.0)
        second_raw = tl.load(at + K // 2, mask=inside, other=0.0)
        for part in tl.static_range(1, PARTS):
            first_raw += tl.load(at + part * qkv_part, mask=inside, other=0.0)
            second_raw += tl.load(at + part * qkv_part + K // 2, mask=inside, other=0.0)
        if IS_SPLIT:
            first_raw, second_raw = first_raw.to(keys.dtype.element_ty), second_raw.to(keys.dtype.element_ty)
        where = tl.load(place + token).to(tl.int64)
        if start >= NUM_HEADS + KEY_HEADS:
            if where >= 0:
                value = values + (head - NUM_HEADS - KEY_HEADS).to(tl.int64) * value_head + where * value_place + half
                tl.store(value, first_raw.to(values.dtype.element_ty), mask=inside)
                tl.store(value + K // 2, second_raw.to(values.dtype.element_ty), mask=inside)
        else:
            is_query = start < NUM_HEADS
            first, second = first_raw.to(tl.float32), second_raw.to(tl.float32)
            if NORM:
                weight = q_weight if is_query else k_weight
                dtype: tl.constexpr = first_raw.dtype
                first, second = _normalised_halves(first, second, weight, half, inside, eps, dtype, K)
            angle = tl.load(position + token).to(tl.int64) * K + half
            cos_first = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
            cos_second = tl.load(cos + angle + K // 2, mask=inside, other=0.0).to(tl.float32)
            sin_first = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
            sin_second = tl.load(sin + angle + K // 2, mask=inside, other=0.0).to(tl.float32)
            turned_first = (first * cos_first - second * sin_first).to(keys.dtype.element_ty)
            turned_second = (second * cos_second + first * sin_second).to(keys.dtype.element_ty)
            if is_query:
                out = query + (token * NUM_HEADS + head) * K + half
                tl.store(out, turned_first, mask=inside)
                tl.store(out + K // 2, turned_second, mask=inside)
            elif where >= 0:
                key = keys + (head - NUM_HEADS).to(tl.int64) * key_head + where * key_place + half
                tl.store(key, turned_first, mask=inside)
                tl.store(key + K // 2, turned_second, mask=inside)

    @triton.jit
    def _silu_mul(gate_up, out, width, row_stride, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        at = gate_up + row * row_stride + column
        gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
        dtype: tl.constexpr = out.dtype.element_ty
        silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        tl.store(out + row * width + column, (silu * up).to(dtype), mask=inside)
