"""Environment flags: NeMo Gym (`--nemo-gym.*`) and OpenEnv (`--openenv.*`).

Separate from nemo_gym.py and openenv.py, so that flags can be parsed without importing them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from data.command.checks import check_numbers, reject_unused
from data.errors import UserError

VERIFY = "nemo_gym:verify"  # a resource server scores each completion
ENV = "env"  # the episode provides the reward
ENDPOINT_PORT = 11001  # next to the head server's
REMOTE = ("http://", "https://", "ws://", "wss://")
PrefixMismatch = Literal["branch", "last", "drop", "stop"]


@dataclass(frozen=True, kw_only=True)
class NemoGymConfig:
    """NeMo Gym servers, already running or started by the run: rows, rewards, and with multi_turn also episodes."""

    datasets: tuple[str, ...] = ()
    """Data files of the gym: PATH[:split=train[:N]][@SERVER]. Default server: agent_ref in each row."""
    dir: str | None = None
    """The gym's folder, base of relative paths in datasets and config_paths. None: the working folder."""
    auto_start: bool = False
    """Start the servers that the rows need, on 127.0.0.1 and free ports, and stop them with the run."""
    config_paths: tuple[str, ...] = ()
    """With auto_start: the gym's YAML files, which describe its resource, agent and model servers."""
    python: str | None = None
    """With auto_start: interpreter with nemo_gym. None: .venv in nemo_gym.dir, or this interpreter without a .venv."""
    head_host: str = "127.0.0.1"
    """Address of the gym's head server, which lists all servers. Not with auto_start."""
    head_port: int = 11000
    """Port of the head server. Not with auto_start."""
    server_timeout: float | None = None
    """Seconds to wait at the start until the servers answer. None: 30, or 360 with auto_start."""
    verify_timeout: float = 30.0
    """Seconds that verifying one completion may take."""
    run_timeout: float = 300.0
    """Seconds that one episode may take, with multi_turn."""
    retries: int = 1
    """Number of retries if a server fails. Requests that the server rejects are not retried."""
    max_connections: int = 64
    """Maximum concurrent requests."""
    multi_turn: bool = False
    """Let the gym's agents run whole episodes (/run) with the policy as their model. Use --reward-funcs env."""
    endpoint_port: int | None = None
    """With multi_turn: port at which the gym's model server finds the policy. None: 11001; with auto_start any."""
    prefix_mismatch: PrefixMismatch = "branch"
    """If an agent rewrites earlier turns. branch: train all branches; last: the last one; drop: the row; stop."""
    model_name: str = "policy"
    """Model name sent to /verify."""

    def __post_init__(self) -> None:
        rules = {
            "between 1 and 65535": "head_port endpoint_port",
            "above 0 and finite": "server_timeout verify_timeout run_timeout",
            "0 or more": "retries",
            "1 or more": "max_connections",
        }
        check_numbers(self, rules, "nemo_gym.")
        if not self.multi_turn:
            reject_unused(self, "without nemo_gym.multi_turn", ("endpoint_port",), "nemo_gym.")
        if not self.datasets:
            reject_unused(self, "without rows of the gym; set --nemo-gym.datasets", prefix="nemo_gym.")
        if self.auto_start and not self.config_paths:
            raise UserError("nemo_gym.auto_start=True: no server files; set --nemo-gym.config-paths")
        if self.auto_start and (self.head_host, self.head_port) != ("127.0.0.1", 11000):
            raise UserError(
                f"nemo_gym.head_host={self.head_host}, nemo_gym.head_port={self.head_port}: have no effect with "
                "nemo_gym.auto_start=True; use one of the two"
            )
        if not self.auto_start and (self.config_paths or self.python):
            raise UserError(
                "nemo_gym.config_paths, nemo_gym.python: have no effect on running servers; add --nemo-gym.auto-start"
            )

    @property
    def policy_port(self) -> int:
        """Port of the endpoint; 0: any."""
        return self.endpoint_port or (0 if self.auto_start or not self.multi_turn else ENDPOINT_PORT)

    @property
    def startup_s(self) -> float:
        """Seconds that the servers may take to answer."""
        return self.server_timeout or (360.0 if self.auto_start else 30.0)


def check_nemo_gym(cfg: NemoGymConfig, *, reward_funcs: Sequence[str]) -> None:
    """Raise for unsupported combinations with other settings of a sampling method."""
    if VERIFY in reward_funcs and not cfg.datasets:
        raise UserError(f"reward_funcs={VERIFY}: requires rows of the gym; set --nemo-gym.datasets")
    if not cfg.multi_turn:
        return
    if VERIFY in reward_funcs:
        raise UserError(
            f"reward_funcs={VERIFY}: with nemo_gym.multi_turn the agent verifies the episode already; use "
            f"--reward-funcs {ENV}"
        )


@dataclass(frozen=True, kw_only=True)
class OpenEnvConfig:
    """An OpenEnv environment for every episode (extra `openenv`). Use --reward-funcs env."""

    env: str | None = None
    """Environment: my_module.MyEnvironment or FILE.py:MyEnvironment (in this process), or the URL of its server."""
    adapter: str | None = None
    """Class with action(text) -> dict and observation(dict) -> str: module.Class or FILE.py:Class."""
    action_field: str | None = None
    """Action field for the model's text. None: the only text field."""
    observation_field: str | None = None
    """Observation field that is shown to the model. None: the only text field, or the whole observation as JSON."""
    reset_columns: tuple[str, ...] = ()
    """Data columns passed to reset(), in addition to the seed, which is the same for a whole group."""
    max_turns: int = 8
    """Maximum actions per episode. An unfinished episode counts as truncated."""
    reward: Literal["sum", "last"] = "sum"
    """Reward of an episode. sum: over its steps; last: of the last step with a reward."""
    max_concurrent_envs: int = 1
    """Maximum concurrent episodes. More than 1 only if the environment declares support."""
    timeout: float = 60.0
    """Seconds that one reset or step may work or wait. In this process, waiting for a core does not count."""
    on_error: Literal["stop", "none"] = "stop"
    """If the environment fails. stop: stop the run; none: no reward for the episode, and do not train on it."""

    def __post_init__(self) -> None:
        if self.env is None:
            reject_unused(self, "without an environment; set --openenv.env", prefix="openenv.")
        if "" in (self.env, self.adapter):
            raise UserError("openenv.env, openenv.adapter: empty name; pass module.Class or FILE.py:Class")
        if self.adapter is not None and (self.action_field or self.observation_field):
            raise UserError(
                f"openenv.action_field, openenv.observation_field: have no effect with openenv.adapter={self.adapter}; "
                "remove them"
            )
        rules = {"1 or more": "max_turns max_concurrent_envs", "a number of seconds above 0": "timeout"}
        check_numbers(self, rules, "openenv.")
        if "seed" in self.reset_columns:
            raise UserError("openenv.reset_columns=seed: reset() always gets the seed; remove it")
