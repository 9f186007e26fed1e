"""Sample one token per decode row from its logits, with its log-prob, in one pass over the logits.

    z = softcap * tanh(scale * x / softcap)         (no softcap: scale * x)
    p = softmax(z / temperature),  id = the first whose cumulative probability is above u(seed, number)

Temperature 0 takes the most likely id (the lowest on ties), with its log-prob at temperature 1. u hashes the row's seed
and the token's index in its completion. There is no generator state, so a row samples the same id in any batch.
There are two kernels: `_sum_chunks` reads the logits once and writes the maximum and the sum of exponentials of every
chunk; `_pick` finds the chunk that contains u and rereads only this chunk. Sums are float64. Grids depend only on
shapes and everything else is read on the device, so a step can be captured in a CUDA graph.

`draw` runs the kernels on CUDA and `draw_reference` elsewhere. A row with a NaN logit gets a NaN log-prob.
Shapes: B = decode rows, V = vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch may lack Triton; the reference runs there
    triton = None

GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # int64 constants of splitmix64; torch multiplies modulo 2**64
MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
MIX_2 = 0x94D049BB133111EB - 2**64
UNIT = 2.0**60  # probability 1 in the reference: below int64's limit, finer than float64 near 1
SLAB = 2**24  # logits the reference processes at a time: keeps its float64 copies near 128 MB
CHUNK = 4096


def draw(
    logits: Tensor,  # (B, V) float32 or bfloat16
    seed: Tensor,  # (B,) int64
    number: Tensor,  # (B,) int32 token index within the completion
    temperature: Tensor,  # (B,) float32
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    top_k: int = 0,  # 0 = all; top-k and top-p run in the reference, for evaluation: draw_set.py is for training
    top_p: float = 1.0,
) -> tuple[Tensor, Tensor]:  # (B,) int64 ids, (B,) float32 log-probs
    """Return sampled ids and their log-probs under the full distribution, before top-k and top-p."""
    options = {"scale": scale, "softcap": softcap}
    if logits.is_cuda and logits.dtype != torch.float64 and triton is not None and (top_k, top_p) == (0, 1.0):
        return draw_kernel(logits, seed, number, temperature, **options)
    return draw_reference(logits, seed, number, temperature, **options, top_k=top_k, top_p=top_p)


def signed_64(seed: int) -> int:
    """Wrap any Python integer into int64."""
    return ((seed + 2**63) % 2**64) - 2**63


def uniform(
    seeds: Tensor,  # (B,) int64
    number: int | Tensor,  # (B,) token index within the completion
) -> Tensor:  # (B,) float64 in [0, 1)
    """Hash (seed, number). There is no generator state, so a row gets the same value in any batch."""
    step = (number.long() + 1) * GOLDEN if isinstance(number, Tensor) else signed_64(GOLDEN * (number + 1))
    return _shift_right(_mix(_mix(seeds) + step), 11).double() * 2.0**-53


def draw_reference(
    logits: Tensor,  # (B, V) any float dtype
    seed: Tensor,  # (B,) int64
    number: Tensor,  # (B,) int32
    temperature: Tensor,  # (B,) float32
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    top_k: int = 0,
    top_p: float = 1.0,
) -> tuple[Tensor, Tensor]:  # (B,) int64 ids, (B,) log-probs in float32 or wider
    """Plain torch version, with an integer CDF."""
    uniforms, rows = uniform(seed, number), max(1, SLAB // logits.shape[1])
    options = (scale, softcap, top_k, top_p)
    if logits.shape[0] <= rows:
        return _draw(logits, uniforms, temperature, *options)
    inputs = zip(logits.split(rows), uniforms.split(rows), temperature.split(rows), strict=True)
    ids, logps = zip(*(_draw(*part, *options) for part in inputs), strict=True)
    return torch.cat(ids), torch.cat(logps)


def _draw(
    logits: Tensor, uniforms: Tensor, temperature: Tensor, scale: float, softcap: float | None, top_k: int, top_p: float
) -> tuple[Tensor, Tensor]:
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    is_greedy = temperature[:, None] == 0
    logps = torch.log_softmax(z / torch.where(is_greedy, 1.0, temperature[:, None]), dim=-1)  # (B, V)
    weights = (logps.double().exp() * UNIT).long()
    if top_k > 0 or top_p < 1:
        weights = _keep_top(weights, top_k, top_p)
    cdf = weights.cumsum(dim=-1)
    target = torch.minimum((uniforms[:, None] * cdf[:, -1:]).long(), cdf[:, -1:] - 1)
    # right=True takes the first id whose CDF is above the target, so an id with probability 0 is never sampled.
    sampled = torch.searchsorted(cdf, target, right=True)
    column = torch.arange(z.shape[1], device=z.device)
    best = torch.where(z == z.amax(dim=-1, keepdim=True), column, z.shape[1]).amin(dim=-1, keepdim=True)
    ids = torch.where(is_greedy, best, sampled).clamp(max=z.shape[1] - 1)  # clamped only if a logit is NaN
    return ids[:, 0], logps.gather(1, ids)[:, 0]


def _keep_top(weights: Tensor, top_k: int, top_p: float) -> Tensor:  # (B, V)
    """Zero all but the top_k ids, then all but the smallest set with top_p of the remaining mass."""
    ranked, order = weights.sort(dim=-1, descending=True, stable=True)
    if top_k > 0:
        ranked[:, top_k:] = 0
    if top_p < 1:
        before = ranked.cumsum(dim=-1) - ranked
        ranked = torch.where(before >= top_p * ranked.sum(dim=-1, keepdim=True).double(), 0, ranked)
    return torch.zeros_like(weights).scatter(1, order, ranked)


def _mix(x: Tensor) -> Tensor:
    """Apply the finaliser of splitmix64."""
    x = (x ^ _shift_right(x, 30)) * MIX_1
    x = (x ^ _shift_right(x, 27)) * MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift logically; torch's >> on int64 copies the sign bit."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def draw_kernel(
    logits: Tensor,  # (B, V) float32, bfloat16 or float16
    seed: Tensor,  # (B,) int64
    number: Tensor,  # (B,) int32
    temperature: Tensor,  # (B,) float32
    *,
    scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:  # (B,) int64 ids, (B,) float32 log-probs
    """The Triton kernels, on CUDA or under TRITON_INTERPRET=1."""
    num_rows, vocab = logits.shape
    assert logits.stride(1) == 1 and all(x.is_contiguous() for x in (seed, number, temperature))
    assert seed.dtype == torch.int64, f"seed {seed.dtype}"
    ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    logps = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows == 0:
        return ids, logps
    tops, sums, numbers, options = sum_chunks(logits, temperature, scale, softcap)
    _pick[num_rows,](
        logits, temperature, tops, sums, seed, number, ids, logps, *numbers, **options,
        CHUNKS=triton.next_power_of_2(tops.shape[1]),
    )  # fmt: skip
    return ids, logps


def sum_chunks(
    logits: Tensor,  # (B, V)
    temperature: Tensor,  # (B,)
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, tuple[float, ...], dict[str, int]]:
    """Maximum and sum of exponentials of each chunk of z / temperature, (B, chunks), and `_pick`'s other arguments."""
    (num_rows, vocab), chunks = logits.shape, triton.cdiv(logits.shape[1], CHUNK)
    tops = torch.empty(num_rows, chunks, dtype=torch.float32, device=logits.device)
    sums = torch.empty(num_rows, chunks, dtype=torch.float64, device=logits.device)
    numbers = (vocab, logits.stride(0), chunks, scale, 1.0 if softcap is None else softcap)
    options = {"SOFTCAP": softcap is not None, "CHUNK": CHUNK, "num_warps": 8}
    _sum_chunks[num_rows, chunks](logits, temperature, tops, sums, *numbers, **options)
    return tops, sums, numbers, options


