"""OPD, on-policy distillation: sample from the student, score its tokens with a teacher, pull the student to it.

    prompts -> generate -> teacher's log-probs -> pack -> (logps -> loss -> backward)* -> clip and step -> log

The reverse KL to the teacher on the student's own samples (Gu et al. 2023, arXiv:2306.08543; Agarwal et al. 2023,
arXiv:2306.13649). By default the sampled token alone is compared: its advantage is log teacher - log student, a dense
reward for each token, and the loss is that of a policy gradient (losses/distill.py). --jsd-beta compares the whole
next-token distributions by a generalised Jensen-Shannon divergence, whose two heads are walked in chunks
(kernels/linear_kl.py); then --student-data-fraction may mix in given completions, as in GKD.

The teacher is another model, a server, or the student's own start with another prompt: trainer/rl/teacher.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from data.packing import Item, empty_batch
from data.types import Prompt
from kernels.linear_kl import Head, linear_kl_loss
from rollout.engine import Completion, EngineSource
from rollout.rewards.table import RewardTable
from trainer.config.distill import OpdConfig
from trainer.methods.grpo import backward, score_at_start
from trainer.metrics.metrics import MetricSums
from trainer.policy.logps import Policy, causal_lm, head_of, predictor_states
from trainer.policy.sharding import final_passes
from trainer.rl.groups import GroupBatch
from trainer.rl.minibatch import MiniBatch
from trainer.rl.mixed_source import MixedSource, rows_of
from trainer.rl.session import Session
from trainer.rl.teacher import Teacher, open_teacher


@dataclass(frozen=True, kw_only=True)
class Config(OpdConfig):
    """On-policy distillation: sample, score the tokens with a teacher, pull the student to it."""


def train(cfg: Config) -> None:
    fraction = cfg.distill.student_data_fraction
    given = {
        "prompts": lambda s, specs: rows_of(cfg, s.policy, specs),
        "source": lambda s, sampling: MixedSource(EngineSource(s.engine, sampling), fraction=fraction),
    }
    with Session(
        cfg,
        frozen=lambda s: {"teacher": s.run.keep(open_teacher(cfg, s.policy))},
        rewards=None if cfg.reward.reward_funcs else lambda s: NoRewards(),
        **(given if fraction < 1 else {}),
    ) as s:
        teacher = s.frozen["teacher"]
        for batch in s.rollouts():
            if cfg.distill.jsd_beta is None:
                advantage = token_advantage(cfg, teacher.logps(batch.groups), s, batch)
            else:
                advantage = torch.zeros(len(batch.completions))  # the whole distribution needs none
                items = teacher.items(batch.groups)
            rollout = s.pack(batch, advantage)
            score_at_start(cfg, s.policy, rollout, s.steps_per_rollout)
            s.keep_samples(batch, shown(advantage, batch))
            for part in s.updates(*rollout):
                if cfg.distill.jsd_beta is None:
                    sums = backward(cfg, s.policy, part)
                else:
                    sums = backward_jsd(cfg, s.policy, teacher, part, [items[row] for row in part.rows])
                s.clip_and_step(sums, part)
                s.log(sums, part)


def token_advantage(
    cfg: Config,
    teacher: list[list[float]],  # for each completion, the teacher's log-prob of each id
    s: Session,
    batch: GroupBatch,
) -> list[list[float]]:
    """The teacher's log-probs, to which the usual advantage of rewards is added; the loss subtracts the student's."""
    if not cfg.has_reward_advantage:
        return teacher
    rewards = s.advantage(batch)  # (B,), or for each completion one per id
    coef, rows = cfg.distill.reward_coef, rewards
    if isinstance(rewards, Tensor):
        rows = [[x] * len(own) for x, own in zip(rewards.tolist(), teacher, strict=True)]
    return [[logp + coef * x for logp, x in zip(*both, strict=True)] for both in zip(teacher, rows, strict=True)]


def shown(advantage: Tensor | list[list[float]], batch: GroupBatch) -> Tensor | list[list[float]]:
    """For samples.jsonl: less the engine's log-probs, which are the student's."""
    if isinstance(advantage, Tensor):
        return advantage
    pairs = zip(advantage, batch.completions, strict=True)
    return [[x - logp for x, logp in zip(own, c.logps, strict=True)] for own, c in pairs]


def backward_jsd(cfg: Config, policy: Policy, teacher: Teacher, batch: MiniBatch, items: Sequence[Item]) -> MetricSums:
    """Gradients of the divergence between the whole distributions, averaged over all trained tokens of the step.

    `items` are what the teacher reads: for each completion of the batch, its own prompt and the same ids.
    """
    sums, lm, count = MetricSums(), causal_lm(policy.model), batch.total.tokens.clamp(min=1)
    nothing = torch.zeros_like(count)
    for mb in final_passes(policy, batch.batches or [empty_batch(policy.row_multiple).to(policy.device)]):
        theirs = teacher.hidden([items[row] for row in mb.rows])  # first: it may be a pass of the same sharded model
        head, their_head = Head(**head_of(lm)), teacher.head()
        vocab = min(len(head.weight), len(their_head.weight))  # rows beyond the tokenizer may differ in number
        out = linear_kl_loss(
            predictor_states(policy, lm, mb), head.first(vocab), theirs, their_head.first(vocab),
            beta=cfg.distill.jsd_beta, temperature=cfg.temperature,
        )  # fmt: skip
        total = out.loss / count
        total.backward()
        sums.add({"policy/jsd": (out.divergence.sum(), len(mb.target)), "loss/total": (total.detach(), nothing)})
    share = torch.where(batch.total.tokens > 0, batch.counts.tokens / count, 1.0)
    sums.add({"loss/total": (nothing, share)})  # adds up to 1 over ranks
    return sums


class NoRewards:
    """Distillation needs none."""

    names: list[str] = []

    def submit(self, prompts: Sequence[Prompt], completions: Sequence[Completion], *, step: int) -> Future[RewardTable]:
        future: Future[RewardTable] = Future()
        nothing = {"values": [[] for _ in completions], "totals": [None] * len(completions)}
        future.set_result(RewardTable(names=[], weights=[], **nothing))
        return future

    def metrics(self) -> dict[str, float]:
        return {}
