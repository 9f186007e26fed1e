"""Default learning rates: `optim` of a method's Config for all weights, and its lora_learning_rate with LoRA.

Adapters take a higher rate than full weights: about ten times in supervised and in reinforcement learning, whatever
their rank ("LoRA Without Regret", Schulman et al. 2025, thinkingmachines.ai/blog/lora). A rate published for adapters
with the method itself takes precedence; each method states its source.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from data.command.config_file import load_config
from data.command.flags import default_of
from trainer.config.blocks import MethodConfig

FAR_OFF = 30.0  # factor; published settings of one method differ by about 10
# Published rates are for larger models, so a small model is compared with the tiny model's recipe.
SMALL_MODEL, FAR_OFF_SMALL = 50_000_000, 10.0  # parameters, factor
RECIPES = Path(__file__).parents[1] / "recipes"
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


def small_model_rates(config: type) -> Rates | None:
    """Return the rates for small models: the tiny recipe's, and ten times as much with LoRA; None without a recipe."""
    for base in config.__mro__:
        recipe = RECIPES / f"{base.__module__.rpartition('.')[2]}_tiny.yaml"
        if recipe.is_file():
            rate = float(load_config(recipe)["learning_rate"])
            return Rates(rate, 10 * rate)
    return None


def far_off(cfg: MethodConfig, num_parameters: int) -> str | None:
    """Return a note if the learning rate is far from the default, or if LoRA has a rate for full weights."""
    is_small = num_parameters < SMALL_MODEL
    rates = small_model_rates(type(cfg)) if is_small else rates_of(type(cfg))
    if rates is None:
        return None
    rate, is_lora, limit = cfg.optim.learning_rate, cfg.lora.r > 0, FAR_OFF_SMALL if is_small else FAR_OFF
    default = rates.lora if is_lora else rates.full
    is_full_rate = is_lora and rate <= rates.full
    if 1 / limit <= rate / default <= limit and not is_full_rate:
        return None
    factor, side = (rate / default, "above") if rate > default else (default / rate, "below")
    which = "with LoRA" if is_lora else "for all weights"
    which += f" in models under {SMALL_MODEL // 10**6} M parameters" if is_small else ""
    which += f" (for all weights it is {rates.full:g})" if is_lora else ""
    return f"learning_rate={rate:g}: {factor:.3g} times {side} {default:g}, the usual rate of this method {which}"
