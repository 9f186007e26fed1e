"""Labelled rows for KTO: load them, give each a mismatched partner, pack both.

A partner is a row's prompt with the completion of another prompt. KTO's reference point is measured on partners.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from data.errors import UserError
from data.packing import Batch, Item, to_device
from data.rows.unpaired import load_labelled
from data.types import Labelled
from trainer.offline.config import PreferenceConfig
from trainer.offline.rows import pack_items, read_responses
from trainer.policy.logps import Policy


@dataclass(frozen=True)
class LabelledStep:
    """The rows of one step, packed; items are the rows, then their partners."""

    label: Tensor  # (B,) bool
    items: list[Item]
    batches: list[Batch]  # rows
    mismatched: list[Batch]  # partners; empty for apo_zero_unpaired


def load_rows(cfg: PreferenceConfig, policy: Policy, specs: Sequence[str]) -> Sequence[Labelled]:
    return read_responses(load_labelled, cfg, policy, specs)


def item_of(row: Labelled, completion_ids: list[int] | None = None) -> Item:
    ids = row.completion_ids if completion_ids is None else completion_ids
    return Item(ids=[*row.prompt_ids, *ids], mask=[False] * len(row.prompt_ids) + [True] * len(ids))


def check_prompts(prompts: Iterable[Sequence[int]], setting: str = "data") -> None:
    """Raise if no row has a mismatched partner, because all prompts are equal. setting: where the rows come from."""
    prompts = iter(prompts)
    first = next(prompts, None)
    if first is not None and all(ids == first for ids in prompts):
        raise UserError(f"{setting}: all rows have the same prompt; KTO's reference point needs at least two prompts")


class Mismatched(Sequence[Item]):
    """The partner of each row, truncated to the rows' length limit; an item is built when it is read."""

    def __init__(self, cfg: PreferenceConfig, policy: Policy, rows: Sequence[Labelled], setting: str = "data") -> None:
        self.rows, self.limit = rows, min(cfg.response.max_length, policy.context_length or cfg.response.max_length)
        check_prompts((row.prompt_ids for row in rows), setting)
        order = list(range(len(rows)))
        random.Random(cfg.run.seed).shuffle(order)
        self.other = [0] * len(rows)  # number of the row whose completion a row gets
        for i, number in enumerate(order):
            prompt_ids = rows[number].prompt_ids
            others = (order[(i + j) % len(order)] for j in range(1, len(order)))
            self.other[number] = next(o for o in others if rows[o].prompt_ids != prompt_ids)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: Any) -> Any:
        row, other = self.rows[number], self.rows[self.other[number]]
        return item_of(row, other.completion_ids[: self.limit - len(row.prompt_ids)])


def pack_labelled(
    cfg: PreferenceConfig, policy: Policy, rows: Sequence[Labelled], mismatched: Sequence[Item], accumulation: int
) -> LabelledStep:
    """Pack the rows and their partners; `mismatched` is empty for apo_zero_unpaired."""
    matched = [item_of(row) for row in rows]
    batches, partners = (
        pack_items(cfg.run, policy, items, accumulation=accumulation) for items in (matched, mismatched)
    )
    label = to_device(torch.tensor([row.label for row in rows], dtype=torch.bool), policy.device)
    return LabelledStep(label, [*matched, *mismatched], batches, partners)
