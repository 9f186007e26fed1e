"""Where completions come from: the engine alone, episodes with tools, a function of the user, an environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data.user_code import attribute_of, load_file, load_module
from rollout.engine import Engine
from rollout.planner import Order
from rollout.source import EngineSource, Source
from rollout.types import Sampling
from trainer.model import Policy


def make_source(cfg: Any, policy: Policy, engine: Engine, sampling: Sampling) -> Source:
    return EngineSource(engine, sampling)


def load_curriculum(spec: str | None) -> Order | None:
    """The user's function, found before anything is sampled."""
    if spec is None:
        return None
    label = f"curriculum={spec}"
    path, colon, attribute = spec.rpartition(":")
    if colon:
        module = load_file(Path(path).expanduser().resolve(), label)
    else:
        path, dot, attribute = spec.rpartition(".")
        if not dot:
            raise ValueError(f"{label}: is no function; give module.fn or FILE.py:fn")
        module = load_module(path, label)
    found = attribute_of(module, attribute, label)
    if not callable(found):
        raise ValueError(f"{label}: is a {type(found).__name__}, not a function; name something callable")
    return found
