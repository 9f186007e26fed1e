"""GRPO: sample a group of completions per prompt, reward them, compare within the group, clip, step.

    prompts -> generate -> rewards -> advantage -> pack -> (logps -> loss -> backward)* -> clip and step -> log

Shao et al. 2024 (arXiv:2402.03300), by default with DAPO's token-level average (Yu et al. 2025, arXiv:2503.14476): the
sum over all trained tokens of the step, divided once by their number. Three policies meet in the loss: `logp` is the
current one, `old_logp` the one before the first step on the rollout, and `engine_logp` comes from the engine that
sampled, which computes the old policy slightly differently. Each option enters at an `if` that names its flag.

Shapes: P prompts of this rank, G completions each, B = P * G; N trained tokens of a micro-batch, n of a slice of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels.linear_logprob import TokenLogps
from losses.advantage import EPSILON, Advantage, Rewards, has_signal, nan_std
from losses.importance import bounded_ratio, log_difference
from losses.kl import KL_ESTIMATORS, MAX_LOG_RATIO, k3, token_kl
from losses.policy import clip_bounds, clip_metrics
from losses.types import Metrics
from trainer.config.groups import PolicyGradientConfig
from trainer.config.sampling import SamplingConfig
from trainer.metrics.metrics import MetricSums
from trainer.policy.logps import Policy, call_loss, reference_logps, token_loss
from trainer.rl.lookahead import look_ahead
from trainer.rl.minibatch import MicroBatch, MiniBatch, has_kl_term, passes, policy_logps
from trainer.rl.rollouts import Rollouts, open_rewards
from trainer.rl.step_metrics import add_micro_batch, end_step
from trainer.run.run import open_run
from trainer.run.training import Training, open_policy


@dataclass(frozen=True, kw_only=True)
class Config(SamplingConfig):
    """Group relative policy optimisation: sample, reward, compare within each group, clip, step."""


def train(cfg: Config) -> None:
    with open_run(cfg, cfg.run.method) as run:
        rewards = open_rewards(cfg, run)  # --reward-funcs
        policy = open_policy(cfg, with_reference=cfg.has_reference)
        rollouts = Rollouts(run, cfg, policy, rewards, advantage=partial(advantages, cfg))  # reads the prompts
        training = Training(run, cfg, policy, rollouts, moving=cfg.moving)  # optimizer, schedule, checkpoints
        for rollout in training.batches():  # weights to the engine, completions, rewards
            advantage = rollouts.advantage(rollout)  # (B,) by `advantages`; with --kl-in-reward, of r - beta KL
            rollouts.keep_samples(rollout, advantage)
            batches = rollouts.pack(rollout, advantage)  # a list of micro-batches for each mini-batch, on the device
            logps_at_start(cfg, policy, batches, rollouts.steps_per_batch)
            for batch in rollouts.updates(*batches):  # optimizer steps: each mini-batch, then again (--num-iterations)
                sums = backward(cfg, policy, batch)
                training.clip_and_step(sums)
                training.log(sums, batch.computed_tokens)


def advantages(cfg: Config, r: Rewards) -> Advantage:  # (P, G)
    """How much better a completion is than the others of its prompt; 0 if all rewards of the group are equal.

    Dynamic sampling and replay use the same function to find groups without signal.
    """
    if not cfg.advantage.is_default:  # --scale-rewards, --advantage-estimator, gdpo, rloo: losses/advantage.py
        return cfg.advantage.estimate(r)
    reward = r.reward  # (P, G) weighted sum over reward functions; NaN: none applies
    mean, deviation = reward.nanmean(dim=1, keepdim=True), nan_std(reward, dim=1).unsqueeze(1)  # (P, 1)
    advantage = (reward - mean) / (deviation + EPSILON)
    return torch.where(has_signal(reward).unsqueeze(1), advantage, 0.0).nan_to_num(nan=0.0)


@torch.no_grad()
def logps_at_start(cfg: PolicyGradientConfig, policy: Policy, batches: list[MiniBatch], num_steps: int) -> None:
    """Compute the log-probs that all steps on the rollout share; none for a single step without a KL term."""
    for batch in batches:
        if cfg.correction.proximal_policy == "behaviour":  # ratios are to the engine
            for mb in batch.micro_batches:
                mb.old_logp = mb.engine_logp
        elif num_steps > 1 or batch.has_replays:
            batch.at_start = policy_logps(policy, batch.batches, temperature=cfg.temperature)
            for mb, now in zip(batch.micro_batches, batch.at_start, strict=True):
                first_use = now.logp if mb.replayed_logp is None else mb.replayed_logp  # (N,) NaN: not replayed
                mb.old_logp = torch.where(first_use.isnan(), now.logp, first_use)
        if has_kl_term(cfg):  # --beta
            for mb in batch.micro_batches:
                mb.ref_logp = reference_logps(policy, mb.batch, temperature=cfg.temperature)  # (N,)


PolicyLossFunction = Callable[[PolicyGradientConfig, MicroBatch, MiniBatch, Tensor], tuple[Tensor, Metrics]]


def backward(
    cfg: PolicyGradientConfig,
    policy: Policy,
    batch: MiniBatch,
    *,
    loss: PolicyLossFunction | None = None,  # default: policy_loss
    value_loss: Callable[[MetricSums, MicroBatch, Tensor], Tensor] | None = None,  # of (N, D) states: PPO's critic
    is_last: bool = True,  # nothing else adds to the gradients of this step
) -> MetricSums:
    """Accumulate the gradients of one optimizer step, and its metrics."""
    sums, ratios = MetricSums(), torch.zeros(2, 3, dtype=torch.float64, device=policy.device)
    divisor = step_divisor(cfg, batch)
    look_ahead(cfg, policy, batch)  # columns for options that concern whole completions; nothing by default
    few_trained = cfg.policy_loss.top_entropy_quantile < 1 and not has_kl_term(cfg)  # the head skips the rest
    for mb in passes(cfg, policy, batch, is_last=is_last):

        def loss_of(tokens: TokenLogps, rows: Tensor, mb=mb) -> tuple[Tensor, tuple[Metrics, Tensor]]:
            t = mb.at(rows)  # the columns of n tokens, whose logits exist only during this call
            t.logp, t.entropy = tokens  # (n,) with gradient
            total, metrics = call_loss(loss or policy_loss, (), cfg, t, batch, divisor)
            return total, (metrics, tokens.logp.detach())

        states_loss = value_loss and partial(value_loss, sums, mb)
        total, pieces = token_loss(
            policy, mb.batch, loss_of, temperature=cfg.temperature, sparse=few_trained, states_loss=states_loss
        )
        total.backward()
        ratios += add_micro_batch(cfg, sums, mb, pieces, total)
    divisors = {"policy": divisor, "kl": divisor, "entropy": batch.num_uncertain, "value": batch.num_tokens}
    end_step(sums, batch, divisors, ratios)
    return sums


def policy_loss(
    cfg: PolicyGradientConfig,
    t: MicroBatch,  # columns of n tokens; t.logp and t.entropy are of the current policy, with gradient
    batch: MiniBatch,
    divisor: Tensor,  # () of the sum over the step
) -> tuple[Tensor, Metrics]:  # ()
    """What these n tokens add to the loss of the step."""
    options, correction, logp, advantage = cfg.policy_loss, cfg.correction, t.logp, t.advantage
    here = logp.detach()
    old = here if t.old_logp is None else torch.where(t.old_logp.isnan(), here, t.old_logp)

    log_ratio = logp - old  # (n,) 0 on the first step of a rollout, where only its gradient matters
    if options.importance_sampling_level == "sequence":  # GSPO: the completion's mean, with the gradient of the token
        log_ratio = t.mean_log_ratio + (logp - here)
    elif options.loss.ratio == "completion":  # --loss-type rloo: the product over the completion
        log_ratio = t.total_log_ratio + t.length * (logp - here)
    t.log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = t.log_ratio.exp()

    if options.loss.is_clipped:  # --loss-type dapo (default); grpo, dr_grpo, bnpo, luspo and rloo average differently
        low, high, cap = clip_bounds(**options.loss_options)  # 1 - epsilon, 1 + epsilon_high, None
        loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)  # (n,)
        if cap is not None:  # --delta, --dual-clip: bound the loss of a bad token that became far more likely
            loss = torch.where(advantage < 0, torch.minimum(loss, -cap * advantage), loss)
        metrics = clip_metrics(ratio, advantage, low=low, high=high, cap=cap)
    else:  # --loss-type cispo, sapo, vespo, dppo_tv, dppo_kl, reinforce, or yours: losses/policy.py
        loss, metrics = call_loss(options.loss, logp.shape, t, **options.loss_options)

    weight = torch.ones_like(here)  # (n,) without gradient
    if correction.is_on and options.loss.ratio != "weight":  # on by default; vespo's own weight includes it
        gap = log_difference(old, t.engine_logp) if t.engine_gap is None else t.engine_gap  # of token or completion
        weight = bounded_ratio(gap, *correction.bounds, drop=correction.drops)  # exp(gap), clamped or dropped
    for keep in (t.keep_geometric, t.keep_on_policy, t.keep_entropy):  # filters; None if off
        weight = weight if keep is None else weight * keep
    loss = torch.where(weight == 0, 0.0, loss) * weight  # select, do not only multiply: it may be inf or NaN

    share = token_share(cfg, t)  # (n,) 1, or less if each completion counts the same
    policy_sum = (loss * share).sum()
    total = policy_sum / divisor
    if t.ref_logp is not None:  # --beta
        estimator = KL_ESTIMATORS[options.kl_estimator]  # k3: exp(d) - d - 1, d = ref_logp - logp
        kl = token_kl(logp, old, t.ref_logp, estimator=estimator, ratio_weighted=options.use_bias_correction_kl)
        kl_sum = (kl * share).sum()
        total = total + options.beta * kl_sum / divisor
        metrics |= {"loss/kl": (kl_sum, 0), "policy/ref_kl_k3": (k3(here, t.ref_logp).sum(), len(here))}
    if batch.entropy_coef:  # --entropy-coef, --entropy-target
        entropy = t.entropy if t.keep_entropy is None else torch.where(t.keep_entropy, t.entropy, 0.0)
        total = total - batch.entropy_coef * entropy.sum() / batch.num_uncertain.clamp(min=1)
        metrics["loss/entropy"] = entropy.sum(), 0
    metrics |= {
        "loss/policy": (policy_sum, 0),  # end_step adds the divisor
        "policy/ratio": (ratio.detach().sum(), len(here)),
        "policy/entropy": (t.entropy.detach().sum(), len(here)),
    }
    return total, metrics


def token_share(cfg: PolicyGradientConfig, t: MicroBatch) -> Tensor:  # (n,)
    """Weight of each token in the sum over the step."""
    one, average = torch.ones_like(t.advantage), cfg.policy_loss.loss.average
    if average == "completions":  # grpo, sapo, rloo: the mean over the tokens of a completion, then over completions
        return one / t.length
    if average == "micro_batch":  # bnpo: the mean over the tokens of a micro-batch, then over micro-batches
        return one / t.num_trained
    return one  # dapo, dr_grpo, luspo, cispo, vespo, dppo, reinforce: the sum over tokens


def step_divisor(cfg: PolicyGradientConfig, batch: MiniBatch) -> Tensor:  # ()
    """What the sum over the step is divided by, once: counted over all ranks before the first pass."""
    count = {
        "tokens": batch.num_tokens,  # dapo, cispo, vespo, dppo
        "completions": batch.num_completions,  # grpo, sapo, rloo
        "completion_sums": batch.num_completions,  # luspo, reinforce
        "budget": batch.num_completions * cfg.max_completion_length,  # dr_grpo
        "micro_batch": batch.num_micro_batches,  # bnpo
    }[cfg.policy_loss.loss.average]
    return count.clamp(min=1)
