"""Policy losses: the loss of one token for each objective, and one record per --loss-type.

    r = exp(log_ratio),   A = advantage,   sg = no gradient,   |y| = trained tokens of the completion

    name       loss of a token                   averaged over
    grpo       -min(r A, clip(r) A)              tokens of a completion, then completions     (arXiv:2402.03300)
    bnpo       the same                          tokens of a micro-batch, then micro-batches
    dr_grpo    the same                          completions x max_completion_length          (arXiv:2503.20783)
    dapo       the same                          tokens of the step                           (arXiv:2503.14476)
    luspo      the same                          completions, their tokens summed             (arXiv:2602.05261)
    rloo       the same, r of the completion     tokens of a completion, then completions     (arXiv:2402.14740)
    cispo      -sg[min(r, cap)] A logp           tokens of the step                           (arXiv:2506.13585)
    sapo       -A sigmoid(tau (r - 1)) 4 / tau   tokens of a completion, then completions     (arXiv:2511.20347)
    vespo      -sg[phi] A logp                   tokens of the step                           (arXiv:2602.10693)
    dppo_tv    -M r A                            tokens of the step                           (arXiv:2602.04879)
    dppo_kl    the same with another mask M      tokens of the step
    reinforce  -A logp                           completions, their tokens summed

trainer/methods/grpo.py writes out the clip, the averages and everything around them; here are the other losses.

To add a loss, write a function of `t` (see Tokens) that returns (n,) and enter a record into POLICY_LOSSES, or name the
function or the record on the command line: `--loss-type my_module.my_loss`. Its keyword-only parameters are keys of
--loss-kwargs. The function sees n tokens at a time, cut anywhere; numbers that concern a whole completion are columns
of `t`, computed beforehand (trainer/rl/lookahead.py).

Shapes: n = any slice of the trained tokens of a micro-batch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from losses.kl import MAX_LOG_RATIO
from losses.types import Metrics, options_of, wide

MIN_LOG_WEIGHT = math.log(1e-8)  # VESPO's floor for the weight of a completion


class Tokens(Protocol):
    """Columns of some trained tokens that a loss may read (trainer.rl.minibatch.MicroBatch has more)."""

    logp: Tensor  # (n,) current policy, with gradient
    entropy: Tensor  # (n,) of the next-token distribution in nats, with gradient
    log_ratio: Tensor  # (n,) to the old policy, with gradient; of the token, or of its completion
    advantage: Tensor  # (n,)
    length: Tensor  # (n,) trained tokens of the token's completion
    engine_logp: Tensor  # (n,) log-prob by the engine that sampled; NaN = not reported
    old_logp: Tensor | None  # (n,) denominator of the ratio; None: the current policy
    ref_logp: Tensor | None  # (n,) reference; None: no KL term
    total_log_ratio: Tensor  # (n,) log-ratio of the whole completion; set only if the record's ratio asks for it


@dataclass(frozen=True)
class PolicyLoss:
    """One --loss-type. Flags, rejections and extra passes follow from this record."""

    loss: Callable[..., Tensor | tuple[Tensor, Metrics]] | None = None
    """(t, *, options) -> (n,) loss of each token, and metrics if it has any. None: PPO's clip."""
    average: Literal["tokens", "completions", "completion_sums", "budget", "micro_batch"] = "tokens"
    """Divisor of the sum over the step, and the weight of each token (token_share and step_divisor in grpo.py)."""
    ratio: Literal["token", "token_only", "completion", "weight", "none"] = "token"
    """token: log_ratio per token, or GSPO's mean. token_only: not the mean. completion: log_ratio of the whole
    completion. weight: the loss reads total_log_ratio, which includes the gap to the engine. none: no ratio; one step
    per rollout."""

    @property
    def is_clipped(self) -> bool:
        """True for PPO's clip, which trainer/methods/grpo.py writes out."""
        return self.loss is None

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        """Keyword-only parameters: flags, or keys of --loss-kwargs."""
        return options_of(self.loss or clip_bounds)

    def of_tokens(self, t: Tokens, **options: Any) -> tuple[Tensor, Metrics]:  # (n,)
        """The loss of each token, before weights and average, and its metrics."""
        assert self.loss is not None, "trainer/methods/grpo.py writes out the clip"
        result = self.loss(t, **options)
        return (result[0], dict(result[1])) if isinstance(result, tuple) else (result, {})

    __call__ = of_tokens  # --loss-type my_module.my_record: user code must be callable


