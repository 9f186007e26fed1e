"""Triton path of linear_logprob: exponentials in the epilogue of the product, and no pass over the logits after it.

Notation as in linear_logprob.py. Each row has a reference c_n: its own target logit, computed beforehand by a plain dot
product. The epilogue of the first product forms, in fp32,

    E_nv = exp(z_nv - c_n), 0 at the target        S_n = sum_v E_nv        Q_n = sum_v (z_nv - c_n) E_nv
    logp_n = -log(1 + S_n)                         H_n = log(1 + S_n) - Q_n / (1 + S_n)

so log-probs never see a rounded logit, and a confident target keeps its digits. When gradients follow, E is stored in
the input dtype, whose relative rounding does not depend on the size of the logits. It is never turned into d loss /
d logits: what is missing is one factor per row and the target column, and both fit elsewhere. With k = scale /
temperature and g_n = d loss / d logp_n,

    rest_n = -k g_n / (1 + S_n)        d hidden = rest * (E @ weight) + goal * weight[target]
    goal_n = k g_n S_n / (1 + S_n)     d weight = E.T @ (rest * hidden) + (goal * hidden added at row target)

where the terms with `goal` are exact fp32 sums beside the products. Only a softcap or a gradient of the entropy needs
the elementwise form; then one kernel rewrites E in place first.

Two ways to cut the work. In one pass with the loss, by rows: E of a chunk lives until its loss is known. In a backward
that comes later, by columns: c, S and g are known then, so each slice of d weight is made whole, once.

A target so unlikely that E would overflow (log-prob under -68) is found by its S_n, and the row is done again with c_n
the largest logit. But for such rows, row order, chunking and N never change a log-prob: it depends on its row alone.
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
NOTHING = tl.constexpr(-1000.0)  # exp2 of it is 0, and 0 times it is 0, which -inf would not give
TOO_LARGE = 2.0**99  # a sum of exponentials beyond this may be infinite, or about to be
CHUNK = 4096  # rows of E held at a time
PART = 512  # rows of the fp32 product E @ weight held at a time, for each 1024 of width: fast, and small beside E
SCORED = 1 << 16  # rows scored at a time; each has a partial sum for every 256 words
SLICE = 1 << 28  # elements of E held at a time when the work is cut by columns


# Numbers of rows and words change from call to call, so no kernel is compiled anew for those that happen to be 1 or a
# multiple of 16, or for a slice that is not aligned.


@triton.jit
def _capped(y, scale, softcap, factor, SOFTCAP: tl.constexpr):
    """Logits in log2 units. tanh is written with exp2 so that it runs everywhere; its error is absolute, 1e-7."""
    if SOFTCAP:
        a = tl.exp2(tl.abs(y * scale / softcap) * (-2.0 / LN2))
        t = (1.0 - a) / (1.0 + a)
        z = tl.where(y * scale < 0, -t, t) * factor
    else:
        z = y * factor
    return z


@triton.jit(do_not_specialize=["vocab"], do_not_specialize_on_alignment=["target"])
def _target_logit(
    hidden, weight, bias, target, own, reference, vocab, width, hidden_stride, weight_stride, scale, softcap, factor,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    word = tl.load(target + row)
    is_word = (word >= 0) & (word < vocab)
    word = tl.where(is_word, word, 0)
    total = tl.zeros((1, BLOCK), tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)[None, :]
        x = tl.load(hidden + row[:, None] * hidden_stride + at, mask=at < width, other=0.0).to(tl.float32)
        w = tl.load(weight + word[:, None] * weight_stride + at, mask=at < width, other=0.0).to(tl.float32)
        total += x * w
    y = tl.sum(total, 1)
    if BIAS:
        y += tl.load(bias + word).to(tl.float32)
    # An id outside the vocabulary must not be read from memory, and must not pass for a number either.
    z = tl.where(is_word, _capped(y, scale, softcap, factor, SOFTCAP), float("nan"))
    tl.store(own + row, z)
    tl.store(reference + row, z)


@triton.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit(
    do_not_specialize=["rows", "vocab", "first_word"],
    do_not_specialize_on_alignment=["bias", "target", "reference", "sums", "moments"],
)
def _exp_product(
    hidden, weight, out, bias, target, reference, sums, moments, rows, vocab, width, scale, softcap, factor, first_word,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, STORE: tl.constexpr, SUMS: tl.constexpr, ENTROPY: tl.constexpr,
    UPCAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """hidden, weight, out are tensor descriptors. Tiles run down GROUP row blocks before the next vocabulary block, so
    that a block of weights is read from memory once per group and the rows stay in L2."""
    num_m = tl.cdiv(rows, BLOCK_M)
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
        row = m + tl.arange(0, BLOCK_M)
        column = n + tl.arange(0, BLOCK_N)
        if BIAS:
            y += tl.load(bias + column, mask=column < vocab, other=0.0).to(tl.float32)[None, :]
        word = tl.load(target + row, mask=row < rows, other=-1) - first_word
        c = tl.load(reference + row, mask=row < rows, other=float("inf"))  # rows past the end are 0, not bias alone
        d = _capped(y, scale, softcap, factor, SOFTCAP) - c[:, None]
        # Few tiles hold a target, and one the end of the vocabulary, past which there are zeros, not nothing. A row of
        # NaN becomes zeros here, lest it spread through the products, and NaN again in _finish_rows.
        is_bad = c != c
        is_special = tl.max((((word >= n) & (word < n + BLOCK_N)) | is_bad).to(tl.int32), 0)
        if (is_special > 0) | (n + BLOCK_N > vocab):
            out_of = (column[None, :] == word[:, None]) | (column[None, :] >= vocab) | is_bad[:, None]
            d = tl.where(out_of, NOTHING, d)
        e = tl.exp2(d)
        if SUMS:
            at = block.to(tl.int64) * rows + row
            if ENTROPY and not UPCAST:  # both sums at once need fewer registers; the interpreter is slow at it
                s, q = tl.reduce((e, d * e), 1, _add_both)
                tl.store(sums + at, s, mask=row < rows)
                tl.store(moments + at, q, mask=row < rows)
            else:
                tl.store(sums + at, tl.sum(e, 1), mask=row < rows)
                if ENTROPY:
                    tl.store(moments + at, tl.sum(d * e, 1), mask=row < rows)
        if STORE:
            out.store([m, n], e.to(out.dtype))


@triton.jit(do_not_specialize=["rows", "num_blocks"], do_not_specialize_on_alignment=["sums", "moments"])
def _finish_rows(
    sums, moments, own, total, total_1, logp, entropy, rows, num_blocks,
    ENTROPY: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """S, 1 + S, log-prob and entropy of each row from its partial sums."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    s = tl.zeros((BLOCK, ROWS), tl.float32)
    q = tl.zeros((BLOCK, ROWS), tl.float32)
    for start in range(0, num_blocks, BLOCK):
        block = start + tl.arange(0, BLOCK)
        at = block.to(tl.int64)[:, None] * rows + row[None, :]
        there = (block < num_blocks)[:, None] & (row < rows)[None, :]
        s += tl.load(sums + at, mask=there, other=0.0)
        if ENTROPY:
            q += tl.load(moments + at, mask=there, other=0.0)
    z = tl.load(own + row, mask=row < rows, other=0.0)
    s1 = tl.where(z == z, tl.sum(s, 0), z)
    u = 1.0 + s1
    # log(1 + s) with the digits of a small s: log1p by Kahan's correction.
    log_total = tl.where(u == 1.0, s1, tl.log(u) * (s1 / tl.where(u == 1.0, 1.0, u - 1.0)))
    tl.store(total + row, s1, mask=row < rows)
    tl.store(total_1 + row, u, mask=row < rows)
    tl.store(logp + row, -log_total, mask=row < rows)
    if ENTROPY:
        tl.store(entropy + row, log_total - tl.sum(q, 0) * LN2 / u, mask=row < rows)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["grad_logp", "grad_entropy", "goal"])
