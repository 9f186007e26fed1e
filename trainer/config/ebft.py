"""Flags of energy-based fine-tuning: features, rewards, advantages, and the two modes."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Literal

from data.errors import UserError
from data.format_options import FormatOptions
from data.strided import StridedPlan
from losses.ebft import layer_indices
from trainer.config.blocks import Flat, check_evaluation, refuse_offline_only
from trainer.config.checks import check_numbers, reject_unused
from trainer.config.groups import PolicyGradientConfig


@dataclass(frozen=True, kw_only=True)
class FeatureConfig:
    """The feature network, and the rewards and advantages computed from its features."""

    feature_model: str | None = None
    """Model of the feature network, in any form --model takes; None: the initial weights of this run."""
    feature_layers: tuple[float, ...] = (0.25, 0.5, 0.75)
    """Blocks whose outputs are the features, as fractions of the depth; their outputs are concatenated."""
    feature_norm: Literal["token", "layer", "none"] = "token"
    """What is scaled to length 1 before pooling: the vector of a token, each block's part of it, or nothing."""
    embed_method: Literal["last_token", "mean_pooling", "completion_mean", "concat"] = "last_token"
    (
        "How a sequence becomes one vector: its last token, the mean over prompt and completion, the mean over the "
        "completion, or its three quarter points concatenated. In strided mode the sequence is the block, and both "
        "means are equal."
    )
    use_whitening: bool = False
    """Whiten features by the rollouts of their prompt. Diversity then only penalizes equal rollouts."""
    whiten_gt: Literal["feature", "sample"] = "feature"
    """How the true completion is whitened: in feature space as in the paper, or as in the authors' code (sample)."""
    alignment: Literal["cosine", "dot"] = "cosine"
    """Similarity to the true completion: cosine, or dot product, whose expected gradient is that of the distance."""
    alignment_coef: float = 1.0
    """Weight of the similarity to the true completion."""
    diversity_coef: float = 1.0
    """Weight of the penalty for similarity to the other rollouts."""
    rl_coef: float = 1.0
    """Weight of the policy loss."""
    ce_coef: float = 0.0
    """Weight of the cross-entropy on the true completion (0.03 in the paper). 0: not computed."""
    advantage_estimator: Literal["rloo_split", "rloo", "grpo", "reinforce"] = "rloo_split"
    (
        "How rewards become advantages. rloo: reward minus the mean of the others; rloo_split: the same for each part "
        "of the reward, the authors' unbiased estimator; grpo: reward minus the group mean, divided by the standard "
        "deviation; reinforce: the reward itself."
    )

    def __post_init__(self) -> None:
        layer_indices(self.feature_layers, 1)  # validates the fractions
        check_numbers(self, {"0 or above": "alignment_coef diversity_coef rl_coef ce_coef"})
        if self.rl_coef == 0 and self.ce_coef == 0:
            raise UserError("rl_coef=0, ce_coef=0: there is nothing to learn from; set one of them")
        if self.alignment_coef == 0 and self.diversity_coef == 0 and self.rl_coef > 0:
            raise UserError("alignment_coef=0, diversity_coef=0: every reward is 0; set one of them, or rl_coef=0")
        if not self.use_whitening:
            reject_unused(self, "without whitening; set --use-whitening", ("whiten_gt",))

    def check_rollouts(self, name: str, count: int) -> None:
        """Refuse settings that need more than this many rollouts per prompt."""
        if count < 1:
            raise UserError(f"{name}={count}: must be 1 or more")
        if count > 1:
            return
        if self.advantage_estimator != "reinforce":
            raise UserError(
                f"{name}=1: advantage_estimator={self.advantage_estimator} compares the rollouts of a prompt; draw 2 "
                "or more, or use --advantage-estimator reinforce"
            )
        if self.diversity_coef not in (0.0, FeatureConfig.diversity_coef):
            raise UserError(
                f"diversity_coef={self.diversity_coef}: has no effect with {name}=1, a rollout has no others to differ "
                "from; leave it out"
            )
        if self.use_whitening:
            raise UserError(
                f"{name}=1: use_whitening scales by how the rollouts of a prompt differ; draw 2 or more, or leave it "
                "off"
            )


