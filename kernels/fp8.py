"""Linear layers whose frozen weight multiplies in FP8 (e4m3), forward and backward.

    layer = Linear8.of(linear)          # a frozen nn.Linear; its weight stays for exports and other readers

Every row of an operand has a scale, its largest magnitude / 448, and products accumulate in float32:

    y  = x8 @ W8.T   * sx * sW.T        sx per token, sW per output feature
    dx = g8 @ W8t.T  * sg * sWt.T       sg per token, sWt per input feature

Inputs and gradients are quantised in each pass. The weight is frozen, so both of its layouts are quantised once: tensor
cores read the second operand column by column, and the backward pass reads the transposed weight. This takes 2 bytes
per weight in addition to the weight. e4m3 has 3 bits after the leading 1, so a rounded number is off by at most 1/16,
and for random inputs an output by about 4 % of its standard deviation (tests/kernels/test_fp8.py).

On a GPU without FP8 tensor cores, and on a CPU, the same numbers are multiplied in float32.
Shapes: N tokens, D in features, O out features.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
MULTIPLE = 16  # of both sizes of a weight, for the tensor cores


class Rows(NamedTuple):
    """A matrix in FP8 with a scale per row."""

    values: Tensor  # (N, D) e4m3
    scale: Tensor  # (N, 1) float32


def quantize_rows(
    x: Tensor,  # (N, D)
) -> Rows:
    wide = x.float()
    scale = wide.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / LARGEST
    return Rows((wide / scale).clamp(-LARGEST, LARGEST).to(FP8), scale)


def product(a: Rows, b: Rows, dtype: torch.dtype, *, fast: bool) -> Tensor:  # (N, D) and (O, D) -> (N, O)
    """Return a @ b.T. `fast` keeps sums in the tensor cores for longer, with fewer bits."""
    if has_tensor_cores(a.values.device):
        return torch._scaled_mm(
            a.values, b.values.t(), scale_a=a.scale, scale_b=b.scale.t(), out_dtype=dtype, use_fast_accum=fast
        )
    return ((a.values.float() * a.scale) @ (b.values.float() * b.scale).t()).to(dtype)


def has_tensor_cores(device: torch.device) -> bool:
    """Return whether the device multiplies rows with scales in FP8: Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


class _Product(torch.autograd.Function):
    """x @ W.T for a frozen W; autograd saves nothing but the quantised weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:  # (N, D) -> (N, O)
        ctx.save_for_backward(*weights[2:])
        return product(quantize_rows(x), Rows(*weights[:2]), x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx = product(quantize_rows(grad), Rows(*ctx.saved_tensors), grad.dtype, fast=False)
        return dx, None, None, None, None


class Linear8(nn.Linear):
    """Frozen linear layer that multiplies in FP8. Computes in the dtype of its weight and returns it."""

    @classmethod
    def of(cls, linear: nn.Linear) -> Linear8:
        """Make the layer multiply in FP8, in place, on the device of its weight."""
        assert not linear.weight.requires_grad, "only frozen weights: a trained weight would need new copies every step"
        linear.__class__ = cls
        with torch.no_grad():
            copies = (*quantize_rows(linear.weight), *quantize_rows(linear.weight.t()))
        for name, copy in zip(("fp8", "fp8_scale", "fp8_t", "fp8_t_scale"), copies, strict=True):
            linear.register_buffer(name, copy.contiguous(), persistent=False)
        return linear

    def forward(self, x: Tensor) -> Tensor:  # (..., D) -> (..., O)
        flat = x.to(self.weight.dtype).reshape(-1, self.in_features)
        with torch.autocast(x.device.type, enabled=False):
            out = _Product.apply(flat, self.fp8, self.fp8_scale, self.fp8_t, self.fp8_t_scale)
        out = out.unflatten(0, x.shape[:-1]) if x.dim() != 2 else out
        return out if self.bias is None else out + self.bias


def fits(linear: nn.Linear) -> bool:
    """Return whether both sizes are multiples of 16."""
    return linear.in_features % MULTIPLE == 0 and linear.out_features % MULTIPLE == 0


def is_fp8(model: nn.Module) -> bool:
    return any(isinstance(module, Linear8) for module in model.modules())
