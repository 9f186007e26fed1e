"""Odd sizes on purpose: a prime vocabulary and row counts that no block divides, one row, none, all ignored."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kernels.linear_logprob as fast
from kernels import reference

N, D, V = 23, 16, 101  # 101 is prime: no block of rows or columns fits evenly
IGNORE = -100

OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "scale": {"scale": 0.25},
    "softcap": {"softcap": 3.0},
    "all": {"temperature": 1.7, "scale": 1.5, "softcap": 4.0},
}
LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "logp": lambda logp, entropy, c: (c[0] * logp).sum(),
    "entropy": lambda logp, entropy, c: (c[1] * entropy).sum(),
    "both": lambda logp, entropy, c: (c[0] * logp).sum() + (c[1] * entropy).sum(),
}


def make(n: int = N, d: int = D, v: int = V, *, dtype=torch.float64, bias: bool = True, seed: int = 0):
    """hidden, weight, bias, target, and coefficients (2, N) that make a scalar of log-probs and entropies."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, b = (torch.randn(size, generator=generator, dtype=torch.float64) for size in ((n, d), (v, d), (v,)))
    target = torch.randint(v, (n,), generator=generator)
    coefficients = torch.randn(2, n, generator=generator, dtype=torch.float64)
    tensors = (hidden.to(dtype), (weight / math.sqrt(d)).to(dtype), b.to(dtype) if bias else None)
    return *tensors, target, coefficients


