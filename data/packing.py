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

The items of an episode, which are its branches, share all leading ids that they have in common, and prompts with other
episodes. Their group is laid out as a tree, depth first: each item adds the tokens after those that it shares with the
item before it, and attends to one more prefix run for each gap on the way to its root.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

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
    mask: Sequence[int]  # True or 1 = trained token; 0 for the first token
    prompt_length: int = 0  # number of leading ids that may be shared with other items
    routes: np.ndarray | None = None  # (len(ids), L, k) experts to use (rollout/routes.py); None: the model chooses
    sets: np.ndarray | None = None  # ids that each trained token was sampled from (rollout/sets.py); None: all
    episode: int | None = None  # items of one episode may share all leading ids; None: only those of the prompt


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The input of one forward pass: R rows of T columns that contain whole sequences.

    A token attends to columns [prefix_start, prefix_stop) of its row, the shared prompt (0 and 0 if not shared), and
    [own_start, own_stop), its own sequence up to itself. In a tree there are more prefix runs, with empty ones first:
    a power of two, so that few graphs are compiled. Padding attends to the padding before it.
    """

    input_ids: torch.Tensor  # (R, T) int64 token ids
    position_ids: torch.Tensor  # (R, T) int64, from 0 in every sequence, including its prompt
    spans: tuple[torch.Tensor, ...]  # prefix_start, prefix_stop, ..., own_start, own_stop: (R, T) int64 each
    index: torch.Tensor  # (N,) int64 flat positions in R*T whose hidden state predicts each trained token
    target: torch.Tensor  # (N,) int64 the trained tokens, ordered by `rows`, then position
    sequence: torch.Tensor  # (N,) int64 item of each trained token, as an index into make_batches' items
    slot: torch.Tensor  # (N,) int64 index of that item in `rows`, for sums over sequences
    rows: list[int]  # indices of this batch's items in make_batches' items, in order
    lengths: list[int]  # lengths of these items
    used: list[int]  # number of tokens in each row; padding follows
    runs: list[tuple[int, int]]  # flat position of each run's first token, and of the token that it follows or -1
    routes: torch.Tensor | None = None  # (R, T, L, k) experts to use; the dtype's maximum: the model chooses
    sets: torch.Tensor | None = None  # (N, K) int32 ids that each token was sampled from, itself first; -1: padding

    @property
    def candidates(self) -> torch.Tensor:  # (N,) or (N, K)
        """The `target` of kernels/linear_logprob.py: the trained tokens, or the ids to which sampling was limited."""
        return self.target if self.sets is None else self.sets

    @property
    def own_start(self) -> torch.Tensor:  # (R, T) int64
        return self.spans[-2]

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences without padding; a shared token counts once per sequence."""
        return sum(self.lengths)

    @property
    def num_computed(self) -> int:
        """Tokens in the forward pass: num_tokens minus the copies saved by sharing."""
        return sum(self.used)

    def to(self, device: torch.device | str) -> Batch:
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        spans = tuple(to_device(bound, device) for bound in self.spans)
        return replace(self, spans=spans, **{name: to_device(tensor, device) for name, tensor in tensors.items()})


def empty_batch(multiple: int = 1) -> Batch:
    """Return one row of padding: a forward pass for a rank without data."""
    zeros = torch.zeros(1, multiple, dtype=torch.int64)
    stops = torch.arange(1, multiple + 1).unsqueeze(0)
    empty = torch.zeros(0, dtype=torch.int64)
    return Batch(
        input_ids=zeros, position_ids=stops - 1, spans=(zeros, zeros, zeros, stops), index=empty, target=empty,
        sequence=empty, slot=empty, rows=[], lengths=[], used=[0], runs=[],
    )  # fmt: skip


class Plan(NamedTuple):
    """A micro-batch that is not laid out yet."""

    rows: list[int]  # as in Batch
    build: Callable[[], Batch]

    def to(self, device: torch.device | str) -> Plan:
        return Plan(self.rows, lambda: self.build().to(device))


class _Unit(NamedTuple):
    """Items that are laid out consecutively and never separated."""

    rows: tuple[int, ...]  # item indices
    shared: tuple[int, ...]  # leading ids that each item shares with the one before; the first with all others
    size: int  # tokens in a packed row
    longest: int  # length of the longest item


