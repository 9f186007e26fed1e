"""ORPO: likelihood of the chosen response and an odds ratio against the rejected one, in one stage, no reference.

    pairs -> pack -> (logps -> sums over responses -> odds ratio + likelihood -> backward)* -> clip and step -> log

Hong, Lee and Thorne 2024 (arXiv:2403.07691). As published, the likelihood covers prompt and chosen response.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from data.command.checks import check_numbers
from data.command.flags import Common
from data.packing import to_device
from data.rows.held_out import train_and_held_out
from data.types import Pair
from losses.reference_free import FreeScores, orpo_loss
from losses.types import LossOut
from trainer.config.blocks import Flat, MethodMemory, OptimConfig
from trainer.metrics.metrics import MetricSums
from trainer.offline.config import PreferenceConfig
from trainer.offline.pairs import PairBatch, pack_pairs, pair_evaluation, pairs_of, sum_losses
from trainer.offline.rows import Rows, rows_of_this_rank
from trainer.parallel.comm import all_sum
from trainer.policy.logps import Policy
from trainer.run.run import open_run
from trainer.run.training import Training, open_policy


@dataclass(frozen=True, kw_only=True)
class Config(PreferenceConfig):
    """Odds ratio preference optimisation: fine-tuning and preference in one stage, without a reference."""

    memory: ClassVar[MethodMemory] = MethodMemory(sequences=2)
    rows: ClassVar[str] = "pairs"
    lora_learning_rate: ClassVar[float] = 8e-5  # TRL's ORPO example; all weights: the paper (2403.07691)

    optim: Flat[OptimConfig] = field(default_factory=lambda: OptimConfig(learning_rate=8e-6))

    orpo_alpha: Common[float] = 0.1
    """Weight of the odds ratio term (lambda in the paper, beta in TRL)."""
    nll_on_prompt: bool = True
    """Likelihood over prompt and chosen response, as published; --no-nll-on-prompt: over the response only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, {"0 or above": "orpo_alpha"})


def train(cfg: Config) -> None:
    with open_run(cfg, cfg.run.method) as run:
        policy = open_policy(cfg)
        pairs, held_out = train_and_held_out(cfg.data, cfg.run.seed, partial(pairs_of, cfg, policy))
        held_out = rows_of_this_rank(held_out[: cfg.data.max_eval_rows])
        evaluate = partial(evaluate_pairs, cfg, policy, held_out)
        training = Training(run, cfg, policy, Rows(cfg, pairs), evaluate=evaluate)
        for batch in training.steps():  # this rank's pairs
            micro_batches = pack(cfg, policy, batch, cfg.run.gradient_accumulation_steps)
            sums = run_pairs(cfg, policy, micro_batches, train=True)
            training.clip_and_step(sums)
            training.log(sums, sum(mb.batch.num_tokens for mb in micro_batches))


def pack(cfg: Config, policy: Policy, pairs: list[Pair], accumulation: int) -> list[PairBatch]:
    return pack_pairs(cfg.run, policy, pairs, accumulation=accumulation, train_prompt=cfg.nll_on_prompt)


def run_pairs(cfg: Config, policy: Policy, micro_batches: list[PairBatch], *, train: bool) -> MetricSums:
    """Loss, metrics and (train) gradients over all micro-batches of one step, each term divided by its global count."""
    counts = torch.tensor([[len(mb.pairs), len(mb.chosen)] for mb in micro_batches]).view(-1, 2).sum(dim=0)
    num_pairs, num_tokens = all_sum(to_device(counts.float(), policy.device))

    def loss_of(mb: PairBatch, logp: Tensor) -> LossOut:
        scores = FreeScores(*mb.sums(logp).T, *mb.lengths.T)
        count = torch.full((), len(mb.chosen), device=logp.device)
        return orpo_loss(scores, -logp[mb.chosen].sum(), count, alpha=cfg.orpo_alpha)

    return sum_losses(policy, micro_batches, loss_of, {"nll": num_tokens, "odds": num_pairs}, num_pairs, train=train)


def evaluate_pairs(cfg: Config, policy: Policy, pairs: list[Pair]) -> dict[str, float]:
    """The same loss and metrics on held-out pairs, as one step over all of them."""
    sums = run_pairs(cfg, policy, pack(cfg, policy, pairs, accumulation=1), train=False)
    return pair_evaluation(sums, len(pairs))
