"""Set-up of a rollout: the engine, and how completions are made with it (plain, with tools, by a user's function, in an
environment or a gym).

    setup = RolloutSetup(cfg, policy, run.note)        # bad settings are refused before there is a run folder
    prompts = setup.prompts(cfg.data.data)             # with tools in them, and rows of the gym
    source = setup.source(engine, sampling)            # where completions come from
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from data.chat import stop_ids
from data.errors import UserError
from data.rows.prompts import load_prompts
from data.types import Prompt
from data.user_code import find_callable
from rollout.engine import Engine, EngineSource, Sampling, Source
from rollout.engines.local import LocalEngine
from rollout.engines.vllm import VllmEngine, check_start
from rollout.episodes.episode import EpisodeSource
from rollout.episodes.rollout_func import RolloutFunction
from rollout.episodes.tool_episode import ToolEpisode, show_tools
from rollout.episodes.tools import load_tools
from rollout.rewards.table import Rewards
from rollout.schedule.planner import Order
from rollout.servers.command import shares_gpu
from rollout.servers.lease import Owner
from rollout.servers.options import VllmConfig
from rollout.sync.base import time_limit
from trainer.config.blocks import RolloutConfig
from trainer.config.checks import reject_unused
from trainer.parallel.comm import context_size, data_size, is_main, next_command, rank0_alone, send_command, world_size
from trainer.parallel.ranks import local_world_size
from trainer.policy.logps import Policy
from trainer.policy.weights import PolicyWeights
from trainer.rl.rank0_rollout import AllRanksScores, SharedWeights
from trainer.run.run import Run

MAX_ENV_TOKENS = 2048  # tokens that an environment or a function of the user may put into a prompt


class RolloutSetup:
    """Tools, functions, environments and gyms of one run. Gyms are imported only when a run uses them."""

    def __init__(self, cfg: Any, policy: Policy, log: Callable[[str], None]) -> None:
        self.cfg, self.policy = cfg, policy
        self.toolset = load_tools(cfg.tools.tools, timeout=cfg.tools.tool_timeout) if cfg.tools.tools else None
        self.function = RolloutFunction(cfg.tools.rollout_func) if cfg.tools.rollout_func else None
        self.gym: Any = None
        if cfg.nemo_gym.datasets:
            from rollout.gyms.nemo_gym import GymClient

            self.gym = GymClient(cfg.nemo_gym, log=log)
        self.verifiers: Any = None
        if cfg.verifiers.env is not None:
            from rollout.gyms.verifiers_env import VerifiersEnv  # its package is an extra

            options = {"chat_template_kwargs": cfg.model.chat_template_kwargs, "log": log}
            self.verifiers = VerifiersEnv(cfg.verifiers, model=policy.source, **options)
        self.episode: Any = None
        if self.toolset is not None:
            self.episode = ToolEpisode.of(cfg.tools, self.toolset, policy.tokenizer)
        if cfg.openenv.env is not None:
            from rollout.gyms.openenv import load_episode  # its package is an extra

            self.episode = load_episode(cfg.openenv, policy.tokenizer)

    @property
    def columns(self) -> Sequence[str] | None:
        """Columns that completions add to those of the data, for rewards; None: not known before they are made."""
        if self.function is not None:
            return None
        if self.cfg.nemo_gym.multi_turn:
            from rollout.gyms.nemo_gym import COLUMNS

            return COLUMNS
        if self.verifiers is not None:
            from rollout.gyms.verifiers_env import COLUMNS

            return COLUMNS
        if self.toolset is not None:
            return ("num_turns", *(["env_reward"] if self.toolset.pays else []))
        return ("num_turns", "env_reward") if self.episode is not None else ()

    @property
    def extra_tokens(self) -> int:
        """Tokens that a sequence may have besides its prompt and completion."""
        if self.cfg.nemo_gym.multi_turn:
            return self.cfg.max_completion_length  # its agents ask for a whole answer in every turn, the last included
        given = (self.cfg.openenv.env, self.function, self.verifiers)
        return MAX_ENV_TOKENS if any(one is not None for one in given) else 0

    def prompts(self, specs: Sequence[str], *, held_out: bool = False) -> list[Prompt]:
        cfg, policy = self.cfg, self.policy
        prompts = prompts_of(cfg, policy, specs)
        if self.toolset is not None and prompts:
            room = None if policy.context_length is None else policy.context_length - cfg.max_completion_length
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
        """Find the gym's servers, before anything is written."""
        if self.gym is not None:
            from rollout.gyms.nemo_gym import set_up_rewards

            self.gym.connect(prompts, multi_turn=self.cfg.nemo_gym.multi_turn)
            set_up_rewards(rewards, self.gym, self.cfg.reward.reward_on_error)
        if self.verifiers is not None:
            self.verifiers.open()

    def start(self, engine: Engine, log_dir: Path) -> None:
        """Start the gym's servers, if the run has its own; its agents ask the servers of `engine`."""
        if self.gym is not None and self.cfg.nemo_gym.auto_start:
            self.gym.start(engine.places if isinstance(engine, VllmEngine) else [], log_dir)

    def source(self, engine: Engine, sampling: Sampling) -> Source:
        if self.cfg.nemo_gym.multi_turn:
            assert self.gym is not None
            from rollout.gyms.nemo_gym import RunSource

            vocab_size, seeded = self.policy.model.config.get_text_config().vocab_size, self.cfg.vllm.seeded
            return RunSource(self.gym, sampling, version=lambda: engine.version, vocab_size=vocab_size, seeded=seeded)
        if self.verifiers is not None:
            return self.verifiers.source(engine, sampling)
        if self.function is not None:
            settings = {"chat_template_kwargs": self.cfg.model.chat_template_kwargs}
            return self.function.source(engine, sampling, num_generations=self.cfg.num_generations, **settings)
        if self.cfg.openenv.env is not None:
            from rollout.gyms.openenv import OpenEnvSource

            return OpenEnvSource(engine, sampling, self.episode)
        if self.episode is not None:
            return EpisodeSource(engine, sampling, self.episode)
        streams = sampling.for_training and self.cfg.overlap.streaming_partial_batch
        return EngineSource(engine, sampling, streams=streams)

    def close(self) -> None:
        for environment in (self.gym, self.verifiers):
            if environment is not None:
                environment.close()


