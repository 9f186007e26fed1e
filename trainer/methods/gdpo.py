"""GDPO: GRPO for several rewards, each normalised within its group before they are added (arXiv:2601.05242).

Adding first makes different mixtures of rewards with the same sum the same; losses/advantage.py has the formulas, and
trainer/methods/grpo.py the loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Final

from data.errors import UserError
from trainer.config.blocks import Flat
from trainer.config.groups import AdvantageConfig
from trainer.methods import grpo

SEPARATE: Final = "normalize_then_sum"


@dataclass(frozen=True, kw_only=True)
class Config(grpo.Config):
    """Group reward-decoupled normalisation: every reward is compared within its group, then their sum in the batch."""

    refused: ClassVar[tuple[str, ...]] = ("scale_rewards",)  # it always scales
    advantage: Flat[AdvantageConfig] = field(
        default_factory=lambda: AdvantageConfig(multi_objective_aggregation=SEPARATE)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.advantage.multi_objective_aggregation
        if given != SEPARATE:
            raise UserError(f"multi_objective_aggregation={given}: gdpo is {SEPARATE}; use --method grpo")


train = grpo.train
