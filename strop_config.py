"""The config of a run, for commands that only read rows: a user's transform gets the config that training passes to it.

data/ and rollout/ import nothing from trainer/. Their commands (data.show, rollout.rewards) import this module, which
is outside the packages and may import all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.config.blocks import MethodConfig

# Kind of rows -> the method whose config a transform gets if none is named.
EXAMPLES = {"sft": "sft", "pairs": "dpo", "unpaired": "kto", "stepwise": "prm", "prompts": "grpo", "truths": "ebft"}


def rows_of(method: str) -> str:
    """Return the kind of rows that a method reads, or "auto" if its Config does not state it."""
    from trainer.cli import load_method

    return getattr(load_method(method).Config, "rows", "auto")


def config_for(kind: str, flags: Mapping[str, Any]) -> MethodConfig:
    """Return the config of a method that reads this kind of rows: these flags, and defaults for other settings."""
    kind, mode = ("truths", ["--mode", "strided"]) if kind == "documents" else (kind, [])
    return _parse(["--method", EXAMPLES[kind], *mode, *_words(flags)])


def config_from(path: str, flags: Mapping[str, Any]) -> tuple[MethodConfig, str, dict[str, Any]]:
    """Return the config of a YAML file, overridden by flags; the kind of its rows; and the config as a tree."""
    cfg = _parse(["--config", path, *_words(flags)])
    return cfg, *kind_and_tree(cfg)


def kind_and_tree(cfg: MethodConfig) -> tuple[str, dict[str, Any]]:
    """Return the kind of rows that a run reads, and its config as a tree."""
    from data.command.flags import config_to_tree

    tree = config_to_tree(cfg)
    return "documents" if tree.get("mode") == "strided" else getattr(cfg, "rows", "auto"), tree


def _parse(argv: list[str]) -> MethodConfig:
    from trainer.cli import parse

    return parse(argv)[1]


def _words(flags: Mapping[str, Any]) -> list[str]:
    words = []
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        value = json.dumps(value) if isinstance(value, dict) else value
        words += [flag, *value] if isinstance(value, (tuple, list)) else [f"{flag}={value}"]
    return words
