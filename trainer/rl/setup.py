"""Set up a rollout: the engine, and how it completes prompts (plain, with tools, by a function, in an environment).

    setup = RolloutSetup(cfg, policy, run.note)        # bad settings are rejected before the run folder exists
    prompts = setup.prompts(cfg.data.data)             # with tool schemas, and rows of a gym
    engine = start_engine(cfg, policy, run, prompts)
    source = setup.source(engine, sampling)            # where completions come from

Edges (servers, episodes, gyms) attach here and are imported only by runs that use them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from data.chat import stop_ids
from data.command.checks import reject_unused
from data.errors import UserError
from data.rows.cache import load_cached
from data.rows.prompts import load_prompts
from data.types import Prompt
from data.user_code import find_callable
from rollout.engine import Engine, EngineSource, Sampling, Source
from rollout.engines.local import LocalEngine
from rollout.rewards.table import Rewards
from rollout.routes import expert_blocks
from rollout.schedule.planner import Order
from trainer.config.blocks import RolloutConfig
from trainer.config.groups import GroupConfig
from trainer.config.sampling import RewardedConfig
from trainer.parallel.comm import context_size, data_size
from trainer.parallel.dtensor import gather
from trainer.policy.experts import prepare_replay
from trainer.policy.load import blocks_of, carry_float32
from trainer.policy.logps import Policy, causal_lm, logps_in_training
from trainer.run.run import Run

MAX_ENV_TOKENS = 2048  # tokens that an environment or a user's function may add to a prompt


class RolloutSetup:
    """Tools, functions, environments and gyms of one run."""

    def __init__(self, cfg: RewardedConfig, policy: Policy, log: Callable[[str], None]) -> None:
        self.cfg, self.policy, self.log = cfg, policy, log
        self.endpoint: Any = None  # on rank 0, once the engine has started
        self.environment: Any = None  # plays whole episodes, with the endpoint as its model
        self.harness: Any = None
        if cfg.tools.harness:
            from rollout.gyms.harness import Harness

            self.environment = self.harness = Harness(cfg.tools, log=log)
        self.toolset: Any = None
        self.episode: Any = None
        if cfg.tools.tools:
            from rollout.episodes.tool_episode import ToolEpisode
            from rollout.episodes.tools import load_tools

            self.toolset = load_tools(cfg.tools.tools, timeout=cfg.tools.tool_timeout)
            self.episode = ToolEpisode.of(cfg.tools, self.toolset, policy.tokenizer)
        self.function: Any = None
        if cfg.tools.rollout_func:
            from rollout.episodes.rollout_func import RolloutFunction

            self.function = RolloutFunction(cfg.tools.rollout_func)
        self.gym: Any = None
        if cfg.nemo_gym.datasets:
            from rollout.gyms.nemo_gym import GymClient

            self.gym = GymClient(cfg.nemo_gym, log=log)
            self.environment = self.gym if cfg.nemo_gym.multi_turn else None
        self.verifiers: Any = None
        if cfg.verifiers.env is not None:
            from rollout.gyms.verifiers_env import VerifiersEnv  # its package is an extra

            kwargs = cfg.model.chat_template_kwargs
            self.verifiers = VerifiersEnv(cfg.verifiers, model=policy.source, chat_template_kwargs=kwargs, log=log)
            self.environment = self.verifiers
        if cfg.openenv.env is not None:
            from rollout.gyms.openenv import load_episode  # its package is an extra

            self.environment = load_episode(cfg.openenv, policy.tokenizer)

    @property
    def columns(self) -> Sequence[str] | None:
        """Columns that completions add to the data's, for rewards; None: unknown before sampling."""
        if self.function is not None:
            return None
        if self.environment is not None:
            return self.environment.columns
        if self.toolset is not None:
            return ("num_turns", *(["env_reward"] if self.toolset.pays else []))
        return ()

    @property
    def extra_tokens(self) -> int:
        """Tokens that a sequence may have in addition to its prompt and completion."""
        has_none = self.environment is None and self.function is None
        return 0 if has_none else MAX_ENV_TOKENS

    def prompts(self, specs: Sequence[str], *, held_out: bool = False) -> list[Prompt]:
        cfg, policy = self.cfg, self.policy
        prompts = prompts_of(cfg, policy, specs)
        if self.toolset is not None and prompts:
            room = None if policy.context_length is None else policy.context_length - cfg.max_completion_length
            from rollout.episodes.tool_episode import show_tools

            schemas, limit = self.toolset.schemas, cfg.max_prompt_length
            prompts = show_tools(prompts, policy.tokenizer, schemas, max_prompt_length=limit, longest=room)
            self.toolset.check_rows(prompts, "eval_data" if held_out else "data")
        if self.gym is not None and not held_out:
            from data.rows.nemo_gym import load_nemo_gym

            gym = cfg.nemo_gym
            options = {"folder": gym.dir, "multi_turn": gym.multi_turn, **prompt_options(cfg, policy)}
            prompts += load_nemo_gym(gym.datasets, policy.tokenizer, **options)
        if self.verifiers is not None and not held_out:
            prompts += self.verifiers.prompts(policy.tokenizer, **prompt_options(cfg, policy))
        return prompts

    def connect(self, prompts: Sequence[Prompt], rewards: Rewards) -> None:
        """Connect to the gym's servers, before anything is written."""
        if self.gym is not None:
            from rollout.gyms.nemo_gym import set_up_rewards

            self.gym.connect(prompts, multi_turn=self.cfg.nemo_gym.multi_turn)
            set_up_rewards(rewards, self.gym, self.cfg.reward.reward_on_error)
        if self.verifiers is not None:
            self.verifiers.open()

    def start(self, engine: Engine, run_dir: Path) -> None:
        """Start the endpoint, and the gym's servers, whose agents query it."""
        gym = self.cfg.nemo_gym
        verifies = self.gym is not None and gym.auto_start and engine.concurrent  # its verifiers may query the policy
        if self.environment is not None or verifies:
            from rollout.episodes.endpoint import Endpoint
            from rollout.servers.command import TOKEN

            token = os.environ.get(TOKEN) if gym.multi_turn else None
            tool_format = self.cfg.tools.tool_format
            self.endpoint = Endpoint(engine, self.policy.tokenizer, tool_format=tool_format, token=token)
            if self.cfg.openenv.env is None:
                self.endpoint.open(gym.policy_port)
        if self.harness is not None:
            self.harness.open(run_dir / "harness")
        if self.gym is not None and gym.auto_start:
            model = None if self.endpoint is None else (self.endpoint.url, self.endpoint.token)
            self.gym.start(model, run_dir / "logs")

    def source(self, engine: Engine, sampling: Sampling) -> Source:
        if self.endpoint is not None:
            self.endpoint.attach(engine)
        if self.environment is not None:
            return self.environment.source(self.endpoint, sampling)
        if self.function is not None:
            settings = {"chat_template_kwargs": self.cfg.model.chat_template_kwargs}
            return self.function.source(engine, sampling, num_generations=self.cfg.num_generations, **settings)
        if self.episode is not None:
            from rollout.episodes.episode import EpisodeSource

            return EpisodeSource(engine, sampling, self.episode)
        streams = sampling.for_training and self.cfg.overlap.streaming_partial_batch
        return EngineSource(engine, sampling, streams=streams)

    def close(self) -> None:
        for part in (self.gym, self.verifiers, self.harness, self.endpoint):
            if part is not None:
                part.close()


