"""Flags of methods that sample groups of completions: advantages, and how sampling and training overlap."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Annotated, ClassVar, Literal

import tyro

from data.command.checks import check_numbers, reject_unused
from data.command.flags import Common, default_of
from data.errors import UserError
from data.formats.template_settings import JsonObject
from data.hints import suggest
from data.user_code import find_record
from losses.advantage import ADVANTAGE_ESTIMATORS, Advantage, AdvantageEstimator, Rewards
from rollout.servers.options import SyncConfig, VllmConfig
from trainer.config.blocks import (
    Flat,
    MethodConfig,
    MovingReferenceConfig,
    RolloutConfig,
    check_engine,
    reject_offline_only,
)
from trainer.config.policy import CorrectionConfig, PolicyLossConfig, check_policy_options

ESTIMATOR_NAMES = f"{{{','.join(ADVANTAGE_ESTIMATORS)}}}|MODULE.FUNCTION"


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """From rewards to advantages."""

    record: ClassVar[AdvantageEstimator]  # set from advantage_estimator, not flags
    _estimate: ClassVar[partial[Advantage]]

    scale_rewards: Common[Literal["group", "batch", "none"] | bool] = "group"
    """Divide advantages by the standard deviation of the group (or true), of the batch, or not (none, or false)."""
    advantage_estimator: Annotated[str, tyro.conf.arg(metavar=ESTIMATOR_NAMES)] = "group"
    (
        "How rewards become advantages. group: reward minus the group mean; leave_one_out: minus the mean of the other "
        "completions (RLOO); normalize_then_sum: normalize each reward in its group, sum, normalize over the batch "
        "(GDPO); opo: minus the mean reward of a token; max_rl: (reward - mean) / mean (MaxRL); reinforce_plus_plus: "
        "normalize over all tokens of the batch, _baseline: minus the group mean first; or my_module.my_estimator."
    )
    advantage_kwargs: JsonObject = field(default_factory=dict)
    """Options of a custom estimator that are not flags, as a JSON object."""
    overlong_margin: int = 0
    """Length penalty (DAPO): a reward named overlong falls from 0 to -1 over this many last tokens. 0: off."""
    kl_in_reward: bool = False
    (
        "Subtract beta times the KL of a completion from its reward, instead of adding a KL term to the loss. This "
        "includes truncated completions, even if mask_truncated_completions masks them in the loss."
    )

    def __post_init__(self) -> None:
        if isinstance(self.scale_rewards, bool):  # as TRL and axolotl have it
            object.__setattr__(self, "scale_rewards", "group" if self.scale_rewards else "none")
        check_numbers(self, {"0 (off) or more": "overlong_margin"})
        self._resolve_estimator()

    def _resolve_estimator(self) -> None:
        """Bind the estimator's options; reject options that it ignores."""
        name = self.advantage_estimator
        record = find_record("advantage_estimator", name, ADVANTAGE_ESTIMATORS, AdvantageEstimator, "estimator")
        is_read = "scale_rewards" in record.options
        unscaled = ("none",) if name == "leave_one_out" else ()
        if not is_read and self.scale_rewards not in (AdvantageConfig.scale_rewards, *unscaled):
            raise UserError(f"scale_rewards={self.scale_rewards}: has no effect with advantage_estimator={name}")
        if self.kl_in_reward and not record.reads_total:
            raise UserError(
                f"kl_in_reward=True: advantage_estimator={name} needs rewards without a KL; remove the flag"
            )
        flags = {"scale_rewards": self.scale_rewards} if is_read else {}
        option = record.options.get("scale_rewards")
        if option is not None and option.default is not option.empty and self.scale_rewards == "group":
            flags = {}  # the flag is unset: a custom estimator may have a different default
        for key in self.advantage_kwargs:
            if key == "scale_rewards" or key not in record.options:
                advice = "use --scale-rewards" if key in record.options else suggest(key, record.options)
                raise UserError(f"advantage_kwargs.{key}: not an option of advantage_estimator={name}; {advice}")
        options = flags | self.advantage_kwargs
        missing = [key for key, p in record.options.items() if p.default is p.empty and key not in options]
        if missing:
            raise UserError(f"advantage_estimator={name}: needs {missing[0]}; set it in --advantage-kwargs")
        object.__setattr__(self, "record", record)
        object.__setattr__(self, "_estimate", partial(record.estimate, **options))

    @property
    def estimate(self) -> Callable[[Rewards], Advantage]:
        return self._estimate

    @property
    def is_default(self) -> bool:
        """True for (reward - group mean) / group standard deviation, which trainer/methods/grpo.py writes out."""
        return self._estimate.func is ADVANTAGE_ESTIMATORS["group"].estimate and self.scale_rewards == "group"


