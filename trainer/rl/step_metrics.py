"""Metrics of an optimizer step, as (sum, count) over the tokens that were computed.

    ratios += add_micro_batch(cfg, sums, mb, pieces, loss)    # after each micro-batch
    end_step(sums, batch, divisors, ratios)                   # after the last one

Terms of the loss are summed without counts; end_step adds their divisors, in which skipped tokens count too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from losses import importance
from losses.advantage import effective_sample_frac, moments
from losses.types import Metrics
from trainer.config.groups import PolicyGradientConfig
from trainer.metrics.metrics import MetricSums
from trainer.parallel.comm import all_sum, data_size
from trainer.rl.minibatch import MicroBatch, MiniBatch


def add_micro_batch(
    cfg: PolicyGradientConfig,
    sums: MetricSums,
    mb: MicroBatch,
    pieces: Sequence[tuple[Metrics, Tensor]],  # of each slice: metrics of the loss, and (n,) log-probs
    loss: Tensor,  # ()
) -> Tensor:  # (2, 3) moments of the raw ratios of tokens and of completions
    """Add the metrics of a micro-batch: its loss, the gap between trainer and engine, and the filters."""
    for metrics, _ in pieces:
        sums.add(metrics)
    sums.add({"loss/total": (loss, torch.zeros_like(loss))})
    correction, slot = cfg.correction, mb.batch.slot
    logp = torch.cat([logp for _, logp in pieces])  # (N,)
    old = logp if mb.old_logp is None or correction.proximal_policy != "step" else mb.old_logp
    gap = importance.engine_gap(old, mb.engine_logp, slot, num_sequences=len(mb.batch.rows))
    count, one = len(slot), 1 / gap.length.to(gap.token.dtype)  # `one` sums to 1 over each completion
    sums.add(importance.gap_metrics(gap))
    sums.add(
        {
            "policy/behaviour_kl": ((torch.expm1(gap.token) - gap.token).sum(), count),
            "policy/behaviour_gap": (gap.token.abs().sum(), count),
        }
    )
    if correction.is_on:
        log_ratio = gap.total if correction.by_completion else gap.token
        weight = importance.bounded_ratio(log_ratio, *correction.bounds, drop=correction.drops)
        sums.add(importance.correction_metrics(weight, log_ratio))
    for name, keep in (("geometric", mb.keep_geometric), ("off_policy", mb.keep_on_policy)):
        if keep is not None:
            sums.add({f"policy/{name}_dropped_frac": ((one * ~keep).sum(), one.sum())})
    if mb.keep_entropy is not None:
        sums.add({"policy/entropy_kept_frac": (mb.keep_entropy.sum(), count)})
    return torch.stack([moments(gap.token.exp()), moments(gap.total.exp(), one)])


def end_step(
    sums: MetricSums,
    batch: MiniBatch,
    divisors: dict[str, Tensor],  # () of each term, over all ranks
    ratios: Tensor,  # (2, 3) moments from add_micro_batch
) -> None:
    """Add the divisors of the loss terms, statistics of the whole step, and the completions that were skipped."""
    # This rank's share of each divisor: sums to 1 over ranks, even if all completions are masked.
    share = torch.where(batch.num_tokens > 0, batch.rank_tokens / batch.num_tokens.clamp(min=1), 1 / data_size())
    zero = torch.zeros_like(share)
    sums.add({"loss/total": (zero, share)})
    for name, count in divisors.items():
        if f"loss/{name}" in sums.pairs:
            sums.add({f"loss/{name}": (zero, count.clamp(min=1) * share)})
    for name, row in zip(("ess_frac", "ess_sequence_frac"), all_sum(ratios), strict=True):
        sums.add({f"policy/{name}": (effective_sample_frac(row).nan_to_num(), row[0] > 0)})
    # Skipped tokens count as unclipped.
    sums.add({name: (zero, batch.skipped_tokens) for name in list(sums.pairs) if name.startswith("policy/clip_")})
    sums.add({"policy/skipped_frac": (zero + batch.skipped, batch.rank_completions)})
