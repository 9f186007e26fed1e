"""OPD, on-policy distillation: sample from the student, and train it towards the teacher's log-probs.

    prompts -> generate -> teacher's log-probs -> pack -> (logps -> loss -> backward)* -> clip and step -> log

The reverse KL to the teacher on the student's own samples (Gu et al. 2023, arXiv:2306.08543; Agarwal et al. 2023,
arXiv:2306.13649). By default only the sampled token is compared: its advantage is teacher_logp - logp, a dense reward,
and the loss is GRPO's (trainer/methods/grpo.py). logp is the student's current log-prob, because for tokens drawn from
any policy `old`, with r = exp(logp - old_logp),

    E_old[r (logp - teacher_logp) grad logp] = grad KL(student || teacher)

holds with the current logp. So the advantage is exactly 0 if the student agrees with the teacher and changes sign if it
overshoots, and no pass before the training pass is needed. MiniLLM's credit for the KL of later tokens is omitted.

--jsd-beta compares the whole next-token distributions by a generalised Jensen-Shannon divergence, chunk by chunk over
the two heads (kernels/linear_kl.py); --student-data-fraction may then mix in given completions, as in GKD.

The teacher is another model, a server, or the student's initial weights with another prompt: trainer/rl/teacher.py.
With --teacher-update-rate a these weights follow the student, teacher <- (1 - a) teacher + a student after each step:
the EMA teacher of SDPO (Huebotter et al. 2026, arXiv:2601.20802; `teacher_model_kind="ema"` in TRL 1.16).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from data.packing import Item, empty_batch
from data.types import Prompt
from kernels.linear_kl import Head, linear_kl_loss
from losses.types import Metrics
from rollout.engine import Completion, EngineSource, finished
from rollout.rewards.table import RewardTable
from trainer.config.distill import OpdConfig
from trainer.config.groups import PolicyGradientConfig
from trainer.methods.grpo import backward, logps_at_start, policy_loss
from trainer.metrics.metrics import MetricSums
from trainer.policy.logps import Policy, causal_lm, head_of, predictor_states
from trainer.policy.sharding import final_passes
from trainer.rl.groups import Rollout
from trainer.rl.minibatch import Advantages, MicroBatch, MiniBatch
from trainer.rl.mixed_source import MixedSource, rows_of
from trainer.rl.rollouts import Rollouts, open_rewards
from trainer.rl.teacher import CrossTeacher, Teacher, fill_spans, load_teacher
from trainer.run.run import open_run
from trainer.run.training import Training, open_policy


@dataclass(frozen=True, kw_only=True)
class Config(OpdConfig):
    """On-policy distillation: sample, compare the tokens with a teacher, pull the student to it."""


def train(cfg: Config) -> None:
    with open_run(cfg, cfg.run.method) as run:
        rewards = open_rewards(cfg, run) if cfg.reward.reward_funcs else NoRewards()
        policy = open_policy(cfg, with_reference=cfg.has_reference)
        teacher = run.keep(open_teacher(cfg, policy))
        if isinstance(teacher, CrossTeacher):
            run.note(
                f"teacher={cfg.distill.teacher}: another tokenizer, compared by spans of text (docs/distillation.md)"
            )
        rollouts = Rollouts(run, cfg, policy, rewards, **given_completions(cfg, policy))
        teacher.read_prompts(rollouts.prompts)  # --teacher-prompt
        training = Training(run, cfg, policy, rollouts, moving=cfg.moving_teacher)  # --teacher-update-rate
        for rollout in training.batches():
            spans: dict[str, list[list[float]]] = {}
            if cfg.distill.jsd_beta is None:
                logps, spans = teacher.compare(rollout.groups)  # spans: of a CrossTeacher
                advantage: Advantages = teacher_advantage(cfg, rollouts, rollout, logps)
            else:  # --jsd-beta: the whole distribution needs no advantage
                advantage = torch.zeros(len(rollout.completions))
                items = teacher.items(rollout.groups)
            batches = rollouts.pack(rollout, advantage, extra=spans)
            logps_at_start(cfg, policy, batches, rollouts.steps_per_batch)
            rollouts.keep_samples(rollout, minus_engine_logps(advantage, rollout))
            for batch in rollouts.updates(*batches):
                if spans:
                    fill_spans(cfg, policy, batch)
                if cfg.distill.jsd_beta is None:
                    sums = backward(cfg, policy, batch, loss=reverse_kl_loss)
                else:
                    sums = backward_jsd(cfg, policy, teacher, batch, [items[row] for row in batch.rows])
                training.clip_and_step(sums)
                training.log(sums, batch.computed_tokens)


def reverse_kl_loss(
    cfg: PolicyGradientConfig, t: MicroBatch, batch: MiniBatch, divisor: Tensor
) -> tuple[Tensor, Metrics]:
    """GRPO's loss with advantage teacher_logp - logp. On entry t.advantage is teacher_logp, plus weighted rewards.

    policy/reverse_kl is the k1 estimator: unbiased while the ratio is 1, and possibly negative for few tokens.
    """
    t.advantage = t.advantage - t.logp.detach()
    share = torch.ones_like(t.advantage)
    if "rest" in t.extra:  # of a CrossTeacher
        t.advantage, share = t.advantage - t.extra["rest"], t.extra["share"]
    loss, metrics = policy_loss(cfg, t, batch, divisor)
    return loss, {**metrics, "policy/reverse_kl": (-(t.advantage * share).sum(), len(t.advantage))}


def teacher_advantage(
    cfg: Config,
    rollouts: Rollouts,
    rollout: Rollout,
    teacher_logps: list[list[float]],  # for each completion, the teacher's log-prob of each id
) -> list[list[float]]:
    """The teacher's log-probs plus the weighted advantage of rewards; the loss subtracts the student's log-probs."""
    if not cfg.has_reward_advantage:
        return teacher_logps
    rewards = rollouts.advantage(rollout)  # (B,), or one number per id
    if isinstance(rewards, Tensor):
        rewards = [[x] * len(logps) for x, logps in zip(rewards.tolist(), teacher_logps, strict=True)]
    coef = cfg.distill.reward_coef  # --reward-coef
    both = zip(teacher_logps, rewards, strict=True)
    return [[logp + coef * x for logp, x in zip(logps, values, strict=True)] for logps, values in both]


def minus_engine_logps(advantage: Advantages, rollout: Rollout) -> Advantages:
    """For samples.jsonl: subtract the engine's log-probs, which are the student's."""
    if isinstance(advantage, Tensor):
        return advantage
    both = zip(advantage, rollout.completions, strict=True)
    return [[x - logp for x, logp in zip(values, c.logps, strict=True)] for values, c in both]


def open_teacher(cfg: Config, policy: Policy) -> Any:
    """A Teacher in process, or with --teacher-url a TeacherServer."""
    if cfg.distill.teacher_url is None:
        return load_teacher(cfg, policy)
    from trainer.rl.teacher_server import TeacherServer  # an edge

    return TeacherServer(cfg, policy)


def given_completions(cfg: Config, policy: Policy) -> dict[str, Any]:
    """--student-data-fraction: arguments of Rollouts that replace some sampled completions by given ones."""
    fraction = cfg.distill.student_data_fraction
    if fraction == 1:
        return {}
    return {
        "prompts": lambda specs: rows_of(cfg, policy, specs),
        "source": lambda engine, sampling: MixedSource(EngineSource(engine, sampling), fraction=fraction),
    }


def backward_jsd(
    cfg: OpdConfig, policy: Policy, teacher: Teacher, batch: MiniBatch, items: Sequence[Item]
) -> MetricSums:
    """Gradients of the divergence between whole distributions, averaged over all trained tokens of the step.

    `items` are the teacher's sequences: for each completion of the batch, the teacher's prompt and the same ids.
    """
    sums, lm, count = MetricSums(), causal_lm(policy.model), batch.num_tokens.clamp(min=1)
    for mb in final_passes(policy, batch.batches or [empty_batch(policy.row_multiple).to(policy.device)]):
        teacher_states = teacher.hidden([items[row] for row in mb.rows])  # first: may be a pass of the same model
        head, teacher_head = Head(**head_of(lm)), teacher.head()
        vocab = min(len(head.weight), len(teacher_head.weight))  # padding rows beyond the tokenizer may differ
        out = linear_kl_loss(
            predictor_states(policy, lm, mb), head.first(vocab), teacher_states, teacher_head.first(vocab),
            beta=cfg.distill.jsd_beta, temperature=cfg.temperature,
        )  # fmt: skip
        total = out.loss / count
        total.backward()
        sums.add({"policy/jsd": (out.divergence.sum(), len(mb.target)), "loss/total": (total.detach(), 0)})
    share = torch.where(batch.num_tokens > 0, batch.rank_tokens / count, 1.0)  # sums to 1 over ranks
    sums.add({"loss/total": (torch.zeros_like(count), share)})
    return sums


class NoRewards:
    """Stand-in for reward functions: distillation needs none."""

    names: list[str] = []
    reads_ids = False

    def submit(self, prompts: Sequence[Prompt], completions: Sequence[Completion], *, step: int) -> Future[RewardTable]:
        values: list[list[float | None]] = [[] for _ in completions]
        return finished(RewardTable(names=[], weights=[], values=values, totals=[None] * len(completions)))

    def metrics(self) -> dict[str, float]:
        return {}
