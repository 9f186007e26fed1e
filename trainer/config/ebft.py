"""Flags of energy-based fine-tuning: features, rewards, advantages, and the two modes."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from data.format_options import FormatOptions
from data.strided import StridedPlan
from losses.ebft import layer_indices
from rollout.servers.options import SyncConfig, VllmConfig
from trainer.config.blocks import (
    DataConfig,
    Flat,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RolloutConfig,
    RunConfig,
    check_engine,
    check_evaluation,
)  # fmt: skip
from trainer.config.groups import AdvantageConfig, AsyncConfig, check_overlap
from trainer.config.policy import CorrectionConfig, PolicyLossConfig, check_policy_options


@dataclass(frozen=True, kw_only=True)
class FeatureConfig:
    """The feature network, and the rewards and advantages computed from its features."""

    feature_model: str | None = None
    """Model of the feature network, in any form --model takes; None: the initial weights of this run."""
    feature_layers: tuple[float, ...] = (0.25, 0.5, 0.75)
    """Blocks whose outputs are the features, as fractions of the depth; their outputs are concatenated."""
    feature_norm: Literal["token", "layer", "none"] = "token"
    """What is scaled to length 1 before pooling: a token's whole vector, each block's part of it, or nothing."""
    embed_method: Literal["last_token", "mean_pooling", "completion_mean", "concat"] = "last_token"
    (
        "How a sequence becomes one vector: its last token, the mean over prompt and completion, the mean over the "
        "completion, or its three quarter points concatenated. In strided mode the sequence is the block, and both "
        "means are equal."
    )
    use_whitening: bool = False
    """Whiten features by the rollouts of their prompt; diversity then only penalizes equal rollouts."""
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
    """Weight of the cross-entropy on the true completion (0.03 in the paper); 0 skips it."""
    advantage_estimator: Literal["rloo_split", "rloo", "grpo", "reinforce"] = "rloo_split"
    (
        "rloo: reward minus the mean of the others; rloo_split: the same per part of the reward, the authors' unbiased "
        "estimator; grpo: reward minus the group mean, over the standard deviation; reinforce: the reward itself."
    )

    def __post_init__(self) -> None:
        layer_indices(self.feature_layers, 1)  # validates the fractions
        for name in ("alignment_coef", "diversity_coef", "rl_coef", "ce_coef"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: must be 0 or above")
        if self.rl_coef == 0 and self.ce_coef == 0:
            raise ValueError("rl_coef=0, ce_coef=0: there is nothing to learn from; set one of them")
        if self.alignment_coef == 0 and self.diversity_coef == 0 and self.rl_coef > 0:
            raise ValueError("alignment_coef=0, diversity_coef=0: every reward is 0; set one of them, or rl_coef=0")
        if self.whiten_gt != FeatureConfig.whiten_gt and not self.use_whitening:
            raise ValueError(f"whiten_gt={self.whiten_gt}: has no effect without whitening; set --use-whitening")

    def check_rollouts(self, name: str, count: int) -> None:
        """Refuse settings that need more than this many rollouts per prompt."""
        if count < 1:
            raise ValueError(f"{name}={count}: must be 1 or more")
        if count > 1:
            return
        if self.advantage_estimator != "reinforce":
            raise ValueError(
                f"{name}=1: advantage_estimator={self.advantage_estimator} compares the rollouts of a prompt; draw 2 "
                "or more, or use --advantage-estimator reinforce"
            )
        if self.diversity_coef not in (0.0, FeatureConfig.diversity_coef):
            raise ValueError(
                f"diversity_coef={self.diversity_coef}: has no effect with {name}=1, a rollout has no others to differ "
                "from; leave it out"
            )
        if self.use_whitening:
            raise ValueError(
                f"{name}=1: use_whitening scales by how the rollouts of a prompt differ; draw 2 or more, or leave it "
                "off"
            )


@dataclass(frozen=True, kw_only=True)
class StridedConfig:
    """Strided mode: where documents are continued, and with how many samples."""

    stride: int = 8
    """Tokens from one anchor to the next."""
    context_length: int = 8
    """Tokens before the first anchor; later anchors see the whole document before them."""
    generate_max_len: int = 8
    """Tokens of a continuation; the end-of-text token does not end it."""
    n_samples_per_prompt: int = 4
    """Continuations of each anchor."""
    min_completion_prefix: int = 0
    """Tokens between the prompt of a document and its first anchor; no effect without a prompt."""
    max_length: int = 1024
    """Tokens of a document; longer ones are cut on the right, and counted."""

    def __post_init__(self) -> None:
        _ = self.plan  # validates the numbers
        if self.max_length < self.context_length + self.generate_max_len:
            raise ValueError(
                f"max_length={self.max_length}: has no room for context_length + generate_max_len = "
                f"{self.context_length + self.generate_max_len} tokens; raise it"
            )

    @property
    def plan(self) -> StridedPlan:
        names = {field.name for field in dataclasses.fields(StridedPlan)}
        return StridedPlan(**{name: value for name, value in vars(self).items() if name in names})


PREFIXED = ("format", "rollout", "vllm", "sync")  # blocks whose flags are prefixed with the block's name


def _default_of(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def refuse_idle(cfg: Any, names: tuple[str, ...], mode: str) -> None:
    """Refuse changed settings (blocks or single fields of a Config) that belong to the other mode."""
    defaults = {field.name: field for field in dataclasses.fields(cfg)}
    for name in names:
        value, field = getattr(cfg, name), defaults[name]
        if dataclasses.is_dataclass(value):
            prefix = f"{name}." if name in PREFIXED else ""
            fields = [
                (f"{prefix}{inner.name}", getattr(value, inner.name), _default_of(inner))
                for inner in dataclasses.fields(value)
            ]
        else:
            fields = [(name, value, _default_of(field))]
        for key, given, default in fields:
            if given != default:
                shown = " ".join(map(str, given)) if isinstance(given, tuple) else given
                raise ValueError(f"{key}={shown}: has no effect in mode={mode}; leave it out")


OF_STRUCTURED = (
    "format", "rollout", "vllm", "sync", "policy_loss", "correction", "overlap", "num_generations", "max_prompt_length",
    "max_completion_length", "adaptive_max_tokens", "gt_length_multiplier", "stop", "share_prompt", "num_iterations",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EbftConfig:
    """Settings of both modes; those of the other mode are refused."""

    model: Flat[ModelConfig]
    data: Flat[DataConfig]
    run: Flat[RunConfig] = field(default_factory=RunConfig)
    optim: Flat[OptimConfig] = field(default_factory=OptimConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    format: FormatOptions = field(default_factory=FormatOptions)
    features: Flat[FeatureConfig] = field(default_factory=FeatureConfig)
    strided: Flat[StridedConfig] = field(default_factory=StridedConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    policy_loss: Flat[PolicyLossConfig] = field(default_factory=PolicyLossConfig)
    correction: Flat[CorrectionConfig] = field(default_factory=CorrectionConfig)
    overlap: Flat[AsyncConfig] = field(default_factory=AsyncConfig)

    mode: Literal["structured", "strided"] = "structured"
    """structured: whole completions of prompts; strided: short continuations from many positions of a text."""
    temperature: float = 1.0
    """Sampling temperature, also of the log-probs in the loss (0.6 in the paper)."""
    num_generations: int = 4
    """Structured: completions per prompt."""
    max_prompt_length: int | None = None
    """Structured: longer prompts are left out, and counted; None keeps all."""
    max_completion_length: int = 256
    """Structured: maximum tokens of a completion; true completions are cut to it."""
    adaptive_max_tokens: bool = True
    """Structured: stop a completion at gt_length_multiplier times the length of the true one, at least 64 tokens."""
    gt_length_multiplier: float = 1.5
    """Structured: maximum length of a completion relative to the true one."""
    stop: tuple[str, ...] = ()
    """Structured: strings that end a completion, besides the model's own end tokens."""
    share_prompt: bool = True
    """Structured: compute a prompt once per group; the gradient is the same."""
    num_iterations: int = 1
    """Structured: optimizer steps taken on each batch of completions."""

    def __post_init__(self) -> None:
        check_evaluation(self.data, self.run)
        if self.parallel.context > 1:
            raise ValueError(
                f"parallel.context={self.parallel.context}: EBFT takes features from whole rows and cannot split "
                "them over processes; leave it out"
            )
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature}: must be above 0, a greedy group has nothing to compare")
        if self.mode == "strided":
            refuse_idle(self, OF_STRUCTURED, self.mode)
            if not self.run.packing:
                raise ValueError("packing=False: has no effect in mode=strided; leave it out")
            self.features.check_rollouts("n_samples_per_prompt", self.strided.n_samples_per_prompt)
        else:
            refuse_idle(self, ("strided",), self.mode)
            self.features.check_rollouts("num_generations", self.num_generations)
            check_engine(self.rollout, self.vllm, self.sync)
            check_overlap(self.overlap, self.rollout, self.sync, is_lora=self.lora.r > 0)
            check_policy_options(self.policy_loss, self.correction, num_iterations=self.num_iterations)
            self._check_structured()

    def _check_structured(self) -> None:
        for name in ("max_completion_length", "num_iterations"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be 1 or more")
        if not 0.1 <= self.gt_length_multiplier < math.inf:
            raise ValueError(f"gt_length_multiplier={self.gt_length_multiplier}: must be 0.1 or more")
        if not self.adaptive_max_tokens and self.gt_length_multiplier != EbftConfig.gt_length_multiplier:
            raise ValueError(
                f"gt_length_multiplier={self.gt_length_multiplier}: has no effect without adaptive_max_tokens"
            )
        for name in ("eval_temperature", "eval_top_p", "eval_top_k"):
            value = getattr(self.rollout, name)
            if value != getattr(RolloutConfig, name):
                raise ValueError(
                    f"rollout.{name}={value}: has no effect here, held-out groups are sampled as those of training are"
                )
        if self.overlap.reroll_start_fraction < 1:
            raise ValueError(
                f"reroll_start_fraction={self.overlap.reroll_start_fraction}: has no effect here, every "
                "completion gets a reward from its features; leave it out"
            )
        if "" in self.stop:
            raise ValueError("stop='': an empty stop string would end every completion; remove it")
        if self.run.sequences_per_step % self.num_generations:
            per_device = self.run.per_device_train_batch_size
            fitting = math.lcm(self.num_generations, per_device) // per_device
            raise ValueError(
                f"num_generations={self.num_generations}: per_device_train_batch_size x gradient_accumulation_steps = "
                f"{self.run.sequences_per_step} completions a step do not hold whole groups; use a multiple, for "
                f"example gradient_accumulation_steps={fitting}"
            )

    @property
    def advantage(self) -> AdvantageConfig:
        """Read by the code shared with GRPO; features are the only reward here."""
        return AdvantageConfig()

    @property
    def prompts_per_step(self) -> int:
        return self.run.sequences_per_step // self.num_generations
