"""RAFT: sample a group of completions per prompt, keep the best by their rewards, fine-tune on those.

    prompts -> generate -> rewards -> keep the best -> pack -> (logps -> negative log-likelihood -> backward) -> step

Dong et al. 2023 (arXiv:2304.06767). The loss is "reinforce" with advantage 1, which is the negative log-likelihood of
the kept completions, divided by their number on all ranks. With --loss-type dapo --num-iterations 2 this is RAFT++
(Xiong et al. 2025, arXiv:2504.11343).

    python -m trainer --method raft
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from trainer.rl.session import Session

from losses.advantage import GroupRewards
from trainer.config.blocks import Flat
from trainer.config.checks import reject_unused
from trainer.config.policy import CorrectionConfig, PolicyLossConfig
from trainer.config.sampling import SamplingConfig
from trainer.methods.grpo import backward, score_at_start


@dataclass(frozen=True, kw_only=True)
class Config(SamplingConfig):
    """Rejection sampling: fine-tune on the best completions of each group."""

    policy_loss: Flat[PolicyLossConfig] = field(default_factory=lambda: PolicyLossConfig(loss_type="reinforce"))
    correction: Flat[CorrectionConfig] = field(
        default_factory=lambda: CorrectionConfig(vllm_importance_sampling_correction=False)
    )

    keep_best: int = 4
    """Completions of each group that are trained on, best reward first."""
    reward_above: float = 0.0
    """Completions of this reward or less are never kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        why = "here, the method has an advantage of its own; leave it out"
        reject_unused(self.advantage, why, ("advantage_estimator", "advantage_kwargs", "scale_rewards"))
        if not 1 <= self.keep_best <= self.num_generations:
            raise ValueError(f"keep_best={self.keep_best}: must be 1 to num_generations={self.num_generations}")


def best_of_group(r: GroupRewards, *, keep: int, above: float) -> Tensor:  # (P, G) 1 = kept, 0 = not
    total = r.total.nan_to_num(nan=-torch.inf)  # no reward: never kept
    order = total.argsort(dim=1, descending=True, stable=True)
    kept = torch.zeros_like(total).scatter(1, order[:, :keep], 1.0)
    return kept * (total > above)


def train(cfg: Config) -> None:
    # As the session's estimator it also tells dynamic sampling and replay which groups have nothing to keep.
    with Session(cfg, advantage=partial(best_of_group, keep=cfg.keep_best, above=cfg.reward_above)) as s:
        for rollout in s.rollouts():
            kept = s.advantage(rollout)  # (B,)
            s.keep_samples(rollout, kept)
            # Counts are those of the kept completions of all ranks. A rank may have none.
            batches = s.pack(rollout, kept, rows=kept.nonzero().flatten().tolist())
            score_at_start(cfg, s.policy, batches, s.steps_per_rollout)
            for batch in s.updates(*batches):
                sums = backward(cfg, s.policy, batch)
                sums.add({"rollout/kept_frac": (kept.sum(), torch.tensor(float(len(kept))))})
                s.clip_and_step(sums, batch)
                s.log(sums, batch)
