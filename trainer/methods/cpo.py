"""CPO: a pair loss on the policy's log-probs plus the likelihood of the chosen response; no reference.

    pairs -> pack -> (logps -> sums over responses -> pair loss + likelihood -> backward)* -> clip and step -> log

Xu et al. 2024 (arXiv:2401.08417). `simpo` (trainer/methods/simpo.py) is this loop with SimPO's loss and defaults.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from data.command.checks import check_numbers
from data.command.flags import Common
from data.errors import UserError
from data.rows.held_out import train_and_held_out
from data.types import Pair
from losses.reference_free import CPO_LOSSES, FreeScores, cpo_loss
from losses.types import LossOut, options_of
from trainer.config.blocks import MethodMemory
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
    """Contrastive preference optimisation: a pair loss without reference, plus likelihood of the chosen response."""

    memory: ClassVar[MethodMemory] = MethodMemory(sequences=2)
    rows: ClassVar[str] = "pairs"
    # Ten times the rate for all weights, which is TRL's (LoRA Without Regret).
    lora_learning_rate: ClassVar[float] = 1e-5

    loss_type: Common[Literal["sigmoid", "hinge", "ipo", "simpo", "alphapo"]] = "sigmoid"
    """Pair loss. sigmoid and hinge compare sums of log-probs; ipo, simpo and alphapo log-probs per token."""
    beta: Common[float] = 0.1
    """Scale of the log-prob difference."""
    label_smoothing: Common[float] = 0.0
    """Assumed fraction of flipped labels, for sigmoid, simpo and alphapo."""
    cpo_alpha: Common[float] = 1.0
    """Weight of the negative log-likelihood per token of the chosen response. 0: off."""
    simpo_gamma: Common[float] = 0.0
    """Target margin of the chosen response, for simpo and alphapo."""
    alpha: float = 0.0
    """Shape of alphapo's reward. 0: simpo."""

    def __post_init__(self) -> None:
        super().__post_init__()
        used = options_of(CPO_LOSSES[self.loss_type])
        check_numbers(self, {"above 0": "beta", "0 or above": "cpo_alpha"})
        if not 0.0 <= self.label_smoothing < 0.5:
            raise UserError(f"label_smoothing={self.label_smoothing}: must be in [0, 0.5)")
        for name, option in (("label_smoothing", "label_smoothing"), ("simpo_gamma", "gamma"), ("alpha", "alpha")):
            if getattr(self, name) != 0 and option not in used:
                raise UserError(f"{name}={getattr(self, name)}: has no effect with loss_type={self.loss_type}")


def train(cfg: Config) -> None:
    with open_run(cfg, cfg.run.method) as run:
        policy = open_policy(cfg)
        pairs, held_out = train_and_held_out(cfg.data, cfg.run.seed, partial(pairs_of, cfg, policy))
        held_out = rows_of_this_rank(held_out[: cfg.data.max_eval_rows])
        evaluate = partial(evaluate_pairs, cfg, policy, held_out)
        training = Training(run, cfg, policy, Rows(cfg, pairs), evaluate=evaluate)
        for batch in training.steps():  # this rank's pairs
            micro_batches = pack_pairs(cfg.run, policy, batch, accumulation=cfg.run.gradient_accumulation_steps)
            sums = run_pairs(cfg, policy, micro_batches, train=True)
            training.clip_and_step(sums)
            training.log(sums, sum(mb.batch.num_tokens for mb in micro_batches))


def run_pairs(cfg: Config, policy: Policy, micro_batches: list[PairBatch], *, train: bool) -> MetricSums:
    """Loss, metrics and (train) gradients over all micro-batches of one step, each term divided by its global count."""
    lengths = torch.cat([mb.lengths[:, 0] for mb in micro_batches]).float()  # (pairs of the step,) of chosen responses
    num_pairs, num_tokens = all_sum(torch.stack([lengths.new_full((), len(lengths)), lengths.sum()]))

    def loss_of(mb: PairBatch, logp: Tensor) -> LossOut:
        return cpo_loss(
            FreeScores(*mb.sums(logp).T, *mb.lengths.T), loss_type=cfg.loss_type, beta=cfg.beta,
            cpo_alpha=cfg.cpo_alpha, gamma=cfg.simpo_gamma, alpha=cfg.alpha, label_smoothing=cfg.label_smoothing,
        )  # fmt: skip

    divisors = {cfg.loss_type: num_pairs, "nll": num_tokens}
    return sum_losses(policy, micro_batches, loss_of, divisors, num_pairs, train=train)


def evaluate_pairs(cfg: Config, policy: Policy, pairs: list[Pair]) -> dict[str, float]:
    """The same loss and metrics on held-out pairs, as one step over all of them."""
    sums = run_pairs(cfg, policy, pack_pairs(cfg.run, policy, pairs, accumulation=1), train=False)
    return pair_evaluation(sums, len(pairs))
