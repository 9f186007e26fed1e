"""Losses on preference pairs without a reference: CPO with SimPO and AlphaPO (cpo_loss), and ORPO (orpo_loss).

    sum_w, sum_l     sequence log-probs of the chosen and the rejected response
    mean_w, mean_l   the same per token

CPO (Xu et al. 2024, arXiv:2401.08417), with one of CPO_LOSSES as l:

    loss = mean over pairs of l + cpo_alpha * NLL per token of the chosen response

`simpo` with cpo_alpha 0 is SimPO as published; with cpo_alpha > 0 it is known as CPO-SimPO.

Odds ratio preference optimization (ORPO, Hong, Lee and Thorne 2024, arXiv:2403.07691):

    odds(a)  = exp(a) / (1 - exp(a))
    log_odds = log odds(mean_w) - log odds(mean_l) = (mean_w - mean_l) - (log1mexp(mean_w) - log1mexp(mean_l))
    loss     = NLL per token - alpha * mean over pairs of log sigmoid(log_odds)

In the paper the NLL covers the prompt and the chosen response, so the caller passes the sum and count of its tokens.

Shapes: B = preference pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from losses.preference import capped_expm1, logistic, pair_metrics
from losses.types import LossOut, Term, options_of, wide


class FreeScores(NamedTuple):
    """Inputs of a reference-free pair loss. All derived values are fp32 or wider."""

    logp_w: Tensor  # (B,) policy, chosen response, summed over its tokens, with gradient
    logp_l: Tensor  # (B,) policy, rejected response
    len_w: Tensor  # (B,) tokens of the chosen response
    len_l: Tensor  # (B,) tokens of the rejected response

    @property
    def sum_w(self) -> Tensor:  # (B,)
        return wide(self.logp_w)

    @property
    def sum_l(self) -> Tensor:  # (B,)
        return wide(self.logp_l)

    @property
    def mean_w(self) -> Tensor:  # (B,)
        return self.sum_w / self.len_w.clamp(min=1)  # an empty response scores 0

    @property
    def mean_l(self) -> Tensor:  # (B,)
        return self.sum_l / self.len_l.clamp(min=1)


# CPO: a loss per pair


def sigmoid(s: FreeScores, *, beta: float, label_smoothing: float = 0.0) -> Tensor:  # (B,)
    """cDPO of beta (sum_w - sum_l): DPO under a uniform reference (CPO)."""
    return logistic(beta * (s.sum_w - s.sum_l), label_smoothing)


def hinge(s: FreeScores, *, beta: float) -> Tensor:  # (B,)
    """max(0, 1 - beta (sum_w - sum_l)) (SLiC-HF, Zhao et al. 2023, arXiv:2305.10425)."""
    return F.relu(1 - beta * (s.sum_w - s.sum_l))


def ipo(s: FreeScores, *, beta: float) -> Tensor:  # (B,)
    """(mean_w - mean_l - 1 / (2 beta))^2 (IPO, Azar et al. 2023, arXiv:2310.12036, without reference)."""
    return (s.mean_w - s.mean_l - 1 / (2 * beta)).square()


def simpo(s: FreeScores, *, beta: float, gamma: float, label_smoothing: float = 0.0) -> Tensor:  # (B,)
    """cDPO of beta (mean_w - mean_l) - gamma (SimPO, Meng, Xia and Chen 2024, arXiv:2405.14734).

    Published settings use beta 2 to 10 and gamma / beta about 0.5.
    """
    return logistic(beta * (s.mean_w - s.mean_l) - gamma, label_smoothing)


def alpha_reward(
    mean: Tensor,  # (B,) log-prob per token
    *,
    alpha: float,
) -> Tensor:  # (B,)
    """(1 - exp(-alpha mean)) / alpha; the limit at alpha 0 is the log-prob itself."""
    if abs(alpha) < 1e-6:
        return mean
    return -capped_expm1(-alpha * mean) / alpha


def alphapo(s: FreeScores, *, beta: float, gamma: float, alpha: float, label_smoothing: float = 0.0) -> Tensor:  # (B,)
    """SimPO of the reshaped reward (1 - exp(-alpha mean)) / alpha (AlphaPO, Gupta et al. 2025, arXiv:2501.03884)."""
    difference = alpha_reward(s.mean_w, alpha=alpha) - alpha_reward(s.mean_l, alpha=alpha)
    return logistic(beta * difference - gamma, label_smoothing)


CPO_LOSSES: dict[str, Callable[..., Tensor]] = {
    "sigmoid": sigmoid,
    "hinge": hinge,
    "ipo": ipo,
    "simpo": simpo,
    "alphapo": alphapo,
}
MEAN_LOSSES = frozenset({"ipo", "simpo", "alphapo"})  # compare log-probs per token; the other losses compare sums


def cpo_loss(
    s: FreeScores,
    *,
    loss_type: str,
    beta: float,
    cpo_alpha: float,
    gamma: float = 0.0,
    alpha: float = 0.0,
    label_smoothing: float = 0.0,
) -> LossOut:
    """One of CPO_LOSSES per pair, plus cpo_alpha times the NLL of the chosen response's tokens.

    Logs the rewards that the loss compares: beta times the sum of log-probs, their mean, or alphapo's reshaped mean.
    """
    assert {x.shape for x in s} == {(len(s.logp_w),)}, f"shapes {[tuple(x.shape) for x in s]}"
    options = {"beta": beta, "gamma": gamma, "alpha": alpha, "label_smoothing": label_smoothing}
    function = CPO_LOSSES[loss_type]
    loss = function(s, **{key: options[key] for key in options_of(function)})  # (B,)
    terms = {
        loss_type: Term(1.0, loss.sum(), loss.new_full((), len(loss))),
        "nll": Term(cpo_alpha, -s.sum_w.sum(), s.len_w.sum()),
    }
    reward_w, reward_l = (s.mean_w, s.mean_l) if loss_type in MEAN_LOSSES else (s.sum_w, s.sum_l)
    if loss_type == "alphapo":
        reward_w, reward_l = alpha_reward(reward_w, alpha=alpha), alpha_reward(reward_l, alpha=alpha)
    return LossOut(terms, pair_metrics(beta * reward_w, beta * reward_l, s.logp_w, s.logp_l))


# ORPO

CLOSEST_TO_ZERO = -1e-6  # upper clamp of mean log-probs: log(1 - exp(a)) is -inf at 0, with slope 1/a nearby


def log1mexp(
    a: Tensor,  # (...) at most 0
) -> Tensor:  # (...)
    """log(1 - exp(a)), accurate on both sides of -log 2; constant, without gradient, above CLOSEST_TO_ZERO.

    Clamps before torch.where, because the discarded branch would otherwise put inf * 0 into the gradient.
    """
    a = a.clamp(max=CLOSEST_TO_ZERO)
    return torch.where(a < -math.log(2), torch.log1p(-a.exp()), torch.log(-torch.expm1(a)))


def log_odds_ratio(s: FreeScores) -> Tensor:  # (B,)
    """log(odds of the chosen response / odds of the rejected response)."""
    return (s.mean_w - s.mean_l) - (log1mexp(s.mean_w) - log1mexp(s.mean_l))


def orpo_loss(
    s: FreeScores,
    nll_sum: Tensor,  # () -logp summed over prompt and chosen response
    nll_count: Tensor,  # () number of tokens in nll_sum
    *,
    alpha: float,
) -> LossOut:
    assert {x.shape for x in s} == {(len(s.logp_w),)}, f"shapes {[tuple(x.shape) for x in s]}"
    log_odds = log_odds_ratio(s)  # (B,)
    count = log_odds.new_full((), len(log_odds))
    terms = {
        "nll": Term(1.0, wide(nll_sum), nll_count),
        "odds": Term(alpha, -F.logsigmoid(log_odds).sum(), count),
    }
    metrics = pair_metrics(alpha * s.mean_w, alpha * s.mean_l, s.logp_w, s.logp_l)
    return LossOut(terms, {**metrics, "policy/log_odds": (log_odds.detach().sum(), count)})
