"""Triton kernel of linear_kl under Triton's interpreter: small odd sizes on a CPU, against float64.

A block has 256 logits. Unwritten memory contains NaN.
"""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch

import kernels.linear_kl as fast
from tests.kernels import kl_cases
from tests.kernels.interpreter import interpreted
from tests.kernels.kl_cases import BETAS, NAMES, TRITON_16, TRITON_32, check, make, run

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.usefixtures("nan_in_unwritten_memory"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),  # -inf - -inf, replaced afterwards
]
KINDS = (0, 0.3, 1)  # the kernel's three forms
PATHS = {"float32": TRITON_32, "bfloat16": TRITON_16}


@interpreted
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("dtype", PATHS)
def test_several_blocks(dtype, beta):
    """bfloat16 gradients overwrite logits of earlier blocks."""
    check(make(2, 600, path=PATHS[dtype], bias=dtype == "float32"), PATHS[dtype], beta=beta)


@interpreted
@pytest.mark.parametrize(("n", "v", "beta"), [(1, 37, 0), (1, 1, 0.5), (5, 256, 1), (3, 257, 0.5)])
def test_sizes(n, v, beta):
    check(make(n, v, path=TRITON_32), TRITON_32, beta=beta)


@interpreted
@pytest.mark.parametrize("beta", KINDS)
def test_options_of_both_heads(beta):
    for head, teacher in (({"softcap": 3.0}, {}), ({"scale": 1.5}, {"scale": 0.7, "softcap": 2.0})):
        check(make(2, 300, path=TRITON_32, head=head, teacher=teacher), TRITON_32, beta=beta, temperature=1.7)


@interpreted
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_identical_teacher_gives_zero_divergence_and_gradient(dtype, beta):
    path = PATHS[dtype]
    got = run(kl_cases.same_head(make(2, 300, path=path, head={"softcap": 3.0})), path, beta=beta)
    assert all((x == 0).all() for x in got.values())


@interpreted
@pytest.mark.parametrize("beta", KINDS)
def test_extreme_logits_and_masked_ids(beta):
    logits = torch.tensor([[2000.0, 0.0, -2000.0, 5.0], [0.0, 0.0, 0.0, 0.0], [-90.0, 90.0, 0.0, 1.0]])
    case = kl_cases.table(logits, logits.flip(1), TRITON_32)
    got, want = run(case, TRITON_32, beta=beta), run(case, kl_cases.TORCH_32, beta=beta)
    kl_cases.assert_same(got, want, TRITON_32)
    masked = torch.cat([torch.full((3, 300), -math.inf), logits], dim=1)  # a whole block of them at first
    dead = kl_cases.table(masked, torch.cat([masked[:, :300], logits.flip(1)], dim=1), TRITON_32)
    got = run(dead, TRITON_32, beta=beta)
    assert torch.allclose(got["divergence"], want["divergence"], rtol=1e-5, atol=1e-5)
    assert (got["weight"][:300] == 0).all() and (got["bias"][:300] == 0).all()
    torch.testing.assert_close(got["weight"][300:], want["weight"], atol=1e-5, rtol=1e-5)


@interpreted
def test_ids_masked_in_one_head():
    case = make(1, 300, path=TRITON_32)
    dead = torch.arange(300) >= 280
    student, teacher = (own._replace(bias=own.bias.masked_fill(dead, -math.inf)) for own in case[1:4:2])
    for masked, infinite in ((case._replace(head=student), 0), (case._replace(teacher_head=teacher), 1)):
        for beta in KINDS:
            got = run(masked, TRITON_32, beta=beta)
            assert (got["divergence"] == math.inf).all() if beta == infinite else got["divergence"].isfinite().all()
            assert beta == infinite or all(got[name].isfinite().all() for name in NAMES)


@interpreted
@pytest.mark.parametrize("beta", KINDS)
def test_nan_is_not_hidden(beta):
    case = make(2, 40, path=TRITON_32)
    for name in ("hidden", "teacher_hidden"):
        bad = getattr(case, name).clone()
        bad[0, 2] = math.nan
        got = run(case._replace(**{name: bad}), TRITON_32, beta=beta)
        assert got["divergence"][0].isnan() and got["divergence"][1].isfinite()
        assert name == "teacher_hidden" or got["hidden"][0].isnan().all()


@interpreted
@pytest.mark.parametrize("dtype", PATHS)
def test_chunks_do_not_change_the_result(monkeypatch, dtype):
    path = PATHS[dtype]
    case = make(7, 40, path=path)
    whole = run(case, path, beta=0.3)
    monkeypatch.setattr(fast, "CHUNK", 4)
    got = run(case, path, beta=0.3)
    assert torch.equal(got["divergence"], whole["divergence"]) and torch.equal(got["hidden"], whole["hidden"])
    kl_cases.assert_same(got, whole, path)


@interpreted
def test_no_tokens_and_frozen_inputs():
    got = run(make(0, 37, path=TRITON_16), TRITON_16, beta=0.5)
    assert got["loss"].item() == 0 and got["hidden"].shape == (0, 16) and not got["weight"].any()
    case = make(3, 37, path=TRITON_32)
    full = run(case, TRITON_32, beta=0.5)
    for needs in (("hidden",), ("weight",), ("bias",)):
        assert torch.equal(run(case, TRITON_32, beta=0.5, needs=needs)[needs[0]], full[needs[0]])
    assert case.token_weight[1] == 0 and (full["hidden"][1] == 0).all()


@interpreted
def test_float64_is_rejected():
    case = make(3, 37, path=kl_cases.TORCH_64)
    with pytest.raises(ValueError, match="impl=triton: hidden torch.float64: the kernel computes in float32"):
        run(case, TRITON_32, beta=0.5)
