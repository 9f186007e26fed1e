"""Pack sequences into micro-batches under a token budget, end to end or padded to a rectangle.

    batches = make_batches([Item([5, 6, 7, 8], [False, False, True, True])], max_tokens=1024)
    hidden = ...                                   # (R, T, D) from batch.input_ids, position_ids and attention spans
    hidden.flatten(0, 1)[batch.index]              # (N, D) states that predict batch.target; never padding

The state at position p - 1 of a sequence predicts its token at p. So `index` never crosses a sequence boundary, and
the first token of a sequence cannot be trained.

With share_prompt, adjacent items with the same prompt (the two responses of a pair, the completions of a group) are
laid out as one prompt followed by their completions:

    index     0  1  2  3  4  5  6        prompt a b c, completions d e and f g
    token     a  b  c  d  e  f  g
    position  0  1  2  3  4  3  4        as in separate sequences
    attends   to [own_start, own_stop) in its own completion and [prefix_start, prefix_stop) in the prompt

The last prompt token predicts the first token of every completion, so `index` contains it once per completion.
Trained prompt tokens appear once per item that trains them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch


def to_device(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Move x to the device; host-to-GPU copies are pinned and asynchronous."""
    if torch.device(device).type != "cuda" or x.is_cuda or x.numel() == 0:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class Item:
    """One sequence: token ids and a loss mask."""

    ids: list[int]
    mask: list[bool]  # True = trained token; False for the first token
    prompt_length: int = 0  # number of leading ids that may be shared with other items
    routes: np.ndarray | None = None  # (len(ids), L, k) experts to use (rollout/routes.py); None: the model chooses
    sets: np.ndarray | None = None  # ids that each trained token was sampled from (rollout/sets.py); None: all


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The input of one forward pass: R rows of T columns that contain whole sequences.

    A token attends to columns [prefix_start, prefix_stop) of its row, the shared prompt (0 and 0 if not shared), and
    [own_start, own_stop), its own sequence up to itself. Padding attends to the padding before it.
    """

    input_ids: torch.Tensor  # (R, T) int64 token ids
    position_ids: torch.Tensor  # (R, T) int64, from 0 in every sequence, including its prompt
    prefix_start: torch.Tensor  # (R, T) int64
    prefix_stop: torch.Tensor  # (R, T) int64
    own_start: torch.Tensor  # (R, T) int64
    own_stop: torch.Tensor  # (R, T) int64
    index: torch.Tensor  # (N,) int64 flat positions in R*T whose hidden state predicts each trained token
    target: torch.Tensor  # (N,) int64 the trained tokens, ordered by `rows`, then position
    sequence: torch.Tensor  # (N,) int64 item of each trained token, as an index into make_batches' items
    slot: torch.Tensor  # (N,) int64 index of that item in `rows`, for sums over sequences
    rows: list[int]  # indices of this batch's items in make_batches' items, in order
    lengths: list[int]  # lengths of these items
    used: list[int]  # number of tokens in each row; padding follows
    routes: torch.Tensor | None = None  # (R, T, L, k) experts to use; the dtype's maximum: the model chooses
    sets: torch.Tensor | None = None  # (N, K) int32 ids that each token was sampled from, itself first; -1: padding

    @property
    def candidates(self) -> torch.Tensor:  # (N,) or (N, K)
        """The `target` of kernels/linear_logprob.py: the trained tokens, or the ids to which sampling was limited."""
        return self.target if self.sets is None else self.sets

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences without padding; a shared prompt counts once per sequence."""
        return sum(self.lengths)

    @property
    def num_computed(self) -> int:
        """Tokens in the forward pass: num_tokens minus the prompt copies saved by sharing."""
        return sum(self.used)

    def to(self, device: torch.device | str) -> Batch:
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return replace(self, **{name: to_device(tensor, device) for name, tensor in tensors.items()})


def empty_batch(multiple: int = 1) -> Batch:
    """Return one row of padding: a forward pass for a rank without data."""
    zeros = torch.zeros(1, multiple, dtype=torch.int64)
    stops = torch.arange(1, multiple + 1).unsqueeze(0)
    empty = torch.zeros(0, dtype=torch.int64)
    return Batch(
        input_ids=zeros, position_ids=stops - 1, prefix_start=zeros, prefix_stop=zeros, own_start=zeros,
        own_stop=stops, index=empty, target=empty, sequence=empty, slot=empty, rows=[], lengths=[], used=[0],
    )  # fmt: skip


class _Unit(NamedTuple):
    """Items that are laid out consecutively and never separated."""

    rows: tuple[int, ...]  # item indices
    prompt: int  # length of the shared prompt, laid out once before the completions; 0: not shared
    size: int  # tokens in a packed row
    longest: int  # length of the longest item


