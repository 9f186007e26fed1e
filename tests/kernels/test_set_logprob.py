"""linear_logprob over a set of ids per token, against dense logits masked with -inf, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kernels.linear_logprob as fast
from kernels import set_rows

D, V = 7, 53  # odd
OPTIONS = (
    {"temperature": 0.7},
    {"scale": 0.5, "softcap": 3.0, "temperature": 1.3, "bias": True},
)


def problem(sizes: list[int], bias: bool = False, dtype: torch.dtype = torch.float64) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(len(sizes))
    sets = torch.full((len(sizes), max(sizes)), -1, dtype=torch.int32)
    for row, size in enumerate(sizes):
        sets[row, :size] = torch.randperm(V, generator=generator)[:size]
    tensors = {"hidden": (len(sizes), D), "weight": (V, D), **({"bias": (V,)} if bias else {})}
    made = {
        name: torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for name, shape in tensors.items()
    }
    return {"bias": None, **made, "target": sets}


def dense(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *, scale=1.0, softcap=None, temperature):
    z = (hidden @ weight.T + (0 if bias is None else bias)) * scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    keep = torch.zeros(z.shape, dtype=torch.bool)
    for row, ids in enumerate(target.tolist()):
        keep[row, [i for i in ids if i >= 0]] = True
    logps = (z / temperature).masked_fill(~keep, -torch.inf).log_softmax(dim=1)
    logp = logps.gather(1, target[:, :1].long()).squeeze(1)
    return logp, -(logps.exp() * logps.masked_fill(~keep, 0.0)).sum(dim=1)


def check_rows(dot, add, sizes: list[int], width: int, dtype: torch.dtype, limit: float, device: str = "cpu") -> None:
    """Both products against float64, with an error of at most `limit` times the sum of absolute values."""
    generator = torch.Generator().manual_seed(width)
    sets = torch.full((len(sizes), max(sizes) + 3), -1, dtype=torch.int32)
    for row, size in enumerate(sizes):
        sets[row, :size] = torch.randperm(V, generator=generator)[:size]
    hidden, weight = (torch.randn(rows, width, generator=generator).to(dtype) for rows in (len(sizes), V))
    dy = torch.randn(sets.shape, generator=generator).masked_fill(sets < 0, 0.0)
    weight[[i for i in range(V) if i not in sets]] = torch.nan  # never read
    args = [x.to(device) for x in (hidden, dy, weight, sets)]
    y, dh = dot(args[0], args[2], args[3]).cpu(), add(args[1], args[2], args[3]).cpu()
    assert dh.dtype == dtype and y.dtype == torch.promote_types(dtype, torch.float32)
    for row, size in enumerate(sizes):
        rows = weight[sets[row, :size].long()].double()
        for found, products, rounding in (
            (y[row, :size], rows * hidden[row].double(), 0.0),
            (dh[row], (rows * dy[row, :size, None].double()).T, 2**-7 if dtype == torch.bfloat16 else 0.0),
        ):
            bound = limit * products.abs().sum(1) + rounding * products.sum(1).abs()
            assert ((found.double() - products.sum(1)).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_rows_of_sets(dtype):
    check_rows(set_rows.dot_rows, set_rows.sum_rows, [1, 17, 3, 40], 7, dtype, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_sets_on_a_gpu(dtype):
    for sizes, width in (([1, 17, 3, 40], 7), ([50] * 300, 1024), ([1] * 99 + [53], 4096)):
        check_rows(set_rows.dot_rows, set_rows.sum_rows, sizes, width, dtype, 1e-5, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("loss", [False, True])
def test_bfloat16_gradients_on_a_gpu(loss):
    """Against float64 on the same inputs, with the error of bfloat16 products."""
    case = problem([1, 2, 5, 11, 1, V, 3, 17, 4] * 9, dtype=torch.bfloat16)
    wide = {
        name: x if x is None or name == "target" else x.detach().double().requires_grad_() for name, x in case.items()
    }
    want = torch.autograd.grad(dense(**wide, temperature=0.8)[0].sum(), [wide["hidden"], wide["weight"]])
    there = {n: None if x is None else x.detach().cuda().requires_grad_(n != "target") for n, x in case.items()}
    if loss:
        total, _ = fast.linear_logprob_loss(
            **there, temperature=0.8, ignore_index=None, loss_fn=lambda t, at: (t.logp.sum(), None)
        )
    else:
        total = fast.linear_logprob(**there, temperature=0.8, ignore_index=None).logp.sum()
    for got, exact in zip(torch.autograd.grad(total, [there["hidden"], there["weight"]]), want, strict=True):
        assert (got.cpu().double() - exact).norm() <= 0.01 * exact.norm()


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "all"])
@pytest.mark.parametrize("skip", [True, False])
def test_gradients_are_those_of_masked_logits(monkeypatch, options, skip):
    options = dict(options)
    case = problem([1, 2, 5, 11, 1, V, 3, 17, 4], bias=options.pop("bias", False))
    leaves = [x for x in case.values() if x is not None and x.requires_grad]
    a = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    a[3] = 0  # no gradient, neither for the log-prob nor for the entropy
    logp, entropy = dense(**case, **options)
    expected = [logp, entropy, *torch.autograd.grad((a * (logp - 0.3 * entropy)).sum(), leaves)]
    for block in (fast.BLOCK_ELEMENTS, 1, 4 * V * D):  # all tokens, one, and a few at a time
        monkeypatch.setattr(fast, "BLOCK_ELEMENTS", block)
        settings = {**case, **options, "ignore_index": None, "skip": skip}
        out = fast.linear_logprob(**settings)
        found = [*out, *torch.autograd.grad((a * (out.logp - 0.3 * out.entropy)).sum(), leaves)]
        loss, parts = fast.linear_logprob_loss(
            **settings, loss_fn=lambda t, at: ((a[at] * (t.logp - 0.3 * t.entropy)).sum(), t.logp)
        )
        fused = [torch.cat(parts), entropy, *torch.autograd.grad(loss, leaves)]
        for x, y, z in zip(expected, found, fused, strict=True):
            torch.testing.assert_close(y, x, rtol=1e-11, atol=1e-12)
            torch.testing.assert_close(z.detach(), x.detach(), rtol=1e-11, atol=1e-12)


def test_sets_of_one_token_have_no_gradient():
    case = problem([1, 1, 1], dtype=torch.float32)
    logp, entropy = fast.linear_logprob(**case, temperature=0.5, ignore_index=None)
    (logp.sum() + entropy.sum()).backward()
    assert logp.tolist() == entropy.tolist() == [0.0] * 3
    assert case["hidden"].grad.abs().max() == case["weight"].grad.abs().max() == 0


def test_a_set_of_all_ids_is_the_full_distribution():
    case = problem([V] * 5)
    for settings in ({}, {"entropy": False}):
        found = fast.linear_logprob(**case, ignore_index=None, **settings)
        whole = fast.linear_logprob(**(case | {"target": case["target"][:, 0].long()}), **settings)
        torch.testing.assert_close(found.logp, whole.logp, rtol=1e-12, atol=1e-12)


def test_a_frozen_head_gets_the_same_gradient():
    case = problem([4, 9, 1])
    want = torch.autograd.grad(dense(**case, temperature=0.9)[0].sum(), case["hidden"])[0]
    frozen = case | {"weight": case["weight"].detach()}
    found = fast.linear_logprob(**frozen, temperature=0.9, ignore_index=None).logp.sum()
    torch.testing.assert_close(torch.autograd.grad(found, case["hidden"])[0], want, rtol=1e-11, atol=1e-12)


def test_no_tokens_and_ignored_tokens():
    case = problem([2, 2])
    none = {"hidden": case["hidden"][:0], "target": case["target"][:0]}
    logp, _ = fast.linear_logprob(**(case | none), ignore_index=None)
    logp.sum().backward()
    assert logp.shape == (0,) and case["weight"].grad.abs().max() == 0
    with pytest.raises(ValueError, match="ignore_index=-100"):
        fast.linear_logprob(**case)
