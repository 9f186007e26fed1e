"""Flags of methods that train on fixed rows.

@dataclass(frozen=True, kw_only=True)
class Config(OfflineConfig):
    my_flag: float = 0.5
"""

from __future__ import annotations

from dataclasses import dataclass, field

from data.format_options import FormatOptions
from trainer.config.blocks import Flat, MethodConfig, ResponseConfig, check_evaluation


@dataclass(frozen=True, kw_only=True)
class OfflineConfig(MethodConfig):
    """Base of all methods that train on fixed rows."""


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig(OfflineConfig):
    """Base of the methods on pairs or labelled responses."""

    response: Flat[ResponseConfig] = field(default_factory=ResponseConfig)
    format: FormatOptions = field(default_factory=FormatOptions)

    def __post_init__(self) -> None:
        check_evaluation(self.data, self.run)
