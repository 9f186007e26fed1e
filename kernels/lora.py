"""Frozen linear layer plus a LoRA adapter, for training: the sum is rounded once.

    out = lora_linear(x, base, a, b, scale)         # x W^T + scale * (x A^T) B^T + bias

In bfloat16, a small adapter that is added to an output already rounded is mostly rounded away itself. Here the product
with W is added to the adapter's output inside the matmul, whose sums are float32. Rounding the adapter's output first
costs a fraction of the adapter, not of the output. The gradient of x is summed in the same way. This also saves passes
over the activations: there are no separate additions. A bias is added last, to the rounded sum.

W may be stored in 4 bits (kernels/nf4.py); it is then dequantised for each product. In compiled graphs the product and
its addition are one operator: the compiler would split them, and keep a dequantised weight for the backward pass. An
adapter of rank 0 gives the same bits as B = 0.

Shapes: N = tokens, D = in features, O = out features, R = rank.
"""

from __future__ import annotations

from typing import Any

import torch
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
        return _added(low @ b.t(), x, weight, absmax, transpose=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inner, low, a, b, weight, absmax = ctx.saved_tensors
        slope, grad_x, grad_inner = (grad @ b) * ctx.scale, None, None
        if ctx.needs_input_grad[0]:
            grad_inner = slope @ a
            grad_x = grad_inner if ctx.shares else torch.zeros_like(grad_inner)
            grad_x = _added(grad_x, grad, weight, absmax, transpose=False)
        return grad_x, None if ctx.shares else grad_inner, slope.t() @ inner, grad.t() @ low, None, None, None


def _add_product(out: Tensor, x: Tensor, weight: Tensor, absmax: Tensor | None, transpose: bool) -> None:
    """out += x @ W, or x @ W.T with `transpose`; `weight` contains the codes of W if absmax is given."""
    if absmax is not None:
        shape = (out.shape[1], x.shape[1]) if transpose else (x.shape[1], out.shape[1])
        weight = dequantize(Packed(weight, absmax), shape, x.dtype)
    out.addmm_(x, weight.t() if transpose else weight)


_opaque_add_product = torch.library.custom_op(
    "strop::add_product",
    _add_product,
    mutates_args=("out",),
    schema="(Tensor(a!) out, Tensor x, Tensor weight, Tensor? absmax, bool transpose) -> ()",
)


def _added(out: Tensor, x: Tensor, weight: Tensor, absmax: Tensor | None, *, transpose: bool) -> Tensor:
    (_opaque_add_product if torch.compiler.is_compiling() else _add_product)(out, x, weight, absmax, transpose)
    return out
