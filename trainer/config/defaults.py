"""Return the defaults of a Config class as config.yaml writes them, for the report of changed settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from data.command.flags import config_fields, config_to_tree, default_of
from trainer.config.learning_rates import rates_of


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
