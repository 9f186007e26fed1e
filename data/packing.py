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
    rows: list[int]  # the items in this batch, in order
    lengths: list[int]  # their lengths, in the same order

    @property
    def num_tokens(self) -> int:
        """Real tokens, padding not counted."""
        return sum(self.lengths)

    def to(self, device: torch.device | str) -> Batch:
        names = ("input_ids", "position_ids", "segment_ids", "index", "target", "sequence")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def make_batches(
    items: Sequence[Item], *, accumulation: int = 1, max_tokens: int, packing: bool = True, pad_id: int = 0
) -> list[Batch]:
    """Split items in order into `accumulation` chunks, and each chunk into micro-batches of at most max_tokens.

    A sequence longer than max_tokens gets a micro-batch of its own. Chunks left without items give no micro-batch.
    """
    assert accumulation >= 1 and max_tokens >= 1, (accumulation, max_tokens)
    for number, item in enumerate(items):
        assert item.ids and len(item.ids) == len(item.mask), (number, len(item.ids), len(item.mask))
        assert not item.mask[0], f"item {number}: nothing precedes the first token, so it cannot be trained"
    group = _group_packed if packing else _group_padded
    batches = []
    for chunk in range(accumulation):
        rows = range(len(items) * chunk // accumulation, len(items) * (chunk + 1) // accumulation)
        longest_first = sorted(rows, key=lambda row: -len(items[row].ids))  # stable, hence repeatable
        lengths = {row: len(items[row].ids) for row in rows}
        batches += [_build(items, members, packing, pad_id) for members in group(longest_first, lengths, max_tokens)]
    return batches


def _group_packed(rows: list[int], lengths: dict[int, int], max_tokens: int) -> list[list[int]]:
    """First fit, longest first: each sequence goes to the first micro-batch with room for it."""
    groups: list[list[int]] = []
    room: list[int] = []
    for row in rows:
        place = next((i for i, free in enumerate(room) if free >= lengths[row]), None)
        if place is None:
            groups.append([row])
            room.append(max_tokens - lengths[row])
        else:
            groups[place].append(row)
            room[place] -= lengths[row]
    return groups


def _group_padded(rows: list[int], lengths: dict[int, int], max_tokens: int) -> list[list[int]]:
    """Longest first, so the first of a group sets its width and neighbours need little padding."""
    groups: list[list[int]] = []
    for row in rows:
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= max_tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _build(items: Sequence[Item], members: list[int], packing: bool, pad_id: int) -> Batch:
    lengths = [len(items[member].ids) for member in members]
    num_rows, width = (1, sum(lengths)) if packing else (len(members), max(lengths))
    input_ids = torch.full((num_rows * width,), pad_id, dtype=torch.int64)
    position_ids = torch.zeros(num_rows * width, dtype=torch.int64)
    segment_ids = torch.full((num_rows * width,), -1, dtype=torch.int64)
    index, target, sequence = [], [], []
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
        start += length if packing else width
    shape = (num_rows, width)
    return Batch(
        input_ids=input_ids.view(shape), position_ids=position_ids.view(shape), segment_ids=segment_ids.view(shape),
        index=torch.cat(index), target=torch.cat(target), sequence=torch.cat(sequence), rows=members, lengths=lengths,
    )  # fmt: skip
