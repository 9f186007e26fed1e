"""The config that training passes to a user's transform, for commands that only read rows.

Its classes belong to trainer/, which imports this folder, so they are looked up by name and only when needed.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from data.formats.ebft import EBFT_FORMATS, EBFT_STRIDED_FORMATS
from data.formats.pairs import PAIR_FORMATS
from data.formats.registry import PROMPT_FORMATS, SFT_FORMATS, parse_specs
from data.formats.unpaired import UNPAIRED_FORMATS
from data.rows.stepwise import STEP_FORMATS

BUILT_IN = {*PROMPT_FORMATS, *SFT_FORMATS, *PAIR_FORMATS, *UNPAIRED_FORMATS, *STEP_FORMATS, *EBFT_FORMATS,
            *EBFT_STRIDED_FORMATS}  # fmt: skip
# What each method reads. A transform gets the config of the first method of its kind if no method is named.
KINDS = {"sft": "sft", "dpo": "pairs", "ipo": "pairs", "cpo": "pairs", "simpo": "pairs", "orpo": "pairs", "rm": "pairs",
         "kto": "unpaired", "prm": "stepwise", "grpo": "prompts", "rloo": "prompts", "gdpo": "prompts",
         "opd": "prompts", "online_dpo": "prompts", "ppo": "prompts", "ebft": "truths"}  # fmt: skip


def uses_transform(specs: Sequence[str], data_format: str) -> bool:
    names = {spec.format or data_format for spec in parse_specs(specs)}
    return any("." in name and name not in BUILT_IN for name in names)


def config_for(kind: str, flags: Mapping[str, Any]) -> Any:
    """The config of a method that reads rows of this kind: these flags, and defaults for the rest."""
    kind, mode = ("truths", ["--mode", "strided"]) if kind == "documents" else (kind, [])
    method = next(method for method, read in KINDS.items() if read == kind)
    return _parsed(["--method", method, *mode, *_words(flags)])


def config_from(path: str, flags: Mapping[str, Any]) -> tuple[Any, str, dict[str, Any]]:
    """The config of a YAML file as training reads it, overridden by flags; the kind of its rows; the config tree."""
    cfg = _parsed(["--config", path, *_words(flags)])
    tree = importlib.import_module("data.command.flags").config_to_tree(cfg)
    kind = KINDS.get(tree["method"], "auto")
    return cfg, "documents" if tree.get("mode") == "strided" else kind, tree


def _parsed(argv: list[str]) -> Any:
    return importlib.import_module("trainer.cli").parse(argv)[1]


def _words(flags: Mapping[str, Any]) -> list[str]:
    words = []
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        value = json.dumps(value) if isinstance(value, dict) else value
        words += [flag, *value] if isinstance(value, (tuple, list)) else [f"{flag}={value}"]
    return words
