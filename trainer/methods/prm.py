"""Process reward model: is each step of a solution right, judged at the token that ends it.

solutions -> pack -> (logits -> loss -> backward)* -> clip and step -> log
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
from data.packing import Batch, Item, to_device
from data.rows.held_out import train_and_held_out
from data.rows.stepwise import load_steps
from data.types import Steps
from losses.reward_model import UNLABELLED, confusion, macro_f1, stepwise_loss
from trainer.config.blocks import Flat, MethodMemory, OptimConfig
from trainer.metrics.metrics import MetricSums
from trainer.offline.config import OfflineConfig
from trainer.offline.rows import Rows, pack_items, read_rows, rows_of_this_rank
from trainer.parallel.comm import all_count, all_sum, pick_device
from trainer.policy.heads import load_scorer, scores_at
from trainer.policy.logps import Policy, causal_lm
from trainer.policy.optim import total_loss
from trainer.policy.sharding import final_passes, parallelize
from trainer.run.run import open_run
from trainer.run.training import Training


@dataclass(frozen=True, kw_only=True)
class Config(OfflineConfig):
    """Process reward model from solutions whose steps are labelled; a reward for GRPO, --reward-funcs prm:RUN."""

    memory: ClassVar[MethodMemory] = MethodMemory("none")
    rows: ClassVar[str] = "stepwise"
    # Ten times the rate for all weights, which is TRL's (LoRA Without Regret).
    lora_learning_rate: ClassVar[float] = 1e-4

    optim: Flat[OptimConfig] = field(default_factory=lambda: OptimConfig(learning_rate=1e-5))

    max_length: Common[int] = 1024
    """Maximum tokens per solution, including the prompt. Longer solutions are truncated, with their labels."""
    bad_rows: Common[Literal["error", "skip"]] = "error"
    """error: stop at the first broken row and name it; skip: skip broken rows and log the count."""
    max_completion_length: Common[int | None] = None
    """Maximum tokens of the steps, without the prompt. None: no separate limit."""
    step_separator: Common[str] = "\n"
    """Text appended to every step; a step is scored at its last token. Saved with the model."""
    train_on_last_step_only: Common[bool] = False
    """Train only the label of the last step. Evaluation uses all labels."""

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise UserError(f"max_length={self.max_length}: must be 2 or more (a prompt and a step)")
        if self.max_completion_length is not None and self.max_completion_length < 1:
            raise UserError(f"max_completion_length={self.max_completion_length}: must be 1 or more, or None")
        if not self.step_separator:
            raise UserError("step_separator is empty, so no token would end a step; set some text")


def train(cfg: Config) -> None:
    with open_run(cfg, cfg.run.method) as run:
        scorer = parallelize(cfg.parallel, load_scorer(cfg.model, cfg.lora, pick_device(), kind="token"))
        # Read when the model is used as a reward.
        causal_lm(scorer.model).config.strop = {
            "step_separator": cfg.step_separator, "system_prompt": cfg.model.system_prompt,
            "chat_template_kwargs": cfg.model.chat_template_kwargs,
        }  # fmt: skip
        read = partial(solutions_of, cfg, scorer, last_step_only=cfg.train_on_last_step_only)
        read_eval = partial(solutions_of, cfg, scorer, last_step_only=False)
        last_only = cfg.train_on_last_step_only
        solutions, held_out = train_and_held_out(cfg.data, cfg.run.seed, read, read_eval, read_again=last_only)
        held_out = rows_of_this_rank(held_out[: cfg.data.max_eval_rows])
        training = Training(run, cfg, scorer, Rows(cfg, solutions), evaluate=partial(evaluate, cfg, scorer, held_out))
        for batch in training.steps():  # this rank's solutions
            micro_batches = pack(cfg, scorer, batch, cfg.run.gradient_accumulation_steps)
            sums = backward(scorer, micro_batches, batch)
            training.clip_and_step(sums)
            training.log(sums, sum(mb.num_tokens for mb in micro_batches))


def solutions_of(cfg: Config, scorer: Policy, specs: tuple[str, ...], *, last_step_only: bool) -> Sequence[Steps]:
    return read_rows(
        load_steps, cfg, scorer, specs, step_separator=cfg.step_separator, max_length=cfg.max_length,
        max_completion_length=cfg.max_completion_length, last_step_only=last_step_only, bad_rows=cfg.bad_rows,
    )  # fmt: skip


def pack(cfg: Config, scorer: Policy, solutions: list[Steps], accumulation: int) -> list[Batch]:
    items = [Item(ids=s.ids, mask=[label != UNLABELLED for label in s.labels]) for s in solutions]
    return pack_items(cfg.run, scorer, items, accumulation=accumulation)


def labels_of(mb: Batch, solutions: list[Steps]) -> Tensor:  # (N,)
    """Labels of the marked tokens, in the batch's order."""
    labels = [label for row in mb.rows for label in solutions[row].labels if label != UNLABELLED]
    return to_device(torch.tensor(labels, dtype=torch.int64), mb.index.device)


def backward(scorer: Policy, micro_batches: list[Batch], solutions: list[Steps]) -> MetricSums:
    """Gradients of one optimizer step: the sum over all labelled steps, divided once by their number."""
    num_steps = all_sum(torch.full((), float(sum(len(mb.index) for mb in micro_batches)), device=scorer.device))
    sums = MetricSums()
    for mb in final_passes(scorer, micro_batches):
        out = stepwise_loss(scores_at(scorer, mb), labels_of(mb, solutions))
        total_loss(out, {"steps": num_steps}).backward()
        term = out.terms["steps"]
        sums.add({"loss/total": (term.sum, term.count), "loss/steps": (term.sum, term.count), **out.metrics})
    return sums


def evaluate(cfg: Config, scorer: Policy, solutions: list[Steps]) -> dict[str, float]:
    """Loss, accuracy per step, and macro F1 next to that of always predicting the more frequent label."""
    sums = MetricSums()
    matrix = torch.zeros(2, 2, dtype=torch.int64, device=scorer.device)  # steps by [label, predicted class]
    for mb in pack(cfg, scorer, solutions, accumulation=1):
        logits, labels = scores_at(scorer, mb), labels_of(mb, solutions)
        out = stepwise_loss(logits, labels)
        matrix += confusion(logits, labels)
        sums.add({"eval/loss": (out.terms["steps"].sum, out.terms["steps"].count)})
        sums.add({f"eval/{name}": value for name, value in out.metrics.items()})
    matrix = all_sum(matrix)
    majority = torch.zeros_like(matrix)
    majority[:, matrix.sum(dim=1).argmax()] = matrix.sum(dim=1)
    return {
        **sums.means(),
        "eval/reward/macro_f1": float(macro_f1(matrix)),
        "eval/reward/macro_f1_majority": float(macro_f1(majority)),
        "eval/rows": all_count(len(solutions)),
    }
