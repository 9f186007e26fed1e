"""Decode attention: the plain-torch reference against a float64 loop."""

from __future__ import annotations

import pytest
import torch

from kernels.decode import attention as module
from kernels.decode.attention import decode_attention, decode_attention_reference, supports
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


def padded(problem: Problem) -> Problem:
    """Append two padding rows, without tokens or tiles."""
    query = torch.cat([problem.query, problem.query[:2]])
    table, prefix_len, own_len, tiles = problem.rows
    more = ((table, -1), (prefix_len, 0), (own_len, 0), (tiles, -1))
    rows = module.Rows(*(torch.cat([x, torch.full_like(x[:2], fill)]) for x, fill in more))
    return problem._replace(query=query, rows=rows)


def check_padding(run, **options) -> None:
    problem = make_problem(GROUPS[:2], **options)
    want = run(*problem[:4], **problem.options)
    more = padded(problem)
    got = run(*more[:4], **more.options)
    assert torch.equal(got[:-2], want) and (got[-2:] == 0).all()


def test_reference_gives_zeros_for_padding():
    check_padding(decode_attention_reference)
    check_padding(decode_attention_reference, sinks=True)
    problem = padded(make_problem(GROUPS[:2]))
    rows = module.Rows(*(x[-2:] for x in problem.rows))
    assert (decode_attention_reference(problem.query[-2:], *problem[1:3], rows, **problem.options) == 0).all()


def test_head_sizes_of_the_kernels():
    assert [size for size in (8, 80, 96, 128, 256, 257, 512) if supports(size)] == [8, 80, 96, 128, 256]


def test_few_rows_split_their_tokens_and_many_do_not():
    programs_and_tokens = [(8, 2**14), (8, 192), (512, 2**14), (4096, 2**14), (1, 16)]  # 8 key heads: 1, 64, 512 rows
    assert [module._splits(*x) for x in programs_and_tokens] == [32, 2, 2, 1, 1]
