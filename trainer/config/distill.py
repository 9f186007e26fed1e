"""Flags of on-policy distillation: the teacher, the objective, and what is sampled."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from data.errors import UserError
from trainer.config.blocks import Flat
from trainer.config.checks import check_numbers, reject_unused
from trainer.config.policy import PolicyLossConfig
from trainer.config.sampling import SamplingConfig

LOSS = "dapo"  # with advantage teacher_logp - logp: trainer/methods/opd.py


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """The teacher, and how the student is pulled to it."""

    teacher: str | None = None
    (
        "Teacher, in any form that --model takes (a hub id, a model folder, a finished run, a LoRA adapter), or self: "
        "the initial weights of this run. It needs the student's vocabulary."
    )
    teacher_url: str | None = None
    (
        "A vLLM server that scores the student's tokens, e.g. http://10.0.0.2:8000, instead of a teacher in this "
        "process. A token for it is read from STROP_VLLM_TOKEN."
    )
    teacher_prompt: str | None = None
    (
        "Your function that gives the teacher another prompt: module.fn or FILE.py:fn(row) -> text or messages. A row "
        "has its prompt and all its columns, such as the answer."
    )
    jsd_beta: float | None = None
    (
        "Train on the whole next-token distribution by the generalised Jensen-Shannon divergence: 0 is the forward KL, "
        "1 the reverse KL. None: the reverse KL by the sampled token alone."
    )
    reward_coef: float = 1.0
    """Weight of the rewards' advantage beside the teacher's, with --reward-funcs. 0: rewards are only measured."""
    student_data_fraction: float = 1.0
    """Fraction of a step's prompts that the student completes; the others have the completion given in their row."""

    def __post_init__(self) -> None:
        check_numbers(self, {"between 0 and 1": "jsd_beta student_data_fraction", "0 or above": "reward_coef"})
        if self.teacher is None and self.teacher_url is None:
            raise UserError("--teacher: required; name a model, a finished run or self, or a server by --teacher-url")
        if self.teacher is not None and self.teacher_url is not None:
            raise UserError(f"teacher_url={self.teacher_url}: there is a teacher={self.teacher} already; give one")
        if self.teacher_url is not None and not self.teacher_url.startswith(("http://", "https://")):
            raise UserError(f"teacher_url={self.teacher_url}: must begin with http:// or https://")
        if self.teacher_url is not None and self.jsd_beta is not None:
            raise UserError(
                f"jsd_beta={self.jsd_beta}: needs the teacher's whole distribution, and a server at teacher_url gives "
                "only the log-probs of the tokens it is sent; load the teacher with --teacher, or leave jsd_beta out"
            )
        if self.student_data_fraction < 1 and self.jsd_beta is None:
            raise UserError(
                f"student_data_fraction={self.student_data_fraction}: the sampled-token objective is right on the "
                "student's own samples only; set --jsd-beta, too"
            )


def _policy_loss() -> PolicyLossConfig:
    return PolicyLossConfig(loss_type=LOSS, skip_zero_advantage_batches=False)


