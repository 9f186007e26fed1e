"""Flags of energy-based fine-tuning: features, rewards, advantages, and the two modes."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Literal

from data.command.checks import check_numbers, reject_unused
from data.command.flags import Common
from data.errors import UserError
from data.format_options import FormatOptions
from data.strided import StridedPlan
from losses.ebft import layer_indices
from trainer.config.blocks import Flat, check_evaluation, reject_offline_only
from trainer.config.groups import PolicyGradientConfig


@dataclass(frozen=True, kw_only=True)
class FeatureConfig:
    """The feature network, and rewards and advantages from its features."""

    feature_model: str | None = None
    """Feature network, in any form that --model accepts. None: the initial weights of this run."""
    feature_layers: Common[tuple[float, ...]] = (0.25, 0.5, 0.75)
    """Blocks whose outputs are concatenated into the features, as fractions of the depth."""
    feature_norm: Literal["token", "layer", "none"] = "token"
    """Scale to length 1 before pooling: the vector of a token, each block's slice of it, or nothing."""
    embed_method: Literal["last_token", "mean_pooling", "completion_mean", "concat"] = "last_token"
    (
        "Pooling of a sequence: its last token, the mean over prompt and completion, the mean over the completion, or "
        "its three quarter points concatenated. In strided mode the sequence is the block, and both means are equal."
    )
    use_whitening: bool = False
    """Whiten features over the rollouts of a prompt. Diversity then only penalizes identical rollouts."""
    whiten_gt: Literal["feature", "sample"] = "feature"
    """Whitening of the target completion: in feature space as in the paper, or as in the authors' code (sample)."""
    alignment: Literal["cosine", "dot"] = "cosine"
    """Similarity to the target completion: cosine, or dot, whose expected gradient equals the distance's."""
    alignment_coef: float = 1.0
    """Weight of the similarity to the target completion."""
    diversity_coef: float = 1.0
    """Weight of the penalty for similarity to other rollouts."""
    rl_coef: float = 1.0
    """Weight of the policy loss."""
    ce_coef: Common[float] = 0.0
    """Weight of the cross-entropy on the target completion (paper: 0.03). 0: off."""
    advantage_estimator: Literal["rloo_split", "rloo", "grpo", "reinforce"] = "rloo_split"
    (
        "How rewards become advantages. rloo: reward minus the mean of the other rollouts; rloo_split: the same for "
        "each term of the reward, the authors' unbiased estimator; grpo: reward minus the group mean, divided by the "
        "standard deviation; reinforce: the reward."
    )

    def __post_init__(self) -> None:
        layer_indices(self.feature_layers, 1)  # validates the fractions
        check_numbers(self, {"0 or above": "alignment_coef diversity_coef rl_coef ce_coef"})
        if self.rl_coef == 0 and self.ce_coef == 0:
            raise UserError("rl_coef=0, ce_coef=0: the loss is always 0; set one of them")
        if self.alignment_coef == 0 and self.diversity_coef == 0 and self.rl_coef > 0:
            raise UserError("alignment_coef=0, diversity_coef=0: every reward is 0; set one of them, or rl_coef=0")
        if not self.use_whitening:
            reject_unused(self, "without --use-whitening", ("whiten_gt",))

    def check_rollouts(self, name: str, count: int) -> None:
        """Reject settings that need more than this many rollouts per prompt."""
        if count < 1:
            raise UserError(f"{name}={count}: must be 1 or more")
        if count > 1:
            return
        if self.advantage_estimator != "reinforce":
            raise UserError(
                f"{name}=1: advantage_estimator={self.advantage_estimator} compares the rollouts of a prompt; use 2 "
                "or more, or --advantage-estimator reinforce"
            )
        if self.diversity_coef not in (0.0, FeatureConfig.diversity_coef):
            raise UserError(f"diversity_coef={self.diversity_coef}: has no effect with {name}=1")
        if self.use_whitening:
            raise UserError(f"{name}=1: use_whitening needs the variance over rollouts of a prompt; use 2 or more")


