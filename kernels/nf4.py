"""Frozen weights in 4 bits (NF4, Dettmers et al. 2023, arXiv:2305.14314), and a linear layer that holds one.

    packed = quantize(weight)                        # codes (n / 2,) uint8, absmax (n / 64,) bfloat16
    weight = dequantize(packed, shape, dtype)
    layer = Linear4bit.of(linear)                    # in place of a frozen nn.Linear

The weight is cut into blocks of 64 numbers, in memory order; of each its largest magnitude is kept, and 4-bit codes:

    w_i ~ absmax * LEVELS[code_i],   code_i = the level nearest to w_i / absmax

LEVELS are quantiles of the normal distribution, scaled to [-1, 1], with an exact 0. An error is at most 0.152 absmax
(half the widest gap between levels); over normally distributed weights its root mean square is about a tenth of theirs.
absmax is kept in bfloat16, before codes are chosen: 0.531 bytes a number. A second quantisation of absmax to 8 bits
would save 3 percent of that.

The layer's products are those of a plain layer with the dequantised weight, which exists only while one product runs:
the backward pass dequantises again, and autograd keeps nothing but the packed weight. Both passes are single
operators for torch.compile, which would otherwise keep the dequantised weight from one pass for the other.

Traffic of `dequantize`: reads 0.531 bytes and writes 2 (bfloat16) per number.
Shapes: n = numbers of a weight, padded to whole blocks; O = out features, D = in features.
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
except ImportError:  # CPU builds of torch may come without Triton; the reference runs there
    triton = None

SIZE = 64  # numbers of a block
BYTES_PER_WEIGHT = 0.5 + 2 / SIZE
PROGRAM = 1024  # codes (bytes) of one program
PART = 1 << 24  # numbers that quantize works on at a time: it needs 12 bytes for each
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


class Packed(NamedTuple):
    codes: Tensor  # (n / 2,) uint8; the first number of a pair is in the lower four bits
    absmax: Tensor  # (n / 64,) bfloat16


@torch.no_grad()
def quantize(
    weight: Tensor,  # (...) any shape and float dtype
) -> Packed:
    """Quantise on the weight's own device, part by part."""
    if not weight.is_floating_point():
        raise ValueError(f"weight: dtype {weight.dtype}; only floating-point weights can be quantised")
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
    """The weight, each number rounded to dtype once. A Triton kernel on CUDA, elsewhere plain torch."""
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


# ---- the kernel, on CUDA or under TRITON_INTERPRET=1 ----


def dequantize_kernel(packed: Packed, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
    codes, absmax = packed
    assert codes.is_contiguous() and absmax.is_contiguous(), "a packed weight is contiguous"
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


# ---- the linear layer ----


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
    """Call this before the first graph with a Linear4bit is compiled, so that all such graphs get the same kernels.

    Inductor treats an operator's input as one to be stored only once it has compiled that operator in this process. In
    the first graph, the kernel that computes the input therefore writes it twice, and may get other block sizes. Policy
    and reference are two graphs: their norms would sum in different orders. Graphs that the compiler finds in its cache
    on disk stay as they are.
    """
    from torch._inductor.lowering import add_needs_realized_inputs

    add_needs_realized_inputs([torch.ops.strop.nf4_linear.default, torch.ops.strop.nf4_linear_grad.default])


class Linear4bit(nn.Linear):
    """A frozen linear layer whose weight is packed; computes and returns `dtype`, whatever autocast says.

    `weight` is the dequantised matrix, made anew at every access: reading it is right, writing into it has no effect.
    """

    def __init__(self, packed: Packed, bias: Tensor | None, in_features: int, out_features: int, dtype: torch.dtype):
        nn.Module.__init__(self)  # nn.Linear's would allocate the weight
        self.in_features, self.out_features, self.dtype = in_features, out_features, dtype
        self.codes = nn.Parameter(packed.codes, requires_grad=False)
        self.absmax = nn.Parameter(packed.absmax, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @classmethod
    def of(cls, linear: nn.Linear, device: torch.device | None = None) -> Linear4bit:
        """Computes in the dtype of the layer's weight. On `device` if given, where the weight is quantised."""
        weight, bias = linear.weight.detach(), linear.bias
        packed = quantize(weight.to(device or weight.device))
        bias = None if bias is None else bias.detach().to(device or bias.device)
        return cls(packed, bias, linear.in_features, linear.out_features, weight.dtype)

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight."""
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
    """Parameters of a model, packed ones counted as the numbers they stand for."""
    packed = [module for module in model.modules() if isinstance(module, Linear4bit)]
    held = sum(module.codes.numel() + module.absmax.numel() for module in packed)
    return sum(p.numel() for p in model.parameters()) - held + sum(_count(module.shape) for module in packed)
