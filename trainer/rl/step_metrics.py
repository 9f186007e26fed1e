"""Metrics of an optimizer step: sums and counts, of the tokens that were computed unless said otherwise.

    add_micro_batch(cfg, sums, mb, parts, total)      # after each micro-batch
    end_step(sums, batch, divided_by)                 # after the last: what the sums are divided by

Policy loss, KL and entropy terms are added up without their counts; end_step adds those, skipped tokens included.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from losses import importance
from losses.advantage import effective_sample_frac, moments
from losses.policy import Metrics
from trainer.config.groups import PolicyGradientConfig
from trainer.metrics.metrics import MetricSums
from trainer.parallel.comm import all_sum, data_size
from trainer.rl.minibatch import MicroBatch, MiniBatch


class StepSums(MetricSums):
    """Sums of one step, and the moments of the raw ratios between trainer and engine."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.ratios = torch.zeros(2, 3, dtype=torch.float64, device=device)  # of tokens, and of completions


def add_micro_batch(
    cfg: PolicyGradientConfig,
    sums: StepSums,
    mb: MicroBatch,
    parts: Sequence[tuple[Metrics, Tensor]],  # of each piece: metrics of the loss, and (n,) log-probs
    total: Tensor,  # ()
) -> None:
    for metrics, _ in parts:
        sums.add(metrics)
    logp = torch.cat([logp for _, logp in parts])
    sums.ratios += _add_engine_gap(cfg, sums, mb, logp)
    sums.add({"loss/total": (total, torch.zeros_like(total))})


def _add_engine_gap(
    cfg: PolicyGradientConfig,
    sums: MetricSums,
    mb: MicroBatch,
    logp: Tensor,  # (N,)
) -> Tensor:  # (2, 3)
    """How far the engine is from the trainer, and what is done about it."""
    correction, slot = cfg.correction, mb.batch.slot
    mask = torch.ones_like(slot, dtype=torch.bool)
    known = mb.old_logp is not None and correction.proximal_policy == "step"
    old = mb.old_logp if known else logp
    m = importance.mismatch(old, mb.engine_logp, mask, slot, num_sequences=len(mb.batch.rows))
    count, one = mask.sum(), 1 / m.length.to(m.token.dtype)  # adds up to 1 for each completion
    sums.add(importance.mismatch_metrics(m, mask))
    sums.add(
        {
            "policy/behaviour_kl": ((torch.expm1(m.token) - m.token).sum(), count),
            "policy/behaviour_gap": (m.token.abs().sum(), count),
        }
    )
    if correction.is_on:
        gap = m.total if correction.by_completion else m.token
        weight = importance.bounded_ratio(gap, *correction.bounds, drop=correction.drops)
        sums.add(importance.correction_metrics(weight, gap, mask))
    for name, keep in (("geometric", mb.keep_geometric), ("off_policy", mb.keep_on_policy)):
        if keep is not None:
            sums.add({f"policy/{name}_dropped_frac": ((one * ~keep).sum(), one.sum())})
    if mb.keep_entropy is not None:
        sums.add({"policy/entropy_kept_frac": (mb.keep_entropy.sum(), count)})
    return torch.stack([moments(m.token.exp()), moments(m.total.exp(), one)])


def end_step(
    sums: StepSums,
    batch: MiniBatch,
    divided_by: dict[str, Tensor],  # () of each term, over all ranks
) -> None:
    """What losses are divided by, numbers of the whole step, and completions that were not computed."""
    # Adds up to 1 over ranks, also where all completions are masked: then losses are written as 0.
    own, of_step = batch.counts.tokens, batch.total.tokens
    share = torch.where(of_step > 0, own / of_step.clamp(min=1), 1 / data_size())
    nothing = torch.zeros_like(share)
    sums.add({"loss/total": (nothing, share)})
    for name, count in divided_by.items():
        if f"loss/{name}" in sums.pairs:
            sums.add({f"loss/{name}": (nothing, count.clamp(min=1) * share)})
    for name, row in zip(("ess_frac", "ess_sequence_frac"), all_sum(sums.ratios), strict=True):
        sums.add({f"policy/{name}": (effective_sample_frac(row).nan_to_num(), row[0] > 0)})
    # Skipped tokens count as unclipped.
    sums.add({name: (nothing, batch.skipped_tokens) for name in list(sums.pairs) if name.startswith("policy/clip_")})
    sums.add({"policy/skipped_frac": (nothing + batch.skipped, batch.counts.completions)})
