"""Online DPO: sample completions, let rewards or a judge pick the best and the worst, widen their gap by a pair loss.

    prompts -> generate -> rewards or judge -> best and worst -> pack -> (logps -> loss -> backward)* -> step -> log

Guo et al. 2024 (arXiv:2402.04792), with two or more completions per prompt. The pairs are the policy's own and always
new; the loss is DPO's, any of losses/preference.py (--loss-type), against any reference that is not precomputed. A
prompt whose completions are all equally good has no pair: it is counted as a tie and leaves the loss.

The loss has no ratio to what sampled, so pairs from earlier weights (several steps on a rollout, --async-prefetch,
replay) need no correction. They are scored at temperature 1, like pairs of a file, whatever --temperature sampled them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from data.command.flags import Common
from data.errors import UserError
from rollout.rewards.judge import open_judged
from trainer.config.blocks import MethodMemory
from trainer.config.checks import check_numbers, reject_unused
from trainer.config.preference import PairOptions, check_pair_options
from trainer.config.sampling import RewardedConfig
from trainer.methods.dpo import run_pairs
from trainer.offline.pairs_of_groups import pair_up, sides
from trainer.policy.reference import Reference, build_reference, wants_copy
from trainer.rl.session import Session


@dataclass(frozen=True, kw_only=True)
class Config(PairOptions, RewardedConfig):
    """Online direct preference optimisation: the best completion of each prompt against the worst."""

    memory: ClassVar[MethodMemory] = MethodMemory("any loss", "always", samples=True)
    lora_learning_rate: ClassVar[float] = 5e-6  # like DPO; TRL's default for all weights is 5e-7

    num_generations: Common[int] = 4
    """Completions sampled per prompt, 2 or more; the best and the worst of them are trained on."""
    temperature: Common[float] = 1.0
    """Sampling temperature. The loss takes log-probs at temperature 1, as for pairs of a file."""
    judge: Common[str | None] = None
    (
        "Your function that compares the completions of a prompt, my_module.fn or FILE.py:fn; it picks the pairs. "
        "Reward functions, if named, then only measure."
    )
    missing_eos_penalty: float = 0.0
    """Subtract this from the reward of a completion that was cut off at max_completion_length. 0: nothing."""

    @property
    def has_reference(self) -> bool:
        return not self.reference_free and wants_copy(self.reference, self.lora)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pair_options(self, lora=self.lora, run=self.run, num_pairs=self.prompts_per_step)
        check_numbers(self, {"0 or above": "missing_eos_penalty"})
        if self.reference.ref == "precomputed":
            raise UserError(
                "ref=precomputed: completions are new in every step, so nothing can be computed before; use copy, or "
                "adapter_off with LoRA"
            )
        reject_unused(self.overlap, "here, a pair loss has no ratio to clip; leave it out", ("replay_recompute_logps",))
        if self.judge is not None:
            reject_unused(self, "with a judge, which ranks without rewards; leave it out", ("missing_eos_penalty",))
            why = "with a judge, whose best completion is never without reward; leave it out"
            reject_unused(self.overlap, why, ("reroll_start_fraction",))
        if self.judge is not None and not self.reward.reward_funcs:
            given = ("reward_weights", "reward_num_workers")
            reject_unused(self.reward, "with a judge alone; name --reward-funcs, or leave it out", given)
            if self.data.holds_out:
                raise UserError(
                    f"{self.data.held_out_by}: a judge compares completions and cannot score the one that an "
                    "evaluation samples; name --reward-funcs to measure, or leave it out"
                )


def train(cfg: Config) -> None:
    with Session(
        cfg,
        rewards=partial(judged_rewards, cfg) if cfg.judge else None,
        advantage=partial(sides, judged=cfg.judge is not None, missing_eos_penalty=cfg.missing_eos_penalty),
        frozen=partial(load_reference, cfg),
    ) as s:
        for batch in s.rollouts():  # whole groups with rewards, and the judge's verdict if there is one
            side = s.advantage(batch)  # (B,) 1: the best of its group, -1: the worst, 0: neither, or a tie
            rollout = pair_up(cfg, s.policy, batch, side)
            s.keep_samples(batch, side)
            for part in s.updates(*rollout):  # each mini-batch, num_iterations times
                sums = run_pairs(cfg, s.policy, s.frozen["reference"], part.items, part.pairs, train=True)
                sums.add(part.metrics)
                s.clip_and_step(sums, part)
                s.log(sums, part)


def load_reference(cfg: Config, s: Session) -> Mapping[str, Reference]:
    if cfg.reference_free:
        return {"reference": Reference(None)}
    return {"reference": build_reference(cfg.reference, cfg.model, cfg.run, s.policy, [], cfg.parallel)}


def judged_rewards(cfg: Config, s: Session) -> Any:
    trusted = cfg.model.trust_remote_code
    rewards = open_judged(cfg.reward, cfg.judge, cfg.num_generations, s.run.note, trust_remote_code=trusted)
    for name, rows in (("data", s.prompts), ("eval_data", s.held_out)):
        rewards.check_columns(rows, name, s.setup.columns)
    return s.run.keep(rewards)
