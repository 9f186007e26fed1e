"""Losses on preference pairs with a reference: DPO and its relatives, one small function each.

    c   = logp_w - ref_w      log-ratio of the chosen response (w)
    r   = logp_l - ref_l      log-ratio of the rejected response (l)
    s   = f(log-ratio)        f-divergence transform; the log-ratio itself by default
    delta = s_w - s_l,   ls = log sigmoid,   eps = label_smoothing

A pair's margin is beta * delta. Inputs are sequence log-probs, summed over response tokens; without a reference, pass
zeros for ref_w and ref_l. 1 - sigmoid(x) is written sigmoid(-x), which neither overflows nor cancels.

Shapes: B = preference pairs, N = packed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from losses.types import Metrics, wide

MAX_EXPONENT = 40.0  # exp(40) is 2e17 and its square 6e34: far above it, squared losses would overflow fp32


def capped_expm1(
    x: Tensor,  # (...)
) -> Tensor:  # (...)
    """exp(x) - 1 up to 40 nats, and its tangent at 40 above.

    A plain clamp would ignore the worst pairs, and lose the order of a pair with both log-ratios above 40.
    """
    return torch.expm1(x.clamp(max=MAX_EXPONENT)) + math.exp(MAX_EXPONENT) * F.relu(x - MAX_EXPONENT)


# f-divergences (f-DPO, Wang et al. 2023, arXiv:2309.16240), in the sign convention of TRL 1.x: all increase with x.


def reverse_kl(
    x: Tensor,  # (B,) log-ratio
) -> Tensor:  # (B,)
    """s(x) = x: the divergence of plain DPO."""
    return x


def forward_kl(
    x: Tensor,  # (B,) log-ratio
) -> Tensor:  # (B,)
    """s(x) = 1 - exp(-x)."""
    return -capped_expm1(-x)


def js_divergence(
    x: Tensor,  # (B,) log-ratio
) -> Tensor:  # (B,)
    """s(x) = log 2 + ls(x), Jensen-Shannon."""
    return math.log(2) + F.logsigmoid(x)


def alpha_divergence(
    x: Tensor,  # (B,) log-ratio
    *,
    alpha: float = 0.5,
) -> Tensor:  # (B,)
    """s(x) = (exp((alpha - 1) x) - 1) / (alpha - 1): forward KL at alpha 0, reverse KL in the limit alpha 1."""
    if abs(alpha - 1) < 1e-6:
        return x
    return capped_expm1((alpha - 1) * x) / (alpha - 1)


DIVERGENCES: dict[str, Callable[..., Tensor]] = {
    "reverse_kl": reverse_kl,
    "forward_kl": forward_kl,
    "js_divergence": js_divergence,
    "alpha_divergence": alpha_divergence,
}
# Other losses use c and r separately, and then the partition function cancels only for reverse KL.
DIVERGENCE_LOSSES = frozenset({"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"})


class PairScores(NamedTuple):
    """Inputs of a pair loss. All derived values are fp32 or wider."""

    logp_w: Tensor  # (B,) policy, chosen response, with gradient
    logp_l: Tensor  # (B,) policy, rejected response, with gradient
    ref_w: Tensor  # (B,) reference, chosen response
    ref_l: Tensor  # (B,) reference, rejected response
    len_w: Tensor  # (B,) tokens of the chosen response
    len_l: Tensor  # (B,) tokens of the rejected response
    divergence: Callable[[Tensor], Tensor] = reverse_kl

    @property
    def c(self) -> Tensor:  # (B,)
        return wide(self.logp_w) - wide(self.ref_w)

    @property
    def r(self) -> Tensor:  # (B,)
        return wide(self.logp_l) - wide(self.ref_l)

    @property
    def s_w(self) -> Tensor:  # (B,)
        return self.divergence(self.c)

    @property
    def s_l(self) -> Tensor:  # (B,)
        return self.divergence(self.r)

    @property
    def delta(self) -> Tensor:  # (B,)
        return self.s_w - self.s_l

    @property
    def mean_delta(self) -> Tensor:  # (B,)
        """delta of per-token scores; an empty response scores 0."""
        return self.s_w / self.len_w.clamp(min=1) - self.s_l / self.len_l.clamp(min=1)


def logistic(
    margin: Tensor,  # (B,) preferred minus other response
    label_smoothing: float = 0.0,
) -> Tensor:  # (B,)
    """-(1 - eps) ls(margin) - eps ls(-margin): log loss if a fraction eps of the labels is flipped."""
    return -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)


# Pair losses


def sigmoid(s: PairScores, *, beta: float, label_smoothing: float = 0.0) -> Tensor:  # (B,)
    """-(1 - eps) ls(beta delta) - eps ls(-beta delta).

    DPO (Rafailov et al. 2023, arXiv:2305.18290); with eps > 0 conservative DPO (Mitchell 2023).
    """
    return logistic(beta * s.delta, label_smoothing)


def sigmoid_norm(s: PairScores, *, beta: float) -> Tensor:  # (B,)
    """-ls(beta (s_w / len_w - s_l / len_l)): length-normalised DPO (Tulu 3, Lambert et al. 2024, arXiv:2411.15124)."""
    return logistic(beta * s.mean_delta)


def hinge(s: PairScores, *, beta: float) -> Tensor:  # (B,)
    """max(0, 1 - beta delta) (SLiC-HF, Zhao et al. 2023, arXiv:2305.10425; RSO, Liu et al. 2023, arXiv:2309.06657)."""
    return F.relu(1 - beta * s.delta)


def ipo(s: PairScores, *, beta: float) -> Tensor:  # (B,)
    """(s_w / len_w - s_l / len_l - 1 / (2 beta))^2 (IPO, Azar et al. 2023, arXiv:2310.12036; beta is its tau).

    Scores are per token, as the authors confirmed: with sums, the target margin would mean less for longer pairs.
    """
    limit, delta = math.exp(MAX_EXPONENT), s.mean_delta
    delta = delta.detach().clamp(-limit, limit) + (delta - delta.detach())  # the square is finite and has a slope
    return (delta - 1 / (2 * beta)).square()


def exo_pair(s: PairScores, *, beta: float, label_smoothing: float) -> Tensor:  # (B,)
    """KL((q, 1 - q) || (1 - eps, eps)) with q = sigmoid(beta delta) (EXO, Ji et al. 2024, arXiv:2402.00856)."""
    if not 0 < label_smoothing < 1:
        raise ValueError(f"label_smoothing={label_smoothing}: exo_pair uses its logarithm; set it above 0, e.g. 0.001")
    u = beta * s.delta
    chosen = torch.sigmoid(u) * (F.logsigmoid(u) - math.log1p(-label_smoothing))
    rejected = torch.sigmoid(-u) * (F.logsigmoid(-u) - math.log(label_smoothing))
    return chosen + rejected


def nca_pair(s: PairScores, *, beta: float) -> Tensor:  # (B,)
    """-ls(beta c) - ls(-beta c) / 2 - ls(-beta r) / 2 (NCA, Chen et al. 2024, arXiv:2402.05369)."""
    c, r = beta * s.c, beta * s.r
    return -F.logsigmoid(c) - F.logsigmoid(-c) / 2 - F.logsigmoid(-r) / 2


def robust(s: PairScores, *, beta: float, label_smoothing: float = 0.0) -> Tensor:  # (B,)
    """[-(1 - eps) ls(beta delta) + eps ls(-beta delta)] / (1 - 2 eps) (Chowdhury et al. 2024, arXiv:2403.00409).

    Unbiased if a fraction eps of the labels is flipped; may be negative.
    """
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing={label_smoothing}: robust divides by 1 - 2 eps; set it in [0, 0.5)")
    u = beta * s.delta
    kept, flipped = -F.logsigmoid(u), -F.logsigmoid(-u)
    return ((1 - label_smoothing) * kept - label_smoothing * flipped) / (1 - 2 * label_smoothing)


def bco_pair(s: PairScores, *, beta: float) -> Tensor:  # (B,)
    """-ls(beta c) - ls(-beta r), without the running reward shift (BCO, Jung et al. 2024, arXiv:2404.04656)."""
    return -F.logsigmoid(beta * s.c) - F.logsigmoid(-beta * s.r)


def sppo_hard(s: PairScores, *, beta: float) -> Tensor:  # (B,)
    """(c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2 (SPPO, Wu et al. 2024, arXiv:2405.00675)."""
    return (s.c - 1 / (2 * beta)).square() + (s.r + 1 / (2 * beta)).square()


def apo_zero(s: PairScores, *, beta: float) -> Tensor:  # (B,)
    """1 - sigmoid(beta c) + sigmoid(beta r): chosen up, rejected down (D'Oosterlinck et al. 2024, arXiv:2408.06266)."""
    return torch.sigmoid(-beta * s.c) + torch.sigmoid(beta * s.r)


def apo_down(s: PairScores, *, beta: float) -> Tensor:  # (B,)
    """sigmoid(beta c) + 1 - sigmoid(beta (c - r)): both down, rejected more; for a policy better than its data."""
    return torch.sigmoid(beta * s.c) + torch.sigmoid(-beta * (s.c - s.r))


def discopop(s: PairScores, *, beta: float, discopop_tau: float = 0.05) -> Tensor:  # (B,)
    """(1 - g) (-ls(u)) + g exp(-u), u = beta delta, g = sigmoid(u / tau).

    DiscoPOP (Lu et al. 2024, arXiv:2406.08414), a blend of logistic and exponential loss found by a language model.
    """
    u = beta * s.delta
    # One exponent, because exp(-u) alone would overflow when g is near 0. Only tau > 1 reaches the clamp.
    exponential = (F.logsigmoid(u / discopop_tau) - u).clamp(max=MAX_EXPONENT).exp()
    return torch.sigmoid(-u / discopop_tau) * -F.logsigmoid(u) + exponential


# AOT (Melnyk et al. 2024, arXiv:2406.05882) compares sorted scores of the whole step. Each score has one partner: the
# score with the same rank on the other side. Partners are computed once per step without gradients, so the gradients of
# the micro-batches add up to the gradient of the sorted formula.


class AotTargets(NamedTuple):
    """Partners of each pair's scores within the whole step."""

    margin: Tensor  # (B,) partner of logp_w - logp_l among the reference margins
    r: Tensor  # (B,) partner of c among the rejected log-ratios
    c: Tensor  # (B,) partner of r among the chosen log-ratios

    def select(
        self,
        index: Tensor,  # (M,) pairs of one micro-batch
    ) -> AotTargets:
        return AotTargets(*(x[index] for x in self))


@torch.no_grad()
def aot_targets(s: PairScores) -> AotTargets:
    """Return the partners of all pairs of one optimizer step; `s` must contain the pairs of all ranks."""
    policy, reference = wide(s.logp_w) - wide(s.logp_l), wide(s.ref_w) - wide(s.ref_l)
    return AotTargets(margin=same_rank(policy, reference), r=same_rank(s.c, s.r), c=same_rank(s.r, s.c))


def same_rank(
    x: Tensor,  # (B,) values
    y: Tensor,  # (B,) values on the other side
) -> Tensor:  # (B,)
    """Return, for each x, the y with the same rank."""
    rank = x.argsort(stable=True).argsort()
    return y.sort().values[rank]


def aot(s: PairScores, *, beta: float, label_smoothing: float = 0.0, targets: AotTargets) -> Tensor:  # (B,)
    """cDPO of sort(logp_w - logp_l) - sort(ref_w - ref_l): the policy's margins dominate the reference's."""
    margin = wide(s.logp_w) - wide(s.logp_l) - targets.margin
    return logistic(beta * margin, label_smoothing)


def aot_unpaired(s: PairScores, *, beta: float, label_smoothing: float = 0.0, targets: AotTargets) -> Tensor:  # (B,)
    """cDPO of sort(c) - sort(r): the rewards of chosen responses dominate the rewards of rejected responses.

    c and its partner among r may be in different micro-batches, so each side is differentiated against a constant. Over
    the step each side sums to the value of the loss, so the sum keeps both gradients but only half of each value.
    """
    chosen = logistic(beta * (s.c - targets.r), label_smoothing)  # gradient only to c
    rejected = logistic(beta * (targets.c - s.r), label_smoothing)  # gradient only to r
    both = chosen + rejected
    return both - both.detach() / 2


PAIR_LOSSES: dict[str, Callable[..., Tensor]] = {
    "sigmoid": sigmoid,
    "sigmoid_norm": sigmoid_norm,
    "hinge": hinge,
    "ipo": ipo,
    "exo_pair": exo_pair,
    "nca_pair": nca_pair,
    "robust": robust,
    "bco_pair": bco_pair,
    "sppo_hard": sppo_hard,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "discopop": discopop,
    "aot": aot,
    "aot_unpaired": aot_unpaired,
}


@torch.no_grad()
def wpo_weight(
    adjusted_w: Tensor,  # (B,) mean over chosen tokens of logp_t - log sum_v p_tv^2
    adjusted_l: Tensor,  # (B,) the same over rejected tokens
    *,
    clamp: bool = True,
) -> Tensor:  # (B,)
    """Weight each pair by its likelihood under the policy: min(1, exp(adjusted_w + adjusted_l)), without gradient.

    WPO (Zhou et al. 2024, arXiv:2406.11827). TRL 1.x omits the min (`clamp=False`).
    """
    exponent = wide(adjusted_w) + wide(adjusted_l)
    return exponent.clamp(max=0.0 if clamp else MAX_EXPONENT).exp()


def ld_weights(
    position: Tensor,  # (N,) position of each token within its response, from 0
    shared_length: Tensor,  # (N,) min(len_w, len_l) of the token's pair
    *,
    alpha: float,
) -> Tensor:  # (N,) fp32
    """Weight of each token log-prob in a sequence log-prob: 1 up to the shorter response's length, then alpha.

    LD-DPO (Liu et al. 2024, arXiv:2409.06411). Use the same weights for policy and reference.
    """
    return torch.where(position < shared_length, 1.0, alpha)


@torch.no_grad()
def pair_metrics(
    reward_w: Tensor,  # (B,) implicit reward of the chosen response
    reward_l: Tensor,  # (B,) implicit reward of the rejected response
    logp_w: Tensor,  # (B,) sequence log-prob of the chosen response
    logp_l: Tensor,  # (B,) sequence log-prob of the rejected response
) -> Metrics:
    """Return the metrics common to all pair methods. A tie counts as inaccurate."""
    values = {
        "reward/chosen": wide(reward_w),
        "reward/rejected": wide(reward_l),
        "reward/margin": wide(reward_w) - wide(reward_l),
        "reward/accuracy": wide((reward_w > reward_l).to(reward_w.dtype)),
        "policy/logp_chosen": wide(logp_w),
        "policy/logp_rejected": wide(logp_l),
    }
    count = wide(reward_w).new_full((), len(reward_w))
    return {name: (value.sum(), count) for name, value in values.items()}
