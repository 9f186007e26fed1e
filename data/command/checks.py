"""Checks shared by config blocks: the range of a number, and settings without effect."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from data.command.flags import default_of
from data.errors import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

RULES = {  # rule, as the message states it -> whether a number satisfies it; nan never does
    "1 or more": lambda x: x >= 1,
    "2 or more": lambda x: x >= 2,
    "0 or more": lambda x: x >= 0,
    "0 (off) or more": lambda x: x >= 0,
    "0 (off) or above": lambda x: x >= 0,
    "0 (none) or above": lambda x: 0 <= x < math.inf,
    "0 or above": lambda x: 0 <= x < math.inf,
    "above 0": lambda x: 0 < x < math.inf,
    "above 0 and finite": lambda x: 0 < x < math.inf,
    "a number of seconds above 0": lambda x: 0 < x < math.inf,
    "between 1 and 65535": lambda x: 1 <= x <= 65535,
    "above 0 and at most 1": lambda x: 0 < x <= 1,
    "between 0 and 1": lambda x: 0 <= x <= 1,
    "in [0, 1)": lambda x: 0 <= x < 1,
}


def check_number(name: str, value: float | None, rule: str) -> None:
    if value is not None and not RULES[rule](value):
        raise UserError(f"{name}={value}: must be {rule}")


def check_numbers(block: object, rules: Mapping[str, str], prefix: str = "") -> None:
    """check_numbers(self, {"1 or more": "save_total_limit logging_steps"}); None is always allowed."""
    for rule, names in rules.items():
        for name in names.split():
            check_number(prefix + name, getattr(block, name), rule)


def reject_unused(block: DataclassInstance, why: str, names: Iterable[str] | None = None, prefix: str = "") -> None:
    """Reject settings that differ from their default but have no effect; names: default all. `why` ends the message."""
    fields = {field.name: field for field in dataclasses.fields(block)}
    for name in fields if names is None else names:
        value = getattr(block, name)
        if value != default_of(fields[name]):
            shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
            raise UserError(f"{prefix}{name}={shown}: has no effect {why}")