def make_batches(items: Sequence[Item], **options: Any) -> list[Batch]:
    """Lay out all micro-batches of plan_batches."""
    return [plan.build() for plan in plan_batches(items, **options)]


def plan_batches(
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
    small: int = 0,
) -> list[Plan]:
    """Split items in order into `accumulation` chunks, and each chunk into micro-batches of at most max_tokens.

    Each run of `together` items (2 for pairs) stays in one micro-batch. A run longer than max_tokens gets its own
    micro-batch. Empty chunks produce no micro-batch. With packing, `share_prompt` lays out equal prompts of adjacent
    items once; a group over max_tokens is split into chunks with one prompt each. Adjacent episodes that have a prompt
    in common become a tree. With `together` above 1, a prompt is shared only within a run. Row lengths are padded to a
    multiple of `multiple`, which attention kernels require.

    Packed sequences share one row, for attention kernels that skip masked blocks. With `one_row=False`, rows are only
    as long as the micro-batch's longest sequence (or prompt with all completions that share it), for attention with a
    dense mask, which is quadratic in row length.

    Without packing each sequence has its own row. `max_padding` limits the padding of a micro-batch, as a fraction of
    its tokens: rows that are too short for it go to the next micro-batch. Sequences of one run are not separated, and
    the padding between them does not count. Micro-batches of up to `small` tokens may have any padding.
    """
    assert min(accumulation, max_tokens, together, multiple) >= 1, (accumulation, max_tokens, together, multiple)
    assert len(items) % together == 0, (len(items), together)
    for index, item in enumerate(items):
        assert item.ids and len(item.ids) == len(item.mask), (index, len(item.ids), len(item.mask))
        assert not item.mask[0], f"item {index}: the first token cannot be trained"
        assert 0 <= item.prompt_length <= len(item.ids), (index, item.prompt_length, len(item.ids))
    num_runs = len(items) // together
    plans = []
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
            groups = _group_padded(units, max_tokens, multiple, max_padding, small)
            rectangles = [[[_unit(items, [row])] for unit in group for row in unit.rows] for group in groups]
        for rectangle in rectangles:
            rows = [row for units in rectangle for unit in units for row in unit.rows]
            plans.append(Plan(rows, partial(_build, items, rectangle, pad_id, multiple)))
    return plans


def _unit(items: Sequence[Item], rows: Sequence[int], shared: Sequence[int] | int = 0) -> _Unit:
    shared = (shared,) * len(rows) if isinstance(shared, int) else tuple(shared)
    lengths = [len(items[row].ids) for row in rows]
    return _Unit(tuple(rows), shared, shared[0] + sum(lengths) - sum(shared), max(lengths))


def _common_prompt(items: Sequence[Item], rows: Sequence[int]) -> int:
    """Return the length of the items' prompt, or 0 if their prompts differ."""
    prompts = [items[row].ids[: items[row].prompt_length] for row in rows]
    return len(prompts[0]) if all(prompt == prompts[0] for prompt in prompts) else 0


def _shared_units(items: Sequence[Item], members: range, max_tokens: int) -> list[_Unit]:
    """Join each group into one unit, or into several to fit max_tokens, which repeat what they share."""
    units = []
    for rows in _groups(items, members):
        if any(items[row].episode is not None for row in rows):
            units += _tree_units(items, rows, max_tokens)
            continue
        prompt = items[rows[0]].prompt_length
        whole = _unit(items, rows, prompt if len(rows) > 1 else 0)
        if whole.size <= max_tokens:
            units.append(whole)
            continue
        completions = [unit._replace(size=unit.size - prompt) for unit in (_unit(items, [row]) for row in rows)]
        for chunk in _first_fit(completions, max_tokens - prompt):
            chosen = sorted(row for unit in chunk for row in unit.rows)
            units.append(_unit(items, chosen, prompt if len(chosen) > 1 else 0))
    return units


