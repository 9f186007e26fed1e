"""A policy loss, as a function and as a record with another average.

python -m trainer --method grpo --loss-type my_loss.topr --proximal-policy behaviour --num-iterations 2
python -m trainer --method grpo --loss-type my_loss.topr_by_completion --loss-kwargs '{"topr_cap": 0.5}'
"""

from __future__ import annotations

import torch
from torch import Tensor

from losses.policy import Metrics, PolicyLoss, Tokens


def topr(t: Tokens, *, topr_cap: float = 1.0) -> tuple[Tensor, Metrics]:  # (N,)
    """Tapered REINFORCE (Le Roux et al. 2025, arXiv:2503.14286), per token: -sg[w] A logp.

    w = 1 where A > 0: a good token is imitated, however unlikely it has become. Elsewhere w = min(r, topr_cap): a bad
    token stops mattering once it has become unlikely. The paper takes r of the whole completion.
    """
    ratio = t.log_ratio.detach().exp()
    good = t.advantage > 0
    capped = (t.mask & ~good & (ratio > topr_cap)).to(ratio.dtype)
    loss = -torch.where(good, 1.0, ratio.clamp(max=topr_cap)) * t.advantage * t.logp
    return loss, {"policy/topr_cap_frac": (capped.sum(), t.mask.sum())}


# A function alone is averaged over the tokens of the step. This takes the mean of each completion first, as GRPO does.
topr_by_completion = PolicyLoss(topr, average="completions")