def load_curriculum(spec: str | None) -> Order | None:
    """The function of --curriculum, or None."""
    return None if spec is None else find_callable(spec, f"curriculum={spec}")[1]


def prompts_of(cfg: RewardedConfig, policy: Policy, specs: Sequence[str]) -> list[Prompt]:
    """Load the prompts of a sampling method, with its length limits."""
    if not specs:
        return []
    options = {"data_format": cfg.data.data_format, "cfg": cfg, **prompt_options(cfg, policy)}
    return [*load_cached(load_prompts, specs, policy.tokenizer, folder=cfg.data.row_cache, **options)]


def prompt_options(cfg: GroupConfig, policy: Policy) -> dict[str, Any]:
    """Keyword arguments shared by all prompt loaders."""
    return {
        "system_prompt": cfg.model.system_prompt,
        "chat_template_kwargs": cfg.model.chat_template_kwargs,
        "max_prompt_length": cfg.max_prompt_length,
        "context_length": policy.context_length,
        "max_completion_length": cfg.max_completion_length,
    }


# The engine.


def check_engine_setup(cfg: GroupConfig, policy: Policy, run: Run) -> None:
    """Raise if a setting cannot work with this engine and these ranks, before the run folder exists."""
    if cfg.prompts_per_step < data_size():
        shares = "ranks" if context_size() == 1 else f"times {context_size()} ranks that share one"
        raise UserError(
            f"per_device_train_batch_size={cfg.run.per_device_train_batch_size}: a step has {cfg.prompts_per_step} "
            f"groups for {data_size()} {shares}; raise it or --gradient-accumulation-steps until each gets a group"
        )
    if cfg.rollout.engine == "local" and policy.device.type == "cpu":
        reject_unused(cfg.rollout, "on a CPU, where the cache grows as needed", ("cache_gib",), "rollout.")
    if cfg.rollout.engine == "vllm":
        from trainer.rl import servers

        servers.check_servers(cfg, policy, run)


