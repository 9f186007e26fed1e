"""Flags of methods that compare completions within groups: advantages, and how rollouts and training overlap.

GroupConfig has what any loss needs; sampling.py (GRPO and its relatives) and ebft.py extend PolicyGradientConfig.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Annotated, Any, Literal

import tyro

from data.command.flags import default_of
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
    refuse_offline_only,
)
from trainer.config.checks import check_numbers, reject_unused
from trainer.config.policy import CorrectionConfig, PolicyLossConfig, check_policy_options

ESTIMATOR_NAMES = f"{{{','.join(ADVANTAGE_ESTIMATORS)}}}|MODULE.FUNCTION"


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """From rewards to advantages."""

    scale_rewards: Literal["group", "batch", "none"] | bool = "group"
    """Divide advantages by the standard deviation of their group (or true), of the batch, or not at all (or false)."""
    advantage_estimator: Annotated[str, tyro.conf.arg(metavar=ESTIMATOR_NAMES)] = "group"
    """Baseline of a completion: the mean of its group, or of the others in it (RLOO); or my_module.my_estimator."""
    advantage_kwargs: JsonObject = field(default_factory=dict)
    """Options of your own estimator that are not flags, as a JSON object."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Several rewards: sum and then normalise; or normalise each in its group, sum, and normalise over the batch."""
    overlong_margin: int = 0
    """Length penalty (DAPO): a reward named overlong falls from 0 to -1 over the last so many tokens. 0: none."""
    kl_in_reward: bool = False
    (
        "Subtract beta times the KL of a completion from its reward, instead of adding a KL term to the loss. This "
        "includes truncated completions, even if mask_truncated_completions leaves them out of the loss."
    )

    def __post_init__(self) -> None:
        if isinstance(self.scale_rewards, bool):  # as TRL and axolotl have it
            object.__setattr__(self, "scale_rewards", "group" if self.scale_rewards else "none")
        check_numbers(self, {"0 (off) or more": "overlong_margin"})
        self._resolve_estimator()

    def _resolve_estimator(self) -> None:
        """Find the record, refuse what it does not read, and keep the function with its options."""
        name = self.advantage_estimator
        if self.multi_objective_aggregation == "normalize_then_sum":
            if name != "group":
                raise UserError(
                    f"advantage_estimator={name}: normalize_then_sum normalises by groups; leave it at group"
                )
            name = "normalize_then_sum"
        record = find_record("advantage_estimator", name, ADVANTAGE_ESTIMATORS, AdvantageEstimator, "estimator")
        unread = "scale_rewards" not in record.options
        allowed = (
            (AdvantageConfig.scale_rewards, "none") if name == "leave_one_out" else (AdvantageConfig.scale_rewards,)
        )
        if unread and name != "normalize_then_sum" and self.scale_rewards not in allowed:
            raise UserError(f"scale_rewards={self.scale_rewards}: has no effect with {name}; leave it out")
        if name == "normalize_then_sum" and self.scale_rewards != AdvantageConfig.scale_rewards:
            raise UserError(
                f"scale_rewards={self.scale_rewards}: has no effect with normalize_then_sum, which scales each reward "
                "by its group and their sum by the batch; leave it out"
            )
        if self.kl_in_reward and not record.reads_total:
            raise UserError(f"kl_in_reward=True: {name} has no sum of rewards to subtract it from; leave it out")
        flags = {} if unread else {"scale_rewards": self.scale_rewards}
        own = record.options.get("scale_rewards")
        if own is not None and own.default is not own.empty and self.scale_rewards == AdvantageConfig.scale_rewards:
            flags = {}  # an estimator from outside may have a default of its own, which holds unless the flag is set
        for key in self.advantage_kwargs:
            if key == "scale_rewards" or key not in record.options:
                advice = "use --scale-rewards" if key in record.options else suggest(key, record.options)
                raise UserError(f"advantage_kwargs.{key}: not an option of advantage_estimator={name}; {advice}")
        given = flags | self.advantage_kwargs
        missing = [key for key, p in record.options.items() if p.default is p.empty and key not in given]
        if missing:
            raise UserError(f"advantage_estimator={name}: needs {missing[0]}; set it in --advantage-kwargs")
        object.__setattr__(self, "_estimate", partial(record.estimate, **given))

    @property
    def estimate(self) -> Callable[[Rewards], Advantage]:
        return self._estimate

    @property
    def is_default(self) -> bool:
        """(r - mean of the group) / its standard deviation, which trainer/methods/grpo.py writes out."""
        return self._estimate.func is ADVANTAGE_ESTIMATORS["group"].estimate and self.scale_rewards == "group"