@dataclass(frozen=True, kw_only=True)
class StridedConfig:
    """Strided mode: the anchors in a document, and the continuations sampled from them."""

    stride: Common[int] = 8
    """Strided: tokens between anchors."""
    context_length: int = 8
    """Strided: tokens before the first anchor. Later anchors see the whole document before them."""
    generate_max_len: Common[int] = 8
    """Strided: tokens per continuation, even after an end-of-text token."""
    n_samples_per_prompt: Common[int] = 4
    """Strided: continuations sampled per anchor."""
    min_completion_prefix: int = 0
    """Strided: tokens between the prompt of a document and its first anchor. No effect without a prompt."""
    max_length: Common[int] = 1024
    """Strided: maximum tokens per document. Longer documents are truncated on the right; the count is logged."""

    def __post_init__(self) -> None:
        _ = self.plan  # validates the numbers
        if self.max_length < self.context_length + self.generate_max_len:
            raise UserError(
                f"max_length={self.max_length}: must be at least context_length + generate_max_len = "
                f"{self.context_length + self.generate_max_len}"
            )

    @property
    def plan(self) -> StridedPlan:
        names = {field.name for field in dataclasses.fields(StridedPlan)}
        return StridedPlan(**{name: value for name, value in vars(self).items() if name in names})


# Settings of structured mode only: blocks with their prefix, and single fields.
STRUCTURED_BLOCKS = {"format": "format.", "rollout": "rollout.", "vllm": "vllm.", "sync": "sync.", "policy_loss": "",
                     "correction": "", "overlap": "", "moving": ""}  # fmt: skip
STRUCTURED_FIELDS = ("num_generations", "max_prompt_length", "max_completion_length", "adaptive_max_tokens",
                     "gt_length_multiplier", "stop", "share_prompt", "num_iterations",
                     "minibatches_per_rollout", "num_generations_eval")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EbftConfig(PolicyGradientConfig):
    """Flags of both modes; flags of the other mode are rejected."""

    format: FormatOptions = field(default_factory=FormatOptions)
    features: Flat[FeatureConfig] = field(default_factory=FeatureConfig)
    strided: Flat[StridedConfig] = field(default_factory=StridedConfig)

    mode: Common[Literal["structured", "strided"]] = "structured"
    """structured: sample completions of prompts; strided: sample short continuations from many positions of a text."""
    num_generations: Common[int] = 4
    """Structured: completions sampled per prompt; they form one group."""
    adaptive_max_tokens: bool = True
    """Structured: stop a completion at gt_length_multiplier times the target's length, at least 64 tokens."""
    gt_length_multiplier: float = 1.5
    """Structured: maximum length of a completion relative to the target completion."""

    def __post_init__(self) -> None:
        check_evaluation(self.data, self.run)
        if self.parallel.context > 1:
            raise UserError(
                f"parallel.context={self.parallel.context}: not supported with ebft, whose features need whole rows"
            )
        self.check_temperature()
        if self.mode == "strided":
            why = "in mode=strided"
            for name, prefix in STRUCTURED_BLOCKS.items():
                reject_unused(getattr(self, name), why, prefix=prefix)
            reject_unused(self, why, STRUCTURED_FIELDS)
            reject_unused(self.run, why, ("packing",))
            reject_offline_only(self.model)
            self.features.check_rollouts("n_samples_per_prompt", self.strided.n_samples_per_prompt)
        else:
            reject_unused(self.strided, "in mode=structured")
            self.features.check_rollouts("num_generations", self.num_generations)
            self.check_groups()
            self._check_structured()

    @property
    def has_reference(self) -> bool:
        return self.features.feature_model is None or self.policy_loss.beta > 0

    def _check_structured(self) -> None:
        if self.moving.sync_ref_model and self.policy_loss.beta == 0:
            raise UserError("sync_ref_model=True: there is no KL to a reference with beta=0; set --beta")
        if self.moving.sync_ref_model and self.features.feature_model is None:
            raise UserError(
                "sync_ref_model=True: the reference is also the feature network, which must not change; set "
                "--feature-model"
            )
        if not 0.1 <= self.gt_length_multiplier < math.inf:
            raise UserError(f"gt_length_multiplier={self.gt_length_multiplier}: must be 0.1 or more")
        if not self.adaptive_max_tokens:
            reject_unused(self, "without --adaptive-max-tokens", ("gt_length_multiplier",))
        why = "here, because held-out groups are sampled like training groups"
        reject_unused(self, why, ("num_generations_eval",))
        reject_unused(self.rollout, why, ("eval_temperature", "eval_top_p", "eval_top_k"), "rollout.")
        why = "here, because every completion gets a reward from its features"
        reject_unused(self.overlap, why, ("reroll_start_fraction",))
