"""What every loss returns. Sums, never means: only the trainer divides, once, by a global count."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Term(NamedTuple):
    """One part of a loss. The gradient taken is that of `weight * sum / (count over the whole optimizer step)`."""

    weight: float
    sum: Tensor  # () differentiable fp32 sum
    count: Tensor  # () how many tokens, sequences or pairs this sum is over


class LossOut(NamedTuple):
    """Named terms, and detached metrics as (sum, count) pairs."""

    terms: dict[str, Term]
    metrics: dict[str, tuple[Tensor, Tensor]]


def merge(*outs: LossOut) -> LossOut:
    """Several losses of the same tokens as one."""
    terms, metrics = {}, {}
    for out in outs:
        assert not terms.keys() & out.terms.keys(), f"two terms of one name: {sorted(terms)} and {sorted(out.terms)}"
        terms |= out.terms
        metrics |= out.metrics
    return LossOut(terms, metrics)


def wide(
    x: Tensor,  # (...) any float dtype
) -> Tensor:  # (...)
    """At least fp32: sums and differences of log-probs lose their digits below."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