if triton is not None:
    NOWHERE = tl.constexpr(2**31 - 1)  # above every index; the result if NaN compares unequal to everything

    @triton.jit
    def _scaled(logits, temperature, row, place, vocab, row_stride, scale, softcap, SOFTCAP: tl.constexpr):
        """z / temperature in float32, -inf beyond the vocabulary. tanh is built from exp so that it runs everywhere."""
        x = tl.load(logits + row * row_stride + place, mask=place < vocab, other=-float("inf")).to(tl.float32) * scale
        if SOFTCAP:
            a = tl.exp(tl.abs(x / softcap) * -2.0)
            t = (1.0 - a) / (1.0 + a) * softcap
            x = tl.where(place < vocab, tl.where(x < 0, -t, t), -float("inf"))
        heat = tl.load(temperature + row)
        return x * (1.0 / tl.where(heat == 0.0, 1.0, heat))

    @triton.jit
    def _exponentials(z, top):
        """exp(z - top), or 0 if all z are -inf, because -inf - -inf would be NaN."""
        return tl.exp(z - tl.where(top == -float("inf"), 0.0, top)).to(tl.float64)

    @triton.jit
    def _sum_chunks(
        logits, temperature, tops, sums, vocab, row_stride, chunks, scale, softcap,
        SOFTCAP: tl.constexpr, CHUNK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        chunk = tl.program_id(1)
        place = chunk * CHUNK + tl.arange(0, CHUNK)
        z = _scaled(logits, temperature, row, place, vocab, row_stride, scale, softcap, SOFTCAP)
        top = tl.max(z, 0)
        tl.store(tops + row * chunks + chunk, top)
        tl.store(sums + row * chunks + chunk, tl.sum(_exponentials(z, top), 0))

    @triton.jit
    def _mixed(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB
        return x ^ (x >> 31)

    @triton.jit
    def _first_above(cdf, target, weight, place):
        """Index of the first CDF value above the target; the last index with weight if rounding left none.

        A parallel scan need not be monotonic to the last bit: without the condition on the weight, an index with
        weight 0 could be taken.
        """
        found = tl.min(tl.where((cdf > target) & (weight > 0.0), place, NOWHERE), 0)
        last = tl.max(tl.where(weight > 0.0, place, 0), 0)
        return tl.where(found == NOWHERE, last, found)

    @triton.jit
    def _first_equal(x, value, place):
        return tl.min(tl.where(x == value, place, NOWHERE), 0)

    @triton.jit
    def _pick(
        logits, temperature, tops, sums, seed, number, ids, logps, vocab, row_stride, chunks, scale, softcap,
        SOFTCAP: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, CHUNKS)
        chunk_tops = tl.load(tops + row * chunks + at, mask=at < chunks, other=-float("inf"))
        chunk_sums = tl.load(sums + row * chunks + at, mask=at < chunks, other=0.0)
        top = tl.max(chunk_tops, 0)
        safe_top = tl.where(top == -float("inf"), 0.0, top)
        weight = chunk_sums * tl.exp((chunk_tops - safe_top).to(tl.float64))
        total = tl.sum(weight, 0)

        bits = tl.load(seed + row).to(tl.uint64, bitcast=True)
        step = (tl.load(number + row).to(tl.int64) + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
        bits = _mixed(_mixed(bits) + step)
        uniform = (bits >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16  # 2**-53
        target = uniform * total

        is_greedy = tl.load(temperature + row) == 0.0
        chunk = _first_above(tl.cumsum(weight, 0), target, weight, at)
        chunk = tl.where(is_greedy, _first_equal(chunk_tops, top, at), chunk)
        chunk = tl.minimum(chunk, chunks - 1)
        before = tl.sum(tl.where(at < chunk, weight, 0.0), 0)
        chunk_top = tl.load(tops + row * chunks + chunk)
        within = (target - before) / tl.exp((chunk_top - safe_top).to(tl.float64))

        place = tl.arange(0, CHUNK)
        z = _scaled(logits, temperature, row, chunk * CHUNK + place, vocab, row_stride, scale, softcap, SOFTCAP)
        e = _exponentials(z, chunk_top)
        picked = _first_above(tl.cumsum(e, 0), within, e, place)
        picked = tl.where(is_greedy, _first_equal(z, tl.max(z, 0), place), picked)
        picked = tl.minimum(picked, vocab - 1 - chunk * CHUNK)
        chosen = tl.sum(tl.where(place == picked, z, 0.0), 0)
        tl.store(ids + row, (chunk * CHUNK + picked).to(tl.int64))
        tl.store(logps + row, ((chosen - safe_top).to(tl.float64) - tl.log(total)).to(tl.float32))
