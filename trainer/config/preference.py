"""Flags of the DPO family: trainer/methods/{dpo,ipo,online_dpo}.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from data.command.checks import check_numbers, reject_unused
from data.command.flags import Common
from data.errors import UserError
from losses.preference import DIVERGENCE_LOSSES, PAIR_LOSSES
from losses.types import options_of
from trainer.config.blocks import Flat, LoraConfig, MovingReferenceConfig, ReferenceConfig, RunConfig

PairLossType = Literal[
    "sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot",
    "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PairOptions:
    """The pair loss and its reference."""

    reference: Flat[ReferenceConfig] = field(default_factory=ReferenceConfig)
    moving: Flat[MovingReferenceConfig] = field(default_factory=MovingReferenceConfig)

    loss_type: Common[tuple[PairLossType, ...]] = ("sigmoid",)
    """Pair loss; several losses are added with loss_weights (MPO: sigmoid bco_pair sft)."""
    loss_weights: tuple[float, ...] = ()
    """One weight per loss_type. Default: all 1."""
    beta: Common[float] = 0.1
    """Strength of the penalty for deviating from the reference (tau in IPO)."""
    label_smoothing: Common[float] = 0.0
    """Assumed probability that a label is flipped: cDPO with sigmoid; also used by robust and exo_pair."""
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = "reverse_kl"
    """Divergence whose log-ratios are compared."""
    f_alpha_divergence_coef: float = 0.5
    """Alpha of alpha_divergence."""
    discopop_tau: float = 0.05
    """Temperature of discopop."""
    reference_free: bool = False
    """Compare the policy's log-probs directly; no reference is loaded."""
    ld_alpha: float | None = None
    """LD-DPO: weight of tokens beyond the length of the shorter response. None: off; 1: no change."""
    use_weighting: bool = False
    """WPO: weight each pair by its probability under the policy."""
    rpo_alpha: Common[float | None] = None
    """RPO: weight of the negative log-likelihood of the chosen response per token. None: off."""

    @property
    def losses(self) -> tuple[tuple[str, ...], tuple[float, ...]]:
        """Names and weights of the losses, including RPO's term."""
        names, weights = self.loss_type, self.loss_weights or (1.0,) * len(self.loss_type)
        return (names, weights) if self.rpo_alpha is None else ((*names, "sft"), (*weights, self.rpo_alpha))


def check_pair_options(cfg: PairOptions, *, lora: LoraConfig, run: RunConfig, num_pairs: int) -> None:
    """Reject contradictions and options without effect; `num_pairs`: pairs per step."""
    names = cfg.loss_type
    used = frozenset().union(*(options_of(PAIR_LOSSES[name]) for name in names if name != "sft"))
    losses = f"loss_type={' '.join(names)}"
    if not names or len(set(names)) < len(names):
        raise UserError(f"{losses}: name at least one loss, each once")
    if cfg.loss_weights and len(cfg.loss_weights) != len(names):
        raise UserError(f"loss_weights: {len(cfg.loss_weights)} weights for {len(names)} losses; set one per loss")
    if not 0.0 <= cfg.label_smoothing < 0.5:
        raise UserError(f"label_smoothing={cfg.label_smoothing}: must be in [0, 0.5); 0.5 or more inverts the label")
    if cfg.label_smoothing > 0 and "label_smoothing" not in used:
        raise UserError(f"label_smoothing={cfg.label_smoothing}: has no effect with {losses}; remove --label-smoothing")
    if "exo_pair" in names and cfg.label_smoothing == 0:
        raise UserError("label_smoothing=0.0: must be above 0 with loss_type=exo_pair; use 1e-3")
    if cfg.f_divergence_type != "reverse_kl" and not set(names) <= DIVERGENCE_LOSSES:
        raise UserError(f"f_divergence_type={cfg.f_divergence_type}: not defined for {losses}")
    is_sorted = bool({"aot", "aot_unpaired"} & set(names))
    if cfg.use_weighting and is_sorted:
        raise UserError(f"use_weighting=True: {losses} sorts responses without their pairs, so no pair can be weighted")
    if cfg.rpo_alpha is not None and "sft" in names:
        raise UserError(f"rpo_alpha={cfg.rpo_alpha}: loss_type contains sft already; weight it with --loss-weights")
    if cfg.reference_free:
        reject_unused(cfg.reference, "with reference_free=True")
    is_fixed = cfg.reference_free or cfg.reference.ref == "precomputed" or cfg.reference.ref_model
    if cfg.moving.sync_ref_model and (lora.r > 0 or is_fixed):
        raise UserError(
            "sync_ref_model=True: there is no copy to update with LoRA, ref_model, ref=precomputed or reference_free; "
            "train all weights with --ref copy, or remove --sync-ref-model"
        )
    check_numbers(cfg, {"above 0": "beta discopop_tau", "between 0 and 1": "ld_alpha"})
    if cfg.f_divergence_type != "alpha_divergence":
        reject_unused(cfg, "without f_divergence_type=alpha_divergence", ("f_alpha_divergence_coef",))
    if "discopop" not in names:
        reject_unused(cfg, "without loss_type=discopop", ("discopop_tau",))
    if is_sorted and num_pairs < 2:
        raise UserError(
            f"per_device_train_batch_size={run.per_device_train_batch_size}: {losses} sorts over a step; use at least "
            "2 pairs"
        )
