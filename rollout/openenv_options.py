"""Flags of OpenEnv environments."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

REMOTE = ("http://", "https://", "ws://", "wss://")


@dataclass(frozen=True, kw_only=True)
class OpenEnvConfig:
    """An OpenEnv environment that every episode is played in (extra `openenv`); the reward env gives what it paid."""

    env: str | None = None
    """The environment: my_module.MyEnvironment or FILE.py:MyEnvironment (in this process), or the URL of its server."""
    adapter: str | None = None
    """Your class with action(text) -> dict and observation(dict) -> str, as module.Class or FILE.py:Class."""
    action_field: str | None = None
    """Field of the action that takes the model's text; None: its only text field."""
    observation_field: str | None = None
    """Field of the observation that the model is shown; None: its only text, or all of it as JSON."""
    reset_columns: tuple[str, ...] = ()
    """Columns of the row that are given to reset(), besides the seed, which is the same for a whole group."""
    max_turns: int = 8
    """Actions in one episode; one that is not over by then ends as if it had run out of tokens."""
    reward: Literal["sum", "last"] = "sum"
    """Reward of an episode: all that its steps paid, or what the last one that paid did."""
    max_concurrent_envs: int = 1
    """Episodes at the same time; more than 1 only if the environment says that it keeps them apart."""
    timeout: float = 60.0
    """Seconds that one reset or step may take."""
    on_error: Literal["stop", "none"] = "stop"
    """An environment that fails: stop the run, or give its episode no reward and train on none of it."""

    def __post_init__(self) -> None:
        if self.env is None:
            for field in fields(self):
                if getattr(self, field.name) != field.default:
                    raise ValueError(
                        f"openenv.{field.name}={getattr(self, field.name)}: has no effect without an environment; name "
                        "one with --openenv.env"
                    )
        if "" in (self.env, self.adapter):
            raise ValueError("openenv.env, openenv.adapter: one is empty; give module.Class or FILE.py:Class")
        if self.adapter is not None and (self.action_field or self.observation_field):
            raise ValueError(
                f"openenv.adapter={self.adapter}: makes actions and texts itself, so action_field and "
                "observation_field have no effect; leave them out"
            )
        for name in ("max_turns", "max_concurrent_envs"):
            if getattr(self, name) < 1:
                raise ValueError(f"openenv.{name}={getattr(self, name)}: must be 1 or more")
        if not 0 < self.timeout < math.inf:
            raise ValueError(f"openenv.timeout={self.timeout}: must be a number of seconds above 0")
        if "seed" in self.reset_columns:
            raise ValueError("openenv.reset_columns=seed: a column seed is always given to reset; leave it out")

    @property
    def is_remote(self) -> bool:
        return self.env is not None and self.env.lower().startswith(REMOTE)
