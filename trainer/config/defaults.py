"""The defaults of a Config class as config.yaml writes them: the report shows what a run changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import tyro

from data.command.flags import config_to_tree
from trainer.config.learning_rates import rates_of


def default_tree(config: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nested like config.yaml; a setting that must be given is absent. `settings`: those of the run, because the
    learning rate has another default with LoRA."""
    tree: dict[str, Any] = {}
    hints = get_type_hints(config, include_extras=True)
    for name, default in _defaults(config).items():
        hint = hints[name]
        block, *markers = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if not dataclasses.is_dataclass(block):
            tree |= {} if default is dataclasses.MISSING else {name: default}
            continue
        if default is not dataclasses.MISSING:
            inner = config_to_tree(default)
        else:
            inner = {key: value for key, value in _defaults(block).items() if value is not dataclasses.MISSING}
        tree |= inner if tyro.conf.OmitArgPrefixes in markers else {name: inner}
    rates, lora = rates_of(config), settings.get("lora") or {}
    return tree | ({"learning_rate": rates.lora} if rates and lora.get("r") else {})


def _defaults(config: type) -> dict[str, Any]:
    fields = dataclasses.fields(config)
    return {f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory() for f in fields}
