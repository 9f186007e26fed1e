"""SFT: imitate demonstrations; the negative log-likelihood of their trained tokens.

examples -> pack -> (logps -> loss -> backward)* -> clip and step -> log
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from data.chat import ROLES, Trained
from data.command.flags import Common
from data.errors import UserError
from data.packing import Batch, Item
from data.rows.held_out import train_and_held_out
from data.rows.sft import load_examples
from data.types import Example
from kernels.linear_logprob import TokenLogps
from losses.sft import dft_loss, sft_loss
from losses.types import LossOut
from trainer.config.blocks import Flat, MethodMemory, OptimConfig, check_evaluation
from trainer.config.checks import reject_unused
from trainer.metrics.metrics import MetricSums
from trainer.offline.config import OfflineConfig
from trainer.offline.loop import Offline, pack_items, read_rows, rows_of_this_rank
from trainer.parallel.comm import all_count, all_sum, pick_device
from trainer.policy.load import load_policy
from trainer.policy.logps import Policy, token_logps, token_loss
from trainer.policy.optim import term_metrics, total_loss
from trainer.policy.sharding import final_passes, parallelize
from trainer.run.run import open_run

LOSSES = {"nll": sft_loss, "dft": dft_loss}


@dataclass(frozen=True, kw_only=True)
class Config(OfflineConfig):
    """Supervised fine-tuning: imitate the assistant turns or completions of the data."""

    memory: ClassVar[MethodMemory] = MethodMemory("one pass")
    rows: ClassVar[str] = "sft"
    lora_learning_rate: ClassVar[float] = 2e-4  # TRL's guide to PEFT, axolotl's LoRA examples; all weights: TRL

    optim: Flat[OptimConfig] = field(default_factory=lambda: OptimConfig(learning_rate=2e-5))

    max_length: Common[int] = 1024
    """Tokens per example; what is longer is cut on the right, and counted."""
    sft_loss: Literal["nll", "dft"] = "nll"
    (
        "Loss of a token: nll, its negative log-likelihood; dft, the same weighted by the token's own probability, "
        "without gradient through the weight (arXiv:2508.05629)."
    )
    roles_to_train: tuple[str, ...] = ("assistant",)
    """Roles whose messages are trained, in conversations."""
    train_on_inputs: bool = False
    """Train the messages of all roles, and the prompts of plain text, not only what answers them."""
    train_on_eos: Literal["turn", "all", "last", "none"] = "turn"
    """End-of-turn tokens that are trained: those of trained turns, of all turns, of the last trained turn, or none."""

    def __post_init__(self) -> None:
        check_evaluation(self.data, self.run)
        for role in self.roles_to_train:
            if role not in ROLES:
                raise UserError(f"roles_to_train={role}: is unknown; use {', '.join(ROLES)}")
        if not self.roles_to_train:
            raise UserError("roles_to_train: empty, so nothing would be trained; name a role, such as assistant")
        if self.train_on_inputs:
            reject_unused(self, "with train_on_inputs=True, which trains all roles; leave one out", ("roles_to_train",))
        if self.max_length < 2:
            raise UserError(f"max_length={self.max_length}: must be 2 or more, nothing predicts the first token")


def train(cfg: Config) -> None:
    with open_run(cfg, cfg.run.method) as run:
        policy = parallelize(cfg.parallel, load_policy(cfg.model, cfg.lora, pick_device(), with_reference=False))
        examples, held_out = train_and_held_out(cfg.data, cfg.run.seed, partial(examples_of, cfg, policy))
        held_out = rows_of_this_rank(held_out[: cfg.data.max_eval_rows])
        offline = Offline(run, cfg, policy, examples)
        evaluate_now = partial(evaluate, cfg, policy, held_out)
        offline.begin(evaluate_now)
        for batch in offline.steps():
            micro_batches = pack(cfg, policy, batch, cfg.run.gradient_accumulation_steps)
            sums = backward(policy, micro_batches, LOSSES[cfg.sft_loss])
            offline.take_step(sums)
            offline.log_and_save(sums, sum(mb.num_tokens for mb in micro_batches), evaluate_now)
        run.finish(policy)


def examples_of(cfg: Config, policy: Policy, specs: tuple[str, ...]) -> list[Example]:
    trained = Trained(cfg.roles_to_train, cfg.train_on_eos, cfg.train_on_inputs)
    return read_rows(load_examples, cfg, policy, specs, max_length=cfg.max_length, trained=trained)


def pack(cfg: Config, policy: Policy, examples: list[Example], accumulation: int) -> list[Batch]:
    items = [Item(ids=example.ids, mask=example.mask) for example in examples]
    return pack_items(cfg.run, policy, items, accumulation=accumulation)


def backward(
    policy: Policy, micro_batches: list[Batch], loss: Callable[[Tensor, Tensor], LossOut] = sft_loss
) -> MetricSums:
    """Gradients of one optimizer step: the sum over all trained tokens, divided once by their number."""
    num_tokens = all_sum(torch.full((), float(sum(len(mb.target) for mb in micro_batches)), device=policy.device))
    sums = MetricSums()

    def loss_of(tokens: TokenLogps, rows: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        out = loss(tokens.logp, torch.ones_like(rows, dtype=torch.bool))
        ((name, term),) = out.terms.items()
        metrics = {
            "loss/total": (term.sum.detach(), term.count),
            **term_metrics(out),
            **out.metrics,
            "policy/entropy": (tokens.entropy.detach().sum(), term.count),
        }
        return total_loss(out, {name: num_tokens}), metrics

    for mb in final_passes(policy, micro_batches):
        total, parts = token_loss(policy, mb, loss_of)
        total.backward()
        for metrics in parts:
            sums.add(metrics)
    return sums


def evaluate(cfg: Config, policy: Policy, examples: list[Example]) -> dict[str, float]:
    """Mean negative log-likelihood per trained token of held-out examples."""
    if not cfg.data.holds_out:
        return {}
    sums = MetricSums()
    for mb in pack(cfg, policy, examples, accumulation=1):
        nll = sft_loss(token_logps(policy, mb).logp, torch.ones_like(mb.target, dtype=torch.bool)).terms["nll"]
        sums.add({"eval/nll": (nll.sum, nll.count)})
    return {**sums.means(), "eval/rows": all_count(len(examples))}
