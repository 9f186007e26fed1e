"""Frozen linear layer plus a LoRA adapter, for training: the sum is rounded once.

    out = lora_linear(x, base, a, b, scale)         # x W^T + scale * (x A^T) B^T + bias

In bfloat16, a small adapter that is added to an output already rounded is mostly rounded away itself. Here both
products are summed in float32 inside one matmul. Rounding x A^T first costs a fraction of the adapter, not of the
output. On a CPU, and in float32, addmm adds x W^T to the adapter's output. In bfloat16 cuBLAS would round twice, so on
a GPU one matmul runs over the K dimensions of both products: [x, low] [W, B]^T. The gradient of x is accumulated in
place. A bias is added last, to the rounded sum.

W may be stored in 4 bits (kernels/nf4.py); it is then dequantised for each product. In compiled graphs the product and
its addition are one operator: the compiler would split them, and keep a dequantised weight for the backward pass. An
adapter with scale 0 gives the same bits as B = 0.

Shapes: N = tokens, D = in features, O = out features, R = rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kernels.nf4 import Linear4bit, Packed, dequantize


def lora_linear(
    x: Tensor,  # (..., D)
    base: nn.Linear,
    a: Tensor,  # (R, D)
    b: Tensor,  # (O, R)
    scale: float,
    inner: Tensor | None = None,  # (..., D) input of the adapter, if it is not x (dropout)
) -> Tensor:  # (..., O)
    """Compute in the dtype of the base, which must fit()."""
    packed = isinstance(base, Linear4bit)
    weight, absmax = (base.codes, base.absmax) if packed else (base.weight, None)
    dtype = base.dtype if packed else weight.dtype
    flat, inner = (None if t is None else t.to(dtype).reshape(-1, base.in_features) for t in (x, inner))
    out = _Sum.apply(flat, inner, a.to(dtype), b.to(dtype), scale, weight, absmax)
    out = out.view(*x.shape[:-1], base.out_features)
    return out if base.bias is None else out + base.bias


def fits(base: nn.Module, dtype: torch.dtype) -> bool:
    """Return whether lora_linear can compute this layer in `dtype`: frozen, plain or in 4 bits."""
    if type(base) is Linear4bit:
        return base.dtype == dtype
    return type(base) is nn.Linear and base.weight.dtype == dtype and not base.weight.requires_grad


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, inner: Tensor | None, a: Tensor, b: Tensor, scale: float, weight: Tensor,
        absmax: Tensor | None,
    ) -> Tensor:  # (N, O)  # fmt: skip
        ctx.shares, ctx.scale, inner = inner is None, scale, x if inner is None else inner
        low = (inner @ a.t()) * scale
        ctx.save_for_backward(inner, low, a, b, weight, absmax)
        return (_opaque_sum if torch.compiler.is_compiling() else sum_products)(x, weight, absmax, low, b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inner, low, a, b, weight, absmax = ctx.saved_tensors
        slope, grad_x, grad_inner = (grad @ b) * ctx.scale, None, None
        if ctx.needs_input_grad[0]:
            grad_inner = slope @ a
            grad_x = grad_inner if ctx.shares else torch.zeros_like(grad_inner)
            (_opaque_add if torch.compiler.is_compiling() else _add_product)(grad_x, grad, weight, absmax)
        return grad_x, None if ctx.shares else grad_inner, slope.t() @ inner, grad.t() @ low, None, None, None


def sum_products(
    x: Tensor,  # (N, D)
    weight: Tensor,  # (O, D), or the codes of W
    absmax: Tensor | None,  # (O * D / 64,) of W in 4 bits
    low: Tensor,  # (N, R)
    b: Tensor,  # (O, R)
    join: bool | None = None,  # default: on a GPU, in 16 bits
) -> Tensor:  # (N, O)
    """Return x W^T + low B^T, rounded once."""
    weight = _dense(weight, absmax, (b.shape[0], x.shape[1]), x.dtype)
    if not (x.is_cuda and x.dtype.itemsize == 2 if join is None else join):
        return (low @ b.t()).addmm_(x, weight.t())
    spare = (0, -(x.shape[1] + b.shape[1]) % 8)  # rows of a multiple of 16 bytes, for the fast kernels
    return torch.cat([x, F.pad(low, spare)], 1) @ torch.cat([weight, F.pad(b, spare)], 1).t()


def _add_product(out: Tensor, x: Tensor, weight: Tensor, absmax: Tensor | None) -> None:
    """out += x @ W"""
    out.addmm_(x, _dense(weight, absmax, (x.shape[1], out.shape[1]), x.dtype))


def _dense(weight: Tensor, absmax: Tensor | None, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    return weight if absmax is None else dequantize(Packed(weight, absmax), shape, dtype)


_opaque_sum = torch.library.custom_op(
    "strop::sum_products",
    sum_products,
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? absmax, Tensor low, Tensor b, bool? join=None) -> Tensor",
)
_opaque_sum.register_fake(lambda x, weight, absmax, low, b, join=None: x.new_empty(x.shape[0], b.shape[0]))
_opaque_add = torch.library.custom_op(
    "strop::add_product",
    _add_product,
    mutates_args=("out",),
    schema="(Tensor(a!) out, Tensor x, Tensor weight, Tensor? absmax) -> ()",
)
