"""A method with a critic, a linear function of length and log-prob: run by test_extending.py as --method tests.critic.

The baseline of a completion is what the critic expects of it. Session steps, checkpoints and restores the critic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rollout.engine import Completion
from trainer.config.blocks import OptimConfig
from trainer.config.sampling import SamplingConfig
from trainer.methods.grpo import backward, score_at_start
from trainer.parallel.comm import all_count
from trainer.rl.minibatch import pack
from trainer.rl.session import Session


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
    optim = OptimConfig(learning_rate=cfg.critic_learning_rate, lr_scheduler_type="constant")
    with Session(cfg, trained=lambda s: {"critic": (Critic(), optim)}) as s:
        critic = s.trained["critic"]
        for batch in s.rollouts():
            reward = batch.reward.flatten().to(s.policy.device)  # (B,)
            advantage = reward - critic(batch.completions).detach()
            rollout = pack(cfg, s.policy, batch.completions, advantage)
            score_at_start(cfg, s.policy, [rollout], s.steps_per_rollout)
            s.keep_samples(batch, advantage)
            count = all_count(len(reward))
            critic.num_seen += count
            for part in s.updates(rollout):
                sums = backward(cfg, s.policy, part)
                error = (critic(batch.completions) - reward).square().sum()
                (error / count).backward()
                sums.add({"loss/value": (error, torch.tensor(float(len(reward))))})
                s.clip_and_step(sums, part)
                s.log(sums, part)
