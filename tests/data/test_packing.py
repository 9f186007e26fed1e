from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.packing import Item, make_batches


@st.composite
def item_lists(draw):
    """Items whose ids are unique over the list, so that a token found in a batch names its origin."""
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=14))
    items, first = [], 1
    for length in lengths:
        mask = [False, *draw(st.lists(st.booleans(), min_size=length - 1, max_size=length - 1))]
        items.append(Item(list(range(first, first + length)), mask))
        first += length
    return items


def trained(batches):
    return sorted((int(s), int(t)) for batch in batches for s, t in zip(batch.sequence, batch.target, strict=True))


def test_packed_values():
    items = [Item([5, 6, 7], [False, True, True]), Item([8, 9], [False, True])]
    (batch,) = make_batches(items, max_tokens=5)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert batch.segment_ids.tolist() == [[0, 0, 0, 1, 1]]
    assert batch.index.tolist() == [0, 1, 3]
    assert batch.target.tolist() == [6, 7, 9]
    assert batch.sequence.tolist() == [0, 0, 1]
    assert batch.rows == [0, 1] and batch.lengths == [3, 2] and batch.num_tokens == 5


def test_padded_values():
    items = [Item([8, 9], [False, True]), Item([5, 6, 7], [False, False, True])]
    (batch,) = make_batches(items, max_tokens=6, packing=False, pad_id=77)
    assert batch.input_ids.tolist() == [[5, 6, 7], [8, 9, 77]]  # longest first
    assert batch.position_ids.tolist() == [[0, 1, 2], [0, 1, 0]]
    assert batch.segment_ids.tolist() == [[0, 0, 0], [0, 0, -1]]
    assert batch.index.tolist() == [1, 3]
    assert batch.target.tolist() == [7, 9]
    assert batch.sequence.tolist() == [1, 0]
    assert batch.num_tokens == 5


def test_chunks_are_in_order_and_even():
    items = [Item([n, n], [False, True]) for n in range(7)]
    batches = make_batches(items, accumulation=3, max_tokens=100)
    assert [batch.rows for batch in batches] == [[0, 1], [2, 3], [4, 5, 6]]
    assert [batch.rows for batch in make_batches(items[:1], accumulation=4, max_tokens=9)] == [[0]]


def test_first_fit_fills_gaps():
    items = [Item([1] * n, [False] + [True] * (n - 1)) for n in (6, 5, 4, 3)]
    assert [batch.rows for batch in make_batches(items, max_tokens=10)] == [[0, 2], [1, 3]]


def test_first_token_cannot_be_trained():
    with pytest.raises(AssertionError, match="item 1"):
        make_batches([Item([1, 2], [False, True]), Item([1, 2], [True, True])], max_tokens=8)


def test_no_trained_token_gives_an_empty_index():
    (batch,) = make_batches([Item([1, 2], [False, False])], max_tokens=8)
    assert batch.index.shape == batch.target.shape == batch.sequence.shape == (0,)
    assert batch.index.dtype == torch.int64


def test_to_moves_every_tensor():
    (batch,) = make_batches([Item([1, 2], [False, True])], max_tokens=8)
    moved = batch.to("meta")
    assert {getattr(moved, name).device.type for name in ("input_ids", "position_ids", "segment_ids", "index", "target",
                                                          "sequence")} == {"meta"}  # fmt: skip
    assert moved.rows == batch.rows


@settings(max_examples=150, deadline=None)
@given(items=item_lists(), budget=st.integers(1, 40), accumulation=st.integers(1, 4), packing=st.booleans())
def test_every_token_once_and_budget_kept(items, budget, accumulation, packing):
    batches = make_batches(items, accumulation=accumulation, max_tokens=budget, packing=packing, pad_id=0)
    seen = torch.cat([batch.input_ids[batch.segment_ids >= 0] for batch in batches]).tolist()
    assert sorted(seen) == [token for item in items for token in item.ids]
    assert sorted(row for batch in batches for row in batch.rows) == list(range(len(items)))
    for batch in batches:
        assert batch.input_ids.numel() <= budget or len(batch.rows) == 1
        assert batch.num_tokens == int((batch.segment_ids >= 0).sum())
        assert bool((batch.input_ids[batch.segment_ids < 0] == 0).all())
        assert batch.input_ids.shape[0] == (1 if packing else len(batch.rows))


@settings(max_examples=150, deadline=None)
@given(items=item_lists(), budget=st.integers(1, 40), accumulation=st.integers(1, 4), packing=st.booleans())
def test_index_target_and_sequence_point_into_the_items(items, budget, accumulation, packing):
    batches = make_batches(items, accumulation=accumulation, max_tokens=budget, packing=packing)
    for batch in batches:
        flat_ids, flat_positions = batch.input_ids.flatten(), batch.position_ids.flatten()
        order = []
        for index, target, sequence in zip(batch.index, batch.target, batch.sequence, strict=True):
            item, position = items[sequence], int(flat_positions[index])
            assert flat_ids[index] == item.ids[position]  # the state that predicts stands one before its target
            assert target == item.ids[position + 1] and item.mask[position + 1]
            order.append((batch.rows.index(int(sequence)), position))
        assert order == sorted(order)
        starts = (flat_positions == 0) & (batch.segment_ids.flatten() >= 0)
        assert int(starts.sum()) == len(batch.rows)
    expected = [(n, t) for n, item in enumerate(items) for t, m in zip(item.ids, item.mask, strict=True) if m]
    assert trained(batches) == expected


@settings(max_examples=60, deadline=None)
@given(items=item_lists(), budget=st.integers(1, 40), accumulation=st.integers(1, 4))
def test_packed_and_padded_hold_the_same_trained_tokens(items, budget, accumulation):
    packed = make_batches(items, accumulation=accumulation, max_tokens=budget)
    padded = make_batches(items, accumulation=accumulation, max_tokens=budget, packing=False)
    assert trained(packed) == trained(padded)
    again = make_batches(items, accumulation=accumulation, max_tokens=budget)
    assert [batch.rows for batch in again] == [batch.rows for batch in packed]


@given(
    st.lists(st.tuples(st.integers(2, 9), st.integers(2, 9)), min_size=1, max_size=12),
    st.integers(1, 30),
    st.integers(1, 4),
    st.booleans(),
)
def test_pairs_stay_together(pairs, max_tokens, accumulation, packing):
    items = [Item(list(range(1, n + 1)), [False] + [True] * (n - 1)) for pair in pairs for n in pair]
    batches = make_batches(items, accumulation=accumulation, max_tokens=max_tokens, packing=packing, together=2)
    for batch in batches:
        assert all(
            first % 2 == 0 and second == first + 1
            for first, second in zip(batch.rows[::2], batch.rows[1::2], strict=True)
        )
        assert batch.input_ids.numel() <= max_tokens or len(batch.rows) == 2
    assert sorted(row for batch in batches for row in batch.rows) == list(range(len(items)))
