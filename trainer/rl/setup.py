"""What stands between prompts and rewards: nothing, tools, a function of the user, an environment, or NeMo Gym.

around = Surroundings(cfg, policy, run.note)        # all that can be wrong with it shows before there is a run folder
prompts = around.prompts(cfg.data.data)             # with tools in them, and rows of the gym
source = around.source(engine, sampling)            # completions, by whatever means
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from data.rows.nemo_gym import load_nemo_gym
from data.types import Prompt
from data.user_code import find_callable
from rollout.engine import Engine, EngineSource, Sampling, Source
from rollout.episodes.episode import EpisodeSource
from rollout.episodes.options import ToolConfig
from rollout.episodes.rollout_func import RolloutFunction
from rollout.episodes.tool_episode import ToolEpisode, show_tools
from rollout.episodes.tools import load_tools
from rollout.gyms.nemo_gym import COLUMNS, GymClient, RunSource, set_up_rewards
from rollout.gyms.options import NemoGymConfig, OpenEnvConfig, check_nemo_gym
from rollout.rewards.table import Rewards
from rollout.schedule.planner import Order
from trainer.policy.logps import Policy
from trainer.rl import rollouts


def check_surroundings(cfg: Any) -> None:
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


UNSEEN = 2048  # tokens that an environment or a function of the user may put into a prompt


class Surroundings:
    """Made once in a run."""

    def __init__(self, cfg: Any, policy: Policy, say: Callable[[str], None]) -> None:
        self.cfg, self.policy = cfg, policy
        self.toolset = load_tools(cfg.tools.tools, timeout=cfg.tools.tool_timeout) if cfg.tools.tools else None
        self.function = RolloutFunction(cfg.tools.rollout_func) if cfg.tools.rollout_func else None
        self.gym = GymClient(cfg.nemo_gym, log=say) if cfg.nemo_gym.datasets else None
        self.episode: Any = None
        if self.toolset is not None:
            self.episode = ToolEpisode.of(cfg.tools, self.toolset, policy.tokenizer)
        if cfg.openenv.env is not None:
            from rollout.gyms.openenv import load_episode  # its package is an extra

            self.episode = load_episode(cfg.openenv, policy.tokenizer)

    @property
    def columns(self) -> Sequence[str] | None:
        """What completions bring to the rewards besides the columns of the data; None: only they will show."""
        if self.function is not None:
            return None
        if self.cfg.nemo_gym.multi_turn:
            return COLUMNS
        if self.toolset is not None:
            return ("num_turns", *(["env_reward"] if self.toolset.pays else []))
        return ("num_turns", "env_reward") if self.episode is not None else ()

    @property
    def unseen(self) -> int:
        """Tokens that a sequence may get besides its prompt and completion."""
        if self.cfg.nemo_gym.multi_turn:
            return self.cfg.max_completion_length  # its agents ask for a whole answer in every turn, the last included
        return UNSEEN if self.cfg.openenv.env is not None or self.function is not None else 0

    def prompts(self, specs: Sequence[str], *, held_out: bool = False) -> list[Prompt]:
        cfg, policy = self.cfg, self.policy
        prompts = rollouts.prompts_of(cfg, policy, specs)
        if self.toolset is not None and prompts:
            room = None if policy.context_length is None else policy.context_length - cfg.max_completion_length
            prompts = show_tools(
                prompts,
                policy.tokenizer,
                self.toolset.schemas,
                max_prompt_length=cfg.max_prompt_length,
                longest=room,
            )
            self.toolset.check_rows(prompts, "eval_data" if held_out else "data")
        if self.gym is not None and not held_out:
            prompts += load_nemo_gym(
                cfg.nemo_gym.datasets,
                policy.tokenizer,
                folder=cfg.nemo_gym.dir,
                multi_turn=cfg.nemo_gym.multi_turn,
                system_prompt=cfg.model.system_prompt,
                chat_template_kwargs=cfg.model.chat_template_kwargs,
                max_prompt_length=cfg.max_prompt_length,
                context_length=policy.context_length,
                max_completion_length=cfg.max_completion_length,
            )
        return prompts

    def connect(self, prompts: Sequence[Prompt], rewards: Rewards) -> None:
        """Find the gym's servers, before anything is written."""
        if self.gym is not None:
            self.gym.connect(prompts, multi_turn=self.cfg.nemo_gym.multi_turn)
            set_up_rewards(rewards, self.gym, self.cfg.reward.reward_on_error)

    def source(self, engine: Engine, sampling: Sampling) -> Source:
        if self.cfg.nemo_gym.multi_turn:
            assert self.gym is not None
            vocab_size = self.policy.model.config.get_text_config().vocab_size
            return RunSource(
                self.gym,
                sampling,
                version=lambda: engine.version,
                vocab_size=vocab_size,
                seeded=self.cfg.vllm.seeded,
            )
        if self.function is not None:
            settings = {"chat_template_kwargs": self.cfg.model.chat_template_kwargs}
            return self.function.source(engine, sampling, num_generations=self.cfg.num_generations, **settings)
        if self.cfg.openenv.env is not None:
            from rollout.gyms.openenv import OpenEnvSource

            return OpenEnvSource(engine, sampling, self.episode)
        if self.episode is not None:
            return EpisodeSource(engine, sampling, self.episode)
        return EngineSource(engine, sampling)

    def close(self) -> None:
        if self.gym is not None:
            self.gym.close()


def load_curriculum(spec: str | None) -> Order | None:
    """The user's function, found before anything is sampled."""
    return None if spec is None else find_callable(spec, f"curriculum={spec}")[1]
