"""Importance corrections between the engine that sampled and the trainer, and masks for off-policy samples.

The engine runs the trainer's weights in different code, or an older version of them, so a sample is not exactly from
the policy that the loss assumes. With d_n = old_logp_n - behaviour_logp_n over the trained tokens of a completion,

    token ratio      exp(d_n)            low variance, exact for each token given its prefix
    sequence ratio   exp(sum_n d_n)      unbiased for the whole completion; its variance grows with length
    geometric ratio  exp(mean_n d_n)     for filters: does not depend on length

A correction is a weight per token, without gradient, for the policy loss (Tokens.weight). Weights and 0/1 masks
multiply; the KL and entropy terms use none of them, and denominators do not change. `low` and `high` bound a ratio;
None leaves that side open. truncate = clamp to the bound; mask = weight 0 beyond it, unchanged within.

The loss sees trained tokens in slices cut anywhere (kernels.linear_logprob_loss). So anything it needs about a whole
completion is computed before the loss pass, over a micro-batch of whole completions and without gradient, and indexed
by token: `sequence_sum(x, mask, sequence, num_sequences=B)[sequence]`.

Shapes: N = packed tokens, B = completions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from losses.kl import MAX_LOG_RATIO
from losses.types import wide

# Sums over completions


@torch.no_grad()
def sequence_sum(
    x: Tensor,  # (N,) per token; masked positions may hold anything
    mask: Tensor,  # (N,) bool, True = trained
    sequence: Tensor,  # (N,) int64 completion of each token
    *,
    num_sequences: int,
) -> Tensor:  # (B,)
    value = torch.where(mask, wide(x), 0.0)
    return value.new_zeros(num_sequences).index_add(0, sequence, value)


@torch.no_grad()
def sequence_length(
    mask: Tensor,  # (N,) bool, True = trained
    sequence: Tensor,  # (N,) int64 completion of each token
    *,
    num_sequences: int,
) -> Tensor:  # (B,) int64 trained tokens of each completion
    return torch.zeros(num_sequences, dtype=torch.int64, device=mask.device).index_add(0, sequence, mask.long())


def sequence_mean(
    x: Tensor,  # (N,) per token; masked positions may hold anything
    mask: Tensor,  # (N,) bool, True = trained
    sequence: Tensor,  # (N,) int64 completion of each token
    *,
    num_sequences: int,
) -> Tensor:  # (B,) 0 for a completion without trained tokens
    total = sequence_sum(x, mask, sequence, num_sequences=num_sequences)
    return total / sequence_length(mask, sequence, num_sequences=num_sequences).clamp(min=1)


# Log-ratios between trainer and engine


@torch.no_grad()
def log_difference(
    logp: Tensor,  # (N,)
    other_logp: Tensor,  # (N,)
    mask: Tensor | None = None,  # (N,) bool, True = trained; None: all
) -> Tensor:  # (N,) logp - other_logp within +-20; 0 where masked or NaN
    d = wide(logp) - wide(other_logp)
    d = d if mask is None else torch.where(mask, d, 0.0)
    return d.nan_to_num(nan=0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


class Mismatch(NamedTuple):
    """Log-ratios between trainer and engine, per token; no gradient, within +-20."""

    token: Tensor  # (N,) d of the token; 0 where masked
    total: Tensor  # (N,) sum of d over the token's completion
    mean: Tensor  # (N,) mean of d over the token's completion
    length: Tensor  # (N,) trained tokens of the token's completion


@torch.no_grad()
def mismatch(
    old_logp: Tensor,  # (N,) trainer; the proximal policy if the two are decoupled
    behaviour_logp: Tensor,  # (N,) engine; NaN = not reported, which counts as no difference
    mask: Tensor,  # (N,) bool, True = trained
    sequence: Tensor,  # (N,) int64 completion of each token; whole completions
    *,
    num_sequences: int,
) -> Mismatch:
    token = log_difference(old_logp, behaviour_logp, mask)
    total = sequence_sum(token, mask, sequence, num_sequences=num_sequences)  # (B,)
    length = sequence_length(mask, sequence, num_sequences=num_sequences)  # (B,)
    mean = total / length.clamp(min=1)
    return Mismatch(token, total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[sequence], mean[sequence], length[sequence])


@torch.no_grad()
def mismatch_metrics(
    m: Mismatch,
    mask: Tensor,  # (N,) bool, True = trained
) -> dict[str, tuple[Tensor, Tensor]]:
    """Raw ratios before any bound, independent of the correction in use."""
    count, ratio = mask.sum(), m.token.exp()
    one = torch.where(mask, 1 / m.length.clamp(min=1).to(ratio.dtype), 0.0)  # adds up to 1 over each completion
    return {
        "policy/behaviour_ratio": (torch.where(mask, ratio, 0.0).sum(), count),
        "policy/behaviour_chi2": (torch.where(mask, ratio.square() - 1, 0.0).sum(), count),
        "policy/behaviour_sequence_ratio": ((one * m.total.exp()).sum(), one.sum()),
        "policy/behaviour_geometric_ratio": ((one * m.mean.exp()).sum(), one.sum()),
    }


# Corrections


def bounded_ratio(
    log_ratio: Tensor,  # (N,) of trainer to engine: of the token, or of its completion
    low: float | None,
    high: float | None,
    *,
    drop: bool,
) -> Tensor:  # (N,)
    """exp(log_ratio), within the bounds (truncate), or 0 beyond them (mask)."""
    _check_bounds(low, high)
    ratio = log_ratio.exp()
    bounded = ratio.clamp(low, high)
    return torch.where(bounded == ratio, ratio, 0.0) if drop else bounded


def _truncate(log_weight: Tensor, low: float | None, high: float | None) -> Tensor:
    _check_bounds(low, high)
    return log_weight.exp().clamp(low, high)


def _mask(log_weight: Tensor, low: float | None, high: float | None) -> Tensor:
    _check_bounds(low, high)
    ratio = log_weight.exp()
    kept = torch.ones_like(ratio, dtype=torch.bool)
    if low is not None:
        kept = kept & (ratio >= low)
    if high is not None:
        kept = kept & (ratio <= high)
    return torch.where(kept, ratio, 0.0)


def _check_bounds(low: float | None, high: float | None) -> None:
    if low is None and high is None:
        raise ValueError("low=None, high=None: a correction needs at least one bound")
    if low is not None and high is not None and low >= high:
        raise ValueError(f"low={low}, high={high}: low must be below high")


def token_truncate(m: Mismatch, *, low: float | None = None, high: float | None = 2.0) -> Tensor:  # (N,)
    """Truncated importance sampling per token."""
    return _truncate(m.token, low, high)


def token_mask(m: Mismatch, *, low: float | None = None, high: float | None = 2.0) -> Tensor:  # (N,)
    return _mask(m.token, low, high)


def sequence_truncate(m: Mismatch, *, low: float | None = None, high: float | None = 3.0) -> Tensor:  # (N,)
    return _truncate(m.total, low, high)


def sequence_mask(m: Mismatch, *, low: float | None = None, high: float | None = 3.0) -> Tensor:  # (N,)
    """TRL's default. A hundred tokens that all differ by +0.012 already exceed 3: log how much it masks."""
    return _mask(m.total, low, high)


