"""Block operations for training: the references match transformers' modules bit for bit.

test_block_interpreted.py and test_block_gpu.py run the checks on the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels import block
from tests.kernels.decode_problems import error

LIMITS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1.5e-2}  # the interpreter rounds towards zero
DTYPES = [  # activations, and weights or angles
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),  # under autocast
]
EPS = 1e-5
NAMES = ("rms_norm", "rms_norm, 1 + weight", "rotate", "silu_mul", "gated_rms_norm")
REFERENCES = {
    "rms_norm": lambda x, weight: block.rms_norm_reference(x, weight, EPS),
    "rms_norm, 1 + weight": lambda x, weight: block.rms_norm_reference(x, weight, EPS, plus_one=True),
    "rotate": block.rotate_reference,
    "silu_mul": block.silu_mul_reference,
    "gated_rms_norm": partial(block.gated_rms_norm_reference, eps=EPS),
}
PUBLIC = {
    "rms_norm": partial(block.rms_norm, eps=EPS),
    "rms_norm, 1 + weight": partial(block.rms_norm, eps=EPS, plus_one=True),
    "rotate": block.rotate,
    "silu_mul": block.silu_mul,
    "gated_rms_norm": partial(block.gated_rms_norm, eps=EPS),
}


class Result(NamedTuple):
    outputs: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]  # one per input with requires_grad


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return numbers.to(device, dtype)


def norm_inputs(shape: tuple[int, ...], dtype: torch.dtype, other: torch.dtype, device: str = "cpu") -> list[Tensor]:
    x = 3 * draw(*shape, seed=1, dtype=dtype, device=device)
    return [x.requires_grad_(), (1 + 0.3 * draw(shape[-1], seed=2)).to(device, other).requires_grad_()]


def silu_inputs(shape: tuple[int, ...], dtype: torch.dtype, other: torch.dtype, device: str = "cpu") -> list[Tensor]:
    gate, up = (4 * draw(*shape, seed=seed, dtype=dtype, device=device) for seed in (3, 4))
    return [gate.requires_grad_(), up.requires_grad_()]


def gated_inputs(shape: tuple[int, ...], dtype: torch.dtype, other: torch.dtype, device: str = "cpu") -> list[Tensor]:
    x, weight = norm_inputs(shape, dtype, other, device)
    return [x, (2 * draw(*shape, seed=8, dtype=dtype, device=device)).requires_grad_(), weight]


def rotate_inputs(
    shape: tuple[int, ...],  # B, T, H, H_kv, K
    dtype: torch.dtype,
    other: torch.dtype,
    device: str = "cpu",
    angles: int | None = None,  # rows of cos and sin
) -> list[Tensor]:
    """Build inputs in the layout of attention: heads of a token are adjacent. The halves of the angles differ."""
    batch, length, heads, key_heads, size = shape
    query = draw(batch, length, heads, size, seed=5, dtype=dtype, device=device).transpose(1, 2)
    key = draw(batch, length, key_heads, size, seed=6, dtype=dtype, device=device).transpose(1, 2)
    angle = draw(angles or batch, length, size, seed=7, device=device)
    return [query.requires_grad_(), key.requires_grad_(), angle.cos().to(other), angle.sin().to(other)]


def inputs_of(name: str, dtype: torch.dtype, other: torch.dtype, device: str = "cpu") -> list[Tensor]:
    if name == "rotate":
        return rotate_inputs((2, 3, 9, 2, 10), dtype, other, device)
    inputs = {"silu_mul": silu_inputs, "gated_rms_norm": gated_inputs}.get(name, norm_inputs)
    return inputs((2, 3, 37), dtype, other, device)


def slope_of(output: Tensor, number: int) -> Tensor:
    return draw(*output.shape, seed=10 + number).to(output.device, output.dtype)


def run(function: Callable[..., Any], inputs: list[Tensor]) -> Result:
    """Return outputs, and gradients of a sum with random weights, which depend only on the outputs' shapes."""
    outputs = as_tuple(function(*inputs))
    gradients = gradients_of(outputs, inputs, [slope_of(x, i) for i, x in enumerate(outputs)])
    return Result(tuple(x.detach() for x in outputs), gradients)


