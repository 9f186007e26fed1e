"""Settings as config.yaml writes them: the defaults of a Config class, and the changes that resumes made."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from data.command.config_file import load_config
from data.command.flags import config_fields, config_to_tree, default_of
from data.errors import UserError
from trainer.config.learning_rates import rates_of

Earlier = dict[str, list[tuple[int, str]]]  # (last step, value) of each earlier value, by setting
SEGMENTS = "segments.yaml"  # in a run folder, if a resume changed settings


def default_tree(config: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree nested like config.yaml, without required settings.

    `settings` are the run's: they decide the default learning rate (LoRA or not), and what auto was resolved to.
    """
    tree: dict[str, Any] = {}
    for field, _, block, prefix in config_fields(config):
        default = default_of(field)
        if default is not dataclasses.MISSING and block is not None:
            default = config_to_tree(default)
        elif block is not None:
            values = {inner.name: default_of(inner) for inner in dataclasses.fields(block)}
            default = {name: value for name, value in values.items() if value is not dataclasses.MISSING}
        if block is not None and not prefix:
            tree |= default
        elif default is not dataclasses.MISSING:
            tree[field.name] = default
    if "rollout" in tree and (settings.get("rollout") or {}).get("engine") == "local":
        tree["rollout"] = tree["rollout"] | {"engine": "local"}
    if "compile" in tree and settings.get("compile") is False:
        tree["compile"] = False
    rates, lora = rates_of(config), settings.get("lora") or {}
    return tree | ({"learning_rate": rates.lora} if rates and lora.get("r") else {})


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Yield each setting as (flag name, text)."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        elif isinstance(value, list | tuple):
            yield f"{prefix}{key}", " ".join(str(item) for item in value) or "none"
        else:
            yield f"{prefix}{key}", "none" if value is None else str(value)


def read_segments(run_dir: Path) -> dict[int, dict[str, str]]:
    """Return flattened settings by the step after which they applied: all of them at 0, then only the changed ones."""
    path = run_dir / SEGMENTS
    segments: dict[Any, Any] = load_config(path) if path.is_file() else {}
    if not all(isinstance(step, int) and isinstance(changed, dict) for step, changed in segments.items()):
        raise UserError(f"{path}: not a mapping of steps to settings; delete the file to lose only this history")
    return segments


def earlier_settings(run_dir: Path) -> Earlier:
    """Return the earlier values of the settings that resumes changed."""
    earlier: Earlier = {}
    settings: dict[str, str] = {}
    for step, changed in read_segments(run_dir).items():
        for key in changed if settings else ():
            earlier.setdefault(key, []).append((step, settings.get(key, "none")))
        settings |= changed
    return earlier
