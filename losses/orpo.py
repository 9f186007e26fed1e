"""Odds ratio preference optimization (ORPO, Hong, Lee and Thorne 2024, arXiv:2403.07691).

    a        = mean log-prob per response token,   odds(a) = exp(a) / (1 - exp(a))
    log_odds = log odds(a_w) - log odds(a_l) = (a_w - a_l) - (log1mexp(a_w) - log1mexp(a_l))
    loss     = NLL of the chosen row per token - alpha * mean over pairs of log sigmoid(log_odds)

No reference. The authors take the NLL over prompt and chosen response, so its sum and count come from the caller.

Shapes: B = preference pairs.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from losses.preference import pair_metrics, wide
from losses.simpo import FreeScores
from losses.types import LossOut, Term

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