@dataclass(frozen=True, kw_only=True)
class StridedConfig:
    """Strided mode: where documents are continued, and with how many samples."""

    stride: int = 8
    """Strided: tokens from one anchor to the next."""
    context_length: int = 8
    """Strided: tokens before the first anchor. Later anchors see the whole document before them."""
    generate_max_len: int = 8
    """Strided: tokens of a continuation. The end-of-text token does not end it."""
    n_samples_per_prompt: int = 4
    """Strided: continuations sampled per anchor."""
    min_completion_prefix: int = 0
    """Strided: tokens between the prompt of a document and its first anchor. No effect without a prompt."""
    max_length: int = 1024
    """Strided: most tokens of a document. Longer ones are cut on the right, and the count is logged."""

    def __post_init__(self) -> None:
        _ = self.plan  # validates the numbers
        if self.max_length < self.context_length + self.generate_max_len:
            raise UserError(
                f"max_length={self.max_length}: has no room for context_length + generate_max_len = "
                f"{self.context_length + self.generate_max_len} tokens; raise it"
            )

    @property
    def plan(self) -> StridedPlan:
        names = {field.name for field in dataclasses.fields(StridedPlan)}
        return StridedPlan(**{name: value for name, value in vars(self).items() if name in names})


# What only structured mode reads: blocks, with the prefix of their flags, and single fields.
STRUCTURED_BLOCKS = {"format": "format.", "rollout": "rollout.", "vllm": "vllm.", "sync": "sync.", "policy_loss": "",
                     "correction": "", "overlap": "", "moving": ""}  # fmt: skip
STRUCTURED_FIELDS = ("num_generations", "max_prompt_length", "max_completion_length", "adaptive_max_tokens",
                     "gt_length_multiplier", "stop", "share_prompt", "num_iterations",
                     "minibatches_per_rollout", "num_generations_eval")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EbftConfig(PolicyGradientConfig):
    """Settings of both modes; those of the other mode are refused."""

    format: FormatOptions = field(default_factory=FormatOptions)
    features: Flat[FeatureConfig] = field(default_factory=FeatureConfig)
    strided: Flat[StridedConfig] = field(default_factory=StridedConfig)

    mode: Literal["structured", "strided"] = "structured"
    """What is sampled. structured: completions of prompts; strided: short continuations from many places of a text."""
    num_generations: int = 4
    """Structured: completions sampled per prompt; they form one group."""
    adaptive_max_tokens: bool = True
    """Structured: stop a completion at gt_length_multiplier times the length of the true one, at least 64 tokens."""
    gt_length_multiplier: float = 1.5
    """Structured: maximum length of a completion relative to the true one."""

    def __post_init__(self) -> None:
        check_evaluation(self.data, self.run)
        if self.parallel.context > 1:
            raise UserError(
                f"parallel.context={self.parallel.context}: EBFT takes features from whole rows and cannot split "
                "them over processes; leave it out"
            )
        self.check_temperature()
        if self.mode == "strided":
            why = "in mode=strided; leave it out"
            for name, prefix in STRUCTURED_BLOCKS.items():
                reject_unused(getattr(self, name), why, prefix=prefix)
            reject_unused(self, why, STRUCTURED_FIELDS)
            reject_unused(self.run, why, ("packing",))
            refuse_offline_only(self.model)
            self.features.check_rollouts("n_samples_per_prompt", self.strided.n_samples_per_prompt)
        else:
            reject_unused(self.strided, "in mode=structured; leave it out")
            self.features.check_rollouts("num_generations", self.num_generations)
            self.check_groups()
            self._check_structured()

    @property
    def has_reference(self) -> bool:
        return self.features.feature_model is None or self.policy_loss.beta > 0

    def _check_structured(self) -> None:
        if self.moving.sync_ref_model and self.policy_loss.beta == 0:
            raise UserError("sync_ref_model=True: there is no KL to a reference with beta=0; set --beta too")
        if self.moving.sync_ref_model and self.features.feature_model is None:
            raise UserError(
                "sync_ref_model=True: the reference is also the feature network, which must not move; name another "
                "with --feature-model"
            )
        if not 0.1 <= self.gt_length_multiplier < math.inf:
            raise UserError(f"gt_length_multiplier={self.gt_length_multiplier}: must be 0.1 or more")
        if not self.adaptive_max_tokens:
            reject_unused(self, "without adaptive_max_tokens", ("gt_length_multiplier",))
        why = "here, held-out groups are sampled as those of training are"
        reject_unused(self, why, ("num_generations_eval",))
        reject_unused(self.rollout, why, ("eval_temperature", "eval_top_p", "eval_top_k"), "rollout.")
        why = "here, every completion gets a reward from its features; leave it out"
        reject_unused(self.overlap, why, ("reroll_start_fraction",))
