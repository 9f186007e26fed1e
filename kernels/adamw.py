"""AdamW on bfloat16 weights and moments with stochastic rounding, so that small updates are not lost.

In float32, from the bfloat16 values w, m, v and the gradient g, with t the number of this step:

    m' = beta1 m + (1 - beta1) g        v' = beta2 v + (1 - beta2) g^2
    w' = (1 - lr decay) w - lr (m' / (1 - beta1^t)) / (sqrt(v' / (1 - beta2^t)) + eps)

and each of the three is rounded to one of its two bfloat16 neighbours, with probabilities that make it exact on
average. Rounding to nearest would always lose an update under 2^-9 of a weight. It would also lose every decrease of v
with beta2 = 0.999, which is at most 1e-3 of v: v would never shrink.

`step_` is one kernel on CUDA; elsewhere it is `reference_step`, in plain torch. The random bits depend only on the seed
and the position in the tensor: a repeated step gives the same weights, and so do replicas on several ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without Triton; reference_step runs there
    triton = None

BLOCK = 1024


class Held(NamedTuple):
    """Tensors of one parameter, all of the same shape."""

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


def step_(held: Held, rates: Rates, seed: int) -> None:
    """Update weight and moments in place. bfloat16 is rounded stochastically, float32 not at all."""
    fits = all(x.is_cuda and x.dtype == torch.bfloat16 and x.is_contiguous() for x in held)
    (kernel_step if fits and triton is not None else reference_step)(held, rates, seed)


def kernel_step(held: Held, rates: Rates, seed: int) -> None:
    """The Triton kernel; bfloat16 and contiguous tensors only."""
    num = held.weight.numel()
    if num == 0:  # this rank holds no shard of the parameter
        return
    correction1, correction2 = rates.corrections
    _step[triton.cdiv(num, BLOCK),](
        *held, num, seed, rates.lr, rates.beta1, rates.beta2, rates.eps, 1.0 - rates.lr * rates.decay,
        1.0 / correction1, 1.0 / correction2, BLOCK=BLOCK,
    )  # fmt: skip


@torch.no_grad()
def reference_step(held: Held, rates: Rates, seed: int) -> None:
    """The same in plain torch, with other random bits."""
    generator = torch.Generator(held.weight.device).manual_seed(seed)
    exact = exact_step(held, rates)
    for target, value in zip((held.weight, held.exp_avg, held.exp_avg_sq), exact, strict=True):
        target.copy_(stochastic_round(value, generator) if target.dtype == torch.bfloat16 else value)


def exact_step(held: Held, rates: Rates) -> tuple[Tensor, Tensor, Tensor]:
    """Weight and moments after the step in float32 or wider, before rounding."""
    wide = torch.promote_types(held.weight.dtype, torch.float32)
    weight, grad, exp_avg, exp_avg_sq = (x.to(wide) for x in held)
    correction1, correction2 = rates.corrections
    exp_avg = rates.beta1 * exp_avg + (1.0 - rates.beta1) * grad
    exp_avg_sq = rates.beta2 * exp_avg_sq + (1.0 - rates.beta2) * grad.square()
    denominator = (exp_avg_sq / correction2).sqrt() + rates.eps
    weight = (1.0 - rates.lr * rates.decay) * weight - rates.lr * (exp_avg / correction1) / denominator
    return weight, exp_avg, exp_avg_sq


def stochastic_round(
    x: Tensor,  # (...) float32
    generator: torch.Generator,
) -> Tensor:  # (...) bfloat16
    """Stochastic rounding to the bfloat16 neighbour towards zero or away from it."""
    noise = torch.randint(1 << 16, x.shape, generator=generator, device=x.device, dtype=torch.int32)
    bits = x.float().view(torch.int32) + noise  # carries into the upper half with probability lower half / 2^16
    return (bits & -65536).view(torch.float32).to(torch.bfloat16)  # exact


if triton is not None:

    @triton.jit
    def _rounded(x, noise):
        bits = x.to(tl.int32, bitcast=True) + (noise & 0xFFFF).to(tl.int32)
        return (bits & -65536).to(tl.float32, bitcast=True).to(tl.bfloat16)

    @triton.jit(do_not_specialize=["num", "seed"])
    def _step(
        weight, grad, exp_avg, exp_avg_sq, num, seed, lr, beta1, beta2, eps, shrink, scale1, scale2,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = place < num
        g = tl.load(grad + place, inside, other=0.0).to(tl.float32)
        m = tl.load(exp_avg + place, inside, other=0.0).to(tl.float32)
        v = tl.load(exp_avg_sq + place, inside, other=0.0).to(tl.float32)
        w = tl.load(weight + place, inside, other=0.0).to(tl.float32)
        m = beta1 * m + (1.0 - beta1) * g
        v = beta2 * v + (1.0 - beta2) * g * g
        w = shrink * w - lr * (m * scale1) / (tl.sqrt(v * scale2) + eps)
        first, second, third, _ = tl.randint4x(seed, place)
        tl.store(weight + place, _rounded(w, first), inside)
        tl.store(exp_avg + place, _rounded(m, second), inside)
        tl.store(exp_avg_sq + place, _rounded(v, third), inside)
