"""Pairs from groups: the best completion of each prompt against the worst.

    side = rollouts.advantage(rollout)                 # (B,) by `sides`: 1 the best of its group, -1 the worst, else 0
    steps = pair_up(cfg.run, policy, rollout, side)    # of each mini-batch, for run_pairs in trainer/methods/dpo.py

A group without a best and a worst, because all rewards are equal or fewer than two, is a tie and has no pair. As an
advantage, `side` is 0 there, so dynamic sampling and replay replace such groups.

Shapes: P groups of G completions, B = P * G.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from data.packing import Batch, Item, empty_batch
from losses.types import Metrics
from trainer.config.blocks import RunConfig
from trainer.offline.pairs import PairBatch, pack_pair_items, pair_batch
from trainer.parallel.comm import all_count
from trainer.policy.logps import Policy
from trainer.rl.groups import Rollout
from trainer.rl.minibatch import completion_item


@dataclass
class PairStep:
    """The pairs of one optimizer step on this rank."""

    items: list[Item]  # two per pair, chosen first
    pairs: list[PairBatch]  # micro-batches
    metrics: Metrics
    is_first: bool = True

    @property
    def batches(self) -> list[Batch]:
        return [mb.batch for mb in self.pairs]

    @property
    def computed_tokens(self) -> int:
        return sum(batch.num_tokens for batch in self.batches)


def pair_up(
    run: RunConfig,
    policy: Policy,
    rollout: Rollout,
    side: Tensor,  # (B,)
) -> list[PairStep]:
    """Pack the pairs of each mini-batch of the rollout."""
    sides = side.split([len(minibatch.completions) for minibatch in rollout.minibatches])
    return [_pack(run, policy, *both) for both in zip(rollout.minibatches, sides, strict=True)]


def _pack(
    run: RunConfig,
    policy: Policy,
    rollout: Rollout,
    side: Tensor,  # (B,)
) -> PairStep:
    """Pack pairs into micro-batches: equally many on every rank and at least one, which may be empty."""
    side, reward = side.view(len(rollout.groups), -1), rollout.reward  # (P, G)
    items, gaps = [], []
    for index, group in enumerate(rollout.groups):
        if side[index].any():
            best, worst = int(side[index].argmax()), int(side[index].argmin())
            items += [completion_item(group.completions[best]), completion_item(group.completions[worst])]
            gaps.append(float(reward[index, best] - reward[index, worst]))
    micro_batches = pack_pair_items(run, policy, items, accumulation=run.gradient_accumulation_steps)
    if not micro_batches:
        micro_batches = [pair_batch(empty_batch(policy.row_multiple), items).to(policy.device)]
    num_groups, known = len(rollout.groups), [gap for gap in gaps if gap == gap]
    metrics = {"pairs/ties_frac": (num_groups - len(gaps), num_groups), "pairs/reward_gap": (sum(known), len(known))}
    if all_count(len(gaps), "pairs of the step") == 0:
        metrics["loss/total"] = (0.0, 1)  # only ties: the gradient is zero
    on_device = {name: (torch.tensor(float(x), device=policy.device), n) for name, (x, n) in metrics.items()}
    return PairStep(items, micro_batches, on_device)