def leaf(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().clone().requires_grad_()


def run(function, hidden, weight, bias, target, coefficients, loss, **options) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Log-probs, entropies, and the gradients of hidden, weight and, if there is one, bias."""
    leaves = [leaf(hidden), leaf(weight), leaf(bias)]
    logp, entropy = function(leaves[0], leaves[1], target, bias=leaves[2], **options)
    given = [x for x in leaves if x is not None]
    gradients = torch.autograd.grad(LOSSES[loss](logp, entropy, coefficients.to(logp.dtype)), given)
    return logp.detach(), entropy.detach(), list(gradients)


def torch_same_dtype(hidden, weight, target, *, bias=None, scale=1.0, softcap=None, temperature=1.0):
    """What plain torch does at this dtype: products in it, softmax in float32, all logits stored."""
    y = hidden @ weight.T
    y = (y if bias is None else y + bias).float() * scale
    y = y if softcap is None else softcap * torch.tanh(y / softcap)
    logp = (y / temperature).log_softmax(dim=-1)
    return logp.gather(1, target.unsqueeze(1)).squeeze(1), -(logp.exp() * logp).sum(dim=-1)


@pytest.fixture
def small_blocks(monkeypatch):
    """Four rows at a time: the 23 rows take six blocks, the last of them incomplete."""
    monkeypatch.setattr(fast, "BLOCK_ELEMENTS", 4 * V + 3)


def test_value_by_hand():
    hidden, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])  # logits 1, 2, 3
    out = fast.linear_logprob(hidden, weight, torch.tensor([1]))
    total = math.exp(1) + math.exp(2) + math.exp(3)
    p = [math.exp(z) / total for z in (1, 2, 3)]
    assert out.logp.item() == pytest.approx(math.log(p[1]), abs=1e-6)
    assert out.entropy.item() == pytest.approx(-sum(x * math.log(x) for x in p), abs=1e-6)
    assert out.logp.dtype == torch.float32


def test_equal_logits_have_the_entropy_of_a_uniform_choice():
    out = fast.linear_logprob(torch.zeros(3, D), torch.randn(V, D), torch.tensor([0, 50, 100]))
    torch.testing.assert_close(out.entropy, torch.full((3,), math.log(V)))
    torch.testing.assert_close(out.logp, torch.full((3,), -math.log(V)))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("options", OPTIONS)
def test_agrees_with_reference_in_float64(small_blocks, options, bias, loss):
    case = make(bias=bias)
    logp, entropy, gradients = run(fast.linear_logprob, *case, loss, **OPTIONS[options])
    want_logp, want_entropy, want_gradients = run(reference.linear_logprob, *case, loss, **OPTIONS[options])
    assert logp.dtype == entropy.dtype == torch.float64
    torch.testing.assert_close(logp, want_logp, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(entropy, want_entropy, atol=1e-10, rtol=1e-10)
    assert len(gradients) == (3 if bias else 2)
    for got, want in zip(gradients, want_gradients, strict=True):
        torch.testing.assert_close(got, want, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("options", OPTIONS)
def test_agrees_with_reference_in_float32(small_blocks, options):
    case = make(dtype=torch.float32)
    doubled = [x.double() if x.is_floating_point() else x for x in case]
    logp, entropy, gradients = run(fast.linear_logprob, *case, "both", **OPTIONS[options])
    want_logp, want_entropy, want_gradients = run(reference.linear_logprob, *doubled, "both", **OPTIONS[options])
    assert logp.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logp.double(), want_logp, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), want_entropy, atol=1e-5, rtol=1e-5)
    for got, want in zip(gradients, want_gradients, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 instructions says so, and goes on
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("options", OPTIONS)
def test_bfloat16_errs_no_more_than_plain_torch(small_blocks, options, loss):
    """At most 1.5 times the error (in norm) of plain bfloat16 torch, against float64 on the same rounded inputs.

    Not once: each block's share of the weight gradient is rounded before it is added up in float32.
    """
    case = make(n=61, d=64, dtype=torch.bfloat16)
    doubled = [x.double() if x.is_floating_point() else x for x in case]
    ours, plain, exact = (
        (logp, entropy, *gradients)
        for logp, entropy, gradients in (
            run(fast.linear_logprob, *case, loss, **OPTIONS[options]),
            run(torch_same_dtype, *case, loss, **OPTIONS[options]),
            run(reference.linear_logprob, *doubled, loss, **OPTIONS[options]),
        )
    )
    assert [x.dtype for x in ours] == [torch.float32] * 2 + [torch.bfloat16] * 3
    for name, a, b, want in zip(("logp", "entropy", "hidden", "weight", "bias"), ours, plain, exact, strict=True):
        error, torch_error = ((x.double() - want).norm().item() for x in (a, b))
        assert error <= 1.5 * torch_error + 1e-6, f"{name}: {error} against torch's {torch_error}"


@pytest.mark.parametrize("elements", [1, V - 1, V, 2 * V, 7 * V + 5, N * V, 1 << 25])
def test_blocks_do_not_change_the_result(monkeypatch, elements):
    case = make()
    want = run(fast.linear_logprob, *case, "both", softcap=3.0)
    monkeypatch.setattr(fast, "BLOCK_ELEMENTS", elements)
    got = run(fast.linear_logprob, *case, "both", softcap=3.0)
    for a, b in zip((*got[:2], *got[2]), (*want[:2], *want[2]), strict=True):
        torch.testing.assert_close(a, b, atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("v", [1, 2, 7, 257])
def test_one_row(v):
    case = make(n=1, v=v)
    got, want = (run(f, *case, "both", temperature=0.7) for f in (fast.linear_logprob, reference.linear_logprob))
    for a, b in zip((*got[:2], *got[2]), (*want[:2], *want[2]), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_no_rows():
    logp, entropy, gradients = run(fast.linear_logprob, *make(n=0), "both")
    assert logp.shape == entropy.shape == (0,)
    assert [tuple(g.shape) for g in gradients] == [(0, D), (V, D), (V,)]
    assert all((g == 0).all() for g in gradients)


def test_ignored_rows_give_zero_and_no_gradient(small_blocks):
    hidden, weight, bias, target, c = make()
    ignored = torch.arange(N) % 3 == 0
    hidden[ignored] = math.nan  # must not even be read
    logp, entropy, (grad_hidden, grad_weight, grad_bias) = run(
        fast.linear_logprob, hidden, weight, bias, target.masked_fill(ignored, IGNORE), c, "both", softcap=3.0
    )
    kept = ~ignored
    want = run(reference.linear_logprob, hidden[kept], weight, bias, target[kept], c[:, kept], "both", softcap=3.0)
    assert (logp[ignored] == 0).all() and (entropy[ignored] == 0).all() and (grad_hidden[ignored] == 0).all()
    torch.testing.assert_close(logp[kept], want[0], atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(entropy[kept], want[1], atol=1e-10, rtol=1e-10)
    for got, expected in zip((grad_hidden[kept], grad_weight, grad_bias), want[2], strict=True):
        torch.testing.assert_close(got, expected, atol=1e-10, rtol=1e-10)


def test_all_rows_ignored_give_a_differentiable_zero():
    hidden, weight, bias, target, c = make()
    logp, entropy, gradients = run(
        fast.linear_logprob, hidden, weight, bias, torch.full_like(target, IGNORE), c, "both"
    )
    assert (logp == 0).all() and (entropy == 0).all() and logp.shape == (N,)
    assert all((g == 0).all() for g in gradients)


def test_another_ignore_index():
    hidden, weight, bias, target, _ = make()
    target[4] = 7
    out = fast.linear_logprob(hidden, weight, target, bias=bias, ignore_index=7)
    assert out.logp[4] == 0 and out.entropy[4] == 0
    kept = target != 7
    torch.testing.assert_close(out.logp[kept], reference.linear_logprob(hidden, weight, target, bias=bias)[0][kept])


def test_non_contiguous_input(small_blocks):
    hidden, weight, bias, target, c = make()
    strided = (hidden.T.contiguous().T, weight.T.contiguous().T, bias, target.repeat_interleave(2)[::2], c)
    assert not strided[0].is_contiguous() and not strided[1].is_contiguous() and not strided[3].is_contiguous()
    got = run(fast.linear_logprob, *strided, "both", softcap=3.0)
    want = run(reference.linear_logprob, hidden, weight, bias, target, c, "both", softcap=3.0)
    for a, b in zip((*got[:2], *got[2]), (*want[:2], *want[2]), strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


def test_frozen_head_still_gives_the_hidden_gradient():
    hidden, weight, bias, target, c = make()
    want = run(reference.linear_logprob, hidden, weight, bias, target, c, "both")[2][0]
    hidden = leaf(hidden)
    logp, entropy = fast.linear_logprob(hidden, weight, target, bias=bias)
    LOSSES["both"](logp, entropy, c).backward()
    torch.testing.assert_close(hidden.grad, want, atol=1e-10, rtol=1e-10)
    assert weight.grad is None and bias.grad is None


def test_frozen_hidden_still_gives_the_head_gradient():
    hidden, weight, bias, target, c = make()
    want = run(reference.linear_logprob, hidden, weight, bias, target, c, "both")[2][1]
    weight = leaf(weight)
    logp, entropy = fast.linear_logprob(hidden, weight, target, bias=bias)
    LOSSES["both"](logp, entropy, c).backward()
    torch.testing.assert_close(weight.grad, want, atol=1e-10, rtol=1e-10)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_head_of_another_dtype_gets_its_gradient_in_that_dtype():
    hidden, weight, bias, target, c = make(dtype=torch.bfloat16)
    weight32, bias32 = leaf(weight.float()), leaf(bias.float())
    logp, entropy = fast.linear_logprob(hidden, weight32, target, bias=bias32)
    assert torch.equal(logp, fast.linear_logprob(hidden, weight, target, bias=bias).logp)
    LOSSES["both"](logp, entropy, c.float()).backward()
    assert weight32.grad.dtype == bias32.grad.dtype == torch.float32


def test_gradcheck(small_blocks):
    hidden, weight, bias, target, _ = make(n=5, d=3, v=7)
    target[2] = IGNORE

    def function(h, w, b):
        return tuple(fast.linear_logprob(h, w, target, bias=b, scale=1.3, softcap=2.0, temperature=0.8))

    assert torch.autograd.gradcheck(function, (leaf(hidden), leaf(weight), leaf(bias)))


def test_second_derivatives_are_refused_rather_than_wrong():
    """The backward treats lse and entropy as constants, so differentiating through it would drop terms."""
    hidden, weight, _, target, c = make(n=3)
    hidden, factor = leaf(hidden), leaf(c[0])
    entropy = fast.linear_logprob(hidden, weight, target).entropy
    (gradient,) = torch.autograd.grad((factor * entropy).sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_logits_are_never_kept_for_the_backward(small_blocks):
    hidden, weight, bias, target, _ = make(n=400, d=4)
    kept = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        fast.linear_logprob(leaf(hidden), leaf(weight), target, bias=leaf(bias), softcap=3.0)
    assert kept and max(kept) <= max(hidden.numel(), weight.numel()) < 400 * V / 20


def test_large_logits_stay_finite():
    hidden, weight, _, target, c = make(dtype=torch.float32, bias=False)
    logp, entropy, gradients = run(fast.linear_logprob, hidden * 1e4, weight, None, target, c, "both")
    assert logp.isfinite().all() and (entropy.abs() < 1e-2).all()
    assert all(g.isfinite().all() for g in gradients)


def test_bad_arguments_are_refused():
    hidden, weight, bias, target, _ = make()
    with pytest.raises(ValueError, match=r"hidden \(23, 16\), weight \(101, 15\)"):
        fast.linear_logprob(hidden, weight[:, :-1], target)
    with pytest.raises(ValueError, match=r"expected \(N, D\) and \(V, D\)"):
        fast.linear_logprob(hidden.unsqueeze(0), weight, target)
    with pytest.raises(ValueError, match=r"target \(22,\): expected \(23,\)"):
        fast.linear_logprob(hidden, weight, target[:-1])
    for temperature in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="temperature=.*must be above 0"):
            fast.linear_logprob(hidden, weight, target, temperature=temperature)


def test_bias_of_the_wrong_shape_is_refused():
    hidden, weight, bias, target, _ = make()
    with pytest.raises(ValueError, match=r"bias \(1,\): expected \(101,\)"):
        fast.linear_logprob(hidden, weight, target, bias=bias[:1])  # would broadcast in silence