@dataclass(frozen=True, kw_only=True)
class AsyncConfig:
    """Overlap of sampling and training, and groups whose rewards are all equal."""

    async_prefetch: bool = False
    """Sample the next batches while training on the current batch. Needs vLLM servers on other GPUs."""
    prefetch_depth: int = 1
    """Batches sampled ahead of the batch in training; completions are at most this many rollouts old."""
    max_staleness: int | None = None
    (
        "Maximum optimizer steps between the weights that sample a batch and its first step. None: set by "
        "prefetch_depth; with --rollout.partial, no limit."
    )
    vllm_sync_interval: int = 1
    """Minimum optimizer steps between weight syncs to the servers, which run before a rollout."""
    streaming_partial_batch: bool = False
    """Compute rewards of groups as they arrive, while other groups are still being sampled."""
    streaming_min_groups: int = 1
    """Groups to reward together when streaming."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal by groups of other prompts (DAPO)."""
    dynamic_sampling_max_rounds: int = 3
    """Maximum rounds of replacement per batch; groups without signal after that stay in the batch."""
    replay_buffer_size: int = 0
    """Number of earlier groups to keep as replacements for groups whose rewards are all equal. 0: off."""
    replay_max_age: int = 100
    """Optimizer steps after which a replay group is dropped."""
    replay_recompute_logps: bool = True
    """Recompute the log-probs of a replayed group with current weights; otherwise clip against the old log-probs."""
    reroll_start_fraction: float = 1.0
    """Fraction of the run after which prompts that got no reward are sampled again. 1: never."""
    reroll_max_groups: int = 1
    """Maximum groups per batch for re-rolled prompts."""
    curriculum: str | None = None
    """A function that chooses rows: module.fn or FILE.py:fn(batch, prompts, rewards) -> row numbers to draw from."""

    def __post_init__(self) -> None:
        check_numbers(
            self,
            {
                "1 or more": "prefetch_depth vllm_sync_interval streaming_min_groups dynamic_sampling_max_rounds "
                "replay_max_age reroll_max_groups",
                "0 (off) or more": "replay_buffer_size",
                "between 0 and 1": "reroll_start_fraction",
                "0 or more": "max_staleness",
            },
        )
        for switch, is_on, names in (
            ("async_prefetch", self.async_prefetch, ("prefetch_depth",)),
            ("streaming_partial_batch", self.streaming_partial_batch, ("streaming_min_groups",)),
            ("dynamic_sampling", self.dynamic_sampling, ("dynamic_sampling_max_rounds",)),
            ("replay_buffer_size", self.replay_buffer_size, ("replay_max_age", "replay_recompute_logps")),
            ("reroll_start_fraction", self.reroll_start_fraction < 1, ("reroll_max_groups",)),
        ):
            if not is_on:
                reject_unused(self, f"without --{switch.replace('_', '-')}", names)

    def reroll_from(self, num_batches: int) -> int | None:
        """Return the index of the first batch that may contain re-rolled prompts."""
        return None if self.reroll_start_fraction == 1 else max(1, int(num_batches * self.reroll_start_fraction))


def check_overlap(overlap: AsyncConfig, rollout: RolloutConfig) -> None:
    """Reject settings that need servers with the local engine, and settings that contradict each other."""
    if rollout.engine == "local":
        for name in SERVER_FIELDS:
            if (value := getattr(overlap, name)) != getattr(AsyncConfig, name):
                raise UserError(
                    f"{name}={value}: needs servers, because the local engine shares the trainer's process and "
                    "weights; set --rollout.engine vllm"
                )
    if rollout.partial:
        why = "with --rollout.partial, because the groups of a batch arrive together"
        reject_unused(overlap, why, ("streaming_partial_batch",))
    elif not overlap.async_prefetch:
        reject_unused(overlap, "without --async-prefetch or --rollout.partial", ("max_staleness",))
    if overlap.max_staleness is not None and overlap.max_staleness < overlap.vllm_sync_interval - 1:
        raise UserError(
            f"max_staleness={overlap.max_staleness}: servers keep their weights for vllm_sync_interval="
            f"{overlap.vllm_sync_interval} steps, so completions are up to {overlap.vllm_sync_interval - 1} steps old"
        )


SERVER_FIELDS = ("async_prefetch", "vllm_sync_interval")  # settings of AsyncConfig that need servers


