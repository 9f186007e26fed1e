"""Losses on completions labelled desirable or undesirable (KTO, Ethayarajh et al. 2024, arXiv:2402.01306).

    x    = logp - ref_logp
    kto               desirable: 1 - sigmoid(beta (x - z0))     undesirable: 1 - sigmoid(beta (z0 - x))
    apo_zero_unpaired desirable: 1 - sigmoid(beta x)            undesirable: sigmoid(beta x)
    loss = mean over all completions of weight(label) * l(x)

z0 estimates KL(policy || reference): the mean log-ratio of completions paired with mismatched prompts, over the whole
optimizer step and all ranks, clamped at 0, without gradient.

Shapes: B = labelled completions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from losses.types import LossOut, Term, wide


@torch.no_grad()
def kl_reference_point(
    total: Tensor,  # () sum of log-ratios of mismatched completions, over the whole step and all ranks
    count: Tensor,  # () number of mismatched completions
) -> Tensor:  # ()
    """Return z0. Clamps the mean, not its parts: clamping per rank or micro-batch would bias z0 upwards."""
    return (wide(total) / count.clamp(min=1)).clamp(min=0)


def _one_minus_sigmoid(
    x: Tensor,  # (B,) log-ratio, relative to the reference point
    label: Tensor,  # (B,) bool, True = desirable
    *,
    beta: float,
) -> Tensor:  # (B,)
    """1 - sigmoid(beta x) for desirable, 1 - sigmoid(-beta x) for undesirable completions."""
    return torch.sigmoid(beta * torch.where(label, -x, x))


def _weighted_loss(
    name: str,
    loss: Tensor,  # (B,) unweighted
    logp: Tensor,  # (B,) sequence log-prob
    reward: Tensor,  # (B,) implicit reward
    label: Tensor,  # (B,) bool
    desirable_weight: float,
    undesirable_weight: float,
) -> LossOut:
    """Sum the losses times their class weights. The count ignores the weights: they scale the loss."""
    assert {x.shape for x in (loss, logp, label)} == {(len(loss),)} and label.dtype == torch.bool, "shapes do not match"
    weighted = torch.where(label, desirable_weight * loss, undesirable_weight * loss)  # (B,)
    term = Term(1.0, weighted.sum(), loss.new_full((), len(loss)))
    with torch.no_grad():
        metrics = {}
        for side, is_side in (("chosen", label), ("rejected", ~label)):
            # If a class is absent from the micro-batch, its sum and count are 0.
            metrics[f"reward/{side}"] = (torch.where(is_side, reward, 0.0).sum(), is_side.sum())
            metrics[f"policy/logp_{side}"] = (torch.where(is_side, wide(logp), 0.0).sum(), is_side.sum())
    return LossOut({name: term}, metrics)


def kto_loss(
    logp: Tensor,  # (B,) policy, sequence log-prob, with gradient
    ref_logp: Tensor,  # (B,) reference
    label: Tensor,  # (B,) bool, True = desirable
    z0: Tensor,  # () from kl_reference_point
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> LossOut:
    """weight * (1 - sigmoid(+-beta (x - z0))), + for desirable completions."""
    x = wide(logp) - wide(ref_logp)  # (B,)
    loss = _one_minus_sigmoid(x - z0.detach(), label, beta=beta)
    return _weighted_loss("kto", loss, logp, beta * x, label, desirable_weight, undesirable_weight)


def apo_zero_unpaired(
    logp: Tensor,  # (B,) policy, sequence log-prob, with gradient
    ref_logp: Tensor,  # (B,) reference
    label: Tensor,  # (B,) bool, True = desirable
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> LossOut:
    """KTO with the reference point fixed at zero (APO, D'Oosterlinck et al. 2024, arXiv:2408.06266): no KL pass."""
    x = wide(logp) - wide(ref_logp)  # (B,)
    loss = _one_minus_sigmoid(x, label, beta=beta)
    return _weighted_loss("apo_zero_unpaired", loss, logp, beta * x, label, desirable_weight, undesirable_weight)


def reward_auc(
    reward: Tensor,  # (B,) implicit reward
    label: Tensor,  # (B,) bool, True = desirable
) -> Tensor:  # ()
    """Probability that a desirable completion has the higher reward; a tie counts half; NaN if a class is absent."""
    difference = reward[label].unsqueeze(1) - reward[~label].unsqueeze(0)  # (D, U)
    return ((difference > 0).double() + 0.5 * (difference == 0).double()).mean()
