"""Options of the DPO family (trainer/methods/{dpo,ipo}.py): names of the pair losses, and which options go together."""

from __future__ import annotations

from typing import Any, Literal

from losses.preference import DIVERGENCE_LOSSES, PAIR_LOSSES
from losses.types import options_of
from trainer.config.blocks import ReferenceConfig
from trainer.config.checks import check_numbers, refuse_idle

PairLossType = Literal[
    "sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot",
    "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft",
]  # fmt: skip


def check_pair_options(cfg: Any) -> None:
    """Refuse contradictions and options without effect; `cfg` is the Config of trainer/methods/dpo.py or a subclass."""
    names = cfg.loss_type
    used = frozenset().union(*(options_of(PAIR_LOSSES[name]) for name in names if name != "sft"))
    if not names or len(set(names)) < len(names):
        raise ValueError(f"loss_type={' '.join(names)}: name at least one loss, each once")
    if cfg.loss_weights and len(cfg.loss_weights) != len(names):
        raise ValueError(f"loss_weights: {len(cfg.loss_weights)} weights for {len(names)} losses; give one each")
    if not 0.0 <= cfg.label_smoothing < 0.5:
        raise ValueError(f"label_smoothing={cfg.label_smoothing}: must be in [0, 0.5), 0.5 or more inverts the label")
    if cfg.label_smoothing > 0 and "label_smoothing" not in used:
        raise ValueError(f"label_smoothing={cfg.label_smoothing}: has no effect on {' '.join(names)}")
    if "exo_pair" in names and cfg.label_smoothing == 0:
        raise ValueError("label_smoothing=0.0: exo_pair needs it above 0; use 1e-3")
    if cfg.f_divergence_type != "reverse_kl" and not set(names) <= DIVERGENCE_LOSSES:
        raise ValueError(f"f_divergence_type={cfg.f_divergence_type}: not defined for loss_type={' '.join(names)}")
    if cfg.use_weighting and {"aot", "aot_unpaired"} & set(names):
        raise ValueError("use_weighting: aot sorts responses apart from their pairs; there is no pair to weigh")
    if cfg.rpo_alpha is not None and "sft" in names:
        raise ValueError(f"rpo_alpha={cfg.rpo_alpha}: loss_type holds sft already; weigh it with loss_weights")
    if cfg.reference_free and cfg.reference != ReferenceConfig():
        raise ValueError("reference_free: ref, ref_model and ref_cache have no effect with it; leave them out")
    fixed = cfg.reference_free or cfg.reference.ref == "precomputed" or cfg.reference.ref_model
    if cfg.moving.sync_ref_model and (cfg.lora.r > 0 or fixed):
        raise ValueError("sync_ref_model: no copy to move with LoRA, ref_model, ref=precomputed or reference_free")
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
            refuse_idle(cfg, f"without {needs}", names_of)
    if {"aot", "aot_unpaired"} & set(names) and cfg.run.sequences_per_step < 2:
        raise ValueError("per_device_train_batch_size=1: aot sorts over a step; use at least 2 pairs")
