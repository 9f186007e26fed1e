"""Losses of single completions labelled desirable or undesirable (KTO, Ethayarajh et al. 2024, arXiv:2402.01306).

    x    = logp - ref_logp
    kto               desirable: 1 - sigmoid(beta (x - z0))     undesirable: 1 - sigmoid(beta (z0 - x))
    apo_zero_unpaired desirable: 1 - sigmoid(beta x)            undesirable: sigmoid(beta x)
    loss = mean over all rows of weight(label) * l(x)

z0 estimates KL(policy || reference): the mean log-ratio of completions under prompts they do not belong to, taken over
the whole optimizer step and all ranks, without gradient, and never negative.

Shapes: B = labelled completions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from losses.types import LossOut, Term, wide


@torch.no_grad()
def kl_reference_point(
    total: Tensor,  # () sum of log-ratios of mismatched completions, over the whole step and all ranks
    count: Tensor,  # () how many there are
) -> Tensor:  # ()
    """z0. The mean is clamped, not its parts: clamping per rank or micro-batch would bias it upwards."""
    return (wide(total) / count.clamp(min=1)).clamp(min=0)


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
    """weight * (1 - sigmoid(+-beta (x - z0))), + for desirable rows."""
    x = wide(logp) - wide(ref_logp)  # (B,)
    loss = wrongness(x - z0.detach(), label, beta=beta)
    return weigh("kto", loss, logp, beta * x, label, desirable_weight, undesirable_weight)


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
    loss = wrongness(x, label, beta=beta)
    return weigh("apo_zero_unpaired", loss, logp, beta * x, label, desirable_weight, undesirable_weight)


def wrongness(
    x: Tensor,  # (B,) log-ratio, relative to the reference point
    label: Tensor,  # (B,) bool, True = desirable
    *,
    beta: float,
) -> Tensor:  # (B,)
    """1 - sigmoid(beta x) of desirable rows, 1 - sigmoid(-beta x) of undesirable ones."""
    return torch.sigmoid(beta * torch.where(label, -x, x))


def weigh(
    name: str,
    loss: Tensor,  # (B,) unweighted
    logp: Tensor,  # (B,) sequence log-prob
    reward: Tensor,  # (B,) implicit reward
    label: Tensor,  # (B,) bool
    desirable_weight: float,
    undesirable_weight: float,
) -> LossOut:
    """The sum over rows, each with its class's weight, but counted as one: the weights scale, they do not normalise."""
    assert {x.shape for x in (loss, logp, label)} == {(len(loss),)} and label.dtype == torch.bool, "rows do not match"
    weighted = torch.where(label, desirable_weight * loss, undesirable_weight * loss)  # (B,)
    term = Term(1.0, weighted.sum(), loss.new_tensor(len(loss)))
    with torch.no_grad():
        metrics = {}
        for side, rows in (("chosen", label), ("rejected", ~label)):
            # Either class may be absent from a micro-batch: its sum and its count are then 0.
            metrics[f"reward/{side}"] = (torch.where(rows, reward, 0.0).sum(), rows.sum())
            metrics[f"policy/logp_{side}"] = (torch.where(rows, wide(logp), 0.0).sum(), rows.sum())
    return LossOut({name: term}, metrics)


def reward_auc(
    reward: Tensor,  # (B,) implicit reward
    label: Tensor,  # (B,) bool, True = desirable
) -> Tensor:  # ()
    """Chance that a desirable row has a higher reward than an undesirable one, ties counting half; NaN without both."""
    difference = reward[label].unsqueeze(1) - reward[~label].unsqueeze(0)  # (D, U)
    return ((difference > 0).double() + 0.5 * (difference == 0).double()).mean()
