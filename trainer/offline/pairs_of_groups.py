"""Pairs from groups: the best completion of each prompt against the worst.

    side = s.advantage(batch)                          # (B,) by `sides`: 1 the best of its group, -1 the worst, else 0
    steps = pair_up(cfg, policy, batch, side)          # of each mini-batch, as run_pairs of trainer/methods/dpo.py

A group without a best and a worst, because all scores are equal or there are fewer than two, is a tie and has no pair.
As an advantage, `side` is 0 there, so that dynamic sampling and replay replace such groups.

Shapes: P groups of G completions, B = P * G.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from data.packing import Batch, Item, empty_batch
from losses.advantage import GroupRewards
from trainer.offline.pairs import PairBatch, pack_pair_items, pair_batch
from trainer.parallel.comm import all_count
from trainer.policy.logps import Policy
from trainer.rl.groups import GroupBatch
from trainer.rl.minibatch import completion_item


@dataclass
class PairStep:
    """The pairs of one step on this rank."""

    items: list[Item]  # two for each pair, chosen first
    pairs: list[PairBatch]  # micro-batches
    metrics: dict[str, tuple[Tensor, float]]  # (sum, count)
    first: bool = True

    @property
    def batches(self) -> list[Batch]:
        return [mb.batch for mb in self.pairs]


def sides(r: GroupRewards, *, judged: bool, missing_eos_penalty: float) -> Tensor:  # (P, G)
    """1 for the best completion of a group, -1 for the worst, 0 for the others and for all of a tie.

    judged: the last column of the rewards decides, not their sum. Of several that are equally good the first is taken.
    """
    score = r.rewards[..., -1] if judged else r.total  # (P, G)
    cut = torch.tensor([c.finish_reason == "length" for c in r.completions]).view_as(score)
    empty = torch.tensor([c.trained == 0 for c in r.completions]).view_as(score)  # the model wrote none of it
    score = torch.where(empty, torch.nan, score - missing_eos_penalty * cut)
    best = score.nan_to_num(nan=-torch.inf).argmax(dim=1, keepdim=True)  # (P, 1)
    worst = score.nan_to_num(nan=torch.inf).argmin(dim=1, keepdim=True)  # (P, 1)
    side = torch.zeros_like(score).scatter(1, best, 1.0).scatter(1, worst, -1.0)
    return torch.where(score.gather(1, best) > score.gather(1, worst), side, 0.0)


def pair_up(
    cfg: Any,
    policy: Policy,
    batch: GroupBatch,
    side: Tensor,  # (B,)
) -> list[PairStep]:
    """The pairs of each mini-batch of the rollout."""
    sides = side.split([len(part.completions) for part in batch.parts])
    return [_pairs_of_part(cfg, policy, part, own) for part, own in zip(batch.parts, sides, strict=True)]


def _pairs_of_part(
    cfg: Any,
    policy: Policy,
    batch: GroupBatch,
    side: Tensor,  # (B,)
) -> PairStep:
    """In micro-batches, equally many on every rank and at least one, which may be empty."""
    side, reward = side.view(len(batch.groups), -1), batch.reward  # (P, G)
    items, gaps = [], []
    for place, group in enumerate(batch.groups):
        if side[place].any():
            best, worst = int(side[place].argmax()), int(side[place].argmin())
            items += [completion_item(group.completions[best]), completion_item(group.completions[worst])]
            gaps.append(float(reward[place, best] - reward[place, worst]))
    micro_batches = pack_pair_items(cfg.run, policy, items, accumulation=cfg.run.gradient_accumulation_steps)
    if not micro_batches:
        micro_batches = [pair_batch(empty_batch(policy.row_multiple), items).to(policy.device)]
    num_groups, known = len(batch.groups), [gap for gap in gaps if gap == gap]
    sums = {"pairs/ties_frac": (num_groups - len(gaps), num_groups), "pairs/reward_gap": (sum(known), len(known))}
    if all_count(len(gaps), "pairs of the step") == 0:
        sums["loss/total"] = (0.0, 1)  # of ties alone: the gradient is zero
    metrics = {name: (torch.tensor(float(x), device=policy.device), n) for name, (x, n) in sums.items()}
    return PairStep(items, micro_batches, metrics)
