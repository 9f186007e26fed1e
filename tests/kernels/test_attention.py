from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference
from kernels.attention import packed_mask


@st.composite
def segments(draw) -> Tensor:  # (R, T)
    """Rows of sequences laid end to end, each filled up with padding at the right; a row may be all padding."""
    width = draw(st.integers(1, 14))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        row: list[int] = []
        for number in range(draw(st.integers(0, 4))):
            row += [number] * draw(st.integers(1, 6))
        rows.append((row + [-1] * width)[:width])
    return torch.tensor(rows)


@settings(max_examples=80, deadline=None)
@given(segment_ids=segments(), window=st.one_of(st.none(), st.integers(1, 8)))
def test_packed_mask_equals_reference(segment_ids, window):
    got = packed_mask(segment_ids, window=window)
    assert got.dtype == torch.bool and got.shape == (len(segment_ids), 1, *[segment_ids.shape[1]] * 2)
    assert torch.equal(got, reference.packed_mask(segment_ids, window=window))


@settings(max_examples=40, deadline=None)
@given(segment_ids=segments(), window=st.one_of(st.none(), st.integers(1, 8)))
def test_every_position_sees_itself_so_no_softmax_is_empty(segment_ids, window):
    mask = packed_mask(segment_ids, window=window)
    assert mask.diagonal(dim1=2, dim2=3).all()


def test_packed_mask_by_hand():
    mask = packed_mask(torch.tensor([[0, 0, 0, 1, 1, -1]]))[0, 0].int().tolist()
    assert mask == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


def test_window_counts_the_position_itself():
    mask = packed_mask(torch.tensor([[0, 0, 0, 0, 1, 1]]), window=2)[0, 0].int().tolist()
    assert mask == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1, 1],
    ]


@pytest.mark.parametrize("window", [5, 6, 100])
def test_window_wider_than_every_sequence_changes_nothing(window):
    segment_ids = torch.tensor([[0, 0, 0, 0, 0, 1, 1, -1], [0, 1, 1, 1, 1, 2, 2, 2]])
    assert torch.equal(packed_mask(segment_ids, window=window), packed_mask(segment_ids))


def test_rows_do_not_touch_each_other():
    rows = torch.tensor([[0, 0, 1, 1], [0, 1, 1, -1]])
    both = packed_mask(rows)
    assert torch.equal(both, torch.cat([packed_mask(rows[:1]), packed_mask(rows[1:])]))