def _plan_rows(
    grad_logp, grad_entropy, logp, entropy, sums, total, own, reference, goal, rest, active, counts, rows, k, factor,
    limit, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """goal and rest of each row; whether it has a gradient; how many have, and how many must be done again."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < rows
    g = tl.load(grad_logp + row, mask=there, other=0.0)
    s = tl.load(sums + row, mask=there, other=0.0)
    t = tl.load(total + row, mask=there, other=1.0)
    z = tl.load(own + row, mask=there, other=0.0)
    is_active = g != 0
    to_target = g * (s / t) * k
    if ENTROPY:
        h = tl.load(grad_entropy + row, mask=there, other=0.0)
        log_p = tl.load(logp + row, mask=there, other=0.0)
        is_active |= h != 0
        to_target -= tl.exp(log_p) * (log_p + tl.load(entropy + row, mask=there, other=0.0)) * h * k
    if SOFTCAP:
        to_target *= 1.0 - (z / factor) * (z / factor)
    # A row done again has another reference than its target; one that is not a number stays as it is.
    again = there & (s >= limit) & (z == tl.load(reference + row, mask=there, other=0.0))
    # Zeros, whatever the row holds: one that takes no part may be anything, even NaN.
    tl.store(goal + row, tl.where(is_active, to_target, 0.0), mask=there)
    tl.store(rest + row, tl.where(is_active, -k * g / t, 0.0), mask=there)
    tl.store(active + row, is_active, mask=there)
    tl.atomic_add(counts, tl.sum(is_active.to(tl.int32), 0))
    tl.atomic_add(counts + 1, tl.sum(again.to(tl.int32), 0))


@triton.jit
def _scale_rows(hidden, factor, active, out, width, hidden_stride, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    """out = factor * hidden, and 0 where the row takes no part: it may be anything, even NaN."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(hidden + row * hidden_stride + at, mask=at < width, other=0.0).to(tl.float32)
    if SCALE:
        x *= tl.load(factor + row)
    x = tl.where(tl.load(active + row) != 0, x, 0.0)
    tl.store(out + row * width + at, x.to(out.dtype.element_ty), mask=at < width)


@triton.jit(do_not_specialize=["vocab"])
def _rewrite(
    e, stride, vocab, total, reference, entropy, grad_logp, grad_entropy, factor, k,
    SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """E to d loss / d (hidden @ weight.T) in place, but for the target column, which stays 0."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = e + row * stride + column
    value = tl.load(at, mask=column < vocab, other=0.0).to(tl.float32)
    log2_value = tl.log2(tl.maximum(value, 1e-38))
    t = tl.load(total + row)
    dz = -value / t * tl.load(grad_logp + row)
    if ENTROPY:
        log_p = log2_value * LN2 - tl.log(t)
        dz -= value / t * (log_p + tl.load(entropy + row)) * tl.load(grad_entropy + row)
    if SOFTCAP:
        tanh = (log2_value + tl.load(reference + row)) / factor  # the capped logit over its largest
        dz *= 1.0 - tanh * tanh
    dz = tl.where(value > 0, dz * k, 0.0)
    tl.store(at, dz.to(e.dtype.element_ty), mask=column < vocab)


@triton.jit(do_not_specialize=["vocab"])
def _move_rows(e, stride, vocab, source, BLOCK: tl.constexpr):
    """Row i becomes row source[i]. Sources that differ from their place are never places themselves."""
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(source + i)
    if row != i:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(e + row * stride + column, mask=column < vocab)
        tl.store(e + i * stride + column, value, mask=column < vocab)


@triton.jit(do_not_specialize=["vocab"], do_not_specialize_on_alignment=["target", "rest", "goal", "source"])
def _finish_hidden(
    product, weight, target, rest, goal, source, out, vocab, width, weight_stride,
    MOVED: tl.constexpr, REST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[row] = rest[row] product[i] + goal[row] weight[target[row]]; row is source[i] if rows were moved, else i."""
    i = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = i
    if MOVED:
        row = tl.load(source + i)
    word = tl.minimum(tl.maximum(tl.load(target + row), 0), vocab - 1)  # of an id outside, `goal` is not a number
    x = tl.load(product + i * width + at, mask=at < width, other=0.0)
    if REST:
        x *= tl.load(rest + row)
    w = tl.load(weight + word * weight_stride + at, mask=at < width, other=0.0).to(tl.float32)
    x += w * tl.load(goal + row)
    tl.store(out + row * width + at, x.to(out.dtype.element_ty), mask=at < width)


@triton.jit(do_not_specialize=["first_word"])
def _finish_weight(
    product, out, hidden, goal, order, begin, first_word, width, hidden_stride,
    IN_PLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[w] = product[w] + sum over rows n with target w of goal[n] hidden[n].

    `order` holds the rows sorted by target, and begin[w] where those of word w begin: each word's rows are added by one
    program in that order, without atomics, so the sum is always the same.
    """
    i = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(begin + first_word + i)
    stop = tl.load(begin + first_word + i + 1)
    if not IN_PLACE or stop > start:
        total = tl.load(product + i * width + at, mask=at < width, other=0.0).to(tl.float32)
        for j in range(start, stop):
            row = tl.load(order + j)
            x = tl.load(hidden + row * hidden_stride + at, mask=at < width, other=0.0).to(tl.float32)
            by = tl.load(goal + row)
            total += tl.where(by == 0.0, 0.0, x * by)
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
    """x *= factor, without reading x when the factor is 1 and without asking the device which it is."""
    if x.numel():
        _scale_unless_one[(triton.cdiv(x.numel(), 16384),)](x, x.numel(), factor, BLOCK=16384, num_warps=16)
    return x


class Stats(NamedTuple):
    """What the gradient of some rows needs of each, all (n,) fp32."""

    logp: Tensor
    entropy: Tensor | None
    sum: Tensor  # S: exponentials of all columns but the target's
    total: Tensor  # S plus the target's own, which is 1 unless the row was done again
    own: Tensor  # the target's logit, in log2 units
    reference: Tensor  # c, in log2 units


class Plan(NamedTuple):
    """How the gradient of some rows will be taken."""

    count: int  # rows that have one
    source: Tensor | None  # (count,) which rows; None: all
    scaled: Tensor | None  # (n, D) rest * hidden
    rest: Tensor  # (n,) factor of the row's exponentials
    goal: Tensor  # (n,) factor of the target's column
    grad_logp: Tensor  # (n,)
    grad_entropy: Tensor | None  # (n,)


class TritonHead:
    """The rows of one call against one head. linear_logprob.TorchHead has the same methods and says what they do."""

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
    ):
        self.hidden, self.weight, self.weight_dtype = _aligned(hidden), _aligned(weight.to(hidden.dtype)), weight.dtype
        self.target, self.bias = target.contiguous(), None if bias is None else bias.to(hidden.dtype).contiguous()
        self.softcap, self.scale, self.entropy = softcap, scale, entropy
        self.k = scale / temperature
        self.factor = LOG2E / temperature * (scale if softcap is None else softcap)
        (self.num_rows, self.width), self.vocab = hidden.shape, weight.shape[0]
        self.chunk = _even(self.num_rows, CHUNK)
        self.careful = self.overflowed = False
        self.last: tuple[int, _Later] | None = None  # rows of the last chunk, and its counts
        self.exponentials = self.grad_hidden = self.grad_weight = self.grad_bias = self.goal = self.order = None

    def score(self) -> Stats:
        parts = [self._stats(i, min(i + SCORED, self.num_rows), None) for i in range(0, max(1, self.num_rows), SCORED)]
        stats = parts[0]
        if len(parts) > 1:
            stats = Stats(*(None if x[0] is None else torch.cat(x) for x in zip(*parts, strict=True)))
        again = stats.sum >= TOO_LARGE
        if again.any():
            self._again(0, again.nonzero().squeeze(1), stats, None)
        return stats

    def want(self, *, hidden: bool, weight: bool, bias: bool) -> None:
        device = self.hidden.device
        if weight and self.weight_dtype != torch.float32 and self.num_rows <= 2 * self.width:
            # All rows at once: the exponentials take no more memory than the fp32 sum over chunks that they spare.
            self.chunk = max(1, self.num_rows)
        if hidden:
            # Up to 31 rows more: until a chunk's gradient is written, its place serves other ends, in whole blocks.
            last = self.num_rows % self.chunk or self.chunk
            shape = (self.num_rows + max(-last % 32, -self.num_rows % 32), self.width)
            self.scratch = torch.empty(shape, dtype=self.hidden.dtype, device=device)
            self.grad_hidden = self.scratch[: self.num_rows]
        self.want_weight = weight
        if bias:
            self.grad_bias = torch.zeros(self.vocab, device=device)
        self.goal = torch.zeros(self.num_rows, device=device)

    def open(self, start: int, stop: int) -> Stats:
        if self.exponentials is None:
            self.exponentials = self._buffer(self.chunk, self.vocab)
        return self._stats(start, stop, self.exponentials)

    def plan(
        self,
        start: int,
        stats: Stats,
        grad_logp: Tensor,  # (N,) of these rows
        grad_entropy: Tensor | None,  # (N,)
    ) -> Plan | None:
        plan, active, counts = self._plan(start, stats, grad_logp, grad_entropy)
        counts = _Later(counts)
        # To know how many rows there are the host must wait for the device, which then waits for the host. After one
        # whose rows all had a gradient a chunk is taken to be like it, and its counts are read while its products run.
        if self._last_was_full() and not self.careful:
            self.last = (len(active), counts)
            return plan
        source = _front(active)  # queued before the wait, in case it is needed after
        count, num_again = counts.read()
        if num_again:
            again = (stats.sum >= TOO_LARGE) & (stats.own == stats.reference)
            self._again(start, again.nonzero().squeeze(1), stats, self.exponentials)
            return None
        self.last = (len(active), counts)
        return plan._replace(count=count, source=None if count == len(active) else source[:count])

    def close(self, start: int, stats: Stats, plan: Plan) -> None:
        count, rows, num_rows = plan.count, plan.source, len(plan.goal)
        e, scaled = self.exponentials, plan.scaled
        if rows is not None:
            if count:
                _move_rows[(count, triton.cdiv(self.vocab, 8192))](e, e.stride(0), self.vocab, rows, BLOCK=8192)
            if scaled is not None:
                scaled = scaled[torch.nn.functional.pad(rows, (0, -count % 32))]  # the padding is zeroed below
            if self.grad_hidden is not None:
                self.grad_hidden[start : start + num_rows] = 0
        if count == 0:
            return
        rewritten = plan.grad_entropy is not None or self.softcap is not None
        if rewritten:
            self._rewrite(e, self.vocab, stats, plan)
        # Sums over rows: pad their number, with zeros on one side, but not past the rows that were written.
        left = e[: -(-count // 32) * 32, : self.vocab].T
        if self.grad_bias is not None:
            rest = torch.ones_like(plan.rest) if rewritten else plan.rest
            rest = rest[:count] if rows is None else rest[rows]
            rest = torch.nn.functional.pad(rest, (0, -count % 32)).unsqueeze(1)
            self.grad_bias += _product(left, rest.to(e.dtype)).squeeze(1)
        if scaled is not None:
            scaled[count:] = 0
            if num_rows < self.num_rows or self.weight_dtype == torch.float32:
                self.grad_weight = _add_product(self.grad_weight, left, scaled)
            else:  # nothing to add up over chunks: rounded once here, and once more where a target is added
                self.grad_weight = torch.mm(left, scaled).to(self.weight_dtype)
        if self.grad_hidden is None:
            return
        step = PART * max(1, self.width // 1024)
        for i in range(0, count, step):
            part = slice(i, min(i + step, count))
            self._finish_hidden(_product(e[part, : self.vocab], self.weight), start, plan, part, rest=not rewritten)

    def finish(self) -> bool:
        self._last_was_full()
        if self.overflowed:
            return False
        self.exponentials = None  # before anything else is allocated
        if self.grad_bias is not None and self.num_rows:
            self.grad_bias.index_put_((self.target,), self.goal, accumulate=True)
        if self.want_weight and self.grad_weight is None:  # no row had a gradient
            self.grad_weight = torch.zeros_like(self.weight, dtype=self.weight_dtype)
        elif self.want_weight:
            total, self.grad_weight = self.grad_weight, None
            out = None if total.dtype == self.weight_dtype else torch.empty_like(self.weight, dtype=self.weight_dtype)
            self.grad_weight = total if out is None else out
            self._finish_weight(total, self.grad_weight, 0)
        return True

    def backward(
        self,
        stats: Stats,
        grad_logp: Tensor,  # (N,) of these rows
        grad_entropy: Tensor | None,  # (N,)
    ) -> None:
        if self.num_rows == 0:
            self.finish()
            return
        plan, _, _ = self._plan(0, stats, grad_logp, grad_entropy)
        columns = max(256, SLICE // self.num_rows // 256 * 256)
        e = self._buffer(self.num_rows, min(columns, self.vocab))
        num_rows = -(-self.num_rows // 32) * 32
        rewritten = plan.grad_entropy is not None or self.softcap is not None
        if plan.scaled is not None:
            plan.scaled[self.num_rows :] = 0
            self.grad_weight = torch.empty_like(self.weight, dtype=self.weight_dtype)
        if self.grad_bias is not None:
            rest = torch.ones_like(plan.rest) if rewritten else plan.rest
            rest = torch.nn.functional.pad(rest, (0, num_rows - self.num_rows)).unsqueeze(1).to(e.dtype)
        product = None
        for low in range(0, self.vocab, columns):
            part = slice(low, min(low + columns, self.vocab))
            width = part.stop - part.start
            self._exponentials(0, self.num_rows, stats.reference, e, words=part)
            if rewritten:
                self._rewrite(e, width, stats, plan)
            if self.grad_bias is not None:
                self.grad_bias[part] = _product(e[:num_rows, :width].T, rest).squeeze(1)
            if plan.scaled is not None:
                self._finish_weight(_product(e[:num_rows, :width].T, plan.scaled), self.grad_weight[part], low)
            if self.grad_hidden is not None:
                product = _add_product(product, e[: self.num_rows, :width], self.weight[part])
        if self.grad_hidden is not None:
            self._finish_hidden(product, 0, plan, slice(0, self.num_rows), rest=not rewritten)
        if self.grad_bias is not None:
            self.grad_bias.index_put_((self.target,), self.goal, accumulate=True)

    def _stats(self, start: int, stop: int, store: Tensor | None) -> Stats:
        rows, device = stop - start, self.hidden.device
        logp, entropy = torch.empty(rows, device=device), torch.empty(rows, device=device)
        total, total_1, own, reference = torch.empty(4, rows, device=device).unbind()
        stats = Stats(logp, entropy if self.entropy else None, total, total_1, own, reference)
        if rows == 0:
            return stats
        hidden, target = self.hidden[start:stop], self.target[start:stop]
        softcap = 1.0 if self.softcap is None else self.softcap
        _target_logit[(rows,)](
            hidden, self.weight, self.bias, target, own, reference, self.vocab, self.width, hidden.stride(0),
            self.weight.stride(0), self.scale, softcap, self.factor, BIAS=self.bias is not None,
            SOFTCAP=self.softcap is not None, BLOCK=1024,
        )  # fmt: skip
        sums, moments = self._exponentials(start, stop, reference, store)
        _finish_rows[(triton.cdiv(rows, 16),)](
            sums, moments, own, total, total_1, logp, entropy, rows, len(sums), ENTROPY=self.entropy, ROWS=16, BLOCK=64
        )
        return stats

    def _exponentials(
        self, start: int, stop: int, reference: Tensor, store: Tensor | None, words: slice | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The product and its epilogue. Partial sums of each block of columns, or, for some `words` only, none."""
        hidden, weight, bias = self.hidden[start:stop], self.weight, self.bias
        if words is not None:
            weight, bias = weight[words], None if bias is None else bias[words]
        rows, vocab, device = stop - start, weight.shape[0], hidden.device
        m, n, k = (128, 256, 64) if hidden.dtype == torch.bfloat16 else (32, 64, 32)
        num_blocks = triton.cdiv(vocab, n)
        sums = moments = None
        if words is None:
            sums = self._borrow(start, num_blocks, rows)
            moments = torch.empty(num_blocks, rows, device=device) if self.entropy else None
        programs = _num_programs(device)
        # Without STORE nothing is written there, but a descriptor needs a tensor.
        out = hidden if store is None else store[:, :vocab]
        _exp_product[(min(programs, triton.cdiv(rows, m) * num_blocks),)](
            TensorDescriptor.from_tensor(hidden, [m, k]), TensorDescriptor.from_tensor(weight, [n, k]),
            TensorDescriptor.from_tensor(out, [m, n]), bias, self.target[start:stop], reference, sums, moments, rows,
            vocab, self.width, self.scale, 1.0 if self.softcap is None else self.softcap, self.factor,
            0 if words is None else words.start, BIAS=bias is not None, SOFTCAP=self.softcap is not None,
            STORE=store is not None, SUMS=words is None, ENTROPY=self.entropy,
            UPCAST=device.type == "cpu",  # Triton's interpreter multiplies the bits of bfloat16 as integers
            BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP=8, PROGRAMS=programs,
            num_warps=8, num_stages=3 if store is not None else 4,  # what fits 227 KiB of shared memory
        )  # fmt: skip
        return sums, moments

    def _again(self, start: int, rows: Tensor, stats: Stats, store: Tensor | None) -> None:
        """Rows whose target is too unlikely to be the reference, in plain torch: there are few, if any."""
        for part in rows.split(256):
            y = _product(self.hidden[start + part], self.weight.T)
            y = (y if self.bias is None else y + self.bias.float()) * self.scale
            y = y if self.softcap is None else self.softcap * torch.tanh(y / self.softcap)
            z = y * (self.k / self.scale)
            at = self.target[start + part].unsqueeze(1)
            own = z.gather(1, at)
            z.scatter_(1, at, -torch.inf)
            reference = z.amax(1, keepdim=True)
            d, own = z - reference, (own - reference).squeeze(1)
            e = d.exp()
            stats.sum[part] = e.sum(1)
            stats.total[part] = stats.sum[part] + own.exp()
            stats.logp[part] = own - stats.total[part].log()
            stats.reference[part] = reference.squeeze(1) * LOG2E
            if stats.entropy is not None:
                d.scatter_(1, at, 0.0)
                moment = (d * e).sum(1) + own * own.exp()
                stats.entropy[part] = stats.total[part].log() - moment / stats.total[part]
            if store is not None:
                store[part, : self.vocab] = e.to(store.dtype)

    def _plan(
        self, start: int, stats: Stats, grad_logp: Tensor, grad_entropy: Tensor | None
    ) -> tuple[Plan, Tensor, Tensor]:  # the plan but for its count, (n,) which rows have a gradient, (2,) counts
        # autograd may hand out one number for many rows, which a kernel cannot see
        grad_logp = grad_logp.contiguous()
        grad_entropy = None if grad_entropy is None else grad_entropy.contiguous()
        rows = len(grad_logp)
        rest, goal = torch.empty_like(stats.sum), self.goal[start : start + rows]
        active = torch.empty(rows, dtype=torch.bool, device=rest.device)
        counts = torch.zeros(2, dtype=torch.int32, device=rest.device)
        _plan_rows[(triton.cdiv(rows, 256),)](
            grad_logp, grad_entropy, stats.logp, stats.entropy, stats.sum, stats.total, stats.own, stats.reference,
            goal, rest, active, counts, rows, self.k, self.factor, TOO_LARGE, SOFTCAP=self.softcap is not None,
            ENTROPY=grad_entropy is not None, BLOCK=256,
        )  # fmt: skip
        scaled = None
        if self.want_weight:
            padded = -(-rows // 32) * 32
            scaled = self.scratch[start : start + padded] if self.grad_hidden is not None else None
            if scaled is None:
                scaled = torch.empty(padded, self.width, dtype=self.hidden.dtype, device=rest.device)
            _scale_rows[(rows, triton.cdiv(self.width, 1024))](
                self.hidden[start:], rest, active, scaled, self.width, self.hidden.stride(0),
                SCALE=grad_entropy is None and self.softcap is None, BLOCK=1024,
            )  # fmt: skip
        return Plan(rows, None, scaled, rest, goal, grad_logp, grad_entropy), active, counts

    def _last_was_full(self) -> bool:
        """Whether all rows of the last chunk had a gradient. Also where it comes out that it had overflowed unseen."""
        if self.last is None:
            return False
        rows, counts = self.last
        count, num_again = counts.read()
        self.overflowed |= num_again > 0
        return count == rows

    def _rewrite(self, e: Tensor, vocab: int, stats: Stats, plan: Plan) -> None:
        columns = (stats.total, stats.reference, stats.entropy, plan.grad_logp, plan.grad_entropy)
        if plan.source is not None:
            columns = tuple(None if x is None else x[plan.source] for x in columns)
        _rewrite[(len(columns[0]), triton.cdiv(vocab, 4096))](
            e, e.stride(0), vocab, *columns, self.factor, self.k, SOFTCAP=self.softcap is not None,
            ENTROPY=plan.grad_entropy is not None, BLOCK=4096,
        )  # fmt: skip

    def _finish_hidden(self, product: Tensor, start: int, plan: Plan, part: slice, *, rest: bool) -> None:
        """Rows `part` of the chunk at `start`; where rows were moved, plan.source says which they were."""
        moved = plan.source is not None
        first = 0 if moved else part.start
        _finish_hidden[(part.stop - part.start, triton.cdiv(self.width, 1024))](
            product, self.weight, self.target[start + first :], plan.rest[first:], plan.goal[first:],
            plan.source[part] if moved else None, self.grad_hidden[start + first :], self.vocab, self.width,
            self.weight.stride(0), MOVED=moved, REST=rest, BLOCK=1024,
        )  # fmt: skip

    def _finish_weight(self, product: Tensor, out: Tensor, first_word: int) -> None:
        if self.order is None:
            word, self.order = self.target.sort(stable=True)
            self.begin = torch.searchsorted(word, torch.arange(self.vocab + 1, device=word.device))
        _finish_weight[(out.shape[0], triton.cdiv(self.width, 2048))](
            product, out, self.hidden, self.goal, self.order, self.begin, first_word, self.width, self.hidden.stride(0),
            IN_PLACE=product.data_ptr() == out.data_ptr(), BLOCK=2048,
        )  # fmt: skip

    def _borrow(self, start: int, blocks: int, rows: int) -> Tensor:  # (blocks, rows) fp32
        """Memory for partial sums: where the gradient of these rows will be, if that is large enough."""
        if self.grad_hidden is not None:
            place = self.scratch[start : start + rows].view(-1).view(torch.float32)
            if place.numel() >= blocks * rows:
                return place[: blocks * rows].view(blocks, rows)
        return torch.empty(blocks, rows, device=self.hidden.device)

    def _buffer(self, rows: int, columns: int) -> Tensor:
        # Whole blocks of rows, so that a product may run over the next multiple; 16-byte aligned rows for TMA.
        shape = (-(-rows // 128) * 128, -(-columns // 8) * 8)
        return torch.empty(shape, dtype=self.hidden.dtype, device=self.hidden.device)


class _Later:
    """A few numbers on their way to the host, which waits for them only when it reads them."""

    def __init__(self, x: Tensor) -> None:
        self.host, self.event = x, None
        if x.is_cuda:
            self.host, self.event = torch.empty(x.shape, dtype=x.dtype, pin_memory=True), torch.cuda.Event()
            self.host.copy_(x, non_blocking=True)
            self.event.record()

    def read(self) -> list[int]:
        if self.event is not None:
            self.event.synchronize()
        return self.host.tolist()


def obstacle(
    hidden: Tensor,  # (N, D)
) -> str | None:
    """Why this path cannot take such rows; None when it can."""
    if hidden.is_cuda and torch.cuda.get_device_capability(hidden.device)[0] not in (9, 10):
        return "this GPU has not the shared memory and copy engine of Hopper, which the kernel is made for"
    if not hidden.is_cuda and not triton.knobs.runtime.interpret:
        return f"device {hidden.device}: Triton runs on CUDA, elsewhere only under TRITON_INTERPRET=1"
    if hidden.dtype not in (torch.bfloat16, torch.float32):
        return f"dtype {hidden.dtype}: exponentials need the range of bfloat16 or float32"
    if hidden.shape[1] * hidden.element_size() % 16:
        return f"width {hidden.shape[1]}: rows must be a multiple of 16 bytes"
    return None


def _even(rows: int, limit: int) -> int:
    """Rows of each chunk when they are cut into as few as fit the limit, all about the same."""
    return -(-rows // max(1, -(-rows // limit))) or 1


def _front(active: Tensor) -> Tensor:  # (n,) which row comes to each place, for as many as are active
    """How to move active rows to the front, touching few: those past the front go into the gaps within it."""
    place = torch.arange(len(active), device=active.device)
    count = active.sum()
    gap = ~active & (place < count)
    order = (~active).argsort(stable=True)  # active rows, ascending, then the others
    mover = count - gap.sum() + gap.cumsum(0) - 1  # the last active rows fill the gaps, in order
    return torch.where(gap, order[mover.clamp(min=0)], place)


def _aligned(x: Tensor) -> Tensor:
    """Rows that a tensor descriptor can read: dense, each 16-byte aligned."""
    ok = x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    return x if ok else x.clone(memory_format=torch.contiguous_format)


def _num_programs(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _product(
    a: Tensor,  # (M, K)
    b: Tensor,  # (K, N)
) -> Tensor:  # (M, N) fp32
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda and a.dtype != torch.float32 else a.float() @ b.float()


def _add_product(
    total: Tensor | None,  # (M, N) fp32, or nothing yet
    a: Tensor,  # (M, K)
    b: Tensor,  # (K, N)
) -> Tensor:  # (M, N)
    if total is None:
        return _product(a, b)
    if a.is_cuda and a.dtype != torch.float32:
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    return total.addmm_(a.float(), b.float())
