"""Linear layers of the same input with LoRA adapters, for decoding, without autograd.

    joint = x @ [W; A].T                           # (N, O + R') float32, one matmul: the outputs, then x A^T
    out = add_adapters(joint, bias, up, scale)     # x W^T + bias + scale * (x A^T) B^T, in the dtype of up

W are the stacked weights of the layers (query, key and value, or gate and up), A the stacked A of their adapters, and
`up` contains the B of each adapter in the rows of its layer and the columns of its A; its other elements are 0. So all
adapters of these layers cost some rows in the matmul and one kernel, which with `gated` also applies a gated MLP's
activation. x A^T is rounded to the dtype of B, as in training. Outputs are rounded after the sum: added to an output
that is already in bfloat16, most of a small adapter would be rounded away again. Grids depend only on shapes, so a step
can be captured in a CUDA graph. The kernel runs on CUDA, the reference elsewhere.

Shapes: N = tokens, O = outputs of all layers, R = sum of their ranks, or a little more (zeros), R' >= R.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.decode.block import silu_mul_reference

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch may lack Triton; the reference runs there
    triton = None

COLUMNS = 64  # outputs per program


def add_adapters(
    joint: Tensor,  # (N, O + R') float32 or wider
    bias: Tensor | None,  # (O,)
    up: Tensor,  # (O, R)
    scale: Tensor,  # (O,) float32
    *,
    gated: bool = False,
) -> Tensor:  # (N, O); gated: (N, O / 2)
    """Return the outputs plus their adapters; gated: silu(first half) * second half of these sums."""
    fits = joint.is_cuda and joint.dtype != torch.float64 and triton is not None
    return (add_adapters_kernel if fits else add_adapters_reference)(joint, bias, up, scale, gated=gated)


def add_adapters_reference(
    joint: Tensor,  # (N, O + R')
    bias: Tensor | None,  # (O,)
    up: Tensor,  # (O, R)
    scale: Tensor,  # (O,)
    *,
    gated: bool = False,
) -> Tensor:  # (N, O); gated: (N, O / 2)
    width, rank = up.shape
    out = joint[:, :width] if bias is None else joint[:, :width] + bias
    low = joint[:, width : width + rank].to(up.dtype).to(joint.dtype)
    out = (out + scale * F.linear(low, up.to(joint.dtype))).to(up.dtype)
    return silu_mul_reference(out) if gated else out


# Kernel, on CUDA or under TRITON_INTERPRET=1


def add_adapters_kernel(
    joint: Tensor,  # (N, O + R')
    bias: Tensor | None,  # (O,)
    up: Tensor,  # (O, R)
    scale: Tensor,  # (O,)
    *,
    gated: bool = False,
) -> Tensor:  # (N, O); gated: (N, O / 2)
    (num_tokens, joint_width), (width, rank) = joint.shape, up.shape
    assert joint.stride(1) == 1 and up.is_contiguous() and scale.is_contiguous(), "rows must be contiguous"
    assert joint_width >= width + rank and joint.dtype == torch.float32, f"{joint.shape} {joint.dtype}, {up.shape}"
    out = torch.empty(num_tokens, width // 2 if gated else width, dtype=up.dtype, device=joint.device)
    if out.numel():
        rows = min(64, max(16, triton.next_power_of_2(num_tokens) // 8))
        _add_adapters[triton.cdiv(out.shape[1], COLUMNS), triton.cdiv(num_tokens, rows)](
            joint, bias, up, scale, out, num_tokens, out.shape[1], width, joint.stride(0), HAS_BIAS=bias is not None,
            GATED=gated, RANK=rank, ROWS=rows, COLUMNS=COLUMNS, RANKS=min(64, max(16, triton.next_power_of_2(rank))),
            num_warps=4,
            UPCAST=not joint.is_cuda,  # Triton's interpreter would multiply bfloat16 bit patterns as integers
        )  # fmt: skip
    return out


if triton is not None:

    @triton.jit
    def _sums(
        joint, bias, up, scale, row, column, is_row, is_column, width, HAS_BIAS: tl.constexpr, RANK: tl.constexpr,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr, UPCAST: tl.constexpr,
    ):  # fmt: skip
        """Outputs plus adapters in these columns, rounded, as float32. `row` (ROWS, 1) are offsets of rows."""
        dtype: tl.constexpr = up.dtype.element_ty
        base = tl.load(joint + row + column[None, :], mask=is_row & is_column[None, :], other=0.0)
        if HAS_BIAS:
            base += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
        factor = tl.load(scale + column, mask=is_column, other=0.0)
        change = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in tl.static_range(0, RANK, RANKS):
            k = start + tl.arange(0, RANKS)
            low = tl.load(joint + row + width + k[None, :], mask=is_row & (k < RANK)[None, :], other=0.0).to(dtype)
            at = up + column[None, :] * RANK + k[:, None]
            high = tl.load(at, mask=is_column[None, :] & (k < RANK)[:, None], other=0.0)
            if UPCAST:
                low, high = low.to(tl.float32), high.to(tl.float32)
            change = tl.dot(low, high, change, input_precision="ieee")
        return (base + change * factor[None, :]).to(dtype).to(tl.float32)

    @triton.jit
    def _add_adapters(
        joint, bias, up, scale, out, num_tokens, out_width, width, joint_row, HAS_BIAS: tl.constexpr,
        GATED: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr,
        UPCAST: tl.constexpr,
    ):  # fmt: skip
        token = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        is_row, is_column, row = token < num_tokens, column < out_width, token * joint_row
        dtype: tl.constexpr = out.dtype.element_ty
        x = _sums(
            joint, bias, up, scale, row, column, is_row, is_column, width,
            HAS_BIAS, RANK, ROWS, COLUMNS, RANKS, UPCAST,
        )  # fmt: skip
        if GATED:
            gate = (x / (1.0 + tl.exp(-x))).to(dtype).to(tl.float32)
            x = gate * _sums(
                joint, bias, up, scale, row, column + out_width, is_row, is_column, width,
                HAS_BIAS, RANK, ROWS, COLUMNS, RANKS, UPCAST,
            )  # fmt: skip
        tl.store(out + token * out_width + column[None, :], x.to(dtype), mask=is_row & is_column[None, :])
