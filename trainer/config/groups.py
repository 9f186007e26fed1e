"""Flags of methods that compare completions within groups: advantages, and how rollouts and training overlap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal

import tyro

from data.formats.template_settings import JsonObject
from data.hints import suggest
from data.user_code import find_record
from losses.advantage import ADVANTAGE_ESTIMATORS, Advantage, AdvantageEstimator, GroupRewards
from rollout.servers.options import SyncConfig
from trainer.config.blocks import RolloutConfig

ESTIMATOR_NAMES = f"{{{','.join(ADVANTAGE_ESTIMATORS)}}}|MODULE.FUNCTION"


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """From rewards to advantages."""

    scale_rewards: Literal["group", "batch", "none"] | bool = "group"
    """Divide advantages by the standard deviation of the group (or true), of the batch, or not at all (or false)."""
    advantage_estimator: Annotated[str, tyro.conf.arg(metavar=ESTIMATOR_NAMES)] = "group"
    """The baseline of a completion: the mean of its group, or of the others in it (RLOO). Or my_module.my_estimator."""
    advantage_kwargs: JsonObject = field(default_factory=dict)
    """Options of an estimator of your own that are no flags, as a JSON object."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Several rewards: add them up first, or normalise each within its group first, then the sum over the batch."""
    overlong_margin: int = 0
    """Tokens before max_completion_length over which a reward named overlong falls from 0 to -1 (DAPO); 0: none."""
    kl_in_reward: bool = False
    (
        "Take beta times the KL of a completion off its reward, instead of a term in the loss; that of truncated "
        "completions too, also where mask_truncated_completions leaves them out of the loss."
    )

    def __post_init__(self) -> None:
        if isinstance(self.scale_rewards, bool):  # as TRL and axolotl have it
            object.__setattr__(self, "scale_rewards", "group" if self.scale_rewards else "none")
        if self.overlong_margin < 0:
            raise ValueError(f"overlong_margin={self.overlong_margin}: must be 0 (off) or more tokens")
        self._resolve_estimator()

    def _resolve_estimator(self) -> None:
        """Find the record, refuse what it does not read, and keep the function with its options."""
        name = self.advantage_estimator
        if self.multi_objective_aggregation == "normalize_then_sum":
            if name != "group":
                raise ValueError(
                    f"advantage_estimator={name}: normalize_then_sum normalises by groups; leave it at group"
                )
            name = "normalize_then_sum"
        record = find_record("advantage_estimator", name, ADVANTAGE_ESTIMATORS, AdvantageEstimator, "estimator")
        unread = "scale_rewards" not in record.options
        allowed = (
            (AdvantageConfig.scale_rewards, "none") if name == "leave_one_out" else (AdvantageConfig.scale_rewards,)
        )
        if unread and name != "normalize_then_sum" and self.scale_rewards not in allowed:
            raise ValueError(f"scale_rewards={self.scale_rewards}: has no effect with {name}; leave it out")
        if name == "normalize_then_sum" and self.scale_rewards != AdvantageConfig.scale_rewards:
            raise ValueError(
                f"scale_rewards={self.scale_rewards}: has no effect with normalize_then_sum, which scales each reward "
                "by its group and their sum by the batch; leave it out"
            )
        if self.kl_in_reward and not record.reads_total:
            raise ValueError(f"kl_in_reward=True: {name} has no sum of rewards to take it off; leave it out")
        flags = {} if unread else {"scale_rewards": self.scale_rewards}
        own = record.options.get("scale_rewards")
        if own is not None and own.default is not own.empty and self.scale_rewards == AdvantageConfig.scale_rewards:
            flags = {}  # an estimator from outside may have a default of its own, which holds unless the flag is set
        for key in self.advantage_kwargs:
            if key == "scale_rewards" or key not in record.options:
                advice = "use --scale-rewards" if key in record.options else suggest(key, record.options)
                raise ValueError(f"advantage_kwargs.{key}: not an option of advantage_estimator={name}; {advice}")
        given = flags | self.advantage_kwargs
        missing = [key for key, p in record.options.items() if p.default is p.empty and key not in given]
        if missing:
            raise ValueError(f"advantage_estimator={name}: needs {missing[0]}; set it in --advantage-kwargs")
        object.__setattr__(self, "_estimate", partial(record.estimate, **given))

    @property
    def estimate(self) -> Callable[[GroupRewards], Advantage]:
        return self._estimate


