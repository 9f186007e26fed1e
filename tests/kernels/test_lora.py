"""Linear layers with adapters for training, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.lora import fits, lora_linear, sum_products
from kernels.nf4 import Linear4bit
from tests.kernels.decode_problems import error

LIMITS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2e-2}  # 1.3e-2 for 7 outputs with torch 2.11


def layer(width: int, out: int, dtype: torch.dtype, *, in_4bit: bool = False, bias: bool = False) -> nn.Linear:
    linear = nn.Linear(width, out, bias=bias).to(dtype).requires_grad_(False)
    return Linear4bit.of(linear) if in_4bit else linear


def naive(x: Tensor, base: nn.Linear, a: Tensor, b: Tensor, scale: float, inner: Tensor | None = None) -> Tensor:
    x, weight, a, b, inner = (t.double() for t in (x, base.weight, a, b, x if inner is None else inner))
    return F.linear(x, weight, None if base.bias is None else base.bias.double()) + scale * (inner @ a.T @ b.T)


def inputs(shape: tuple[int, ...], out: int, rank: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """x, A, B and the adapter's own input; the gradient of the output."""
    wide = torch.promote_types(dtype, torch.float32)
    sizes = ((shape, dtype), ((rank, shape[-1]), wide), ((out, rank), wide), (shape, dtype))
    leaves = [torch.randn(size, dtype=kind).requires_grad_() for size, kind in sizes]
    return leaves, torch.randn(*shape[:-1], out, dtype=dtype)


