"""Flags of on-policy distillation: the teacher, the objective and the data."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import ClassVar

from data.command.checks import check_numbers, reject_unused
from data.command.flags import Common
from data.errors import UserError
from trainer.config.blocks import Flat, MovingReferenceConfig
from trainer.config.policy import PolicyLossConfig
from trainer.config.sampling import SamplingConfig

LOSS = "dapo"  # with advantage teacher_logp - logp: trainer/methods/opd.py


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """The teacher and the distillation objective."""

    teacher: Common[str | None] = None
    (
        "Teacher, in any form that --model accepts (a hub id, a model folder, a finished run, a LoRA adapter), or "
        "self: the initial weights of this run. If its vocabulary differs, spans of text are compared."
    )
    teacher_url: Common[str | None] = None
    (
        "A vLLM server that computes the teacher's log-probs, e.g. http://10.0.0.2:8000, instead of a teacher in this "
        "process. Its access token is read from STROP_VLLM_TOKEN."
    )
    teacher_prompt: Common[str | None] = None
    (
        "A function that returns a different prompt for the teacher: module.fn or FILE.py:fn(row) -> text or messages. "
        "The row contains its prompt and all its columns, such as the answer."
    )
    teacher_update_rate: float | None = None
    (
        "teacher=self: after every optimizer step, move the teacher towards the student by this fraction (an "
        "exponential moving average; 0.05 is typical). None: the teacher keeps the initial weights."
    )
    jsd_beta: Common[float | None] = None
    (
        "Train on the whole next-token distribution with the generalized Jensen-Shannon divergence: 0 is the forward "
        "KL, 1 the reverse KL. None: the reverse KL from the sampled token alone."
    )
    reward_coef: float = 1.0
    """With --reward-funcs: weight of the advantage from rewards, added to the teacher's. 0: only log the rewards."""
    student_data_fraction: float = 1.0
    """Fraction of a step's prompts that the student completes; other prompts use the completion in their row."""

    def __post_init__(self) -> None:
        check_numbers(self, {"between 0 and 1": "jsd_beta student_data_fraction", "0 or above": "reward_coef"})
        check_numbers(self, {"above 0 and at most 1": "teacher_update_rate"})
        if self.teacher is None and self.teacher_url is None:
            raise UserError("--teacher: required; pass a model, a finished run or self, or a server with --teacher-url")
        if self.teacher is not None and self.teacher_url is not None:
            raise UserError(f"teacher_url={self.teacher_url}: conflicts with teacher={self.teacher}; set only one")
        if self.teacher_url is not None and not self.teacher_url.startswith(("http://", "https://")):
            raise UserError(f"teacher_url={self.teacher_url}: must begin with http:// or https://")
        if self.teacher_url is not None and self.jsd_beta is not None:
            raise UserError(
                f"jsd_beta={self.jsd_beta}: needs the teacher's whole distribution, and a server at teacher_url gives "
                "only the log-probs of the tokens it is sent; load the teacher with --teacher, or remove --jsd-beta"
            )
        if self.student_data_fraction < 1 and self.jsd_beta is None:
            raise UserError(
                f"student_data_fraction={self.student_data_fraction}: the sampled-token objective is valid only on the "
                "student's own samples; set --jsd-beta"
            )


def _policy_loss() -> PolicyLossConfig:
    return PolicyLossConfig(loss_type=LOSS, skip_zero_advantage_batches=False)


