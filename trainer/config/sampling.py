"""The flags of a method that samples completions of prompts and rewards them: GRPO and its relatives, and yours.

@dataclass(frozen=True, kw_only=True)
class Config(SamplingConfig):
    my_flag: float = 0.5
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from rollout.episodes.options import ToolConfig
from rollout.gyms.options import NemoGymConfig, OpenEnvConfig, check_nemo_gym
from rollout.rewards.options import RewardConfig
from rollout.servers.options import SyncConfig, VllmConfig
from trainer.config.blocks import (
    Flat,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PromptConfig,
    RolloutConfig,
    RunConfig,
    check_engine,
    check_evaluation,
)
from trainer.config.groups import AdvantageConfig, AsyncConfig, check_overlap
from trainer.config.policy import CorrectionConfig, PolicyLossConfig, check_policy_options


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """What every method has that samples completions of prompts and rewards them."""

    model: Flat[ModelConfig]
    data: Flat[PromptConfig] = field(default_factory=PromptConfig)
    run: Flat[RunConfig] = field(default_factory=RunConfig)
    optim: Flat[OptimConfig] = field(default_factory=OptimConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    reward: Flat[RewardConfig] = field(default_factory=RewardConfig)
    tools: Flat[ToolConfig] = field(default_factory=ToolConfig)
    openenv: OpenEnvConfig = field(default_factory=OpenEnvConfig)
    nemo_gym: NemoGymConfig = field(default_factory=NemoGymConfig)
    advantage: Flat[AdvantageConfig] = field(default_factory=AdvantageConfig)
    policy_loss: Flat[PolicyLossConfig] = field(default_factory=PolicyLossConfig)
    correction: Flat[CorrectionConfig] = field(default_factory=CorrectionConfig)
    overlap: Flat[AsyncConfig] = field(default_factory=AsyncConfig)

    num_generations: int = 8
    """Completions per prompt: one group."""
    max_prompt_length: int | None = None
    """Prompts of more tokens are left out, and counted; None keeps all."""
    max_completion_length: int = 256
    """Tokens a completion may have, those of tools included."""
    temperature: float = 1.0
    """Sampling temperature; log-probs in the loss are those of the same temperature."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion, besides the model's own end tokens."""
    share_prompt: bool = True
    """Compute a prompt once for its group, with the same gradient; --no-packing lays out each completion in full."""
    num_iterations: int = 1
    """Optimizer steps taken on each batch of completions."""

    def __post_init__(self) -> None:
        check_evaluation(self.data, self.run)
        check_engine(self.rollout, self.vllm, self.sync)
        check_overlap(self.overlap, self.rollout, self.sync, is_lora=self.lora.r > 0)
        check_rollout_setup(self)
        check_policy_options(
            self.policy_loss,
            self.correction,
            num_iterations=self.num_iterations,
            kl_in_reward=self.advantage.kl_in_reward,
        )
        if self.num_generations < 2:
            raise ValueError(f"num_generations={self.num_generations}: a group needs at least 2 completions to compare")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature}: must be above 0, a greedy group has nothing to compare")
        if "" in self.stop:
            raise ValueError("stop='': an empty stop string would end every completion; remove it")
        for name in ("max_completion_length", "num_iterations"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be 1 or more")
        if self.advantage.overlong_margin > self.max_completion_length:
            margin = self.advantage.overlong_margin
            raise ValueError(
                f"overlong_margin={margin}: is more than max_completion_length={self.max_completion_length}; lower it"
            )
        if not self.overlap.replay_recompute_logps and self.correction.proximal_policy == "behaviour":
            raise ValueError(
                "replay_recompute_logps=False: proximal_policy=behaviour takes every ratio against the engine anyway; "
                "leave one of them out"
            )
        if self.run.sequences_per_step % self.num_generations:
            per_device = self.run.per_device_train_batch_size
            fitting = math.lcm(self.num_generations, per_device) // per_device
            raise ValueError(
                f"num_generations={self.num_generations}: per_device_train_batch_size x gradient_accumulation_steps = "
                f"{self.run.sequences_per_step} completions a step do not hold whole groups; use a multiple, for "
                f"example gradient_accumulation_steps={fitting}"
            )

    @property
    def prompts_per_step(self) -> int:
        return self.run.sequences_per_step // self.num_generations


def check_rollout_setup(cfg: Any) -> None:
    """One of them at a time, and only with settings they can follow. For the Config of a method that samples."""
    tools: ToolConfig = cfg.tools
    env: OpenEnvConfig = cfg.openenv
    gym: NemoGymConfig = cfg.nemo_gym
    given = {
        "tools": bool(tools.tools),
        "rollout_func": tools.rollout_func is not None,
        "openenv.env": env.env is not None,
        "nemo_gym.multi_turn": gym.multi_turn,
    }
    names = [name for name, is_given in given.items() if is_given]
    if len(names) > 1:
        raise ValueError(f"{names[0]}, {names[1]}: each makes the whole completion; give one of them")
    if not cfg.data.data and not gym.datasets:
        raise ValueError("--data: required; name rows, or rows of a gym by --nemo-gym.datasets")
    if gym.multi_turn and (cfg.data.data or cfg.data.eval_data):
        raise ValueError(
            f"data={' '.join((*cfg.data.data, *cfg.data.eval_data))}: the agents of nemo_gym.multi_turn play only rows "
            "of the gym; leave it out"
        )
    by_adapter = cfg.overlap.vllm_lora_sync or cfg.sync.backend == "lora"
    check_nemo_gym(
        gym,
        reward_funcs=cfg.reward.reward_funcs,
        engine=cfg.rollout.engine,
        vllm_url=cfg.vllm.url,
        vllm_port=cfg.vllm.port,
        lora_sync=by_adapter or (cfg.lora.r > 0 and cfg.sync.backend == "auto"),
        in_flight=cfg.overlap.async_prefetch,
        stop=cfg.stop,
    )
