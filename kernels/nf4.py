"""Frozen 4-bit weights (NF4, Dettmers et al. 2023, arXiv:2305.14314) and a linear layer that uses them.

    packed = quantize(weight)                        # codes (n / 2,) uint8, absmax (n / 64,) bfloat16
    weight = dequantize(packed, shape, dtype)
    layer = Linear4bit.of(linear)                    # replaces a frozen nn.Linear

The weight is split into blocks of 64 elements, in memory order. A block stores its largest magnitude and 4-bit codes:

    w_i ~ absmax * LEVELS[code_i],   code_i = the level nearest to w_i / absmax

LEVELS are quantiles of the normal distribution, scaled to [-1, 1], with an exact 0. The error is at most 0.152 absmax
(half the widest gap between levels); for normally distributed weights the RMS error is about a tenth of the RMS weight.
absmax is rounded to bfloat16 before codes are chosen. An element takes 0.531 bytes; quantising absmax to 8 bits would
save another 3 percent.

The layer computes the products of a plain layer with the dequantised weight, which exists only during one product: the
backward pass dequantises again, and autograd saves only the packed weight. Both passes are single operators for
torch.compile, which would otherwise keep the dequantised weight from the forward pass for the backward pass.

`dequantize` reads 0.531 bytes and writes 2 bytes (bfloat16) per element.
Shapes: n = elements of a weight, padded to whole blocks; O = out features, D = in features.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch may lack Triton; the reference runs there
    triton = None

SIZE = 64  # elements per block
BYTES_PER_WEIGHT = 0.5 + 2 / SIZE
PROGRAM = 1024  # codes (bytes) per program
PART = 1 << 24  # elements that quantize processes at a time, at 12 bytes each
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


class Packed(NamedTuple):
    codes: Tensor  # (n / 2,) uint8; the first element of a pair is in the lower four bits
    absmax: Tensor  # (n / 64,) bfloat16


@torch.no_grad()
def quantize(
    weight: Tensor,  # (...) any shape and float dtype
) -> Packed:
    """Quantise on the weight's device, in parts."""
    if not weight.is_floating_point():
        raise ValueError(f"weight.dtype={weight.dtype}: must be a floating-point dtype")
    flat = weight.detach().reshape(-1)
    parts = [_quantize(part) for part in flat.split(PART)] if flat.numel() else [_quantize(flat)]
    return Packed(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _quantize(flat: Tensor) -> Packed:
    blocks = F.pad(flat.float(), (0, -len(flat) % SIZE)).view(-1, SIZE)
    absmax = blocks.abs().amax(dim=1).bfloat16()
    scale = absmax.float()
    blocks /= torch.where(scale > 0, scale, 1.0)[:, None]
    levels = _levels(flat.device)
    codes = torch.bucketize(blocks, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8).view(-1, 2)
    return Packed(codes[:, 0] | codes[:, 1] << 4, absmax)


def dequantize(
    packed: Packed,
    shape: tuple[int, ...] | torch.Size,
    dtype: torch.dtype,
) -> Tensor:  # shape, dtype
    """Return the weight, each element rounded to dtype once. A Triton kernel on CUDA, plain torch elsewhere."""
    fits = packed.codes.is_cuda and dtype != torch.float64 and triton is not None
    return (dequantize_kernel if fits else dequantize_reference)(packed, shape, dtype)


def dequantize_reference(packed: Packed, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
    codes, absmax = packed
    pairs = torch.stack([codes & 15, codes >> 4], dim=1)  # (n / 2, 2)
    values = _levels(codes.device).index_select(0, pairs.flatten().int()).view(-1, SIZE)
    values *= absmax.float()[:, None]
    return values.flatten()[: _count(shape)].view(shape).to(dtype)


@functools.cache
def _levels(device: torch.device) -> Tensor:  # (16,) float32
    return torch.tensor(LEVELS, dtype=torch.float32, device=device)


def _count(shape: tuple[int, ...] | torch.Size) -> int:
    return functools.reduce(lambda a, b: a * b, shape, 1)


# Kernel, on CUDA or under TRITON_INTERPRET=1


def dequantize_kernel(packed: Packed, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
    codes, absmax = packed
    assert codes.is_contiguous() and absmax.is_contiguous(), "a packed weight must be contiguous"
    out = torch.empty(shape, dtype=dtype, device=codes.device)
    if out.numel():
        grid = (triton.cdiv(codes.numel(), PROGRAM),)
        _dequantize[grid](
            codes, absmax, _levels(codes.device), out, codes.numel(), out.numel(), HALF=SIZE // 2, PROGRAM=PROGRAM
        )
    return out


if triton is not None:

    @triton.jit
    def _dequantize(codes, absmax, levels, out, num_codes, num, HALF: tl.constexpr, PROGRAM: tl.constexpr):
        start = tl.program_id(0).to(tl.int64) * PROGRAM
        at = start + tl.arange(0, PROGRAM)
        code = tl.load(codes + at, mask=at < num_codes, other=0).to(tl.int32)
        scale = tl.load(absmax + at // HALF, mask=at < num_codes, other=0.0).to(tl.float32)
        first = tl.load(levels + (code & 15)) * scale
        second = tl.load(levels + (code >> 4)) * scale
        place = 2 * start + tl.arange(0, 2 * PROGRAM)
        tl.store(out + place, tl.interleave(first, second).to(out.dtype.element_ty), mask=place < num)


# Linear layer


@torch.library.custom_op(
    "strop::nf4_linear", mutates_args=(), schema="(Tensor x, Tensor codes, Tensor absmax, int out_features) -> Tensor"
)
def _linear(x, codes, absmax, out_features):
    """x @ W.T"""
    return F.linear(x, dequantize(Packed(codes, absmax), (out_features, x.shape[-1]), x.dtype))


@torch.library.custom_op(
    "strop::nf4_linear_grad",
    mutates_args=(),
    schema="(Tensor grad, Tensor codes, Tensor absmax, int in_features) -> Tensor",
)
def _linear_grad(grad, codes, absmax, in_features):
    """grad @ W"""
    return grad @ dequantize(Packed(codes, absmax), (grad.shape[-1], in_features), grad.dtype)


@_linear.register_fake
@_linear_grad.register_fake
def _shape_of_product(x, codes, absmax, features):
    return x.new_empty(*x.shape[:-1], features)


def _keep(ctx, inputs, output) -> None:
    x, codes, absmax, _ = inputs
    ctx.save_for_backward(codes, absmax)
    ctx.in_features = x.shape[-1]


def _backward(ctx, grad):
    return _linear_grad(grad, *ctx.saved_tensors, ctx.in_features), None, None, None


_linear.register_autograd(_backward, setup_context=_keep)


def make_known_to_inductor() -> None:
    """Give all graphs with a Linear4bit the same kernels. Call this before the first one is compiled.

    Inductor realizes an operator's input only after it has compiled that operator in this process. In the first graph,
    the kernel that computes the input therefore writes it twice and may get different block sizes. Policy and reference
    are two graphs, so their norms would sum in different orders. Graphs in the compiler's disk cache do not change.
    """
    from torch._inductor.lowering import add_needs_realized_inputs

    add_needs_realized_inputs([torch.ops.strop.nf4_linear.default, torch.ops.strop.nf4_linear_grad.default])


class Linear4bit(nn.Linear):
    """Frozen linear layer with a packed weight. Computes in `dtype` and returns it, even under autocast.

    `weight` is dequantised at every access, so writing into it has no effect.
    """

    def __init__(self, packed: Packed, bias: Tensor | None, in_features: int, out_features: int, dtype: torch.dtype):
        nn.Module.__init__(self)  # nn.Linear's would allocate the weight
        self.in_features, self.out_features, self.dtype = in_features, out_features, dtype
        self.codes = nn.Parameter(packed.codes, requires_grad=False)
        self.absmax = nn.Parameter(packed.absmax, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @classmethod
    def of(cls, linear: nn.Linear, device: torch.device | None = None) -> Linear4bit:
        """Quantise a layer, on `device` if given. The result computes in the dtype of the layer's weight."""
        weight, bias = linear.weight.detach(), linear.bias
        packed = quantize(weight.to(device or weight.device))
        bias = None if bias is None else bias.detach().to(device or bias.device)
        return cls(packed, bias, linear.in_features, linear.out_features, weight.dtype)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the weight."""
        return self.out_features, self.in_features

    @property
    def weight(self) -> Tensor:  # (O, D)
        return dequantize(Packed(self.codes.detach(), self.absmax.detach()), self.shape, self.dtype)

    def forward(
        self,
        x: Tensor,  # (..., D)
    ) -> Tensor:  # (..., O)
        out = torch.ops.strop.nf4_linear(x.to(self.dtype), self.codes, self.absmax, self.out_features)
        return out if self.bias is None else out + self.bias


def is_4bit(model: nn.Module) -> bool:
    return any(isinstance(module, Linear4bit) for module in model.modules())


def num_weights(model: nn.Module) -> int:
    """Count the parameters of a model, packed weights by their unpacked elements."""
    layers = [module for module in model.modules() if isinstance(module, Linear4bit)]
    num_packed = sum(layer.codes.numel() + layer.absmax.numel() for layer in layers)
    return sum(p.numel() for p in model.parameters()) - num_packed + sum(_count(layer.shape) for layer in layers)
