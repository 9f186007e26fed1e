"""RLOO: REINFORCE with the mean of the other completions as baseline (Ahmadian et al. 2024, arXiv:2402.14740).

A completion is one action: its ratio is that of the whole, and its KL to the reference is a cost in the reward. The
loop is that of trainer/methods/grpo.py; losses/policy.py and losses/advantage.py have the formulas.

With --mask-truncated-completions a truncated completion trains nothing itself, but its reward, less beta times its KL,
stays in the baseline of the others in its group. TRL masks its tokens before it sums the KL, so there its KL is 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trainer.config.blocks import Flat
from trainer.config.groups import AdvantageConfig
from trainer.config.policy import PolicyLossConfig
from trainer.methods import grpo


def _advantage() -> AdvantageConfig:
    return AdvantageConfig(advantage_estimator="leave_one_out", scale_rewards="none", kl_in_reward=True)


@dataclass(frozen=True, kw_only=True)
class Config(grpo.Config):
    """REINFORCE, each completion against the mean reward of the others in its group."""

    advantage: Flat[AdvantageConfig] = field(default_factory=_advantage)
    policy_loss: Flat[PolicyLossConfig] = field(default_factory=lambda: PolicyLossConfig(loss_type="rloo", beta=0.05))


train = grpo.train
