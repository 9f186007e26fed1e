"""Outcome reward model: scores that put the chosen response above the rejected one (Bradley and Terry 1952).

    loss = -log sigmoid(score_w - score_l - margin) + center_coefficient * (score_w + score_l)^2

margin (Llama 2, Touvron et al. 2023, arXiv:2307.09288) asks for more distance where annotators were surer; the second
part (Eisenstein et al. 2023, arXiv:2312.09244) fixes the free constant so that scores centre on zero.

Shapes: B = preference pairs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from losses.preference import wide
from losses.types import LossOut, Term


def bradley_terry(
    score_w: Tensor,  # (B,) score of the chosen response, with gradient
    score_l: Tensor,  # (B,) score of the rejected response
    margin: Tensor | None = None,  # (B,) distance asked for; None = 0
    *,
    center_coefficient: float | None = None,
) -> LossOut:
    assert score_w.shape == score_l.shape == (len(score_w),), f"{tuple(score_w.shape)} vs {tuple(score_l.shape)}"
    score_w, score_l = wide(score_w), wide(score_l)
    distance = score_w - score_l  # (B,)
    wanted = torch.zeros_like(distance) if margin is None else wide(margin)  # (B,)
    assert wanted.shape == distance.shape, f"margin {tuple(wanted.shape)} vs scores {tuple(distance.shape)}"
    count = distance.new_tensor(len(distance))
    terms = {"bradley_terry": Term(1.0, -F.logsigmoid(distance - wanted).sum(), count)}
    if center_coefficient is not None:
        terms["center"] = Term(center_coefficient, (score_w + score_l).square().sum(), count)
    with torch.no_grad():
        metrics = {
            "reward/chosen": (score_w.sum(), count),
            "reward/rejected": (score_l.sum(), count),
            "reward/mean": ((score_w + score_l).sum(), 2 * count),
            "reward/margin": (distance.sum(), count),
            "reward/accuracy": ((distance > 0).to(distance.dtype).sum(), count),
        }
    return LossOut(terms, metrics)
