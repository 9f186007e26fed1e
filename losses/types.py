"""What every loss returns: sums, never means. The trainer divides once, by a count over the whole step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

Metrics = dict[str, tuple[Tensor | float, Tensor | float]]  # (sum, count) of each


@dataclass(frozen=True)
class Term:
    """One part of a loss. It adds `weight * sum / (count over the whole optimizer step)` to the objective."""

    weight: float
    sum: Tensor  # () differentiable fp32 sum
    count: Tensor  # () number of tokens, sequences or pairs in the sum


class LossOut(NamedTuple):
    """Named terms, and detached metrics as (sum, count) pairs."""

    terms: dict[str, Term]
    metrics: Metrics


def wide(
    x: Tensor,  # (...) any float dtype
) -> Tensor:  # (...)
    """Promote to at least fp32: in lower precision, sums and differences of log-probs lose digits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def options_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Keyword-only parameters of a loss or an estimator: the settings that have an effect on it."""
    parameters = inspect.signature(function).parameters
    return {name: p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
