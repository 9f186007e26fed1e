"""Policy losses of GRPO and its relatives, one small function each: a per-token loss and what it is averaged over.

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

Every loss is a sum over the tokens it is given, and the sums of pieces add up to that of the whole (bnpo: within a
micro-batch). So a piece may cut a completion anywhere, and what concerns the whole completion or step comes in per
token or as a number, computed beforehand and without gradient (losses.importance): length, sequence_log_ratio, the mean
log-ratio of GSPO, every part of weight. Where the policy has not moved since old_logp, log-ratios are 0; else they want
one pass over the current policy before the one with gradient.

A mean over completions is taken as 1/|y| for each token, which adds up to 1 for each completion with a trained token.
`denominator` gives what the count of a term adds up to over the step.

Shapes: N = packed tokens.

Clipped surrogate at token level (PPO, Schulman et al. 2017; GRPO, Shao et al. 2024; clip-higher, Yu et al. 2025).

    ratio_n = exp(logp_n - old_logp_n)
    loss_n  = -min(ratio_n A_n, clip(ratio_n, 1 - epsilon_low, 1 + epsilon_high) A_n)

Neither branch bounds a bad token (A < 0) that has become far more likely: its loss is ratio * |A|. Two options do:

    delta      two-sided clip (INTELLECT-2, arXiv:2505.07291): min(ratio, delta) instead of ratio in the first branch
    dual_clip  dual clip (Ye et al. 2020, arXiv:1912.09729): the loss is at most dual_clip * |A| where A < 0

Beyond the bound such a token has no gradient. Above 1 + epsilon_high the two are the same function.

The sum is over trained tokens. Divided by the number of trained tokens of the whole step, it is DAPO's normaliser:
every token weighs the same, whatever the length of its completion. Other normalisers: losses.policy.

Shapes: N = packed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from losses.kl import MAX_LOG_RATIO
from losses.types import LossOut, Term, wide


def clipped_surrogate(
    logp: Tensor,  # (N,) policy, with gradient
    old_logp: Tensor,  # (N,) policy that sampled
    advantage: Tensor,  # (N,) advantage of each token's completion
    mask: Tensor,  # (N,) bool, True = trained
    *,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None = None,
    dual_clip: float | None = None,
) -> LossOut:
    dtype = torch.promote_types(logp.dtype, torch.float32)
    ratio = token_log_ratio(logp, old_logp, mask).exp()  # (N,)
    advantage = torch.where(mask, advantage.to(dtype), 0.0)
    bounds = {"epsilon_low": epsilon_low, "epsilon_high": epsilon_high, "delta": delta, "dual_clip": dual_clip}
    loss = clip_loss(ratio, advantage, **bounds)  # (N,)
    count = mask.sum()
    with torch.no_grad():
        metrics = {
            "policy/clip_frac": (torch.stack(clipped_tokens(ratio, advantage, **bounds)).any(0).to(dtype).sum(), count),
            "policy/ratio": ((ratio * mask).sum(), count),
        }
    return LossOut({"policy": Term(1.0, loss.sum(), count)}, metrics)


def decoupled_surrogate(
    logp: Tensor,  # (N,) policy, with gradient
    proximal_logp: Tensor,  # (N,) policy the step starts from: where the clip range is centred
    behaviour_logp: Tensor,  # (N,) policy that sampled, possibly several steps older
    advantage: Tensor,  # (N,) advantage of each token's completion
    mask: Tensor,  # (N,) bool, True = trained
    *,
    epsilon_low: float,
    epsilon_high: float,
    cap: float,
) -> LossOut:
    """Decoupled PPO (Hilton et al. 2021, arXiv:2110.00641; AReaL, arXiv:2505.24298) for stale samples.

        loss_n = -sg[min(exp(proximal - behaviour), cap)] min(r A, clip(r) A),   r = exp(logp - proximal)

    The same as losses.policy.dapo with the log-ratio to the proximal policy and the weight token_truncate of the
    mismatch between proximal and behaviour; written out here once as a whole.
    """
    dtype = torch.promote_types(logp.dtype, torch.float32)
    ratio = token_log_ratio(logp, proximal_logp, mask).exp()  # (N,)
    weight = token_log_ratio(proximal_logp, behaviour_logp, mask).exp().detach().clamp(max=cap)  # (N,)
    advantage = torch.where(mask, advantage.to(dtype), 0.0)
    loss = weight * clip_loss(ratio, advantage, epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    return LossOut({"policy": Term(1.0, loss.sum(), mask.sum())}, {})


def token_log_ratio(
    logp: Tensor,  # (N,) policy, with gradient
    old_logp: Tensor,  # (N,) policy to compare with
    mask: Tensor,  # (N,) bool, True = trained
) -> Tensor:  # (N,) 0 where masked
    # Zero it before exp: a masked position may hold any value, even NaN.
    dtype = torch.promote_types(logp.dtype, torch.float32)
    return torch.where(mask, logp.to(dtype) - old_logp.to(dtype), 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


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


MIN_LOG_WEIGHT = math.log(1e-8)  # VESPO's floor of a sequence weight


class Tokens(NamedTuple):
    """What a policy loss may use of some trained tokens. Masked positions may hold anything, log_ratio 0."""

    logp: Tensor  # (N,) policy, with gradient
    log_ratio: Tensor  # (N,) from token_log_ratio (losses.policy) or sequence_log_ratio, with gradient
    advantage: Tensor  # (N,) advantage of each token's completion
    mask: Tensor  # (N,) bool, True = trained
    length: Tensor  # (N,) trained tokens of the token's whole completion
    weight: Tensor | None = None  # (N,) importance correction x off-policy mask x entropy mask, no gradient; None: 1
    sequence_log_ratio: Tensor | None = None  # (N,) sum of logp - old_logp over the completion, for rloo and vespo


class Share(NamedTuple):
    """An average: what each token counts in the sum, and what these tokens add to the number it is divided by."""

    weight: Tensor  # (N,)
    count: Tensor  # ()


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


AVERAGES = {
    "grpo": "completions",
    "bnpo": "micro_batch",
    "dr_grpo": "budget",
    "dapo": "tokens",
    "luspo": "completion_sums",
    "cispo": "tokens",
    "sapo": "completions",
    "vespo": "tokens",
    "rloo": "completions",
    "reinforce": "completion_sums",
}


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


def denominator(
    loss_type: str,
    *,
    num_tokens: Tensor,  # () trained tokens of the step, all ranks
    num_completions: Tensor,  # () completions of the step with a trained token, all ranks
    num_micro_batches: Tensor,  # () of the step that hold a trained token, all ranks
    max_completion_length: int,
) -> Tensor:  # ()
    """What the policy term's count adds up to over the step, known before the first piece is computed."""
    return {
        "tokens": num_tokens,
        "completions": num_completions,
        "completion_sums": num_completions,
        "budget": num_completions * max_completion_length,
        "micro_batch": num_micro_batches,
    }[AVERAGES[loss_type]]


