"""Linear layers of a decode step with few rows, which are bound by reading their weights.

    parts = linear(x, weight, bias, adapters)             # (P, B, O) float32: the reader sums them, and rounds
    out = gated_linear(x, weight, adapters)               # (B, O / 2) silu(first half) * second half

Libraries split K to use the whole GPU, and sum the parts in one more kernel. Here the kernel that reads the output
sums them: the norm after an output layer, the rotation after query, key and value.

LoRA adapters are part of the product: each program computes its part of x A^T, rounds it to the dtype of B, and adds
scale * (x A^T) B^T. A follows the weights in the same matrix (see lora.py). There is no reference here: these are
`F.linear`, add_adapters_reference and silu_mul_reference.

Shapes: B = decode rows, D = in features, O = out features, P = parts, R = sum of the ranks of the adapters, or a little
more (zeros).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.decode.launch import MAX_ROWS, is_supported, launch_options

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # CPU builds of torch may lack Triton
    triton = None

PROGRAMS = 132  # at most this many if K is split: the multiprocessors of an H200
COLUMNS = 64  # outputs per program
WIDTH = 128  # features per iteration
MAX_RANK = 64
SHARED = 224_000  # bytes of shared memory per program


class Adapters(NamedTuple):
    """LoRA adapters of the layers whose weights are stacked. They take effect where `up` is not 0."""

    up: Tensor  # (O, R)
    scale: Tensor  # (O,) float32
    first: Tensor  # (O,) int32 first column of `up` that is not 0
    rank: int  # the largest of one adapter
    tile: int  # divides the number of outputs of each layer


def fits(
    x: Tensor,  # (B, D)
    weight: Tensor,  # (O, D)
    adapters: Adapters | None,
) -> bool:
    """Return whether the kernel supports these layers, and is faster than a library."""
    has_shape = x.shape[1] % WIDTH == 0 and (adapters is None or adapters.tile % COLUMNS == 0)
    return (
        0 < len(x) <= MAX_ROWS and has_shape and x.dtype == weight.dtype and x.dtype.itemsize == 2
        and is_supported(x) and triton is not None and (adapters is None or adapters.rank <= MAX_RANK)
    )  # fmt: skip


def linear(
    x: Tensor,  # (B, D)
    weight: Tensor,  # (O, D), and A of the adapters in further rows
    bias: Tensor | None = None,  # (O,)
    adapters: Adapters | None = None,
) -> Tensor:  # (P, B, O) float32
    width, outs = x.shape[1], len(weight) if adapters is None else len(adapters.up)
    parts, tiles, most = 1, triton.cdiv(outs, COLUMNS), 8 if len(x) <= 64 else 4
    while parts < most and width % (2 * parts * WIDTH) == 0 and 2 * parts * tiles <= PROGRAMS:
        parts *= 2
    columns = COLUMNS if parts * tiles > PROGRAMS // 2 else COLUMNS // 2
    out = torch.empty(parts, len(x), outs, dtype=torch.float32, device=x.device)
    _launch(x, weight, bias, adapters, out, outs, columns, parts, gated=False)
    return out


def gated_linear(
    x: Tensor,  # (B, D)
    weight: Tensor,  # (O, D), and A of the adapters in further rows
    adapters: Adapters | None = None,
) -> Tensor:  # (B, O / 2)
    """silu(first half) * second half; halves and silu are rounded as by `silu_mul`."""
    outs = (len(weight) if adapters is None else len(adapters.up)) // 2
    out = torch.empty(len(x), outs, dtype=x.dtype, device=x.device)
    columns = COLUMNS if outs >= COLUMNS * PROGRAMS // 2 else COLUMNS // 2
    _launch(x, weight, None, adapters, out, outs, columns, 1, gated=True)
    return out


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, adapters: Adapters | None, out: Tensor, outs: int, columns: int,
    parts: int, *, gated: bool,
) -> None:  # fmt: skip
    num_rows, width = x.shape
    assert x.is_contiguous() and weight.is_contiguous() and width % (parts * WIDTH) == 0, f"x {x.shape}, {parts} parts"
    rows = 64 if num_rows <= 64 else 128  # the memory sees only real rows, and two variants compile sooner than four
    rank = 0 if adapters is None else max(16, triton.next_power_of_2(adapters.rank))
    stages = SHARED // (WIDTH * x.element_size() * (rows + (columns + rank) * (1 + gated)))
    low: Any = None if adapters is None else TensorDescriptor.from_tensor(weight, [rank, WIDTH])
    up, scale, first = (None, None, None) if adapters is None else adapters[:3]
    _linear[triton.cdiv(outs, columns), parts, triton.cdiv(num_rows, rows)](
        TensorDescriptor.from_tensor(x, [rows, WIDTH]), TensorDescriptor.from_tensor(weight, [columns, WIDTH]), low,
        bias, up, scale, first, out, num_rows, outs, 0 if up is None else up.shape[1], EACH=width // parts, GATED=gated,
        BIAS=bias is not None, RANK=rank, ROWS=rows, COLUMNS=columns, WIDTH=WIDTH, STAGES=min(4, stages),
        UPCAST=not x.is_cuda,  # Triton's interpreter would multiply bfloat16 bit patterns as integers
        num_warps=4 if rows * columns * (1 + gated) <= 128 * 64 else 8, **launch_options(x),
    )  # fmt: skip


if triton is not None:

    @triton.jit
    def _add_product(y, rows, weight, first, k, UPCAST: tl.constexpr):
        """Add the product of some rows and the weights from row `first` on, over the features from k on."""
        weights = weight.load([first, k])
        if UPCAST:
            rows, weights = rows.to(tl.float32), weights.to(tl.float32)
        return tl.dot(rows, weights.T, y, input_precision="ieee")

    @triton.jit
    def _adapted(
        y, low, up, scale, first, column, num_out, up_width, dtype: tl.constexpr, RANK: tl.constexpr,
        UPCAST: tl.constexpr,
    ):  # fmt: skip
        """Add scale * low B^T for these columns of all layers; `low` (ROWS, RANK) is x A^T of their adapter."""
        k = first + tl.arange(0, RANK)
        inside = (k < up_width)[:, None] & (column < num_out)[None, :]
        high = tl.load(up + column[None, :].to(tl.int64) * up_width + k[:, None], mask=inside, other=0.0)
        low = low.to(dtype)
        if UPCAST:
            low, high = low.to(tl.float32), high.to(tl.float32)
        factor = tl.load(scale + column, mask=column < num_out, other=0.0)
        return y + tl.dot(low, high, input_precision="ieee") * factor[None, :]

    @triton.jit(do_not_specialize=["num_rows"])
    def _linear(
        x, weight, lows, bias, up, scale, first, out, num_rows, num_out, up_width, EACH: tl.constexpr,
        GATED: tl.constexpr, BIAS: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
        WIDTH: tl.constexpr, STAGES: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        """Compute a tile over EACH features. x, weight and lows (the same matrix) are tensor descriptors."""
        n, part, m = tl.program_id(0) * COLUMNS, tl.program_id(1), tl.program_id(2) * ROWS
        dtype: tl.constexpr = x.dtype
        num_layers_out = num_out * 2 if GATED else num_out
        if RANK:
            low_at = num_layers_out + tl.load(first + n)
            if GATED:
                up_low_at = num_layers_out + tl.load(first + num_out + n)
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        y = tl.zeros((ROWS, COLUMNS), tl.float32)
        z = tl.zeros((ROWS, COLUMNS), tl.float32)
        low = tl.zeros((ROWS, RANK if RANK else 1), tl.float32)
        up_low = tl.zeros((ROWS, RANK if RANK else 1), tl.float32)
        for k in tl.range(part * EACH, part * EACH + EACH, WIDTH, num_stages=STAGES):
            rows = x.load([m, k])
            y = _add_product(y, rows, weight, n, k, UPCAST)
            if GATED:
                z = _add_product(z, rows, weight, n + num_out, k, UPCAST)
            if RANK:
                low = _add_product(low, rows, lows, low_at, k, UPCAST)
                if GATED:
                    up_low = _add_product(up_low, rows, lows, up_low_at, k, UPCAST)
        row, column = m + tl.arange(0, ROWS), n + tl.arange(0, COLUMNS)
        if RANK:
            y = _adapted(y, low, up, scale, tl.load(first + n), column, num_layers_out, up_width, dtype, RANK, UPCAST)
            if GATED:
                z = _adapted(
                    z, up_low, up, scale, tl.load(first + num_out + n), num_out + column, num_layers_out, up_width,
                    dtype, RANK, UPCAST,
                )  # fmt: skip
        if BIAS:
            end = tl.where(part == 0, num_out, 0)  # once
            y += tl.load(bias + column, mask=column < end, other=0.0).to(tl.float32)[None, :]
        if GATED:
            y = y.to(dtype).to(tl.float32)
            y = (y / (1.0 + tl.exp(-y))).to(dtype).to(tl.float32) * z.to(dtype).to(tl.float32)
        place = (part * num_rows + row).to(tl.int64)[:, None] * num_out + column[None, :]
        tl.store(out + place, y.to(out.dtype.element_ty), mask=(row < num_rows)[:, None] & (column < num_out)[None, :])
