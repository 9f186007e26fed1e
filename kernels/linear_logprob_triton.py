"""Triton implementation of linear_logprob: the matmul's epilogue exponentiates, so no later pass reads the logits.

Notation as in linear_logprob.py. The reference c_n of a token is its target logit, computed first by a plain dot
product. The epilogue of the first product computes, in fp32,

    E_nv = exp(z_nv - c_n), 0 at the target        S_n = sum_v E_nv        Q_n = sum_v (z_nv - c_n) E_nv
    logp_n = -log(1 + S_n)                         H_n = log(1 + S_n) - Q_n / (1 + S_n)

so log-probs never use a rounded logit, and a confident target keeps its precision. For a backward, E is stored in the
input dtype; its relative rounding error does not depend on the size of the logits. E is not converted to d loss /
d logits, which differs from E only by a factor per token and in the target column; both are applied elsewhere. With
k = scale / temperature and g_n = d loss / d logp_n,

    other_coef_n  = -k g_n / (1 + S_n)
    target_coef_n = k g_n S_n / (1 + S_n)
    d hidden = other_coef * (E @ weight) + target_coef * weight[target]
    d weight = E.T @ (other_coef * hidden) + (target_coef * hidden added at row target)

where the target_coef terms are exact fp32 sums added to the products. Only a softcap or an entropy gradient needs
d loss / d logits itself; then one kernel first rewrites E in place.

The work is split by tokens or by columns. In one pass with the loss it is split by tokens: the E of a chunk is kept
until its loss is known. In a later backward it is split by vocabulary columns: c, S and g are known by then, so each
slice of d weight is computed once.

If the target is so unlikely that E would overflow (log-prob below -68), S_n reveals it, and the token is recomputed
with the largest logit as c_n. Only the device knows whether there are such tokens, so the kernels that recompute them
are always launched, and return immediately if there are none. A log-prob depends only on its token; order, chunking
and N never change it.

The host never waits for the device, except with `skip`, which skips tokens without a gradient in one pass.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2E = math.log2(math.e)
LN2 = tl.constexpr(math.log(2.0))
EXCLUDED = tl.constexpr(-1000.0)  # exp2 of it is 0 and 0 times it is 0; -inf would give NaN
OVERFLOW_LIMIT = 2.0**99  # a sum of exponentials beyond this may have overflowed, or be about to
CHUNK = 4096  # maximum tokens per chunk of E
PART = 512  # rows of the fp32 product E @ weight computed at a time, per 1024 of width: fast, and small relative to E
ROWS = 128  # E @ weight is computed in multiples of this many rows; the extra rows are unused. For other row counts
# cuBLAS chooses other kernels, and the first use of a kernel makes the host wait for all launched work.
LOGP_TOKENS = 1 << 16  # tokens per call of _stats in logps(); each has a partial sum for every 256 vocabulary entries
SLICE = 1 << 28  # elements of E in memory when the work is split by columns


# Token and column counts vary between calls. do_not_specialize prevents a recompilation when a count is 1 or a multiple
# of 16, or when a slice is not aligned.


@triton.jit
def _capped(y, scale, softcap, factor, SOFTCAP: tl.constexpr):
    """Logits in log2 units. tanh is built from exp2 so that it runs everywhere; its absolute error is 1e-7."""
    if SOFTCAP:
        a = tl.exp2(tl.abs(y * scale / softcap) * (-2.0 / LN2))
        t = (1.0 - a) / (1.0 + a)
        z = tl.where(y * scale < 0, -t, t) * factor
    else:
        z = y * factor
    return z


@triton.jit(do_not_specialize=["vocab"], do_not_specialize_on_alignment=["target"])
def _target_logit(
    hidden, weight, bias, target, target_logit, reference, vocab, width, hidden_stride, weight_stride, scale, softcap,
    factor, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    target_id = tl.load(target + token)
    is_valid = (target_id >= 0) & (target_id < vocab)
    target_id = tl.where(is_valid, target_id, 0)
    total = tl.zeros((1, BLOCK), tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)[None, :]
        x = tl.load(hidden + token[:, None] * hidden_stride + at, mask=at < width, other=0.0).to(tl.float32)
        w = tl.load(weight + target_id[:, None] * weight_stride + at, mask=at < width, other=0.0).to(tl.float32)
        total += x * w
    y = tl.sum(total, 1)
    if BIAS:
        y += tl.load(bias + target_id).to(tl.float32)
    # Do not read memory for an id outside the vocabulary, and return NaN, which cannot pass for a valid logit.
    z = tl.where(is_valid, _capped(y, scale, softcap, factor, SOFTCAP), float("nan"))
    tl.store(target_logit + token, z)
    tl.store(reference + token, z)


@triton.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit(
    do_not_specialize=["num_tokens", "vocab", "vocab_start"],
    do_not_specialize_on_alignment=["bias", "target", "reference", "sums", "moments"],
)
def _exp_product(
    hidden, weight, out, bias, target, reference, sums, moments, num_tokens, vocab, width, scale, softcap, factor,
    vocab_start,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, STORE: tl.constexpr, SUMS: tl.constexpr, ENTROPY: tl.constexpr,
    UPCAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """hidden, weight and out are tensor descriptors. Tiles cover GROUP row blocks before the next vocabulary block, so
    each block of weights is read from memory once per group, and the hidden states stay in L2."""
    num_m = tl.cdiv(num_tokens, BLOCK_M)
    num_n = tl.cdiv(vocab, BLOCK_N)
    for tile in tl.range(tl.program_id(0), num_m * num_n, PROGRAMS, flatten=True):
        first = tile // (GROUP * num_n) * GROUP
        height = min(num_m - first, GROUP)
        within = tile % (GROUP * num_n)
        block = within // height
        m = (first + within % height) * BLOCK_M
        n = block * BLOCK_N
        y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(tl.cdiv(width, BLOCK_K)):
            x = hidden.load([m, k * BLOCK_K])
            w = weight.load([n, k * BLOCK_K])
            if UPCAST:
                x, w = x.to(tl.float32), w.to(tl.float32)
            y = tl.dot(x, w.T, y, input_precision="ieee")
        token = m + tl.arange(0, BLOCK_M)
        column = n + tl.arange(0, BLOCK_N)
        if BIAS:
            y += tl.load(bias + column, mask=column < vocab, other=0.0).to(tl.float32)[None, :]
        target_column = tl.load(target + token, mask=token < num_tokens, other=-1) - vocab_start
        # Rows after the last token become 0 in E; without inf they would be exp(bias).
        c = tl.load(reference + token, mask=token < num_tokens, other=float("inf"))
        d = _capped(y, scale, softcap, factor, SOFTCAP) - c[:, None]
        # Few tiles contain a target, and one contains the end of the vocabulary, beyond which y is 0 and must be
        # excluded. A token whose reference is NaN is zeroed so that it does not spread through the products;
        # _reduce_sums sets its results to NaN again.
        is_bad = c != c
        is_special = tl.max((((target_column >= n) & (target_column < n + BLOCK_N)) | is_bad).to(tl.int32), 0)
        if (is_special > 0) | (n + BLOCK_N > vocab):
            excluded = (column[None, :] == target_column[:, None]) | (column[None, :] >= vocab) | is_bad[:, None]
            d = tl.where(excluded, EXCLUDED, d)
        e = tl.exp2(d)
        if SUMS:
            at = block.to(tl.int64) * num_tokens + token
            if ENTROPY and not UPCAST:  # a joint reduction needs fewer registers, but is slow in the interpreter
                s, q = tl.reduce((e, d * e), 1, _add_both)
                tl.store(sums + at, s, mask=token < num_tokens)
                tl.store(moments + at, q, mask=token < num_tokens)
            else:
                tl.store(sums + at, tl.sum(e, 1), mask=token < num_tokens)
                if ENTROPY:
                    tl.store(moments + at, tl.sum(d * e, 1), mask=token < num_tokens)
        if STORE:
            out.store([m, n], e.to(out.dtype))


@triton.jit(do_not_specialize=["num_tokens", "num_blocks"], do_not_specialize_on_alignment=["sums", "moments"])
def _reduce_sums(
    sums, moments, target_logit, other_sum, total, logp, entropy, num_overflowed, num_tokens, num_blocks, limit,
    ENTROPY: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reduce partial sums to each token's S, 1 + S, log-prob and entropy; count tokens that may have overflowed."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    s = tl.zeros((BLOCK, TOKENS), tl.float32)
    q = tl.zeros((BLOCK, TOKENS), tl.float32)
    for start in range(0, num_blocks, BLOCK):
        block = start + tl.arange(0, BLOCK)
        at = block.to(tl.int64)[:, None] * num_tokens + token[None, :]
        mask = (block < num_blocks)[:, None] & (token < num_tokens)[None, :]
        s += tl.load(sums + at, mask=mask, other=0.0)
        if ENTROPY:
            q += tl.load(moments + at, mask=mask, other=0.0)
    z = tl.load(target_logit + token, mask=token < num_tokens, other=0.0)
    s1 = tl.where(z == z, tl.sum(s, 0), z)
    u = 1.0 + s1
    # log1p with Kahan's correction: log(1 + s) is accurate for small s.
    log_total = tl.where(u == 1.0, s1, tl.log(u) * (s1 / tl.where(u == 1.0, 1.0, u - 1.0)))
    tl.store(other_sum + token, s1, mask=token < num_tokens)
    tl.store(total + token, u, mask=token < num_tokens)
    tl.store(logp + token, -log_total, mask=token < num_tokens)
    if ENTROPY:
        tl.store(entropy + token, log_total - tl.sum(q, 0) * LN2 / u, mask=token < num_tokens)
    overflowed = (s1 >= limit) & (token < num_tokens)  # False for NaN
    tl.atomic_add(num_overflowed, tl.sum(overflowed.to(tl.int32), 0))


@triton.jit
def _logit_tile(
    hidden, weight, bias, target, token, column, num_tokens, vocab, width, hidden_stride, weight_stride, scale, softcap,
    factor, excluded, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute a tile of logits in log2 units; `excluded` at the target and beyond the vocabulary."""
    row, line = token.to(tl.int64)[:, None] * hidden_stride, column.to(tl.int64)[:, None] * weight_stride
    y = tl.zeros((TOKENS, BLOCK_N), tl.float32)
    for start in range(0, width, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)[None, :]
        x = tl.load(hidden + row + at, mask=(token < num_tokens)[:, None] & (at < width), other=0.0)
        w = tl.load(weight + line + at, mask=(column < vocab)[:, None] & (at < width), other=0.0)
        if UPCAST:
            x, w = x.to(tl.float32), w.to(tl.float32)
        y = tl.dot(x, w.T, y, input_precision="ieee")
    if BIAS:
        y += tl.load(bias + column, mask=column < vocab, other=0.0).to(tl.float32)[None, :]
    target_id = tl.load(target + token, mask=token < num_tokens, other=-1)
    is_excluded = (column[None, :] >= vocab) | (column[None, :] == target_id[:, None])
    return tl.where(is_excluded, excluded, _capped(y, scale, softcap, factor, SOFTCAP))


