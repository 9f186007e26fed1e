"""GDPO: GRPO for several rewards, each normalised within its group before they are summed (arXiv:2601.05242).

The loop of trainer/methods/grpo.py with another advantage (losses/advantage.py):

    z_k = (R_k - mean_g R_k) / (std_g R_k + 1e-4)        each reward within its group
    a   = sum_k w_k z_k,   A = (a - mean a) / (std a + 1e-4) over the rollout

Summing first, as GRPO does, cannot tell mixtures of rewards with the same sum apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from data.errors import UserError
from trainer.config.blocks import Flat
from trainer.config.groups import AdvantageConfig
from trainer.methods import grpo

ESTIMATOR = "normalize_then_sum"


@dataclass(frozen=True, kw_only=True)
class Config(grpo.Config):
    """Group reward-decoupled normalisation: every reward is compared within its group, then their sum in the batch."""

    refused: ClassVar[tuple[str, ...]] = ("scale_rewards",)  # it always scales
    advantage: Flat[AdvantageConfig] = field(default_factory=lambda: AdvantageConfig(advantage_estimator=ESTIMATOR))

    def __post_init__(self) -> None:
        super().__post_init__()
        if (name := self.advantage.advantage_estimator) != ESTIMATOR:
            raise UserError(f"advantage_estimator={name}: gdpo is {ESTIMATOR}; use --method grpo")


train = grpo.train
