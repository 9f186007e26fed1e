"""Block kernels for training on a GPU: values, gradients and determinism."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.decode_problems import error
from tests.kernels.test_block import (
    DTYPES,
    NAMES,
    PUBLIC,
    REFERENCES,
    Result,
    assert_equal,
    check,
    check_checkpoint,
    check_frozen,
    check_no_rows,
    check_rounded,
    check_views,
    gated_inputs,
    norm_inputs,
    rotate_inputs,
    run,
    silu_inputs,
)

pytestmark = pytest.mark.gpu
in_dtypes = pytest.mark.parametrize(("dtype", "other"), DTYPES, ids=str)


def real_inputs(name: str, dtype: torch.dtype, other: torch.dtype) -> list[torch.Tensor]:
    """Return inputs of a micro-batch of Qwen3-1.7B, or of the gated norm of a Qwen3.5."""
    if name == "rotate":
        return rotate_inputs((1, 3001, 16, 8, 128), dtype, other, "cuda")
    if name == "silu_mul":
        return silu_inputs((1, 3001, 6144), dtype, other, "cuda")
    if name == "gated_rms_norm":
        return gated_inputs((1, 16 * 3001, 128), dtype, other, "cuda")
    return norm_inputs((1, 3001, 2048), dtype, other, "cuda")


@in_dtypes
@pytest.mark.parametrize("name", NAMES)
def test_exact_at_real_sizes(name, dtype, other):
    check(PUBLIC, name, real_inputs(name, dtype, other))


@in_dtypes
@pytest.mark.parametrize("shape", [(1, 16), (23, 37), (1, 777, 16, 128), (5, 3072), (3, 8192), (2, 20000), (70001, 64)])
def test_norm(shape, dtype, other):
    check(PUBLIC, "rms_norm", norm_inputs(shape, dtype, other, "cuda"))


@in_dtypes
@pytest.mark.parametrize("shape", [(3, 77, 9, 3, 64), (2, 5, 14, 2, 10), (2, 33, 4, 1, 256), (1, 17, 40, 8, 96)])
def test_rotation(shape, dtype, other):
    for angles in (1, shape[0]):
        check(PUBLIC, "rotate", rotate_inputs(shape, dtype, other, "cuda", angles))


@in_dtypes
@pytest.mark.parametrize("shape", [(1, 16), (23, 37), (3, 1025), (2, 3, 14336)])
def test_activation(shape, dtype, other):
    check(PUBLIC, "silu_mul", silu_inputs(shape, dtype, other, "cuda"))


@pytest.mark.parametrize("requirement", [check_views, check_no_rows, check_frozen, check_checkpoint, check_rounded])
def test_shared_check(requirement):
    requirement(PUBLIC, "cuda")


@pytest.mark.parametrize("name", NAMES)
def test_rounds_like_eager_torch(name):
    """Almost all bfloat16 values have the same bits; another summation order changes a few by one step."""
    inputs = real_inputs(name, torch.bfloat16, torch.bfloat16)
    got, plain = run(PUBLIC[name], inputs), run(REFERENCES[name], inputs)
    for x, y in zip(got.outputs, plain.outputs, strict=True):
        differ = (x != y).float().mean().item()
        print(f"{name}: {differ:.1e} of the numbers differ")
        assert differ < (0 if name == "rotate" else 5e-3) + 1e-9
        assert error(x, y) < 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_repeated_runs_give_the_same_bits(name):
    inputs = real_inputs(name, torch.bfloat16, torch.bfloat16)
    first = run(PUBLIC[name], inputs)
    for _ in range(5):
        assert_equal(run(PUBLIC[name], inputs), first)


def test_other_rows_do_not_change_a_row():
    """Policy and reference may run in different batches."""
    for name in NAMES:
        inputs = real_inputs(name, torch.bfloat16, torch.bfloat16)
        whole = run(PUBLIC[name], inputs).outputs
        dim = 2 if name == "rotate" else 1
        some = [x.detach() if x.dim() == 1 else x.detach().narrow(min(dim, x.dim() - 2), 5, 1000) for x in inputs]
        part = run(PUBLIC[name], some).outputs
        assert_equal(Result(part, ()), Result(tuple(x.narrow(dim, 5, 1000) for x in whole), ()))


def test_no_host_sync():
    for name in NAMES:
        inputs = real_inputs(name, torch.bfloat16, torch.bfloat16)
        outputs = PUBLIC[name](*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        trained, slopes = [x for x in inputs if x.requires_grad], [torch.ones_like(x) for x in outputs]
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.autograd.grad(outputs, trained, slopes, retain_graph=True)
            PUBLIC[name](*inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
