"""Flags and keys of earlier versions: still read, with one line that names the new form."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from data.command.flags import Flag, FlagValue, Values
from data.errors import UserError

Settings = dict[str, Any]


class OldFlag(NamedTuple):
    hint: type
    replaced_by: str  # key that the method must have
    convert: Callable[[str], Settings]  # its value -> the settings that replace it; {}: the default


def _loss_option(name: str, default: float) -> OldFlag:
    def convert(word: str) -> Settings:
        try:
            value = float(word)
        except ValueError:
            raise UserError(f"{name}={word}: expected a number") from None
        return {} if value == default else {"loss_kwargs": {name: value}}

    return OldFlag(str, "loss_kwargs", convert)


def _data_producer(word: str) -> Settings:
    if word == "True":
        raise UserError(
            "use_data_producer=True: not supported; use --async-prefetch to overlap sampling and training (replay, "
            "re-rolls and streaming need no switch)"
        )
    return {}


OLD_FLAGS: dict[str, OldFlag] = {
    **{name: _loss_option(name, default) for name, default in {
        "cispo_cap": 5.0, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}.items()},
    "multi_objective_aggregation": OldFlag(
        str, "advantage_estimator",
        lambda word: {"advantage_estimator": word} if word == "normalize_then_sum" else {}),
    "vllm_lora_sync": OldFlag(
        bool, "sync.backend", lambda word: {"sync.backend": "lora"} if word == "True" else {}),
    "use_data_producer": OldFlag(bool, "async_prefetch", _data_producer),
}  # fmt: skip


def with_old_flags(table: Mapping[str, Flag]) -> dict[str, Flag]:
    """Add the old flags of the method to its flag table."""
    old = {key: Flag(key, old.hint, required=False, module=__name__)
           for key, old in OLD_FLAGS.items() if old.replaced_by in table}  # fmt: skip
    return old | dict(table)


def replace_old(values: Values, table: Mapping[str, Flag], below: Values) -> tuple[Values, list[str]]:
    """Replace the old flags of one layer; also return a line for each that names the new form.

    A JSON object is merged with the same setting in this layer and in the layer below.
    """
    new, notes, old_table = {key: given for key, given in values.items() if key in table}, [], with_old_flags(table)
    for key, given in values.items():
        if key in table:
            continue
        source = given.source
        for name, value in OLD_FLAGS[key].convert(" ".join(given.words)).items():
            flag, word = table[name], json.dumps(value) if isinstance(value, dict) else value
            form = shlex.join((flag.name, word)) if source is None else f"{name}: {word}"
            notes.append(f"{given.label(old_table[key])} is an old {'flag' if source is None else 'key'}; write {form}")
            if isinstance(value, dict):
                earlier = new.get(name, below.get(name))
                word = json.dumps((json.loads(earlier.words[0]) if earlier else {}) | value)
            new[name] = FlagValue((word,), source)
    return new, notes


def without_old_defaults(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the defaults in the config.yaml of an older run that are rejected as settings now.

    Such a file has rollout.max_batch_size=256, even if no local engine samples, and no rollout.cache_gib.
    """
    if tree.get("loss_type") == "losses.distill.reverse_kl":  # opd's loss, now in trainer/methods/opd.py
        tree = {key: value for key, value in tree.items() if key != "loss_type"}
    rollout, is_strided = tree.get("rollout"), tree.get("mode") == "strided"
    if not isinstance(rollout, dict) or "cache_gib" in rollout:
        return dict(tree)
    old: dict[str, Any] = {"max_batch_size": 256} if is_strided or rollout.get("engine") == "vllm" else {}
    old |= {"engine": "local"} if is_strided else {}
    return {**tree, "rollout": {name: value for name, value in rollout.items() if old.get(name) != value}}
