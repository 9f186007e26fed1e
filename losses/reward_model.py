"""Losses for reward models of whole responses (bradley_terry) and of solution steps (stepwise_loss).

Outcome reward model: scores the chosen response above the rejected response (Bradley and Terry 1952).

    loss = -log sigmoid(score_w - score_l - margin) + center_coefficient * (score_w + score_l)^2

`margin` (Llama 2, Touvron et al. 2023, arXiv:2307.09288) requires a larger distance if annotators were more certain.
The second term (Eisenstein et al. 2023, arXiv:2312.09244) fixes the free constant by centring scores on zero.

Process reward model: classifies each step of a solution as right or wrong (Uesato et al. 2022, arXiv:2211.14275;
Lightman et al. 2023).

    loss = mean over labelled positions of -log softmax(logits_n)[label_n]

The label of a step is at its last token and applies to the logits at the same position, without a shift. Classes:
0 = wrong, 1 = right.

Shapes: B = preference pairs, N = packed tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from losses.types import LossOut, Metrics, Term, wide

UNLABELLED = -100


def bradley_terry(
    score_w: Tensor,  # (B,) score of the chosen response, with gradient
    score_l: Tensor,  # (B,) score of the rejected response
    margin: Tensor | None = None,  # (B,) required distance; None = 0
    *,
    center_coefficient: float | None = None,
) -> LossOut:
    assert score_w.shape == score_l.shape == (len(score_w),), f"{tuple(score_w.shape)} vs {tuple(score_l.shape)}"
    score_w, score_l = wide(score_w), wide(score_l)
    distance = score_w - score_l  # (B,)
    required = torch.zeros_like(distance) if margin is None else wide(margin)  # (B,)
    assert required.shape == distance.shape, f"margin {tuple(required.shape)} vs scores {tuple(distance.shape)}"
    count = distance.new_full((), len(distance))
    terms = {"bradley_terry": Term(1.0, -F.logsigmoid(distance - required).sum(), count)}
    if center_coefficient is not None:
        terms["center"] = Term(center_coefficient, (score_w + score_l).square().sum(), count)
    with torch.no_grad():
        metrics: Metrics = {
            "reward/chosen": (score_w.sum(), count),
            "reward/rejected": (score_l.sum(), count),
            "reward/mean": ((score_w + score_l).sum(), 2 * count),
            "reward/margin": (distance.sum(), count),
            "reward/accuracy": ((distance > 0).to(distance.dtype).sum(), count),
        }
    return LossOut(terms, metrics)


@torch.no_grad()
def confusion(
    logits: Tensor,  # (N, 2) classifier outputs
    label: Tensor,  # (N,) int64: 0, 1, or -100 = no label here
) -> Tensor:  # (2, 2) int64
    """Count labelled steps by [label, predicted class]. A tie predicts wrong. Counts add up over micro-batches."""
    predicted = (logits[:, 1] > logits[:, 0]).long()  # (N,)
    true = F.one_hot(label.clamp(min=0), 2) * (label != UNLABELLED).unsqueeze(1)  # (N, 2)
    return (true.unsqueeze(2) * F.one_hot(predicted, 2).unsqueeze(1)).sum(dim=0)  # CUDA has no integer matmul


def stepwise_loss(
    logits: Tensor,  # (N, 2) classifier outputs
    label: Tensor,  # (N,) int64: 0, 1, or -100 = no label here
) -> LossOut:
    assert logits.shape == (len(label), 2), f"logits {tuple(logits.shape)} vs labels {tuple(label.shape)}"
    labelled = label != UNLABELLED  # (N,)
    # Select, do not multiply: logits at unlabelled positions may be NaN.
    logits = torch.where(labelled.unsqueeze(1), wide(logits), 0.0)  # (N, 2)
    loss = F.cross_entropy(logits, label, ignore_index=UNLABELLED, reduction="sum")  # ()
    count = labelled.sum()
    right = confusion(logits, label).diagonal().sum()
    return LossOut({"steps": Term(1.0, loss, count)}, {"reward/step_accuracy": (right, count)})


@torch.no_grad()
def f1_scores(
    matrix: Tensor,  # (2, 2) steps by [label, predicted class]
) -> Tensor:  # (2,) float64
    """2 tp / (2 tp + fp + fn) per class; NaN for a class that is neither labelled nor predicted."""
    denominator = matrix.sum(dim=0) + matrix.sum(dim=1)  # (2,) predicted + labelled = 2 tp + fp + fn
    return 2 * matrix.diagonal().double() / denominator


def macro_f1(
    matrix: Tensor,  # (2, 2) steps by [label, predicted class]
) -> Tensor:  # () float64
    """Mean F1 over the classes that occur; 0 if no step is labelled."""
    return f1_scores(matrix).nanmean().nan_to_num(nan=0.0)
