"""Checks of linear_logprob at the limits of fp32 precision and range, for Paths that do not round logits."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tests.kernels import heads
from tests.kernels.heads import ENTRIES, Case, Path, is_close, make, table

NUMERICS: dict[str, Callable[[Path], None]] = {}


def unrounded(check: Callable[[Path], None]) -> Callable[[Path], None]:
    NUMERICS[check.__name__] = check
    return check


def noise(n: int, v: int) -> Tensor:  # (n, v) multiples of 1/8 in [-2, 2]: exact in bfloat16
    return (torch.randn(n, v, generator=torch.Generator().manual_seed(1)) * 4).round().clamp(-16, 16) / 8


def exact(case: Case) -> dict[str, Tensor]:
    """Log-prob, entropy and gradients of the summed log-probs; the target is separate: 1 - 1e-26 is 1 in float64."""
    hidden, weight, at = case.hidden.double(), case.weight.double(), case.target.unsqueeze(1)
    z = hidden @ weight.T
    d = z - z.gather(1, at)
    e = d.exp().scatter(1, at, 0.0)
    s = e.sum(dim=1, keepdim=True)
    dz = (-e / (1 + s)).scatter(1, at, s / (1 + s))
    entropy = torch.log1p(s) - (d * e).sum(dim=1, keepdim=True) / (1 + s)
    values = {"logp": -torch.log1p(s).squeeze(1), "entropy": entropy.squeeze(1)}
    return {**values, "hidden": dz @ weight, "weight": dz.T @ hidden}


@unrounded
def confident_targets(path: Path) -> None:
    """Log-prob, entropy and gradients keep the precision of a 1 - p from 1e-5 to 1e-24."""
    n, v = 3, 37
    target = torch.tensor([5, 36, 0])
    logits = noise(n, v).scatter(1, target.unsqueeze(1), torch.tensor([[15.0], [30.0], [60.0]]))
    case = table(logits, target, path)
    want = exact(case)
    assert -1e-23 < want["logp"][2] < 0 < want["entropy"][2] < 1e-21
    tokens = heads.token_logps(case, path)
    for token in range(n):  # relative and one by one: they are 19 orders of magnitude apart
        is_close(tokens.logp[token], want["logp"][token], 1e-5, what=f"logp {token}", absolute=0)
        is_close(tokens.entropy[token], want["entropy"][token], 1e-5, what=f"entropy {token}", absolute=0)
    for name, entry in ENTRIES.items():
        got = entry(case, path, loss="sum")
        for token in range(n):
            for key in ("hidden", "weight"):  # column n of the weight gradient comes from token n
                a, b = (x[key][token] if key == "hidden" else x[key][:, token] for x in (got, want))
                is_close(a, b, path.gradients, what=f"{name}, {key} {token}", absolute=0)


@unrounded
def common_offset(path: Path) -> None:
    """Add 1000 to every logit; fp32 has steps of 6e-5 there."""
    case = table(noise(5, 37), torch.tensor([3, 0, 36, 20, 11]), path)
    hidden, weight = (torch.nn.functional.pad(x, (0, 16)) for x in (case.hidden, case.weight))
    hidden[:, -1], weight[:, -1] = 1000.0, 1.0
    case = case._replace(hidden=hidden, weight=weight)
    loose = path._replace(values=2e-4, gradients=max(path.gradients, 5e-4))
    want = {key: x[:, :-16] if x.ndim > 1 else x for key, x in heads.truth(case).items()}
    for name, entry in ENTRIES.items():
        got = {key: x[:, :-16] if x.ndim > 1 else x for key, x in entry(case, path).items()}
        heads.assert_same(got, want, loose, what=name)


@unrounded
def large_bias(path: Path) -> None:
    """A block after the last token contains only the bias."""
    case = table(noise(5, 37), torch.tensor([3, 0, 36, 20, 11]), path)
    case = case._replace(bias=torch.full((37,), 500.0, dtype=path.dtype, device=path.device))
    loose = path._replace(values=2e-4, gradients=max(path.gradients, 5e-4))
    for loss in ("logp", "both"):
        want = heads.truth(case, loss=loss)
        for name, entry in ENTRIES.items():
            heads.assert_same(entry(case, path, loss=loss), want, loose, what=name)


@unrounded
def huge_scale(path: Path) -> None:
    """Logits with standard deviation 300 and likely targets: nearly all probability is on one token."""
    case = make(7, 16, 37, path=path, bias=False)
    target = (case.hidden.float() @ case.weight.float().T).argmax(dim=1)
    case = case._replace(target=target)
    want = heads.truth(case, scale=300.0)
    assert want["logp"].min() > -60
    loose = path._replace(values=1e-3, gradients=max(path.gradients, 1e-3))  # one step of fp32 at 900 is 6e-5
    for name, entry in ENTRIES.items():
        heads.assert_same(entry(case, path, scale=300.0), want, loose, what=name)


@unrounded
def uniform_over_a_large_vocabulary(path: Path) -> None:
    v = 4099
    case = table(torch.zeros(3, v), torch.tensor([0, 2048, v - 1]), path)
    tokens = heads.token_logps(case, path)
    is_close(tokens.logp, torch.full((3,), -math.log(v)).to(path.device), 2e-6, absolute=0)
    is_close(tokens.entropy, torch.full((3,), math.log(v)).to(path.device), 2e-6, absolute=0)


@unrounded
def entropy_if_the_likely_token_is_not_the_target(path: Path) -> None:
    logits = noise(2, 37)
    logits[:, 9] = torch.tensor([20.0, 40.0])
    case = table(logits, torch.tensor([1, 36]), path)
    tokens, want = heads.token_logps(case, path), heads.truth(case)
    is_close(tokens.entropy, want["entropy"], 0.0, absolute=1e-5)
    is_close(tokens.logp, want["logp"], 1e-6, absolute=0)
    for name, entry in ENTRIES.items():
        heads.assert_same(entry(case, path), want, path, what=name)
