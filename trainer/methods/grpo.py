"""GRPO: sample a group of completions per prompt, reward them, compare within the group, clip, step.

    prompts -> generate -> rewards -> advantage -> pack -> (logps -> loss -> backward)* -> clip and step -> log

Shao et al. 2024 (arXiv:2402.03300), with DAPO's token-level normaliser (Yu et al. 2025, arXiv:2503.14476) by default:
the sum over all trained tokens of the step, divided once by their number. --loss-type picks another record of
losses/policy.py, --advantage-estimator another of losses/advantage.py. With --async-prefetch the next batches are
sampled while this one is trained on.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.sampling import SamplingConfig
from trainer.rl.session import Session
from trainer.rl.step import backward


@dataclass(frozen=True, kw_only=True)
class Config(SamplingConfig):
    """Group relative policy optimisation: sample, reward, compare within each group, clip, step."""


def train(cfg: Config) -> None:
    with Session(cfg) as s:  # model, data, rewards, engine, optimizer, run folder; restores a checkpoint
        while s.step < s.total_steps:
            s.sync_weights()  # to the engine, if due
            batch = s.sample()  # rank 0 generates and rewards; whole groups, different ones on every rank
            advantage = s.advantage(batch)  # (B,) by --advantage-estimator, or a number for each id
            rollout = s.prepare(batch, advantage)  # one StepBatch for each mini-batch, see trainer/rl/step.py
            s.keep_samples(batch, advantage)
            for part in s.updates(*rollout):  # optimizer steps: each mini-batch once, then again (num_iterations)
                sums = backward(cfg, s.policy, part, is_last=True)  # of cfg.policy_loss.loss, by --loss-type
                s.optimizer_step(sums, part)
                s.log(sums, part)
                s.refresh_ahead()  # async only
            s.finish_rollout()  # checkpoints are taken here, between rollouts
        s.finish()
