"""Losses of preference pairs without a reference: CPO (Xu et al. 2024, arXiv:2401.08417) and SimPO.

    sum_w, sum_l     sequence log-probs of the chosen and the rejected response
    mean_w, mean_l   the same per token
    ls = log sigmoid,   eps = label_smoothing
    loss = mean over pairs of l + cpo_alpha * NLL of the chosen response per token

cpo_alpha 0 with `simpo` is SimPO as published; with cpo_alpha > 0 it is known as CPO-SimPO.

Shapes: B = preference pairs.

Odds ratio preference optimization (ORPO, Hong, Lee and Thorne 2024, arXiv:2403.07691).

    a        = mean log-prob per response token,   odds(a) = exp(a) / (1 - exp(a))
    log_odds = log odds(a_w) - log odds(a_l) = (a_w - a_l) - (log1mexp(a_w) - log1mexp(a_l))
    loss     = NLL of the chosen row per token - alpha * mean over pairs of log sigmoid(log_odds)

No reference. The authors take the NLL over prompt and chosen response, so its sum and count come from the caller.

Shapes: B = preference pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from losses.preference import capped_expm1, logistic, options_of, pair_metrics
from losses.types import LossOut, Term, wide


class FreeScores(NamedTuple):
    """What a reference-free pair loss may use. Everything derived is fp32 or wider, whatever the inputs."""

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
        return self.sum_w / self.len_w.clamp(min=1)  # a response without tokens scores 0

    @property
    def mean_l(self) -> Tensor:  # (B,)
        return self.sum_l / self.len_l.clamp(min=1)


def simpo(s: FreeScores, *, beta: float, gamma: float, label_smoothing: float = 0.0) -> Tensor:  # (B,)
    """cDPO of beta (mean_w - mean_l) - gamma (SimPO, Meng, Xia and Chen 2024, arXiv:2405.14734).

    Published settings have beta 2 to 10 and gamma / beta about 0.5.
    """
    return logistic(beta * (s.mean_w - s.mean_l) - gamma, label_smoothing)


def alphapo(s: FreeScores, *, beta: float, gamma: float, alpha: float, label_smoothing: float = 0.0) -> Tensor:  # (B,)
    """SimPO of the reshaped reward (1 - exp(-alpha mean)) / alpha (AlphaPO, Gupta et al. 2025, arXiv:2501.03884)."""
    difference = alpha_reward(s.mean_w, alpha=alpha) - alpha_reward(s.mean_l, alpha=alpha)
    return logistic(beta * difference - gamma, label_smoothing)


def alpha_reward(
    mean: Tensor,  # (B,) log-prob per token
    *,
    alpha: float,
) -> Tensor:  # (B,)
    """(1 - exp(-alpha mean)) / alpha; its limit at alpha 0 is the log-prob itself."""
    if abs(alpha) < 1e-6:
        return mean
    return -capped_expm1(-alpha * mean) / alpha


def sigmoid(s: FreeScores, *, beta: float, label_smoothing: float = 0.0) -> Tensor:  # (B,)
    """cDPO of beta (sum_w - sum_l): DPO under a uniform reference (CPO)."""
    return logistic(beta * (s.sum_w - s.sum_l), label_smoothing)


def hinge(s: FreeScores, *, beta: float) -> Tensor:  # (B,)
    """max(0, 1 - beta (sum_w - sum_l)) (SLiC-HF, Zhao et al. 2023, arXiv:2305.10425)."""
    return F.relu(1 - beta * (s.sum_w - s.sum_l))


def ipo(s: FreeScores, *, beta: float) -> Tensor:  # (B,)
    """(mean_w - mean_l - 1 / (2 beta))^2 (IPO, Azar et al. 2023, arXiv:2310.12036, without reference)."""
    return (s.mean_w - s.mean_l - 1 / (2 * beta)).square()


CPO_LOSSES: dict[str, Callable[..., Tensor]] = {
    "sigmoid": sigmoid,
    "hinge": hinge,
    "ipo": ipo,
    "simpo": simpo,
    "alphapo": alphapo,
}
MEAN_LOSSES = frozenset({"ipo", "simpo", "alphapo"})  # these compare log-probs per token, the others sums


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
    """One of CPO_LOSSES per pair, and cpo_alpha times the NLL of the chosen response's tokens.

    The rewards that are logged are those the loss compares: beta times the sum of log-probs, their mean, or alphapo's
    reshaped mean.
    """
    assert {x.shape for x in s} == {(len(s.logp_w),)}, f"shapes {[tuple(x.shape) for x in s]}"
    options = {"beta": beta, "gamma": gamma, "alpha": alpha, "label_smoothing": label_smoothing}
    function = CPO_LOSSES[loss_type]
    loss = function(s, **{key: options[key] for key in options_of(function)})  # (B,)
    terms = {
        loss_type: Term(1.0, loss.sum(), loss.new_tensor(len(loss))),
        "nll": Term(cpo_alpha, -s.sum_w.sum(), s.len_w.sum()),
    }
    reward_w, reward_l = (s.mean_w, s.mean_l) if loss_type in MEAN_LOSSES else (s.sum_w, s.sum_l)
    if loss_type == "alphapo":
        reward_w, reward_l = alpha_reward(reward_w, alpha=alpha), alpha_reward(reward_l, alpha=alpha)
    return LossOut(terms, pair_metrics(beta * reward_w, beta * reward_l, s.logp_w, s.logp_l))


CLOSEST_TO_ZERO = -1e-6  # a mean log-prob above this is held there: log(1 - exp(a)) is -inf at 0, its slope 1/a


def log1mexp(
    a: Tensor,  # (...) at most 0
) -> Tensor:  # (...)
    """log(1 - exp(a)), accurate on both sides of -log 2; constant, without gradient, above CLOSEST_TO_ZERO.

    Clamped before the branches: `where` alone would pass the discarded branch's inf * 0 on to the gradient.
    """
    a = a.clamp(max=CLOSEST_TO_ZERO)
    return torch.where(a < -math.log(2), torch.log1p(-a.exp()), torch.log(-torch.expm1(a)))


def log_odds_ratio(s: FreeScores) -> Tensor:  # (B,)
    """How much likelier than not the chosen response is, over the same of the rejected one, in nats."""
    return (s.mean_w - s.mean_l) - (log1mexp(s.mean_w) - log1mexp(s.mean_l))


def orpo_loss(
    s: FreeScores,
    nll_sum: Tensor,  # () -logp summed over the tokens the NLL is over: chosen rows, prompt included as published
    nll_count: Tensor,  # () number of those tokens
    *,
    alpha: float,
) -> LossOut:
    assert {x.shape for x in s} == {(len(s.logp_w),)}, f"shapes {[tuple(x.shape) for x in s]}"
    log_odds = log_odds_ratio(s)  # (B,)
    count = log_odds.new_tensor(len(log_odds))
    terms = {
        "nll": Term(1.0, wide(nll_sum), nll_count),
        "odds": Term(alpha, -F.logsigmoid(log_odds).sum(), count),
    }
    metrics = pair_metrics(alpha * s.mean_w, alpha * s.mean_l, s.logp_w, s.logp_l)
    return LossOut(terms, {**metrics, "policy/log_odds": (log_odds.detach().sum(), count)})