@dataclass(frozen=True, kw_only=True)
class AsyncConfig:
    """Overlap of sampling and training, and what happens to groups whose rewards are all equal."""

    async_prefetch: bool = False
    """Sample the next batches while this one is trained on. Needs vLLM servers on other GPUs."""
    prefetch_depth: int = 1
    """Batches sampled ahead of the one in training; samples are at most this many rollouts old."""
    max_staleness: int | None = None
    """Most optimizer steps between the weights that sample a batch and those it first trains. None: by depth."""
    vllm_sync_interval: int = 1
    """Least optimizer steps between weight updates of the servers, which come before a rollout."""
    vllm_lora_sync: bool = False
    """The same as --sync.backend lora."""
    streaming_partial_batch: bool = False
    """Compute rewards of groups as they arrive, while others are still being sampled."""
    streaming_min_groups: int = 1
    """Groups to reward together when streaming."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal by groups of other prompts (DAPO)."""
    dynamic_sampling_max_rounds: int = 3
    """Most rounds of replacement per batch; groups that are still equal then stay."""
    replay_buffer_size: int = 0
    """Groups kept to replace groups whose rewards are all equal. 0: none."""
    replay_max_age: int = 100
    """Optimizer steps after which a kept group is dropped."""
    replay_recompute_logps: bool = True
    """Recompute the log-probs of a replayed group with current weights; otherwise clip against the old ones."""
    reroll_start_fraction: float = 1.0
    """Fraction of the run after which prompts that got no reward are sampled again. 1: never."""
    reroll_max_groups: int = 1
    """Most groups of a batch for such prompts."""
    curriculum: str | None = None
    """Your function that chooses rows: module.fn or FILE.py:fn(batch, prompts, rewards) -> row numbers to draw from."""
    use_data_producer: bool = False
    """Not supported (a switch of axolotl); use --async-prefetch."""

    def __post_init__(self) -> None:
        if self.use_data_producer:
            raise UserError(
                "use_data_producer=True: not supported; --async-prefetch overlaps sampling and training, and replay, "
                "re-rolls and streaming need no switch"
            )
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
            ("async_prefetch", self.async_prefetch, ("prefetch_depth", "max_staleness")),
            ("streaming_partial_batch", self.streaming_partial_batch, ("streaming_min_groups",)),
            ("dynamic_sampling", self.dynamic_sampling, ("dynamic_sampling_max_rounds",)),
            ("replay_buffer_size", self.replay_buffer_size, ("replay_max_age", "replay_recompute_logps")),
            ("reroll_start_fraction", self.reroll_start_fraction < 1, ("reroll_max_groups",)),
        ):
            if not is_on:
                reject_unused(self, f"without {switch}; set it, too", names)

    def reroll_from(self, num_batches: int) -> int | None:
        """Number of the first batch that may hold prompts that come again."""
        return None if self.reroll_start_fraction == 1 else max(1, int(num_batches * self.reroll_start_fraction))


def check_overlap(overlap: AsyncConfig, rollout: RolloutConfig, sync: SyncConfig, *, is_lora: bool) -> None:
    """Settings that only servers can fulfil, and those that contradict each other."""
    if rollout.engine == "local":
        for name, value in (
            ("async_prefetch", overlap.async_prefetch),
            ("vllm_sync_interval", overlap.vllm_sync_interval > 1),
            ("vllm_lora_sync", overlap.vllm_lora_sync),
        ):
            if value:
                raise UserError(
                    f"{name}={getattr(overlap, name)}: needs servers, the local engine shares the trainer's process "
                    "and weights; set --rollout.engine vllm"
                )
    if overlap.vllm_lora_sync and not is_lora:
        raise UserError(
            "vllm_lora_sync=True: there is no adapter, all weights are trained; set --lora.r, or leave it out"
        )
    if overlap.vllm_lora_sync and sync.backend not in ("auto", "lora"):
        raise UserError(f"vllm_lora_sync=True: contradicts sync.backend={sync.backend}; name one of the two")
    if overlap.max_staleness is not None and overlap.max_staleness < overlap.vllm_sync_interval - 1:
        raise UserError(
            f"max_staleness={overlap.max_staleness}: servers keep their weights for vllm_sync_interval="
            f"{overlap.vllm_sync_interval} steps, so samples are up to {overlap.vllm_sync_interval - 1} steps old"
        )


