"""How well implicit rewards separate the two labels. KTO's loss is in trainer/methods/kto.py."""

from __future__ import annotations

from torch import Tensor


def reward_auc(
    reward: Tensor,  # (B,) implicit reward
    label: Tensor,  # (B,) bool, True = desirable
) -> Tensor:  # ()
    """Probability that a desirable completion has the higher reward; a tie counts half; NaN if a class is absent."""
    difference = reward[label].unsqueeze(1) - reward[~label].unsqueeze(0)  # (D, U)
    return ((difference > 0).double() + 0.5 * (difference == 0).double()).mean()