# PPO's clip: -min(r A, clip(r, low, high) A), in trainer/methods/grpo.py.


def clip_bounds(
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    dual_clip: float | None = None,
) -> tuple[float, float, float | None]:
    """(low, high, cap) of the ratio: 1 - epsilon, 1 + epsilon_high, and the bound for tokens with A < 0.

    Without a cap, the loss r |A| of a bad token that has become far more likely is unbounded. Two names for one bound:

        delta      two-sided clip (INTELLECT-2, arXiv:2505.07291): min(r, delta) in the first branch
        dual_clip  dual clip (Ye et al. 2020, arXiv:1912.09729): the loss is at most dual_clip |A|

    Beyond it such a token has no gradient.
    """
    low, high = 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)
    if delta is not None and delta <= high:
        raise ValueError(f"delta={delta}: must be above 1 + epsilon_high = {high}; INTELLECT-2 uses 4")
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip={dual_clip}: must be above 1, or on-policy tokens have no gradient; try 3")
    return low, high, min((x for x in (delta, dual_clip) if x is not None), default=None)


@torch.no_grad()
def clip_metrics(
    ratio: Tensor,  # (N,) policy to old policy
    advantage: Tensor,  # (N,) of each token
    *,
    low: float,
    high: float,
    cap: float | None,
) -> Metrics:
    """Fractions of tokens without gradient: clipped in the direction that their advantage pushes."""
    bad = advantage < 0
    sides = {"low": (ratio < low) & bad, "high": (ratio > high) & (advantage > 0)}
    sides["capped"] = (ratio > (math.inf if cap is None else cap)) & bad
    metrics = {f"policy/clip_{side}_frac": (x.to(ratio.dtype).sum(), len(ratio)) for side, x in sides.items()}
    clipped = torch.stack(list(sides.values())).any(0)
    return {**metrics, "policy/clip_frac": (clipped.to(ratio.dtype).sum(), len(ratio))}


# Losses of a token.


def cispo(t: Tokens, *, cispo_cap: float = 5.0) -> tuple[Tensor, Metrics]:
    """Cap the weight instead of clipping: tokens beyond the cap keep a gradient."""
    ratio = t.log_ratio.detach().exp()
    loss = -ratio.clamp(max=cispo_cap) * t.advantage * t.logp
    return loss, {"policy/cispo_cap_frac": ((ratio > cispo_cap).to(ratio.dtype).sum(), len(ratio))}


def sapo(t: Tokens, *, sapo_temperature_pos: float = 1.0, sapo_temperature_neg: float = 1.05) -> Tensor:
    """A soft gate instead of a clip: slope 1 at ratio 1, fading on both sides, faster if A <= 0."""
    ratio = t.log_ratio.exp()
    # Two gates with a float each: a tensor of temperatures would cost one more (n,) and read worse.
    good = torch.sigmoid(sapo_temperature_pos * (ratio - 1)) * (4 / sapo_temperature_pos)
    bad = torch.sigmoid(sapo_temperature_neg * (ratio - 1)) * (4 / sapo_temperature_neg)
    return -t.advantage * torch.where(t.advantage > 0, good, bad)


def vespo(
    t: Tokens,
    *,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
) -> tuple[Tensor, Metrics]:
    """log phi = lambda + k log w - lambda w with w the weight of the completion: 1 at w = 1, fading on both sides.

    log w is total_log_ratio. It contains the engine correction, so no other weight applies.
    """
    log_w = wide(t.total_log_ratio.detach()).clamp(MIN_LOG_WEIGHT, MAX_LOG_RATIO)
    good = vespo_lambda_pos + vespo_k_pos * log_w - vespo_lambda_pos * log_w.exp()
    bad = vespo_lambda_neg + vespo_k_neg * log_w - vespo_lambda_neg * log_w.exp()
    phi = torch.where(t.advantage >= 0, good, bad).exp()
    return -phi * t.advantage * t.logp, {"policy/vespo_phi": (phi.sum(), len(phi))}


def dppo_tv(t: Tokens, *, dppo_threshold: float = 0.15) -> tuple[Tensor, Metrics]:
    """-M r A with a mask M instead of a clip (Qi et al. 2026, arXiv:2602.04879, Eq. 11 to 13; verl, pull request 5397).

    M = 0 where A pushes the token away from mu (A > 0 and p > mu, or A < 0 and p < mu) and D > dppo_threshold, with p
    and mu the token's probability under the policy and the old policy. D = |p - mu| is the total variation between the
    distributions over this token and all others. Clipping r instead masks rare tokens too early, frequent ones too
    late. mu is the engine in the paper: --proximal-policy behaviour. The authors' code in verl also bounds r by 20,
    without effect on the mask; thresholds are those of its example.
    """
    log_p, log_mu = _token_logps(t)
    return _masked(t, (log_p.exp() - log_mu.exp()).abs() > dppo_threshold)


