"""GRPO: sample a group of completions per prompt, reward them, compare within the group, clip, step.

    prompts -> generate -> rewards -> advantage -> pack -> (logps -> loss -> backward)* -> clip and step -> log

Shao et al. 2024 (arXiv:2402.03300), with DAPO's token-level normaliser (Yu et al. 2025, arXiv:2503.14476) by default:
the sum over all trained tokens of the step, divided once by their number. Three policies meet in the loss: `logp` is
the current one, `old` the one that the rollout began with (on the first step the same), and `engine_logp` is from the
engine that sampled, which computes the old policy a little differently. Options enter where they are named below.

Shapes: P prompts of this rank, G completions each, B = P * G; N trained tokens of a micro-batch, n of a piece of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels.linear_logprob import TokenLogps
from losses.advantage import EPSILON, Advantage, GroupRewards, has_signal, nan_std
from losses.importance import bounded_ratio, log_difference
from losses.kl import KL_ESTIMATORS, MAX_LOG_RATIO, k3, token_kl
from losses.policy import Metrics, Tokens, clip_metrics
from trainer.config.groups import PolicyGradientConfig
from trainer.config.sampling import SamplingConfig
from trainer.policy.logps import Policy, reference_logps, token_loss
from trainer.rl.lookahead import look_ahead
from trainer.rl.minibatch import MicroBatch, MiniBatch, few_tokens_teach, has_kl_term, passes, score
from trainer.rl.session import Session
from trainer.rl.step_metrics import StepSums, add_micro_batch, end_step


@dataclass(frozen=True, kw_only=True)
class Config(SamplingConfig):
    """Group relative policy optimisation: sample, reward, compare within each group, clip, step."""


def train(cfg: Config) -> None:
    with Session(cfg, advantage=partial(advantages, cfg)) as s:  # model, data, rewards, engine, run folder, resume
        for rollout in s.rollouts():  # weights to the engine, completions and rewards; a checkpoint after the body
            advantage = s.advantage(rollout)  # (B,) by `advantages`; with kl_in_reward, of the reward less beta KL
            s.keep_samples(rollout, advantage)
            batches = s.pack(rollout, advantage)  # one for each mini-batch: micro-batches of tokens, on the device
            score_at_start(cfg, s.policy, batches, s.steps_per_rollout)
            for batch in s.updates(*batches):  # optimizer steps: each mini-batch once, then again (num_iterations)
                sums = backward(cfg, s.policy, batch)
                s.clip_and_step(sums, batch)
                s.log(sums, batch)


def advantages(cfg: Config, r: GroupRewards) -> Advantage:  # (P, G)
    """How much better a completion is than the others of its prompt; 0 in a group of equal rewards.

    Dynamic sampling and replay ask the same function which groups teach nothing.
    """
    if not cfg.advantage.is_default:  # --scale-rewards, --advantage-estimator, gdpo: losses/advantage.py
        return cfg.advantage.estimate(r)
    reward = r.total  # (P, G) weighted sum over reward functions; NaN: none applies
    mean, deviation = reward.nanmean(dim=1, keepdim=True), nan_std(reward, dim=1).unsqueeze(1)  # (P, 1)
    advantage = (reward - mean) / (deviation + EPSILON)
    return torch.where(has_signal(reward).unsqueeze(1), advantage, 0.0).nan_to_num(nan=0.0)


@torch.no_grad()
def score_at_start(cfg: PolicyGradientConfig, policy: Policy, batches: list[MiniBatch], num_steps: int) -> None:
    """Log-probs that all steps on the rollout share. Of one step without a KL term there are none to compute."""
    for batch in batches:
        if cfg.correction.proximal_policy == "behaviour":  # ratios are to the engine itself
            for mb in batch.micro_batches:
                mb.old_logp = mb.engine_logp
        elif num_steps > 1 or batch.replays:
            batch.at_start = score(policy, batch.batches, temperature=cfg.temperature)
            for mb, now in zip(batch.micro_batches, batch.at_start, strict=True):
                first_use = now.logp if mb.earlier_logp is None else mb.earlier_logp  # (N,) NaN: not replayed
                mb.old_logp = torch.where(first_use.isnan(), now.logp, first_use)
        for mb in batch.micro_batches if has_kl_term(cfg) else []:
            mb.ref_logp = reference_logps(policy, mb.batch, temperature=cfg.temperature)  # (N,)


def backward(
    cfg: PolicyGradientConfig,
    policy: Policy,
    batch: MiniBatch,
    *,
    value_loss: Callable[[StepSums, MicroBatch, Tensor], Tensor] | None = None,  # of the (N, D) states: PPO's critic
    is_last: bool = True,  # nothing else adds to the gradients of the policy in this step
) -> StepSums:
    """Gradients of one optimizer step, and its metrics."""
    sums, count = StepSums(policy.device), divisor(cfg, batch)
    look_ahead(cfg, policy, batch)  # for options that concern whole completions; by default there is nothing to do
    options = {"temperature": cfg.temperature, "sparse": few_tokens_teach(cfg)}
    for mb in passes(cfg, policy, batch, is_last=is_last):

        def loss_of(now: TokenLogps, rows: Tensor, mb=mb) -> tuple[Tensor, tuple[Metrics, Tensor]]:
            """Of the tokens `rows` of the micro-batch, whose logits the head holds at this moment."""
            loss, metrics = policy_loss(cfg, now, mb.at(rows), batch, count)
            return loss, (metrics, now.logp.detach())

        of_states = value_loss and partial(value_loss, sums, mb)
        loss, pieces = token_loss(policy, mb.batch, loss_of, states_loss=of_states, **options)
        loss.backward()
        add_micro_batch(cfg, sums, mb, pieces, loss)
    end_step(sums, batch, {"policy": count, "kl": count, "entropy": batch.num_uncertain, "value": batch.total.tokens})
    return sums


def policy_loss(
    cfg: PolicyGradientConfig,
    now: TokenLogps,  # (n,) of the current policy, with gradient
    t: MicroBatch,  # its columns for these tokens, (n,) each
    batch: MiniBatch,
    count: Tensor,  # () what the sum over the step is divided by
) -> tuple[Tensor, Metrics]:  # ()
    """What these tokens add to the loss of the step."""
    options, correction, logp, advantage = cfg.policy_loss, cfg.correction, now.logp, t.advantage
    here = logp.detach()
    old = here if t.old_logp is None else torch.where(t.old_logp.isnan(), here, t.old_logp)

    log_ratio = logp - old  # (n,) 0 on the first step, where only its gradient matters
    if options.importance_sampling_level == "sequence":  # GSPO: the completion's mean, with the gradient of the token
        log_ratio = t.mean_log_ratio + (logp - here)
    elif options.loss.ratio == "completion":  # --loss-type rloo: the product over the completion
        log_ratio = t.total_log_ratio + t.length * (logp - here)
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()

    if options.loss.is_clipped:  # --loss-type dapo, grpo, dr_grpo, bnpo, luspo, rloo: they differ in the average
        low, high = options.clip_range  # 1 - epsilon, 1 + epsilon_high
        loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)  # (n,)
        if options.cap is not None:  # of a bad token that has become far more likely
            loss = torch.where(advantage < 0, torch.minimum(loss, -options.cap * advantage), loss)
        metrics = clip_metrics(ratio, advantage, low=low, high=high, cap=options.cap)
    else:  # --loss-type cispo, sapo, vespo, reinforce, or yours: losses/policy.py
        every = torch.ones_like(here, dtype=torch.bool)
        tokens = Tokens(logp, log_ratio, advantage, every, t.length, sequence_log_ratio=t.total_log_ratio)
        loss, metrics = options.loss.of_tokens(tokens, **options.loss_options)

    weight = torch.ones_like(here)  # (n,) without gradient
    if correction.is_on and options.loss.ratio != "weight":  # the engine sampled, not quite the old policy
        gap = log_difference(old, t.engine_logp) if t.engine_gap is None else t.engine_gap  # of token or completion
        weight = bounded_ratio(gap, *correction.bounds, drop=correction.drops)  # exp(gap), at most the cap
    for keep in (t.keep_geometric, t.keep_on_policy, t.keep_entropy):  # filters, None where they are off
        weight = weight if keep is None else weight * keep
    loss = torch.where(weight == 0, 0.0, loss) * weight  # left out, not multiplied: it might not be finite

    share = token_share(cfg, t)  # (n,) 1, or less where each completion counts the same
    policy_sum = (loss * share).sum()
    total = policy_sum / count
    if t.ref_logp is not None:  # --beta
        estimator = KL_ESTIMATORS[options.kl_estimator]  # k3: exp(d) - d - 1, d = ref_logp - logp
        kl = token_kl(logp, old, t.ref_logp, estimator=estimator, ratio_weighted=options.use_bias_correction_kl)
        kl_sum = (kl * share).sum()
        total = total + options.beta * kl_sum / count
        metrics |= {"loss/kl": (kl_sum, 0), "policy/ref_kl_k3": (k3(here, t.ref_logp).sum(), len(here))}
    if batch.entropy_coef:
        entropy = now.entropy if t.keep_entropy is None else torch.where(t.keep_entropy, now.entropy, 0.0)
        total = total - batch.entropy_coef * entropy.sum() / batch.num_uncertain.clamp(min=1)
        metrics["loss/entropy"] = entropy.sum(), 0
    metrics |= {
        "loss/policy": (policy_sum, 0),  # end_step adds what it is divided by
        "policy/ratio": (ratio.detach().sum(), len(here)),
        "policy/entropy": (now.entropy.detach().sum(), len(here)),
    }
    return total, metrics


def token_share(cfg: PolicyGradientConfig, t: MicroBatch) -> Tensor:  # (n,)
    """What each token counts in the sum over the step."""
    one, average = torch.ones_like(t.advantage), cfg.policy_loss.loss.average
    if average == "completions":  # grpo, sapo, rloo: the mean over the tokens of a completion, then over completions
        return one / t.length
    return one / t.num_trained if average == "micro_batch" else one  # bnpo: the same with micro-batches


def divisor(cfg: PolicyGradientConfig, batch: MiniBatch) -> Tensor:  # ()
    """What the sum over the step is divided by, once, counted over all ranks before the first token is computed."""
    step = batch.total
    count = {
        "tokens": step.tokens,  # dapo, cispo, vespo
        "completions": step.completions,  # grpo, sapo, rloo
        "completion_sums": step.completions,  # luspo, reinforce
        "budget": step.completions * cfg.max_completion_length,  # dr_grpo
        "micro_batch": step.micro_batches,  # bnpo
    }[cfg.policy_loss.loss.average]
    return count.clamp(min=1)
