"""Linear layers with adapters against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.decode.lora import add_adapters, add_adapters_reference
from tests.kernels.decode_problems import error

LIMITS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}
SIZES = [(1, 6, 16), (5, 70, 48), (37, 128, 16), (3, 10, 96)]  # tokens, outputs, rank


def inputs(
    num_tokens: int, width: int, rank: int, dtype: torch.dtype, *, bias: bool = False
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Outputs, low-rank activations and three columns that are not read; bias; B; one scale per output."""
    generator = torch.Generator().manual_seed(num_tokens)
    joint = torch.randn(num_tokens, width + rank + 3, generator=generator)
    joint = joint.to(torch.promote_types(dtype, torch.float32))
    joint[:, width + rank :] = torch.nan
    up, biases = (torch.randn(width, size, generator=generator).to(dtype) for size in (rank, 1))
    return joint, biases[:, 0].contiguous() if bias else None, up, 0.5 + torch.rand(width, generator=generator)


def check(function, num_tokens: int, width: int, rank: int, dtype: torch.dtype) -> None:
    for has_bias in (False, True):
        joint, bias, up, scale = inputs(num_tokens, width, rank, dtype, bias=has_bias)
        before = joint.clone()
        wide, low = (x.double() for x in joint[:, : width + rank].split([width, rank], dim=1))
        want = wide + scale.double() * (low @ up.double().T) + (0 if bias is None else bias.double())
        got = function(joint, bias, up, scale)
        assert got.dtype == dtype and error(got, want) < LIMITS[dtype]
        gate, other = want.chunk(2, dim=1)
        gated = function(joint, bias, up, scale, gated=True)
        assert gated.dtype == dtype and gated.is_contiguous()
        assert error(gated, gate * gate.sigmoid() * other) < 3 * LIMITS[dtype]  # Triton's interpreter truncates
        assert torch.equal(joint.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("dtype", LIMITS)
def test_adapters_match_float64(dtype):
    for size in SIZES:
        check(add_adapters_reference, *size, dtype)
        check(add_adapters, *size, dtype)


def whole_numbers(*shape: int, seed: int, limit: int = 4) -> Tensor:
    """Their products and sums are exact in float32, in any order."""
    return torch.randint(-limit, limit + 1, shape, generator=torch.Generator().manual_seed(seed)).float()
