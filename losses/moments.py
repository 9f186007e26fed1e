"""Mean, deviation and effective sample size from sums that ranks can add.

A statistic over a whole optimizer step is taken in two moves: each rank sums what it has into one (3,) tensor,

    moments(x) = [sum w, sum w x, sum w x^2]        w = 1 unless given

the caller adds those tensors over micro-batches, groups and ranks, and the functions below read the statistic off the
total. The sums are float64, where a mean a million times the deviation still leaves half of the digits.

Shapes: B = any number of values.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def moments(
    x: Tensor,  # (...) values; NaN = absent
    weight: Tensor | None = None,  # (...) how often each value counts, e.g. the tokens of its completion; None: once
) -> Tensor:  # (3,) float64: count, sum, sum of squares
    there = ~x.isnan()
    value = torch.where(there, x, 0.0).double()
    weight = there.double() if weight is None else torch.where(there, weight, 0).double()
    return torch.stack([weight.sum(), (weight * value).sum(), (weight * value.square()).sum()])


def mean_of(
    sums: Tensor,  # (3,) from moments, added over everything
) -> Tensor:  # ()
    """NaN where nothing was counted."""
    return sums[1] / sums[0]


def std_of(
    sums: Tensor,  # (3,) from moments, added over everything
) -> Tensor:  # ()
    """Sample standard deviation (ddof = 1); NaN where fewer than two values were counted."""
    count, total, squares = sums.unbind()
    variance = (squares - total.square() / count) / (count - 1)
    return torch.where(count > 1, variance.clamp(min=0).sqrt(), torch.nan)


def effective_sample_frac(
    sums: Tensor,  # (3,) moments of importance weights, added over everything
) -> Tensor:  # ()
    """(sum w)^2 / (n sum w^2): 1 when all weights are equal, 1/n when one has everything; NaN of nothing."""
    count, total, squares = sums.unbind()
    return total.square() / (count * squares)
