"""SDPO, self-distillation policy optimization: learn from what the model says after it has seen a correct answer.

    prompts -> generate -> rewards -> reprompt -> teacher's log-probs -> pack -> (logps -> loss -> backward)* -> ...

Huebotter et al. 2026 (arXiv:2601.20802; compute_self_distillation_loss in the authors' lasgroup/SDPO; SDPOTrainer in
TRL 1.16). The teacher is the model itself with another prompt: the question, a completion of the same group whose
reward reached --success-reward, and feedback if there is any. Its next-token distributions on the student's completion
y are the target, without gradient:

    L = mean over tokens of D(pi(. | x, y_<t) || teacher(. | reprompt(x, solution, feedback), y_<t))

D is opd's objective: the reverse KL on the sampled token by default, or --jsd-beta. A completion never sees itself as
the solution. Without a solution and without feedback it is not trained and not counted. The teacher's weights are an
exponential moving average of the student's (--teacher-update-rate), because a fixed teacher falls behind and the
student itself is unstable. The reward chooses solutions; it is not part of the loss.

Feedback is the column `feedback` of a completion, which an environment may set. --teacher-prompt FILE.py:fn(row)
replaces `reprompt`; row["solution"] and row["feedback"] are text or None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from data.command.checks import reject_unused
from data.command.flags import Common
from data.errors import UserError
from data.packing import Item
from rollout.engine import Completion, Group
from trainer.config.blocks import Flat
from trainer.config.distill import DistillConfig, OpdConfig
from trainer.methods.grpo import backward, logps_at_start
from trainer.methods.opd import backward_jsd, minus_engine_logps, reverse_kl_loss
from trainer.policy.logps import Policy
from trainer.rl.groups import Rollout
from trainer.rl.minibatch import Advantages
from trainer.rl.rollouts import Rollouts, open_rewards
from trainer.rl.teacher import Teacher
from trainer.run.run import open_run
from trainer.run.training import Training, open_policy


@dataclass(frozen=True, kw_only=True)
class Config(OpdConfig):
    """Self-distillation: the teacher is the model itself, with one of its own correct answers in the prompt."""

    distill: Flat[DistillConfig] = field(
        default_factory=lambda: DistillConfig(teacher="self", teacher_update_rate=0.05, reward_coef=0.0)
    )
    num_generations: Common[int] = 8
    """Completions per prompt; a successful completion is the solution that the teacher sees for the others."""
    success_reward: float = 1.0
    """Minimum total reward of a completion that the teacher may see as the solution."""

    @property
    def fewest_generations(self) -> int:  # type: ignore[override]
        return 2

    def _check_teacher(self) -> None:
        cfg = self.distill
        if cfg.teacher != "self":
            found = f"teacher={cfg.teacher}" if cfg.teacher else f"teacher_url={cfg.teacher_url}"
            raise UserError(f"{found}: the teacher of sdpo is self; use --method opd")
        if cfg.reward_coef:
            raise UserError(f"reward_coef={cfg.reward_coef}: sdpo uses rewards only to choose solutions; remove it")
        if cfg.student_data_fraction < 1:
            raise UserError(f"student_data_fraction={cfg.student_data_fraction}: sdpo compares samples; remove it")
        if self.moving.sync_ref_model:
            raise UserError("sync_ref_model=True: the reference is the teacher; set --teacher-update-rate instead")
        if cfg.teacher_update_rate is not None:
            self._check_moving_teacher(f"teacher_update_rate={cfg.teacher_update_rate}")

    def _check_rewards(self) -> None:  # exact_match by default
        reject_unused(self.advantage, "with sdpo, whose rewards are not part of the loss")


def train(cfg: Config) -> None:
    with open_run(cfg, cfg.run.method) as run:
        rewards = open_rewards(cfg, run)
        policy = open_policy(cfg, with_reference=True)
        teacher = SelfTeacher(cfg, policy)
        rollouts = Rollouts(run, cfg, policy, rewards)
        training = Training(run, cfg, policy, rollouts, moving=cfg.moving_teacher)  # --teacher-update-rate
        for rollout in training.batches():
            items = teacher.reprompted(rollout)  # for each completion; None: nothing to learn from
            rows = [row for row, item in enumerate(items) if item is not None]
            advantage = teacher_advantage(cfg, teacher, rollout, items, rows)
            batches = rollouts.pack(rollout, advantage, rows=rows)
            logps_at_start(cfg, policy, batches, rollouts.steps_per_batch)
            rollouts.keep_samples(rollout, for_samples(advantage, rollout, items))
            for batch in rollouts.updates(*batches):
                if cfg.distill.jsd_beta is None:
                    sums = backward(cfg, policy, batch, loss=reverse_kl_loss)
                else:  # --jsd-beta
                    shown = [item for row in batch.rows if (item := items[row]) is not None]
                    sums = backward_jsd(cfg, policy, teacher, batch, shown)
                sums.add({"rollout/reprompted_frac": (len(rows), len(items))})
                training.clip_and_step(sums)
                training.log(sums, batch.computed_tokens)


def teacher_advantage(
    cfg: Config, teacher: Teacher, rollout: Rollout, items: Sequence[Item | None], rows: Sequence[int]
) -> Advantages:
    """Return the teacher's log-prob of each id, as in opd; 0 for untrained completions, and with --jsd-beta."""
    if cfg.distill.jsd_beta is not None:
        return torch.zeros(len(items))
    logps = dict(zip(rows, teacher.item_logps([item for item in items if item is not None]), strict=True))
    return [logps.get(row, [0.0] * len(c.ids)) for row, c in enumerate(rollout.completions)]


