"""Columns that concern whole completions or the step, filled in before the training pass.

    look_ahead(cfg, policy, batch)        # once per optimizer step; with the default flags there is nothing to do

    ratio of a completion   --importance-sampling-level sequence, --loss-type rloo, vespo   mean_, total_log_ratio
    gap of a completion     a sequence correction, geometric bounds, vespo                  engine_gap, keep_geometric
    policy of the step      --top-entropy-quantile, --off-policy-mask-threshold             keep_entropy, keep_on_policy

All of them need log-probs of the current policy: one no-grad pass, unless the log-probs are known. On the first step
the policy is still the old policy, so its ratio is 1 and logps_at_start may have computed its log-probs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.linear_logprob import TokenLogps
from losses import importance
from losses.entropy import keep_top_entropy
from losses.importance import sequence_mean, sequence_sum
from losses.kl import MAX_LOG_RATIO
from losses.policy import MIN_LOG_WEIGHT
from trainer.config.groups import PolicyGradientConfig
from trainer.parallel.comm import all_sum
from trainer.parallel.quantile import tolerance_of, top_threshold
from trainer.policy.logps import Policy
from trainer.rl.minibatch import MicroBatch, MiniBatch, policy_logps


def look_ahead(cfg: PolicyGradientConfig, policy: Policy, batch: MiniBatch) -> None:
    if not needs(cfg):
        return
    now = current_logps(cfg, policy, batch)
    threshold = _entropy_threshold(cfg, policy, batch, now)
    for index, mb in enumerate(batch.micro_batches):
        if not mb.is_idle:
            _fill(cfg, mb, None if now is None else now[index], threshold)


def needs(cfg: PolicyGradientConfig) -> set[str]:
    """What the loss, the correction and the filters must know before the training pass."""
    loss, correction = cfg.policy_loss.loss, cfg.correction
    needed = {
        "ratio of a completion": cfg.policy_loss.importance_sampling_level == "sequence"
        or loss.ratio in ("completion", "weight"),
        "gap of a completion": correction.is_on
        and (correction.by_completion or correction.has_geometric_filter or loss.ratio == "weight"),
        "policy of the step": cfg.policy_loss.top_entropy_quantile < 1
        or correction.off_policy_mask_threshold is not None,
    }
    return {name for name, is_needed in needed.items() if is_needed}


def current_logps(cfg: PolicyGradientConfig, policy: Policy, batch: MiniBatch) -> list[TokenLogps] | None:
    """Log-probs and entropies of the current policy; None if nothing needs them.

    A ratio to the policy itself is 1 and needs no pass. If the log-probs of the old policy are known, the gap to the
    engine is measured against them.
    """
    against_itself = batch.at_start is None and cfg.correction.proximal_policy == "step"
    known = {"ratio of a completion": against_itself, "gap of a completion": batch.at_start is not None}
    if all(known.get(need) for need in needs(cfg)):
        return None
    if batch.is_first and not batch.has_replays and batch.at_start:
        return batch.at_start
    return policy_logps(policy, batch.batches, temperature=cfg.temperature)


def _entropy_threshold(
    cfg: PolicyGradientConfig, policy: Policy, batch: MiniBatch, now: list[TokenLogps] | None
) -> Tensor | None:  # ()
    """Entropy threshold of the step (None: train on all tokens); counts the tokens that pass in batch.num_uncertain."""
    if cfg.policy_loss.top_entropy_quantile == 1:
        return None
    assert now is not None, "the entropy quantile needs log-probs of the current policy"
    dtype = torch.promote_types(policy.compute_dtype, torch.float32)
    entropy = torch.cat([torch.zeros(0, dtype=dtype, device=policy.device), *(x.entropy for x in now)])
    tolerance = tolerance_of(policy.compute_dtype)
    threshold = top_threshold(entropy, top=cfg.policy_loss.top_entropy_quantile, tolerance=tolerance)
    batch.num_uncertain = all_sum(keep_top_entropy(entropy, threshold).sum())
    return threshold


def _fill(
    cfg: PolicyGradientConfig,
    mb: MicroBatch,
    now: TokenLogps | None,
    threshold: Tensor | None,  # ()
) -> None:
    """Fill in the columns. Every column is rewritten in every step on the same mini-batch."""
    correction, loss, slot = cfg.correction, cfg.policy_loss.loss, mb.batch.slot
    num_sequences = len(mb.batch.rows)
    at_start = mb.old_logp if correction.proximal_policy == "step" else None
    moved = torch.zeros_like(mb.advantage)  # the policy is still the old policy
    if now is not None and mb.old_logp is not None:
        moved = importance.log_difference(now.logp, mb.old_logp)
    if cfg.policy_loss.importance_sampling_level == "sequence":
        mb.mean_log_ratio = sequence_mean(moved, slot, num_sequences=num_sequences)[slot]
    if loss.ratio in ("completion", "weight"):
        mb.total_log_ratio = sequence_sum(moved, slot, num_sequences=num_sequences)[slot]
    trainer_logp = at_start if at_start is not None or now is None else now.logp
    if correction.is_on and trainer_logp is not None:
        gap = importance.engine_gap(trainer_logp, mb.engine_logp, slot, num_sequences=num_sequences)
        mb.engine_gap = gap.total if correction.by_completion else gap.token
        if correction.has_geometric_filter:
            bounds = {"low": correction.geometric_min, "high": correction.geometric_max}
            mb.keep_geometric = importance.keep_geometric(gap, **bounds)
    if now is not None and correction.off_policy_mask_threshold is not None:
        sampled = mb.engine_logp if at_start is None else torch.where(mb.engine_logp.isnan(), at_start, mb.engine_logp)
        drift = importance.sequence_drift(now.logp, sampled, slot, num_sequences=num_sequences)[slot]
        limit = correction.off_policy_mask_threshold
        mb.keep_on_policy = importance.keep_on_policy(mb.advantage, drift, threshold=limit)
    if threshold is not None:
        assert now is not None
        mb.keep_entropy = keep_top_entropy(now.entropy, threshold)
    if loss.ratio == "weight" and mb.engine_gap is not None:
        # VESPO: the correction becomes part of the weight of the completion.
        weight = importance.bounded_ratio(mb.engine_gap, *correction.bounds, drop=correction.drops)
        log_weight = weight.log().clamp(MIN_LOG_WEIGHT, MAX_LOG_RATIO)
        if not correction.by_completion:
            log_weight = sequence_sum(log_weight, slot, num_sequences=num_sequences)[slot]
        mb.total_log_ratio = mb.total_log_ratio + log_weight
