"""Two advantage estimators: REINFORCE++ with one number per completion, and a discounted one with one per token.

python -m trainer --method grpo --advantage-estimator my_advantage.batch_normalized
python -m trainer --method grpo --advantage-estimator my_advantage.discounted --advantage-kwargs '{"discount": 0.9}'
"""

from __future__ import annotations

import torch
from torch import Tensor

from losses.advantage import GroupRewards, group_advantage, mean_of, moments, std_of


def batch_normalized(r: GroupRewards) -> Tensor:  # (P, G)
    """REINFORCE++ (Hu 2025, arXiv:2501.03262): (r - mean) / std over the whole batch, no baseline of the group.

    A group of equal rewards still teaches something here, unless it is judged alone, as dynamic sampling and replay do.
    """
    batch = r.all_sum(moments(r.total))  # (3,) of all ranks
    scaled = (r.total.double() - mean_of(batch)) / std_of(batch).clamp(min=1e-6)
    return scaled.nan_to_num(nan=0.0).to(r.total.dtype)  # NaN: a completion without a reward, or a batch of one


def discounted(r: GroupRewards, *, discount: float = 0.95) -> list[Tensor]:
    """GRPO's advantage, faded by `discount` for every token that follows: A_t = discount^(T - t) A at token t of T."""
    advantage = group_advantage(r.total).flatten()  # (B,)
    return [a * discount ** torch.arange(len(c.ids) - 1, -1, -1) for a, c in zip(advantage, r.completions, strict=True)]
