"""SFT: imitate demonstrations by the negative log-likelihood of their trained tokens.

    examples -> pack -> (logps -> loss -> backward)* -> clip and step -> log

Shapes: n = any slice of the trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from data.chat import ROLES, Trained
from data.command.checks import reject_unused
from data.command.flags import Common
from data.errors import UserError
from data.packing import Batch, Item
from data.rows.held_out import train_and_held_out
from data.rows.sft import load_examples
from data.types import Example
from kernels.linear_logprob import TokenLogps
from losses.types import Metrics
from trainer.config.blocks import Flat, MethodMemory, OptimConfig, check_evaluation
from trainer.metrics.metrics import MetricSums
from trainer.offline.config import OfflineConfig
from trainer.offline.rows import Rows, pack_items, read_rows, rows_of_this_rank
from trainer.parallel.comm import all_count, all_sum
from trainer.policy.logps import Policy, token_logps, token_loss
from trainer.policy.sharding import final_passes
from trainer.run.run import open_run
from trainer.run.training import Training, open_policy


@dataclass(frozen=True, kw_only=True)
class Config(OfflineConfig):
    """Supervised fine-tuning: imitate the assistant turns or completions of the data."""

    memory: ClassVar[MethodMemory] = MethodMemory("one pass")
    rows: ClassVar[str] = "sft"
    lora_learning_rate: ClassVar[float] = 2e-4  # TRL's guide to PEFT, axolotl's LoRA examples; all weights: TRL

    optim: Flat[OptimConfig] = field(default_factory=lambda: OptimConfig(learning_rate=2e-5))

    max_length: Common[int] = 1024
    """Maximum tokens per row. Longer rows are truncated on the right; the count is logged."""
    long_rows: Literal["truncate", "drop"] = "truncate"
    """Rows longer than max_length: truncate or drop them."""
    sft_loss: Literal["nll", "dft"] = "nll"
    (
        "Token loss. nll: negative log-likelihood; dft: the same weighted by the token's probability, without gradient "
        "through the weight (arXiv:2508.05629)."
    )
    roles_to_train: tuple[str, ...] = ("assistant",)
    """Roles whose messages are trained."""
    train_on_inputs: bool = False
    """Also train the messages of all other roles, and the prompts of plain text."""
    train_on_eos: Literal["turn", "all", "last", "none"] = "turn"
    """Trained end-of-turn tokens: of trained turns (turn), all turns, the last trained turn, or none."""

    def __post_init__(self) -> None:
        check_evaluation(self.data, self.run)
        for role in self.roles_to_train:
            if role not in ROLES:
                raise UserError(f"roles_to_train={role}: unknown role; use {', '.join(ROLES)}")
        if not self.roles_to_train:
            raise UserError("roles_to_train is empty, so nothing would be trained; name a role, such as assistant")
        if self.train_on_inputs:
            reject_unused(self, "with train_on_inputs=True, which trains all roles", ("roles_to_train",))
        if self.max_length < 2:
            raise UserError(f"max_length={self.max_length}: must be 2 or more; nothing predicts the first token")


def train(cfg: Config) -> None:
    with open_run(cfg, cfg.run.method) as run:
        policy = open_policy(cfg)
        examples, held_out = train_and_held_out(cfg.data, cfg.run.seed, partial(examples_of, cfg, policy))
        held_out = rows_of_this_rank(held_out[: cfg.data.max_eval_rows])
        training = Training(run, cfg, policy, Rows(cfg, examples), evaluate=partial(evaluate, cfg, policy, held_out))
        for batch in training.steps():  # this rank's examples
            micro_batches = pack(cfg, policy, batch, cfg.run.gradient_accumulation_steps)
            sums = backward(policy, micro_batches, cfg.sft_loss)
            training.clip_and_step(sums)
            training.log(sums, sum(mb.num_tokens for mb in micro_batches))


def examples_of(cfg: Config, policy: Policy, specs: tuple[str, ...]) -> Sequence[Example]:
    trained = Trained(cfg.roles_to_train, cfg.train_on_eos, cfg.train_on_inputs)
    limits = {"max_length": cfg.max_length, "long_rows": cfg.long_rows}
    return read_rows(load_examples, cfg, policy, specs, **limits, trained=trained)


def pack(cfg: Config, policy: Policy, examples: list[Example], accumulation: int) -> list[Batch]:
    items = [Item(ids=example.ids, mask=example.mask) for example in examples]
    return pack_items(cfg.run, policy, items, accumulation=accumulation)


def token_losses(logp: Tensor, kind: str) -> Tensor:  # (n,) -> (n,)
    if kind == "dft":  # --sft-loss dft: weighted by the token's own probability, without gradient (arXiv:2508.05629)
        return -(logp.detach().exp() * logp)
    return -logp


def backward(policy: Policy, micro_batches: list[Batch], kind: str = "nll") -> MetricSums:
    """Accumulate the gradients of one optimizer step: the sum over all trained tokens, divided once by their number."""
    num_tokens = all_sum(torch.full((), float(sum(len(mb.target) for mb in micro_batches)), device=policy.device))
    sums = MetricSums()

    def loss_of(tokens: TokenLogps, rows: Tensor) -> tuple[Tensor, Metrics]:  # of a slice, inside the head pass
        loss, count = token_losses(tokens.logp, kind).sum(), len(rows)
        metrics: Metrics = {"loss/total": (loss, count), f"loss/{kind}": (loss, count)}
        if kind != "nll":
            metrics["loss/nll"] = (-tokens.logp.sum(), count)
        return loss / num_tokens.clamp(min=1), {**metrics, "policy/entropy": (tokens.entropy.sum(), count)}

    for mb in final_passes(policy, micro_batches):
        total, pieces = token_loss(policy, mb, loss_of)
        total.backward()
        for metrics in pieces:
            sums.add(metrics)
    return sums


def evaluate(cfg: Config, policy: Policy, examples: list[Example]) -> dict[str, float]:
    """Mean negative log-likelihood per trained token of held-out examples."""
    sums = MetricSums()
    for mb in pack(cfg, policy, examples, accumulation=1):
        sums.add({"eval/nll": (-token_logps(policy, mb).logp.sum(), len(mb.target))})
    return {**sums.means(), "eval/rows": all_count(len(examples))}
