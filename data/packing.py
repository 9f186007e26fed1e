"""Sequences to micro-batches under a token budget, packed end to end or padded to a rectangle.

    batches = make_batches([Item([5, 6, 7, 8], [False, False, True, True])], max_tokens=1024)
    hidden = ...                                   # (R, T, D) from batch.input_ids, position_ids, segment_ids
    hidden.flatten(0, 1)[batch.index]              # (N, D) the states that predict batch.target, never padding

A trained token at position p of its sequence is predicted by the state at p - 1 of the same sequence, so the index
never crosses from one packed sequence into the next, and the first token of a sequence cannot be trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Item:
    """One sequence: token ids, and which of them are trained."""

    ids: list[int]
    mask: list[bool]  # True = trained token; the first is never trained


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One forward pass: R rows of T positions that hold whole sequences."""

    input_ids: torch.Tensor  # (R, T) int64 token ids
    position_ids: torch.Tensor  # (R, T) int64, restarts at 0 with every sequence
    segment_ids: torch.Tensor  # (R, T) int64 number of the sequence within its row, -1 = padding
    index: torch.Tensor  # (N,) int64 flat positions in R*T whose hidden state predicts each trained token
    target: torch.Tensor  # (N,) int64 the trained tokens, ordered by `rows`, then position
    sequence: torch.Tensor  # (N,) int64 which of the items given to make_batches each trained token belongs to
    slot: torch.Tensor  # (N,) int64 the place of that item in `rows`, for sums over sequences
    rows: list[int]  # the items in this batch, in order
    lengths: list[int]  # their lengths, in the same order

    @property
    def num_tokens(self) -> int:
        """Real tokens, padding not counted."""
        return sum(self.lengths)

    def to(self, device: torch.device | str) -> Batch:
        names = ("input_ids", "position_ids", "segment_ids", "index", "target", "sequence", "slot")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def make_batches(
    items: Sequence[Item],
    *,
    accumulation: int = 1,
    max_tokens: int,
    packing: bool = True,
    pad_id: int = 0,
    together: int = 1,
) -> list[Batch]:
    """Split items in order into `accumulation` chunks, and each chunk into micro-batches of at most max_tokens.

    Each run of `together` items (the two responses of a pair) stays in one micro-batch. A run longer than max_tokens
    gets a micro-batch of its own. Chunks left without items give no micro-batch.
    """
    assert accumulation >= 1 and max_tokens >= 1 and together >= 1, (accumulation, max_tokens, together)
    assert len(items) % together == 0, (len(items), together)
    for number, item in enumerate(items):
        assert item.ids and len(item.ids) == len(item.mask), (number, len(item.ids), len(item.mask))
        assert not item.mask[0], f"item {number}: nothing precedes the first token, so it cannot be trained"
    group = _group_packed if packing else _group_padded
    units = [range(first, first + together) for first in range(0, len(items), together)]
    batches = []
    for chunk in range(accumulation):
        members = units[len(units) * chunk // accumulation : len(units) * (chunk + 1) // accumulation]
        lengths = {unit: [len(items[row].ids) for row in unit] for unit in members}
        longest_first = sorted(members, key=lambda unit: -max(len(items[row].ids) for row in unit))  # stable
        for units_together in group(longest_first, lengths, max_tokens):
            batches.append(_build(items, [row for unit in units_together for row in unit], packing, pad_id))
    return batches


def _group_packed(units: list[range], lengths: dict[range, list[int]], max_tokens: int) -> list[list[range]]:
    """First fit, longest first: each unit goes to the first micro-batch with room for it."""
    groups: list[list[range]] = []
    room: list[int] = []
    for unit in units:
        size = sum(lengths[unit])
        place = next((i for i, free in enumerate(room) if free >= size), None)
        if place is None:
            groups.append([unit])
            room.append(max_tokens - size)
        else:
            groups[place].append(unit)
            room[place] -= size
    return groups


def _group_padded(units: list[range], lengths: dict[range, list[int]], max_tokens: int) -> list[list[range]]:
    """Longest first, so the first of a group sets its width and neighbours need little padding."""
    groups: list[list[range]] = []
    for unit in units:
        if groups and (len(groups[-1]) + 1) * len(unit) * max(lengths[groups[-1][0]]) <= max_tokens:
            groups[-1].append(unit)
        else:
            groups.append([unit])
    return groups


def _build(items: Sequence[Item], members: list[int], packing: bool, pad_id: int) -> Batch:
    lengths = [len(items[member].ids) for member in members]
    num_rows, width = (1, sum(lengths)) if packing else (len(members), max(lengths))
    input_ids = torch.full((num_rows * width,), pad_id, dtype=torch.int64)
    position_ids = torch.zeros(num_rows * width, dtype=torch.int64)
    segment_ids = torch.full((num_rows * width,), -1, dtype=torch.int64)
    index, target, sequence, slot = [], [], [], []
    start = 0
    for place, (member, length) in enumerate(zip(members, lengths, strict=True)):
        item = items[member]
        ids = torch.tensor(item.ids, dtype=torch.int64)
        trained = torch.tensor(item.mask, dtype=torch.bool).nonzero().flatten()
        input_ids[start : start + length] = ids
        position_ids[start : start + length] = torch.arange(length)
        segment_ids[start : start + length] = place if packing else 0
        index.append(start + trained - 1)
        target.append(ids[trained])
        sequence.append(torch.full_like(trained, member))
        slot.append(torch.full_like(trained, place))
        start += length if packing else width
    shape = (num_rows, width)
    return Batch(
        input_ids=input_ids.view(shape), position_ids=position_ids.view(shape), segment_ids=segment_ids.view(shape),
        index=torch.cat(index), target=torch.cat(target), sequence=torch.cat(sequence), slot=torch.cat(slot),
        rows=members, lengths=lengths,
    )  # fmt: skip