def _groups(items: Sequence[Item], members: range) -> list[list[int]]:
    """Split items into groups: adjacent episodes that have a prompt in common."""
    groups: list[list[int]] = []
    last: list[list[int]] = []
    for _, episode in itertools.groupby(members, lambda row: (items[row].episode, items[row].episode is None and row)):
        rows = list(episode)
        prompts = [items[row].ids[: items[row].prompt_length] for row in rows]
        if any(prompt and prompt in last for prompt in prompts):
            groups[-1] += rows
        else:
            groups.append(rows)
        last = prompts
    return groups


def _tree_units(items: Sequence[Item], rows: list[int], max_tokens: int) -> list[_Unit]:
    """Lay out a group as trees, depth first, cut into units that fit max_tokens."""
    chunks: list[list[tuple[int, int]]] = []
    size = 0
    for row, shared in _depth_first(items, rows):
        length = len(items[row].ids)
        if not shared or size + length - shared > max_tokens:
            chunks.append([])
            size = shared = 0
        chunks[-1].append((row, shared))
        size += length - shared
    units = []
    for chunk in chunks:
        chosen, shares = zip(*chunk, strict=True)
        units.append(_unit(items, chosen, (min(shares[1:], default=0), *shares[1:])))
    return units


def _depth_first(items: Sequence[Item], rows: list[int]) -> Iterator[tuple[int, int]]:
    """Yield each row, and the number of leading ids that it shares with the row before it.

    The child with most items comes first, so that a path consists of few runs.
    """
    keys = []  # ids, with the episode's number where its prompt ends: what follows differs from other episodes
    for row in rows:
        item = items[row]
        number = 2**32 - 1 - row if item.episode is None else 2**31 + item.episode
        keys.append(np.insert(np.array(item.ids, dtype=np.int64), item.prompt_length, number).astype(">u4"))
    ranked = sorted(range(len(rows)), key=lambda i: keys[i].tobytes())
    common = [0]  # leading ids that each ranked item shares with the one before it
    for a, b in itertools.pairwise(ranked):
        size = min(len(keys[a]), len(keys[b]))
        same = int(np.append(keys[a][:size] == keys[b][:size], False).argmin())
        common.append(same - (same > items[rows[a]].prompt_length))
    last, stack = None, [(0, len(rows))]  # ranges of ranked items; those of one range have a prefix in common
    while stack:
        first, stop = stack.pop()
        if stop - first == 1:
            between = [] if last is None else common[min(first, last) + 1 : max(first, last) + 1]
            yield rows[ranked[first]], min(between, default=0)
            last = first
        else:
            least = min(common[first + 1 : stop])
            cuts = [first, *(i for i in range(first + 1, stop) if common[i] == least), stop]
            stack += sorted(itertools.pairwise(cuts), key=lambda cut: cut[1] - cut[0])


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


