"""DPO: widen the gap between chosen and rejected responses, measured against a frozen reference.

    pairs -> pack -> (logps, reference logps -> sums over responses -> pair loss -> backward)* -> clip and step -> log

Rafailov et al. 2023 (arXiv:2305.18290). --loss-type picks one or several of the pair losses in losses/preference.py;
trainer/config/preference.py checks which options go together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from data.packing import Item, to_device
from data.types import Pair
from losses.preference import DIVERGENCES, AotTargets, PairScores, aot_targets, dpo_loss, ld_weights, wpo_weight
from losses.types import LossOut
from trainer.config.blocks import Flat, ReferenceConfig
from trainer.config.preference import PairLossType, check_pair_options
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
class Config(PreferenceConfig):
    """Direct preference optimisation on chosen and rejected responses, and its relatives."""

    reference: Flat[ReferenceConfig] = field(default_factory=ReferenceConfig)

    loss_type: tuple[PairLossType, ...] = ("sigmoid",)
    """Pair loss; several are added with loss_weights (sigmoid bco_pair sft is MPO)."""
    loss_weights: tuple[float, ...] = ()
    """One weight per loss_type; none given means 1 each."""
    beta: float = 0.1
    """Strength of the pull to the reference; IPO's tau."""
    label_smoothing: float = 0.0
    """Assumed chance that a label is flipped: cDPO with sigmoid; robust and exo_pair have their own use."""
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = "reverse_kl"
    """Divergence whose log-ratios are compared."""
    f_alpha_divergence_coef: float = 0.5
    """Alpha of alpha_divergence."""
    discopop_tau: float = 0.05
    """Temperature of discopop."""
    reference_free: bool = False
    """Compare the policy's log-probs themselves; no reference is loaded."""
    ld_alpha: float | None = None
    """LD-DPO: weight of tokens beyond the shorter response's length; None is off, 1 changes nothing."""
    use_weighting: bool = False
    """WPO: weigh each pair by how likely the policy is to write it."""
    rpo_alpha: float | None = None
    """RPO: add this times the negative log-likelihood of the chosen response per token; None is off."""
    sync_ref_model: bool = False
    """TR-DPO: move the reference towards the policy every ref_model_sync_steps steps."""
    ref_model_mixup_alpha: float = 0.6
    """Share of the policy in a moved reference."""
    ref_model_sync_steps: int = 512
    """Steps between moves of the reference."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pair_options(self)

    @property
    def losses(self) -> tuple[tuple[str, ...], tuple[float, ...]]:
        """Names and weights of the losses, RPO's term included."""
        names, weights = self.loss_type, self.loss_weights or (1.0,) * len(self.loss_type)
        return (names, weights) if self.rpo_alpha is None else ((*names, "sft"), (*weights, self.rpo_alpha))


def train(cfg: Config) -> None:
    with open_run(cfg, cfg.run.method) as run:
        copied = not cfg.reference_free and wants_copy(cfg.reference, cfg.lora)
        policy = parallelize(cfg.parallel, load_policy(cfg.model, cfg.lora, pick_device(), with_reference=copied))
        pairs = pairs_of(cfg, policy, cfg.data.data)
        held_out = pairs_of(cfg, policy, cfg.data.eval_data)[: cfg.data.max_eval_rows]
        reference, items = Reference(None), pair_items([*pairs, *held_out])
        if not cfg.reference_free:
            reference = build_reference(cfg.reference, cfg.model, cfg.run, policy, items, cfg.parallel)
        evaluate = partial(evaluate_pairs, cfg, policy, reference, rows_of_this_rank(held_out))
        moving = MovingReference(policy, cfg.ref_model_mixup_alpha, cfg.ref_model_sync_steps)
        offline = Offline(run, cfg, policy, pairs, extra={"reference": moving} if cfg.sync_ref_model else {})
        offline.begin(evaluate)
        for batch in offline.steps():
            micro_batches = pack_pairs(cfg.run, policy, batch, accumulation=cfg.run.gradient_accumulation_steps)
            sums = run_pairs(cfg, policy, reference, batch, micro_batches, train=True)
            offline.take_step(sums)
            if cfg.sync_ref_model:
                moving.after_step(offline.step)
            offline.log_and_save(sums, sum(mb.batch.num_tokens for mb in micro_batches), evaluate)
        run.finish(policy)


def run_pairs(
    cfg: Config, policy: Policy, reference: Reference, pairs: list[Pair], micro_batches: list[PairBatch], *, train: bool
) -> MetricSums:
    """Loss, metrics and (train) gradients over all micro-batches of one step, each term divided by its global count."""
    items = pair_items(pairs)
    counts = torch.tensor([len(pairs), sum(len(pair.chosen_ids) for pair in pairs)])
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
    cfg: Config,
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
    cfg: Config, policy: Policy, reference: Reference, items: list[Item], micro_batches: list[PairBatch]
) -> AotTargets:
    """AOT's partners over the whole step, computed before the backward passes."""
    parts = [pair_scores(cfg, reference, items, mb, token_logps(policy, mb.batch).logp) for mb in micro_batches]
    order = torch.cat([mb.pairs for mb in micro_batches]).argsort()
    own = torch.stack([torch.cat([part[k] for part in parts])[order].double() for k in range(6)], dim=1)  # (P, 6)
    scores, indices = rows_of_all(own, "scores to sort")
    return aot_targets(PairScores(*scores.to(parts[0][0].dtype).T)).select(indices)


def evaluate_pairs(cfg: Config, policy: Policy, reference: Reference, pairs: list[Pair]) -> dict[str, float]:
    """The same loss and metrics on held-out pairs, as one step over all of them."""
    if not cfg.data.eval_data:
        return {}
    sums = run_pairs(cfg, policy, reference, pairs, pack_pairs(cfg.run, policy, pairs, accumulation=1), train=False)
    return pair_evaluation(sums, len(pairs))
