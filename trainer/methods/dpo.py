"""DPO: widen the gap between chosen and rejected responses, relative to a frozen reference.

    pairs -> pack -> (logps, reference logps -> sums over responses -> pair loss -> backward)* -> clip and step -> log

Rafailov et al. 2023 (arXiv:2305.18290). --loss-type selects one or several pair losses of losses/preference.py;
trainer/config/preference.py checks which options work together.

Shapes: N trained tokens of a micro-batch, P its pairs; w = chosen, l = rejected.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from data.packing import Item, to_device
from data.rows.held_out import train_and_held_out
from data.types import Pair
from losses.preference import (
    DIVERGENCES,
    PAIR_LOSSES,
    AotTargets,
    PairScores,
    aot_targets,
    ld_weights,
    pair_metrics,
    wpo_weight,
)
from losses.types import options_of
from trainer.config.blocks import MethodMemory
from trainer.config.preference import PairOptions, check_pair_options
from trainer.metrics.metrics import MetricSums
from trainer.offline.config import PreferenceConfig
from trainer.offline.pairs import PairBatch, pack_pairs, pair_evaluation, pair_items, pairs_of
from trainer.offline.rows import Rows, rows_of_this_rank
from trainer.parallel.comm import all_sum, rows_of_all
from trainer.policy.logps import Policy, token_log_collision, token_logps
from trainer.policy.reference import Reference, build_reference, wants_copy
from trainer.policy.sharding import final_passes
from trainer.run.run import open_run
from trainer.run.training import Training, open_policy


@dataclass(frozen=True, kw_only=True)
class Config(PairOptions, PreferenceConfig):
    """Direct preference optimisation on chosen and rejected responses, and its relatives."""

    memory: ClassVar[MethodMemory] = MethodMemory(sequences=2)
    rows: ClassVar[str] = "pairs"
    # TRL's guide to PEFT, Zephyr QLoRA; all weights: TRL, the paper (2305.18290).
    lora_learning_rate: ClassVar[float] = 5e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pair_options(self, lora=self.lora, run=self.run, num_pairs=self.run.sequences_per_step)


def train(cfg: Config) -> None:
    with open_run(cfg, cfg.run.method) as run:
        policy = open_policy(cfg, with_reference=not cfg.reference_free and wants_copy(cfg.reference, cfg.lora))
        pairs, held_out = train_and_held_out(cfg.data, cfg.run.seed, partial(pairs_of, cfg, policy))
        held_out = held_out[: cfg.data.max_eval_rows]
        reference = Reference(None)
        items = pair_items([*pairs, *held_out]) if cfg.reference.ref == "precomputed" else []
        if not cfg.reference_free:  # --ref copy, adapter_off, precomputed, or --ref-model
            reference = build_reference(cfg.reference, cfg.model, cfg.run, policy, items, cfg.parallel)
        evaluate = partial(evaluate_pairs, cfg, policy, reference, rows_of_this_rank(held_out))
        training = Training(run, cfg, policy, Rows(cfg, pairs), evaluate=evaluate, moving=cfg.moving)
        for batch in training.steps():  # this rank's pairs
            micro_batches = pack_pairs(cfg.run, policy, batch, accumulation=cfg.run.gradient_accumulation_steps)
            sums = run_pairs(cfg, policy, reference, pair_items(batch), micro_batches, train=True)
            training.clip_and_step(sums)
            training.log(sums, sum(mb.batch.num_tokens for mb in micro_batches))


def run_pairs(
    cfg: PairOptions,
    policy: Policy,
    reference: Reference,
    items: list[Item],  # two per pair, chosen first
    micro_batches: list[PairBatch],
    *,
    train: bool,
) -> MetricSums:
    """Loss, metrics and (train) gradients over the micro-batches of one step."""
    counts = torch.tensor([len(items) // 2, sum(sum(item.mask) for item in items[::2])])
    num_pairs, num_tokens = all_sum(to_device(counts.float(), policy.device))  # of the step, all ranks
    sorts = {"aot", "aot_unpaired"} & set(cfg.losses[0])  # --loss-type aot compares sorted scores of the whole step
    targets = step_targets(cfg, policy, reference, items, micro_batches) if sorts else None
    sums = MetricSums()
    for mb in final_passes(policy, micro_batches) if train else micro_batches:
        logp, entropy = token_logps(policy, mb.batch)  # (N,), (N,)
        s = pair_scores(cfg, reference, items, mb, logp)  # (P,) log-probs of whole responses
        pair_weight = wpo_weights(policy, mb, logp) if cfg.use_weighting else None  # --use-weighting
        nll = -logp[mb.chosen].sum()  # () of the chosen responses
        terms = pair_losses(cfg, s, nll, pair_weight, targets.select(mb.pairs) if targets else None)
        divisors = {name: num_tokens if name == "sft" else num_pairs for name in terms}
        weighted = [w * terms[name] / divisors[name].clamp(min=1) for name, w in zip(*cfg.losses, strict=True)]
        total = torch.stack(weighted).sum()
        if train:
            total.backward()
        units = {name: mb.lengths[:, 0].sum() if name == "sft" else len(mb.pairs) for name in terms}
        sums.add(pair_metrics(cfg.beta * s.c, cfg.beta * s.r, s.logp_w, s.logp_l))  # beta log-ratio is the reward
        sums.add({f"loss/{name}": (terms[name], units[name]) for name in terms})
        sums.add({"loss/total": (total * num_pairs, len(mb.pairs)), "policy/entropy": (entropy.sum(), len(entropy))})
    return sums


def pair_losses(
    cfg: PairOptions,
    s: PairScores,
    nll: Tensor,  # ()
    pair_weight: Tensor | None = None,  # (P,) WPO
    targets: AotTargets | None = None,
) -> dict[str, Tensor]:  # ()
    """The sum over pairs (sft: over tokens) of each loss."""
    assert len({x.shape for x in s[:6]}) == 1, f"shapes {[tuple(x.shape) for x in s[:6]]}"
    eps = cfg.label_smoothing
    options = {"beta": cfg.beta, "label_smoothing": eps, "discopop_tau": cfg.discopop_tau, "targets": targets}
    terms = {}
    for name in cfg.losses[0]:
        if name == "sigmoid":  # DPO: -log sigmoid(beta [(logp_w - ref_w) - (logp_l - ref_l)])
            margin = cfg.beta * (s.s_w - s.s_l)  # (P,) s = f(logp - ref_logp), the identity by default
            loss = -(1 - eps) * F.logsigmoid(margin) - eps * F.logsigmoid(-margin)
        elif name == "sft":
            terms[name] = nll  # --rpo-alpha, --loss-type sft
            continue
        else:  # --loss-type ipo, hinge, ...: losses/preference.py
            function = PAIR_LOSSES[name]
            loss = function(s, **{key: options[key] for key in options_of(function)})
        terms[name] = (loss if pair_weight is None else loss * pair_weight).sum()
    return terms


def pair_scores(
    cfg: PairOptions,
    reference: Reference,
    items: list[Item],
    mb: PairBatch,
    logp: Tensor,  # (N,) policy
) -> PairScores:
    """Log-probs of whole responses under policy and reference."""
    ref_logp = reference.token_logps(mb.batch, items)  # (N,)
    weight = torch.ones_like(ref_logp)
    if cfg.ld_alpha is not None:  # --ld-alpha
        shared = mb.lengths.min(dim=1).values.repeat_interleave(2)[mb.batch.slot]  # (N,) the pair's shorter length
        weight = ld_weights(mb.offset, shared, alpha=cfg.ld_alpha)
    divergence = DIVERGENCES[cfg.f_divergence_type]
    if cfg.f_divergence_type == "alpha_divergence":
        divergence = partial(divergence, alpha=cfg.f_alpha_divergence_coef)
    (logp_w, logp_l), (ref_w, ref_l) = mb.sums(logp * weight).T, mb.sums(ref_logp * weight).T
    len_w, len_l = mb.lengths.T
    return PairScores(logp_w, logp_l, ref_w, ref_l, len_w, len_l, divergence)


def wpo_weights(policy: Policy, mb: PairBatch, logp: Tensor) -> Tensor:  # (P,)
    adjusted = mb.sums(logp.detach() - token_log_collision(policy, mb.batch)) / mb.lengths  # (P, 2)
    return wpo_weight(*adjusted.T)


@torch.no_grad()
def step_targets(
    cfg: PairOptions, policy: Policy, reference: Reference, items: list[Item], micro_batches: list[PairBatch]
) -> AotTargets:
    """Compute AOT's partners over the whole step, before the backward passes."""
    scores = [pair_scores(cfg, reference, items, mb, token_logps(policy, mb.batch).logp) for mb in micro_batches]
    order = torch.cat([mb.pairs for mb in micro_batches]).argsort()
    columns = zip(*(s[:6] for s in scores), strict=True)  # all but the divergence
    local = torch.stack([torch.cat(column)[order].double() for column in columns], dim=1)  # (P, 6)
    of_all, indices = rows_of_all(local, "scores to sort")
    return aot_targets(PairScores(*of_all.to(scores[0][0].dtype).T)).select(indices)


def evaluate_pairs(cfg: Config, policy: Policy, reference: Reference, pairs: list[Pair]) -> dict[str, float]:
    """The same loss and metrics on held-out pairs, as one step over all of them."""
    micro_batches = pack_pairs(cfg.run, policy, pairs, accumulation=1)
    sums = run_pairs(cfg, policy, reference, pair_items(pairs), micro_batches, train=False)
    return pair_evaluation(sums, len(pairs))
