"""Kernels of kernels/exact.py compiled for a Hopper GPU, which needs no GPU: the same float operations in every use.

Bits can only agree if all tiles of a product use one kind of instruction, and if attention in training, in a prefill
and in a decode step runs the same sequence of float instructions. tests/kernels/test_exact_gpu.py compares the bits.
"""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest

from kernels import exact
from tests.kernels.compiled import compile_kernel

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
FLOAT = re.compile(r"\b(?:(?:wgmma|mma|shfl|ex2|rcp|div)\.\S+|(?:fma|mul|add|sub|max|min|cvt)\.\S*f(?:32|16)\S*)")
STRIDES = "query_row query_head query_token key_row key_head key_place value_row value_head value_place".split()


def float_instructions(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int) -> list[str]:
    """Compile, and return the float instructions in order, without registers."""
    options = {"num_warps": warps, "num_stages": 2, "enable_fp_fusion": False}
    compiled = compile_kernel(kernel, types, constants, aligned=STRIDES, **options)
    return FLOAT.findall(compiled.asm["ptx"])


def test_tiles_of_a_product_use_one_kind_of_instruction():
    tiles = {exact.linear_tile(rows, columns) for rows in (1, 64, 512, 8192) for columns in (64, 1024, 6144)}
    assert len(tiles) > 3
    for m, n, warps in tiles:
        types = {"x": f"tensordesc<bf16[{m}, 64]>", "weight": f"tensordesc<bf16[{n}, 64]>", "out": "*bf16"}
        types |= dict.fromkeys(("num_rows", "num_out", "width"), "i32")
        sizes = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": exact.BLOCK_K, "GROUP": 8}
        found = float_instructions(exact._linear, types, {"bias": None, "BIAS": False, "UPCAST": False, **sizes}, warps)
        products = [name for name in found if "mma_async" in name or "mma.sync" in name]
        assert products and all(re.match(r"wgmma\.mma_async\S+m64n\d+k16\.f32\.bf16", name) for name in products)
        assert not any(name.startswith(("fma", "add")) for name in found), "nothing is summed outside the products"


@pytest.mark.parametrize(("size", "group", "heads"), [(64, 7, 8), (128, 2, 2)])
def test_attention_runs_the_same_instructions_in_every_use(size, group, heads):
    types = dict.fromkeys(("query", "keys", "values", "out"), "*bf16") | {"scale2": "fp32"}
    types |= dict.fromkeys(("prefix_start", "prefix_stop", "own_start", "own_stop"), "*i32")
    types |= dict.fromkeys(("num_tokens", "table_row", *STRIDES), "i32")
    options = {"GROUP": group, "HEADS": heads, "K": size, "WIDTH": size, "LINES": exact.LINES, "KEYS": exact.KEYS}
    options["UPCAST"] = False
    training, prefill, decode = (
        float_instructions(exact._attend, types | {"table": kind}, options | constants, 4)
        for kind, constants in (("", {"PAGE": 0, "table": None}), ("*i64", {"PAGE": 1}), ("*i32", {"PAGE": 64}))
    )
    assert training == prefill == decode
    assert sum("mma_async" in name for name in training) >= 8 and not any(name.startswith("fma") for name in training)
