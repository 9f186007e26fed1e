"""Policy losses of GRPO and its relatives: one small function per formula, and one record per loss.

    r = exp(log_ratio),   A = advantage,   sg = no gradient,   |y| = trained tokens of the completion

    name       loss of a token                   averaged over
    grpo       -min(r A, clip(r) A)              tokens of a completion, then completions     (arXiv:2402.03300)
    bnpo       the same                          tokens of a micro-batch, then micro-batches: depends on how it is cut
    dr_grpo    the same                          completions x max_completion_length          (arXiv:2503.20783)
    dapo       the same                          tokens of the step                           (arXiv:2503.14476)
    luspo      the same                          completions, their tokens summed             (arXiv:2602.05261)
    cispo      -sg[min(r, cap)] A logp           tokens of the step                           (arXiv:2506.13585)
    sapo       -A sigmoid(tau (r - 1)) 4 / tau   as grpo                                      (arXiv:2511.20347)
    vespo      -sg[phi] A logp                   tokens of the step                           (arXiv:2602.10693)
    rloo       as grpo, r of the whole sequence  completions                                  (arXiv:2402.14740)
    reinforce  -A logp                           completions, their tokens summed

A loss is a PolicyLoss: the function of a token's loss, the average, and which ratio it takes. Everything else follows
from that record: the flags it reads are the keyword-only parameters of its function (OPTIONS has their help), flags
that only other losses read are refused, and trainer/rl/step.py runs the extra passes that its ratio needs. To add one,
write the function and enter a record into POLICY_LOSSES; `--loss-type my_module.my_loss` takes one from outside.

The loss of a step is a sum over tokens, and the sums of pieces add up to that of the whole (bnpo: within a
micro-batch). A piece may cut a completion anywhere. What concerns the whole completion or step is computed beforehand,
without gradient, and passed in per token (losses/importance.py): length, sequence_log_ratio, the mean log-ratio of
GSPO, every part of weight. Where the policy has not moved since old_logp, log-ratios are 0; otherwise they need one
pass of the current policy before the one with gradient.

A mean over completions is 1/|y| for each token, which adds up to 1 for each completion with a trained token.

Shapes: N = packed tokens.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from losses.kl import MAX_LOG_RATIO
from losses.types import LossOut, Term, options_of, wide

MIN_LOG_WEIGHT = math.log(1e-8)  # VESPO's floor of a sequence weight

Metrics = dict[str, tuple[Tensor, Tensor]]  # () sum and () count of each


class Tokens(NamedTuple):
    """What a policy loss may use of some trained tokens. Masked positions: advantage, logp and log_ratio are 0."""

    logp: Tensor  # (N,) policy, with gradient
    log_ratio: Tensor  # (N,) with gradient; of the token, or of its completion (importance_sampling_level, rloo)
    advantage: Tensor  # (N,) of each token
    mask: Tensor  # (N,) bool, True = trained
    length: Tensor  # (N,) trained tokens of the token's whole completion
    weight: Tensor | None = None  # (N,) importance correction x off-policy mask x entropy mask, no gradient; None: 1
    # (N,) sum of logp - old_logp over the completion, no gradient; only if the record's ratio is completion or weight
    sequence_log_ratio: Tensor | None = None

    @property
    def ratio(self) -> Tensor:  # (N,) with gradient
        return self.log_ratio.exp()


class Share(NamedTuple):
    """An average: what each token counts in the sum, and what these tokens add to the number it is divided by."""

    weight: Tensor  # (N,)
    count: Tensor  # ()


@dataclass(frozen=True)
class PolicyLoss:
    """One policy loss. Calling it gives the weighted sum over some tokens."""

    loss: Callable[..., Tensor | tuple[Tensor, Metrics]]
    """(tokens, *, options) -> (N,) loss of each token, and metrics if it has any."""
    average: Literal["tokens", "completions", "completion_sums", "budget", "micro_batch"] = "tokens"
    """What the sum is divided by: the functions over_* below."""
    ratio: Literal["token", "completion", "weight", "none"] = "token"
    """token: log_ratio is of each token, or GSPO's mean where that is asked for. completion: log_ratio is that of the
    whole completion. weight: it reads sequence_log_ratio, which then includes the gap to the engine. none: it has none,
    so it is right for the first step on a batch only."""

    @property
    def is_clipped(self) -> bool:
        """Whether it is PPO's surrogate, which trainer/methods/grpo.py writes out."""
        return self.loss is clipped

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        """Keyword-only parameters of the function: each is a flag, or a key of --loss-kwargs."""
        return options_of(self.loss)

    def __call__(
        self,
        t: Tokens,
        *,
        micro_batch_tokens: Tensor | None = None,  # () trained tokens of the micro-batch these are of, for bnpo
        max_completion_length: int | None = None,
        **options: float | None,
    ) -> LossOut:
        t = t._replace(
            logp=torch.where(t.mask, wide(t.logp), 0.0), advantage=torch.where(t.mask, wide(t.advantage), 0.0)
        )
        if self.ratio == "completion":
            assert t.sequence_log_ratio is not None, "the ratio of a completion needs sequence_log_ratio"
            t = t._replace(log_ratio=product_log_ratio(t.logp, t.sequence_log_ratio, t.length, t.mask))
        loss, metrics = self.of_tokens(t, **options)
        if t.weight is not None:
            weight = torch.where(t.mask, wide(t.weight.detach()), 0.0)
            loss = torch.where(weight == 0, 0.0, loss) * weight  # left out, not multiplied: it might not be finite
        share = self.share(t, micro_batch_tokens=micro_batch_tokens, max_completion_length=max_completion_length)
        total = torch.where(t.mask, loss * share.weight, 0.0).sum()
        ratio = torch.where(t.mask, t.log_ratio.detach().exp(), 0.0).sum()
        return LossOut({"policy": Term(1.0, total, share.count)}, {"policy/ratio": (ratio, t.mask.sum()), **metrics})

    def of_tokens(self, t: Tokens, **options: float | None) -> tuple[Tensor, Metrics]:  # (N,)
        """The loss of each token, without weight or average, and metrics if it has any."""
        found = self.loss(t, **options)
        loss, metrics = found if isinstance(found, tuple) else (found, {})
        if loss.shape != t.logp.shape:
            shapes = f"{tuple(loss.shape)} for {tuple(t.logp.shape)} tokens"
            raise ValueError(f"loss_type={getattr(self.loss, '__name__', self.loss)}: returned shape {shapes}")
        return loss, dict(metrics)

    def share(
        self,
        t: Tokens,
        *,
        micro_batch_tokens: Tensor | None = None,  # () for bnpo
        max_completion_length: int | None = None,  # for dr_grpo
    ) -> Share:
        """The average, also for terms beside the loss (losses.kl.kl_penalty)."""
        if self.average == "budget":
            return over_budget(t, max_completion_length=max_completion_length)
        if self.average == "micro_batch":
            return over_micro_batch(t, micro_batch_tokens=micro_batch_tokens)
        plain = {"tokens": over_tokens, "completions": over_completions, "completion_sums": over_completion_sums}
        return plain[self.average](t)

    def denominator(
        self,
        *,
        num_tokens: Tensor,  # () trained tokens of the step, all ranks
        num_completions: Tensor,  # () completions of the step with a trained token, all ranks
        num_micro_batches: Tensor,  # () of the step that hold a trained token, all ranks
        max_completion_length: int,
    ) -> Tensor:  # ()
        """What the counts of all pieces add up to over the step, known before the first piece is computed."""
        return {
            "tokens": num_tokens,
            "completions": num_completions,
            "completion_sums": num_completions,
            "budget": num_completions * max_completion_length,
            "micro_batch": num_micro_batches,
        }[self.average]


