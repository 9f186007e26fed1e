"""ORPO: likelihood of the chosen response and an odds ratio against the rejected one, in one stage, no reference.

    pairs -> pack -> (logps -> sums over responses -> odds ratio + likelihood -> backward)* -> clip and step -> log

Hong, Lee and Thorne 2024 (arXiv:2403.07691). As published, the likelihood covers prompt and chosen response.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch

from data.format_options import FormatOptions
from data.types import Pair
from losses.reference_free import FreeScores, orpo_loss
from trainer.config.blocks import (
    DataConfig,
    Flat,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    ResponseConfig,
    RunConfig,
    check_evaluation,
)
from trainer.metrics.metrics import MetricSums
from trainer.offline.loop import Offline, rows_of_this_rank
from trainer.offline.pairs import PairBatch, pack_pairs, pair_evaluation, pairs_of
from trainer.parallel.comm import all_sum, pick_device
from trainer.policy.load import load_policy
from trainer.policy.logps import Policy, token_logps
from trainer.policy.optim import term_metrics, total_loss
from trainer.policy.sharding import parallelize
from trainer.run.run import open_run


@dataclass(frozen=True, kw_only=True)
class Config:
    """Odds ratio preference optimisation: fine-tuning and preference in one stage, without a reference."""

    model: Flat[ModelConfig]
    data: Flat[DataConfig]
    response: Flat[ResponseConfig] = field(default_factory=ResponseConfig)
    run: Flat[RunConfig] = field(default_factory=RunConfig)
    optim: Flat[OptimConfig] = field(default_factory=lambda: OptimConfig(learning_rate=8e-6))
    lora: LoraConfig = field(default_factory=LoraConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    format: FormatOptions = field(default_factory=FormatOptions)

    orpo_alpha: float = 0.1
    """Weight of the odds ratio term; lambda in the paper, beta in TRL."""
    nll_on_prompt: bool = True
    """Take the likelihood over prompt and chosen response, as published; --no-nll-on-prompt over the response alone."""

    def __post_init__(self) -> None:
        check_evaluation(self.data, self.run)
        if not self.orpo_alpha >= 0:
            raise ValueError(f"orpo_alpha={self.orpo_alpha}: must be 0 or above")


def train(cfg: Config) -> None:
    with open_run(cfg, cfg.run.method) as run:
        policy = parallelize(cfg.parallel, load_policy(cfg.model, cfg.lora, pick_device(), with_reference=False))
        pairs = pairs_of(cfg, policy, cfg.data.data)
        held_out = rows_of_this_rank(pairs_of(cfg, policy, cfg.data.eval_data)[: cfg.data.max_eval_rows])
        evaluate = partial(evaluate_pairs, cfg, policy, held_out)
        offline = Offline(run, cfg, policy, pairs)
        offline.begin(evaluate)
        for batch in offline.steps():
            micro_batches = pack(cfg, policy, batch, cfg.run.gradient_accumulation_steps)
            sums = run_pairs(cfg, policy, micro_batches, train=True)
            offline.take_step(sums)
            offline.log_and_save(sums, sum(mb.batch.num_tokens for mb in micro_batches), evaluate)
        run.finish(policy)


def pack(cfg: Config, policy: Policy, pairs: list[Pair], accumulation: int) -> list[PairBatch]:
    return pack_pairs(cfg.run, policy, pairs, accumulation=accumulation, train_prompt=cfg.nll_on_prompt)


def run_pairs(cfg: Config, policy: Policy, micro_batches: list[PairBatch], *, train: bool) -> MetricSums:
    """Loss, metrics and (train) gradients over all micro-batches of one step, each term divided by its global count."""
    chosen = torch.cat([mb.chosen() for mb in micro_batches]).float()  # (trained tokens of the step,)
    num_pairs, num_tokens = all_sum(
        torch.stack([chosen.new_tensor(sum(len(mb.pairs) for mb in micro_batches)), chosen.sum()])
    )
    sums = MetricSums()
    for mb in micro_batches:
        logp, entropy = token_logps(policy, mb.batch)  # (N,), (N,)
        scores = FreeScores(*mb.sums(logp).T, *mb.lengths.T)
        out = orpo_loss(scores, -logp[mb.chosen()].sum(), mb.chosen().sum(), alpha=cfg.orpo_alpha)
        total = total_loss(out, {"nll": num_tokens, "odds": num_pairs})
        if train:
            total.backward()
        sums.add({**out.metrics, **term_metrics(out)})
        sums.add({"loss/total": (total * num_pairs, len(mb.pairs)), "policy/entropy": (entropy.sum(), len(entropy))})
    return sums


@torch.no_grad()
def evaluate_pairs(cfg: Config, policy: Policy, pairs: list[Pair]) -> dict[str, float]:
    """The same loss and metrics on held-out pairs, as one step over all of them."""
    if not pairs and not cfg.data.eval_data:  # with eval_data, a rank without rows still takes part
        return {}
    policy.model.eval()
    sums = run_pairs(cfg, policy, pack(cfg, policy, pairs, accumulation=1), train=False)
    policy.model.train()
    return pair_evaluation(sums, len(pairs))