@dataclass(frozen=True, kw_only=True)
class OpdConfig(SamplingConfig):
    """On-policy distillation: its own flags, and those of every method that samples."""

    distill: Flat[DistillConfig]
    policy_loss: Flat[PolicyLossConfig] = field(default_factory=_policy_loss)

    num_generations: int = 1
    """Completions sampled per prompt. An advantage from rewards compares them, and needs at least 2."""

    @property
    def has_reward_advantage(self) -> bool:
        return bool(self.reward.reward_funcs) and self.distill.reward_coef > 0

    @property
    def has_reference(self) -> bool:
        return self.distill.teacher == "self" or self.policy_loss.beta > 0

    @property
    def fewest_generations(self) -> int:
        return 2 if self.has_reward_advantage else 1

    def __post_init__(self) -> None:
        if self.num_generations == 1 and self.has_reward_advantage:
            raise UserError(
                "num_generations=1: an advantage from rewards compares at least 2 completions of a prompt; raise it, "
                "or set --reward-coef 0 to only measure the rewards"
            )
        super().__post_init__()
        self._check_teacher()
        self._check_rewards()
        why = "here, every completion has something to learn from the teacher; leave it out"
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
                "teacher=self: with the student's own prompt it is the student, and there is nothing to learn; give it "
                "another by --teacher-prompt"
            )
        if cfg.teacher == "self" and self.moving.sync_ref_model:
            raise UserError(
                "sync_ref_model=True: the reference is also teacher=self, which keeps the initial weights; leave it out"
            )
        if cfg.teacher_url is not None and self.temperature != 1:
            raise UserError(
                f"temperature={self.temperature}: a server at teacher_url scores tokens at temperature 1; leave it "
                "out, or load the teacher with --teacher"
            )
        others = {"rollout_func": self.tools.rollout_func, "openenv.env": self.openenv.env,
                  "nemo_gym.multi_turn": self.nemo_gym.multi_turn, "verifiers.env": self.verifiers.env}  # fmt: skip
        if cfg.teacher_prompt is not None and any(others.values()):
            name, value = next((name, value) for name, value in others.items() if value)
            raise UserError(f"teacher_prompt={cfg.teacher_prompt}: {name}={value} writes prompts itself; give one")

    def _check_rewards(self) -> None:
        if not self.reward.reward_funcs:
            why = "without reward functions; name them with --reward-funcs"
            reject_unused(self.reward, why)
            reject_unused(self.distill, why, ("reward_coef",))
            if self.data.holds_out:
                raise UserError(
                    f"{self.data.held_out_by}: only rewards are measured on held-out rows; name them with "
                    "--reward-funcs, and --reward-coef 0 to train without them"
                )
            if self.nemo_gym.datasets:
                raise UserError("nemo_gym.datasets: rows of the gym need its reward; name it with --reward-funcs")
        if not self.has_reward_advantage:
            reject_unused(self.advantage, "without an advantage from rewards (reward_coef above 0); leave it out")

    def _check_sampled_token(self) -> None:
        loss = self.policy_loss
        if loss.loss_type != LOSS:
            raise UserError(f"loss_type={loss.loss_type}: the objective here is {LOSS}, or --jsd-beta; leave it out")
        if loss.skip_zero_advantage_batches:
            raise UserError(
                "skip_zero_advantage_batches=True: here the advantage of a token is known only in its own pass; leave "
                "it out"
            )
        why = "here, the advantage of a token is known only in its own pass; leave it out"
        reject_unused(self.correction, why, ("off_policy_mask_threshold",))

    def _check_whole_distribution(self) -> None:
        why = "with jsd_beta, whose loss has neither samples to weigh nor ratios; leave it out"
        default, kept = _policy_loss(), ("mask_truncated_completions",)
        for name in (one.name for one in fields(default) if one.name not in kept):
            if (value := getattr(self.policy_loss, name)) != getattr(default, name):
                raise UserError(f"{name}={value}: has no effect {why}")
        reject_unused(self.correction, why)
        if self.has_reward_advantage:
            raise UserError(
                f"jsd_beta={self.distill.jsd_beta}: has no advantage that those of rewards could be added to; set "
                "--reward-coef 0 to only measure them, or leave jsd_beta out"
            )
        if self.parallel.context > 1:
            raise UserError(
                f"parallel.context={self.parallel.context}: jsd_beta compares whole rows of student and teacher and "
                "cannot split them over processes; leave one of them out"
            )

    def _check_given(self) -> None:
        fraction = f"student_data_fraction={self.distill.student_data_fraction}"
        if self.num_generations > 1:
            raise UserError(
                f"num_generations={self.num_generations}: {fraction} puts one given completion in place of the "
                "sampled ones; use 1"
            )
        environments = (self.openenv.env, self.nemo_gym.datasets, self.verifiers.env)
        if self.tools.tools or self.tools.rollout_func or any(environments):
            raise UserError(f"{fraction}: given completions have no tools and no environment; leave one of them out")