class MovingTeacher(MovingReferenceConfig):
    """teacher_update_rate as settings of a moving reference, which the teacher then is."""

    exact: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class OpdConfig(SamplingConfig):
    """Flags of on-policy distillation."""

    can_be_exact: ClassVar[bool] = False  # another head kernel compares the policy with a teacher
    distill: Flat[DistillConfig]
    policy_loss: Flat[PolicyLossConfig] = field(default_factory=_policy_loss)

    num_generations: Common[int] = 1
    """Completions sampled per prompt. Advantages from rewards compare them and need at least 2."""

    @property
    def has_reward_advantage(self) -> bool:
        return bool(self.reward.reward_funcs) and self.distill.reward_coef > 0

    @property
    def has_reference(self) -> bool:
        return self.distill.teacher == "self" or self.policy_loss.beta > 0

    @property
    def moving_teacher(self) -> MovingReferenceConfig:
        """How the reference moves: with teacher_update_rate as the teacher, otherwise by sync_ref_model."""
        if (rate := self.distill.teacher_update_rate) is None:
            return self.moving
        return MovingTeacher(sync_ref_model=True, ref_model_mixup_alpha=rate, ref_model_sync_steps=1)

    @property
    def fewest_generations(self) -> int:  # type: ignore[override]
        return 2 if self.has_reward_advantage else 1

    def __post_init__(self) -> None:
        if self.num_generations == 1 and self.has_reward_advantage:
            raise UserError(
                "num_generations=1: advantages from rewards compare at least 2 completions of a prompt; raise it, or "
                "set --reward-coef 0 to only log the rewards"
            )
        super().__post_init__()
        self.reject_filters("opd, whose teacher's log-probs are over all tokens")
        self._check_teacher()
        self._check_rewards()
        why = "with opd, because every completion has a signal from the teacher"
        reject_unused(self.overlap, why, ("dynamic_sampling", "replay_buffer_size", "reroll_start_fraction"))
        if self.distill.jsd_beta is None:
            self._check_sampled_token()
        else:
            self._check_whole_distribution()
        if self.distill.student_data_fraction < 1:
            self._check_given()

    def _check_teacher(self) -> None:
        cfg = self.distill
        if cfg.teacher == "self" and cfg.teacher_prompt is None and not self.has_reward_advantage:
            raise UserError(
                "teacher=self: with the student's prompt the teacher equals the student and there is no signal; set "
                "--teacher-prompt"
            )
        if cfg.teacher == "self" and self.moving.sync_ref_model:
            raise UserError(
                "sync_ref_model=True: the reference is also teacher=self; remove --sync-ref-model, or set "
                "--teacher-update-rate to move both"
            )
        if cfg.teacher_update_rate is not None:
            self._check_moving_teacher(f"teacher_update_rate={cfg.teacher_update_rate}")
        if cfg.teacher_url is not None and self.temperature != 1:
            raise UserError(
                f"temperature={self.temperature}: a server at teacher_url computes log-probs at temperature 1; "
                "remove --temperature, or load the teacher with --teacher"
            )
        writers = {"rollout_func": self.tools.rollout_func, "harness": self.tools.harness,
                   "openenv.env": self.openenv.env, "nemo_gym.multi_turn": self.nemo_gym.multi_turn,
                   "verifiers.env": self.verifiers.env}  # fmt: skip
        if cfg.teacher_prompt is not None and any(writers.values()):
            name, value = next((name, value) for name, value in writers.items() if value)
            raise UserError(f"teacher_prompt={cfg.teacher_prompt}: conflicts with {name}={value}, which writes prompts")

    def _check_moving_teacher(self, setting: str) -> None:
        if self.distill.teacher != "self":
            raise UserError(f"{setting}: has no effect with a teacher other than self; remove --teacher-update-rate")
        if self.policy_loss.beta > 0:
            raise UserError(f"{setting}: beta={self.policy_loss.beta} is a KL to the same weights; set --beta 0")

    def _check_rewards(self) -> None:
        if not self.reward.reward_funcs:
            why = "without --reward-funcs"
            reject_unused(self.reward, why)
            reject_unused(self.distill, why, ("reward_coef",))
            if self.data.holds_out:
                raise UserError(
                    f"{self.data.held_out_by}: evaluation measures only rewards; set --reward-funcs, and "
                    "--reward-coef 0 to train without them"
                )
            if self.nemo_gym.datasets:
                raise UserError("nemo_gym.datasets: rows of a gym need its reward; set --reward-funcs")
        if not self.has_reward_advantage:
            reject_unused(self.advantage, "without advantages from rewards; set --reward-coef above 0")

    def _check_sampled_token(self) -> None:
        loss = self.policy_loss
        if loss.loss_type != LOSS:
            raise UserError(f"loss_type={loss.loss_type}: opd trains {LOSS}, or --jsd-beta; remove --loss-type")
        if loss.skip_zero_advantage_batches:
            raise UserError(
                "skip_zero_advantage_batches=True: the advantage of a token is known only in its training pass; remove "
                "--skip-zero-advantage-batches"
            )
        why = "with opd, because the advantage of a token is known only in its training pass"
        reject_unused(self.correction, why, ("off_policy_mask_threshold",))

    def _check_whole_distribution(self) -> None:
        why = "with jsd_beta, whose loss has no ratios and no samples to weight"
        default = _policy_loss()
        for name in (one.name for one in fields(default) if one.name != "mask_truncated_completions"):
            if (value := getattr(self.policy_loss, name)) != getattr(default, name):
                raise UserError(f"{name}={value}: has no effect {why}")
        reject_unused(self.correction, why)
        if self.has_reward_advantage:
            raise UserError(
                f"jsd_beta={self.distill.jsd_beta}: has no advantage to add rewards to; set --reward-coef 0 to only "
                "log the rewards, or remove --jsd-beta"
            )
        if self.parallel.context > 1:
            raise UserError(
                f"parallel.context={self.parallel.context}: not supported with jsd_beta, which compares whole rows of "
                "student and teacher"
            )

    def _check_given(self) -> None:
        fraction = f"student_data_fraction={self.distill.student_data_fraction}"
        if self.num_generations > 1:
            raise UserError(
                f"num_generations={self.num_generations}: {fraction} replaces the sampled completions by the one in "
                "the row; use 1"
            )
        environments = (self.openenv.env, self.nemo_gym.datasets, self.verifiers.env, self.tools.harness)
        if self.tools.tools or self.tools.rollout_func or any(environments):
            raise UserError(f"{fraction}: completions in rows have no tools and no environment")
