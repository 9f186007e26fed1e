"""Checks of linear_logprob and linear_logprob_loss for every Path: CHECKS["no_tokens"](path).

Layouts, ignored tokens, frozen inputs, and losses in one pass. Checks of autograd are in head_autograd.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kernels.linear_logprob as fast
from tests.kernels import heads
from tests.kernels.heads import ENTRIES, IGNORE, Case, Path, assert_same, is_close, make

N, D, V = 9, 16, 19
CHECKS: dict[str, Callable[[Path], None]] = {}


def every_path(check: Callable[[Path], None]) -> Callable[[Path], None]:
    CHECKS[check.__name__] = check
    return check


def loss_of(case: Case, path: Path, entry: str, loss: str = "both", **options) -> Tensor:
    """Return the loss of an entry point with its graph, on the tensors of `case` themselves."""
    arguments = {"bias": case.bias, "impl": path.impl, **options}
    if entry == "general":
        logp, entropy = fast.linear_logprob(case.hidden, case.weight, case.target, **arguments)
        return heads.LOSSES[loss](logp, entropy, case.c)

    def loss_fn(tokens: fast.TokenLogps, index: Tensor):
        return heads.LOSSES[loss](tokens.logp, tokens.entropy, case.c[:, index]), None

    return fast.linear_logprob_loss(case.hidden, case.weight, case.target, loss_fn, **arguments)[0]


# Shapes and layouts


@every_path
def no_tokens(path: Path) -> None:
    case = make(0, D, V, path=path)
    for entry in ENTRIES.values():
        got = entry(case, path)
        assert got["logp"].shape == got["entropy"].shape == (0,) and got["hidden"].shape == (0, D)
        assert (got["weight"] == 0).all() and (got["bias"] == 0).all() and got["weight"].shape == (V, D)
    assert heads.token_logps(case, path).logp.shape == (0,)


@every_path
def views(path: Path) -> None:
    """Transposed views, every second row, an odd offset within a wider tensor, and unaligned memory."""
    case = make(N, D, V, path=path)
    want = heads.truth(case)
    wide = {name: torch.cat([x, x, x], dim=1) for name, x in (("hidden", case.hidden), ("weight", case.weight))}
    layouts = {
        "transposed": {name: getattr(case, name).T.contiguous().T for name in wide},
        "strided": {name: torch.repeat_interleave(getattr(case, name), 2, dim=0)[::2] for name in wide},
        "odd offset": {name: x[:, D - 1 :][:, 1 : D + 1] for name, x in wide.items()},
        "unaligned": {
            name: torch.cat([x.new_zeros(3), x.flatten()])[3:].view(-1, D)
            for name, x in (("hidden", case.hidden), ("weight", case.weight))
        },
    }
    extra = {"target": case.target.repeat_interleave(3)[1::3], "bias": torch.stack([case.bias] * 2, dim=1)[:, 1]}
    for name, views in layouts.items():
        for key in views:
            assert torch.equal(views[key], getattr(case, key))
        for entry in ENTRIES:
            leaves = {key: x.requires_grad_() for key, x in {**views, "bias": extra["bias"].detach()}.items()}
            total = loss_of(case._replace(**leaves, target=extra["target"]), path, entry)
            gradients = dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))
            assert_same(gradients, want, path, what=f"{name}, {entry}")


@every_path
def expanded_hidden_state(path: Path) -> None:
    case = make(N, D, V, path=path)
    case = case._replace(hidden=case.hidden[:1].expand(N, D))
    want = heads.truth(case._replace(hidden=case.hidden.contiguous()))
    for entry in ENTRIES:
        state = case.hidden[:1].detach().clone().requires_grad_()
        weight = case.weight.detach().clone().requires_grad_()
        total = loss_of(case._replace(hidden=state.expand(N, D), weight=weight), path, entry)
        gradients = dict(zip(("hidden", "weight"), torch.autograd.grad(total, [state, weight]), strict=True))
        assert_same(gradients, {**want, "hidden": want["hidden"].sum(0, keepdim=True)}, path, what=entry)


# Ignored tokens, tokens without a gradient


@every_path
def ignored_tokens(path: Path) -> None:
    """Results and gradients of ignored tokens are 0, and their NaN does not spread."""
    case = make(N, D, V, path=path)
    ignored = torch.arange(N, device=path.device) % 3 == 0
    hidden = case.hidden.masked_fill(ignored.unsqueeze(1), math.nan)
    broken = case._replace(hidden=hidden, target=case.target.masked_fill(ignored, IGNORE))
    want = heads.truth(case.select(~ignored), temperature=0.7)
    for name, entry in ENTRIES.items():
        got = entry(broken, path, temperature=0.7)
        for key in ("logp", "entropy", "hidden"):
            assert (got[key][ignored] == 0).all(), f"{name}: {key} of ignored tokens"
        kept = {**got, **{key: got[key][~ignored] for key in ("logp", "entropy", "hidden")}}
        assert_same(kept, want, path, what=name)
    assert (heads.token_logps(broken, path).logp[ignored] == 0).all()


@every_path
def all_tokens_ignored(path: Path) -> None:
    case = make(5, D, V, path=path)
    case = case._replace(target=torch.full_like(case.target, IGNORE), hidden=torch.full_like(case.hidden, math.nan))
    for entry in ENTRIES.values():
        got = entry(case, path)
        assert all((got[key] == 0).all() for key in ("logp", "entropy", "hidden", "weight", "bias"))


@every_path
def no_ignore_index(path: Path) -> None:
    case = make(N, D, V, path=path)
    for entry in ENTRIES.values():
        got, want = entry(case, path, ignore_index=None), entry(case, path)
        assert all(torch.equal(got[key], want[key]) for key in got)


@every_path
def target_outside_the_vocabulary(path: Path) -> None:
    case = make(N, D, V, path=path)
    for wrong in (-1, V, V + 1000):
        target = case.target.clone()
        target[[2, 5]] = torch.tensor([IGNORE, wrong], device=path.device)
        for entry in ENTRIES.values():
            with pytest.raises(ValueError, match=rf"target\[5\]={wrong}: .* {V}"):
                entry(case._replace(target=target), path)


@every_path
def tokens_without_a_gradient_are_skipped(path: Path) -> None:
    """Skipping does not change the gradients, and skipped tokens do not enter the products."""
    case = make(N, D, V, path=path)
    n = torch.arange(N, device=path.device)
    zero = {
        "one": n == 3, "front": n < 4, "half": n % 2 == 0, "all but one": n != 7, "all but the last": n < N - 1,
        "all": n >= 0,
    }  # fmt: skip
    for loss in ("logp", "both"):
        for name in zero if loss == "logp" else ("half",):
            skipped = zero[name]
            part = case._replace(c=case.c.masked_fill(skipped, 0.0))
            want = heads.truth(part, loss=loss)
            with heads.counted_tokens(path) as counts:
                got = heads.one_pass(part, path, loss=loss)
            assert sum(counts) == (~skipped).sum(), f"{name}: {counts}"
            for result in (got, heads.general(part, path, loss=loss)):
                assert (result["hidden"][skipped] == 0).all(), name
                assert_same(result, want, path, what=f"{name}, {loss}")


@every_path
def tokens_without_a_gradient_are_not_skipped(path: Path) -> None:
    """skip=False: all tokens enter the products, gradients are the same, and a NaN without a gradient stays local."""
    case = make(N, D, V, path=path)
    silent = torch.arange(N, device=path.device) % 3 == 0
    case = case._replace(c=case.c.masked_fill(silent, 0.0))
    bad = case._replace(hidden=case.hidden.masked_fill(silent.unsqueeze(1), float("nan")))
    for loss in ("logp", "both"):
        want = heads.truth(case, loss=loss)
        for inputs in (case, bad):
            leaves = heads.leaves_of(inputs)
            full = inputs._replace(**leaves)

            def loss_fn(tokens: fast.TokenLogps, index: Tensor, loss: str = loss) -> tuple[Tensor, None]:
                logp, entropy = (torch.where(silent[index], 0.0, x) for x in tokens)
                return heads.LOSSES[loss](logp, entropy, case.c[:, index]), None

            arguments = (full.hidden, full.weight, full.target)
            options = {"bias": full.bias, "impl": path.impl, "skip": False}
            with heads.counted_tokens(path) as counts:
                total, _ = fast.linear_logprob_loss(*arguments, loss_fn, **options)
            assert sum(counts) == N, counts
            general, _ = loss_fn(fast.linear_logprob(*arguments, **options), torch.arange(N, device=path.device))
            for scalar in (total, general):
                gradients = dict(zip(leaves, torch.autograd.grad(scalar, list(leaves.values())), strict=True))
                assert (gradients["hidden"][silent] == 0).all()
                assert_same(gradients, want, path, what=loss)


@every_path
def nan_tokens_without_a_gradient(path: Path) -> None:
    """A NaN at a masked position affects neither the loss nor the gradients."""
    case = make(N, D, V, path=path)
    for index in ([0], [3, 4, N - 1]):
        part = case._replace(c=case.c.clone(), hidden=case.hidden.clone())
        part.c[:, index] = 0
        want = heads.truth(part)
        part.hidden[index] = math.nan
        for name, entry in ENTRIES.items():
            got = {key: x for key, x in entry(part, path).items() if key in heads.NAMES}
            assert (got["hidden"][index] == 0).all(), name
            assert_same(got, want, path, what=f"{name}, tokens {index}")


@every_path
def expanded_gradient(path: Path) -> None:
    """The gradient of loss.sum() has stride 0."""
    case = make(N, D, V, path=path)
    want = heads.truth(case, loss="sum")
    for name, entry in ENTRIES.items():
        assert_same(entry(case, path, loss="sum"), want, path, what=name)
        assert_same(entry(case, path, loss="sum", entropy=False), {**want, "entropy": None}, path, what=name)


# Frozen inputs


@every_path
def frozen_parts(path: Path) -> None:
    """With a frozen head, the saved vector of each token is scaled by the incoming gradient, including 0."""
    case = make(N, D, V, path=path)
    case.c[:, ::3] = 0
    parts = [("hidden",), ("weight",), ("bias",), ("hidden", "bias"), ("hidden", "weight")]
    for loss in ("both", "logp", "entropy"):
        want = heads.truth(case, loss=loss)
        for needs in parts if loss == "both" else parts[:1]:
            for name, entry in ENTRIES.items():
                got = entry(case, path, loss=loss, needs=needs)
                assert [key for key in heads.NAMES if key in got] == list(needs)
                assert_same(got, want, path, what=f"{name}, {needs}, {loss}")
                assert "hidden" not in got or (got["hidden"][::3] == 0).all()


@every_path
def no_graph_without_gradients(path: Path) -> None:
    case = make(N, D, V, path=path)
    with torch.no_grad():
        tokens = fast.linear_logprob(case.hidden.requires_grad_(), case.weight, case.target, impl=path.impl)
        total = loss_of(case, path, "one pass")
    assert not tokens.logp.requires_grad and not tokens.entropy.requires_grad and not total.requires_grad
    is_close(total, loss_of(case, path, "one pass").detach(), 1e-6)
    plain = case._replace(hidden=case.hidden.detach())
    assert not loss_of(plain, path, "general").requires_grad and not loss_of(plain, path, "one pass").requires_grad


@every_path
def tied_embeddings(path: Path) -> None:
    """The weight gets one gradient as the head and another as the embedding."""
    case = make(N, D, V, path=path, bias=False)
    ids = (case.target * 7 + 3) % V

    def gradient(entry: str, weight: Tensor) -> Tensor:
        leaf = weight.detach().clone().requires_grad_()
        tied = case._replace(hidden=leaf[ids] * 3, weight=leaf, c=case.c.to(case.c.dtype))
        return torch.autograd.grad(loss_of(tied, path, entry), leaf)[0]

    leaf = case.weight.double().requires_grad_()
    tokens = heads.reference.linear_logprob((leaf[ids] * 3).to(path.dtype).double(), leaf, case.target)
    want = torch.autograd.grad(heads.LOSSES["both"](*tokens, case.c.double()), leaf)[0]
    for entry in ENTRIES:
        is_close(gradient(entry, case.weight), want, path.gradients, what=entry)


# The loss in one pass


@every_path
def loss_function_gets_tokens_in_order(path: Path) -> None:
    case = make(37, 16, 11, path=path)
    target = case.target.masked_fill(torch.arange(37, device=path.device) % 5 == 1, IGNORE)
    kept = (target != IGNORE).nonzero().squeeze(1)
    with heads.in_chunks(case, path, size=10):
        case = case._replace(target=target)
        seen = []

        def loss_fn(tokens: fast.TokenLogps, index: Tensor):
            seen.append((index, tokens.logp.detach().clone()))
            return tokens.logp.sum(), len(seen)

        leaf = case.hidden.clone().requires_grad_()
        total, extra = fast.linear_logprob_loss(leaf, case.weight, target, loss_fn, bias=case.bias, impl=path.impl)
    assert len(seen) > 1 and extra == list(range(1, len(seen) + 1))
    assert torch.equal(torch.cat([index for index, _ in seen]), kept)
    logp = torch.cat([logp for _, logp in seen])
    is_close(logp, heads.token_logps(case, path).logp[kept], path.values, absolute=path.values)
    is_close(total.detach(), logp.sum(), 1e-6)


@every_path
def constant_loss(path: Path) -> None:
    """As for a micro-batch whose advantages are all 0."""
    case = make(N, D, V, path=path)
    leaves = heads.leaves_of(case)
    full = case._replace(**leaves)
    with heads.counted_tokens(path) as counts:
        total, extra = fast.linear_logprob_loss(
            full.hidden, full.weight, full.target, lambda tokens, index: (case.c.new_tensor(2.5), "x"),
            bias=full.bias, impl=path.impl,
        )  # fmt: skip
    assert total.item() == 2.5 and extra == ["x"] and sum(counts) == 0
    gradients = torch.autograd.grad(total, list(leaves.values()))
    assert all((gradient == 0).all() for gradient in gradients)


@every_path
def policy_gradient_in_one_pass(path: Path) -> None:
    """Clipped tokens and tokens with advantage 0 are skipped; the gradient matches the general entry point."""
    case = make(N, D, V, path=path)
    logp = heads.token_logps(case, path).logp
    advantage = torch.ones(N, device=path.device)
    advantage[::4] = 0.0
    advantage[1::4] = -0.5
    old_logp = logp - 0.01
    old_logp[5:11] = logp[5:11] - 1.0  # a ratio of e: clipped if the advantage is positive
    clipped = (advantage > 0) & (logp - old_logp > 0.5)
    assert clipped.any()

    def surrogate(logp: Tensor, index: Tensor | slice) -> Tensor:
        ratio, a = (logp - old_logp[index]).exp(), advantage[index]
        return -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).sum() / N

    _, count = compare_losses(case, path, lambda tokens, index: (surrogate(tokens.logp, index), None))
    assert count == N - (clipped | (advantage == 0)).sum()


def compare_losses(case: Case, path: Path, loss_fn: fast.LossFn) -> tuple[list, int]:
    """Compare one pass with linear_logprob on the same loss. Return the pass's extra values and active token count."""
    leaves, general_leaves = heads.leaves_of(case), heads.leaves_of(case)
    a, b = case._replace(**leaves), case._replace(**general_leaves)
    with heads.counted_tokens(path) as counts:
        total, extra = fast.linear_logprob_loss(a.hidden, a.weight, a.target, loss_fn, bias=a.bias, impl=path.impl)
    tokens = fast.linear_logprob(b.hidden, b.weight, b.target, bias=b.bias, impl=path.impl)
    want, _ = loss_fn(tokens, torch.arange(len(case.target), device=path.device))
    is_close(total.detach(), want.detach(), 1e-6)
    total.backward()
    want.backward()
    tolerance = 1e-6 if path.dtype == torch.float32 else path.gradients
    for key in leaves:
        is_close(leaves[key].grad, general_leaves[key].grad, tolerance, what=key)
    return extra, sum(counts)
