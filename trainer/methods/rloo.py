"""RLOO: REINFORCE with the mean of the other completions as baseline (Ahmadian et al. 2024, arXiv:2402.14740).

The loop of trainer/methods/grpo.py with three changes, each a default of Config below:

    advantage   r - mean of the other rewards of the group     --advantage-estimator leave_one_out, --scale-rewards none
    ratio       the product over the completion, clipped       --loss-type rloo
    KL          a cost in the reward: r - beta KL              --kl-in-reward

With --mask-truncated-completions a truncated completion is not trained, but its reward minus beta KL stays in the
baseline of its group. TRL masks its tokens before it sums the KL, so there its KL is 0.
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