# Recompute tokens that overflowed, in three launches that return immediately if there are none: the largest logit in
# the columns of each program; exponentials and sums relative to the largest logit overall; log-prob and entropy. Tiles
# match _exp_product, which a later backward calls, so that it gets the same logits to the last bit.


@triton.jit(
    do_not_specialize=["num_tokens", "vocab"], do_not_specialize_on_alignment=["bias", "target", "other_sum", "highest"]
)
def _redo_highest(
    hidden, weight, bias, target, other_sum, highest, num_overflowed, num_tokens, vocab, width, hidden_stride,
    weight_stride, scale, softcap, factor, limit, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if tl.load(num_overflowed) > 0:
        for first in range(0, num_tokens, TOKENS):
            token = first + tl.arange(0, TOKENS)
            redo = tl.load(other_sum + token, mask=token < num_tokens, other=0.0) >= limit
            if tl.max(redo.to(tl.int32), 0) > 0:
                found = tl.full((TOKENS,), float("-inf"), tl.float32)
                for n in range(program * BLOCK_N, vocab, PROGRAMS * BLOCK_N):
                    z = _logit_tile(
                        hidden, weight, bias, target, token, n + tl.arange(0, BLOCK_N), num_tokens, vocab, width,
                        hidden_stride, weight_stride, scale, softcap, factor, float("-inf"), BIAS, SOFTCAP, UPCAST,
                        TOKENS, BLOCK_N, BLOCK_K,
                    )  # fmt: skip
                    found = tl.maximum(found, tl.max(z, 1))
                tl.store(highest + program.to(tl.int64) * num_tokens + token, found, mask=redo)


@triton.jit(
    do_not_specialize=["num_tokens", "vocab"],
    do_not_specialize_on_alignment=["bias", "target", "other_sum", "highest", "reference", "sums", "moments"],
)
def _redo_sums(
    hidden, weight, bias, target, other_sum, highest, reference, sums, moments, out, num_overflowed, num_tokens, vocab,
    width, hidden_stride, weight_stride, out_stride, scale, softcap, factor, limit, BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr, STORE: tl.constexpr, ENTROPY: tl.constexpr, UPCAST: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if tl.load(num_overflowed) > 0:
        for first in range(0, num_tokens, TOKENS):
            token = first + tl.arange(0, TOKENS)
            redo = tl.load(other_sum + token, mask=token < num_tokens, other=0.0) >= limit
            if tl.max(redo.to(tl.int32), 0) > 0:
                c = tl.full((TOKENS,), float("-inf"), tl.float32)
                for each in range(0, PROGRAMS):
                    at = highest + each * num_tokens + token.to(tl.int64)
                    c = tl.maximum(c, tl.load(at, mask=redo, other=0.0))
                for n in range(program * BLOCK_N, vocab, PROGRAMS * BLOCK_N):
                    column = n + tl.arange(0, BLOCK_N)
                    z = _logit_tile(
                        hidden, weight, bias, target, token, column, num_tokens, vocab, width, hidden_stride,
                        weight_stride, scale, softcap, factor, float("-inf"), BIAS, SOFTCAP, UPCAST, TOKENS, BLOCK_N,
                        BLOCK_K,
                    )  # fmt: skip
                    d = tl.maximum(z - c[:, None], EXCLUDED)  # -inf times 0 would be NaN
                    e = tl.exp2(d)
                    part = (n // BLOCK_N) * num_tokens + token.to(tl.int64)
                    tl.store(sums + part, tl.sum(e, 1), mask=redo)
                    if ENTROPY:
                        tl.store(moments + part, tl.sum(d * e, 1), mask=redo)
                    if STORE:
                        to = out + token.to(tl.int64)[:, None] * out_stride + column[None, :]
                        tl.store(to, e.to(out.dtype.element_ty), mask=redo[:, None] & (column < vocab)[None, :])
                if program == 0:
                    tl.store(reference + token, c, mask=redo)


@triton.jit(
    do_not_specialize=["num_tokens", "num_blocks"],
    do_not_specialize_on_alignment=["sums", "moments", "target_logit", "reference", "other_sum", "total"],
)
def _redo_reduce(
    sums, moments, target_logit, reference, other_sum, total, logp, entropy, num_overflowed, num_tokens, num_blocks,
    limit, ENTROPY: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Like _reduce_sums, with a reference that is not the target logit."""
    if tl.load(num_overflowed) > 0:
        token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
        redo = tl.load(other_sum + token, mask=token < num_tokens, other=0.0) >= limit
        s = tl.zeros((BLOCK, TOKENS), tl.float32)
        q = tl.zeros((BLOCK, TOKENS), tl.float32)
        for start in range(0, num_blocks, BLOCK):
            block = start + tl.arange(0, BLOCK)
            at = block.to(tl.int64)[:, None] * num_tokens + token[None, :]
            mask = (block < num_blocks)[:, None] & redo[None, :]
            s += tl.load(sums + at, mask=mask, other=0.0)
            if ENTROPY:
                q += tl.load(moments + at, mask=mask, other=0.0)
        d = tl.load(target_logit + token, mask=redo, other=0.0) - tl.load(reference + token, mask=redo, other=0.0)
        at_target = tl.exp2(d)
        s1 = tl.sum(s, 0)
        u = s1 + at_target
        log_total = tl.log(u)
        tl.store(other_sum + token, s1, mask=redo)
        tl.store(total + token, u, mask=redo)
        tl.store(logp + token, d * LN2 - log_total, mask=redo)
        if ENTROPY:
            tl.store(entropy + token, log_total - (tl.sum(q, 0) + d * at_target) * LN2 / u, mask=redo)


@triton.jit(
    do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["grad_logp", "grad_entropy", "target_coef"]
)
def _gradient_coefs(
    grad_logp, grad_entropy, logp, entropy, other_sum, total, target_logit, target_coef, other_coef, active,
    count, num_tokens, k, factor, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute each token's target_coef, other_coef and whether it has a gradient; count tokens with a gradient."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = token < num_tokens
    g = tl.load(grad_logp + token, mask=mask, other=0.0)
    s = tl.load(other_sum + token, mask=mask, other=0.0)
    t = tl.load(total + token, mask=mask, other=1.0)
    is_active = g != 0
    to_target = g * (s / t) * k
    if ENTROPY:
        h = tl.load(grad_entropy + token, mask=mask, other=0.0)
        log_p = tl.load(logp + token, mask=mask, other=0.0)
        is_active |= h != 0
        to_target -= tl.exp(log_p) * (log_p + tl.load(entropy + token, mask=mask, other=0.0)) * h * k
    if SOFTCAP:
        z = tl.load(target_logit + token, mask=mask, other=0.0)
        to_target *= 1.0 - (z / factor) * (z / factor)
    # Inactive tokens get exact zeros, even if they contain NaN.
    tl.store(target_coef + token, tl.where(is_active, to_target, 0.0), mask=mask)
    tl.store(other_coef + token, tl.where(is_active, -k * g / t, 0.0), mask=mask)
    tl.store(active + token, is_active, mask=mask)
    tl.atomic_add(count, tl.sum(is_active.to(tl.int32), 0))


@triton.jit
def _scale_hidden(hidden, factor, active, out, width, hidden_stride, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    """out = factor * hidden, and 0 for inactive tokens, even if their hidden state contains NaN."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(hidden + token * hidden_stride + at, mask=at < width, other=0.0).to(tl.float32)
    if SCALE:
        x *= tl.load(factor + token)
    x = tl.where(tl.load(active + token) != 0, x, 0.0)
    tl.store(out + token * width + at, x.to(out.dtype.element_ty), mask=at < width)


@triton.jit(do_not_specialize=["vocab"])
def _rewrite(
    e, stride, vocab, total, reference, entropy, grad_logp, grad_entropy, factor, k,
    SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Turn E into d loss / d (hidden @ weight.T) in place, except in the target column, which stays 0."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = e + row * stride + column
    value = tl.load(at, mask=column < vocab, other=0.0).to(tl.float32)
    log2_value = tl.log2(tl.maximum(value, 1.2e-38))  # a smaller, subnormal constant is float64 in Triton 3.6
    t = tl.load(total + row)
    dz = -value / t * tl.load(grad_logp + row)
    if ENTROPY:
        log_p = log2_value * LN2 - tl.log(t)
        dz -= value / t * (log_p + tl.load(entropy + row)) * tl.load(grad_entropy + row)
    if SOFTCAP:
        tanh = (log2_value + tl.load(reference + row)) / factor  # the capped logit over its maximum
        dz *= 1.0 - tanh * tanh
    dz = tl.where(value > 0, dz * k, 0.0)
    tl.store(at, dz.to(e.dtype.element_ty), mask=column < vocab)


@triton.jit(do_not_specialize=["vocab"])
def _move_rows(e, stride, vocab, source, BLOCK: tl.constexpr):
    """Copy row source[i] of E to row i. A source other than i itself is never also a destination."""
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(source + i)
    if row != i:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(e + row * stride + column, mask=column < vocab)
        tl.store(e + i * stride + column, value, mask=column < vocab)


@triton.jit(
    do_not_specialize=["vocab"], do_not_specialize_on_alignment=["target", "other_coef", "target_coef", "source"]
)
def _finish_hidden(
    product, weight, target, other_coef, target_coef, source, out, vocab, width, weight_stride,
    MOVED: tl.constexpr, APPLY_COEF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[n] = other_coef[n] product[i] + target_coef[n] weight[target[n]]; n = source[i] if rows moved, else n = i."""
    i = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = i
    if MOVED:
        token = tl.load(source + i)
    target_id = tl.minimum(tl.maximum(tl.load(target + token), 0), vocab - 1)  # if clamped, target_coef is NaN
    x = tl.load(product + i * width + at, mask=at < width, other=0.0)
    if APPLY_COEF:
        x *= tl.load(other_coef + token)
    w = tl.load(weight + target_id * weight_stride + at, mask=at < width, other=0.0).to(tl.float32)
    x += w * tl.load(target_coef + token)
    tl.store(out + token * width + at, x.to(out.dtype.element_ty), mask=at < width)


@triton.jit(do_not_specialize=["vocab_start"])
def _finish_weight(
    product, out, hidden, target_coef, order, begin, vocab_start, width, hidden_stride,
    IN_PLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[v] = product[v] + sum over tokens n with target v of target_coef[n] hidden[n].

    `order` lists the tokens sorted by target; tokens with target v start at begin[v]. One program adds all of them in
    this order, without atomics, so the sum is deterministic.
    """
    i = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(begin + vocab_start + i)
    stop = tl.load(begin + vocab_start + i + 1)
    if not IN_PLACE or stop > start:
        total = tl.load(product + i * width + at, mask=at < width, other=0.0).to(tl.float32)
        for j in range(start, stop):
            token = tl.load(order + j)
            x = tl.load(hidden + token * hidden_stride + at, mask=at < width, other=0.0).to(tl.float32)
            coef = tl.load(target_coef + token)
            total += tl.where(coef == 0.0, 0.0, x * coef)
        tl.store(out + i * width + at, total.to(out.dtype.element_ty), mask=at < width)


@triton.jit(do_not_specialize=["count"])
def _scale_unless_one(x, count, factor, BLOCK: tl.constexpr):
    by = tl.load(factor).to(tl.float32)
    if by != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < count).to(tl.float32) * by
        tl.store(x + at, value.to(x.dtype.element_ty), mask=at < count)


def scale_unless_one(
    x: Tensor,  # (...) contiguous
    factor: Tensor,  # () on the same device
) -> Tensor:  # (...)
    """x *= factor, without a host sync, and without reading x if the factor is 1."""
    if x.numel():
        _scale_unless_one[(triton.cdiv(x.numel(), 16384),)](x, x.numel(), factor, BLOCK=16384, num_warps=16)
    return x


class Stats(NamedTuple):
    """Per-token values that the gradient needs, all (n,) fp32."""

    logp: Tensor
    entropy: Tensor | None
    other_sum: Tensor  # S: sum of exponentials over all columns except the target's
    total: Tensor  # S plus the target's exponential, which is 1 unless the token was recomputed
    target_logit: Tensor  # in log2 units
    reference: Tensor  # c, in log2 units


class Plan(NamedTuple):
    """Inputs of a chunk's gradient."""

    count: int  # tokens with a gradient
    source: Tensor | None  # (count,) indices of tokens with a gradient; None = all
    scaled: Tensor | None  # (n, D) other_coef * hidden
    other_coef: Tensor  # (n,) factor of the exponentials
    target_coef: Tensor  # (n,) factor of the target column
    grad_logp: Tensor  # (n,)
    grad_entropy: Tensor | None  # (n,)


class TritonHead:
    """Log-probs and gradients of one call, with the interface of linear_logprob.TorchHead."""

    def __init__(
        self,
        hidden: Tensor,  # (N, D)
        weight: Tensor,  # (V, D)
        bias: Tensor | None,  # (V,)
        target: Tensor,  # (N,) int64
        *,
        scale: float,
        softcap: float | None,
        temperature: float,
        entropy: bool,
        skip: bool = True,
    ):
        self.hidden, self.weight, self.weight_dtype = _aligned(hidden), _aligned(weight.to(hidden.dtype)), weight.dtype
        self.target, self.bias = target.contiguous(), None if bias is None else bias.to(hidden.dtype).contiguous()
        self.softcap, self.scale, self.entropy = softcap, scale, entropy
        self.k = scale / temperature
        self.factor = LOG2E / temperature * (scale if softcap is None else softcap)
        (self.num_tokens, self.width), self.vocab = hidden.shape, weight.shape[0]
        self.chunk = _even_chunk(self.num_tokens, CHUNK)
        self.skip = skip
        self.last: tuple[int, _AsyncCount] | None = None  # last chunk: number of tokens, and of tokens with a gradient
        self.exponentials = self.grad_hidden = self.grad_weight = self.grad_bias = self.target_coef = self.order = None

    def logps(self) -> Stats:
        starts = range(0, max(1, self.num_tokens), LOGP_TOKENS)
        parts = [self._stats(i, min(i + LOGP_TOKENS, self.num_tokens), None) for i in starts]
        stats = parts[0]
        if len(parts) > 1:
            stats = Stats(*(None if x[0] is None else torch.cat(x) for x in zip(*parts, strict=True)))
        return stats

    def allocate_grads(self, *, hidden: bool, weight: bool, bias: bool) -> None:
        device = self.hidden.device
        if weight and self.weight_dtype != torch.float32 and self.num_tokens <= 2 * self.width:
            # In one chunk: its exponentials take no more memory than the fp32 sum over chunks, which this avoids.
            self.chunk = max(1, self.num_tokens)
        if hidden:
            # Up to 31 extra rows: until its gradient is written, a chunk's memory is scratch space in blocks of 32.
            last = self.num_tokens % self.chunk or self.chunk
            shape = (self.num_tokens + max(-last % 32, -self.num_tokens % 32), self.width)
            self.scratch = torch.empty(shape, dtype=self.hidden.dtype, device=device)
            self.grad_hidden = self.scratch[: self.num_tokens]
        self.needs_weight = weight
        if bias:
            self.grad_bias = torch.zeros(self.vocab, device=device)
        self.target_coef = torch.zeros(self.num_tokens, device=device)

    def forward_chunk(self, start: int, stop: int) -> Stats:
        if self.exponentials is None:
            self.exponentials = self._buffer(self.chunk, self.vocab)
        return self._stats(start, stop, self.exponentials)

    def plan(
        self,
        start: int,
        stats: Stats,
        grad_logp: Tensor,  # (N,) tokens of the chunk
        grad_entropy: Tensor | None,  # (N,)
    ) -> Plan:
        plan, active, count = self._plan(start, stats, grad_logp, grad_entropy)
        if not self.skip:
            return plan
        counting, last = _AsyncCount(count), self.last
        self.last = (len(active), counting)
        # Reading the count makes the host wait for the device, and then the device for the host. If every token of the
        # last chunk had a gradient, assume the same for this chunk; its count is read with the next chunk.
        if last is not None and last[1].read() == last[0]:
            return plan
        source = _pack_active(active)  # queued before the wait, in case it is needed
        count = counting.read()
        return plan._replace(count=count, source=None if count == len(active) else source[:count])

    def backward_chunk(self, start: int, stats: Stats, plan: Plan) -> None:
        count, source, chunk_size = plan.count, plan.source, len(plan.target_coef)
        e, scaled = self.exponentials, plan.scaled
        if source is not None:
            if count:
                _move_rows[(count, triton.cdiv(self.vocab, 8192))](e, e.stride(0), self.vocab, source, BLOCK=8192)
            if scaled is not None:
                scaled = scaled[torch.nn.functional.pad(source, (0, -count % 32))]  # the padding is zeroed below
            if self.grad_hidden is not None:
                self.grad_hidden[start : start + chunk_size] = 0
        if count == 0:
            return
        rewritten = plan.grad_entropy is not None or self.softcap is not None
        if rewritten:
            self._rewrite(e, self.vocab, stats, plan)
        # Pad the token count of sums to 32, with zeros in the other factor; E has been written that far.
        left = e[: _round_up(count, 32), : self.vocab].T
        if self.grad_bias is not None:
            coef = torch.ones_like(plan.other_coef) if rewritten else plan.other_coef
            coef = coef[:count] if source is None else coef[source]
            coef = torch.nn.functional.pad(coef, (0, -count % 32)).unsqueeze(1)
            self.grad_bias += _product(left, coef.to(e.dtype)).squeeze(1)
        if scaled is not None:
            scaled[count:] = 0
            if chunk_size < self.num_tokens or self.weight_dtype == torch.float32:
                self.grad_weight = _add_product(self.grad_weight, left, scaled)
            else:  # a single chunk: rounded once here, and once more when a target is added
                self.grad_weight = torch.mm(left, scaled).to(self.weight_dtype)
        if self.grad_hidden is None:
            return
        step = PART * max(1, self.width // 1024)
        for i in range(0, count, step):
            part = slice(i, min(i + step, count))
            rows = slice(i, i + _round_up(part.stop - i, ROWS))
            # In one expression, because a name would keep this product in memory during the next one.
            self._finish_hidden(
                _product(e[rows, : self.vocab], self.weight), start, plan, part, apply_coef=not rewritten
            )

    def finish(self) -> None:
        self.exponentials = None  # freed before anything else is allocated
        if self.grad_bias is not None and self.num_tokens:
            self.grad_bias.index_put_((self.target,), self.target_coef, accumulate=True)
        if self.needs_weight and self.grad_weight is None:  # no token had a gradient
            self.grad_weight = torch.zeros_like(self.weight, dtype=self.weight_dtype)
        elif self.needs_weight:
            total, self.grad_weight = self.grad_weight, None
            out = None if total.dtype == self.weight_dtype else torch.empty_like(self.weight, dtype=self.weight_dtype)
            self.grad_weight = total if out is None else out
            self._finish_weight(total, self.grad_weight, 0)

    def backward(
        self,
        stats: Stats,
        grad_logp: Tensor,  # (N,)
        grad_entropy: Tensor | None,  # (N,)
    ) -> None:
        if self.num_tokens == 0:
            self.finish()
            return
        plan, _, _ = self._plan(0, stats, grad_logp, grad_entropy)
        columns = max(256, SLICE // self.num_tokens // 256 * 256)
        e = self._buffer(self.num_tokens, min(columns, self.vocab))
        padded = _round_up(self.num_tokens, 32)
        rewritten = plan.grad_entropy is not None or self.softcap is not None
        if plan.scaled is not None:
            plan.scaled[self.num_tokens :] = 0
            self.grad_weight = torch.empty_like(self.weight, dtype=self.weight_dtype)
        if self.grad_bias is not None:
            coef = torch.ones_like(plan.other_coef) if rewritten else plan.other_coef
            coef = torch.nn.functional.pad(coef, (0, padded - self.num_tokens)).unsqueeze(1).to(e.dtype)
        product = None
        for low in range(0, self.vocab, columns):
            part = slice(low, min(low + columns, self.vocab))
            width = part.stop - part.start
            self._exponentials(0, self.num_tokens, stats.reference, e, columns=part)
            if rewritten:
                self._rewrite(e, width, stats, plan)
            if self.grad_bias is not None:
                self.grad_bias[part] = _product(e[:padded, :width].T, coef).squeeze(1)
            if plan.scaled is not None:
                self._finish_weight(_product(e[:padded, :width].T, plan.scaled), self.grad_weight[part], low)
            if self.grad_hidden is not None:
                product = _add_product(product, e[: _round_up(self.num_tokens, ROWS), :width], self.weight[part])
        if self.grad_hidden is not None:
            self._finish_hidden(product, 0, plan, slice(0, self.num_tokens), apply_coef=not rewritten)
        if self.grad_bias is not None:
            self.grad_bias.index_put_((self.target,), self.target_coef, accumulate=True)

    def _stats(self, start: int, stop: int, store: Tensor | None) -> Stats:
        num_tokens, device = stop - start, self.hidden.device
        logp, entropy = torch.empty(num_tokens, device=device), torch.empty(num_tokens, device=device)
        other_sum, total, target_logit, reference = torch.empty(4, num_tokens, device=device).unbind()
        stats = Stats(logp, entropy if self.entropy else None, other_sum, total, target_logit, reference)
        if num_tokens == 0:
            return stats
        hidden, target = self.hidden[start:stop], self.target[start:stop]
        softcap = 1.0 if self.softcap is None else self.softcap
        _target_logit[(num_tokens,)](
            hidden, self.weight, self.bias, target, target_logit, reference, self.vocab, self.width, hidden.stride(0),
            self.weight.stride(0), self.scale, softcap, self.factor, BIAS=self.bias is not None,
            SOFTCAP=self.softcap is not None, BLOCK=1024,
        )  # fmt: skip
        sums, moments = self._exponentials(start, stop, reference, store)
        num_overflowed = torch.zeros(1, dtype=torch.int32, device=device)
        _reduce_sums[(triton.cdiv(num_tokens, 16),)](
            sums, moments, target_logit, other_sum, total, logp, entropy, num_overflowed, num_tokens, len(sums),
            OVERFLOW_LIMIT, ENTROPY=self.entropy, TOKENS=16, BLOCK=64,
        )  # fmt: skip
        self._redo_overflowed(start, stop, stats, num_overflowed, sums, moments, store)
        return stats

    def _exponentials(
        self, start: int, stop: int, reference: Tensor, store: Tensor | None, columns: slice | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Run the product and its epilogue. Return the partial sums per block of columns; None for a column slice."""
        hidden, weight, bias = self.hidden[start:stop], self.weight, self.bias
        if columns is not None:
            weight, bias = weight[columns], None if bias is None else bias[columns]
        num_tokens, vocab, device = stop - start, weight.shape[0], hidden.device
        m, n, k = _tile(hidden.dtype)
        num_blocks = triton.cdiv(vocab, n)
        sums = moments = None
        if columns is None:
            sums = self._sums_buffer(start, num_blocks, num_tokens)
            moments = torch.empty(num_blocks, num_tokens, device=device) if self.entropy else None
        programs = _num_programs(device)
        # Without STORE, `out` is not written, but a descriptor needs a tensor.
        out = hidden if store is None else store[:, :vocab]
        _exp_product[(min(programs, triton.cdiv(num_tokens, m) * num_blocks),)](
            TensorDescriptor.from_tensor(hidden, [m, k]), TensorDescriptor.from_tensor(weight, [n, k]),
            TensorDescriptor.from_tensor(out, [m, n]), bias, self.target[start:stop], reference, sums, moments,
            num_tokens, vocab, self.width, self.scale, 1.0 if self.softcap is None else self.softcap, self.factor,
            0 if columns is None else columns.start, BIAS=bias is not None, SOFTCAP=self.softcap is not None,
            STORE=store is not None, SUMS=columns is None, ENTROPY=self.entropy,
            UPCAST=device.type == "cpu",  # Triton's interpreter would multiply bfloat16 bit patterns as integers
            BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP=8, PROGRAMS=programs,
            num_warps=8, num_stages=3 if store is not None else 4,  # the maximum that fits 227 KiB of shared memory
        )  # fmt: skip
        return sums, moments

    def _redo_overflowed(
        self, start: int, stop: int, stats: Stats, num_overflowed: Tensor, sums: Tensor, moments: Tensor | None,
        store: Tensor | None,
    ) -> None:  # fmt: skip
        """Recompute tokens whose target is too unlikely to be the reference; overwrites the sums."""
        hidden, target, num_tokens = self.hidden[start:stop], self.target[start:stop], stop - start
        device, (m, n, k) = hidden.device, _tile(hidden.dtype)
        programs = _num_programs(device)
        highest = torch.empty(programs, num_tokens, device=device)
        out = hidden if store is None else store  # not written without STORE
        sizes = (num_overflowed, num_tokens, self.vocab, self.width, hidden.stride(0), self.weight.stride(0))
        scales = (self.scale, 1.0 if self.softcap is None else self.softcap, self.factor, OVERFLOW_LIMIT)
        options = {"BIAS": self.bias is not None, "SOFTCAP": self.softcap is not None, "UPCAST": device.type == "cpu",
                   "TOKENS": m, "BLOCK_N": n, "BLOCK_K": k, "PROGRAMS": programs,
                   "num_warps": 8, "num_stages": 2}  # fmt: skip
        _redo_highest[(programs,)](
            hidden, self.weight, self.bias, target, stats.other_sum, highest, *sizes, *scales, **options
        )
        _redo_sums[(programs,)](
            hidden, self.weight, self.bias, target, stats.other_sum, highest, stats.reference, sums, moments, out,
            *sizes, out.stride(0), *scales, STORE=store is not None, ENTROPY=self.entropy, **options,
        )  # fmt: skip
        _redo_reduce[(triton.cdiv(num_tokens, 16),)](
            sums, moments, stats.target_logit, stats.reference, stats.other_sum, stats.total, stats.logp, stats.entropy,
            num_overflowed, num_tokens, len(sums), OVERFLOW_LIMIT, ENTROPY=self.entropy, TOKENS=16, BLOCK=64,
        )  # fmt: skip

    def _plan(
        self, start: int, stats: Stats, grad_logp: Tensor, grad_entropy: Tensor | None
    ) -> tuple[Plan, Tensor, Tensor]:  # a plan for all tokens, (n,) whether a token has a gradient, (1,) their number
        # autograd may pass a scalar expanded with stride 0; the kernels assume stride 1
        grad_logp = grad_logp.contiguous()
        grad_entropy = None if grad_entropy is None else grad_entropy.contiguous()
        num_tokens = len(grad_logp)
        other_coef, target_coef = torch.empty_like(stats.other_sum), self.target_coef[start : start + num_tokens]
        active = torch.empty(num_tokens, dtype=torch.bool, device=other_coef.device)
        count = torch.zeros(1, dtype=torch.int32, device=other_coef.device)
        _gradient_coefs[(triton.cdiv(num_tokens, 256),)](
            grad_logp, grad_entropy, stats.logp, stats.entropy, stats.other_sum, stats.total, stats.target_logit,
            target_coef, other_coef, active, count, num_tokens, self.k, self.factor,
            SOFTCAP=self.softcap is not None, ENTROPY=grad_entropy is not None, BLOCK=256,
        )  # fmt: skip
        scaled = None
        if self.needs_weight:
            padded = _round_up(num_tokens, 32)
            scaled = self.scratch[start : start + padded] if self.grad_hidden is not None else None
            if scaled is None:
                scaled = torch.empty(padded, self.width, dtype=self.hidden.dtype, device=other_coef.device)
            _scale_hidden[(num_tokens, triton.cdiv(self.width, 1024))](
                self.hidden[start:], other_coef, active, scaled, self.width, self.hidden.stride(0),
                SCALE=grad_entropy is None and self.softcap is None, BLOCK=1024,
            )  # fmt: skip
        return Plan(num_tokens, None, scaled, other_coef, target_coef, grad_logp, grad_entropy), active, count

    def _rewrite(self, e: Tensor, vocab: int, stats: Stats, plan: Plan) -> None:
        columns = (stats.total, stats.reference, stats.entropy, plan.grad_logp, plan.grad_entropy)
        if plan.source is not None:
            columns = tuple(None if x is None else x[plan.source] for x in columns)
        _rewrite[(len(columns[0]), triton.cdiv(vocab, 4096))](
            e, e.stride(0), vocab, *columns, self.factor, self.k, SOFTCAP=self.softcap is not None,
            ENTROPY=plan.grad_entropy is not None, BLOCK=4096,
        )  # fmt: skip

    def _finish_hidden(self, product: Tensor, start: int, plan: Plan, part: slice, *, apply_coef: bool) -> None:
        """Write grad_hidden for rows `part` of E of the chunk at `start`; if rows moved, plan.source maps them back."""
        moved = plan.source is not None
        first = 0 if moved else part.start
        _finish_hidden[(part.stop - part.start, triton.cdiv(self.width, 1024))](
            product, self.weight, self.target[start + first :], plan.other_coef[first:], plan.target_coef[first:],
            plan.source[part] if moved else None, self.grad_hidden[start + first :], self.vocab, self.width,
            self.weight.stride(0), MOVED=moved, APPLY_COEF=apply_coef, BLOCK=1024,
        )  # fmt: skip

    def _finish_weight(self, product: Tensor, out: Tensor, vocab_start: int) -> None:
        if self.order is None:
            sorted_target, self.order = self.target.sort(stable=True)
            ids = torch.arange(self.vocab + 1, device=sorted_target.device)
            self.begin = torch.searchsorted(sorted_target, ids)
        _finish_weight[(out.shape[0], triton.cdiv(self.width, 2048))](
            product, out, self.hidden, self.target_coef, self.order, self.begin, vocab_start, self.width,
            self.hidden.stride(0), IN_PLACE=product.data_ptr() == out.data_ptr(), BLOCK=2048,
        )  # fmt: skip

    def _sums_buffer(self, start: int, num_blocks: int, num_tokens: int) -> Tensor:  # (num_blocks, num_tokens) fp32
        """Return memory for partial sums: the memory of these tokens' gradient, not yet written, if large enough."""
        if self.grad_hidden is not None:
            memory = self.scratch[start : start + num_tokens].view(-1).view(torch.float32)
            if memory.numel() >= num_blocks * num_tokens:
                return memory[: num_blocks * num_tokens].view(num_blocks, num_tokens)
        return torch.empty(num_blocks, num_tokens, device=self.hidden.device)

    def _buffer(self, num_tokens: int, columns: int) -> Tensor:
        # Whole blocks of rows, because products read all of them; rows are 16-byte aligned for TMA.
        shape = (_round_up(num_tokens, ROWS), _round_up(columns, 8))
        return torch.empty(shape, dtype=self.hidden.dtype, device=self.hidden.device)


class _AsyncCount:
    """Asynchronous copy of an integer to the host; only read() waits for it."""

    def __init__(self, x: Tensor) -> None:  # (1,)
        self.host, self.event = x, None
        if x.is_cuda:
            self.host, self.event = torch.empty(x.shape, dtype=x.dtype, pin_memory=True), torch.cuda.Event()
            self.host.copy_(x, non_blocking=True)
            self.event.record()

    def read(self) -> int:
        if self.event is not None:
            self.event.synchronize()
        return int(self.host[0])


def obstacle(
    hidden: Tensor,  # (N, D)
) -> str | None:
    """Return why the kernels cannot run on these hidden states, or None."""
    if hidden.is_cuda and torch.cuda.get_device_capability(hidden.device)[0] not in (9, 10):
        return "the kernels need a Hopper or Blackwell GPU (shared memory and copy engine)"
    if not hidden.is_cuda and not triton.knobs.runtime.interpret:
        return f"device {hidden.device}: Triton needs CUDA or TRITON_INTERPRET=1"
    if hidden.dtype not in (torch.bfloat16, torch.float32):
        return f"dtype {hidden.dtype}: exponentials need the range of bfloat16 or float32"
    if hidden.shape[1] * hidden.element_size() % 16:
        return f"width {hidden.shape[1]}: rows must be a multiple of 16 bytes"
    return None


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _even_chunk(num_tokens: int, limit: int) -> int:
    """Return the chunk size for an even split into as few chunks as the limit allows."""
    return -(-num_tokens // max(1, -(-num_tokens // limit))) or 1


def _pack_active(active: Tensor) -> Tensor:  # (n,) source of each row; valid for the first active.sum()
    """Return the source row of each leading row when active rows are packed to the front with as few moves as possible.

    Only gaps in the first active.sum() rows are filled, with active rows from after them.
    """
    row = torch.arange(len(active), device=active.device)
    count = active.sum()
    gap = ~active & (row < count)
    order = (~active).argsort(stable=True)  # active rows in ascending order, then inactive rows
    mover = count - gap.sum() + gap.cumsum(0) - 1  # the last active rows fill the gaps, in order
    return torch.where(gap, order[mover.clamp(min=0)], row)


def _aligned(x: Tensor) -> Tensor:
    """Return x with contiguous, 16-byte aligned rows, as a tensor descriptor needs. Copies only if necessary."""
    ok = x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    return x if ok else x.clone(memory_format=torch.contiguous_format)


def _tile(dtype: torch.dtype) -> tuple[int, int, int]:  # tokens, columns, width
    return (128, 256, 64) if dtype == torch.bfloat16 else (32, 64, 32)


def _num_programs(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _product(
    a: Tensor,  # (M, K)
    b: Tensor,  # (K, N)
) -> Tensor:  # (M, N) fp32
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda and a.dtype != torch.float32 else a.float() @ b.float()


def _add_product(
    total: Tensor | None,  # (M, N) fp32; None = zero
    a: Tensor,  # (M, K)
    b: Tensor,  # (K, N)
) -> Tensor:  # (M, N)
    if total is None:
        return _product(a, b)
    if a.is_cuda and a.dtype != torch.float32:
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    return total.addmm_(a.float(), b.float())
