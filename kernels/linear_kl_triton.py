"""Triton kernel of linear_kl: compute divergences and d loss / d y from the logits of student and teacher, in place.

Notation as in linear_kl.py. One program per token passes over both of its logit rows:

    first    log-sum-exp of both; for beta = 0 and 1 also the mean difference of the logits, which determines the
             divergence
    second   0 < beta < 1 only: KL(q || m) and KL(p || m)
    last     if a gradient is needed: d loss / d y

It therefore reads 4 bytes per logit two or three times. d loss / d y overwrites the start of the student's row, in the
dtype of the products. bfloat16 values take half the memory of fp32 logits, so a block of them only covers logits that
the whole program has already read; the barrier guarantees this.
Shapes: N = tokens per chunk, V = vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

NOTHING = tl.constexpr(-1e30)  # initial maximum; with -inf, differences would be NaN
FORWARD, REVERSE, BETWEEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
BLOCK, WARPS = 2048, 8  # 60 to 70 registers per thread: 3 or 4 tokens per multiprocessor of an H200
INTERPRETED_BLOCK = 256


@triton.jit
def _logits(
    row, bias, column, vocab, scale, softcap, factor, BIAS: tl.constexpr, SOFTCAP: tl.constexpr
):  # fmt: skip
    """z of a block, -inf beyond the vocabulary, and tanh of the softcap."""
    y = tl.load(row + column, mask=column < vocab, other=0.0)
    if BIAS:
        y += tl.load(bias + column, mask=column < vocab, other=0.0).to(tl.float32)
    t = y
    if SOFTCAP:
        a = tl.exp(tl.abs(y * scale / softcap) * -2.0)
        t = (1.0 - a) / (1.0 + a)
        t = tl.where(y < 0, -t, t)
    return tl.where(column < vocab, t * factor, float("-inf")), t


@triton.jit
def _log_ratios(z, teacher_z, lse, teacher_lse, beta):
    """u = log p - log q, log(q / m) and log(p / m), with the larger of p and q factored out of m."""
    u = (teacher_z - z) - (teacher_lse - lse)
    u = tl.where(u == u, u, 0.0)  # both logits are -inf
    smaller = tl.log(1.0 + tl.where(u > 0, 1.0 - beta, beta) * (tl.exp(-tl.abs(u)) - 1.0))
    return -(smaller + tl.maximum(u, 0.0)), tl.minimum(u, 0.0) - smaller


@triton.jit  # a vocabulary that is a multiple of 16 gets a specialised version with wide loads and stores
def _divergence(
    y, teacher_y, out, bias, teacher_bias, divergence, token_weight, vocab, stride, teacher_stride, out_stride, scale,
    softcap, factor, teacher_scale, teacher_softcap, teacher_factor, beta, k, MODE: tl.constexpr, GRAD: tl.constexpr,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, TEACHER_BIAS: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = y + token * stride
    teacher_row = teacher_y + token * teacher_stride
    # Each lane keeps a running maximum, and sums relative to it.
    top = tl.full((BLOCK,), NOTHING, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    teacher_top = tl.full((BLOCK,), NOTHING, tl.float32)
    teacher_total = tl.zeros((BLOCK,), tl.float32)
    moment = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z, _ = _logits(row, bias, column, vocab, scale, softcap, factor, BIAS, SOFTCAP)
        teacher_z, _ = _logits(
            teacher_row, teacher_bias, column, vocab, teacher_scale, teacher_softcap, teacher_factor, TEACHER_BIAS,
            TEACHER_SOFTCAP,
        )  # fmt: skip
        d = tl.exp(-tl.abs(z - top))
        teacher_d = tl.exp(-tl.abs(teacher_z - teacher_top))
        higher = z > top
        teacher_higher = teacher_z > teacher_top
        if MODE == FORWARD:  # sum of e^teacher_z (teacher_z - z)
            gap = tl.where(teacher_z > float("-inf"), teacher_z - z, 0.0)
            moment = tl.where(teacher_higher, moment * teacher_d + gap, moment + teacher_d * gap)
        if MODE == REVERSE:  # sum of e^z (z - teacher_z)
            gap = tl.where(z > float("-inf"), z - teacher_z, 0.0)
            moment = tl.where(higher, moment * d + gap, moment + d * gap)
        total = tl.where(higher, total * d + 1.0, total + d)
        teacher_total = tl.where(teacher_higher, teacher_total * teacher_d + 1.0, teacher_total + teacher_d)
        top = tl.maximum(top, z)
        teacher_top = tl.maximum(teacher_top, teacher_z)
    most = tl.max(top, 0)
    lanes = tl.exp(top - most)
    total_of_all = tl.sum(total * lanes, 0)
    lse = most + tl.log(total_of_all)
    teacher_most = tl.max(teacher_top, 0)
    teacher_lanes = tl.exp(teacher_top - teacher_most)
    teacher_total_of_all = tl.sum(teacher_total * teacher_lanes, 0)
    teacher_lse = teacher_most + tl.log(teacher_total_of_all)
    kl = 0.0
    if MODE == FORWARD:
        kl = tl.sum(moment * teacher_lanes, 0) / teacher_total_of_all - (teacher_lse - lse)
        tl.store(divergence + token, kl)
    if MODE == REVERSE:
        kl = tl.sum(moment * lanes, 0) / total_of_all + (teacher_lse - lse)
        tl.store(divergence + token, kl)
    if MODE == BETWEEN:
        of_q = tl.zeros((BLOCK,), tl.float32)
        of_p = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocab, BLOCK):
            column = start + tl.arange(0, BLOCK)
            z, _ = _logits(row, bias, column, vocab, scale, softcap, factor, BIAS, SOFTCAP)
            teacher_z, _ = _logits(
                teacher_row, teacher_bias, column, vocab, teacher_scale, teacher_softcap, teacher_factor, TEACHER_BIAS,
                TEACHER_SOFTCAP,
            )  # fmt: skip
            q_over_m, p_over_m = _log_ratios(z, teacher_z, lse, teacher_lse, beta)
            q = tl.exp(z - lse)
            p = tl.exp(teacher_z - teacher_lse)
            # Test q == 0, not q > 0, so that NaN stays NaN.
            of_q += tl.where(q == 0, 0.0, q * q_over_m)
            of_p += tl.where(p == 0, 0.0, p * p_over_m)
        kl = tl.sum(of_q, 0)
        tl.store(divergence + token, beta * tl.sum(of_p, 0) + (1.0 - beta) * kl)
    if GRAD:
        coef = tl.load(token_weight + token).to(tl.float32) * k
        out_row = out + token * out_stride
        for start in range(0, vocab, BLOCK):
            column = start + tl.arange(0, BLOCK)
            z, t = _logits(row, bias, column, vocab, scale, softcap, factor, BIAS, SOFTCAP)
            teacher_z, _ = _logits(
                teacher_row, teacher_bias, column, vocab, teacher_scale, teacher_softcap, teacher_factor, TEACHER_BIAS,
                TEACHER_SOFTCAP,
            )  # fmt: skip
            tl.debug_barrier()  # all lanes must read their logits before any lane overwrites some of them
            q = tl.exp(z - lse)
            if MODE == FORWARD:
                dz = q - tl.exp(teacher_z - teacher_lse)
            elif MODE == REVERSE:
                log_ratio = (z - teacher_z) + (teacher_lse - lse)
                dz = tl.where(q == 0, 0.0, q * (log_ratio - kl))
            else:
                q_over_m, _ = _log_ratios(z, teacher_z, lse, teacher_lse, beta)
                dz = tl.where(q == 0, 0.0, (1.0 - beta) * q * (q_over_m - kl))
            if SOFTCAP:
                dz *= 1.0 - t * t
            dz = tl.where(coef == 0.0, 0.0, dz * coef)
            tl.store(out_row + column, dz.to(out.dtype.element_ty), mask=column < vocab)


def step(
    y: Tensor,  # (N, V) fp32 student hidden @ weight.T; overwritten
    head: Any,
    teacher_y: Tensor,  # (N, V) fp32
    teacher_head: Any,
    beta: float,
    temperature: float,
    divergence: Tensor,  # (N,) output
    token_weight: Tensor,  # (N,)
    dtype: torch.dtype,
    with_gradient: bool,
) -> Tensor | None:  # (N, V) d loss / d y in `dtype`, in the memory of y
    """Compute divergences and gradients for a chunk of tokens."""
    num_tokens, vocab = y.shape
    out = y
    if with_gradient:  # row n starts where row n of y starts
        out = y.as_strided((num_tokens, y.stride(0)), (y.stride(0), 1)).view(dtype)[:, :vocab]
    bias, teacher_bias = (None if x.bias is None else x.bias.detach().contiguous() for x in (head, teacher_head))
    mode = FORWARD if beta == 0 else REVERSE if beta == 1 else BETWEEN
    sides = [
        (float(x.scale), float(x.softcap or 1.0), (x.softcap or x.scale) / temperature) for x in (head, teacher_head)
    ]
    _divergence[(num_tokens,)](
        y, teacher_y, out, bias, teacher_bias, divergence, token_weight, vocab, y.stride(0),
        teacher_y.stride(0), out.stride(0), *sides[0], *sides[1], float(beta), head.scale / temperature,
        MODE=mode.value, GRAD=with_gradient, BIAS=bias is not None, SOFTCAP=head.softcap is not None,
        TEACHER_BIAS=teacher_bias is not None, TEACHER_SOFTCAP=teacher_head.softcap is not None,
        BLOCK=BLOCK if y.is_cuda else INTERPRETED_BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return out if with_gradient else None


def obstacle(
    hidden: Tensor,  # (N, D)
    teacher_hidden: Tensor,  # (N, E)
) -> str | None:
    """Return why the kernel cannot run on these hidden states, or None."""
    if not hidden.is_cuda and not triton.knobs.runtime.interpret:
        return f"device {hidden.device}: Triton needs CUDA or TRITON_INTERPRET=1"
    for name, x in (("hidden", hidden), ("teacher_hidden", teacher_hidden)):
        if x.dtype not in (torch.bfloat16, torch.float32):
            return f"{name} {x.dtype}: the kernel computes in float32"
    return None