def _group_padded(
    units: list[_Unit], max_tokens: int, multiple: int, max_padding: float, small: int
) -> list[list[_Unit]]:
    """Group units, longest first: the first unit of a group sets its width and the others need little padding."""
    groups: list[list[_Unit]] = []
    size = 0  # of the last group if each unit were alone: the padding within a pair cannot be avoided
    for unit in sorted(units, key=lambda unit: -unit.longest):  # stable
        width = _round_up(groups[-1][0].longest, multiple) if groups else 0
        padded = (len(groups[-1]) + 1) * len(unit.rows) * width if groups else 0
        alone = len(unit.rows) * unit.longest
        size += alone
        if groups and padded <= max_tokens and (padded <= small or padded - size <= max_padding * padded):
            groups[-1].append(unit)
        else:
            groups.append([unit])
            size = alone
    return groups


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _build(items: Sequence[Item], rectangle: list[list[_Unit]], pad_id: int, multiple: int) -> Batch:
    used = [sum(unit.size for unit in units) for units in rectangle]
    shape = (len(rectangle), _round_up(max(used), multiple))
    # NumPy is several times faster than torch for lists and small slices.
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    position_ids, own_start = (np.zeros(shape, dtype=np.int64) for _ in range(2))
    known = next((item.routes for item in items if item.routes is not None), None)
    routes = None if known is None else np.full((*shape, *known.shape[1:]), np.iinfo(known.dtype).max, known.dtype)
    members, counts, index, target = [], [], [], []  # counts: trained tokens of each member
    paths = []  # row and columns of new tokens, runs on the path from the root, and first position of the tokens
    for row, units in enumerate(rectangle):
        own_start[row, used[row] :] = used[row]
        stop = 0
        for unit in units:
            path: list[tuple[int, int]] = []  # runs of the last item: first position, column of its position 0
            for member, shared in zip(unit.rows, unit.shared, strict=True):
                # Lists are slow to convert: the mask as bytes, and of the ids only those that are used below.
                trained = np.flatnonzero(np.frombuffer(bytes(items[member].mask), dtype=bool))
                skip = shared if path and (trained >= shared).all() else 0
                ids, length = np.array(items[member].ids[skip:], dtype=np.int64), len(items[member].ids)
                cuts = [shared, length] if path or not shared else [0, shared, length]
                for first, last in itertools.pairwise(cuts):
                    columns = slice(stop, stop + last - first)
                    path = [run for run in path if run[0] < first]
                    if first < last:
                        paths.append((row, columns, path, first))
                    if not path or path[-1][1] != stop - first:
                        path = [*path, (first, stop - first)]
                    stop = columns.stop
                    input_ids[row, columns] = ids[first - skip : last - skip]
                    position_ids[row, columns] = np.arange(first, last)
                    own_start[row, columns] = columns.start
                    if routes is not None and items[member].routes is not None:
                        routes[row, columns] = items[member].routes[first:last]
                index.append(row * shape[1] + _columns(path, trained - 1))
                if routes is not None and items[member].routes is not None and items[member].episode is not None:
                    _merge_routes(routes[row], items[member], _columns(path, np.arange(shared)))
                target.append(ids[trained - skip])
                counts.append(len(trained))
                members.append(member)
    own_stop = np.broadcast_to(np.arange(1, shape[1] + 1), shape).copy()
    num_runs = 1 << (max(1, *(len(path) for _, _, path, _ in paths)) - 1).bit_length()
    prefix = np.zeros((num_runs, 2, *shape), dtype=np.int64)
    runs = []
    for row, columns, path, first in paths:
        zero = row * shape[1]
        runs.append((zero + columns.start, zero + path[-1][1] + first - 1 if path else -1))
        cuts = [*(position for position, _ in path), first]
        for run, ((position, zero), end) in enumerate(zip(path, cuts[1:], strict=True), num_runs - len(path)):
            prefix[run, 0, row, columns], prefix[run, 1, row, columns] = position + zero, end + zero
    tensors = {
        "input_ids": input_ids, "position_ids": position_ids, "index": np.concatenate(index),
        "target": np.concatenate(target), "sequence": np.repeat(members, counts),
        "slot": np.repeat(np.arange(len(members)), counts),
    }  # fmt: skip
    return Batch(
        **{name: torch.from_numpy(x) for name, x in tensors.items()},
        spans=tuple(torch.from_numpy(bound) for bound in (*prefix.reshape(-1, *shape), own_start, own_stop)),
        rows=members, lengths=[len(items[member].ids) for member in members], used=used, runs=runs,
        routes=None if routes is None else torch.from_numpy(routes),
        sets=_padded_sets([items[member] for member in members], tensors["target"]),
    )  # fmt: skip


def _columns(path: list[tuple[int, int]], positions: np.ndarray) -> np.ndarray:
    """Return the columns of ascending positions."""
    columns = positions + path[0][1]
    for (_, before), (first, zero) in itertools.pairwise(path):
        columns[positions.searchsorted(first) :] += zero - before
    return columns


def _merge_routes(routes: np.ndarray, item: Item, columns: np.ndarray) -> None:
    """Of the routes of a shared token, keep the first, or those of the turn that sampled the next token."""
    none, old, new = np.iinfo(routes.dtype).max, routes[columns], item.routes[: len(columns)]
    trained = np.frombuffer(bytes(item.mask), dtype=bool)
    samples = np.append(trained[1:], False)[: len(columns)] & (np.arange(len(columns)) >= item.prompt_length)
    routes[columns] = np.where((old == none) | (samples[:, None, None] & (new != none)), new, old)


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