def share_of(
    loss_type: str,
    t: Tokens,
    *,
    micro_batch_tokens: Tensor | None = None,  # () for bnpo
    max_completion_length: int | None = None,
) -> Share:
    """The average a loss type takes, for terms beside it (losses.kl.kl_penalty)."""
    average = AVERAGES[loss_type]
    if average == "budget":
        assert max_completion_length is not None, f"{loss_type} needs max_completion_length"
        return over_budget(t, max_completion_length=max_completion_length)
    if average == "micro_batch":
        assert micro_batch_tokens is not None, f"{loss_type} needs micro_batch_tokens"
        return over_micro_batch(t, micro_batch_tokens=micro_batch_tokens)
    plain = {"tokens": over_tokens, "completions": over_completions, "completion_sums": over_completion_sums}
    return plain[average](t)


# Losses.


def grpo(
    t: Tokens,
    *,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None = None,
    dual_clip: float | None = None,
) -> LossOut:
    """Completions weigh the same, so tokens of long ones weigh less. With sequence_log_ratio this is GSPO."""
    return _clipped(t, over_completions(t), epsilon_low, epsilon_high, delta, dual_clip)


def bnpo(
    t: Tokens,
    *,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None = None,
    dual_clip: float | None = None,
    micro_batch_tokens: Tensor,  # () trained tokens of the micro-batch these are of
) -> LossOut:
    """Tokens of one micro-batch weigh the same; the gradient depends on the cut. On one micro-batch it is dapo."""
    share = over_micro_batch(t, micro_batch_tokens=micro_batch_tokens)
    return _clipped(t, share, epsilon_low, epsilon_high, delta, dual_clip)


def dr_grpo(
    t: Tokens,
    *,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None = None,
    dual_clip: float | None = None,
    max_completion_length: int,
) -> LossOut:
    """A constant divisor: no bias towards short good or long bad completions. Goes with advantages of scale none."""
    share = over_budget(t, max_completion_length=max_completion_length)
    return _clipped(t, share, epsilon_low, epsilon_high, delta, dual_clip)


def dapo(
    t: Tokens,
    *,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None = None,
    dual_clip: float | None = None,
) -> LossOut:
    """All tokens of the step weigh the same."""
    return _clipped(t, over_tokens(t), epsilon_low, epsilon_high, delta, dual_clip)


def luspo(
    t: Tokens,
    *,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None = None,
    dual_clip: float | None = None,
) -> LossOut:
    """With sequence_log_ratio, |y| r A for each completion: GSPO without its pull towards short ones."""
    return _clipped(t, over_completion_sums(t), epsilon_low, epsilon_high, delta, dual_clip)


