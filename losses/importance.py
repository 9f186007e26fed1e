"""Gap between the engine that sampled and the trainer: log-ratios, the correction weight, filters of completions.

The engine runs the trainer's weights in different code, or an older version of them, so a sample does not come exactly
from the policy that the loss assumes. With d_n = old_logp_n - engine_logp_n over the trained tokens of a completion,

    token ratio      exp(d_n)            low variance, exact for each token given its prefix
    sequence ratio   exp(sum_n d_n)      unbiased for the whole completion; its variance grows with length
    geometric ratio  exp(mean_n d_n)     for filters: independent of length

The correction is a weight per token, without gradient: the bounded ratio of the token or of its completion
(bounded_ratio). It multiplies the policy loss and the 0/1 filters; KL and entropy terms and divisors do not use it.

Ratios of whole completions are computed before the loss pass, which sees tokens in slices cut anywhere.

Shapes: N = trained tokens of a micro-batch, S = its completions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from losses.kl import MAX_LOG_RATIO
from losses.types import Metrics, wide

SEQUENCE_CORRECTIONS = frozenset({"sequence_truncate", "sequence_mask"})  # modes that bound the sequence ratio


@torch.no_grad()
def sequence_sum(
    x: Tensor,  # (N,)
    sequence: Tensor,  # (N,) int64 completion of each token
    *,
    num_sequences: int,
) -> Tensor:  # (S,)
    value = wide(x)
    return value.new_zeros(num_sequences).index_add(0, sequence, value)


@torch.no_grad()
def sequence_length(
    sequence: Tensor,  # (N,) int64 completion of each token
    *,
    num_sequences: int,
) -> Tensor:  # (S,) int64
    lengths = torch.zeros(num_sequences, dtype=torch.int64, device=sequence.device)
    return lengths.index_add(0, sequence, torch.ones_like(sequence))


def sequence_mean(
    x: Tensor,  # (N,)
    sequence: Tensor,  # (N,) int64 completion of each token
    *,
    num_sequences: int,
) -> Tensor:  # (S,) 0 for a completion without tokens
    total = sequence_sum(x, sequence, num_sequences=num_sequences)
    return total / sequence_length(sequence, num_sequences=num_sequences).clamp(min=1)


@torch.no_grad()
def log_difference(
    logp: Tensor,  # (N,)
    other_logp: Tensor,  # (N,)
) -> Tensor:  # (N,) logp - other_logp within +-20; 0 if NaN
    return (wide(logp) - wide(other_logp)).nan_to_num(nan=0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


class EngineGap(NamedTuple):
    """Log-ratios between trainer and engine, per token; no gradient, within +-20."""

    token: Tensor  # (N,) d of the token
    total: Tensor  # (N,) sum of d over the token's completion
    mean: Tensor  # (N,) mean of d over the token's completion
    length: Tensor  # (N,) trained tokens of the token's completion


@torch.no_grad()
def engine_gap(
    old_logp: Tensor,  # (N,) trainer
    engine_logp: Tensor,  # (N,) engine; NaN = not reported, counts as no gap
    sequence: Tensor,  # (N,) int64 completion of each token
    *,
    num_sequences: int,
) -> EngineGap:
    token = log_difference(old_logp, engine_logp)
    total = sequence_sum(token, sequence, num_sequences=num_sequences)  # (S,)
    length = sequence_length(sequence, num_sequences=num_sequences)  # (S,)
    mean = total / length.clamp(min=1)
    return EngineGap(token, total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[sequence], mean[sequence], length[sequence])


@torch.no_grad()
def gap_metrics(gap: EngineGap) -> Metrics:
    """Raw ratios before any bound, whatever the correction."""
    count, ratio = len(gap.token), gap.token.exp()
    one = 1 / gap.length.clamp(min=1).to(ratio.dtype)  # (N,) sums to 1 over each completion
    return {
        "policy/behaviour_ratio": (ratio.sum(), count),
        "policy/behaviour_chi2": ((ratio.square() - 1).sum(), count),
        "policy/behaviour_sequence_ratio": ((one * gap.total.exp()).sum(), one.sum()),
        "policy/behaviour_geometric_ratio": ((one * gap.mean.exp()).sum(), one.sum()),
    }


# The correction.


def bounded_ratio(
    log_ratio: Tensor,  # (N,) trainer to engine, of the token or of its completion
    low: float | None,
    high: float | None,
    *,
    drop: bool,
) -> Tensor:  # (N,)
    """exp(log_ratio) clamped to the bounds, or 0 beyond them with `drop` (IcePop, arXiv:2510.18855).

    A sequence ratio exceeds 3 after a hundred tokens that all differ by +0.012: watch policy/correction_zero_frac.
    """
    if low is None and high is None:
        raise ValueError("low=None, high=None: a correction needs at least one bound")
    if low is not None and high is not None and low >= high:
        raise ValueError(f"low={low}, high={high}: low must be below high")
    ratio = log_ratio.exp()
    bounded = ratio.clamp(low, high)
    return torch.where(bounded == ratio, ratio, 0.0) if drop else bounded


@torch.no_grad()
def correction_metrics(
    weight: Tensor,  # (N,) from bounded_ratio
    log_ratio: Tensor,  # (N,) its input
) -> Metrics:
    """Mean weight, fraction of tokens dropped, fraction clamped to a bound."""
    count = len(weight)
    zero, clamped = weight == 0, (weight != 0) & (weight != log_ratio.exp())
    return {
        "policy/correction": (weight.sum(), count),
        "policy/correction_zero_frac": (zero.to(weight.dtype).sum(), count),
        "policy/correction_bound_frac": (clamped.to(weight.dtype).sum(), count),
    }


# Filters of whole completions.


def keep_geometric(gap: EngineGap, *, low: float | None, high: float | None) -> Tensor:  # (N,) bool
    """True for completions whose geometric ratio is within bounds."""
    return bounded_ratio(gap.mean, low, high, drop=True) > 0


@torch.no_grad()
def sequence_drift(
    logp: Tensor,  # (N,) current policy
    engine_logp: Tensor,  # (N,) engine, or old_logp if it reported none; NaN counts as no drift
    sequence: Tensor,  # (N,) int64 completion of each token
    *,
    num_sequences: int,
) -> Tensor:  # (S,) mean of engine_logp - logp: how far the policy has moved away from each completion, in nats
    return sequence_mean(log_difference(engine_logp, logp), sequence, num_sequences=num_sequences)


def keep_on_policy(
    advantage: Tensor,  # (N,)
    drift: Tensor,  # (N,) sequence_drift of each token's completion
    *,
    threshold: float,
) -> Tensor:  # (N,) bool
    """Off-policy sequence mask (DeepSeek-V3.2, arXiv:2512.02556): drop bad completions that have become unlikely.

    A completion is dropped if A < 0 and drift > threshold; its KL term stays.
    """
    return (advantage >= 0) | (drift <= threshold)
