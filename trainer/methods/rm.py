"""Reward model: one number per answer, higher for the answer people preferred (Bradley-Terry).

pairs -> pack -> (scores -> loss -> backward)* -> clip and step -> log
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from data.command.flags import Common
from data.errors import UserError
from data.format_options import FormatOptions
from data.packing import Batch, to_device
from data.rows.held_out import train_and_held_out
from data.rows.pairs import load_pairs
from data.types import Pair
from losses.reward_model import bradley_terry
from losses.types import LossOut
from trainer.config.blocks import Flat, MethodMemory, OptimConfig
from trainer.metrics.metrics import MetricSums
from trainer.offline.config import OfflineConfig
from trainer.offline.rows import Rows, pack_items, read_rows, rows_of_this_rank
from trainer.parallel.comm import all_count, all_sum, pick_device
from trainer.policy.heads import load_scorer, marked_last, scores_at
from trainer.policy.logps import Policy, causal_lm
from trainer.policy.optim import term_metrics, total_loss
from trainer.policy.sharding import final_passes, parallelize
from trainer.run.run import open_run
from trainer.run.training import Training


@dataclass(frozen=True, kw_only=True)
class Config(OfflineConfig):
    """Reward model from preference pairs; its output is a reward for GRPO, --reward-funcs model:RUN."""

    memory: ClassVar[MethodMemory] = MethodMemory("none", sequences=2)
    rows: ClassVar[str] = "pairs"
    lora_learning_rate: ClassVar[float] = 1e-4  # TRL's reward modelling example, for both rates

    optim: Flat[OptimConfig] = field(default_factory=lambda: OptimConfig(learning_rate=1e-5))
    format: FormatOptions = field(default_factory=FormatOptions)

    max_length: Common[int] = 1024
    """Maximum tokens of prompt and response. Pairs with a longer side are skipped; the count is logged."""
    bad_rows: Common[Literal["error", "skip"]] = "error"
    """error: stop at the first broken row and name it; skip: skip broken rows and log the count."""
    center_rewards_coefficient: Common[float | None] = None
    """Weight of (chosen + rejected)^2, which centers scores at 0; 0.01 is typical. None: off."""

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise UserError(f"max_length={self.max_length}: must be 2 or more (a prompt and a response)")
        if self.center_rewards_coefficient is not None and not self.center_rewards_coefficient > 0:
            raise UserError(f"center_rewards_coefficient={self.center_rewards_coefficient}: must be above 0, or None")


def train(cfg: Config) -> None:
    with open_run(cfg, cfg.run.method) as run:
        scorer = parallelize(cfg.parallel, load_scorer(cfg.model, cfg.lora, pick_device(), kind="sequence"))
        # Read when the model is used as a reward.
        causal_lm(scorer.model).config.strop = {
            "system_prompt": cfg.model.system_prompt, "chat_template_kwargs": cfg.model.chat_template_kwargs,
        }  # fmt: skip
        pairs, held_out = train_and_held_out(cfg.data, cfg.run.seed, partial(pairs_of, cfg, scorer))
        held_out = rows_of_this_rank(held_out[: cfg.data.max_eval_rows])
        training = Training(run, cfg, scorer, Rows(cfg, pairs), evaluate=partial(evaluate, cfg, scorer, held_out))
        for batch in training.steps():  # this rank's pairs
            micro_batches = pack(cfg, scorer, batch, cfg.run.gradient_accumulation_steps)
            sums = backward(cfg, scorer, micro_batches, batch)
            training.clip_and_step(sums)
            training.log(sums, sum(mb.num_tokens for mb in micro_batches))


def pairs_of(cfg: Config, scorer: Policy, specs: tuple[str, ...]) -> Sequence[Pair]:
    """Pairs whose sides both fit; none is truncated."""
    return read_rows(
        load_pairs, cfg, scorer, specs, max_length=cfg.max_length, long_rows="drop", bad_rows=cfg.bad_rows,
        options=cfg.format, margins=True,
    )  # fmt: skip


def pack(cfg: Config, scorer: Policy, pairs: list[Pair], accumulation: int) -> list[Batch]:
    """Both sides of a pair in one micro-batch, chosen first, each scored at its last token."""
    sides = [p.prompt_ids + side for p in pairs for side in (p.chosen_ids, p.rejected_ids)]
    items = [marked_last(ids) for ids in sides]
    return pack_items(cfg.run, scorer, items, accumulation=accumulation, together=2)


def loss_of(cfg: Config, scorer: Policy, mb: Batch, pairs: list[Pair]) -> LossOut:
    scores = scores_at(scorer, mb).view(-1, 2)  # (B, 2) chosen, rejected
    margin = margins([pairs[row // 2] for row in mb.rows[::2]], scores)
    out = bradley_terry(scores[:, 0], scores[:, 1], margin, center_coefficient=cfg.center_rewards_coefficient)
    del out.metrics["reward/mean"]  # half of chosen + rejected; elsewhere the name means a policy's reward
    return out


def margins(pairs: list[Pair], like: Tensor) -> Tensor | None:
    """(B,) margins from the data, 0 for pairs without a margin; None if no pair has one."""
    if all(pair.margin is None for pair in pairs):
        return None
    return to_device(torch.tensor([pair.margin or 0.0 for pair in pairs], dtype=like.dtype), like.device)


def backward(cfg: Config, scorer: Policy, micro_batches: list[Batch], pairs: list[Pair]) -> MetricSums:
    """Gradients of one optimizer step: the sum over all pairs, divided once by their number."""
    num_pairs = all_sum(torch.full((), float(len(pairs)), device=scorer.device))
    sums = MetricSums()
    for mb in final_passes(scorer, micro_batches):
        out = loss_of(cfg, scorer, mb, pairs)
        total = total_loss(out, dict.fromkeys(out.terms, num_pairs))
        total.backward()
        sums.add({"loss/total": (total * num_pairs, len(mb.rows) // 2), **term_metrics(out), **out.metrics})
    return sums


def evaluate(cfg: Config, scorer: Policy, pairs: list[Pair]) -> dict[str, float]:
    """Loss, accuracy and margin on held-out pairs."""
    sums = MetricSums()
    for mb in pack(cfg, scorer, pairs, accumulation=1):
        out = loss_of(cfg, scorer, mb, pairs)
        undivided = total_loss(out, dict.fromkeys(out.terms, torch.ones(())))
        sums.add({"eval/loss": (undivided, len(mb.rows) // 2)})
        sums.add({f"eval/{name}": value for name, value in out.metrics.items()})
    return {**sums.means(), "eval/rows": all_count(len(pairs))}