def servers_asked(cfg: Any) -> str | None:
    """The first setting that only vLLM servers can fulfil, as name=value; None if there is none.

    `cfg` is the Config of a method that samples; with rollout.engine=auto such a setting decides for vllm.
    """
    for prefix, block in (("vllm.", cfg.vllm), ("sync.", cfg.sync)):
        for setting in fields(block):
            value = getattr(block, setting.name)
            if value != default_of(setting):
                return f"{prefix}{setting.name}={' '.join(map(str, value)) if isinstance(value, tuple) else value}"
    for name in ("async_prefetch", "vllm_sync_interval", "vllm_lora_sync"):
        if (value := getattr(cfg.overlap, name)) != getattr(AsyncConfig, name):
            return f"{name}={value}"
    gym = getattr(cfg, "nemo_gym", None)  # EBFT has none
    if gym is not None and gym.multi_turn:
        return "nemo_gym.multi_turn=True"
    return None if gym is None or cfg.verifiers.env is None else f"verifiers.env={cfg.verifiers.env}"


@dataclass(frozen=True, kw_only=True)
class GroupConfig(MethodConfig):
    """What every method has that samples several completions of a prompt, whatever its loss."""

    # Read by the code that methods share. They are flags only where a subclass makes them fields.
    policy_loss = PolicyLossConfig()
    correction = CorrectionConfig()
    advantage = AdvantageConfig()

    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    overlap: Flat[AsyncConfig] = field(default_factory=AsyncConfig)
    moving: Flat[MovingReferenceConfig] = field(default_factory=MovingReferenceConfig)

    num_generations: int = 8
    """Completions sampled per prompt; they form one group."""
    num_generations_eval: int = 1
    """Completions sampled per held-out prompt. Above 1, eval/reward/best_of_N is logged too, and sampling is needed."""
    max_prompt_length: int | None = None
    """Leave out prompts with more tokens than this, and log how many; None keeps all."""
    max_completion_length: int = 256
    """Most tokens of a completion, those that tools add included. EBFT cuts the true completions to it, too."""
    temperature: float = 1.0
    """Sampling temperature. The log-probs in the loss are taken at the same temperature. The EBFT paper has 0.6."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion, besides the model's own end tokens."""
    num_iterations: int = 1
    """Optimizer steps taken on each completion."""
    minibatches_per_rollout: int = 1
    (
        "Optimizer steps that the completions of one rollout are divided over: it samples so many times as many "
        "prompts, and each step trains on its part of their groups, num_iterations times."
    )

    @property
    def prompts_per_step(self) -> int:
        return self.run.sequences_per_step // self.num_generations

    @property
    def prompts_per_rollout(self) -> int:
        return self.prompts_per_step * self.minibatches_per_rollout

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps."""
        return self.minibatches_per_rollout * self.num_iterations

    @property
    def has_reference(self) -> bool:
        """Whether a reference model is loaded; a method with another use for one overrides this."""
        return self.policy_loss.beta > 0

    def check_temperature(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise UserError(f"temperature={self.temperature}: must be above 0, a greedy group has nothing to compare")

    def check_groups(self) -> None:
        """What the blocks cannot see alone, for a Config that samples with the engine."""
        self.check_temperature()
        refuse_offline_only(self.model)
        check_numbers(
            self, {"1 or more": "max_completion_length num_iterations minibatches_per_rollout num_generations_eval"}
        )
        check_engine(self.rollout, self.vllm, self.sync, servers_asked(self))
        check_overlap(self.overlap, self.rollout, self.sync, is_lora=self.lora.r > 0)
        if "" in self.stop:
            raise UserError("stop='': an empty stop string would end every completion; remove it")
        if self.run.sequences_per_step % self.num_generations:
            per_device = self.run.per_device_train_batch_size
            fitting = math.lcm(self.num_generations, per_device) // per_device
            raise UserError(
                f"num_generations={self.num_generations}: per_device_train_batch_size x gradient_accumulation_steps = "
                f"{self.run.sequences_per_step} completions a step do not hold whole groups; use a multiple, for "
                f"example gradient_accumulation_steps={fitting}"
            )


@dataclass(frozen=True, kw_only=True)
class PolicyGradientConfig(GroupConfig):
    """What every such method has whose loss is one of losses/policy.py."""

    policy_loss: Flat[PolicyLossConfig] = field(default_factory=PolicyLossConfig)
    correction: Flat[CorrectionConfig] = field(default_factory=CorrectionConfig)

    share_prompt: bool = True
    """Compute a prompt once for its group; the gradient is the same. Without packing each completion is in full."""

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
            raise UserError("sync_ref_model=True: there is no reference to move with beta=0; set --beta too")
        if self.moving.sync_ref_model and self.lora.r > 0:
            raise UserError(
                "sync_ref_model=True: with LoRA the reference is the base itself, which cannot move; leave it out"
            )