@dataclass(frozen=True, kw_only=True)
class GroupConfig(MethodConfig):
    """Base of all methods that sample completions."""

    # Shared code reads these. They are flags only in subclasses that declare them as fields.
    policy_loss = PolicyLossConfig()
    correction = CorrectionConfig()
    advantage = AdvantageConfig()
    top_k, top_p, min_p = 0, 1.0, 0.0
    exact_sampling = False

    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    overlap: Flat[AsyncConfig] = field(default_factory=AsyncConfig)
    moving: Flat[MovingReferenceConfig] = field(default_factory=MovingReferenceConfig)

    num_generations: Common[int] = 8
    """Completions sampled per prompt; they form one group."""
    num_generations_eval: int = 1
    """Completions sampled per held-out prompt. Above 1, also logs eval/reward/best_of_N, and needs sampling."""
    max_prompt_length: Common[int | None] = None
    """Skip longer prompts (tokens) and log how many. None: keep all."""
    max_completion_length: Common[int] = 256
    """Maximum tokens per completion, including tool output. EBFT also truncates target completions to it."""
    temperature: Common[float] = 1.0
    """Sampling temperature. The loss takes log-probs at the same temperature. EBFT paper: 0.6."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion, in addition to the model's end tokens."""
    num_iterations: int = 1
    """Optimizer steps per completion."""
    minibatches_per_rollout: int = 1
    (
        "Mini-batches per rollout: a rollout samples this many times the prompts of a step, and each mini-batch of "
        "groups is trained num_iterations times."
    )

    @property
    def prompts_per_step(self) -> int:
        return self.run.sequences_per_step // self.num_generations

    @property
    def prompts_per_rollout(self) -> int:
        return self.prompts_per_step * self.minibatches_per_rollout

    @property
    def queued_groups(self) -> int:
        """Partial rollouts: groups in flight in addition to those of a rollout."""
        return math.ceil(self.rollout.partial * self.prompts_per_rollout)

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps per rollout."""
        return self.minibatches_per_rollout * self.num_iterations

    @property
    def has_reference(self) -> bool:
        """Whether a reference model is loaded; a method that needs it for another purpose overrides this."""
        return self.policy_loss.beta > 0

    def check_temperature(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise UserError(
                f"temperature={self.temperature}: must be above 0; greedy completions of a prompt are identical"
            )

    def check_groups(self) -> None:
        """Check the blocks together, for a Config that samples with the engine."""
        self.check_temperature()
        reject_offline_only(self.model)
        check_numbers(
            self, {"1 or more": "max_completion_length num_iterations minibatches_per_rollout num_generations_eval"}
        )
        check_engine(self.rollout, self.vllm, self.sync, servers_asked(self))
        check_overlap(self.overlap, self.rollout)
        limit = self.overlap.max_staleness
        if self.rollout.partial and limit is not None and limit < self.steps_per_rollout:
            raise UserError(
                f"max_staleness={limit}: with rollout.partial={self.rollout.partial:g} a group may wait for the next "
                f"rollout, {self.steps_per_rollout} optimizer steps later; raise it to {self.steps_per_rollout} or more"
            )
        if self.sync.backend == "lora" and self.lora.r == 0:
            raise UserError("sync.backend=lora: all weights are trained, so there is no adapter to send; set --lora.r")
        if "" in self.stop:
            raise UserError("stop='': an empty stop string would end every completion; remove it")
        if self.run.sequences_per_step % self.num_generations:
            per_device = self.run.per_device_train_batch_size
            fitting = math.lcm(self.num_generations, per_device) // per_device
            raise UserError(
                f"num_generations={self.num_generations}: {self.run.sequences_per_step} completions per step (batch "
                "size x accumulation x ranks) is not a multiple of the group size; set "
                f"gradient_accumulation_steps={fitting}, for example"
            )


@dataclass(frozen=True, kw_only=True)
class PolicyGradientConfig(GroupConfig):
    """Base of the methods whose loss is in losses/policy.py."""

    policy_loss: Flat[PolicyLossConfig] = field(default_factory=PolicyLossConfig)
    correction: Flat[CorrectionConfig] = field(default_factory=CorrectionConfig)

    share_prompt: bool = True
    (
        "Compute a group's prompt once, and also what branches of an episode share; the gradient is the same. "
        "No effect without packing."
    )

    def check_groups(self) -> None:
        super().check_groups()
        check_policy_options(
            self.policy_loss,
            self.correction,
            num_iterations=self.num_iterations,
            minibatches=self.minibatches_per_rollout,
            kl_in_reward=self.advantage.kl_in_reward,
        )
        if self.moving.sync_ref_model and not self.has_reference:
            raise UserError("sync_ref_model=True: there is no reference to move with beta=0; set --beta")
        if self.moving.sync_ref_model and self.lora.r > 0:
            raise UserError("sync_ref_model=True: with LoRA the reference is the base model, which cannot move")


def servers_asked(cfg: GroupConfig) -> str | None:
    """Return the first setting that needs vLLM servers, as name=value, or None; rollout.engine=auto follows it."""
    for prefix, block in (("vllm.", cfg.vllm), ("sync.", cfg.sync)):
        for setting in fields(block):
            value = getattr(block, setting.name)
            if value != default_of(setting):
                return f"{prefix}{setting.name}={' '.join(map(str, value)) if isinstance(value, tuple) else value}"
    for name in SERVER_FIELDS:
        if (value := getattr(cfg.overlap, name)) != getattr(AsyncConfig, name):
            return f"{name}={value}"
    return None
