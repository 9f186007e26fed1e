"""Decode attention: the plain-torch reference against a float64 loop."""

from __future__ import annotations

import pytest
import torch

from kernels.decode import attention_few, attention_many
from kernels.decode.attention import Rows, decode_attention, decode_attention_reference, has_few, supports
from tests.kernels.decode_problems import Problem, error, make_problem, naive

GROUPS = [(37, [1, 20, 16]), (16, [5]), (0, [3, 18]), (50, [2] * 9)]  # the last group needs two tiles


def compare(run, problem: Problem, limit: float, window: int | None = None) -> None:
    got = run(*problem[:4], **problem.options, window=window)
    assert got.dtype == problem.query.dtype and got.shape == problem.query.shape
    assert error(got, naive(problem, window)) < limit


OPTIONS = [{"softcap": 1.5}, {"sinks": True}, {"softcap": 1.5, "sinks": True}]


@pytest.mark.parametrize("window", [None, 1, 7, 30, 1000])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
def test_reference_attends_to_prefix_and_own_tokens(dtype, limit, window):
    for options in ({}, *OPTIONS) if window in (None, 7) else ({},):
        problem = make_problem(GROUPS, dtype=dtype, heads=(6, 2, 10), **options)
        compare(decode_attention_reference, problem, limit, window)


def test_reference_accepts_any_memory_layout():
    problem = make_problem(GROUPS)
    want = decode_attention_reference(*problem[:4], **problem.options)
    query = problem.query.transpose(0, 1).contiguous().transpose(0, 1)
    keys = problem.keys.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(decode_attention(query, keys, problem.values, problem.rows, **problem.options), want)


def test_head_sizes_of_the_kernels():
    assert [size for size in (8, 80, 96, 128, 256, 257, 512) if supports(size)] == [8, 80, 96, 128, 256]


def test_few_rows_split_their_tokens():
    programs_and_tokens = [(8, 2**14), (8, 192), (512, 2**14), (4096, 2**14), (1, 16)]  # 8 key heads: 1, 64, 512 rows
    assert [attention_few._splits(*x) for x in programs_and_tokens] == [32, 2, 2, 1, 1]


FEW = {  # rows, heads
    (128, (16, 8, 128)): True,
    (129, (16, 8, 128)): False,
    (128, (32, 8, 64)): True,
    (63, (32, 8, 128)): True,
    (64, (32, 8, 128)): False,
    (512, (9, 3, 64)): False,
    (1024, (8, 1, 256)): True,
}


@pytest.mark.parametrize("case", FEW, ids=str)
def test_kernel_depends_on_rows_and_heads(case):
    num_rows, (num_heads, key_heads, head_dim) = case
    rows = Rows(*(torch.empty(num_rows, 1, dtype=torch.int32) for _ in Rows._fields))
    assert has_few(torch.empty(key_heads, 1, head_dim), rows, num_heads) == FEW[case]


LAYOUTS = {  # rows, heads, bytes per number: parts, tokens per block
    (512, (16, 8, 128), 2): (64, 32),
    (384, (16, 8, 128), 2): (48, 32),
    (256, (16, 8, 128), 2): (32, 64),
    (136, (16, 8, 128), 2): (17, 64),
    (64, (32, 8, 128), 2): (32, 64),
    (512, (32, 8, 128), 2): (64, 64),
    (128, (32, 8, 64), 2): (64, 64),
    (512, (128, 8, 128), 2): (64, 64),
    (200, (48, 6, 256), 2): (25, 64),
    (2048, (16, 8, 128), 4): (256, 64),
}


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_many_rows_have_one_part_per_tile_or_several(case):
    num_rows, (num_heads, key_heads, head_dim), size = case
    keys = torch.empty(key_heads, 1, head_dim, dtype={2: torch.bfloat16, 4: torch.float32}[size])
    layout = attention_many._layout(keys, num_rows, num_heads, 64)
    assert layout == LAYOUTS[case]
    assert layout.parts % -(-num_rows // 8) == 0


def test_gpus_with_little_shared_memory_use_the_kernel_for_few_rows(monkeypatch):
    rows = Rows(*(torch.empty(512, 1, dtype=torch.int32) for _ in Rows._fields))
    keys = torch.empty(8, 1, 128)
    assert not has_few(keys, rows, 16)
    monkeypatch.setattr("kernels.decode.attention.gpu_of", lambda device: (128, 99 << 10))
    assert has_few(keys, rows, 16)