@dataclass(frozen=True, kw_only=True)
class AsyncConfig:
    """How rollouts and training overlap, and what becomes of groups that teach nothing."""

    async_prefetch: bool = False
    """Sample the next batches while this one is trained on; needs servers that run beside the trainer."""
    prefetch_depth: int = 1
    """Batches under way beyond the one in training; samples are then up to so many rollouts old."""
    max_staleness: int | None = None
    """Largest age of the weights that begin a batch when it is first trained on, in optimizer steps; None: by depth."""
    vllm_sync_interval: int = 1
    """Optimizer steps after which servers get new weights, at the next rollout that comes."""
    vllm_lora_sync: bool = False
    """The same as --sync.backend lora."""
    streaming_partial_batch: bool = False
    """Reward groups as they come in, while others are still being sampled."""
    streaming_min_groups: int = 1
    """Groups that are rewarded together when streaming."""
    dynamic_sampling: bool = False
    """Replace groups in which all rewards are equal by groups of further prompts (DAPO)."""
    dynamic_sampling_max_rounds: int = 3
    """Times that replacements are asked for in one batch; what is still equal then stays."""
    replay_buffer_size: int = 0
    """Groups kept to stand in for groups in which all rewards are equal; 0 keeps none."""
    replay_max_age: int = 100
    """Optimizer steps after which a kept group is dropped."""
    replay_recompute_logps: bool = True
    """Score a replayed group by the weights of today, with a correction for the rest; else clip against its own."""
    reroll_start_fraction: float = 1.0
    """Fraction of the run after which prompts without any reward come again; 1: never."""
    reroll_max_groups: int = 1
    """Groups of a batch that may be such prompts."""
    curriculum: str | None = None
    """module.fn or FILE.py:fn(batch, prompts, rewards) -> numbers of the rows that the next prompts are drawn from."""
    use_data_producer: bool = False
    """axolotl's switch; --async-prefetch is what replaces it."""

    def __post_init__(self) -> None:
        if self.use_data_producer:
            raise ValueError(
                "use_data_producer=True: there is no producer to switch on; --async-prefetch overlaps sampling and "
                "training, and replay, re-rolls and streaming work with it or without"
            )
        for name in ("prefetch_depth", "vllm_sync_interval", "streaming_min_groups", "dynamic_sampling_max_rounds",
                     "replay_max_age", "reroll_max_groups"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be 1 or more")
        if self.replay_buffer_size < 0:
            raise ValueError(f"replay_buffer_size={self.replay_buffer_size}: must be 0 (none) or more groups")
        if not 0 <= self.reroll_start_fraction <= 1:
            raise ValueError(f"reroll_start_fraction={self.reroll_start_fraction}: must be between 0 and 1 (never)")
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ValueError(f"max_staleness={self.max_staleness}: must be 0 or more optimizer steps")
        self._refuse_idle()

    def reroll_from(self, num_batches: int) -> int | None:
        """Number of the first batch that may hold prompts that come again."""
        return None if self.reroll_start_fraction == 1 else max(1, int(num_batches * self.reroll_start_fraction))

    def _refuse_idle(self) -> None:
        """Settings of a part that is off."""
        default = AsyncConfig.__dataclass_fields__
        for switch, on, names in (
            ("async_prefetch", self.async_prefetch, ("prefetch_depth", "max_staleness")),
            ("streaming_partial_batch", self.streaming_partial_batch, ("streaming_min_groups",)),
            ("dynamic_sampling", self.dynamic_sampling, ("dynamic_sampling_max_rounds",)),
            ("replay_buffer_size", self.replay_buffer_size, ("replay_max_age", "replay_recompute_logps")),
            ("reroll_start_fraction", self.reroll_start_fraction < 1, ("reroll_max_groups",)),
        ):
            for name in names:
                if not on and getattr(self, name) != default[name].default:
                    raise ValueError(f"{name}={getattr(self, name)}: has no effect without {switch}; set it, too")


def check_overlap(overlap: AsyncConfig, rollout: RolloutConfig, sync: SyncConfig, *, is_lora: bool) -> None:
    """Settings that only servers can fulfil, and those that contradict each other."""
    if rollout.engine == "local":
        for name, value in (
            ("async_prefetch", overlap.async_prefetch),
            ("vllm_sync_interval", overlap.vllm_sync_interval > 1),
            ("vllm_lora_sync", overlap.vllm_lora_sync),
            ("streaming_partial_batch", overlap.streaming_partial_batch),
        ):
            if value:
                raise ValueError(
                    f"{name}={getattr(overlap, name)}: the local engine samples with the trainer's own weights, in "
                    "turn with it; set --rollout.engine vllm"
                )
    if overlap.vllm_lora_sync and not is_lora:
        raise ValueError(
            "vllm_lora_sync=True: all weights are trained, there is no adapter; set --lora.r, or leave it out"
        )
    if overlap.vllm_lora_sync and sync.backend not in ("auto", "lora"):
        raise ValueError(f"vllm_lora_sync=True: contradicts sync.backend={sync.backend}; name one of the two")
    if overlap.max_staleness is not None and overlap.max_staleness < overlap.vllm_sync_interval - 1:
        raise ValueError(
            f"max_staleness={overlap.max_staleness}: servers keep their weights for vllm_sync_interval="
            f"{overlap.vllm_sync_interval} steps, so samples are up to {overlap.vllm_sync_interval - 1} steps old"
        )
