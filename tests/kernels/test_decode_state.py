"""State of decode rows: references against Python loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kernels.decode.state import advance_reference, locate_reference

STEPS = 7
CASES = ("all live", "some ended", "stop ids", "at the limit", "mixed")


class State(NamedTuple):
    """Everything that locate and advance read and write, except sampled tokens."""

    table: Tensor  # (B, pages) int32
    prefix_len: Tensor  # (B,) int32
    own_len: Tensor  # (B,) int32
    token: Tensor  # (B,) int64
    drawn: Tensor  # (B,) int32
    left: Tensor  # (B,) int32
    stop_ids: Tensor  # (S,) int64
    tick: Tensor  # (1,) int64
    out_ids: Tensor  # (N, M) int64
    out_logps: Tensor  # (N, M) float32

    def clone(self, device: str = "cpu") -> State:
        return State(*(x.to(device, copy=True) for x in self))

    def copy_(self, other: State) -> None:
        for target, source in zip(self, other, strict=True):
            target.copy_(source)

    def locate(self, run: Callable, page: int) -> tuple[Tensor, Tensor]:
        return run(self.table, self.prefix_len, self.own_len, page=page)

    def advance(self, run: Callable, ids: Tensor, logps: Tensor) -> None:
        rows = {"token": self.token, "own_len": self.own_len, "drawn": self.drawn, "left": self.left}
        assert run(ids, logps, self.stop_ids, self.tick, self.out_ids, self.out_logps, **rows) is None


def make_state(num_rows: int, page: int, case: str = "mixed", *, room: int = 3, seed: int = 0) -> State:
    """Build a state: prefixes of 0 to 4 pages and up to 3 pages of own tokens, with room for STEPS more."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    own_len = numbers(1, 3 * page + 1, num_rows)
    own_len[::3] = page * numbers(1, 4, len(own_len[::3]))  # the next token begins a page
    prefix_len = numbers(0, 4 * page + 1, num_rows)
    prefix_len[::4] = page * numbers(0, 5, len(prefix_len[::4]))
    left = {"all live": numbers(100, 200, num_rows), "stop ids": numbers(100, 200, num_rows),
            "some ended": 100 * numbers(0, 2, num_rows), "at the limit": numbers(1, 4, num_rows),
            "mixed": numbers(0, 6, num_rows)}[case]  # fmt: skip
    stop_ids = torch.full((4,), -1)
    if case in ("stop ids", "mixed"):
        stop_ids[:2] = torch.tensor([7, 3])
    return State(
        table=numbers(0, 1000, num_rows, 7 + STEPS), prefix_len=prefix_len, own_len=own_len,
        token=numbers(20, 30, num_rows).long(), drawn=numbers(0, 50, num_rows), left=left, stop_ids=stop_ids,
        tick=torch.tensor([1]), out_ids=torch.full((STEPS, num_rows + room), -5),
        out_logps=torch.full((STEPS, num_rows + room), -5.0),
    )  # fmt: skip


def make_drawn(num_rows: int, seed: int) -> tuple[Tensor, Tensor]:  # (B,) int64 ids, (B,) float32 log-probs
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, (num_rows,), generator=generator), -torch.rand(num_rows, generator=generator)


def naive_locate(state: State, page: int) -> tuple[list[int], list[int]]:
    """Expand each row's pages into a list of slots."""
    positions, places = [], []
    for pages, prefix, own in zip(state.table.tolist(), state.prefix_len.tolist(), state.own_len.tolist(), strict=True):
        every = [number * page + offset for number in pages for offset in range(page)]
        behind = prefix
        while behind % page:
            behind += 1
        positions.append(prefix + own - 1)
        places.append(every[behind + own - 1])
    return positions, places


def naive_advance(state: State, ids: Tensor, logps: Tensor) -> State:
    new = state.clone()
    line = int(state.tick)
    for row, number in enumerate(ids.tolist()):
        left = int(state.left[row])
        new.out_ids[line, row] = number if left > 0 else -1
        new.out_logps[line, row] = logps[row]
        if left > 1 and number not in state.stop_ids.tolist():
            new.left[row], new.token[row] = left - 1, number
            new.own_len[row] += 1
            new.drawn[row] += 1
        else:
            new.left[row] = 0
    new.tick[0] = line + 1
    return new


def assert_same(got: State, want: State) -> None:
    for name, x in want._asdict().items():
        assert getattr(got, name).dtype == x.dtype and torch.equal(getattr(got, name).cpu(), x), name


def check_locate(run: Callable, num_rows: int, page: int, device: str = "cpu") -> None:
    state = make_state(num_rows, page)
    position, place = state.clone(device).locate(run, page)
    assert position.dtype == torch.int32 and place.dtype == torch.int64
    assert (position.tolist(), place.tolist()) == naive_locate(state, page)


def check_advance(run: Callable, num_rows: int, case: str, device: str = "cpu", room: int = 3) -> None:
    """Run five consecutive steps, and check that the case occurred."""
    want = make_state(num_rows, 16, case, room=room)
    held, first = want.clone(device), want
    for step in range(5):
        drawn = make_drawn(num_rows, seed=step)
        held.advance(run, *(x.to(device) for x in drawn))
        want = naive_advance(want, *drawn)
        assert_same(held, want)
    assert want.tick.tolist() == [6] and (want.out_ids[[0, 6]] == -5).all() and (want.out_ids[:, num_rows:] == -5).all()
    ended, ended_before = want.left == 0, first.left == 0
    if case == "all live":
        assert not ended.any()
    if case == "some ended":
        assert ended.any() and not ended.all() and torch.equal(ended, ended_before)
    if case == "stop ids":
        assert ended.any() and not ended.all() and not ended_before.any()
    if case == "at the limit":
        assert ended.all() and not ended_before.any()


@pytest.mark.parametrize("page", [1, 16, 48])
def test_reference_locates(page):
    check_locate(locate_reference, 20, page)


@pytest.mark.parametrize("case", CASES)
def test_reference_advances(case):
    check_advance(advance_reference, 20, case)
    check_advance(advance_reference, 20, case, room=0)


def test_reference_advances_by_hand():
    """Rows that continue, ended before, sample a stop id, and sample their last token."""
    state = make_state(4, 16)
    state.left.copy_(torch.tensor([5, 0, 5, 1]))
    before = state.clone()
    state.advance(advance_reference, torch.tensor([4, 4, 7, 4]), torch.tensor([-0.1, -0.2, -0.3, -0.4]))
    assert state.out_ids[1, :4].tolist() == [4, -1, 7, 4]
    assert torch.equal(state.out_logps[1, :4], torch.tensor([-0.1, -0.2, -0.3, -0.4]))
    assert state.left.tolist() == [4, 0, 0, 0] and state.tick.tolist() == [2]
    assert state.token.tolist() == [4, *before.token[1:].tolist()]
    assert (state.own_len - before.own_len).tolist() == (state.drawn - before.drawn).tolist() == [1, 0, 0, 0]