def rloo(
    t: Tokens,
    *,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None = None,
    dual_clip: float | None = None,
) -> LossOut:
    """The ratio is that of the completion, the product over its tokens; for leave_one_out_advantage."""
    assert t.sequence_log_ratio is not None, "rloo needs sequence_log_ratio"
    t = t._replace(log_ratio=product_log_ratio(t.logp, t.sequence_log_ratio, t.length, t.mask))
    return _clipped(t, over_completions(t), epsilon_low, epsilon_high, delta, dual_clip)


def reinforce(
    t: Tokens,
) -> LossOut:
    """No ratio, no clip: right on policy only, or with a correction as weight."""
    return _policy(t, -_advantage(t) * _logp(t), over_completion_sums(t), {})


def cispo(
    t: Tokens,
    *,
    cap: float = 5.0,
) -> LossOut:
    """The weight is capped, the gradient is not: tokens beyond the cap still teach. `cap` bounds the ratio itself."""
    ratio = t.log_ratio.detach().exp()
    capped = t.mask & (ratio > cap)
    loss = -ratio.clamp(max=cap) * _advantage(t) * _logp(t)
    return _policy(t, loss, over_tokens(t), {"policy/cispo_cap_frac": (capped.to(ratio.dtype).sum(), t.mask.sum())})


def sapo(
    t: Tokens,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> LossOut:
    """A soft gate instead of a clip: its slope is 1 at ratio 1 and fades on both sides, faster where A <= 0."""
    ratio, advantage = t.log_ratio.exp(), _advantage(t)
    # Two gates with a float each: a tensor of tau would cost one more (N,) and read worse.
    good = torch.sigmoid(tau_pos * (ratio - 1)) * (4 / tau_pos)
    bad = torch.sigmoid(tau_neg * (ratio - 1)) * (4 / tau_neg)
    return _policy(t, -advantage * torch.where(advantage > 0, good, bad), over_completions(t), {})


def vespo(
    t: Tokens,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> LossOut:
    """log phi = lambda + k log w - lambda w, w the weight of the whole completion: 1 at w = 1, fading on both sides.

    log w is sequence_log_ratio. An engine correction is not a weight here: add the sum of its log-weights over the
    completion to sequence_log_ratio instead.
    """
    assert t.sequence_log_ratio is not None, "vespo needs sequence_log_ratio"
    advantage = _advantage(t)
    log_w = torch.where(t.mask, wide(t.sequence_log_ratio.detach()), 0.0).clamp(MIN_LOG_WEIGHT, MAX_LOG_RATIO)
    good = lambda_pos + k_pos * log_w - lambda_pos * log_w.exp()
    bad = lambda_neg + k_neg * log_w - lambda_neg * log_w.exp()
    phi = torch.where(advantage >= 0, good, bad).exp()
    metrics = {"policy/vespo_phi": (torch.where(t.mask, phi, 0.0).sum(), t.mask.sum())}
    return _policy(t, -phi * advantage * _logp(t), over_tokens(t), metrics)


POLICY_LOSSES: dict[str, Callable[..., LossOut]] = {
    "grpo": grpo,
    "bnpo": bnpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "luspo": luspo,
    "cispo": cispo,
    "sapo": sapo,
    "vespo": vespo,
    "rloo": rloo,
    "reinforce": reinforce,
}


def _advantage(t: Tokens) -> Tensor:
    return torch.where(t.mask, wide(t.advantage), 0.0)


def _logp(t: Tokens) -> Tensor:
    return torch.where(t.mask, wide(t.logp), 0.0)


def _clipped(
    t: Tokens, share: Share, epsilon_low: float, epsilon_high: float, delta: float | None, dual_clip: float | None
) -> LossOut:
    ratio, advantage = t.log_ratio.exp(), _advantage(t)
    bounds = {"epsilon_low": epsilon_low, "epsilon_high": epsilon_high, "delta": delta, "dual_clip": dual_clip}
    clipped, count = clipped_tokens(ratio, advantage, **bounds), t.mask.sum()
    metrics = {f"policy/clip_{side}_frac": (x.to(ratio.dtype).sum(), count) for side, x in clipped._asdict().items()}
    metrics["policy/clip_frac"] = (torch.stack(clipped).any(0).to(ratio.dtype).sum(), count)
    return _policy(t, clip_loss(ratio, advantage, **bounds), share, metrics)


def _policy(t: Tokens, loss: Tensor, share: Share, metrics: dict[str, tuple[Tensor, Tensor]]) -> LossOut:
    """Weigh, share, sum. A token of weight 0 is left out, not multiplied: its loss might not be finite."""
    if t.weight is not None:
        weight = torch.where(t.mask, wide(t.weight.detach()), 0.0)
        loss = torch.where(weight == 0, 0.0, loss) * weight
    total = torch.where(t.mask, loss * share.weight, 0.0).sum()
    ratio = torch.where(t.mask, t.log_ratio.detach().exp(), 0.0).sum()
    return LossOut({"policy": Term(1.0, total, share.count)}, {"policy/ratio": (ratio, t.mask.sum()), **metrics})
