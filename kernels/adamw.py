"""AdamW on bfloat16 weights and moments with stochastic rounding, so that small updates are not lost.

At step t, in float32, from the bfloat16 values w, m, v and the gradient g:

    m' = beta1 m + (1 - beta1) g        v' = beta2 v + (1 - beta2) g^2
    w' = (1 - lr decay) w - lr (m' / (1 - beta1^t)) / (sqrt(v' / (1 - beta2^t)) + eps)

Each result is rounded to one of its two bfloat16 neighbours, with probabilities that make the rounding exact on
average. Rounding to nearest would always lose an update below 2^-9 of a weight. With beta2 = 0.999 it would also lose
every decrease of v, which is at most 1e-3 of v: v would never shrink.

`step_all_` updates any number of tensors. On CUDA it is one launch: the kernel reads addresses and rates from a table,
which costs one small copy per step. Elsewhere it is `reference_step`, in plain torch. A `StepGuard` on the device
scales gradients while they are read and can skip the step without a host sync.

The random bits depend only on the tensor's seed and the position in the tensor. A repeated step therefore gives the
same weights, on every rank and with any other tensors in the launch. One Philox call gives four 32-bit words, one for
each of four weights. The halves of a word round the weight and its first moment; their sum modulo 2^16 rounds the
second moment. All three are uniform and pairwise independent.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch lack Triton; reference_step runs there
    triton = None

BLOCK = 1024  # weights that use the same word of their Philox calls; four consecutive blocks use the four words
CHUNK = 32 * BLOCK  # weights per program
WIDTH = 10  # int64 columns of the table: four addresses, size, seed, and eight float32


class ParamTensors(NamedTuple):
    """Tensors of one parameter, all of the same shape and on the same device."""

    weight: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class Rates(NamedTuple):
    """Hyperparameters of one step; t counts from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    decay: float
    t: int

    @property
    def corrections(self) -> tuple[float, float]:
        return 1.0 - self.beta1**self.t, 1.0 - self.beta2**self.t

    @property
    def numbers(self) -> tuple[float, ...]:
        """Kernel inputs, each rounded to float32 once."""
        correction1, correction2 = self.corrections
        return (
            self.lr / correction1, 1.0 - self.lr * self.decay, self.beta1, 1.0 - self.beta1,
            self.beta2, 1.0 - self.beta2, self.eps, 1.0 / correction2,
        )  # fmt: skip


class StepGuard(NamedTuple):
    """Device-side controls of a step, as in torch's fused AdamW: one float32 scalar each."""

    grad_scale: Tensor  # () or (1,); gradients are divided by it
    found_inf: Tensor  # () or (1,); 1: skip the step, 0: take it


class Update(NamedTuple):
    """Step of one parameter."""

    tensors: ParamTensors
    rates: Rates
    seed: int


@lru_cache(maxsize=8)
def pass_through(device: torch.device) -> StepGuard:
    """Return a guard that neither scales gradients nor skips the step."""
    return StepGuard(torch.ones(1, device=device), torch.zeros(1, device=device))


def step_all_(updates: Sequence[Update], guard: StepGuard | None = None) -> None:
    """Update weights and moments in place, all on one device. bfloat16 is rounded stochastically, float32 not."""
    supported, unsupported = [], []
    for update in updates:
        (supported if update.tensors.weight.is_cuda and fits(update.tensors) else unsupported).append(update)
    kernel_step_all(supported, guard)
    for update in unsupported:
        reference_step(*update, guard)


def fits(tensors: ParamTensors) -> bool:
    """Return whether the kernel supports these tensors. Unrolled because it runs for each parameter in each step."""
    w, g, m, v = tensors
    bfloat16 = torch.bfloat16
    if triton is None or not (w.dtype is g.dtype is m.dtype is v.dtype is bfloat16):
        return False
    return w.is_contiguous() and g.is_contiguous() and m.is_contiguous() and v.is_contiguous()


# Triton kernel


def kernel_step_all(updates: Sequence[Update], guard: StepGuard | None = None) -> None:
    """Update all parameters in one launch of the Triton kernel; contiguous bfloat16 tensors only."""
    updates = [update for update in updates if update.tensors.weight.numel()]  # this rank's shard may be empty
    if not updates:
        return
    device = updates[0].tensors.weight.device
    chunks = _chunks_on(device, tuple([update.tensors.weight.numel() for update in updates]))
    _step[len(chunks),](
        _table(updates, device), chunks, *(guard or pass_through(device)),
        WIDTH=WIDTH, BLOCK=BLOCK, CHUNK=CHUNK, num_warps=4, maxnreg=96,  # 20 resident warps; fewer registers spill
    )  # fmt: skip


