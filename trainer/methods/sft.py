"""SFT: imitate demonstrations; the negative log-likelihood of their trained tokens.

examples -> pack -> (logps -> loss -> backward)* -> clip and step -> log
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from data.loader import Loader
from data.packing import Batch, Item, make_batches
from data.sft import load_examples
from data.types import Example
from kernels.linear_logprob import TokenLogps
from losses.sft import sft_loss
from trainer.config import DataConfig, Flat, LoraConfig, ModelConfig, OptimConfig, RunConfig, check_evaluation
from trainer.counters import Counters, Timer
from trainer.dist import all_sum, pick_device
from trainer.metrics import MetricSums
from trainer.model import Policy, load_policy, token_logps, token_loss
from trainer.optim import build_optimizer, clip_and_step, total_loss
from trainer.run import open_run


@dataclass(frozen=True, kw_only=True)
class Config:
    """Supervised fine-tuning: imitate the assistant turns or completions of the data."""

    model: Flat[ModelConfig]
    data: Flat[DataConfig]
    run: Flat[RunConfig] = field(default_factory=RunConfig)
    optim: Flat[OptimConfig] = field(default_factory=lambda: OptimConfig(learning_rate=2e-5))
    lora: LoraConfig = field(default_factory=LoraConfig)

    max_length: int = 1024
    """Tokens per example; what is longer is cut on the right, and counted."""

    def __post_init__(self) -> None:
        check_evaluation(self.data, self.run)
        if self.max_length < 2:
            raise ValueError(f"max_length={self.max_length}: must be 2 or more, nothing predicts the first token")


def train(cfg: Config) -> None:
    with open_run(cfg, cfg.run.method) as run:
        policy = load_policy(cfg.model, cfg.lora, pick_device(), with_reference=False)
        examples = examples_of(cfg, policy, cfg.data.data)
        held_out = examples_of(cfg, policy, cfg.data.eval_data)[: cfg.data.max_eval_rows]
        loader = Loader(examples, batch_size=cfg.run.sequences_per_step, seed=cfg.run.seed)
        total_steps = cfg.run.total_steps(loader.rows_per_epoch, cfg.run.sequences_per_step)
        optimizer, schedule = build_optimizer(policy.model, cfg.optim, total_steps)
        counters = Counters()
        state = {"loader": loader, "counters": counters}
        run.begin(total_steps, f"sft {cfg.model.model}")
        step = run.restore(policy, optimizer, schedule, state)
        if step == 0 and held_out:
            run.log(0, evaluate(cfg, policy, held_out))

        while step < total_steps:
            step += 1
            timer = Timer()
            batch = loader.next()
            micro_batches = pack(cfg, policy, batch, cfg.run.gradient_accumulation_steps)
            learning_rate = schedule.get_last_lr()[0]
            sums = backward(policy, micro_batches)
            where = f"step {step}, rank 0, rows {', '.join(example.source for example in batch)}"
            grad_norm = clip_and_step(policy.model, optimizer, schedule, cfg.optim.max_grad_norm, where)
            num_tokens = sum(mb.num_tokens for mb in micro_batches)
            timer.lap("train_s")
            counters.prompts += len(batch)
            counters.tokens += num_tokens
            metrics = {
                **sums.means(),
                "optim/grad_norm": grad_norm,
                "optim/lr": learning_rate,
                "data/epoch": loader.epoch,
                **counters.metrics(),
                **timer.metrics(num_tokens),
            }
            if held_out and cfg.run.eval_due(step, total_steps):
                metrics |= evaluate(cfg, policy, held_out)
            run.log(step, metrics)
            run.maybe_save(step, policy, optimizer, schedule, state)
        run.finish(policy)


def examples_of(cfg: Config, policy: Policy, specs: tuple[str, ...]) -> list[Example]:
    if not specs:
        return []
    return load_examples(
        specs,
        policy.tokenizer,
        data_format=cfg.data.data_format,
        system_prompt=cfg.model.system_prompt,
        max_length=cfg.max_length,
        context_length=policy.context_length,
        cfg=cfg,
    )


def pack(cfg: Config, policy: Policy, examples: list[Example], accumulation: int) -> list[Batch]:
    items = [Item(ids=example.ids, mask=example.mask) for example in examples]
    batches = make_batches(
        items,
        accumulation=accumulation,
        max_tokens=cfg.run.max_tokens_per_micro_batch,
        packing=cfg.run.packing,
        multiple=policy.row_multiple,
    )
    return [batch.to(policy.device) for batch in batches]


def backward(policy: Policy, micro_batches: list[Batch]) -> MetricSums:
    """Gradients of one optimizer step: the sum over all trained tokens, divided once by their number."""
    num_tokens = all_sum(torch.tensor(float(sum(len(mb.target) for mb in micro_batches)), device=policy.device))
    sums = MetricSums()

    def loss_of(tokens: TokenLogps, rows: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        out = sft_loss(tokens.logp, torch.ones_like(rows, dtype=torch.bool))
        nll = out.terms["nll"]
        metrics = {
            "loss/total": (nll.sum.detach(), nll.count),
            "loss/nll": (nll.sum.detach(), nll.count),
            "policy/entropy": (tokens.entropy.detach().sum(), nll.count),
        }
        return total_loss(out, {"nll": num_tokens}), metrics

    for mb in micro_batches:
        total, parts = token_loss(policy, mb, loss_of)
        total.backward()
        for metrics in parts:
            sums.add(metrics)
    return sums


@torch.no_grad()
def evaluate(cfg: Config, policy: Policy, examples: list[Example]) -> dict[str, float]:
    """Mean negative log-likelihood per trained token of held-out examples."""
    sums = MetricSums()
    policy.model.eval()
    for mb in pack(cfg, policy, examples, accumulation=1):
        nll = sft_loss(token_logps(policy, mb).logp, torch.ones_like(mb.target, dtype=torch.bool)).terms["nll"]
        sums.add({"eval/nll": (nll.sum, nll.count)})
    policy.model.train()
    return {**sums.means(), "eval/rows": len(examples)}
