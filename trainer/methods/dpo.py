"""DPO: widen the gap between chosen and rejected responses, measured against a frozen reference.

    pairs -> pack -> (logps, reference logps -> sums over responses -> pair loss -> backward)* -> clip and step -> log

Rafailov et al. 2023 (arXiv:2305.18290). --loss-type picks one or several of the pair losses in losses/preference.py;
trainer/config/preference.py checks which options go together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from data.packing import Item, to_device
from data.rows.held_out import train_and_held_out
from data.types import Pair
from losses.preference import DIVERGENCES, AotTargets, PairScores, aot_targets, dpo_loss, ld_weights, wpo_weight
from losses.types import LossOut
from trainer.config.blocks import MethodMemory
from trainer.config.preference import PairOptions, check_pair_options
from trainer.metrics.metrics import MetricSums
from trainer.offline.config import PreferenceConfig
from trainer.offline.loop import Offline, rows_of_this_rank
from trainer.offline.pairs import PairBatch, pack_pairs, pair_evaluation, pair_items, pairs_of, sum_losses
from trainer.parallel.comm import all_sum, pick_device, rows_of_all
from trainer.policy.load import load_policy
from trainer.policy.logps import Policy, token_log_collision, token_logps
from trainer.policy.reference import MovingReference, Reference, build_reference, wants_copy
from trainer.policy.sharding import parallelize
from trainer.run.run import open_run


@dataclass(frozen=True, kw_only=True)
class Config(PairOptions, PreferenceConfig):
    """Direct preference optimisation on chosen and rejected responses, and its relatives."""

    memory: ClassVar[MethodMemory] = MethodMemory("any loss", "always", sequences=2)
    rows: ClassVar[str] = "pairs"
    # TRL's guide to PEFT, Zephyr QLoRA; all weights: TRL, the paper (2305.18290).
    lora_learning_rate: ClassVar[float] = 5e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pair_options(self, lora=self.lora, run=self.run, num_pairs=self.run.sequences_per_step)


def train(cfg: Config) -> None:
    with open_run(cfg, cfg.run.method) as run:
        copied = not cfg.reference_free and wants_copy(cfg.reference, cfg.lora)
        policy = parallelize(cfg.parallel, load_policy(cfg.model, cfg.lora, pick_device(), with_reference=copied))
        pairs, held_out = train_and_held_out(cfg.data, cfg.run.seed, partial(pairs_of, cfg, policy))
        held_out = held_out[: cfg.data.max_eval_rows]
        reference, items = Reference(None), pair_items([*pairs, *held_out])
        if not cfg.reference_free:
            reference = build_reference(cfg.reference, cfg.model, cfg.run, policy, items, cfg.parallel)
        evaluate = partial(evaluate_pairs, cfg, policy, reference, rows_of_this_rank(held_out))
        moving = MovingReference(policy, cfg.moving.ref_model_mixup_alpha, cfg.moving.ref_model_sync_steps)
        offline = Offline(run, cfg, policy, pairs, extra={"reference": moving} if cfg.moving.sync_ref_model else {})
        offline.begin(evaluate)
        for batch in offline.steps():
            micro_batches = pack_pairs(cfg.run, policy, batch, accumulation=cfg.run.gradient_accumulation_steps)
            sums = run_pairs(cfg, policy, reference, pair_items(batch), micro_batches, train=True)
            offline.take_step(sums)
            if cfg.moving.sync_ref_model:
                moving.after_step(offline.step)
            offline.log_and_save(sums, sum(mb.batch.num_tokens for mb in micro_batches), evaluate)
        run.finish(policy)


def run_pairs(
    cfg: PairOptions,
    policy: Policy,
    reference: Reference,
    items: list[Item],  # two for each pair
    micro_batches: list[PairBatch],
    *,
    train: bool,
) -> MetricSums:
    """Loss, metrics and (train) gradients over all micro-batches of one step, each term divided by its global count."""
    counts = torch.tensor([len(items) // 2, sum(sum(item.mask) for item in items[::2])])
    num_pairs, num_tokens = all_sum(to_device(counts.float(), policy.device))
    names, weights = cfg.losses
    denominators = {name: num_tokens if name == "sft" else num_pairs for name in names}
    sorts = {"aot", "aot_unpaired"} & set(names)
    targets = step_targets(cfg, policy, reference, items, micro_batches) if sorts else None

    def loss_of(mb: PairBatch, logp: Tensor) -> LossOut:
        return dpo_loss(
            pair_scores(cfg, reference, items, mb, logp), names, weights, beta=cfg.beta,
            label_smoothing=cfg.label_smoothing, discopop_tau=cfg.discopop_tau,
            pair_weight=wpo_weights(policy, mb, logp) if cfg.use_weighting else None,
            targets=targets.select(mb.pairs) if targets else None,
            nll_sum=-logp[mb.chosen].sum(), nll_count=mb.lengths[:, 0].sum(),
        )  # fmt: skip

    return sum_losses(policy, micro_batches, loss_of, denominators, num_pairs, train=train)


def pair_scores(
    cfg: PairOptions,
    reference: Reference,
    items: list[Item],
    mb: PairBatch,
    logp: Tensor,  # (N,) of the policy
) -> PairScores:
    """Log-probs of whole responses, of policy and reference."""
    ref_logp = reference.token_logps(mb.batch, items)  # (N,)
    weight = torch.ones_like(ref_logp)
    if cfg.ld_alpha is not None:
        shared = mb.lengths.min(dim=1).values.repeat_interleave(2)[mb.batch.slot]  # (N,) the pair's shorter length
        weight = ld_weights(mb.offset, shared, alpha=cfg.ld_alpha)
    divergence = DIVERGENCES[cfg.f_divergence_type]
    if cfg.f_divergence_type == "alpha_divergence":
        divergence = partial(divergence, alpha=cfg.f_alpha_divergence_coef)
    (logp_w, logp_l), (ref_w, ref_l) = mb.sums(logp * weight).T, mb.sums(ref_logp * weight).T
    return PairScores(logp_w, logp_l, ref_w, ref_l, *mb.lengths.T, divergence)


def wpo_weights(policy: Policy, mb: PairBatch, logp: Tensor) -> Tensor:  # (P,)
    adjusted = mb.sums(logp.detach() - token_log_collision(policy, mb.batch)) / mb.lengths  # (P, 2)
    return wpo_weight(*adjusted.T)


@torch.no_grad()
def step_targets(
    cfg: PairOptions, policy: Policy, reference: Reference, items: list[Item], micro_batches: list[PairBatch]
) -> AotTargets:
    """AOT's partners over the whole step, computed before the backward passes."""
    parts = [pair_scores(cfg, reference, items, mb, token_logps(policy, mb.batch).logp) for mb in micro_batches]
    order = torch.cat([mb.pairs for mb in micro_batches]).argsort()
    own = torch.stack([torch.cat([part[k] for part in parts])[order].double() for k in range(6)], dim=1)  # (P, 6)
    scores, indices = rows_of_all(own, "scores to sort")
    return aot_targets(PairScores(*scores.to(parts[0][0].dtype).T)).select(indices)


def evaluate_pairs(cfg: Config, policy: Policy, reference: Reference, pairs: list[Pair]) -> dict[str, float]:
    """The same loss and metrics on held-out pairs, as one step over all of them."""
    if not cfg.data.holds_out:
        return {}
    micro_batches = pack_pairs(cfg.run, policy, pairs, accumulation=1)
    sums = run_pairs(cfg, policy, reference, pair_items(pairs), micro_batches, train=False)
    return pair_evaluation(sums, len(pairs))
