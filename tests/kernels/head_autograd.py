"""Checks of linear_logprob under autograd, threads, checkpointing, compilation and autocast, for every Path."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import kernels.linear_logprob as fast
from tests.kernels import heads
from tests.kernels.head_checks import D, N, V, loss_of
from tests.kernels.heads import ENTRIES, Case, Path, assert_same, is_close, make

AROUND: dict[str, Callable[[Path], None]] = {}


def around(check: Callable[[Path], None]) -> Callable[[Path], None]:
    AROUND[check.__name__] = check
    return check


@around
def backward_again(path: Path) -> None:
    """The general entry point allows several backward passes, the one-pass loss only one."""
    case = make(N, D, V, path=path)
    leaf = case.hidden.clone().requires_grad_()
    total = loss_of(case._replace(hidden=leaf), path, "general")
    first, second = (torch.autograd.grad(total, leaf, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    total = loss_of(case._replace(hidden=leaf), path, "one pass")
    total.backward(retain_graph=True)
    is_close(leaf.grad, first, path.gradients)
    with pytest.raises(RuntimeError, match=r"backward\(\) has already run; call linear_logprob_loss again"):
        total.backward()


@around
def second_derivatives(path: Path) -> None:
    case = make(N, D, V, path=path)
    for entry in ENTRIES:
        leaf, factor = case.hidden.clone().requires_grad_(), case.c.new_ones(()).requires_grad_()
        total = loss_of(case._replace(hidden=leaf), path, entry) * factor
        (gradient,) = torch.autograd.grad(total, leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.float().sum().backward()


@around
def scaled_loss(path: Path) -> None:
    case = make(N, D, V, path=path)
    want = heads.truth(case)
    for factor in (1 / N, -1.0, 0.0):
        scaled = {key: want[key] * factor for key in heads.NAMES}
        for entry in ENTRIES:
            leaves = heads.leaves_of(case)
            total = loss_of(case._replace(**leaves), path, entry) * factor
            gradients = torch.autograd.grad(total, list(leaves.values()))
            assert_same(dict(zip(leaves, gradients, strict=True)), scaled, path, what=f"{entry} times {factor}")


@around
def summed_over_micro_batches(path: Path) -> None:
    """Gradients of two calls add up in .grad, which must not alias a buffer that a call still writes to."""
    case = make(N, D, V, path=path)
    want = heads.truth(case)
    for entry in ENTRIES:
        weight = case.weight.clone().requires_grad_()
        for part in (slice(0, 8), slice(8, N)):
            loss_of(case.select(part)._replace(weight=weight), path, entry).backward()
        is_close(weight.grad, want["weight"], path.gradients, what=entry)


def trunk_gradients(case: Case, path: Path, run: Callable[[Callable, Tensor], Tensor], entry: str) -> list[Tensor]:
    """Return the gradients of a trunk (x @ mix, tanh) and the head, called by `run`."""
    mix = torch.eye(D, device=path.device, dtype=path.dtype).roll(1, 0).requires_grad_()
    leaves = heads.leaves_of(case)

    def step(x: Tensor) -> Tensor:
        return loss_of(case._replace(**{**leaves, "hidden": torch.tanh(x @ mix)}), path, entry)

    total = run(step, leaves["hidden"])
    return torch.autograd.grad(total, [mix, *leaves.values()])


@around
def activation_checkpointing(path: Path) -> None:
    case = make(N, D, V, path=path)
    for entry in ENTRIES:
        plain = trunk_gradients(case, path, lambda step, x: step(x), entry)
        recomputed = trunk_gradients(case, path, lambda step, x: checkpoint(step, x, use_reentrant=False), entry)
        assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True)), entry


@around
def backward_on_another_thread(path: Path) -> None:
    case = make(N, D, V, path=path)
    for entry in ENTRIES:
        want = ENTRIES[entry](case, path)
        leaves = heads.leaves_of(case)
        total = loss_of(case._replace(**leaves), path, entry)
        worker = threading.Thread(target=total.backward)
        worker.start()
        worker.join()
        assert all(torch.equal(leaves[key].grad, want[key]) for key in leaves), entry


@around
def forward_and_backward_on_another_thread(path: Path) -> None:
    case = make(N, D, V, path=path)
    for entry in ENTRIES.values():
        results = []
        worker = threading.Thread(target=lambda entry=entry, results=results: results.append(entry(case, path)))
        worker.start()
        worker.join()
        want = entry(case, path)
        assert results and all(torch.equal(results[0][key], want[key]) for key in want)


@around
def inside_a_compiled_function(path: Path) -> None:
    """Uses plain tensors, because Dynamo of torch 2.11 fails on frames that build a NamedTuple."""
    case = make(N, D, V, path=path)
    (x, weight, bias), target, c = heads.leaves_of(case).values(), case.target, case.c
    mix = torch.eye(D, device=path.device, dtype=path.dtype).roll(1, 0).requires_grad_()
    options = {"bias": bias, "impl": path.impl}

    def general(x: Tensor) -> Tensor:
        logp, entropy = fast.linear_logprob(torch.tanh(x @ mix), weight, target, **options)
        return (c[0] * logp).sum() + (c[1] * entropy).sum()

    def loss_fn(tokens: fast.TokenLogps, index: Tensor) -> tuple[Tensor, None]:
        return (c[0, index] * tokens.logp).sum() + (c[1, index] * tokens.entropy).sum(), None

    def one_pass(x: Tensor) -> Tensor:
        return fast.linear_logprob_loss(torch.tanh(x @ mix), weight, target, loss_fn, **options)[0]

    for step in (general, one_pass):
        torch._dynamo.reset()
        leaves = (x, weight, bias, mix)
        plain = torch.autograd.grad(step(x), leaves)
        compiled = torch.autograd.grad(torch.compile(step, backend="eager")(x), leaves)
        assert all(torch.equal(a, b) for a, b in zip(plain, compiled, strict=True)), step.__name__


def low_precision(path: Path) -> torch.autocast:
    return torch.autocast(path.device, torch.float16 if path.device == "cuda" else torch.bfloat16)


@around
def autocast_changes_nothing(path: Path) -> None:
    """Under autocast for the forward only, and for both passes."""
    case = make(N, D, V, path=path)
    for name, entry in ENTRIES.items():
        want, leaves = entry(case, path), heads.leaves_of(case)
        with low_precision(path):
            total, both = loss_of(case._replace(**leaves), path, name), entry(case, path)
        gradients = dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))
        assert all(torch.equal(gradients[key], want[key]) for key in leaves), name
        assert all(torch.equal(both[key], want[key]) for key in want), name
