"""Kernels of kernels/exact.py under Triton's interpreter: small odd sizes on a CPU.

NumPy chooses the order of a product's sum by its shape, so products are compared in tiles of one shape, or of integers,
whose sums are exact. Unwritten memory contains NaN.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from kernels import exact
from tests.kernels.interpreter import interpreted
from tests.kernels.test_exact import HEADS, check_attention, check_linear

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.usefixtures("nan_in_unwritten_memory"),
]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def run_kernels(monkeypatch):
    monkeypatch.setattr(exact, "_runs_kernels", lambda x: True)


TILES = [(64, 16, 4), (64, 64, 4), (128, 16, 4), (128, 128, 8)]


@interpreted
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear(dtype, tile, monkeypatch):
    """Widths that end within a block of 64, and outputs that end within a tile."""
    monkeypatch.setattr(exact, "linear_tile", lambda rows, columns: tile)
    check_linear(exact.exact_linear, dtype, (136, 70), counts=(1, 64, 65))
    check_linear(exact.exact_linear, dtype, (40, 23), counts=(3,))


@interpreted
def test_linear_has_the_same_sums_in_all_tiles(monkeypatch):
    x, weight = (torch.randint(-9, 10, shape).float() for shape in ((131, 136), (300, 136)))
    for tile in TILES:
        monkeypatch.setattr(exact, "linear_tile", lambda rows, columns, tile=tile: tile)
        assert torch.equal(exact.exact_linear(x, weight, None), x @ weight.T), tile


@interpreted
def test_linear_without_rows_and_with_views():
    assert exact.exact_linear(torch.zeros(0, 8), torch.ones(5, 8), None).shape == (0, 5)
    x, weight = torch.arange(66.0).view(3, 22)[:, 1:9], torch.ones(24, 40)[::2, 3:11]
    assert torch.equal(exact.exact_linear(x, weight, None), x @ weight.T)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention(dtype):
    check_attention(exact.attend_in_order, (4, 2, 16), dtype)


@interpreted
@pytest.mark.parametrize("heads", [*HEADS, (16, 1, 9)], ids=str)
def test_attention_with_any_number_of_heads(heads):
    """Groups of 1 to 16 heads, among them 3 and 7, and head sizes that are no powers of two."""
    check_attention(exact.attend_in_order, heads, torch.float32, documents=[[(66, [3]), (2, [1, 2])]])


@interpreted
def test_attention_with_strided_inputs():
    def run(query, keys, values, spans, **options):
        query, keys, values = (x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (query, keys, values))
        return exact.attend_in_order(query, keys, values, spans, **options)

    check_attention(run, (4, 2, 16), torch.float32, documents=[[(20, [3, 70])]])


@interpreted
def test_attention_without_tokens():
    spans = (torch.zeros(1, 0, dtype=torch.int32),) * 4
    empty = torch.zeros(1, 2, 0, 16)
    assert exact.attend_in_order(empty, empty, empty, spans, scale=1.0).shape == (1, 2, 0, 16)
