"""SimPO: compare log-probs per token, with a margin; no reference, no likelihood term.

    loss = -log sigmoid(beta (mean_w - mean_l) - gamma)

Meng, Xia and Chen 2024 (arXiv:2405.14734), with settings of the size they publish. With --cpo-alpha above 0 it is
CPO-SimPO. The loop is CPO's (trainer/methods/cpo.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from data.command.flags import Common
from trainer.methods import cpo


@dataclass(frozen=True, kw_only=True)
class Config(cpo.Config):
    """Simple preference optimisation: length-normalised margin, no reference."""

    # Ten times the rate for all weights, the upper end of the authors' 3e-7 to 1e-6 (2405.14734).
    lora_learning_rate: ClassVar[float] = 1e-5

    loss_type: Common[Literal["sigmoid", "hinge", "ipo", "simpo", "alphapo"]] = "simpo"
    """Pair loss; simpo defines this method."""
    beta: Common[float] = 2.0
    """Scale of the log-prob difference per token; published values are 2 to 10."""
    cpo_alpha: Common[float] = 0.0
    """Weight of the negative log-likelihood per token of the chosen response. 0: SimPO as published."""
    simpo_gamma: Common[float] = 1.0
    """Target margin of the chosen response; about half of beta."""


train = cpo.train
