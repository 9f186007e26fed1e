"""The loss of some trained tokens of a group method, by its options, and what is logged of it.

trainer/rl/step.py computes what has to be known of whole completions (TokenInputs) and calls `loss` on the tokens that
the head hands out, cut anywhere.

Shapes: N = trained tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.linear_logprob import TokenLogps
from losses import importance
from losses.advantage import effective_sample_frac, moments
from losses.entropy import entropy_bonus
from losses.kl import KL_ESTIMATORS, kl_penalty
from losses.policy import Tokens, sequence_log_ratio, token_log_ratio
from losses.types import LossOut, merge
from trainer.metrics.metrics import MetricSums


class TokenInputs(NamedTuple):
    """What the loss needs of each trained token besides the pass itself. All (N,)."""

    advantage: Tensor
    length: Tensor  # trained tokens of the token's completion
    behaviour: Tensor
    old: Tensor | None  # what the ratio is against; None: the policy as it is
    reference: Tensor | None
    correction: Tensor | None  # weight for the gap to the engine; None: none, or from the token alone, in the loss
    mean: Tensor | None  # of logp - old over the completion; None: 0
    total: Tensor | None  # log of the completion's own ratio or weight, for rloo and vespo; None: 0
    keep_geometric: Tensor | None  # bool; None: all
    keep_on_policy: Tensor | None  # bool; None: all
    keep_entropy: Tensor | None  # bool; None: all

    def at(self, rows: Tensor) -> TokenInputs:
        return TokenInputs(*(None if x is None else x[rows] for x in self))


def has_kl_term(cfg: Any) -> bool:
    return cfg.policy_loss.beta > 0 and not cfg.advantage.kl_in_reward


def correct(cfg: Any, m: importance.Mismatch) -> Tensor:  # (N,)
    """Weight for the gap between trainer and engine."""
    low, high = cfg.correction.bounds
    return importance.CORRECTIONS[cfg.correction.vllm_importance_sampling_mode](m, low=low, high=high)


def filter_geometric(cfg: Any, m: importance.Mismatch) -> Tensor:  # (N,) bool
    return importance.keep_geometric(m, low=cfg.correction.geometric_min, high=cfg.correction.geometric_max)


def loss(cfg: Any, tokens: TokenLogps, inputs: TokenInputs, micro_batch_tokens: Tensor) -> LossOut:
    """The policy loss, and KL and entropy terms where they are asked for, over some trained tokens."""
    options, logp = cfg.policy_loss, tokens.logp
    now, mask = logp.detach(), torch.ones_like(logp, dtype=torch.bool)
    old = now if inputs.old is None else torch.where(inputs.old.isnan(), now, inputs.old)
    nothing = torch.zeros_like(now)
    if options.importance_sampling_level == "sequence":
        log_ratio = sequence_log_ratio(logp, nothing if inputs.mean is None else inputs.mean, mask)
    else:
        log_ratio = token_log_ratio(logp, old, mask)
    t = Tokens(
        logp=logp, log_ratio=log_ratio, advantage=inputs.advantage, mask=mask, length=inputs.length,
        weight=_weight(cfg, inputs, now, mask), sequence_log_ratio=nothing if inputs.total is None else inputs.total,
    )  # fmt: skip
    sizes = {"micro_batch_tokens": micro_batch_tokens, "max_completion_length": cfg.max_completion_length}
    out = options.loss(t, **options.loss_options, **sizes)
    if inputs.reference is not None:
        share = options.loss.share(t, **sizes)
        penalty = kl_penalty(
            logp, old, inputs.reference, mask, beta=options.beta, ratio_weighted=options.use_bias_correction_kl,
            estimator=KL_ESTIMATORS[options.kl_estimator], share=share.weight, count=share.count,
        )  # fmt: skip
        out = merge(out, penalty)
    if options.entropy_coef:
        out = merge(out, entropy_bonus(tokens.entropy, mask, coef=options.entropy_coef, keep=inputs.keep_entropy))
    out.metrics["policy/entropy"] = (tokens.entropy.detach().sum(), mask.sum())
    return out


def _weight(cfg: Any, inputs: TokenInputs, now: Tensor, mask: Tensor) -> Tensor | None:  # (N,)
    """Correction times filters. The correction of a token on the first step needs no pass of its own."""
    weight = inputs.correction
    if weight is None and cfg.correction.is_on and cfg.policy_loss.loss.ratio != "weight":
        d = importance.log_difference(now, inputs.behaviour, mask)
        weight = correct(cfg, importance.Mismatch(token=d, total=d, mean=d, length=inputs.length))  # reads the token's
    for keep in (inputs.keep_geometric, inputs.keep_on_policy, inputs.keep_entropy):
        if keep is not None:
            weight = keep.to(now.dtype) if weight is None else weight * keep
    return weight


# Metrics: sums and counts, of the tokens that were computed unless said otherwise.


def add_loss_metrics(sums: MetricSums, out: LossOut) -> None:
    """Sums of terms without their counts: add_step_metrics adds what they are divided by, skipped tokens included."""
    sums.add(out.metrics)
    sums.add({f"loss/{name}": (term.sum, torch.zeros_like(term.sum)) for name, term in out.terms.items()})


def add_gap_metrics(
    cfg: Any, sums: MetricSums, inputs: TokenInputs, logp: Tensor, slot: Tensor, num_sequences: int
) -> Tensor:  # (2, 3) moments of the raw ratios of tokens and of completions
    """How far the engine is from the trainer, and what is done about it."""
    correction = cfg.correction
    mask = torch.ones_like(slot, dtype=torch.bool)
    old = logp if inputs.old is None or correction.proximal_policy == "behaviour" else inputs.old
    m = importance.mismatch(old, inputs.behaviour, mask, slot, num_sequences=num_sequences)
    count, one = mask.sum(), 1 / m.length.to(m.token.dtype)  # adds up to 1 for each completion
    sums.add(importance.mismatch_metrics(m, mask))
    sums.add(
        {
            "policy/behaviour_kl": ((torch.expm1(m.token) - m.token).sum(), count),
            "policy/behaviour_gap": (m.token.abs().sum(), count),
        }
    )
    if correction.is_on:
        by_completion = correction.vllm_importance_sampling_mode in importance.SEQUENCE_CORRECTIONS
        sums.add(importance.correction_metrics(correct(cfg, m), m.total if by_completion else m.token, mask))
    for name, keep in (("geometric", inputs.keep_geometric), ("off_policy", inputs.keep_on_policy)):
        if keep is not None:
            sums.add({f"policy/{name}_dropped_frac": ((one * ~keep).sum(), one.sum())})
    if inputs.keep_entropy is not None:
        sums.add({"policy/entropy_kept_frac": (inputs.keep_entropy.sum(), count)})
    return torch.stack([moments(m.token.exp()), moments(m.total.exp(), one)])


def add_names(cfg: Any, sums: MetricSums, device: torch.device) -> None:
    """Metrics of no tokens: ranks must reduce the same names, also one that had nothing to compute."""
    none = torch.zeros(0, device=device)
    kept = none.bool()
    inputs = TokenInputs(
        advantage=none, length=none.long(), behaviour=none, old=none, reference=none if has_kl_term(cfg) else None,
        correction=none, mean=none, total=none, keep_geometric=kept if cfg.correction.has_geometric_filter else None,
        keep_on_policy=None if cfg.correction.off_policy_mask_threshold is None else kept,
        keep_entropy=kept if cfg.policy_loss.top_entropy_quantile < 1 else None,
    )  # fmt: skip
    zero = none.sum()
    add_loss_metrics(sums, loss(cfg, TokenLogps(none, none), inputs, zero + 1))
    add_gap_metrics(cfg, sums, inputs, none, none.long(), 0)
    sums.add({"loss/total": (zero, zero)})


def add_step_metrics(
    sums: MetricSums,
    counts: dict[str, Tensor],  # () what each term is divided by: this rank's share of it
    share: Tensor,  # () adds up to 1 over ranks
    ratios: Tensor,  # (2, 3) moments from add_gap_metrics, over all ranks
) -> None:
    """What losses are divided by, and numbers of the whole step."""
    nothing = torch.zeros_like(share)
    sums.add({"loss/total": (nothing, share)})
    sums.add({f"loss/{name}": (nothing, count) for name, count in counts.items() if f"loss/{name}" in sums.pairs})
    for name, row in (("ess_frac", ratios[0]), ("ess_sequence_frac", ratios[1])):
        sums.add({f"policy/{name}": (effective_sample_frac(row).nan_to_num(), row[0] > 0)})
