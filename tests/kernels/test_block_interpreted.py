"""Block kernels for training under Triton's interpreter: small odd sizes on a CPU, against float64.

Unwritten memory contains NaN.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from kernels import block
from tests.kernels.interpreter import interpreted
from tests.kernels.test_block import (
    DTYPES,
    PUBLIC,
    check,
    check_checkpoint,
    check_frozen,
    check_no_rows,
    check_rounded,
    check_views,
    gated_inputs,
    norm_inputs,
    rotate_inputs,
    silu_inputs,
)

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.usefixtures("nan_in_unwritten_memory"),
]
in_dtypes = pytest.mark.parametrize(("dtype", "other"), DTYPES, ids=str)


@pytest.fixture(autouse=True)
def kernels_in_small_tiles(monkeypatch):
    """Use several programs with several iterations each."""
    monkeypatch.setattr(block, "_fits", lambda *tensors: True)
    monkeypatch.setattr(block, "TILE", 128)
    monkeypatch.setattr(block, "PROGRAMS", 3)
    monkeypatch.setattr(block, "BLOCK", 32)


@interpreted
@in_dtypes
def test_norm(dtype, other):
    """37 columns make tiles of two rows, 200 columns exceed TILE. 23 rows leave a partial tile."""
    for shape in ((1, 16), (23, 37), (2, 3, 2, 200)):
        check(PUBLIC, "rms_norm", norm_inputs(shape, dtype, other))
        check(PUBLIC, "gated_rms_norm", gated_inputs(shape, dtype, other))
    check(PUBLIC, "rms_norm, 1 + weight", norm_inputs((23, 37), dtype, other))


@interpreted
@in_dtypes
def test_rotation(dtype, other):
    """More heads than a program processes at a time, sizes that are not powers of two, shared angles."""
    for shape, angles in (((1, 5, 4, 2, 16), 1), ((2, 3, 9, 1, 10), 2), ((3, 2, 8, 17, 6), 1)):
        check(PUBLIC, "rotate", rotate_inputs(shape, dtype, other, angles=angles))


@interpreted
@in_dtypes
def test_activation(dtype, other):
    for shape in ((1, 16), (5, 37), (2, 3, 64)):
        check(PUBLIC, "silu_mul", silu_inputs(shape, dtype, other))


@interpreted
def test_activation_of_large_values():
    gate, up = silu_inputs((2, 3), torch.float32, torch.float32)
    with torch.no_grad():
        gate[0] = torch.tensor([-200.0, 200.0, 0.0])
    check(PUBLIC, "silu_mul", [gate, up])


@interpreted
@pytest.mark.parametrize("requirement", [check_views, check_no_rows, check_frozen, check_checkpoint, check_rounded])
def test_shared_check(requirement):
    requirement(PUBLIC)


@interpreted
def test_second_derivative_is_rejected():
    x, weight = norm_inputs((3, 8), torch.float32, torch.float32)
    (slope,) = torch.autograd.grad(PUBLIC["rms_norm"](x, weight).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()
