"""KTO: responses labelled desirable or undesirable, each compared with a reference point; no pairs needed.

    rows -> pack -> z0 from mismatched rows -> (logps, reference logps -> loss -> backward)* -> clip and step -> log

Ethayarajh et al. 2024 (arXiv:2402.01306). z0 is the mean log-ratio of completions under mismatched prompts, over the
whole step, clamped at 0. A row's mismatch is the completion of the next row, in a seeded order, that has another prompt
(trainer/offline/labelled.py). It is fixed for the run, so its reference log-prob can be precomputed.

Shapes: S sequences of a micro-batch, B rows of the step on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from data.command.checks import check_numbers
from data.command.flags import Common
from data.errors import UserError
from data.packing import Batch, Item, to_device
from data.rows.held_out import train_and_held_out
from data.types import Labelled
from losses.kto import reward_auc
from losses.types import Metrics
from trainer.config.blocks import Flat, ReferenceConfig
from trainer.metrics.metrics import MetricSums
from trainer.offline.config import PreferenceConfig
from trainer.offline.labelled import LabelledStep, Mismatched, item_of, load_rows, pack_labelled
from trainer.offline.rows import Rows, indices_of_this_rank
from trainer.parallel.comm import all_count, all_gather, all_sum
from trainer.policy.logps import Policy, token_logps
from trainer.policy.reference import Reference, build_reference, wants_copy
from trainer.policy.sharding import final_passes
from trainer.run.run import open_run
from trainer.run.training import Training, open_policy


@dataclass(frozen=True, kw_only=True)
class Config(PreferenceConfig):
    """Kahneman-Tversky optimisation on responses labelled desirable or undesirable."""

    rows: ClassVar[str] = "unpaired"
    lora_learning_rate: ClassVar[float] = 5e-6  # like DPO; all weights: TRL

    reference: Flat[ReferenceConfig] = field(default_factory=ReferenceConfig)

    loss_type: Common[Literal["kto", "apo_zero_unpaired"]] = "kto"
    """apo_zero_unpaired: fix the reference point at zero, without mismatched rows."""
    beta: Common[float] = 0.1
    """Strength of the penalty for deviating from the reference."""
    desirable_weight: Common[float] = 1.0
    """Weight of desirable rows. Weight x rows of desirable to undesirable rows should be between 1 and 4/3."""
    undesirable_weight: Common[float] = 1.0
    """Weight of undesirable rows. Change one of the two weights, not both."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, {"above 0": "beta", "0 or above": "desirable_weight undesirable_weight"})
        if self.run.sequences_per_step < 2:
            raise UserError(
                "per_device_train_batch_size=1: KTO needs at least 2 rows per step for its reference point; set "
                "gradient_accumulation_steps=2, for example"
            )


def train(cfg: Config) -> None:
    with open_run(cfg, cfg.run.method) as run:
        policy = open_policy(cfg, with_reference=wants_copy(cfg.reference, cfg.lora))
        rows, held_out = train_and_held_out(cfg.data, cfg.run.seed, partial(load_rows, cfg, policy))
        held_out = held_out[: cfg.data.max_eval_rows]
        partners: Sequence[Item] = []
        held_out_partners: Sequence[Item] = []
        if cfg.loss_type == "kto":  # --loss-type apo_zero_unpaired: no mismatched rows, z0 = 0
            partners = Mismatched(cfg, policy, rows)
            held_out_partners = Mismatched(cfg, policy, held_out, cfg.data.held_out_by)
        items = []
        if cfg.reference.ref == "precomputed":
            items = [*(item_of(row) for row in [*rows, *held_out]), *partners, *held_out_partners]
        reference = build_reference(cfg.reference, cfg.model, cfg.run, policy, items, cfg.parallel)
        shard = indices_of_this_rank(held_out)
        eval_partners = [held_out_partners[i] for i in shard] if held_out_partners else []
        evaluate = partial(evaluate_rows, cfg, policy, reference, eval_partners, [held_out[i] for i in shard])
        source = Rows(cfg, rows)
        training = Training(run, cfg, policy, source, evaluate=evaluate)
        for batch in training.steps():  # this rank's rows
            mismatched = [partners[number] for number in source.numbers] if partners else []
            packed = pack_labelled(cfg, policy, batch, mismatched, cfg.run.gradient_accumulation_steps)
            sums, _ = run_rows(cfg, policy, reference, packed, train=True)
            training.clip_and_step(sums)
            training.log(sums, sum(mb.num_tokens for mb in packed.batches))


def sequence_logps(
    policy: Policy, reference: Reference, batch: Batch, items: list[Item]
) -> tuple[Tensor, Tensor, Tensor]:  # (S,) policy, (S,) reference, (N,) entropy
    """Log-probs of the sequences of a batch, in the order of batch.rows."""
    logp, entropy = token_logps(policy, batch)
    ref_logp = reference.token_logps(batch, items)
    zeros = logp.new_zeros(len(batch.rows), dtype=torch.float64)  # in float32 the order of additions matters
    total, ref_total = (zeros.index_add(0, batch.slot, values.to(zeros.dtype)) for values in (logp, ref_logp))
    return total, ref_total, entropy


