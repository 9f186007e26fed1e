"""Decode attention: the plain-torch reference against a loop in float64, and the kernels under Triton's interpreter.

Pages of 16 and few tokens, because the interpreter is slow; places that no row sees hold NaN, and so does memory that
was never written. On a GPU: test_decode_gpu.py.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from kernels import decode_attention as module
from kernels.decode_attention import decode_attention, decode_attention_kernel, decode_attention_reference, supports
from tests.kernels.decode_problems import Problem, error, make_problem, naive
from tests.kernels.interpreter import interpreted

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
GROUPS = [(37, [1, 20, 16]), (16, [5]), (0, [3, 18]), (50, [2] * 9)]  # the last fills a tile and begins another


@pytest.fixture(autouse=True)
def nan_in_unwritten_memory():
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(was)


SPLITS = module._splits


@pytest.fixture(autouse=True)
def few_splits(monkeypatch):
    """The interpreter runs one program after the other."""
    monkeypatch.setattr(module, "_splits", lambda programs, pages: 2)


def compare(run, problem: Problem, limit: float, window: int | None = None) -> None:
    got = run(*problem[:4], **problem.options, window=window)
    assert got.dtype == problem.query.dtype and got.shape == problem.query.shape
    assert error(got, naive(problem, window)) < limit


@pytest.mark.parametrize("window", [None, 1, 7, 30, 1000])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
def test_reference_is_attention_over_prefix_and_own_tokens(dtype, limit, window):
    compare(decode_attention_reference, make_problem(GROUPS, dtype=dtype, heads=(6, 2, 10)), limit, window)


def test_reference_runs_on_a_cpu_and_takes_any_layout():
    problem = make_problem(GROUPS)
    want = decode_attention_reference(*problem[:4], **problem.options)
    query = problem.query.transpose(0, 1).contiguous().transpose(0, 1)
    keys = problem.keys.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(decode_attention(query, keys, problem.values, problem.rows, **problem.options), want)


def padded(problem: Problem) -> Problem:
    """Two padding rows more: no tokens, no tile."""
    query = torch.cat([problem.query, problem.query[:2]])
    table, prefix_len, own_len, tiles = problem.rows
    more = ((table, -1), (prefix_len, 0), (own_len, 0), (tiles, -1))
    rows = module.Rows(*(torch.cat([x, torch.full_like(x[:2], fill)]) for x, fill in more))
    return problem._replace(query=query, rows=rows)


def check_padding(run) -> None:
    problem = make_problem(GROUPS[:2])
    want = run(*problem[:4], **problem.options)
    more = padded(problem)
    got = run(*more[:4], **more.options)
    assert torch.equal(got[:-2], want) and (got[-2:] == 0).all()


def test_reference_gives_zeros_for_padding():
    check_padding(decode_attention_reference)
    problem = padded(make_problem(GROUPS[:2]))
    rows = module.Rows(*(x[-2:] for x in problem.rows))
    assert (decode_attention_reference(problem.query[-2:], *problem[1:3], rows, **problem.options) == 0).all()


def test_head_sizes_of_the_kernels():
    assert [size for size in range(300) if supports(size)] == [16, 32, 64, 128, 256]


# ---- the kernels ----

HEADS = [(2, 2, 16), (4, 2, 32), (3, 1, 16), (8, 2, 16), (7, 1, 64), (8, 1, 16), (12, 1, 16)]


@needs_triton
@interpreted
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_kernel_with_any_number_of_query_heads_per_key_head(heads):
    compare(decode_attention_kernel, make_problem([(37, [1, 20]), (0, [3])], heads=heads), 1e-6)


@needs_triton
@interpreted
@pytest.mark.parametrize("window", [None, 1, 7, 30])
def test_kernel_with_a_window(window):
    compare(decode_attention_kernel, make_problem(GROUPS[:3], heads=(2, 1, 16)), 1e-6, window)


@needs_triton
@interpreted
@pytest.mark.parametrize(("page", "dtype", "limit"), [(48, torch.float32, 1e-6), (64, torch.bfloat16, 5e-3)])
def test_kernel_with_longer_pages(page, dtype, limit):
    """Pages of 48 are read in blocks of 16."""
    compare(decode_attention_kernel, make_problem([(70, [1, 65]), (0, [50])], page=page, dtype=dtype), limit)


@needs_triton
@interpreted
def test_kernel_with_holes_in_tiles_and_strided_inputs():
    problem = make_problem(GROUPS, holes=True, heads=(2, 1, 16))
    keys = problem.keys.transpose(0, 1).contiguous().transpose(0, 1)
    query = problem.query.transpose(0, 1).contiguous().transpose(0, 1)
    compare(decode_attention_kernel, problem._replace(keys=keys, query=query), 1e-6)


@needs_triton
@interpreted
@pytest.mark.parametrize("splits", [1, 3])
def test_kernel_with_the_prefix_split_over_programs(splits, monkeypatch):
    monkeypatch.setattr(module, "_splits", lambda programs, pages: splits)
    compare(decode_attention_kernel, make_problem([(100, [4, 2]), (20, [1])]), 1e-6)
    compare(decode_attention_kernel, make_problem([(100, [4, 40])]), 1e-6, window=41)


@needs_triton
@interpreted
def test_kernel_gives_zeros_for_padding():
    check_padding(decode_attention_kernel)


def test_few_rows_split_the_prefix_and_many_do_not():
    assert SPLITS(programs=8, pages=100) == 16 and SPLITS(programs=8, pages=3) == 2
    assert SPLITS(programs=64, pages=8) == 4 and SPLITS(programs=512, pages=8) == SPLITS(programs=1, pages=1) == 1
