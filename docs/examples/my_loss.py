"""A policy loss, as a function and as a record with another average.

python -m trainer --method grpo --loss-type my_loss.topr --proximal-policy behaviour --num-iterations 2
python -m trainer --method grpo --loss-type my_loss.topr_by_completion --loss-kwargs '{"topr_cap": 0.5}'
"""

from __future__ import annotations

import torch
from torch import Tensor

from losses.policy import PolicyLoss, Tokens
from losses.types import Metrics


def topr(t: Tokens, *, topr_cap: float = 1.0) -> tuple[Tensor, Metrics]:  # (n,)
    """Tapered REINFORCE (Le Roux et al. 2025, arXiv:2503.14286), per token: -sg[w] A logp.

    If A > 0, w = 1: a good token is imitated, however unlikely it has become. Otherwise w = min(r, topr_cap): a bad
    token stops mattering once it has become unlikely. The paper uses the ratio r of the whole completion.
    """
    ratio, good = t.log_ratio.detach().exp(), t.advantage > 0
    loss = -torch.where(good, 1.0, ratio.clamp(max=topr_cap)) * t.advantage * t.logp
    capped = ~good & (ratio > topr_cap)
    return loss, {"policy/topr_cap_frac": (capped.sum(), len(capped))}


# A bare function is averaged over the tokens of the step. This record takes the mean of each completion first.
topr_by_completion = PolicyLoss(topr, average="completions")