def _table(updates: Sequence[Update], device: torch.device) -> Tensor:  # (num_tensors, WIDTH) int64
    """Build the kernel's table. Addresses change with every backward pass and rates with every step: no caching."""
    integers, rates_index, index = array("q"), {}, []
    for (w, g, m, v), rates, seed in updates:
        integers.extend((w.data_ptr(), g.data_ptr(), m.data_ptr(), v.data_ptr(), w.numel(), seed))
        index.append(rates_index.setdefault(rates, len(rates_index)))
    numbers = torch.tensor([rates.numbers for rates in rates_index], dtype=torch.float32)[index]
    table = torch.cat([torch.frombuffer(integers, dtype=torch.int64).view(-1, 6), numbers.view(torch.int64)], dim=1)
    # The pinned-memory allocator keeps the block until the copy finishes, so no wait is needed.
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


@lru_cache(maxsize=8)
def _chunks_on(device: torch.device, sizes: tuple[int, ...]) -> Tensor:  # (num_chunks, 2) int32
    """Return the tensor index of each chunk and the chunk's index within that tensor."""
    counts = torch.tensor([-(-size // CHUNK) for size in sizes])
    owner = torch.arange(len(sizes)).repeat_interleave(counts)
    within = torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]
    return torch.stack([owner, within], dim=1).to(device, torch.int32)


# Plain torch


@torch.no_grad()
def reference_step(tensors: ParamTensors, rates: Rates, seed: int, guard: StepGuard | None = None) -> None:
    """Update one parameter in plain torch, with random bits that differ from the kernel's."""
    generator = torch.Generator(tensors.weight.device).manual_seed(seed)
    if guard is not None:
        grad = tensors.grad.to(_wide(tensors)) / guard.grad_scale.to(tensors.grad.device)
        tensors = tensors._replace(grad=grad)
    exact = exact_step(tensors, rates)
    for target, value in zip((tensors.weight, tensors.exp_avg, tensors.exp_avg_sq), exact, strict=True):
        value = stochastic_round(value, generator) if target.dtype == torch.bfloat16 else value.to(target.dtype)
        target.copy_(value if guard is None else torch.where(guard.found_inf.to(target.device) == 0, value, target))


def exact_step(tensors: ParamTensors, rates: Rates) -> tuple[Tensor, Tensor, Tensor]:
    """Return weight and moments after the step in float32 or wider, before rounding."""
    weight, grad, exp_avg, exp_avg_sq = (x.to(_wide(tensors)) for x in tensors)
    correction1, correction2 = rates.corrections
    exp_avg = rates.beta1 * exp_avg + (1.0 - rates.beta1) * grad
    exp_avg_sq = rates.beta2 * exp_avg_sq + (1.0 - rates.beta2) * grad.square()
    denominator = (exp_avg_sq / correction2).sqrt() + rates.eps
    weight = (1.0 - rates.lr * rates.decay) * weight - rates.lr * (exp_avg / correction1) / denominator
    return weight, exp_avg, exp_avg_sq


def _wide(tensors: ParamTensors) -> torch.dtype:
    return torch.promote_types(tensors.weight.dtype, torch.float32)


def stochastic_round(
    x: Tensor,  # (...) float32
    generator: torch.Generator,
) -> Tensor:  # (...) bfloat16
    """Round stochastically to the bfloat16 neighbour towards zero or away from it."""
    noise = torch.randint(1 << 16, x.shape, generator=generator, device=x.device, dtype=torch.int32)
    bits = x.float().view(torch.int32) + noise  # carries into the upper half with probability lower half / 2^16
    return (bits & -65536).view(torch.float32).to(torch.bfloat16)  # exact


if triton is not None:

    @triton.jit
    def _rounded(x, noise):
        bits = x.to(tl.int32, bitcast=True) + noise.to(tl.int32)  # carries with probability lower half / 2^16
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)

    @triton.jit
    def _load(base, size, IS_WHOLE: tl.constexpr, BLOCK: tl.constexpr):
        place = tl.arange(0, BLOCK)
        if IS_WHOLE:
            x = tl.load(tl.multiple_of(base + place, [16]))
        else:
            x = tl.load(base + place, place < size, other=0.0)
        return x.to(tl.float32)

    @triton.jit
    def _store(base, size, x, noise, IS_WHOLE: tl.constexpr, BLOCK: tl.constexpr):
        place = tl.arange(0, BLOCK)
        if IS_WHOLE:
            tl.store(tl.multiple_of(base + place, [16]), _rounded(x, noise))
        else:
            tl.store(base + place, _rounded(x, noise), place < size)

    @triton.jit
    def _step_block(
        weight, grad, exp_avg, exp_avg_sq, size, word, unscale, numbers, IS_WHOLE: tl.constexpr, BLOCK: tl.constexpr
    ):
        """Update one block. `size` is the number of weights left in the tensor; it may be 0 or exceed a block."""
        rate, shrink, beta1, rest1, beta2, rest2, eps, scale2 = numbers
        g = _load(grad, size, IS_WHOLE, BLOCK) * unscale
        m = beta1 * _load(exp_avg, size, IS_WHOLE, BLOCK) + rest1 * g
        v = beta2 * _load(exp_avg_sq, size, IS_WHOLE, BLOCK) + rest2 * (g * g)
        w = shrink * _load(weight, size, IS_WHOLE, BLOCK) - rate * m / (tl.sqrt(v * scale2) + eps)
        low, high = word & 0xFFFF, word >> 16
        _store(weight, size, w, low, IS_WHOLE, BLOCK)
        _store(exp_avg, size, m, high, IS_WHOLE, BLOCK)
        _store(exp_avg_sq, size, v, (low + high) & 0xFFFF, IS_WHOLE, BLOCK)

    @triton.jit
    def _step_four(
        weight, grad, exp_avg, exp_avg_sq, at, size, seed, unscale, numbers,
        IS_WHOLE: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Update four blocks from position `at`, a multiple of four blocks."""
        # Seven is the minimum number of rounds that passes the statistical tests of Philox's authors; default: ten.
        words = tl.randint4x(seed, (at // 4).to(tl.int32) + tl.arange(0, BLOCK), 7)
        for part in tl.static_range(4):
            begin = at + part * BLOCK
            _step_block(
                weight + begin, grad + begin, exp_avg + begin, exp_avg_sq + begin, size - begin, words[part], unscale,
                numbers, IS_WHOLE, BLOCK,
            )  # fmt: skip

    @triton.jit
    def _step(table, chunks, grad_scale, found_inf, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
        program = tl.program_id(0)
        row = table + tl.load(chunks + 2 * program) * WIDTH
        at = tl.load(chunks + 2 * program + 1).to(tl.int64) * CHUNK
        weight, grad, exp_avg, exp_avg_sq = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
        size, seed = tl.load(row + 4), tl.load(row + 5)
        n = (row + 6).to(tl.pointer_type(tl.float32))
        numbers = (
            tl.load(n), tl.load(n + 1), tl.load(n + 2), tl.load(n + 3), tl.load(n + 4), tl.load(n + 5), tl.load(n + 6),
            tl.load(n + 7),
        )  # fmt: skip
        unscale = 1.0 / tl.load(grad_scale)
        is_aligned = ((weight | grad | exp_avg | exp_avg_sq) & 15) == 0  # for loads of 16 bytes
        weight, grad = weight.to(tl.pointer_type(tl.bfloat16)), grad.to(tl.pointer_type(tl.bfloat16))
        exp_avg, exp_avg_sq = exp_avg.to(tl.pointer_type(tl.bfloat16)), exp_avg_sq.to(tl.pointer_type(tl.bfloat16))
        end = tl.where(tl.load(found_inf) == 0.0, tl.minimum(at + CHUNK, size), at)
        for number in range(0, tl.cdiv(end - at, 4 * BLOCK)):
            begin = at + number * (4 * BLOCK)
            if is_aligned & (begin + 4 * BLOCK <= size):
                _step_four(weight, grad, exp_avg, exp_avg_sq, begin, size, seed, unscale, numbers, True, BLOCK)
            else:
                _step_four(weight, grad, exp_avg, exp_avg_sq, begin, size, seed, unscale, numbers, False, BLOCK)
