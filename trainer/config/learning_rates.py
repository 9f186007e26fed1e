"""Default learning rates: `optim` of a method's Config for all weights, and its lora_learning_rate with LoRA.

Adapters take a higher rate than full weights: about ten times in supervised and in reinforcement learning, whatever
their rank ("LoRA Without Regret", Schulman et al. 2025, thinkingmachines.ai/blog/lora). A rate published for adapters
with the method itself takes precedence; each method states its source.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import NamedTuple, TypeVar

from data.command.flags import default_of
from trainer.config.blocks import MethodConfig

FAR_OFF = 30.0  # factor; published settings of one method differ by about 10
SMALL_MODEL = 50_000_000  # parameters; published rates are for larger models, and toy models need far higher rates
C = TypeVar("C", bound=MethodConfig)


class Rates(NamedTuple):
    full: float
    lora: float


def rates_of(config: type) -> Rates | None:
    """Return the default rates of a Config class, or None if it has no default for LoRA."""
    lora = getattr(config, "lora_learning_rate", None)
    if lora is None:
        return None
    optim = next(default_of(field) for field in dataclasses.fields(config) if field.name == "optim")
    return Rates(optim.learning_rate, lora)


def with_default_rate(cfg: C) -> C:
    """Set the default learning rate of a run with LoRA; config.yaml records it like any other value."""
    rates = rates_of(type(cfg))
    if rates is None or cfg.lora.r == 0:
        return cfg
    return replace(cfg, optim=replace(cfg.optim, learning_rate=rates.lora))


def far_off(cfg: MethodConfig) -> str | None:
    """Return a note if the learning rate is a factor 30 from the default, or if LoRA has a rate for full weights."""
    rates = rates_of(type(cfg))
    if rates is None:
        return None
    rate, is_lora = cfg.optim.learning_rate, cfg.lora.r > 0
    default = rates.lora if is_lora else rates.full
    is_full_rate = is_lora and rate <= rates.full
    if 1 / FAR_OFF <= rate / default <= FAR_OFF and not is_full_rate:
        return None
    factor, side = (rate / default, "above") if rate > default else (default / rate, "below")
    which = f"with LoRA (for all weights it is {rates.full:g})" if is_lora else "for all weights"
    return f"learning_rate={rate:g}: {factor:.3g} times {side} {default:g}, the default of this method {which}"
