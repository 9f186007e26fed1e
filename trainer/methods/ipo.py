"""IPO: DPO with the squared loss of Azar et al. 2023 (arXiv:2310.12036) on length-averaged log-ratios.

    loss = ((logp_w - ref_w) / len_w - (logp_l - ref_l) / len_l - 1 / (2 beta))^2

The loop is DPO's (trainer/methods/dpo.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from data.command.flags import Common
from trainer.config.preference import PairLossType
from trainer.methods import dpo


@dataclass(frozen=True, kw_only=True)
class Config(dpo.Config):
    """Identity preference optimisation: DPO with a squared loss, which stays close to the reference."""

    loss_type: Common[tuple[PairLossType, ...]] = ("ipo",)
    """Pair loss; ipo defines this method."""


train = dpo.train
