from __future__ import annotations

import math

import pytest
import torch

from losses.sft import sft_loss

LOGP = (-1.0, -0.5, -2.0, -0.7)
MASK = (True, False, True, True)


def random_case(n: int = 37, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logp = -3 * torch.rand(n, generator=generator, dtype=torch.float64)
    return logp, torch.rand(n, generator=generator) < 0.6


def test_sft_hand_computed_value_and_gradient():
    logp = torch.tensor(LOGP, requires_grad=True)
    out = sft_loss(logp, torch.tensor(MASK))
    term = out.terms["nll"]
    assert list(out.terms) == ["nll"] and term.weight == 1.0
    assert term.sum.item() == pytest.approx(1.0 + 2.0 + 0.7) and term.count.item() == 3
    term.sum.backward()
    assert logp.grad.tolist() == [-1.0, 0.0, -1.0, -1.0]


def test_sft_uniform_model_costs_log_vocabulary():
    vocab = 11
    logp = torch.randn(5, vocab).mul(0).log_softmax(dim=1)[:, 3]
    term = sft_loss(logp, torch.ones(5, dtype=torch.bool)).terms["nll"]
    assert (term.sum / term.count).item() == pytest.approx(math.log(vocab), abs=1e-6)


def test_sft_agrees_with_a_float64_loop():
    logp, mask = random_case()
    naive = sum(-value for value, trained in zip(logp.tolist(), mask.tolist(), strict=True) if trained)
    term = sft_loss(logp, mask).terms["nll"]
    assert term.sum.item() == pytest.approx(naive, rel=1e-14) and term.sum.dtype == torch.float64
    assert term.count.item() == sum(mask.tolist())
    assert sft_loss(logp.float(), mask).terms["nll"].sum.item() == pytest.approx(naive, rel=1e-6)


def test_sft_sums_bfloat16_in_float32():
    logp = torch.full((4096,), -1.0, dtype=torch.bfloat16)  # bfloat16 cannot count beyond 256
    total = sft_loss(logp, torch.ones(4096, dtype=torch.bool)).terms["nll"].sum
    assert total.dtype == torch.float32 and total.item() == 4096.0


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_sft_ignores_whatever_sits_in_masked_positions(poison):
    mask = torch.tensor(MASK)
    logp = torch.where(mask, torch.tensor(LOGP), poison).requires_grad_()
    term = sft_loss(logp, mask).terms["nll"]
    term.sum.backward()
    assert term.sum.item() == pytest.approx(3.7)
    assert logp.grad.tolist() == [-1.0, 0.0, -1.0, -1.0]


@pytest.mark.parametrize("sizes", [(37,), (1, 36), (12, 12, 13), (5, 0, 32)])
def test_sft_micro_batches_sum_to_the_whole(sizes):
    logp, mask = random_case()
    whole = sft_loss(logp, mask).terms["nll"]
    parts = [sft_loss(a, m).terms["nll"] for a, m in zip(logp.split(sizes), mask.split(sizes), strict=True)]
    assert sum(part.sum.item() for part in parts) == pytest.approx(whole.sum.item(), rel=1e-14)
    assert sum(part.count.item() for part in parts) == whole.count.item()


@pytest.mark.parametrize("n", [0, 3])
def test_sft_with_nothing_trained_is_a_differentiable_zero(n):
    logp = torch.randn(n, requires_grad=True)
    term = sft_loss(logp, torch.zeros(n, dtype=torch.bool)).terms["nll"]
    assert term.sum.item() == 0.0 and term.count.item() == 0
    term.sum.backward()
    assert logp.grad.tolist() == [0.0] * n


def test_sft_gradcheck():
    logp, mask = random_case(n=9)
    assert torch.autograd.gradcheck(lambda x: sft_loss(x, mask).terms["nll"].sum, logp.requires_grad_())
