"""Inputs, float64 results and tolerances for the tests of linear_logprob, for every Path."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import kernels.linear_logprob as fast
from kernels import reference

IGNORE = -100
NAMES = ("hidden", "weight", "bias")
OPTIONS: dict[str, dict[str, float]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "scale": {"scale": 0.25},
    "softcap": {"softcap": 3.0},
    "all": {"temperature": 1.7, "scale": 1.5, "softcap": 4.0},
}
LOSSES: dict[str, Callable[[Tensor, Tensor | None, Tensor], Tensor]] = {
    "logp": lambda logp, entropy, c: (c[0] * logp).sum(),
    "entropy": lambda logp, entropy, c: (c[1] * entropy).sum(),
    "both": lambda logp, entropy, c: (c[0] * logp).sum() + (c[1] * entropy).sum(),
    "sum": lambda logp, entropy, c: logp.sum(),  # its gradient is an expanded scalar
}


class Path(NamedTuple):
    """An implementation and its tolerances: values in nats, gradients relative to the largest entry."""

    impl: str
    dtype: torch.dtype
    values: float
    gradients: float
    device: str = "cpu"


TORCH_64 = Path("torch", torch.float64, 1e-10, 1e-10)
TORCH_32 = Path("torch", torch.float32, 1e-5, 1e-5)
TORCH_16 = Path("torch", torch.bfloat16, 5e-2, 5e-2)  # logits are rounded to bfloat16
TRITON_32 = Path("triton", torch.float32, 1e-5, 1e-5)
TRITON_16 = Path("triton", torch.bfloat16, 1e-5, 1.6e-2)  # logits are not rounded; the interpreter truncates gradients


class Case(NamedTuple):
    hidden: Tensor  # (N, D)
    weight: Tensor  # (V, D)
    bias: Tensor | None  # (V,)
    target: Tensor  # (N,) int64
    c: Tensor  # (2, N) float32 coefficients of log-probs and entropies in the test losses

    def select(self, index: Tensor | slice) -> Case:
        return self._replace(hidden=self.hidden[index], target=self.target[index], c=self.c[:, index])

    def double(self) -> Case:
        bias = None if self.bias is None else self.bias.double()
        return Case(self.hidden.double(), self.weight.double(), bias, self.target, self.c.double())


def make(n: int, d: int, v: int, *, path: Path = TORCH_32, bias: bool = True, seed: int = 0) -> Case:
    """Build a case with logits and a bias of standard deviation 1."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, b = (torch.randn(size, generator=generator) for size in ((n, d), (v, d), (v,)))
    target, c = torch.randint(v, (n,), generator=generator), torch.randn(2, n, generator=generator)
    hidden, weight, b = (x.to(path.device, path.dtype) for x in (hidden, weight / math.sqrt(d), b))
    return Case(hidden, weight, b if bias else None, target.to(path.device), c.to(path.device))


def lifted(case: Case, logit: Tensor | float) -> Case:
    """Raise each target logit by about `logit` (N,); other logits change by an eighth to a quarter of it."""
    row = case.weight[case.target].float()
    delta = torch.as_tensor(logit, device=row.device).reshape(-1, 1) / row.square().sum(dim=1, keepdim=True)
    return case._replace(hidden=(case.hidden.float() + delta * row).to(case.hidden.dtype))


