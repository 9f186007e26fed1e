"""PPO: sample, reward, let a critic give every token its own advantage, clip, step (Schulman et al. 2017).

    prompts -> generate -> rewards -> values -> advantages -> pack -> (logps and values -> losses -> backward)* -> log

arXiv:1707.06347, with generalised advantage estimation (losses/gae.py). The policy loss is that of GRPO with its own
advantage for each token. The critic is a head on the policy's trunk, and one pass serves both losses; or a model of its
own (--value-model). The KL to the reference is a cost of each token's reward (--kl-in-reward) or a term of the loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from data.command.flags import Common
from data.errors import UserError
from losses.advantage import mean_of, moments
from losses.gae import clipped_value_loss, estimate_advantage, explained_variance, rewards_to_go, token_rewards, whiten
from losses.kl import k1
from losses.types import LossOut
from trainer.config.blocks import Flat, MethodMemory
from trainer.config.checks import check_numbers, reject_unused
from trainer.config.policy import PolicyLossConfig, without_skips
from trainer.config.sampling import SamplingConfig
from trainer.methods.grpo import backward, score_at_start
from trainer.parallel.comm import all_sum
from trainer.policy.logps import Policy, reference_logps
from trainer.policy.optim import term_metrics
from trainer.rl.critic import Critic, ValueHead, load_critic, pad_completions, scatter_to_ids, values_of
from trainer.rl.groups import GroupBatch
from trainer.rl.minibatch import MicroBatch, MiniBatch, pack_completions, score
from trainer.rl.session import Session
from trainer.rl.step_metrics import StepSums


@dataclass(frozen=True, kw_only=True)
class Config(SamplingConfig):
    """Proximal policy optimisation: a critic learns what to expect, and each token is judged against it."""

    memory: ClassVar[MethodMemory] = MethodMemory("one pass", "with beta", samples=True, critic=True)
    fewest_generations: ClassVar[int] = 1
    refused: ClassVar = tuple("scale_rewards advantage_estimator advantage_kwargs".split())
    policy_loss: Flat[PolicyLossConfig] = field(default_factory=without_skips)
    num_generations: Common[int] = 1
    """Completions sampled per prompt; nothing is compared within a group."""
    minibatches_per_rollout: int = 4
    """Optimizer steps that a rollout is divided over; each trains on its part, num_iterations times."""
    gae_lambda: Common[float] = 0.95
    """Trust in the critic: 0 takes its value of the next token, 1 only what was earned in the end."""
    gamma: float = 1.0
    """Discount per trained token."""
    whiten_advantages: bool = True
    """Scale the advantages of a rollout to mean 0 and deviation 1 over all its trained tokens."""
    value_model: Common[str | None] = None
    """A model or run of its own as critic, for example a reward model. None: a head on the policy's trunk."""
    vf_coef: float = 0.1
    """Weight of the critic's loss where it shares the policy's trunk."""
    cliprange_value: float | None = 0.2
    """How far a value may move from that of the rollout's start and still lower its loss. None: any distance."""
    critic_learning_rate: Common[float] = 1e-5
    """Learning rate of the critic, head or model; without a warm-up, to learn while the policy's still rises."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, {"between 0 and 1": "gae_lambda", "above 0 and at most 1": "gamma", "0 or above": "vf_coef",
                             "above 0": "cliprange_value critic_learning_rate"})  # fmt: skip
        why = "with ppo, whose critic is the baseline of every token; leave it out"
        reject_unused(self.advantage, why, self.refused)
        reject_unused(self.overlap, why, ("dynamic_sampling", "replay_buffer_size"))
        if self.policy_loss.skip_zero_advantage_batches:
            raise UserError("skip_zero_advantage_batches=True: the critic learns from them, too; leave it out")
        if self.value_model is not None:
            reject_unused(self, "with value_model, which shares nothing; set --critic-learning-rate", ("vf_coef",))
        if self.parallel.context > 1:
            raise UserError(f"parallel.context={self.parallel.context}: a critic needs whole rows; leave it out")


def train(cfg: Config) -> None:
    optim = replace(cfg.optim, learning_rate=cfg.critic_learning_rate, warmup_ratio=0.0, warmup_steps=None)
    with Session(cfg, trained=lambda s: {"critic": (load_critic(cfg, s.policy), optim)}) as s:
        critic = s.trained["critic"]
        for rollout in s.rollouts():
            judged = estimate(
                cfg, s.policy, critic, rollout
            )  # values, advantages, by the weights of the rollout's start
            s.kl = judged.kl  # logged
            s.keep_samples(rollout, judged.advantage)
            values = {"old_value": judged.value, "target": judged.target}
            batches = s.pack(rollout, judged.advantage, rows=judged.rows, own=values)
            score_at_start(cfg, s.policy, batches, s.steps_per_rollout)
            for batch in s.updates(*batches):
                sums = backward_both(cfg, s.policy, critic, batch)
                s.clip_and_step(sums, batch)  # of the critic, too
                s.log(sums, batch, judged.metrics)


class Estimates(NamedTuple):
    """A rollout in the eyes of the critic, by the weights of its start. Lists are of completions, one number per id."""

    rows: list[int]  # completions that are trained on: those with a reward
    advantage: list[list[float]]
    value: list[list[float]]
    target: list[list[float]]
    kl: Tensor | None  # (B,) of `rows`, where it is a cost in the reward
    metrics: dict[str, float]


@torch.no_grad()
def estimate(cfg: Config, policy: Policy, critic: Critic, batch: GroupBatch) -> Estimates:
    reward, options = batch.reward.flatten(), cfg.policy_loss
    rows = [row for row, c in enumerate(batch.completions) if c.trained and not reward[row].isnan()
            and not (options.mask_truncated_completions and c.finish_reason == "length")]  # fmt: skip
    kept = [batch.completions[row] for row in rows]
    micro_batches = pack_completions(cfg.run, policy, kept, share_prompt=cfg.share_prompt)
    value, mask = pad_completions(kept, micro_batches, values_of(critic, policy, micro_batches))  # (B, T) each
    kl = None
    if cfg.advantage.kl_in_reward:
        found = zip(score(policy, micro_batches, temperature=cfg.temperature), micro_batches, strict=True)
        costs = [k1(now.logp, reference_logps(policy, mb, temperature=cfg.temperature)) for now, mb in found]
        kl = pad_completions(kept, micro_batches, costs)[0]
    of_tokens = token_rewards(reward[rows].to(value.dtype), mask, kl, beta=options.beta)
    advantage, target = estimate_advantage(of_tokens, value, mask, gamma=cfg.gamma, lam=cfg.gae_lambda)
    earned = rewards_to_go(of_tokens, mask, gamma=cfg.gamma)
    sums = all_sum(torch.stack([moments(x[mask]) for x in (advantage, value, earned, earned - value)]))  # (4, 3)
    metrics = {"value/mean": mean_of(sums[1]), "value/explained_variance": explained_variance(sums[3], sums[2])}
    if cfg.whiten_advantages:
        advantage = whiten(advantage, sums[0])
    on_ids = [scatter_to_ids(batch.completions, rows, x) for x in (advantage, value, target)]
    metrics = {name: float(x) for name, x in metrics.items() if x.isfinite()}
    return Estimates(rows, *on_ids, None if kl is None else kl.sum(1), metrics)


def backward_both(cfg: Config, policy: Policy, critic: Critic, batch: MiniBatch, *, is_last: bool = True) -> StepSums:
    """Gradients of the policy loss and of the critic's, which shares the pass if it shares the trunk."""
    num_tokens = batch.total.tokens.clamp(min=1)  # () of the step, all ranks

    def loss_of(mb: MicroBatch, value: Tensor) -> tuple[Tensor, LossOut]:  # value: (N,) with gradient
        out = clipped_value_loss(
            value, mb.own["old_value"], mb.own["target"], clip=cfg.cliprange_value, coef=cfg.vf_coef
        )
        return out.terms["value"].sum, out

    def of_states(sums: StepSums, mb: MicroBatch, states: Tensor) -> Tensor:  # states: (N, D) of the policy's trunk
        total, out = loss_of(mb, critic(states))
        sums.add(out.metrics | {"loss/value": (total, 0.0)})
        return cfg.vf_coef * total / num_tokens

    if isinstance(critic, ValueHead):
        return backward(cfg, policy, batch, value_loss=of_states, is_last=is_last)
    sums = backward(cfg, policy, batch, is_last=is_last)
    for mb in batch.micro_batches:
        total, out = loss_of(mb, critic(mb.batch))
        (total / num_tokens).backward()
        sums.add(out.metrics | term_metrics(out))
    return sums
