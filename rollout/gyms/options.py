"""Flags of the environments: NeMo Gym (`--nemo-gym.*`) and OpenEnv (`--openenv.*`).

Separate from nemo_gym.py and openenv.py, so that the flags can be parsed without importing those.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from data.errors import UserError

VERIFY = "nemo_gym:verify"  # the reward from a resource server, for each completion
ENV = "env"  # the reward from the episode itself
REMOTE = ("http://", "https://", "ws://", "wss://")


@dataclass(frozen=True, kw_only=True)
class NemoGymConfig:
    """NeMo Gym servers, already running or started by the run: rows, rewards, and with multi_turn episodes."""

    datasets: tuple[str, ...] = ()
    """Rows as the gym ships them, PATH[:split=train[:N]][@SERVER]; without @SERVER each row's agent_ref says which."""
    dir: str | None = None
    """The gym's folder: relative paths of datasets and config_paths start from it; None: the working folder."""
    auto_start: bool = False
    """Start the servers that the rows need, on 127.0.0.1 and free ports; they end with the run."""
    config_paths: tuple[str, ...] = ()
    """With auto_start: the gym's YAML files, which describe its resource, agent and model servers."""
    python: str | None = None
    """With auto_start: interpreter that has nemo_gym; None: that of .venv in nemo_gym.dir, or this one."""
    head_host: str = "127.0.0.1"
    """Address of the gym's head server, which lists all others; not with auto_start."""
    head_port: int = 11000
    """Port of the head server; not with auto_start."""
    server_timeout: float | None = None
    """Seconds to wait at the start until the servers answer; None: 30, or 360 with auto_start."""
    verify_timeout: float = 30.0
    """Seconds one completion may take to be verified."""
    run_timeout: float = 300.0
    """Seconds one episode may take, with multi_turn."""
    retries: int = 1
    """How often a request is retried when the server fails; refused requests are not."""
    max_connections: int = 64
    """Concurrent requests; the rest wait here."""
    multi_turn: bool = False
    """Let the gym's agents run whole episodes (/run) against our vLLM server; their reward is --reward-funcs env."""
    prefix_mismatch: Literal["last", "drop", "stop"] = "last"
    """If a turn's prompt does not continue the turns before: train on the last turns that do, drop the row, or stop."""
    model_name: str = "policy"
    """Model name sent to /verify."""

    def __post_init__(self) -> None:
        if not 0 < self.head_port < 65536:
            raise UserError(f"nemo_gym.head_port={self.head_port}: must be between 1 and 65535")
        for name in ("server_timeout", "verify_timeout", "run_timeout"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) < math.inf:
                raise UserError(f"nemo_gym.{name}={getattr(self, name)}: must be above 0 and finite")
        if self.retries < 0:
            raise UserError(f"nemo_gym.retries={self.retries}: must be 0 or more")
        if self.max_connections < 1:
            raise UserError(f"nemo_gym.max_connections={self.max_connections}: must be 1 or more")
        if not self.datasets:
            for field in fields(self):
                if getattr(self, field.name) != field.default:
                    raise UserError(
                        f"nemo_gym.{field.name}={getattr(self, field.name)}: has no effect without rows of the gym; "
                        "give --nemo-gym.datasets"
                    )
        if self.auto_start and not self.config_paths:
            raise UserError(
                "nemo_gym.auto_start=True: needs to know which servers; name the gym's YAML files with "
                "--nemo-gym.config-paths"
            )
        if self.auto_start and (self.head_host, self.head_port) != ("127.0.0.1", 11000):
            raise UserError(
                f"nemo_gym.auto_start=True: there is no head server then; leave it out, or head_host={self.head_host} "
                f"and head_port={self.head_port}"
            )
        if not self.auto_start and (self.config_paths or self.python):
            raise UserError(
                "nemo_gym.config_paths, nemo_gym.python: have no effect on servers that run already; leave them out, "
                "or give --nemo-gym.auto-start"
            )

    @property
    def startup_s(self) -> float:
        """Seconds that the servers may take to answer."""
        return self.server_timeout or (360.0 if self.auto_start else 30.0)


