"""Online DPO: sample completions, let rewards or a judge pick the best and the worst, widen their gap by a pair loss.

    prompts -> generate -> rewards or judge -> best and worst -> pack -> (logps -> loss -> backward)* -> step -> log

Guo et al. 2024 (arXiv:2402.04792), with two or more completions per prompt. The pairs are always the policy's own and
new; the loss is DPO's (trainer/methods/dpo.py), with any --loss-type and any reference that is not precomputed. A
prompt whose completions are all equally good has no pair: it counts as a tie and leaves the loss.

The loss has no ratio to the policy that sampled, so pairs from earlier weights (several steps on a rollout,
--async-prefetch, replay) need no correction. Log-probs are taken at temperature 1, as for pairs from a file, whatever
--temperature sampled them.

Shapes: P prompts of this rank, G completions each, B = P * G.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from data.command.checks import check_numbers, reject_unused
from data.command.flags import Common
from data.errors import UserError
from losses.advantage import Rewards
from rollout.rewards.judge import open_judged
from trainer.config.preference import PairOptions, check_pair_options
from trainer.config.sampling import RewardedConfig
from trainer.methods.dpo import run_pairs
from trainer.offline.pairs_of_groups import pair_up
from trainer.policy.reference import Reference, build_reference, wants_copy
from trainer.rl.rollouts import Rollouts, open_rewards
from trainer.run.run import Run, open_run
from trainer.run.training import Training, open_policy


@dataclass(frozen=True, kw_only=True)
class Config(PairOptions, RewardedConfig):
    """Online direct preference optimisation: the best completion of each prompt against the worst."""

    lora_learning_rate: ClassVar[float] = 5e-6  # like DPO; TRL's default for all weights is 5e-7

    num_generations: Common[int] = 4
    """Completions sampled per prompt, 2 or more. The best and the worst are trained."""
    temperature: Common[float] = 1.0
    """Sampling temperature. The loss uses log-probs at temperature 1, as for pairs from a file."""
    judge: Common[str | None] = None
    (
        "Function that compares the completions of a prompt and picks the pairs: my_module.fn or FILE.py:fn. Reward "
        "functions are then only logged."
    )
    missing_eos_penalty: float = 0.0
    """Subtracted from the reward of a completion truncated at max_completion_length. 0: off."""

    @property
    def has_reference(self) -> bool:
        return not self.reference_free and wants_copy(self.reference, self.lora)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pair_options(self, lora=self.lora, run=self.run, num_pairs=self.prompts_per_step)
        check_numbers(self, {"0 or above": "missing_eos_penalty"})
        if self.reference.ref == "precomputed":
            raise UserError(
                "ref=precomputed: completions are new in every step; use --ref copy, or --ref adapter_off with LoRA"
            )
        reject_unused(self.overlap, "with a pair loss, which has no ratio to clip", ("replay_recompute_logps",))
        if self.judge is not None:
            reject_unused(self, "with a judge, which ranks without rewards", ("missing_eos_penalty",))
            reject_unused(self.reward, "with a judge, which runs on rank 0", ("reward_on_all_ranks",))
            why = "with a judge, whose best completion always has a reward"
            reject_unused(self.overlap, why, ("reroll_start_fraction",))
        if self.judge is not None and not self.reward.reward_funcs:
            given = ("reward_weights", "reward_num_workers")
            reject_unused(self.reward, "with a judge alone; name --reward-funcs", given)
            if self.data.holds_out:
                raise UserError(
                    f"{self.data.held_out_by}: a judge compares completions and cannot reward the single one of an "
                    "evaluation; name --reward-funcs to measure it"
                )


def train(cfg: Config) -> None:
    with open_run(cfg, cfg.run.method) as run:
        rewards = open_judge(cfg, run) if cfg.judge else open_rewards(cfg, run)
        policy = open_policy(cfg, with_reference=cfg.has_reference)
        reference = Reference(None)
        if not cfg.reference_free:
            reference = build_reference(cfg.reference, cfg.model, cfg.run, policy, [], cfg.parallel)
        rollouts = Rollouts(run, cfg, policy, rewards, advantage=partial(sides, cfg))
        training = Training(run, cfg, policy, rollouts, moving=cfg.moving)
        for rollout in training.batches():  # whole groups with rewards, and the judge's verdict if there is one
            side = rollouts.advantage(rollout)  # (B,) by `sides`
            assert isinstance(side, Tensor)
            batches = pair_up(cfg.run, policy, rollout, side)
            rollouts.keep_samples(rollout, side)
            for batch in rollouts.updates(*batches):  # each mini-batch, --num-iterations times
                sums = run_pairs(cfg, policy, reference, batch.items, batch.pairs, train=True)  # DPO's loss
                sums.add(batch.metrics)
                training.clip_and_step(sums)
                training.log(sums, batch.computed_tokens)


def sides(cfg: Config, r: Rewards) -> Tensor:  # (P, G)
    """1 for the best completion of a group, -1 for the worst, 0 for the others and for all of a tie.

    Among equally good completions the first is taken.
    """
    score = r.reward if cfg.judge is None else r.rewards[..., -1]  # (P, G) --judge: its verdict is the last reward
    truncated = torch.tensor([c.finish_reason == "length" for c in r.completions]).view_as(score)
    empty = torch.tensor([c.trained == 0 for c in r.completions]).view_as(score)  # nothing sampled by the model
    score = torch.where(empty, torch.nan, score - cfg.missing_eos_penalty * truncated)  # --missing-eos-penalty
    best = score.nan_to_num(nan=-torch.inf).argmax(dim=1, keepdim=True)  # (P, 1)
    worst = score.nan_to_num(nan=torch.inf).argmin(dim=1, keepdim=True)  # (P, 1)
    side = torch.zeros_like(score).scatter(1, best, 1.0).scatter(1, worst, -1.0)
    return torch.where(score.gather(1, best) > score.gather(1, worst), side, 0.0)


def open_judge(cfg: Config, run: Run) -> Any:
    assert cfg.judge is not None
    trust = cfg.model.trust_remote_code
    return run.keep(open_judged(cfg.reward, cfg.judge, cfg.num_generations, run.note, trust_remote_code=trust))