def load_curriculum(spec: str | None) -> Order | None:
    """The user's function, or None."""
    return None if spec is None else find_callable(spec, f"curriculum={spec}")[1]


def prompts_of(cfg: Any, policy: Policy, specs: Sequence[str]) -> list[Prompt]:
    """Prompts of a method that samples, with its limits on length."""
    if not specs:
        return []
    options = {"data_format": cfg.data.data_format, "cfg": cfg, **prompt_options(cfg, policy)}
    return load_prompts(specs, policy.tokenizer, **options)


def prompt_options(cfg: Any, policy: Policy) -> dict[str, Any]:
    """What every loader of prompts takes."""
    return {
        "system_prompt": cfg.model.system_prompt,
        "chat_template_kwargs": cfg.model.chat_template_kwargs,
        "max_prompt_length": cfg.max_prompt_length,
        "context_length": policy.context_length,
        "max_completion_length": cfg.max_completion_length,
    }


# The engine.


def check_servers(cfg: Any, policy: Policy, run: Run) -> None:
    """Refuse what has no effect here or would keep a server from starting or answering, before there is a folder."""
    if cfg.prompts_per_step < data_size():
        those = "processes" if context_size() == 1 else f"times {context_size()} processes that share one"
        raise UserError(
            f"per_device_train_batch_size={cfg.run.per_device_train_batch_size}: a step has {cfg.prompts_per_step} "
            f"groups for {data_size()} {those}; raise it, or gradient_accumulation_steps, until each gets a group"
        )
    if cfg.rollout.engine == "local" and policy.device.type == "cpu":
        reject_unused(cfg.rollout, "on a CPU, whose cache grows as needed; leave it out", ("cache_gib",), "rollout.")
    if cfg.rollout.engine == "vllm":
        if world_size() > 1:
            check_places(cfg, policy)
        if is_main():
            check_start(cfg.vllm, policy.device, run.id)
        if cfg.overlap.vllm_sync_interval > 1 and shares_gpu(cfg.vllm, policy.device):
            raise UserError(
                f"vllm_sync_interval={cfg.overlap.vllm_sync_interval}: has no effect on a server that shares the "
                "trainer's GPU, which gets its weights whenever it wakes; leave it out"
            )
        if cfg.overlap.async_prefetch and shares_gpu(cfg.vllm, policy.device):
            raise UserError(
                "async_prefetch=True: the server shares the trainer's GPU and sleeps while it trains; give it its own "
                "with --vllm.devices or --vllm.url, or let both run at once with --vllm.colocate False "
                "--vllm.devices 0 --vllm.gpu-memory-utilization 0.3"
            )


def check_places(cfg: Any, policy: Policy) -> None:
    """Servers beside several processes need GPUs of their own, and syncs within the time limit of collectives."""
    if policy.device.type == "cuda":
        if shares_gpu(cfg.vllm, policy.device):
            raise UserError(
                f"vllm.colocate={cfg.vllm.colocate}: a server shares the GPU of one process, but {world_size()} train; "
                "give servers their own GPUs with --vllm.devices or --vllm.url"
            )
        if cfg.sync.backend == "ipc":
            raise UserError(
                f"sync.backend=ipc: needs a server on the trainer's GPU, but {world_size()} processes train on one "
                "each; use --sync.backend process_group"
            )
        if is_main():  # servers of ours run on its machine
            check_gpus(cfg.vllm, local_world_size(), torch.cuda.device_count())
    backend = "lora" if cfg.overlap.vllm_lora_sync else cfg.sync.backend
    if policy.is_sharded and (backend == "process_group" or (backend == "auto" and not policy.is_lora)):
        size = sum(p.numel() for p in policy.model.parameters()) * getattr(torch, serving_dtype(cfg, policy)).itemsize
        if cfg.parallel.timeout_s < (longest := time_limit(size)):
            raise UserError(
                f"parallel.timeout_s={cfg.parallel.timeout_s:g}: processes wait for each other while weights go to "
                f"servers, which may take {longest:.0f} s when one hangs; raise it, or use --sync.backend filesystem"
            )


