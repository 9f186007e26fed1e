"""Slow reference of the policy losses, written from their formulas in float64, without losses/ or trainer/.

The model runs on one completion at a time, and each completion is one row of a padded (B, T) tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollout.engine import Completion


class Padded(NamedTuple):
    """(B, T) each, one row per completion."""

    logp: Tensor
    entropy: Tensor
    mask: Tensor  # float, 1 = trained


def padded_logps(model: Any, completions: Sequence[Completion], temperature: float) -> Padded:
    width = max(len(c.ids) for c in completions)
    logp, entropy = ([torch.zeros(width, dtype=torch.float64) for _ in completions] for _ in range(2))
    mask = torch.zeros(len(completions), width, dtype=torch.float64)
    for row, c in enumerate(completions):
        if not c.ids:
            continue
        logits = model(input_ids=torch.tensor([c.prompt_ids + c.ids])).logits[0, len(c.prompt_ids) - 1 : -1]
        log_p = (logits / temperature).log_softmax(dim=-1)
        rest = torch.zeros(width - len(c.ids), dtype=torch.float64)
        logp[row] = torch.cat([log_p.gather(1, torch.tensor(c.ids).unsqueeze(1)).squeeze(1), rest])
        entropy[row] = torch.cat([-(log_p.exp() * log_p).sum(dim=-1), rest])
        mask[row, : len(c.ids)] = torch.tensor(c.mask or [True] * len(c.ids)).double()
    return Padded(torch.stack(logp), torch.stack(entropy), mask)


def padded(completions: Sequence[Completion], values: Sequence[Sequence[float]]) -> Tensor:  # (B, T)
    width = max(len(c.ids) for c in completions)
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in values], dtype=torch.float64)


def naive_loss(
    cfg: Any,
    now: Padded,  # with gradient
    old_logp: Tensor,  # (B, T) policy before the first step
    engine_logp: Tensor,  # (B, T) NaN = not reported
    ref_logp: Tensor,  # (B, T)
    advantage: Tensor,  # (B,)
    truncated: Tensor,  # (B,) bool
    micro_batches: Sequence[Sequence[int]],  # rows of each, for bnpo
) -> Tensor:  # ()
    options, correction = cfg.policy_loss, cfg.correction
    mask = now.mask
    if options.mask_truncated_completions:
        mask = mask * ~truncated.unsqueeze(1)
    length = mask.sum(1, keepdim=True)  # (B, 1)
    logp, fixed = now.logp, now.logp.detach()
    is_behaviour = correction.proximal_policy == "behaviour"
    sampled = torch.where(engine_logp.isnan(), fixed if is_behaviour else old_logp, engine_logp)
    proximal = sampled if is_behaviour else old_logp

    def mean(x: Tensor) -> Tensor:  # (B, 1)
        return (x * mask).sum(1, keepdim=True) / length.clamp(min=1)

    log_weight = torch.zeros_like(fixed)  # for vespo
    weight = torch.ones_like(fixed)
    if correction.vllm_importance_sampling_correction and not is_behaviour:
        weight = engine_weight(correction, (old_logp - sampled) * mask, mask)
        geometric = mean(old_logp - sampled).exp()
        low, high = correction.geometric_min or 0.0, correction.geometric_max or math.inf
        filtered = ((geometric >= low) & (geometric <= high)).double()
        if options.loss_type == "vespo":
            log_weight = weight.log().clamp(math.log(1e-8), 20.0) * mask
            if correction.vllm_importance_sampling_mode.startswith("sequence"):
                log_weight = log_weight / length.clamp(min=1)  # one weight for all tokens
            weight = torch.ones_like(fixed)
        weight = weight * filtered
    if correction.off_policy_mask_threshold is not None:
        drift = mean(torch.where(engine_logp.isnan(), old_logp, engine_logp) - fixed)
        weight = weight * ~((advantage.unsqueeze(1) < 0) & (drift > correction.off_policy_mask_threshold))
    uncertain = torch.ones_like(mask)
    if options.top_entropy_quantile < 1:
        entropies = now.entropy.detach()[mask > 0]
        uncertain = (now.entropy.detach() >= entropies.quantile(1 - options.top_entropy_quantile)).double()
        weight = weight * uncertain

    log_ratio = (logp - proximal) * mask
    if options.importance_sampling_level == "sequence":
        log_ratio = mean(fixed - proximal) + logp - fixed
    ratio, a = log_ratio.exp(), advantage.unsqueeze(1)
    token = {
        "cispo": lambda: -ratio.detach().clamp(max=loss_option(options, "cispo_cap")) * a * logp,
        "sapo": lambda: -a * gate(ratio, a, *(loss_option(options, f"sapo_temperature_{x}") for x in ("pos", "neg"))),
        "vespo": lambda: -phi(options, ((fixed - proximal) * mask + log_weight).sum(1, keepdim=True), a) * a * logp,
        "dppo_tv": lambda: -ratio * a * ~far(options, fixed.exp(), proximal.exp(), a),
        "dppo_kl": lambda: -ratio * a * ~far(options, fixed.exp(), proximal.exp(), a),
        "reinforce": lambda: -a * logp,
        "rloo": lambda: clipped(options, ((logp - proximal) * mask).sum(1, keepdim=True).exp(), a),
    }.get(options.loss_type, lambda: clipped(options, ratio, a))()
    if options.loss_type == "rloo":
        # The completion has one loss; a weight per token scales the token's part of its gradient.
        slope = torch.autograd.grad(token.sum(), logp, retain_graph=True)[0] * mask * length  # of each token, times |y|
        token = token.detach() + slope * (logp - fixed)
    token = torch.where(weight == 0, 0.0, token) * weight
    terms = token
    if options.beta and not cfg.advantage.kl_in_reward:
        d = ref_logp - logp
        kl = {"k1": -d, "k2": d.square() / 2, "k3": d.exp() - d - 1}[options.kl_estimator]
        if options.use_bias_correction_kl:
            r = (logp - proximal).exp()
            kl = kl * (r.detach() if options.kl_estimator == "k2" else r)
        terms = terms + options.beta * kl
    total = average(cfg, terms * mask, mask, length, micro_batches)
    if options.entropy_coef:
        total = total - options.entropy_coef * (now.entropy * mask * uncertain).sum() / (mask * uncertain).sum()
    return total


def engine_weight(correction: Any, d: Tensor, mask: Tensor) -> Tensor:  # (B, T)
    mode = correction.vllm_importance_sampling_mode
    w = (d.sum(1, keepdim=True).expand_as(d) if mode.startswith("sequence") else d).exp()
    low, high = correction.vllm_importance_sampling_min, correction.vllm_importance_sampling_cap
    low = 0.5 if mode == "icepop" and low is None else low
    low, high = 0.0 if low is None else low, math.inf if high is None else high
    if mode.endswith("truncate"):
        return w.clamp(low, high)
    return torch.where((w >= low) & (w <= high), w, 0.0)


def clipped(options: Any, ratio: Tensor, a: Tensor) -> Tensor:
    high = options.epsilon if options.epsilon_high is None else options.epsilon_high
    first = ratio if options.delta is None else ratio.clamp(max=options.delta)
    loss = -torch.minimum(first * a, ratio.clamp(1 - options.epsilon, 1 + high) * a)
    if options.dual_clip is not None:
        loss = torch.where(a < 0, torch.minimum(loss, -options.dual_clip * a), loss)
    return loss


def loss_option(options: Any, name: str) -> float:
    return options.loss_kwargs.get(name, options.loss.options[name].default)


def gate(ratio: Tensor, a: Tensor, tau_pos: float, tau_neg: float) -> Tensor:
    tau = torch.where(a > 0, tau_pos, tau_neg * torch.ones_like(a))
    return torch.sigmoid(tau * (ratio - 1)) * 4 / tau


def far(options: Any, p: Tensor, mu: Tensor, a: Tensor) -> Tensor:  # (B, T) bool
    """DPPO: pushed away from mu although the divergence is above the threshold."""
    d = (p - mu).abs()
    if options.loss_type == "dppo_kl":
        d = mu * (mu / p).log() + (1 - mu) * ((1 - mu) / (1 - p)).log()
    return (d > loss_option(options, "dppo_threshold")) & ((p - mu) * a > 0)


def phi(options: Any, log_w: Tensor, a: Tensor) -> Tensor:
    log_w = log_w.clamp(math.log(1e-8), 20.0)
    ones = torch.ones_like(a)
    k_pos, k_neg = (loss_option(options, f"vespo_k_{x}") for x in ("pos", "neg"))
    lambda_pos, lambda_neg = (loss_option(options, f"vespo_lambda_{x}") for x in ("pos", "neg"))
    k = torch.where(a >= 0, k_pos * ones, k_neg)
    decay = torch.where(a >= 0, lambda_pos * ones, lambda_neg)
    return (decay + k * log_w - decay * log_w.exp()).exp()


def average(cfg: Any, x: Tensor, mask: Tensor, length: Tensor, micro_batches: Sequence[Sequence[int]]) -> Tensor:
    kind = cfg.policy_loss.loss_type
    num_rows = (length > 0).sum().clamp(min=1)
    if kind in ("grpo", "sapo", "rloo"):
        return (x.sum(1, keepdim=True) / length.clamp(min=1)).sum() / num_rows
    if kind in ("luspo", "reinforce"):
        return x.sum() / num_rows
    if kind == "dr_grpo":
        return x.sum() / (num_rows * cfg.max_completion_length)
    if kind == "bnpo":
        means = [x[list(rows)].sum() / mask[list(rows)].sum() for rows in micro_batches]
        return torch.stack(means).mean()
    return x.sum() / mask.sum().clamp(min=1)