@torch.no_grad()
def reference_point(policy: Policy, reference: Reference, rows: LabelledStep) -> Tensor:  # ()
    """z0 estimates KL(policy || reference): the mean log-ratio of the mismatched rows of all ranks, at least 0.

    The mean is clamped, not its terms: clamping per rank or micro-batch would bias it upwards. Without mismatched
    rows it is 0 (--loss-type apo_zero_unpaired; D'Oosterlinck et al. 2024, arXiv:2408.06266).
    """
    items = rows.items[len(rows.label) :]
    ratios = [torch.zeros(0, dtype=torch.float64, device=policy.device)]  # on every rank, also without rows
    for batch in rows.mismatched:
        logp, ref_logp, _ = sequence_logps(policy, reference, batch, items)
        ratios.append(logp - ref_logp)
    ratio = torch.cat(ratios)  # (B,) one mismatched row per row
    total, count = all_sum(torch.stack([ratio.sum(), ratio.new_full((), len(ratio))]))
    return (total / count.clamp(min=1)).clamp(min=0)


def run_rows(
    cfg: Config, policy: Policy, reference: Reference, rows: LabelledStep, *, train: bool
) -> tuple[MetricSums, Tensor]:  # metrics, and (B,) rewards in row order
    """Loss, metrics and (train) gradients of one step: z0 first, then every micro-batch against it."""
    z0 = reference_point(policy, reference, rows)
    num_rows = all_sum(torch.full((), float(len(rows.label)), device=policy.device))  # of the step, all ranks
    sums = MetricSums()
    rewards = torch.zeros(len(rows.label), dtype=torch.float64, device=policy.device)
    for batch in final_passes(policy, rows.batches) if train else rows.batches:
        logp, ref_logp, entropy = sequence_logps(policy, reference, batch, rows.items)  # (S,), (S,), (N,)
        index = to_device(torch.tensor(batch.rows, dtype=torch.int64), policy.device)  # (S,)
        loss, metrics = sequence_losses(cfg, logp, ref_logp, rows.label[index], z0)
        total = loss.sum() / num_rows.clamp(min=1)
        if train:
            total.backward()
        rewards[index] = (cfg.beta * (logp - ref_logp)).detach().double()
        count = len(logp)
        sums.add({**metrics, f"loss/{cfg.loss_type}": (loss.sum(), count), "loss/total": (total * num_rows, count)})
        sums.add({"policy/kto_z0": (z0 * count, count), "policy/entropy": (entropy.sum(), len(entropy))})
    return sums, rewards


def sequence_losses(
    cfg: Config,
    logp: Tensor,  # (S,) policy, with gradient
    ref_logp: Tensor,  # (S,) reference
    label: Tensor,  # (S,) bool, True = desirable
    z0: Tensor,  # ()
) -> tuple[Tensor, Metrics]:  # (S,)
    x = logp - ref_logp
    # Desirable: 1 - sigmoid(beta (x - z0)); undesirable: 1 - sigmoid(beta (z0 - x)).
    loss = torch.sigmoid(cfg.beta * torch.where(label, z0 - x, x - z0))
    loss = torch.where(label, cfg.desirable_weight * loss, cfg.undesirable_weight * loss)
    metrics: Metrics = {}
    for side, rows in (("chosen", label), ("rejected", ~label)):  # either may be missing from a micro-batch
        metrics[f"reward/{side}"] = (torch.where(rows, cfg.beta * x.detach(), 0.0).sum(), rows.sum())
        metrics[f"policy/logp_{side}"] = (torch.where(rows, logp.detach(), 0.0).sum(), rows.sum())
    return loss, metrics


def evaluate_rows(
    cfg: Config, policy: Policy, reference: Reference, mismatched: Sequence[Item], rows: list[Labelled]
) -> dict[str, float]:
    """The same loss on held-out rows, and how well the implicit reward separates the two labels (AUC)."""
    packed = pack_labelled(cfg, policy, rows, mismatched, accumulation=1)
    sums, rewards = run_rows(cfg, policy, reference, packed, train=False)
    means = sums.means()
    kept = {f"eval/{name}": means[name] for name in ("reward/chosen", "reward/rejected") if name in means}
    all_rewards = torch.cat(all_gather(rewards, "held-out rewards"))
    all_labels = torch.cat(all_gather(packed.label.long(), "held-out labels")).bool()
    auc = reward_auc(all_rewards, all_labels).item()
    return {"eval/loss": means["loss/total"], "eval/reward/auc": auc, **kept, "eval/rows": all_count(len(rows))}