def for_samples(advantage: Advantages, rollout: Rollout, items: Sequence[Item | None]) -> Advantages:
    """Return minus the engine's log-probs, as in opd; 0 for untrained completions."""
    if isinstance(advantage, torch.Tensor):
        return advantage
    both = zip(minus_engine_logps(advantage, rollout), items, strict=True)
    return [[0.0] * len(values) if item is None else values for values, item in both]


class SelfTeacher(Teacher):
    """The policy's reference, with prompts that show a solution of the same group."""

    def __init__(self, cfg: Config, policy: Policy) -> None:
        super().__init__(cfg, policy, policy)
        self.success_reward, self.function = cfg.success_reward, self.function or reprompt

    def reprompted(self, rollout: Rollout) -> list[Item | None]:
        """Return the teacher's prompt with the completion, for each completion; None without solution and feedback.

        Also None if both together do not fit the model's context.
        """
        items: list[Item | None] = []
        for group, rewards in zip(rollout.groups, rollout.reward.tolist(), strict=True):
            solved = [reward >= self.success_reward for reward in rewards]  # False if NaN
            for row, c in enumerate(group.completions):
                other = next((i for i, is_solved in enumerate(solved) if is_solved and i != row), None)
                solution = None if other is None else group.completions[other].text
                items.append(self._item(group, c, solution, c.columns.get("feedback")))
        return items

    def _item(self, group: Group, c: Completion, solution: str | None, feedback: Any) -> Item | None:
        feedback = feedback if isinstance(feedback, str) and feedback.strip() else None
        if solution is None and feedback is None:
            return None
        prompt = self._of_row(group.prompt, solution=solution, feedback=feedback)
        if self.context_length is not None and len(prompt) + len(c.ids) > self.context_length:
            return None
        return Item([*prompt, *c.ids], [False] * len(prompt) + (c.mask or [True] * len(c.ids)), len(prompt))


def reprompt(row: dict[str, Any]) -> Any:
    """Add the solution and the feedback to the question, in the last user message."""
    prompt, parts = row["prompt"], []
    if row["solution"] is not None:
        parts.append(f"A correct answer to this question:\n{row['solution']}")
    if row["feedback"] is not None:
        parts.append(f"Feedback on an earlier answer that was not correct:\n{row['feedback']}")
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    text = "\n\n".join([text, *parts, "Now answer the question yourself."])
    return text if isinstance(prompt, str) else [*prompt[:-1], {**prompt[-1], "content": text}]
