"""NF4: error bounds of the codes, the kernel bit for bit against plain torch, the layer against a plain layer.

Sizes: less than a block, an odd size, whole blocks and programs, one more than a program.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kernels import nf4
from kernels.nf4 import LEVELS, SIZE, Linear4bit, dequantize, dequantize_kernel, dequantize_reference, quantize
from tests.kernels.interpreter import interpreted

SHAPES = [(1, 1), (3, 5), (1, 64), (7, 33), (64, 32), (65, 63), (129, 100)]
DTYPES = [torch.float32, torch.bfloat16]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (0.02 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def blocks_of(flat: torch.Tensor) -> torch.Tensor:
    return F.pad(flat.float().flatten(), (0, -flat.numel() % SIZE)).view(-1, SIZE)


# Codes


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_is_at_most_half_the_widest_gap(shape, dtype):
    weight = numbers(*shape, dtype=dtype)
    packed = quantize(weight)
    assert packed.codes.numel() == -(-weight.numel() // SIZE) * SIZE // 2 and packed.codes.dtype == torch.uint8
    back = dequantize(packed, shape, dtype)
    assert back.shape == weight.shape and back.dtype == dtype
    absmax = blocks_of(weight).abs().amax(dim=1, keepdim=True)
    gap = max(b - a for a, b in zip(LEVELS, LEVELS[1:], strict=False))
    # Rounding of absmax, and of the result to bfloat16, by 2^-9 each.
    assert (blocks_of(back) - blocks_of(weight)).abs().le((gap / 2 + 2**-8) * absmax + 1e-12).all()


def test_the_error_of_normal_weights_is_below_a_tenth():
    weight = numbers(512, 512)
    back = dequantize(quantize(weight), weight.shape, torch.float32)
    assert 0.08 < (back - weight).norm() / weight.norm() < 0.1


def test_each_code_is_the_nearest_level():
    weight = numbers(13, 77)
    back, packed = blocks_of(dequantize(quantize(weight), weight.shape, torch.float32)), quantize(weight)
    scale = packed.absmax.float()[:, None]
    own = blocks_of(weight)
    nearest = (own[..., None] - scale[..., None] * torch.tensor(LEVELS)).abs().amin(dim=-1)
    torch.testing.assert_close((back - own).abs(), nearest, rtol=0, atol=1e-8)


def test_levels_are_exact():
    weight = torch.tensor(LEVELS).repeat(8).view(2, 64) * torch.tensor([[0.5], [2.0]])  # absmax is exact in bfloat16
    assert torch.equal(dequantize(quantize(weight), weight.shape, torch.float32), weight)


def test_zeros_and_outliers_stay_in_their_blocks():
    weight = torch.zeros(4, 64)
    weight[1] = 1e-30
    weight[2, 5] = 1e30
    back = dequantize(quantize(weight), weight.shape, torch.float32)
    assert torch.equal(back[[0, 3]], weight[[0, 3]])
    torch.testing.assert_close(back[1:3], weight[1:3], rtol=2**-8, atol=0)


def test_quantizing_in_parts_matches_quantizing_at_once(monkeypatch):
    weight = numbers(9, 100)
    whole = quantize(weight)
    monkeypatch.setattr(nf4, "PART", 2 * SIZE)
    assert all(torch.equal(a, b) for a, b in zip(whole, quantize(weight), strict=True))


def test_strided_and_empty_weights():
    weight = numbers(6, 70)
    assert torch.equal(quantize(weight.T).codes, quantize(weight.T.contiguous()).codes)
    assert dequantize(quantize(torch.zeros(0, 5)), (0, 5), torch.float32).shape == (0, 5)


def test_integer_weights_are_rejected():
    with pytest.raises(ValueError, match="torch.int64"):
        quantize(torch.zeros(3, dtype=torch.int64))


# The kernel


def check_kernel(shape: tuple[int, ...], dtype: torch.dtype, device: str, rtol: float = 0.0) -> None:
    packed = quantize(numbers(*shape).to(device))
    ours, plain = dequantize_kernel(packed, shape, dtype), dequantize_reference(packed, shape, dtype)
    torch.testing.assert_close(ours, plain, rtol=rtol, atol=0)


@needs_triton
@interpreted
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernel_matches_plain_torch(shape, dtype, monkeypatch):
    monkeypatch.setattr(nf4, "PROGRAM", 128)
    check_kernel(shape, dtype, "cpu", rtol=2**-7 if dtype == torch.bfloat16 else 0)  # the interpreter truncates


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (1024, 4096), (4097, 1023), (0, 8)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernel_matches_plain_torch_on_a_gpu(shape, dtype):
    check_kernel(shape, dtype, "cuda")
    weight = numbers(*shape)
    here, there = quantize(weight), quantize(weight.cuda())
    assert all(torch.equal(a, b.cpu()) for a, b in zip(here, there, strict=True))


# The layer


def check_layer(*, bias: bool, dtype: torch.dtype, device: str = "cpu", wrap=lambda layer: layer) -> None:
    plain = nn.Linear(33, 21, bias=bias).to(device, dtype).requires_grad_(False)
    layer = Linear4bit.of(plain)
    assert not any(p.requires_grad for p in layer.parameters())
    with torch.no_grad():
        plain.weight.copy_(layer.weight)
    x = numbers(2, 5, 33, seed=1, dtype=dtype).to(device).requires_grad_()
    twin = x.detach().clone().requires_grad_()
    out, expected = wrap(layer)(x), plain(twin)
    weights = numbers(2, 5, 21, seed=2, dtype=dtype).to(device)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    limit = {"rtol": 0.02, "atol": 1e-4} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-7}
    torch.testing.assert_close(out, expected, **limit)  # a plain layer adds its bias before it rounds
    torch.testing.assert_close(x.grad, twin.grad, **limit)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_matches_a_plain_layer_with_the_dequantised_weight(bias, dtype):
    check_layer(bias=bias, dtype=dtype)


def test_layer_matches_finite_differences_in_float64():
    layer = Linear4bit.of(nn.Linear(7, 5).double().requires_grad_(False))
    assert torch.autograd.gradcheck(layer, numbers(3, 7).double().requires_grad_())


def test_layer_compiles_without_a_graph_break_and_saves_only_packed_weights():
    kept: list[torch.Tensor] = []
    layer = Linear4bit.of(nn.Linear(64, 96, bias=False).requires_grad_(False))
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    x = numbers(3, 64).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = compiled(x)
    assert {t.data_ptr() for t in kept} <= {layer.codes.data_ptr(), layer.absmax.data_ptr()}
    torch.testing.assert_close(out, x @ layer.weight.T)
    out.sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand_as(x))


def test_layer_computes_in_its_own_dtype_under_autocast():
    layer = Linear4bit.of(nn.Linear(64, 8).bfloat16().requires_grad_(False))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(numbers(2, 64)).dtype == torch.bfloat16


def test_num_weights_counts_unpacked_elements():
    model = nn.Sequential(nn.Linear(70, 3), nn.LayerNorm(3))
    expected = sum(p.numel() for p in model.parameters())
    model[0] = Linear4bit.of(model[0])
    assert nf4.num_weights(model) == expected and nf4.is_4bit(model)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_on_a_gpu(dtype):
    check_layer(bias=False, dtype=dtype, device="cuda")
    check_layer(bias=False, dtype=dtype, device="cuda", wrap=lambda layer: torch.compile(layer, dynamic=True))


@pytest.mark.gpu
def test_layer_stores_no_dequantised_weight_between_passes():
    layer = Linear4bit.of(nn.Linear(4096, 4096, bias=False, device="cuda", dtype=torch.bfloat16))
    x = torch.zeros(1, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()  # workspaces of cuBLAS
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = layer(x)
    assert torch.cuda.memory_allocated() - before < 1 << 20 and out.requires_grad
