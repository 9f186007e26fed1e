"""PPO: sample, reward, estimate an advantage for every token with a critic, clip, step (Schulman et al. 2017).

    prompts -> generate -> rewards -> values -> advantages -> pack -> (logps and values -> losses -> backward)* -> log

arXiv:1707.06347, with generalised advantage estimation (losses/gae.py). The policy loss is GRPO's
(trainer/methods/grpo.py) with one advantage per token. The critic is a head on the policy's trunk, so that one pass
serves both losses, or a separate model (--value-model). The KL to the reference is a cost in each token's reward
(--kl-in-reward) or a term of the loss.

Shapes: B completions of this rank that have a reward, T their longest; N trained tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from data.command.checks import check_numbers, reject_unused
from data.command.flags import Common
from data.errors import UserError
from losses.advantage import mean_of, moments
from losses.gae import estimate_advantage, explained_variance, rewards_to_go, token_rewards, whiten
from losses.kl import k1
from losses.types import Metrics, wide
from trainer.config.blocks import Flat
from trainer.config.policy import PolicyLossConfig, without_skips
from trainer.config.sampling import SamplingConfig
from trainer.methods.grpo import backward, logps_at_start
from trainer.metrics.metrics import MetricSums
from trainer.parallel.comm import all_sum
from trainer.policy.logps import Policy, reference_logps
from trainer.rl.critic import Critic, ValueHead, load_critic, pad_completions, scatter_to_ids, values_of
from trainer.rl.groups import Rollout
from trainer.rl.minibatch import MicroBatch, MiniBatch, pack_completions, policy_logps
from trainer.rl.rollouts import Rollouts, open_rewards
from trainer.run.run import open_run
from trainer.run.training import Training, open_policy


@dataclass(frozen=True, kw_only=True)
class Config(SamplingConfig):
    """Proximal policy optimisation: a critic predicts the return, and each token is compared with it."""

    fewest_generations: ClassVar[int] = 1
    refused: ClassVar = tuple("scale_rewards advantage_estimator advantage_kwargs".split())
    policy_loss: Flat[PolicyLossConfig] = field(default_factory=without_skips)
    num_generations: Common[int] = 1
    """Completions sampled per prompt; nothing is compared within a group."""
    minibatches_per_rollout: int = 4
    """Mini-batches per rollout, one optimizer step each, repeated num_iterations times."""
    gae_lambda: Common[float] = 0.95
    """Trust in the critic. 0: use its value of the next token; 1: use only the final return."""
    gamma: float = 1.0
    """Discount per trained token."""
    whiten_advantages: bool = True
    """Scale the advantages of a rollout to mean 0 and deviation 1 over all its trained tokens."""
    value_model: Common[str | None] = None
    """Separate model or run as critic, for example a reward model. None: a head on the policy's trunk."""
    vf_coef: float = 0.1
    """Weight of the value loss if the critic shares the policy's trunk."""
    cliprange_value: float | None = 0.2
    """Maximum distance from the old value within which moving lowers the loss. None: no limit."""
    critic_learning_rate: Common[float] = 1e-5
    """Learning rate of the critic. No warm-up, so that it learns while the policy's rate still rises."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, {"between 0 and 1": "gae_lambda", "above 0 and at most 1": "gamma", "0 or above": "vf_coef",
                             "above 0": "cliprange_value critic_learning_rate"})  # fmt: skip
        why = "with ppo, whose critic is the baseline of every token"
        reject_unused(self.advantage, why, self.refused)
        reject_unused(self.overlap, why, ("dynamic_sampling", "replay_buffer_size"))
        if self.policy_loss.skip_zero_advantage_batches:
            raise UserError("skip_zero_advantage_batches=True: the critic also learns from these; remove it")
        if self.value_model is not None:
            reject_unused(self, "with value_model, a separate model; set --critic-learning-rate", ("vf_coef",))
        if self.parallel.context > 1:
            raise UserError(f"parallel.context={self.parallel.context}: not supported; a critic needs whole rows")


def train(cfg: Config) -> None:
    with open_run(cfg, cfg.run.method) as run:
        rewards = open_rewards(cfg, run)
        policy = open_policy(cfg, with_reference=cfg.has_reference)
        critic = load_critic(cfg.value_model, cfg.model, cfg.lora, policy)
        optim = replace(cfg.optim, learning_rate=cfg.critic_learning_rate, warmup_ratio=0.0, warmup_steps=None)
        rollouts = Rollouts(run, cfg, policy, rewards)
        training = Training(run, cfg, policy, rollouts, modules={"critic": (critic, optim)}, moving=cfg.moving)
        for rollout in training.batches():
            estimates = estimate(cfg, policy, critic, rollout)  # values and advantages, before the first step
            rollouts.kl = estimates.kl  # logged
            rollouts.keep_samples(rollout, estimates.advantage)
            columns = {"old_value": estimates.value, "target": estimates.target}
            batches = rollouts.pack(rollout, estimates.advantage, rows=estimates.rows, extra=columns)
            logps_at_start(cfg, policy, batches, rollouts.steps_per_batch)
            for batch in rollouts.updates(*batches):
                sums = backward_both(cfg, policy, critic, batch)
                training.clip_and_step(sums)  # policy and critic
                training.log(sums, batch.computed_tokens, estimates.metrics)


class Estimates(NamedTuple):
    """Values and advantages of a rollout under the weights before its first step. Lists have one number per id."""

    rows: list[int]  # indices of the completions to train on: those with a reward
    advantage: list[list[float]]
    value: list[list[float]]
    target: list[list[float]]
    kl: Tensor | None  # (B,) with --kl-in-reward
    metrics: dict[str, float]


@torch.no_grad()
def estimate(cfg: Config, policy: Policy, critic: Critic, rollout: Rollout) -> Estimates:
    reward, options = rollout.reward.flatten(), cfg.policy_loss
    rows = [row for row, c in enumerate(rollout.completions) if c.trained and not reward[row].isnan()
            and not (options.mask_truncated_completions and c.finish_reason == "length")]  # fmt: skip
    completions = [rollout.completions[row] for row in rows]
    batches = pack_completions(cfg.run, policy, completions, share_prompt=cfg.share_prompt)
    value, mask = pad_completions(completions, batches, values_of(critic, policy, batches))  # (B, T) each
    kl = None
    if cfg.advantage.kl_in_reward:  # --kl-in-reward
        now = policy_logps(policy, batches, temperature=cfg.temperature)
        references = [reference_logps(policy, batch, temperature=cfg.temperature) for batch in batches]
        costs = [k1(tokens.logp, ref_logp) for tokens, ref_logp in zip(now, references, strict=True)]
        kl = pad_completions(completions, batches, costs)[0]  # (B, T)
    # The reward is paid at the last token; each token pays beta KL.
    token_reward = token_rewards(reward[rows].to(value.dtype), mask, kl, beta=options.beta)  # (B, T)
    # delta_t = r_t + gamma V_{t+1} - V_t;  A_t = sum_k (gamma lambda)^k delta_{t+k};  target = A + V
    advantage, target = estimate_advantage(token_reward, value, mask, gamma=cfg.gamma, lam=cfg.gae_lambda)
    returns = rewards_to_go(token_reward, mask, gamma=cfg.gamma)
    stats = all_sum(torch.stack([moments(x[mask]) for x in (advantage, value, returns, returns - value)]))  # (4, 3)
    if cfg.whiten_advantages:  # --whiten-advantages: mean 0, deviation 1 over all trained tokens of the rollout
        advantage = whiten(advantage, stats[0])
    advantages, values, targets = (scatter_to_ids(rollout.completions, rows, x) for x in (advantage, value, target))
    metrics = {"value/mean": mean_of(stats[1]), "value/explained_variance": explained_variance(stats[3], stats[2])}
    finite = {name: float(x) for name, x in metrics.items() if x.isfinite()}
    return Estimates(rows, advantages, values, targets, None if kl is None else kl.sum(1), finite)


def backward_both(cfg: Config, policy: Policy, critic: Critic, batch: MiniBatch, *, is_last: bool = True) -> MetricSums:
    """Gradients of the policy loss and of the value loss, in one pass if the critic shares the policy's trunk."""
    num_tokens = batch.num_tokens.clamp(min=1)  # () of the step, all ranks

    def states_loss(sums: MetricSums, mb: MicroBatch, states: Tensor) -> Tensor:  # states: (N, D) of the policy's trunk
        value_sum, metrics = value_loss(cfg, critic(states), mb)
        sums.add({**metrics, "loss/value": (value_sum, 0)})  # end_step in backward() adds the divisor
        return cfg.vf_coef * value_sum / num_tokens  # --vf-coef

    if isinstance(critic, ValueHead):
        return backward(cfg, policy, batch, value_loss=states_loss, is_last=is_last)
    sums = backward(cfg, policy, batch, is_last=is_last)
    for mb in batch.micro_batches:  # --value-model
        value_sum, metrics = value_loss(cfg, critic(mb.batch), mb)
        (value_sum / num_tokens).backward()
        sums.add({**metrics, "loss/value": (value_sum, mb.num_trained)})  # after end_step: with its count
    return sums


def value_loss(cfg: Config, value: Tensor, mb: MicroBatch) -> tuple[Tensor, Metrics]:  # value: (N,) with gradient
    """Half the squared error to the target, summed over the tokens of a micro-batch."""
    value, old_value, target = wide(value), mb.extra["old_value"], mb.extra["target"]
    metrics: Metrics = {}

    def error(value: Tensor) -> Tensor:  # (N,)
        return (value - target).square() / 2

    loss = error(value)
    if cfg.cliprange_value is not None:  # --cliprange-value: moving further from the old value does not lower the loss
        low, high = old_value - cfg.cliprange_value, old_value + cfg.cliprange_value
        clipped = error(torch.maximum(torch.minimum(value, high), low))
        metrics["value/clip_frac"] = ((clipped > loss).sum(), len(value))
        loss = torch.maximum(loss, clipped)
    return loss.sum(), metrics
