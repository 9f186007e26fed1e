"""A method with a critic, a linear function of length and log-prob: run by test_extending.py as --method tests.critic.

The critic's value is the baseline of a completion. Training steps, checkpoints and restores the critic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rollout.engine import Completion
from trainer.config.blocks import OptimConfig
from trainer.config.sampling import SamplingConfig
from trainer.methods.grpo import backward, logps_at_start
from trainer.parallel.comm import all_count
from trainer.rl.minibatch import pack
from trainer.rl.rollouts import Rollouts, open_rewards
from trainer.run.run import open_run
from trainer.run.training import Training, open_policy


@dataclass(frozen=True, kw_only=True)
class Config(SamplingConfig):
    """Policy gradient with a critic as baseline."""

    critic_learning_rate: float = 0.05
    """Learning rate of the critic."""


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.register_buffer("num_seen", torch.zeros(()))

    def forward(self, completions: Sequence[Completion]) -> Tensor:  # (B,)
        features = [[len(c.ids) / 4, sum(c.logps) / max(1, len(c.ids))] for c in completions]
        return self.linear(torch.tensor(features, device=self.num_seen.device)).squeeze(1)


def train(cfg: Config) -> None:
    with open_run(cfg, cfg.run.method) as run:
        rewards = open_rewards(cfg, run)
        policy = open_policy(cfg, with_reference=cfg.has_reference)
        critic = Critic()
        optim = OptimConfig(learning_rate=cfg.critic_learning_rate, lr_scheduler_type="constant")
        rollouts = Rollouts(run, cfg, policy, rewards)
        training = Training(run, cfg, policy, rollouts, modules={"critic": (critic, optim)})
        for rollout in training.batches():
            reward = rollout.reward.flatten().to(policy.device)  # (B,)
            advantage = reward - critic(rollout.completions).detach()
            whole = pack(cfg, policy, rollout.completions, advantage)
            logps_at_start(cfg, policy, [whole], rollouts.steps_per_batch)
            rollouts.keep_samples(rollout, advantage)
            count = all_count(len(reward))
            critic.num_seen += count
            for batch in rollouts.updates(whole):
                sums = backward(cfg, policy, batch)
                error = (critic(rollout.completions) - reward).square().sum()
                (error / count).backward()
                sums.add({"loss/value": (error, torch.tensor(float(len(reward))))})
                training.clip_and_step(sums)
                training.log(sums, batch.computed_tokens)
