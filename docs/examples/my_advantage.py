"""Two advantage estimators: REINFORCE++ with one number per completion, and a discounted one with one per token.

python -m trainer --method grpo --advantage-estimator my_advantage.batch_normalized
python -m trainer --method grpo --advantage-estimator my_advantage.discounted --advantage-kwargs '{"discount": 0.9}'
"""

from __future__ import annotations

import torch
from torch import Tensor

from losses.advantage import Rewards, group_advantage, mean_of, moments, std_of


def batch_normalized(r: Rewards) -> Tensor:  # (P, G)
    """REINFORCE++ (Hu 2025, arXiv:2501.03262): (r - mean) / std over the whole rollout, without a group baseline.

    A group of equal rewards has signal here, except for dynamic sampling and replay, which evaluate each group alone.
    """
    rollout = r.all_sum(moments(r.reward))  # (3,) over all ranks
    scaled = (r.reward.double() - mean_of(rollout)) / std_of(rollout).clamp(min=1e-6)
    return scaled.nan_to_num(nan=0.0).to(r.reward.dtype)  # NaN: no reward, or a single one


def discounted(r: Rewards, *, discount: float = 0.95) -> list[Tensor]:
    """GRPO's advantage, discounted for every token that follows: A_t = discount^(T - t) A at token t of T."""
    advantage = group_advantage(r.reward).flatten()  # (B,)
    return [a * discount ** torch.arange(len(c.ids) - 1, -1, -1) for a, c in zip(advantage, r.completions, strict=True)]