def icepop(m: Mismatch, *, low: float | None = 0.5, high: float | None = 5.0) -> Tensor:  # (N,)
    """IcePop (Ling team 2025, arXiv:2510.18855): token_mask with both bounds."""
    if low is None or high is None:
        raise ValueError(f"low={low}, high={high}: icepop masks on both sides; give both, or use token_mask")
    return _mask(m.token, low, high)


CORRECTIONS: dict[str, Callable[..., Tensor]] = {
    "token_truncate": token_truncate,
    "token_mask": token_mask,
    "sequence_truncate": sequence_truncate,
    "sequence_mask": sequence_mask,
    "icepop": icepop,
}
SEQUENCE_CORRECTIONS = frozenset({"sequence_truncate", "sequence_mask"})  # their raw log-weight is Mismatch.total


@torch.no_grad()
def correction_metrics(
    weight: Tensor,  # (N,) from a correction
    log_weight: Tensor,  # (N,) what it was computed from: Mismatch.token or Mismatch.total
    mask: Tensor,  # (N,) bool, True = trained
) -> dict[str, tuple[Tensor, Tensor]]:
    """What the correction did: mean weight, fraction of tokens masked, fraction clamped to a bound."""
    count = mask.sum()
    zero = mask & (weight == 0)
    bounded = mask & (weight != 0) & (weight != log_weight.exp())
    return {
        "policy/correction": (torch.where(mask, weight, 0.0).sum(), count),
        "policy/correction_zero_frac": (zero.to(weight.dtype).sum(), count),
        "policy/correction_bound_frac": (bounded.to(weight.dtype).sum(), count),
    }


# Filters of whole completions


def keep_geometric(m: Mismatch, *, low: float | None, high: float | None) -> Tensor:  # (N,) bool
    """True for completions whose geometric ratio is within bounds; multiplies with a token correction."""
    return _mask(m.mean, low, high) > 0


@torch.no_grad()
def sequence_drift(
    logp: Tensor,  # (N,) current policy
    behaviour_logp: Tensor,  # (N,) engine, or old_logp where there is none; NaN counts as no difference
    mask: Tensor,  # (N,) bool, True = trained
    sequence: Tensor,  # (N,) int64 completion of each token; whole completions
    *,
    num_sequences: int,
) -> Tensor:  # (B,) mean of behaviour_logp - logp: how far the policy has moved away from each completion, in nats
    return sequence_mean(log_difference(behaviour_logp, logp, mask), mask, sequence, num_sequences=num_sequences)


def keep_on_policy(
    advantage: Tensor,  # (N,) advantage of each token's completion
    drift: Tensor,  # (N,) sequence_drift of each token's completion
    *,
    threshold: float,
) -> Tensor:  # (N,) bool
    """Off-policy sequence mask (DeepSeek-V3.2, arXiv:2512.02556): drop bad completions that became unlikely.

    Drops a completion if A < 0 and drift > threshold. Good completions are kept at any drift, and so is the KL term of
    a dropped one.
    """
    return (advantage >= 0) | (drift <= threshold)