# Log-ratios.


def token_log_ratio(
    logp: Tensor,  # (N,) policy, with gradient
    old_logp: Tensor,  # (N,) policy to compare with
    mask: Tensor,  # (N,) bool, True = trained
) -> Tensor:  # (N,) 0 where masked
    # Zero it before exp: a masked position may hold any value, even NaN.
    logp = wide(logp)
    return torch.where(mask, logp - old_logp.to(logp.dtype), 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_log_ratio(
    logp: Tensor,  # (N,) policy, with gradient
    mean: Tensor,  # (N,) mean over the token's completion of logp - old_logp, no gradient
    mask: Tensor,  # (N,) bool, True = trained
) -> Tensor:  # (N,) 0 where masked
    """Sequence level (GSPO, Zheng et al. 2025, arXiv:2507.18071) in its token form: sg[mean] + logp - sg[logp].

    Its value is the ratio of the completion, its gradient reaches each token through that token alone. Summed over a
    completion with equal advantage and weight this is the gradient of the sequence's ratio; a weight that differs
    between tokens scales each token's own part.
    """
    logp = torch.where(mask, wide(logp), 0.0)
    value = torch.where(mask, mean.to(logp.dtype), 0.0) + (logp - logp.detach())
    return value.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def product_log_ratio(
    logp: Tensor,  # (N,) policy, with gradient
    total: Tensor,  # (N,) sum over the token's completion of logp - old_logp, no gradient
    length: Tensor,  # (N,) trained tokens of the token's completion
    mask: Tensor,  # (N,) bool, True = trained
) -> Tensor:  # (N,) 0 where masked
    """Log-ratio of the whole completion, not per token: sg[total] + |y| (logp - sg[logp]), for means of 1/|y| each."""
    logp = torch.where(mask, wide(logp), 0.0)
    value = torch.where(mask, total.to(logp.dtype), 0.0) + length * (logp - logp.detach())
    return value.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


# Averages.


def over_tokens(t: Tokens) -> Share:
    ones = t.mask.to(wide(t.logp).dtype)
    return Share(ones, t.mask.sum())


def over_completions(t: Tokens) -> Share:
    """Mean over the tokens of a completion, then over completions."""
    each = over_tokens(t).weight / t.length.clamp(min=1)
    return Share(each, each.sum())


def over_completion_sums(t: Tokens) -> Share:
    """Sum over the tokens of a completion, then the mean over completions."""
    return Share(over_tokens(t).weight, over_completions(t).count)


def over_budget(t: Tokens, *, max_completion_length: int) -> Share:
    """Every completion counts as many tokens as it might have had."""
    return Share(over_tokens(t).weight, over_completions(t).count * max_completion_length)


def over_micro_batch(
    t: Tokens,
    *,
    micro_batch_tokens: Tensor,  # () trained tokens of the micro-batch these are of
) -> Share:
    each = over_tokens(t).weight / micro_batch_tokens.clamp(min=1)
    return Share(each, each.sum())


# Losses of a token.


def clipped(
    t: Tokens,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    dual_clip: float | None = None,
) -> tuple[Tensor, Metrics]:
    """-min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A): PPO's surrogate (Schulman et al. 2017), with clip-higher.

    Neither branch bounds a bad token (A < 0) that has become far more likely: its loss is r |A|. Two options do:

        delta      two-sided clip (INTELLECT-2, arXiv:2505.07291): min(r, delta) instead of r in the first branch
        dual_clip  dual clip (Ye et al. 2020, arXiv:1912.09729): the loss is at most dual_clip |A| where A < 0

    Beyond the bound such a token has no gradient. Above 1 + epsilon_high the two are the same function.
    """
    high = epsilon if epsilon_high is None else epsilon_high
    bounds = {"epsilon_low": epsilon, "epsilon_high": high, "delta": delta, "dual_clip": dual_clip}
    ratio, count = t.ratio, t.mask.sum()
    sides = clipped_tokens(ratio, t.advantage, **bounds)
    metrics = {f"policy/clip_{side}_frac": (x.to(ratio.dtype).sum(), count) for side, x in sides._asdict().items()}
    metrics["policy/clip_frac"] = (torch.stack(sides).any(0).to(ratio.dtype).sum(), count)
    return clip_loss(ratio, t.advantage, **bounds), metrics


def cispo(t: Tokens, *, cispo_cap: float = 5.0) -> tuple[Tensor, Metrics]:
    """The weight is capped, the gradient is not: tokens beyond the cap still teach."""
    ratio = t.log_ratio.detach().exp()
    capped = t.mask & (ratio > cispo_cap)
    loss = -ratio.clamp(max=cispo_cap) * t.advantage * t.logp
    return loss, {"policy/cispo_cap_frac": (capped.to(ratio.dtype).sum(), t.mask.sum())}


def sapo(t: Tokens, *, sapo_temperature_pos: float = 1.0, sapo_temperature_neg: float = 1.05) -> Tensor:
    """A soft gate instead of a clip: its slope is 1 at ratio 1 and fades on both sides, faster where A <= 0."""
    ratio = t.ratio
    # Two gates with a float each: a tensor of temperatures would cost one more (N,) and read worse.
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
    """log phi = lambda + k log w - lambda w, w the weight of the whole completion: 1 at w = 1, fading on both sides.

    log w is sequence_log_ratio. An engine correction is not a weight here: the sum of its log-weights over the
    completion is part of sequence_log_ratio instead.
    """
    assert t.sequence_log_ratio is not None, "vespo needs sequence_log_ratio"
    log_w = torch.where(t.mask, wide(t.sequence_log_ratio.detach()), 0.0).clamp(MIN_LOG_WEIGHT, MAX_LOG_RATIO)
    good = vespo_lambda_pos + vespo_k_pos * log_w - vespo_lambda_pos * log_w.exp()
    bad = vespo_lambda_neg + vespo_k_neg * log_w - vespo_lambda_neg * log_w.exp()
    phi = torch.where(t.advantage >= 0, good, bad).exp()
    return -phi * t.advantage * t.logp, {"policy/vespo_phi": (torch.where(t.mask, phi, 0.0).sum(), t.mask.sum())}


def log_likelihood(t: Tokens) -> Tensor:
    """-A logp. No ratio, no clip: right on policy only, or with a correction as weight."""
    return -t.advantage * t.logp


# The clip.


def clip_loss(
    ratio: Tensor,  # (N,) of token or sequence, with gradient
    advantage: Tensor,  # (N,)
    *,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None = None,
    dual_clip: float | None = None,
) -> Tensor:  # (N,)
    """-min(ratio A, clip(ratio) A), bounded for A < 0 by delta or dual_clip if given."""
    if delta is not None and delta <= 1 + epsilon_high:
        raise ValueError(f"delta={delta}: must be above 1 + epsilon_high = {1 + epsilon_high}; INTELLECT-2 has 4")
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip={dual_clip}: must be above 1, else tokens on policy have no gradient; try 3")
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    loss = -torch.minimum(bounded * advantage, ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * advantage)
    if dual_clip is not None:
        loss = torch.where(advantage < 0, torch.minimum(loss, -dual_clip * advantage), loss)
    return loss


@torch.no_grad()
def clip_metrics(
    ratio: Tensor,  # (N,)
    advantage: Tensor,  # (N,)
    *,
    low: float,
    high: float,
    cap: float | None,
) -> Metrics:
    """Fractions of tokens without gradient: beyond the edge in the direction their advantage pushes."""
    bad = advantage < 0
    sides = {"low": (ratio < low) & bad, "high": (ratio > high) & (advantage > 0)}
    sides["capped"] = (ratio > (math.inf if cap is None else cap)) & bad
    sides["any"] = torch.stack(list(sides.values())).any(0)
    count = torch.full((), len(ratio), device=ratio.device)
    names = {side: "policy/clip_frac" if side == "any" else f"policy/clip_{side}_frac" for side in sides}
    return {names[side]: (x.to(ratio.dtype).sum(), count) for side, x in sides.items()}


class ClippedTokens(NamedTuple):
    """Tokens without gradient: beyond the edge in the direction their advantage pushes. All (N,) bool."""

    low: Tensor  # ratio below the range, A < 0
    high: Tensor  # ratio above the range, A > 0
    capped: Tensor  # ratio above delta or dual_clip, A < 0


@torch.no_grad()
def clipped_tokens(
    ratio: Tensor,  # (N,)
    advantage: Tensor,  # (N,) 0 where masked
    *,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None = None,
    dual_clip: float | None = None,
) -> ClippedTokens:
    cap = min((x for x in (delta, dual_clip) if x is not None), default=float("inf"))
    return ClippedTokens(
        low=(ratio < 1 - epsilon_low) & (advantage < 0),
        high=(ratio > 1 + epsilon_high) & (advantage > 0),
        capped=(ratio > cap) & (advantage < 0),
    )


# The registry.

grpo = PolicyLoss(clipped, "completions")  # tokens of long completions weigh less; at sequence level this is GSPO
bnpo = PolicyLoss(clipped, "micro_batch")  # the gradient depends on the cut; on one micro-batch it is dapo
dr_grpo = PolicyLoss(clipped, "budget")  # no bias towards short good or long bad completions; scale_rewards none
dapo = PolicyLoss(clipped, "tokens")
luspo = PolicyLoss(clipped, "completion_sums")  # at sequence level |y| r A: GSPO without its pull towards short ones
rloo = PolicyLoss(clipped, "completions", ratio="completion")  # with advantage_estimator leave_one_out

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "grpo": grpo,
    "bnpo": bnpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "luspo": luspo,
    "cispo": PolicyLoss(cispo, "tokens"),
    "sapo": PolicyLoss(sapo, "completions"),
    "vespo": PolicyLoss(vespo, "tokens", ratio="weight"),
    "rloo": rloo,
    "reinforce": PolicyLoss(log_likelihood, "completion_sums", ratio="none"),
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
}
