"""Linear layers of few rows: float64 references for the tests under the interpreter and on a GPU, and what fits."""

from __future__ import annotations

import importlib.util
import math
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.decode import linear as module
from kernels.decode.block import silu_mul_reference
from kernels.decode.launch import launch_options
from kernels.decode.linear import Adapters, fits
from kernels.decode.lora import add_adapters_reference
from tests.kernels.decode_problems import error


class Layers(NamedTuple):
    """Linear layers of the same input."""

    x: Tensor  # (B, D)
    weight: Tensor  # (O + R', D)
    bias: Tensor | None  # (O,)
    adapters: Adapters | None

    def to(self, *target: str | torch.dtype) -> Layers:
        """Move, or convert numbers other than indices."""
        x, weight, bias, adapters = self
        if adapters is not None:
            first = adapters.first.to(*target).to(torch.int32)
            adapters = adapters._replace(up=adapters.up.to(*target), scale=adapters.scale.to(*target), first=first)
        return Layers(x.to(*target), weight.to(*target), None if bias is None else bias.to(*target), adapters)

    def run(self, *, gated: bool = False) -> Tensor:  # (P, B, O) float32; gated: (B, O / 2) in the dtype of x
        if gated:
            assert self.bias is None
            return module.gated_linear(self.x, self.weight, self.adapters)
        return module.linear(*self)

    def reference(self, *, gated: bool = False) -> Tensor:  # (B, O) or (B, O / 2) in the dtype of x
        if self.adapters is None:
            out = F.linear(self.x, self.weight, self.bias)
            return silu_mul_reference(out) if gated else out
        wide = torch.promote_types(self.x.dtype, torch.float32)
        joint = F.linear(self.x.to(wide), self.weight.to(wide))
        return add_adapters_reference(joint, self.bias, self.adapters.up, self.adapters.scale, gated=gated)

    def exact(self, *, gated: bool = False) -> Tensor:  # float64
        return self.to(torch.float64).reference(gated=gated)


def make_layers(
    num_rows: int,
    width: int,
    outs: list[int],  # outputs of each layer
    ranks: list[int] | None = None,  # rank of each layer's adapter, 0 = none
    *,
    bias: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Layers:
    """Build layers whose outputs and adapters are of size 1. The memory after every matrix contains NaN."""
    generator = torch.Generator().manual_seed(num_rows)

    def draw(rows: int, columns: int) -> Tensor:
        memory = torch.full((rows + 2, columns), torch.nan)
        memory[:rows] = torch.randn(rows, columns, generator=generator)
        return memory.to(dtype)[:rows]

    ranks = ranks or [0] * len(outs)
    total, rank = sum(outs), sum(ranks)
    weight = draw(total + (-(-rank // 64) * 64), width)
    weight *= width**-0.5
    weight[total + rank :] = 0
    adapters = None
    if rank:
        up, first = draw(total, -(-rank // 16) * 16).zero_(), torch.zeros(total, dtype=torch.int32)
        row, column = 0, 0
        for out, r in zip(outs, ranks, strict=True):
            if r:
                up[row : row + out, column : column + r] = draw(out, r) * r**-0.5
                first[row : row + out] = column
            row, column = row + out, column + r
        scale = 0.5 + torch.rand(total, generator=generator)
        adapters = Adapters(up, scale, first, max(ranks), math.gcd(*outs))
    return Layers(draw(num_rows, width), weight, draw(total, 1)[:, 0].contiguous() if bias else None, adapters)


def check_linear(layers: Layers, limit: float) -> int:
    """Return the number of parts."""
    parts, want = layers.run(), layers.exact()
    assert parts.dtype == torch.float32 and parts.shape[1:] == want.shape
    assert error(parts.sum(0), want) < limit
    return len(parts)


def check_gated(layers: Layers, limit: float) -> None:
    got, want = layers.run(gated=True), layers.exact(gated=True)
    assert got.dtype == layers.x.dtype and got.shape == want.shape
    assert error(got, want) < limit


# Layers that the kernel supports

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(module, "is_supported", lambda x: True)


def fitting(layers: Layers) -> bool:
    return fits(layers.x, layers.weight, layers.adapters)


GOOD = make_layers(1, 256, [64, 128], [8, 4], dtype=torch.bfloat16)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_rows_in_16_bits_fit(hopper, dtype):
    assert fitting(GOOD) and fitting(GOOD._replace(adapters=None))
    for num_rows in (1, 100, 128):
        assert fitting(make_layers(num_rows, 384, [100, 7], dtype=dtype))
        assert fitting(make_layers(num_rows, 128, [64, 192], [64, 1], dtype=dtype))


BAD = {
    "rows": make_layers(129, 256, [64], dtype=torch.bfloat16),
    "width": make_layers(1, 192, [64], dtype=torch.bfloat16),
    "float32": make_layers(1, 256, [64]),
    "two dtypes": GOOD._replace(x=GOOD.x.to(torch.float16)),
    "layers that share a tile": make_layers(1, 256, [96, 192], [8, 4], dtype=torch.bfloat16),
    "rank": make_layers(1, 256, [64, 64], [8, 65], dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", BAD)
def test_other_layers_do_not_fit(hopper, name):
    assert not fitting(BAD[name])


def test_nothing_fits_on_a_cpu():
    assert not fitting(GOOD)
    assert launch_options(GOOD.x) == {"PDL": False}
