"""RAFT: sample a group of completions per prompt, keep the best by their rewards, fine-tune on those.

    prompts -> generate -> rewards -> keep the best -> pack -> (logps -> negative log-likelihood -> backward)* -> step

Dong et al. 2023 (arXiv:2304.06767). The loss is "reinforce" with advantage 1: the negative log-likelihood of the kept
completions, divided by their number on all ranks. With --loss-type dapo --num-iterations 2 this is RAFT++ (Xiong et al.
2025, arXiv:2504.11343).

    python -m trainer --method raft
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from data.command.checks import reject_unused
from data.errors import UserError
from losses.advantage import Rewards
from trainer.config.blocks import Flat
from trainer.config.policy import CorrectionConfig, PolicyLossConfig
from trainer.config.sampling import SamplingConfig
from trainer.methods.grpo import backward, logps_at_start
from trainer.rl.rollouts import Rollouts, open_rewards
from trainer.run.run import open_run
from trainer.run.training import Training, open_policy


@dataclass(frozen=True, kw_only=True)
class Config(SamplingConfig):
    """Rejection sampling: fine-tune on the best completions of each group."""

    policy_loss: Flat[PolicyLossConfig] = field(default_factory=lambda: PolicyLossConfig(loss_type="reinforce"))
    correction: Flat[CorrectionConfig] = field(
        default_factory=lambda: CorrectionConfig(vllm_importance_sampling_correction=False)
    )

    keep_best: int = 4
    """Completions of each group to train on, best reward first."""
    reward_above: float = 0.0
    """Drop completions whose reward is not above this."""

    def __post_init__(self) -> None:
        super().__post_init__()
        why = "with raft, which has its own advantage"
        reject_unused(self.advantage, why, ("advantage_estimator", "advantage_kwargs", "scale_rewards"))
        if not 1 <= self.keep_best <= self.num_generations:
            raise UserError(f"keep_best={self.keep_best}: must be 1 to num_generations={self.num_generations}")


def train(cfg: Config) -> None:
    with open_run(cfg, cfg.run.method) as run:
        rewards = open_rewards(cfg, run)
        policy = open_policy(cfg, with_reference=cfg.has_reference)
        rollouts = Rollouts(run, cfg, policy, rewards, advantage=partial(best_of_group, cfg))
        training = Training(run, cfg, policy, rollouts, moving=cfg.moving)
        for rollout in training.batches():
            kept = rollouts.advantage(rollout)  # (B,) by best_of_group
            rollouts.keep_samples(rollout, kept)
            # Only kept completions are packed, so only they are counted. A rank may have none.
            batches = rollouts.pack(rollout, kept, rows=kept.nonzero().flatten().tolist())
            logps_at_start(cfg, policy, batches, rollouts.steps_per_batch)
            for batch in rollouts.updates(*batches):
                sums = backward(cfg, policy, batch)
                sums.add({"rollout/kept_frac": (kept.sum(), len(kept))})
                training.clip_and_step(sums)
                training.log(sums, batch.computed_tokens)


def best_of_group(cfg: Config, r: Rewards) -> Tensor:  # (P, G)
    """1 for the completions to train on, 0 for the others. Dynamic sampling and replay skip groups of zeros."""
    reward = r.reward.nan_to_num(nan=-torch.inf)  # completions without a reward are never kept
    order = reward.argsort(dim=1, descending=True, stable=True)
    kept = torch.zeros_like(reward).scatter(1, order[:, : cfg.keep_best], 1.0)
    return kept * (reward > cfg.reward_above)