def table(logits: Tensor, target: Tensor, path: Path) -> Case:
    """Build a case with exactly these logits (N, V): hidden state n selects column n of the weight."""
    n = len(logits)
    width = -(-n // 16) * 16
    weight = torch.zeros(logits.shape[1], width, dtype=path.dtype, device=path.device)
    weight[:, :n] = logits.T
    hidden = torch.eye(n, width, dtype=path.dtype, device=path.device)
    assert torch.equal((hidden @ weight.T).double(), logits.to(path.device).double()), "not exact in this dtype"
    c = torch.ones(2, n, device=path.device)
    return Case(hidden, weight, None, target.to(path.device), c)


def leaves_of(case: Case, needs: tuple[str, ...] = NAMES) -> dict[str, Tensor]:
    """Return leaf copies of the inputs in `needs` that exist."""
    inputs = {name: getattr(case, name) for name in needs}
    return {name: x.detach().clone().requires_grad_() for name, x in inputs.items() if x is not None}


def truth(case: Case, *, loss: str = "both", scale=1.0, softcap=None, temperature=1.0) -> dict[str, Tensor]:
    """Run the slow reference in float64."""
    case = case.double()
    leaves = leaves_of(case)
    full = case._replace(**leaves)
    options = {"scale": scale, "softcap": softcap, "temperature": temperature}
    logp, entropy = reference.linear_logprob(full.hidden, full.weight, full.target, bias=full.bias, **options)
    return with_gradients(LOSSES[loss](logp, entropy, case.c), leaves, logp, entropy)


def general(case: Case, path: Path, *, loss: str = "both", needs=NAMES, **options: Any) -> dict[str, Tensor]:
    """Run linear_logprob and its backward."""
    leaves = leaves_of(case, needs)
    full = case._replace(**leaves)
    logp, entropy = fast.linear_logprob(
        full.hidden, full.weight, full.target, bias=full.bias, impl=path.impl, **options
    )
    return with_gradients(LOSSES[loss](logp, entropy, case.c), leaves, logp, entropy)


def one_pass(case: Case, path: Path, *, loss: str = "both", needs=NAMES, **options: Any) -> dict[str, Tensor]:
    """Run linear_logprob_loss and its backward; return the log-probs and entropies that its loss function got."""
    leaves = leaves_of(case, needs)
    full = case._replace(**leaves)

    def loss_fn(tokens: fast.TokenLogps, index: Tensor):
        return LOSSES[loss](tokens.logp, tokens.entropy, case.c[:, index]), (index, tokens)

    total, extra = fast.linear_logprob_loss(
        full.hidden, full.weight, full.target, loss_fn, bias=full.bias, impl=path.impl, **options
    )
    logp, entropy = torch.zeros(2, len(case.target), dtype=total.dtype, device=path.device)
    for index, tokens in extra:
        logp[index] = tokens.logp.detach()
        if tokens.entropy is not None:
            entropy[index] = tokens.entropy.detach()
    made = with_gradients(total, leaves, logp, entropy if options.get("entropy", True) else None)
    return {**made, "loss": total.detach()}


@torch.no_grad()
def token_logps(case: Case, path: Path, **options: Any) -> fast.TokenLogps:
    return fast.linear_logprob(case.hidden, case.weight, case.target, bias=case.bias, impl=path.impl, **options)


ENTRIES = {"general": general, "one pass": one_pass}


def with_gradients(
    loss: Tensor, leaves: dict[str, Tensor], logp: Tensor, entropy: Tensor | None
) -> dict[str, Tensor | None]:
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    values = {"logp": logp.detach(), "entropy": None if entropy is None else entropy.detach()}
    return values | dict(zip(leaves, gradients, strict=True))


def assert_same(got: dict[str, Any], want: dict[str, Any], path: Path, *, what: str = "") -> None:
    """Compare the values present in both, within their tolerances."""
    for name in got.keys() & want.keys():
        if got[name] is None or want[name] is None:
            assert got[name] is None, f"{what} {name}: not requested"
            continue
        assert got[name].shape == want[name].shape, f"{what} {name}"
        if name in NAMES:
            is_close(got[name], want[name], path.gradients, what=f"{what} {name}")
        else:
            is_close(got[name], want[name], path.values, what=f"{what} {name}", absolute=path.values)


def is_close(got: Tensor, want: Tensor, tolerance: float, *, what: str = "", absolute: float = 1e-7) -> None:
    """Check that no entry is off by more than `tolerance` times the largest. NaN is never close."""
    if want.numel() == 0:
        return
    gap = (got.double() - want.double()).abs().max().item()
    limit = tolerance * want.double().abs().max().item() + absolute
    assert gap <= limit, f"{what}: off by {gap:.3g}, at most {limit:.3g}"


def check(case: Case, path: Path, *, loss: str = "both", entropy: bool = True, **options: float) -> None:
    """Compare all three entry points with float64, and their log-probs with each other, bit for bit."""
    want = truth(case, loss=loss, **options)
    if not entropy:
        want["entropy"] = None
    tokens = token_logps(case, path, entropy=entropy, **options)
    assert (tokens.entropy is None) == (not entropy)
    assert_same(tokens._asdict(), want, path, what="logps")
    for name, entry in ENTRIES.items():
        got = entry(case, path, loss=loss, entropy=entropy, **options)
        assert torch.equal(got["logp"], tokens.logp), f"{name}: log-probs differ from linear_logprob without gradients"
        assert not entropy or torch.equal(got["entropy"], tokens.entropy), name
        assert all(got[key].dtype == path.dtype for key in NAMES if key in got)
        assert_same(got, want, path, what=name)


@contextlib.contextmanager
def in_chunks(case: Case, path: Path, size: int) -> Iterator[None]:
    """Use chunks of `size` in one pass (width 16, over 32 tokens), and few columns per slice in the general entry."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(fast, "BLOCK_ELEMENTS", size * case.weight.shape[0] + 1))
        if path.impl != "torch":
            from kernels import linear_logprob_triton

            for name, value in (("CHUNK", size), ("PART", 5), ("LOGP_TOKENS", 9), ("SLICE", 1)):
                stack.enter_context(mock.patch.object(linear_logprob_triton, name, value))
        yield


@contextlib.contextmanager
def counted_tokens(path: Path) -> Iterator[list[int]]:
    """Count the tokens in the gradient products of each chunk."""
    head = head_class(path)
    counts, backward_chunk = [], head.backward_chunk

    def spy(self, start, stats, plan):
        if head is not fast.TorchHead:
            counts.append(plan.count)
        else:
            counts.append(len(plan.grad_logp if plan.active is None else plan.active))
        return backward_chunk(self, start, stats, plan)

    with mock.patch.object(head, "backward_chunk", spy):
        yield counts


def head_class(path: Path) -> type:
    if path.impl == "torch":
        return fast.TorchHead
    from kernels import linear_logprob_triton  # not at the top: the interpreter must be enabled before this import

    return linear_logprob_triton.TritonHead


def count_recomputed(monkeypatch, request) -> list[int]:
    """Return the numbers of recomputed tokens; any fails a test that does not use the fixture `recomputed` by name."""
    from kernels.linear_logprob_triton import TritonHead

    counts: list[int] = []
    redo = TritonHead._redo_overflowed

    def spy(self, start, stop, stats, num_overflowed, *args):
        if count := int(num_overflowed):
            assert "recomputed" in request.function.__code__.co_varnames, f"{count} tokens were recomputed"
            counts.append(count)
        return redo(self, start, stop, stats, num_overflowed, *args)

    monkeypatch.setattr(TritonHead, "_redo_overflowed", spy)
    return counts
