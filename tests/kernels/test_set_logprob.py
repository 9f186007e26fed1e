"""linear_logprob over a set of ids per token, against dense logits masked with -inf, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kernels.linear_logprob as fast

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