def as_tuple(x: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def gradients_of(outputs: tuple[Tensor, ...], inputs: list[Tensor], slopes: list[Tensor]) -> tuple[Tensor, ...]:
    leaves = [x for x in inputs if x.requires_grad]
    pairs = [(x, slope) for x, slope in zip(outputs, slopes, strict=True) if x.requires_grad]
    return torch.autograd.grad([x for x, _ in pairs], leaves, [x for _, x in pairs]) if leaves else ()


def exact(name: str, inputs: list[Tensor], like: Result) -> Result:
    """Run the reference in float64, with the output gradients of `like`."""
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    outputs = as_tuple(REFERENCES[name](*wide))
    gradients = gradients_of(outputs, wide, [slope_of(x, i).double() for i, x in enumerate(like.outputs)])
    return Result(tuple(x.detach() for x in outputs), gradients)


def check(functions: dict[str, Callable[..., Any]], name: str, inputs: list[Tensor]) -> Result:
    """Compare values and gradients with float64, and dtypes and shapes with the reference."""
    got, plain = run(functions[name], inputs), run(REFERENCES[name], inputs)
    want = exact(name, inputs, got)
    limit = LIMITS[min((x.dtype for x in inputs), key=lambda dtype: dtype.itemsize)]
    for kind, *tensors in zip(Result._fields, got, plain, want, strict=True):
        for i, (x, y, z) in enumerate(zip(*tensors, strict=True)):
            assert (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device), (kind, i)
            assert torch.equal(x.double(), z) or error(x, z) < limit, (kind, i, error(x, z))
    return got


def assert_equal(a: Result, b: Result) -> None:
    for x, y in zip((*a.outputs, *a.gradients), (*b.outputs, *b.gradients), strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)


# Checks of every implementation


def check_views(functions: dict[str, Callable[..., Any]], device: str = "cpu") -> None:
    """Inputs with gaps between rows, or between columns."""
    for name in NAMES:
        for dim in (-1, -2):
            views = []
            for x in inputs_of(name, torch.float32, torch.float32, device):
                gaps = torch.full_like(x, torch.nan)
                view = torch.stack([x.detach(), gaps], dim=dim).select(dim, 0)
                assert view.shape == x.shape and (x.dim() == 1 or not view.is_contiguous())
                views.append(view.requires_grad_(x.requires_grad))
            check(functions, name, views)


def check_no_rows(functions: dict[str, Callable[..., Any]], device: str = "cpu") -> None:
    for name, inputs in {
        "rms_norm": norm_inputs((2, 0, 24), torch.bfloat16, torch.float32, device),
        "rotate": rotate_inputs((2, 0, 4, 2, 8), torch.bfloat16, torch.float32, device),
        "silu_mul": silu_inputs((0, 24), torch.bfloat16, torch.bfloat16, device),
        "gated_rms_norm": gated_inputs((0, 24), torch.bfloat16, torch.float32, device),
    }.items():
        got = check(functions, name, inputs)
        assert all((x == 0).all() for x in got.gradients)  # the gradient of the norm's weight is not empty


def check_frozen(functions: dict[str, Callable[..., Any]], device: str = "cpu") -> None:
    """Freezing inputs changes neither the values nor the gradients of other inputs."""
    for name in NAMES:
        inputs = inputs_of(name, torch.bfloat16, torch.bfloat16, device)
        want = run(functions[name], inputs)
        for index, gradient in enumerate(want.gradients):
            got = run(functions[name], [x.detach().requires_grad_(i == index) for i, x in enumerate(inputs)])
            assert_equal(Result(got.outputs, ()), Result(want.outputs, ()))
            assert len(got.gradients) == 1 and error(got.gradients[0], gradient) < 1e-3
        with torch.no_grad():
            outputs = as_tuple(functions[name](*inputs))
        assert_equal(Result(outputs, ()), Result(want.outputs, ()))
        assert not any(x.requires_grad for x in outputs)


def check_checkpoint(functions: dict[str, Callable[..., Any]], device: str = "cpu") -> None:
    """Activation checkpointing gives the same results, twice."""
    for name in NAMES:
        inputs = inputs_of(name, torch.bfloat16, torch.float32, device)
        want = run(functions[name], inputs)
        checkpointed = partial(checkpoint, functions[name], use_reentrant=False)
        for _ in range(2):
            assert_equal(run(checkpointed, inputs), want)


def check_rounded(functions: dict[str, Callable[..., Any]], device: str = "cpu") -> None:
    """Rounding inside the operation gives the bits of rounding afterwards, in both passes."""
    for name in NAMES[:3]:
        for dtype, other in DTYPES:
            inputs = inputs_of(name, dtype, other, device)

            def rounded_later(*inputs: Tensor, name: str = name) -> tuple[Tensor, ...]:
                return tuple(x.bfloat16() for x in as_tuple(functions[name](*inputs)))

            got, want = run(partial(functions[name], dtype=torch.bfloat16), inputs), run(rounded_later, inputs)
            if device == "cuda":
                assert_equal(got, want)
            for x, y in zip((*got.outputs, *got.gradients), (*want.outputs, *want.gradients), strict=True):
                assert x.dtype == y.dtype and error(x, y) < LIMITS[torch.bfloat16]  # the interpreter truncates


# References


@pytest.mark.parametrize(("dtype", "other"), DTYPES, ids=str)
def test_references_match_transformers(dtype, other):
    from transformers import Qwen3Config
    from transformers.models.qwen3 import modeling_qwen3 as qwen3
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

    x, weight = norm_inputs((2, 5, 37), dtype, other)
    norm = qwen3.Qwen3RMSNorm(37, eps=EPS)
    norm.weight = torch.nn.Parameter(weight.detach())

    def transformers_norm(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(norm, {"weight": weight}, (x,))

    assert_equal(run(PUBLIC["rms_norm"], [x, weight]), run(transformers_norm, [x, weight]))
    gated = qwen3_5.Qwen3_5RMSNormGated(37, eps=EPS)
    gated.weight = torch.nn.Parameter(weight.detach())

    def transformers_gated_norm(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(gated, {"weight": weight}, (x, gate))

    inputs = gated_inputs((2, 5, 37), dtype, other)
    assert_equal(run(PUBLIC["gated_rms_norm"], inputs), run(transformers_gated_norm, inputs))
    inputs = rotate_inputs((2, 5, 4, 2, 10), dtype, other)
    assert_equal(run(PUBLIC["rotate"], inputs), run(qwen3.apply_rotary_pos_emb, inputs))
    mlp = qwen3.Qwen3MLP(Qwen3Config(hidden_size=8, intermediate_size=16)).to(dtype)

    def activation(gate: Tensor, up: Tensor) -> Tensor:
        return mlp.act_fn(gate) * up

    gate_up = silu_inputs((2, 5, 37), dtype, other)
    assert_equal(run(PUBLIC["silu_mul"], gate_up), run(activation, gate_up))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "other"), [*DTYPES, (torch.float64, torch.float64)], ids=str)
def test_references_are_exact(dtype, other, name):
    check(REFERENCES, name, inputs_of(name, dtype, other))


def test_references_pass_the_shared_checks():
    for check_one in (check_views, check_no_rows, check_frozen, check_checkpoint, check_rounded):
        check_one(PUBLIC)