def check_nemo_gym(
    cfg: NemoGymConfig,
    *,
    reward_funcs: Sequence[str],
    engine: str,
    vllm_url: Sequence[str],
    vllm_port: int,
    lora_sync: bool,  # adapters would be sent by name
    in_flight: bool,  # weights may change while completions are sampled
    stop: Sequence[str] = (),
) -> None:
    """Refuse combinations that cannot work; for the Config of a method that samples."""
    if VERIFY in reward_funcs and not cfg.datasets:
        raise UserError(f"reward_funcs={VERIFY}: needs rows of the gym; give --nemo-gym.datasets")
    if not cfg.multi_turn:
        return
    if VERIFY in reward_funcs:
        raise UserError(
            f"reward_funcs={VERIFY}: an episode of nemo_gym.multi_turn is verified by its agent, and would be counted "
            f"twice; use --reward-funcs {ENV}"
        )
    if engine == "local":  # auto becomes vllm
        raise UserError(
            f"rollout.engine={engine}: the agents of nemo_gym.multi_turn ask a vLLM server; use --rollout.engine vllm"
        )
    if not vllm_url and not vllm_port and not cfg.auto_start:
        raise UserError(
            "vllm.port=0: the gym's model server must know our vLLM server beforehand; give --vllm.port, or --vllm.url "
            "of a server that runs already, or --nemo-gym.auto-start"
        )
    if lora_sync:
        raise UserError(
            "sync.backend=lora: every version of an adapter has another name, and the gym's model server asks for one "
            "name only; use --sync.backend process_group or filesystem"
        )
    if in_flight:
        raise UserError(
            "async_prefetch=True: new weights end the requests of the gym's agents, which cannot continue; "
            "leave it out with nemo_gym.multi_turn"
        )
    if stop:
        raise UserError(
            f"stop={' '.join(stop)}: does not reach the gym's agents; leave it out with nemo_gym.multi_turn"
        )


@dataclass(frozen=True, kw_only=True)
class OpenEnvConfig:
    """An OpenEnv environment for every episode (extra `openenv`); its rewards are those of --reward-funcs env."""

    env: str | None = None
    """The environment: my_module.MyEnvironment or FILE.py:MyEnvironment (in this process), or the URL of its server."""
    adapter: str | None = None
    """Your class with action(text) -> dict and observation(dict) -> str, as module.Class or FILE.py:Class."""
    action_field: str | None = None
    """Field of the action that takes the model's text; None: its only text field."""
    observation_field: str | None = None
    """Field of the observation that the model is shown; None: its only text field, or all of it as JSON."""
    reset_columns: tuple[str, ...] = ()
    """Columns of the row that are passed to reset(), besides the seed, which is the same for a whole group."""
    max_turns: int = 8
    """Actions in one episode; an episode that is not done by then ends as if it had run out of tokens."""
    reward: Literal["sum", "last"] = "sum"
    """Reward of an episode: the sum over its steps, or that of the last step with a reward."""
    max_concurrent_envs: int = 1
    """Concurrent episodes; more than 1 only if the environment declares that it supports them."""
    timeout: float = 60.0
    """Seconds for one reset or step."""
    on_error: Literal["stop", "none"] = "stop"
    """If the environment fails: stop the run, or give the episode no reward and do not train on it."""

    def __post_init__(self) -> None:
        if self.env is None:
            for field in fields(self):
                if getattr(self, field.name) != field.default:
                    raise UserError(
                        f"openenv.{field.name}={getattr(self, field.name)}: has no effect without an environment; name "
                        "one with --openenv.env"
                    )
        if "" in (self.env, self.adapter):
            raise UserError("openenv.env, openenv.adapter: one is empty; give module.Class or FILE.py:Class")
        if self.adapter is not None and (self.action_field or self.observation_field):
            raise UserError(
                f"openenv.adapter={self.adapter}: converts actions and observations itself, so action_field and "
                "observation_field have no effect; leave them out"
            )
        for name in ("max_turns", "max_concurrent_envs"):
            if getattr(self, name) < 1:
                raise UserError(f"openenv.{name}={getattr(self, name)}: must be 1 or more")
        if not 0 < self.timeout < math.inf:
            raise UserError(f"openenv.timeout={self.timeout}: must be a number of seconds above 0")
        if "seed" in self.reset_columns:
            raise UserError("openenv.reset_columns=seed: a column seed is always given to reset; leave it out")
