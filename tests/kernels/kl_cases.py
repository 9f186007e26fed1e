"""Inputs, float64 results from a loop over tokens, and tolerances for the tests of linear_kl, for every Path."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.linear_kl import Head, linear_kl_loss

BETAS = (0, 0.1, 0.5, 0.9, 1)
NAMES = ("hidden", "weight", "bias")


class Path(NamedTuple):
    """An implementation and its tolerances: divergences in nats, gradients relative to the largest entry."""

    impl: str
    dtype: torch.dtype
    values: float
    gradients: float
    device: str = "cpu"


TORCH_64 = Path("torch", torch.float64, 1e-11, 1e-11)
TORCH_32 = Path("torch", torch.float32, 1e-5, 1e-5)
TORCH_16 = Path("torch", torch.bfloat16, 1e-5, 1e-2)  # logits are not rounded, gradients are
TRITON_32 = Path("triton", torch.float32, 1e-5, 1e-5)
TRITON_16 = Path("triton", torch.bfloat16, 1e-5, 1.6e-2)  # the interpreter truncates, a GPU rounds


class Case(NamedTuple):
    hidden: Tensor  # (N, D)
    head: Head
    teacher_hidden: Tensor  # (N, E)
    teacher_head: Head
    token_weight: Tensor | None  # (N,)

    def double(self) -> Case:
        return Case(
            self.hidden.double(), in_double(self.head), self.teacher_hidden.double(), in_double(self.teacher_head),
            None if self.token_weight is None else self.token_weight.double(),
        )  # fmt: skip

    def leaves(self, needs: tuple[str, ...] = NAMES) -> dict[str, Tensor]:
        """Return leaf copies of the inputs in `needs` that exist."""
        given = {"hidden": self.hidden, "weight": self.head.weight, "bias": self.head.bias}
        return {name: given[name].detach().clone().requires_grad_() for name in needs if given[name] is not None}

    def with_leaves(self, leaves: dict[str, Tensor]) -> Case:
        head = self.head._replace(**{name: x for name, x in leaves.items() if name != "hidden"})
        return self._replace(hidden=leaves.get("hidden", self.hidden), head=head)


def in_double(head: Head) -> Head:
    return head._replace(weight=head.weight.double(), bias=None if head.bias is None else head.bias.double())


def make(
    n: int, v: int, *, d: int = 16, e: int = 24, path: Path = TORCH_32, bias: bool = True, seed: int = 0,
    head: dict[str, float] | None = None, teacher: dict[str, float] | None = None,
) -> Case:  # fmt: skip
    """Build a case: logits of standard deviation 2, biases of 1; token weights have both signs, and one is 0."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int, factor: float = 1.0) -> Tensor:
        x = factor * torch.randn(size, generator=generator, dtype=torch.float64)
        return x.to(path.device, path.dtype)

    hidden, weight, b = draw(n, d, factor=2.0), draw(v, d, factor=d**-0.5), draw(v)
    teacher_hidden, teacher_weight, teacher_b = draw(n, e, factor=2.0), draw(v, e, factor=e**-0.5), draw(v)
    token_weight = draw(n).to(torch.float32)
    token_weight[n // 2 : n // 2 + (n > 1)] = 0
    return Case(
        hidden, Head(weight, b if bias else None, **(head or {})), teacher_hidden,
        Head(teacher_weight, teacher_b if bias else None, **(teacher or {})), token_weight,
    )  # fmt: skip


def naive_logits(state: Tensor, head: Head, temperature: float) -> Tensor:  # (V,)
    y = head.weight @ state
    y = head.scale * (y if head.bias is None else y + head.bias)
    return (y if head.softcap is None else head.softcap * torch.tanh(y / head.softcap)) / temperature


def naive(case: Case, *, beta: float, temperature: float) -> Tensor:  # (N,)
    """Compute token by token, from probabilities."""
    found = []
    for state, teacher_state in zip(case.hidden, case.teacher_hidden, strict=True):
        q = naive_logits(state, case.head, temperature).softmax(dim=0)
        p = naive_logits(teacher_state, case.teacher_head, temperature).softmax(dim=0)
        m = beta * p + (1 - beta) * q
        if beta == 0:
            found.append((p * (p / q).log()).sum())
        elif beta == 1:
            found.append((q * (q / p).log()).sum())
        else:
            found.append(beta * (p * (p / m).log()).sum() + (1 - beta) * (q * (q / m).log()).sum())
    return torch.stack(found)


def truth(case: Case, *, beta: float, temperature: float = 1.0) -> dict[str, Tensor]:
    wide = case.double()
    leaves = wide.leaves()
    wide = wide.with_leaves(leaves)
    divergence = naive(wide, beta=beta, temperature=temperature)
    loss = divergence.sum() if wide.token_weight is None else (wide.token_weight * divergence).sum()
    gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    return {"loss": loss.detach(), "divergence": divergence.detach(), **gradients}


def run(case: Case, path: Path, *, beta: float, needs: tuple[str, ...] = NAMES, **options: Any) -> dict[str, Tensor]:
    leaves = case.leaves(needs)
    out = linear_kl_loss(*case.with_leaves(leaves)[:4], beta=beta, token_weight=case.token_weight, impl=path.impl,
                         **options)  # fmt: skip
    assert out.loss.requires_grad == bool(leaves) and not out.divergence.requires_grad
    gradients = torch.autograd.grad(out.loss, list(leaves.values())) if leaves else ()
    return {"loss": out.loss.detach(), "divergence": out.divergence, **dict(zip(leaves, gradients, strict=True))}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], path: Path, what: Any = "") -> None:
    for name, x in got.items():
        limit = path.gradients if name in NAMES else path.values
        scale = want[name].abs().max().item() if want[name].numel() else 0.0
        gap = (x.double() - want[name].double()).abs().max().item() if x.numel() else 0.0
        if name == "loss":
            scale = want["divergence"].abs().sum().item()
        assert gap <= limit * max(1.0 if name not in NAMES else 0.0, scale), f"{what} {name}: {gap:.3g} of {scale:.3g}"


def check(case: Case, path: Path, *, beta: float, temperature: float = 1.0) -> None:
    got = run(case, path, beta=beta, temperature=temperature)
    assert_same(got, truth(case, beta=beta, temperature=temperature), path, (path.impl, beta, temperature))
    assert all(got[name].dtype == path.dtype for name in NAMES if name in got)
    values = run(case, path, beta=beta, temperature=temperature, needs=())
    # Bit for bit in the interpreter; the compiler fuses the two kernels differently.
    limits = {"rtol": 1e-5, "atol": 1e-5} if path.device == "cuda" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(values["divergence"], got["divergence"], **limits)


def same_head(case: Case) -> Case:
    """Use the student as the teacher."""
    return case._replace(teacher_hidden=case.hidden.clone(), teacher_head=case.head)


def table(logits: Tensor, teacher_logits: Tensor, path: Path) -> Case:
    """Build a case with exactly these logits (N, V); a column of -inf comes from the bias."""
    n, v = logits.shape
    biases = []
    weights = []
    for z in (logits, teacher_logits):
        dead = (z == -math.inf).all(dim=0)
        biases.append(torch.where(dead, -math.inf, 0.0).to(path.device, path.dtype))
        weights.append(torch.where(z == -math.inf, 0.0, z).T.contiguous().to(path.device, path.dtype))
    eye = torch.eye(n, dtype=path.dtype, device=path.device)
    return Case(eye, Head(weights[0], biases[0]), eye.clone(), Head(weights[1], biases[1]), None)
