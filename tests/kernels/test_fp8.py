"""Frozen FP8 layers: values and gradients vs. exact products."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kernels import fp8
from kernels.fp8 import Linear8, quantize_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


def test_rows_are_rounded_to_three_bits():
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 4, 7)[:, None]
    x[3] = 0
    rows = quantize_rows(x)
    assert rows.values.dtype == torch.float8_e4m3fn and rows.scale.shape == (7, 1)
    found = rows.values.float() * rows.scale
    assert torch.equal(found[3], x[3]) and torch.allclose(found.amax(1), x.amax(1), rtol=1 / 16)
    smallest = rows.scale * 2**-10  # half the distance of the numbers next to 0
    assert ((found - x).abs() <= (x.abs() / 16).maximum(smallest)).all() and (found != x).any()


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_matches_its_emulation_and_is_near_the_exact_product(bias):
    torch.manual_seed(0)
    linear = nn.Linear(256, 192, bias=bias, device=DEVICE, dtype=torch.bfloat16).requires_grad_(False)
    exact = nn.Linear(256, 192, bias=bias, device=DEVICE).requires_grad_(False)
    exact.load_state_dict(linear.state_dict())
    x = torch.randn(2, 24, 256, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    wide = x.detach().float().requires_grad_()
    grad = torch.randn(2, 24, 192, device=DEVICE, dtype=torch.bfloat16)
    exact(wide).backward(grad.float())
    layer = Linear8.of(linear)
    assert set(layer.state_dict()) == {"weight"} | ({"bias"} if bias else set()), "exports contain no copies"
    out = layer(x)
    out.backward(grad)
    assert out.dtype == x.grad.dtype == torch.bfloat16 and out.shape == (2, 24, 192)
    assert 0.01 < relative(out, exact(wide)) < 0.05 and 0.01 < relative(x.grad, wide.grad) < 0.05
    emulated = quantize_rows(x.flatten(0, 1)), fp8.Rows(layer.fp8, layer.fp8_scale)
    want = (emulated[0].values.double() * emulated[0].scale) @ (emulated[1].values.double() * emulated[1].scale).T
    want = want + (layer.bias.double() if bias else 0)
    assert relative(out.flatten(0, 1), want) < 5e-3, "tensor cores, or float32, of the same FP8 numbers"


def test_only_frozen_weights_of_whole_tiles():
    with pytest.raises(AssertionError, match="frozen"):
        Linear8.of(nn.Linear(32, 32))
    assert fp8.fits(nn.Linear(32, 48)) and not fp8.fits(nn.Linear(40, 32))