def check_gpus(vllm: VllmConfig, ours: int, there_are: int) -> None:
    """Servers that the run starts need GPUs that no process trains on."""
    if vllm.url:
        return
    taken = [number for number in vllm.devices if number < ours]
    if taken:
        raise UserError(
            f"vllm.devices={' '.join(map(str, vllm.devices))}: GPU {taken[0]} is used for training, as are all below "
            f"{ours}; name others"
        )
    needed = vllm.replicas * vllm.tensor_parallel_size
    if not vllm.devices and ours + needed > there_are:
        raise UserError(
            f"vllm.replicas={vllm.replicas}: needs {needed} GPUs beside {ours} that train, but this machine has "
            f"{there_are}; start fewer processes, or run servers elsewhere and name them with --vllm.url"
        )


def start_engine(cfg: Any, policy: Policy, run: Run, prompts: Sequence[Prompt], *, extra_tokens: int = 0) -> Engine:
    """The engine, closed with the run; `prompts` are all that it will complete.

    `unseen` is how many tokens besides a prompt and its completion a sequence may get.
    """
    local = LocalEngine(
        policy.model,
        policy.tokenizer,
        max_batch_size=cfg.rollout.max_batch_size,
        autocast_dtype=policy.autocast_dtype,
        cache_gib=cfg.rollout.cache_gib,
        log=run.note,
    )
    if cfg.rollout.engine == "local":
        if policy.device.type == "cuda" and not policy.is_sharded:
            local.prepare(
                prompt_length=max(len(prompt.ids) for prompt in prompts),
                max_tokens=cfg.max_completion_length + extra_tokens,
                prompts=cfg.prompts_per_rollout,
                group=cfg.num_generations,
            )
        return run.keep(local)
    if not is_main():
        next_command()  # servers take minutes to start, and the next collective has a limit
        return local
    dtype = serving_dtype(cfg, policy)
    sync = replace(cfg.sync, backend="lora") if cfg.overlap.vllm_lora_sync else cfg.sync
    longest = max(len(prompt.ids) for prompt in prompts) + cfg.max_completion_length + extra_tokens
    engine = VllmEngine(
        servers_for(cfg),
        sync,
        model=policy.source,
        source=(SharedWeights if policy.is_sharded else PolicyWeights)(policy, getattr(torch, dtype)),
        local=AllRanksScores(policy, local) if policy.is_sharded else local,
        device=policy.device,
        own_gpus=local_world_size(),
        owner=Owner.here(run.id, str(run.dir.resolve())),
        dtype=dtype,
        lora_rank=cfg.lora.r if sync.backend in ("auto", "lora") else 0,
        log_dir=run.dir / "logs",
        max_model_len=min(longest, policy.context_length or longest),
        trust_remote_code=cfg.model.trust_remote_code,
        samples_ahead=cfg.overlap.async_prefetch,
        vocab_size=policy.model.config.get_text_config().vocab_size,
        log=run.note,
    )
    run.keep(engine)
    if world_size() > 1:
        with rank0_alone():
            send_command("started")
    return engine


def servers_for(cfg: Any) -> VllmConfig:
    """Settings of the servers; a gym that the run starts must be able to find them."""
    gym = getattr(cfg, "nemo_gym", None)
    if gym is None or not gym.auto_start:
        return cfg.vllm
    from rollout.gyms.auto_start import known_servers

    return known_servers(cfg.vllm)


def serving_dtype(cfg: Any, policy: Policy) -> str:
    return str(policy.compute_dtype).removeprefix("torch.") if cfg.vllm.dtype == "auto" else cfg.vllm.dtype


def training_sampling(cfg: Any, policy: Policy) -> Sampling:
    """The full distribution at the method's temperature, up to the model's end tokens or a stop string."""
    return Sampling(
        temperature=cfg.temperature,
        max_tokens=cfg.max_completion_length,
        stop_ids=stop_ids(policy.tokenizer, policy.generation_eos),
        stop=cfg.stop,
        for_training=True,
    )


def evaluation_sampling(sampling: Sampling, cfg: RolloutConfig) -> Sampling:
    return replace(
        sampling, temperature=cfg.eval_temperature, top_p=cfg.eval_top_p, top_k=cfg.eval_top_k, for_training=False
    )
