"""log sum_v p_v^2 from hidden states, against its slow reference and a value by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import kernels.linear_logprob as fast
from kernels import reference
from tests.kernels.heads import OPTIONS

N, D, V = 23, 16, 101  # 101 is prime: no block divides it


def make(dtype: torch.dtype = torch.float64, n: int = N) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((n, D), (V, D), (V,))
    hidden, weight, bias = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    return hidden.to(dtype), (weight / 2).to(dtype), bias.to(dtype)


def test_value_by_hand():
    hidden, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])  # logits 1, 2, 3
    total = sum(math.exp(z) for z in (1, 2, 3))
    want = math.log(sum((math.exp(z) / total) ** 2 for z in (1, 2, 3)))
    assert fast.linear_log_collision(hidden, weight).item() == pytest.approx(want, abs=1e-6)


def test_matches_the_slow_reference_for_any_block_size(monkeypatch):
    hidden, weight, bias = make()
    for name, options in OPTIONS.items():
        with_bias = None if name == "plain" else bias
        want = reference.linear_log_collision(hidden, weight, bias=with_bias, **options)
        for elements in (1, 4 * V + 3, 1 << 25):  # a block per token; six blocks, the last partial; one block
            monkeypatch.setattr(fast, "BLOCK_ELEMENTS", elements)
            got = fast.linear_log_collision(hidden, weight, bias=with_bias, **options)
            torch.testing.assert_close(got, want, atol=1e-12, rtol=0, msg=name)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_lower_precision(dtype, tolerance):
    hidden, weight, bias = make(dtype)
    want = reference.linear_log_collision(hidden.double(), weight.double(), bias=bias.double())
    got = fast.linear_log_collision(hidden, weight.float(), bias=bias.float())  # fp32 master weights, cast down
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=0)


def test_large_logits_stay_finite_and_at_most_zero():
    hidden, weight, _ = make(torch.float32)
    got = fast.linear_log_collision(1e4 * hidden, weight)
    assert got.isfinite().all() and (got <= 0).all()
    torch.testing.assert_close(got, torch.zeros(N), atol=1e-3, rtol=0)


def test_no_tokens_and_no_gradient():
    hidden, weight, bias = make(torch.bfloat16, n=0)
    got = fast.linear_log_collision(hidden, weight, bias=bias)
    assert got.shape == (0,) and got.dtype == torch.float32
    hidden, weight, _ = make()
    assert not fast.linear_log_collision(hidden.requires_grad_(), weight.requires_grad_()).requires_grad