def results(function: Any, base: nn.Linear, arguments: list[Any], grad: Tensor) -> list[Tensor]:
    x, *others = arguments
    out = function(x, base, *others)
    leaves = [t for t in arguments if isinstance(t, Tensor) and t.requires_grad]
    return [out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


@pytest.mark.parametrize("in_4bit", [False, True])
@pytest.mark.parametrize("dtype", LIMITS)
def test_values_and_gradients_match_float64(dtype, in_4bit):
    torch.manual_seed(0)
    for shape, out, rank, bias in (((1, 16), 7, 3, True), ((3, 5, 33), 20, 1, False), ((2, 0, 8), 4, 2, False)):
        base = layer(shape[-1], out, dtype, in_4bit=in_4bit, bias=bias)
        assert fits(base, dtype) and not fits(base, torch.float16)
        (x, a, b, inner), grad = inputs(shape, out, rank, dtype)
        for arguments in ([x, a, b, 0.3], [x, a, b, 2.0, inner], [x.detach(), a, b, 1.5]):
            want, got = (results(function, base, arguments, grad) for function in (naive, lora_linear))
            assert got[0].dtype == dtype
            for found, exact in zip(got, want, strict=True):
                assert found.shape == exact.shape
                assert error(found, exact) < LIMITS[dtype] if exact.any() else not found.any()


@pytest.mark.parametrize("in_4bit", [False, True])
def test_compiled_graphs_round_once_too(in_4bit):
    torch.manual_seed(0)
    compiled = torch.compile(lora_linear, backend="aot_eager", dynamic=True, fullgraph=True)
    base = layer(33, 20, torch.bfloat16, in_4bit=in_4bit, bias=True)
    (x, a, b, inner), grad = inputs((3, 5, 33), 20, 4, torch.bfloat16)
    for arguments in ([x, a, b, 0.3], [x, a, b, 0.0], [x, a, b, 2.0, inner]):
        want, got = (results(function, base, arguments, grad) for function in (lora_linear, compiled))
        assert all(map(torch.equal, want, got))


def rounded_once(x: Tensor, base: nn.Linear, a: Tensor, b: Tensor) -> Tensor:  # scale 1
    """Return which outputs equal the exact sum of product and rounded adapter, rounded once."""
    adapter = F.linear(F.linear(x, a), b)
    return lora_linear(x, base, a, b, 1.0) == (x.double() @ base.weight.double().T + adapter.double()).to(x.dtype)


@pytest.mark.parametrize("in_4bit", [False, True])
@pytest.mark.parametrize("sizes", [(1, 8, 8), (5, 7, 13), (33, 257, 129), (256, 512, 64)])  # tokens, in, out
def test_sums_are_rounded_once(sizes, in_4bit):
    torch.manual_seed(0)
    num, width, out = sizes
    base, x = layer(width, out, torch.bfloat16, in_4bit=in_4bit), torch.randn(num, width).bfloat16()
    a, b = torch.randn(4, width).bfloat16(), (1e-3 * torch.randn(out, 4)).bfloat16()
    assert rounded_once(x, base, a, b).float().mean() > 0.999  # 0.75 to 0.85 with two roundings
    off = lora_linear(x, base, a, b, 0.0)
    assert torch.equal(lora_linear(x, base, a, 0 * b, 1.0), off) and torch.equal(off, base(x))


@pytest.mark.parametrize("in_4bit", [False, True])
@pytest.mark.parametrize("sizes", [(0, 8, 8, 2), (5, 7, 13, 3), (33, 256, 129, 8)])  # tokens, in, out, rank
def test_one_matmul_over_both_products_rounds_once(sizes, in_4bit):  # as on a GPU
    torch.manual_seed(0)
    num, width, out, rank = sizes
    base = layer(width, out, torch.bfloat16, in_4bit=in_4bit)
    x, low, b = (torch.randn(size).bfloat16() for size in ((num, width), (num, rank), (out, rank)))
    codes, absmax = (base.codes, base.absmax) if in_4bit else (base.weight, None)
    exact = x.double() @ base.weight.double().T + low.double() @ b.double().T
    joined = sum_products(x, codes, absmax, low, b, join=True)
    assert joined.shape == exact.shape
    assert (joined == exact.bfloat16()).double().sum() >= 0.999 * exact.numel()


def test_other_layers_do_not_fit():
    class Other(nn.Linear):
        pass

    assert not fits(nn.Linear(4, 4), torch.float32)  # trained
    assert not fits(Other(4, 4).requires_grad_(False), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("width, out", [(4096, 4096), (4096, 14336), (14336, 4096), (4096, 1024)])
def test_at_8b_shapes_on_a_gpu(width, out, compiled):
    """Share of an adapter of 1e-4, gradients, and bits without the adapter."""
    torch.manual_seed(0)
    base = layer(width, out, torch.bfloat16).cuda()
    x = torch.randn(8192, width, device="cuda", dtype=torch.bfloat16)
    a, b = torch.randn(16, width, device="cuda") / width**0.5, 1e-4 * torch.randn(out, 16, device="cuda")
    arguments, grad = [x.requires_grad_(), a.requires_grad_(), b.requires_grad_(), 2.0], torch.randn_like(x[:, :1])

    def activated(*arguments: Any) -> Tensor:
        return F.silu(lora_linear(*arguments))  # a pointwise user: inductor would split an addmm

    options = {"emulate_precision_casts": True}
    function = torch.compile(activated, dynamic=True, options=options) if compiled else activated
    want = results(lambda *arguments: F.silu(naive(*arguments)), base, arguments, grad.expand(-1, out))
    for found, exact in zip(results(function, base, arguments, grad.expand(-1, out)), want, strict=True):
        assert error(found, exact) < LIMITS[torch.bfloat16]
    with torch.no_grad():
        change = lora_linear(x, base, a, b, 2.0).double() - lora_linear(x, base, a, 0 * b, 1.0).double()
        exact = 2 * (x.double() @ a.double().T) @ b.double().T
        assert 0.99 < (change * exact).sum() / exact.square().sum() < 1.01
        # Few rows would be split in K; the order of 14,336 additions in float32 changes one bit in 130.
        assert rounded_once(x, base, a.bfloat16(), b.bfloat16()).float().mean() > 0.99
        assert torch.equal(lora_linear(x, base, a, 0 * b, 1.0), lora_linear(x, base, a, b, 0.0))
