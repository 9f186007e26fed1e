"""Options of the DPO family (trainer/methods/{dpo,ipo,online_dpo}.py): flags, and which of them go together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from data.errors import UserError
from losses.preference import DIVERGENCE_LOSSES, PAIR_LOSSES
from losses.types import options_of
from trainer.config.blocks import Flat, MovingReferenceConfig, ReferenceConfig
from trainer.config.checks import check_numbers, reject_unused

PairLossType = Literal[
    "sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot",
    "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PairOptions:
    """The pair loss and its reference."""

    reference: Flat[ReferenceConfig] = field(default_factory=ReferenceConfig)
    moving: Flat[MovingReferenceConfig] = field(default_factory=MovingReferenceConfig)

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

    @property
    def losses(self) -> tuple[tuple[str, ...], tuple[float, ...]]:
        """Names and weights of the losses, RPO's term included."""
        names, weights = self.loss_type, self.loss_weights or (1.0,) * len(self.loss_type)
        return (names, weights) if self.rpo_alpha is None else ((*names, "sft"), (*weights, self.rpo_alpha))


def check_pair_options(cfg: Any) -> None:
    """Refuse contradictions and options without effect; `cfg` is a Config with PairOptions."""
    names = cfg.loss_type
    used = frozenset().union(*(options_of(PAIR_LOSSES[name]) for name in names if name != "sft"))
    if not names or len(set(names)) < len(names):
        raise UserError(f"loss_type={' '.join(names)}: name at least one loss, each once")
    if cfg.loss_weights and len(cfg.loss_weights) != len(names):
        raise UserError(f"loss_weights: {len(cfg.loss_weights)} weights for {len(names)} losses; give one each")
    if not 0.0 <= cfg.label_smoothing < 0.5:
        raise UserError(f"label_smoothing={cfg.label_smoothing}: must be in [0, 0.5), 0.5 or more inverts the label")
    if cfg.label_smoothing > 0 and "label_smoothing" not in used:
        raise UserError(f"label_smoothing={cfg.label_smoothing}: has no effect on {' '.join(names)}")
    if "exo_pair" in names and cfg.label_smoothing == 0:
        raise UserError("label_smoothing=0.0: exo_pair needs it above 0; use 1e-3")
    if cfg.f_divergence_type != "reverse_kl" and not set(names) <= DIVERGENCE_LOSSES:
        raise UserError(f"f_divergence_type={cfg.f_divergence_type}: not defined for loss_type={' '.join(names)}")
    if cfg.use_weighting and {"aot", "aot_unpaired"} & set(names):
        raise UserError("use_weighting: aot sorts responses apart from their pairs; there is no pair to weigh")
    if cfg.rpo_alpha is not None and "sft" in names:
        raise UserError(f"rpo_alpha={cfg.rpo_alpha}: loss_type holds sft already; weigh it with loss_weights")
    if cfg.reference_free and cfg.reference != ReferenceConfig():
        raise UserError("reference_free: ref, ref_model and ref_cache have no effect with it; leave them out")
    fixed = cfg.reference_free or cfg.reference.ref == "precomputed" or cfg.reference.ref_model
    if cfg.moving.sync_ref_model and (cfg.lora.r > 0 or fixed):
        raise UserError(
            "sync_ref_model=True: no copy to move with LoRA, ref_model, ref=precomputed or reference_free; leave it "
            "out, or train all weights with --ref copy"
        )
    check_numbers(
        cfg,
        {
            "above 0": "beta discopop_tau",
            "between 0 and 1": "ld_alpha",
        },
    )
    alpha = "f_divergence_type=alpha_divergence"
    for needs, is_given, names_of in (
        (alpha, cfg.f_divergence_type == "alpha_divergence", ("f_alpha_divergence_coef",)),
        ("loss_type=discopop", "discopop" in names, ("discopop_tau",)),
    ):
        if not is_given:
            reject_unused(cfg, f"without {needs}", names_of)
    # Methods that sample make one pair of a prompt.
    num_pairs = getattr(cfg, "prompts_per_step", cfg.run.sequences_per_step)
    if {"aot", "aot_unpaired"} & set(names) and num_pairs < 2:
        per_device = cfg.run.per_device_train_batch_size
        raise UserError(f"per_device_train_batch_size={per_device}: aot sorts over a step; use at least 2 pairs")