def dppo_kl(t: Tokens, *, dppo_threshold: float = 0.05) -> tuple[Tensor, Metrics]:
    """dppo_tv with the KL of the same two outcomes, D = mu log(mu / p) + (1 - mu) log((1 - mu) / (1 - p)) (Eq. 14)."""
    log_p, log_mu = _token_logps(t)
    mu, rest_p, rest_mu = log_mu.exp(), *((-torch.expm1(x)).clamp(min=1e-8) for x in (log_p, log_mu))
    return _masked(t, mu * (log_mu - log_p) + rest_mu * (rest_mu / rest_p).log() > dppo_threshold)


def _token_logps(t: Tokens) -> tuple[Tensor, Tensor]:  # (n,) each
    """log p and log mu of each token."""
    here = wide(t.logp.detach())
    return here, here if t.old_logp is None else torch.where(t.old_logp.isnan(), here, t.old_logp)


def _masked(t: Tokens, far: Tensor) -> tuple[Tensor, Metrics]:
    log_p, log_mu = _token_logps(t)
    masked = far & torch.where(t.advantage > 0, log_p > log_mu, (t.advantage < 0) & (log_p < log_mu))
    loss = torch.where(masked, 0.0, -t.log_ratio.exp() * t.advantage)
    return loss, {"policy/dppo_masked_frac": (masked.to(loss.dtype).sum(), len(masked))}


def log_likelihood(t: Tokens) -> Tensor:
    """-A logp: no ratio and no clip, valid on policy only."""
    return -t.advantage * t.logp


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "grpo": PolicyLoss(average="completions"),  # at sequence level: GSPO
    "bnpo": PolicyLoss(average="micro_batch"),  # the gradient depends on how the step is cut into micro-batches
    "dr_grpo": PolicyLoss(average="budget"),  # no bias towards short good or long bad completions
    "dapo": PolicyLoss(average="tokens"),
    "luspo": PolicyLoss(average="completion_sums"),  # at sequence level: GSPO without its bias towards short ones
    "rloo": PolicyLoss(average="completions", ratio="completion"),  # with advantage_estimator leave_one_out
    "cispo": PolicyLoss(cispo),
    "sapo": PolicyLoss(sapo, average="completions"),
    "vespo": PolicyLoss(vespo, ratio="weight"),
    "dppo_tv": PolicyLoss(dppo_tv, ratio="token_only"),
    "dppo_kl": PolicyLoss(dppo_kl, ratio="token_only"),
    "reinforce": PolicyLoss(log_likelihood, average="completion_sums", ratio="none"),
}


class Option(NamedTuple):
    """A keyword of built-in losses, which is a flag of the same name. Its default is that of the function."""

    help: str
    above: float | None = None
    at_least: float | None = None


OPTIONS = {
    "epsilon": Option("Clip range of the ratio, below 1 and above.", at_least=0),
    "epsilon_high": Option("Clip range above 1 when it differs (DAPO: 0.28); None uses epsilon.", at_least=0),
    "delta": Option(
        "Two-sided clip: bound of the ratio where the advantage is negative (INTELLECT-2: 4); None leaves it open."
    ),
    "dual_clip": Option(
        "Dual clip: bound of the loss in units of the advantage, where that is negative (3 is usual); None: no bound."
    ),
    "cispo_cap": Option("CISPO: upper bound of the ratio itself.", above=0),
    "sapo_temperature_pos": Option("SAPO: steepness of the gate for advantages above 0.", above=0),
    "sapo_temperature_neg": Option("SAPO: steepness of the gate for the others.", above=0),
    "vespo_k_pos": Option("VESPO: power of the weight, advantages of 0 and above.", above=0),
    "vespo_lambda_pos": Option("VESPO: decay of the weight, advantages of 0 and above.", above=0),
    "vespo_k_neg": Option("VESPO: power of the weight, advantages below 0.", above=0),
    "vespo_lambda_neg": Option("VESPO: decay of the weight, advantages below 0.", above=0),
    "dppo_threshold": Option("DPPO: divergence beyond which a token is not pushed further away.", above=0),
}
