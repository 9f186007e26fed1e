"""Default learning rates of each method, for full fine-tuning and for LoRA, with their sources.

Adapters take a higher rate than full weights: about ten times in supervised and in reinforcement learning, whatever
their rank ("LoRA Without Regret", Schulman et al. 2025, thinkingmachines.ai/blog/lora). A rate published for adapters
with the method itself takes precedence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

FAR_OFF = 30.0  # a factor: published settings of one method differ by 10 or so
SMALL_MODEL = 50_000_000  # parameters: published rates are for larger models; toy models take far higher ones


class Rates(NamedTuple):
    full: float
    lora: float
    source: str


TEN_TIMES = "LoRA: ten times that (LoRA Without Regret)"
SAMPLING = (
    "TRL's default, DeepSeekMath (arXiv:2402.03300) and DAPO (arXiv:2503.14476); LoRA: TRL's guides to PEFT and to "
    "LoRA Without Regret"
)
RATES: dict[str, Rates] = {
    "sft": Rates(2e-5, 2e-4, "TRL's default; LoRA: TRL's guide to PEFT, axolotl's LoRA examples"),
    "dpo": Rates(1e-6, 5e-6, "TRL's default and the paper (arXiv:2305.18290); LoRA: TRL's guide to PEFT, Zephyr QLoRA"),
    "ipo": Rates(1e-6, 5e-6, "as dpo"),
    "online_dpo": Rates(1e-6, 5e-6, "as dpo; TRL's default for all weights is 5e-7"),
    "kto": Rates(1e-6, 5e-6, "TRL's default, which its KTO example says is like that of DPO; LoRA: as dpo"),
    "orpo": Rates(8e-6, 8e-5, "the paper (arXiv:2403.07691) and TRL's ORPO example, which has both"),
    "cpo": Rates(1e-6, 1e-5, f"TRL's default; {TEN_TIMES}"),
    "simpo": Rates(1e-6, 1e-5, f"the upper end of the authors' 3e-7 to 1e-6 (arXiv:2405.14734); {TEN_TIMES}"),
    "rm": Rates(1e-5, 1e-4, "TRL's example of reward modelling, which has both"),
    "prm": Rates(1e-5, 1e-4, f"TRL's default; {TEN_TIMES}"),
    "grpo": Rates(1e-6, 1e-5, SAMPLING),
    "gdpo": Rates(1e-6, 1e-5, "as grpo"),
    "rloo": Rates(1e-6, 1e-5, "TRL's default; LoRA: as grpo"),
    "opd": Rates(1e-6, 1e-5, "as grpo, whose loop and clip it has"),
    "ppo": Rates(1e-6, 1e-5, "the actor of OpenRLHF and verl; LoRA: as grpo"),
    "ebft": Rates(1e-6, 1e-5, f"the authors' settings (arXiv:2603.12248); {TEN_TIMES}"),
}


def rates_of(config: type) -> Rates | None:
    """Rates of the method whose Config this is or extends, or of sampling methods; None for any other Config."""
    for base in config.__mro__:
        package, _, name = base.__module__.rpartition(".")
        if package == "trainer.methods":
            return RATES.get(name)
        if base.__module__ == "trainer.config.sampling":  # the user's own method that samples
            return RATES["grpo"]
    return None


def far_off(cfg: Any) -> str | None:
    """A note if the learning rate is more than 30 times off the default, or if LoRA has a rate for full weights."""
    rates = rates_of(type(cfg))
    if rates is None:
        return None
    rate, is_lora = cfg.optim.learning_rate, cfg.lora.r > 0
    usual = rates.lora if is_lora else rates.full
    for_all_weights = is_lora and rate <= rates.full
    if 1 / FAR_OFF <= rate / usual <= FAR_OFF and not for_all_weights:
        return None
    factor, side = (rate / usual, "above") if rate > usual else (usual / rate, "below")
    which = f"with LoRA (for all weights it is {rates.full:g})" if is_lora else "for all weights"
    return f"learning_rate={rate:g}: {factor:.3g} times {side} {usual:g}, the default of this method {which}"