def start_engine(
    cfg: GroupConfig,
    policy: Policy,
    run: Run,
    prompts: Sequence[Prompt],  # all that it will complete
    *,
    extra_tokens: int = 0,  # per sequence, in addition to prompt and completion
) -> Engine:
    """Start the engine; it is closed with the run."""
    if cfg.rollout.replay_routes and expert_blocks(policy.model):
        layers = blocks_of(causal_lm(policy.model), policy.source)
        policy.replays_routes = prepare_replay(policy, list(layers), run.note)
    if cfg.rollout.engine == "local" and policy.is_lora:
        carry_float32(policy)
    local = LocalEngine(
        policy.model,
        policy.tokenizer,
        max_batch_size=cfg.rollout.max_batch_size,
        autocast_dtype=policy.autocast_dtype,
        cache_gib=cfg.rollout.cache_gib,
        gather=gather,
        records_routes=policy.replays_routes,
        exact_logps=partial(logps_in_training, policy) if policy.is_exact else None,
        log=run.note,
    )
    longest_prompt = max(len(prompt.ids) for prompt in prompts)
    if cfg.rollout.engine == "vllm":
        from trainer.rl import servers

        return servers.start_servers(cfg, policy, run, local, longest_prompt + cfg.max_completion_length + extra_tokens)
    if policy.device.type == "cuda" and not policy.is_sharded:
        local.prepare(
            prompt_length=longest_prompt,
            max_tokens=cfg.max_completion_length + extra_tokens,
            prompts=cfg.prompts_per_rollout + cfg.queued_groups,
            group=cfg.num_generations,
        )
    return run.keep(local)


def training_sampling(cfg: GroupConfig, policy: Policy) -> Sampling:
    """The method's temperature and filters, up to the model's end tokens or a stop string."""
    return Sampling(
        temperature=cfg.temperature,
        top_k=cfg.top_k,
        top_p=cfg.top_p,
        min_p=cfg.min_p,
        max_tokens=cfg.max_completion_length,
        stop_ids=stop_ids(policy.tokenizer, policy.generation_eos),
        stop=cfg.stop,
        for_training=True,
    )


def evaluation_sampling(sampling: Sampling, cfg: RolloutConfig) -> Sampling:
    return replace(
        sampling,
        temperature=cfg.eval_temperature,
        top_k=cfg.eval_top_k,
        top_p=cfg.eval_top_p,
        min_p=0.0,
        for_training=False,
    )
