"""Flags of methods that sample completions of prompts and reward them.

@dataclass(frozen=True, kw_only=True)
class Config(SamplingConfig):          # RewardedConfig: without the flags of a policy loss; Rollouts.pack needs them
    my_flag: float = 0.5
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import ClassVar

from data.command.checks import check_numbers, reject_unused
from data.command.flags import default_of
from data.errors import UserError
from rollout.episodes.options import ToolConfig
from rollout.gyms.options import NemoGymConfig, OpenEnvConfig, check_nemo_gym
from rollout.gyms.verifiers_options import VerifiersConfig, check_verifiers
from rollout.rewards.options import RewardConfig
from rollout.sets import LIMIT
from trainer.config.blocks import NO_HELD_OUT, Flat, MethodMemory, PromptConfig, check_evaluation
from trainer.config.groups import AdvantageConfig, GroupConfig, PolicyGradientConfig, servers_asked
from trainer.parallel.ranks import world_size


@dataclass(frozen=True, kw_only=True)
class RewardedConfig(GroupConfig):
    """Base of all methods that sample completions of prompts and reward them."""

    fewest_generations: ClassVar[int] = 2  # 1 for a method that does not compare within groups
    refused: ClassVar[tuple[str, ...]] = ()  # settings of shared blocks that the method rejects; --help omits them
    rows: ClassVar[str] = "prompts"
    # TRL's guides to PEFT and to LoRA Without Regret; all weights: TRL, DeepSeekMath (2402.03300), DAPO (2503.14476).
    lora_learning_rate: ClassVar[float] = 1e-5

    data: Flat[PromptConfig] = field(default_factory=PromptConfig)
    reward: Flat[RewardConfig] = field(default_factory=RewardConfig)
    tools: Flat[ToolConfig] = field(default_factory=ToolConfig)
    openenv: OpenEnvConfig = field(default_factory=OpenEnvConfig)
    nemo_gym: NemoGymConfig = field(default_factory=NemoGymConfig)
    verifiers: VerifiersConfig = field(default_factory=VerifiersConfig)

    def __post_init__(self) -> None:
        check_evaluation(self.data, self.run)
        check_rollout_setup(self)
        if self.num_generations < (least := self.fewest_generations):
            what = "must be 1 or more" if least == 1 else f"a group needs at least {least} completions to compare"
            raise UserError(f"num_generations={self.num_generations}: {what}")
        self.check_groups()
        if not self.data.holds_out:
            reject_unused(self, NO_HELD_OUT, ("num_generations_eval",))
        if self.num_generations_eval > 1 and self.rollout.eval_temperature == 0:
            raise UserError(
                f"num_generations_eval={self.num_generations_eval}: greedy completions of a prompt are identical; set "
                "--rollout.eval-temperature"
            )


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(RewardedConfig, PolicyGradientConfig):
    """RewardedConfig plus a policy loss and advantages from the rewards."""

    memory: ClassVar[MethodMemory] = MethodMemory("one pass")
    can_be_exact: ClassVar[bool] = True  # the loss is taken from log-probs of the sampled tokens alone

    advantage: Flat[AdvantageConfig] = field(default_factory=AdvantageConfig)

    @property
    def fewest_generations(self) -> int:  # type: ignore[override]
        return self.advantage.record.fewest_generations

    top_k: int = 0
    """Sample only from this many most likely tokens. 0: all. The loss takes log-probs over the same tokens."""
    top_p: float = 1.0
    """Sample only from the most likely tokens that together have this probability. 1: all."""
    min_p: float = 0.0
    """Sample only tokens with at least this fraction of the most likely token's probability. 0: all."""
    exact_sampling: bool = False
    (
        "local: give sampler and trainer the same bits, so that policy/behaviour_gap is exactly 0 and the importance "
        "ratio of a new rollout is exactly 1. Llama-like dense models on one device, trained in full."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_filters()
        if self.exact_sampling:
            check_exact(self)
        if self.advantage.overlong_margin > self.max_completion_length:
            margin = self.advantage.overlong_margin
            raise UserError(
                f"overlong_margin={margin}: must be at most max_completion_length={self.max_completion_length}"
            )
        if not self.overlap.replay_recompute_logps and self.correction.proximal_policy == "behaviour":
            raise UserError(
                "replay_recompute_logps=False: has no effect with proximal_policy=behaviour, whose ratios are always "
                "against the engine"
            )

    def _check_filters(self) -> None:
        check_numbers(self, {"0 (off) or more": "top_k", "above 0 and at most 1": "top_p", "in [0, 1)": "min_p"})
        if self.top_k > LIMIT:
            raise UserError(f"top_k={self.top_k}: at most {LIMIT:,} ids per token can be recorded; lower --top-k")
        if self.tools.rollout_func:
            writer = f"rollout_func={self.tools.rollout_func}"
            self.reject_filters(f"{writer}, whose samples come without the ids they were limited to")

    def reject_filters(self, what: str) -> None:
        for name in ("top_k", "top_p", "min_p"):
            if (value := getattr(self, name)) != getattr(SamplingConfig, name):
                raise UserError(f"{name}={value}: cannot be used with {what}; remove --{name.replace('_', '-')}")


def check_exact(cfg: SamplingConfig) -> None:
    """Reject settings with which the sampler's log-probs could not have the trainer's bits."""
    if not cfg.can_be_exact:
        raise UserError(f"exact_sampling=True: not supported with method={cfg.run.method}; remove --exact-sampling")
    if world_size() > 1:
        raise UserError(f"exact_sampling=True: not supported with {world_size()} ranks; remove --exact-sampling")
    blocks = (
        ("", cfg, "top_k top_p min_p"),
        ("", cfg.model, "load_in_4bit attn_implementation"),
        ("lora.", cfg.lora, "r"),
        ("rollout.", cfg.rollout, "partial"),
        ("", cfg.overlap, "replay_buffer_size"),
        ("", cfg.tools, "tools rollout_func harness"),
        ("openenv.", cfg.openenv, "env"),
        ("nemo_gym.", cfg.nemo_gym, "multi_turn"),
        ("verifiers.", cfg.verifiers, "env"),
    )
    found = [
        f"{prefix}{each.name}={' '.join(value) if isinstance(value, tuple) else value}"
        for prefix, block, names in blocks
        for each in fields(block)
        if each.name in names.split() and (value := getattr(block, each.name)) != default_of(each)
    ]
    found += ["compile=True"] if cfg.model.compile is True else []
    found += ["rollout.engine=vllm"] if cfg.rollout.engine == "vllm" else []
    if asked := servers_asked(cfg):
        found.append(asked)
    if found:
        raise UserError(f"exact_sampling=True: not supported with {found[0]}; remove one of the two flags")


def check_rollout_setup(cfg: RewardedConfig) -> None:
    """Reject more than one environment, and settings that the environment does not support."""
    gym = cfg.nemo_gym
    sources = {
        "tools": bool(cfg.tools.tools),
        "rollout_func": cfg.tools.rollout_func is not None,
        "harness": cfg.tools.harness is not None,
        "openenv.env": cfg.openenv.env is not None,
        "nemo_gym.multi_turn": gym.multi_turn,
        "verifiers.env": cfg.verifiers.env is not None,
    }
    names = [name for name, is_set in sources.items() if is_set]
    if len(names) > 1:
        raise UserError(f"{names[0]}, {names[1]}: each generates the whole completion; set only one")
    if names:
        why = f"with {names[0]}, whose episodes are sampled to their end"
        reject_unused(cfg.rollout, why, ("partial",), "rollout.")
    check_verifiers(
        cfg.verifiers,
        has_data=bool(cfg.data.data or cfg.data.eval_data or gym.datasets),
        system_prompt=cfg.model.system_prompt,
        chat_template=cfg.model.chat_template,
    )
    if not cfg.data.data and not gym.datasets and cfg.verifiers.env is None:
        raise UserError("--data: required; pass a source, or rows of a gym with --nemo-gym.datasets or --verifiers.env")
    if gym.multi_turn and (cfg.data.data or cfg.data.eval_data):
        raise UserError(
            f"data={' '.join((*cfg.data.data, *cfg.data.eval_data))}: nemo_gym.multi_turn uses only rows of the "
            "gym; remove --data and --eval-data"
        )
    if gym.datasets and cfg.data.val_set_size:
        raise UserError(f"val_set_size={cfg.data.val_set_size:g}: cannot hold out rows of a gym; use --eval-data")
    check_nemo_gym(gym, reward_funcs=cfg.reward.reward_funcs)