def make_batches(
    items: Sequence[Item],
    *,
    accumulation: int = 1,
    max_tokens: int,
    packing: bool = True,
    pad_id: int = 0,
    together: int = 1,
    share_prompt: bool = False,
    multiple: int = 1,
    one_row: bool = True,
    max_padding: float = 1.0,
) -> list[Batch]:
    """Split items in order into `accumulation` chunks, and each chunk into micro-batches of at most max_tokens.

    Each run of `together` items (2 for pairs) stays in one micro-batch. A run longer than max_tokens gets its own
    micro-batch. Empty chunks produce no micro-batch. With packing, `share_prompt` lays out equal prompts of adjacent
    items once; a group over max_tokens is split into chunks with one prompt each. With `together` above 1, a prompt is
    shared only within a run. Row lengths are padded to a multiple of `multiple`, which attention kernels require.

    Packed sequences share one row, for attention kernels that skip masked blocks. With `one_row=False`, rows are only
    as long as the micro-batch's longest sequence (or prompt with all completions that share it), for attention with a
    dense mask, which is quadratic in row length.

    Without packing each sequence has its own row. `max_padding` limits the padding of a micro-batch, as a fraction of
    its tokens: rows that are too short for it go to the next micro-batch. Sequences of one run are not separated.
    """
    assert min(accumulation, max_tokens, together, multiple) >= 1, (accumulation, max_tokens, together, multiple)
    assert len(items) % together == 0, (len(items), together)
    for index, item in enumerate(items):
        assert item.ids and len(item.ids) == len(item.mask), (index, len(item.ids), len(item.mask))
        assert not item.mask[0], f"item {index}: the first token cannot be trained"
        assert 0 <= item.prompt_length <= len(item.ids), (index, item.prompt_length, len(item.ids))
    num_runs = len(items) // together
    batches = []
    for chunk in range(accumulation):
        members = range(num_runs * chunk // accumulation * together, num_runs * (chunk + 1) // accumulation * together)
        runs = [members[i : i + together] for i in range(0, len(members), together)]
        if not (share_prompt and packing):
            units = [_unit(items, run) for run in runs]
        elif together > 1:
            units = [_unit(items, run, _common_prompt(items, run)) for run in runs]
        else:
            units = _shared_units(items, members, max_tokens)
        if packing and one_row:
            rectangles = [[group] for group in _first_fit(units, max_tokens)]
        elif packing:
            rectangles = _first_fit_rows(units, max_tokens, multiple)
        else:
            groups = _group_padded(units, max_tokens, multiple, max_padding)
            rectangles = [[[_unit(items, [row])] for unit in group for row in unit.rows] for group in groups]
        batches += [_build(items, rectangle, pad_id, multiple) for rectangle in rectangles]
    return batches


def _unit(items: Sequence[Item], rows: Sequence[int], prompt: int = 0) -> _Unit:
    lengths = [len(items[row].ids) for row in rows]
    return _Unit(tuple(rows), prompt, prompt + sum(length - prompt for length in lengths), max(lengths))


def _common_prompt(items: Sequence[Item], rows: Sequence[int]) -> int:
    """Return the length of the items' prompt, or 0 if their prompts differ."""
    prompts = [items[row].ids[: items[row].prompt_length] for row in rows]
    return len(prompts[0]) if all(prompt == prompts[0] for prompt in prompts) else 0


def _shared_units(items: Sequence[Item], members: range, max_tokens: int) -> list[_Unit]:
    """Join adjacent items with equal prompts into one unit, or into several with a prompt each to fit max_tokens."""
    units = []
    for prompt, run in itertools.groupby(members, key=lambda row: items[row].ids[: items[row].prompt_length]):
        completions = [_unit(items, [row]) for row in run]
        if prompt:
            completions = [unit._replace(size=unit.size - len(prompt)) for unit in completions]
            chunks = _first_fit(completions, max_tokens - len(prompt))
        else:
            chunks = [[unit] for unit in completions]
        for chunk in chunks:
            rows = sorted(row for unit in chunk for row in unit.rows)
            units.append(_unit(items, rows, len(prompt) if len(rows) > 1 else 0))
    return units


def _first_fit(units: list[_Unit], max_tokens: int) -> list[list[_Unit]]:
    """First-fit decreasing: put each unit, largest first, into the first bin with room for it."""
    bins: list[list[_Unit]] = []
    room: list[int] = []
    for unit in sorted(units, key=lambda unit: -unit.size):  # stable
        i = next((i for i, free in enumerate(room) if free >= unit.size), None)
        if i is None:
            bins.append([unit])
            room.append(max_tokens - unit.size)
        else:
            bins[i].append(unit)
            room[i] -= unit.size
    return bins


def _first_fit_rows(units: list[_Unit], max_tokens: int, multiple: int) -> list[list[list[_Unit]]]:
    """Fill rows, and rows into micro-batches; the first unit of a micro-batch, its largest, sets the row length."""
    rectangles: list[list[list[_Unit]]] = []
    room: list[int] = []  # free tokens in each row of the last rectangle
    length = 0
    for unit in sorted(units, key=lambda unit: -unit.size):  # stable
        row = next((i for i, free in enumerate(room) if free >= unit.size), None)
        if row is None:
            if not rectangles or (len(room) + 1) * length > max_tokens:
                rectangles.append([])
                room, length = [], _round_up(unit.size, multiple)
            rectangles[-1].append([])
            room.append(length)
            row = len(room) - 1
        rectangles[-1][row].append(unit)
        room[row] -= unit.size
    return rectangles


def _group_padded(units: list[_Unit], max_tokens: int, multiple: int, max_padding: float) -> list[list[_Unit]]:
    """Group units, longest first: the first unit of a group sets its width and the others need little padding."""
    groups: list[list[_Unit]] = []
    size = 0  # tokens of the last group without padding
    for unit in sorted(units, key=lambda unit: -unit.longest):  # stable
        width = _round_up(groups[-1][0].longest, multiple) if groups else 0
        padded = (len(groups[-1]) + 1) * len(unit.rows) * width if groups else 0
        size += unit.size
        if groups and padded <= max_tokens and padded - size <= max_padding * padded:
            groups[-1].append(unit)
        else:
            groups.append([unit])
            size = unit.size
    return groups


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _build(items: Sequence[Item], rectangle: list[list[_Unit]], pad_id: int, multiple: int) -> Batch:
    used = [sum(unit.size for unit in units) for units in rectangle]
    shape = (len(rectangle), _round_up(max(used), multiple))
    # NumPy is several times faster than torch for lists and small slices.
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    position_ids, prefix_start, prefix_stop, own_start = (np.zeros(shape, dtype=np.int64) for _ in range(4))
    known = next((item.routes for item in items if item.routes is not None), None)
    routes = None if known is None else np.full((*shape, *known.shape[1:]), np.iinfo(known.dtype).max, known.dtype)
    members, index, target, sequence, slot = [], [], [], [], []
    for row, units in enumerate(rectangle):
        own_start[row, used[row] :] = used[row]
        stop = 0
        for unit in units:
            prompt = slice(stop, stop + unit.prompt)
            stop = prompt.stop
            input_ids[row, prompt] = items[unit.rows[0]].ids[: unit.prompt]
            position_ids[row, prompt] = np.arange(unit.prompt)
            own_start[row, prompt] = prompt.start
            first = items[unit.rows[0]].routes
            if routes is not None and first is not None:
                routes[row, prompt] = first[: unit.prompt]
            for member in unit.rows:
                ids = np.array(items[member].ids, dtype=np.int64)
                completion = slice(stop, stop + len(ids) - unit.prompt)
                stop = completion.stop
                input_ids[row, completion] = ids[unit.prompt :]
                position_ids[row, completion] = np.arange(unit.prompt, len(ids))
                own_start[row, completion] = completion.start
                if routes is not None and items[member].routes is not None:
                    routes[row, completion] = items[member].routes[unit.prompt :]
                if unit.prompt:
                    prefix_start[row, completion], prefix_stop[row, completion] = prompt.start, prompt.stop
                trained = np.flatnonzero(items[member].mask)
                before = trained - 1
                column = before + np.where(before < unit.prompt, prompt.start, completion.start - unit.prompt)
                index.append(row * shape[1] + column)
                target.append(ids[trained])
                sequence.append(np.full_like(trained, member))
                slot.append(np.full_like(trained, len(members)))
                members.append(member)
    own_stop = np.broadcast_to(np.arange(1, shape[1] + 1), shape).copy()
    tensors = {
        "input_ids": input_ids, "position_ids": position_ids, "prefix_start": prefix_start, "prefix_stop": prefix_stop,
        "own_start": own_start, "own_stop": own_stop, "index": np.concatenate(index), "target": np.concatenate(target),
        "sequence": np.concatenate(sequence), "slot": np.concatenate(slot),
    }  # fmt: skip
    return Batch(
        **{name: torch.from_numpy(x) for name, x in tensors.items()},
        rows=members, lengths=[len(items[member].ids) for member in members], used=used,
        routes=None if routes is None else torch.from_numpy(routes),
        sets=_padded_sets([items[member] for member in members], tensors["target"]),
    )  # fmt: skip


def _padded_sets(items: Sequence[Item], target: np.ndarray) -> torch.Tensor | None:  # (N, K) int32
    if all(item.sets is None for item in items):
        return None
    none = np.zeros(0, np.int32)
    sets = np.concatenate([none if item.sets is None else item.sets for item in items])
    starts = np.flatnonzero(sets < 0)
    assert np.array_equal(~sets[starts], target), f"{len(starts)} sets are not of the {len(target)} trained tokens"
    sizes = np.diff(np.append(starts, len(sets)))
    padded = np.full((len(sizes), sizes.max(initial=1)), -1, np.int32)
    padded[np.arange(padded.shape[1]) < sizes[:, None]] = np.where(sets < 0, ~sets, sets)
    return torch.from_numpy(padded)
