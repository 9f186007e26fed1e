"""Distillation: the divergence between a student q and a teacher p, over the whole vocabulary or on sampled tokens.

`generalized_jsd` is the generalised Jensen-Shannon divergence of GKD (Agarwal et al. 2023, arXiv:2306.13649):

    m = beta p + (1 - beta) q
    D = beta KL(p || m) + (1 - beta) KL(q || m)            0 < beta < 1
    D = KL(p || q), forward                                beta = 0
    D = KL(q || p), reverse                                beta = 1

The ends are the limits of D / beta and D / (1 - beta); D itself tends to 0 there, so its gradient is small at a beta
close to an end. kernels/linear_kl.py computes the same from hidden states without storing logits.

`reverse_kl` estimates the reverse KL from one sampled token, as a policy-gradient loss with an advantage for each token
(MiniLLM, Gu et al. 2023, arXiv:2306.08543, without the part that credits a token with the KL of later ones). It takes
the teacher's log-prob, plus any weighted reward advantage, as `advantage`:

    A = sg[advantage - logp],   loss = -min(r A, clip(r) A),   r = exp(log_ratio)

The log-prob subtracted is the student's current one, not that of the policy that sampled, because for tokens drawn from
any policy `old`

    E_old[r (logp - teacher_logp) grad logp] = grad KL(q || p)

holds with logp of the current q. So A is exactly 0 where the student agrees with the teacher, shrinks on the way there
and changes sign beyond, and no pass before the one with gradient is needed. The clip limits how far one rollout may
move a token, as in losses/policy.py. It is not in POLICY_LOSSES, because a reward advantage alone would be nonsense
here: a method that has a teacher sets loss_type="losses.distill.reverse_kl".

Left out on purpose: reverse KL over the student's own top-k tokens. It does not see the mass outside them, and training
on it collapses (verl, pull request 5041). Use the whole vocabulary or the sampled token.

Shapes: N = packed tokens, V = vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from losses.policy import Metrics, PolicyLoss, Tokens, clipped
from losses.types import wide


def generalized_jsd(
    student_logits: Tensor,  # (..., V) with gradient
    teacher_logits: Tensor,  # (..., V) its gradient is not computed
    *,
    beta: float,
    temperature: float = 1.0,
) -> Tensor:  # (...,) in nats, fp32 or wider
    """D of each position. A logit of -inf is a probability of 0, with 0 log 0 = 0.

    Infinite only where it is so by definition: forward where q = 0 < p, reverse where p = 0 < q.
    """
    if not 0 <= beta <= 1:
        raise ValueError(f"beta={beta}: must be from 0 (forward KL) to 1 (reverse KL)")
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: must be above 0")
    log_q = torch.log_softmax(wide(student_logits) / temperature, dim=-1)
    log_p = torch.log_softmax(wide(teacher_logits.detach()) / temperature, dim=-1)
    if beta == 0:
        return _kl(log_p, log_q)
    if beta == 1:
        return _kl(log_q, log_p)
    # Where both are -inf, the gradient of logaddexp is NaN even if nothing uses its value.
    neither = (log_p == -torch.inf) & (log_q == -torch.inf)
    of_p, of_q = (torch.where(neither, 0.0, x) for x in (log_p + math.log(beta), log_q + math.log1p(-beta)))
    log_m = torch.logaddexp(of_p, of_q)
    return beta * _kl(log_p, log_m) + (1 - beta) * _kl(log_q, log_m)


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:  # (...,)
    """sum_v a (log a - log b), over the v with a > 0."""
    is_empty = log_a == -torch.inf
    log_a, log_b = (torch.where(is_empty, 0.0, x) for x in (log_a, log_b))
    return torch.where(is_empty, 0.0, log_a.exp() * (log_a - log_b)).sum(dim=-1)


def sampled_reverse_kl(
    t: Tokens,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    dual_clip: float | None = None,
) -> tuple[Tensor, Metrics]:
    """The clipped surrogate with advantage sg[t.advantage - t.logp], where t.advantage holds the teacher's log-prob.

    While the ratio is 1 the loss of a token is logp - teacher_logp. policy/reverse_kl is the mean of that over trained
    tokens, the k1 estimator: unbiased while the ratio is 1, and for few tokens it may be negative. A reward advantage
    that was added to the teacher's log-prob is subtracted from it.
    """
    gap = t.advantage - t.logp.detach()  # (N,) 0 where masked
    options = {"epsilon": epsilon, "epsilon_high": epsilon_high, "delta": delta, "dual_clip": dual_clip}
    loss, metrics = clipped(t._replace(advantage=gap), **options)
    return loss, {**metrics, "policy/reverse_kl": (-gap.sum(), t.mask.sum())}


reverse_kl = PolicyLoss(sampled_reverse_kl, "tokens")
