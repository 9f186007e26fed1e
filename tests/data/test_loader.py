"""The loader: order, weights, epochs and exact resume."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.loader import Loader
from data.types import Example, Labelled, Prompt, TargetPrompt


def rows(count: int, weight: float = 1.0, first: int = 0) -> list[Prompt]:
    return [
        Prompt(source=f"file:{n}", prompt=str(n), ids=[n, n + 1], weight=weight) for n in range(first, first + count)
    ]


def test_an_epoch_has_every_row_once_and_orders_differ():
    loader = Loader(rows(12), batch_size=4, seed=0)
    epochs = [[row.ids[0] for _ in range(3) for row in loader.next()] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12))
    assert epochs[0] != epochs[1] and epochs[0] != list(range(12))
    other = Loader(rows(12), batch_size=12, seed=1)
    assert [row.ids[0] for row in other.next()] != epochs[0]


def test_no_shuffle_keeps_order():
    loader = Loader(rows(3), batch_size=2, seed=0, shuffle=False)
    assert [[row.ids[0] for row in loader.next()] for _ in range(3)] == [[0, 1], [2, 0], [1, 2]]


def test_epoch_counts_returned_rows():
    loader = Loader(rows(8), batch_size=6, seed=0)
    assert (loader.epoch, loader.rows_per_epoch) == (0.0, 8)
    loader.next()
    assert loader.epoch == 0.75
    loader.next()
    assert loader.epoch == 1.5


def test_batch_larger_than_the_data():
    batch = Loader(rows(3), batch_size=7, seed=0).next()
    assert sorted(Counter(row.ids[0] for row in batch).values()) == [2, 2, 3]


def test_weights():
    loader = Loader(rows(200) + rows(200, weight=2.25, first=200), batch_size=1, seed=0)
    assert loader.rows_per_epoch == 650
    counts = Counter()
    while loader.epoch < 1:
        counts[loader.next()[0].ids[0]] += 1
    assert all(counts[n] == 1 for n in range(200))
    assert {counts[n] for n in range(200, 400)} == {2, 3}
    extra = sum(counts[n] == 3 for n in range(200, 400)) / 200
    assert abs(extra - 0.25) < 0.1  # standard error 0.03


def test_fractional_weight_draws_other_rows_each_epoch():
    loader = Loader(rows(100, weight=0.5), batch_size=1, seed=0)
    epochs = []
    for epoch in range(1, 3):
        epochs.append([])
        while loader.epoch < epoch:
            epochs[-1].append(loader.next()[0].ids[0])
    assert all(len(set(epoch)) == len(epoch) and 30 < len(epoch) < 70 for epoch in epochs)
    assert set(epochs[0]) != set(epochs[1])


@settings(max_examples=50, deadline=None)
@given(
    count=st.integers(2, 9),
    batch_size=st.integers(1, 7),
    before=st.integers(0, 12),
    weight=st.sampled_from([1.0, 0.75, 1.5]),
    shuffle=st.booleans(),
)
def test_state_continues_exactly(count, batch_size, before, weight, shuffle):
    settings = dict(batch_size=batch_size, seed=3, shuffle=shuffle)
    loader = Loader(rows(count, weight), **settings)
    for _ in range(before):
        loader.next()
    state = json.loads(json.dumps(loader.state_dict()))
    fresh = Loader(rows(count, weight), **settings)
    fresh.load_state_dict(state)
    assert fresh.epoch == loader.epoch
    assert [fresh.next() for _ in range(6)] == [loader.next() for _ in range(6)]


def test_resume_on_other_data_is_rejected():
    state = Loader(rows(5), batch_size=2, seed=0).state_dict()
    for other in (rows(6), rows(5, first=1), rows(5, weight=2.0)):
        with pytest.raises(ValueError, match=f"data: .*5 rows then, {len(other)} now"):
            Loader(other, batch_size=2, seed=0).load_state_dict(state)
    with pytest.raises(ValueError, match="seed=1: .* seed=0"):
        Loader(rows(5), batch_size=2, seed=1).load_state_dict(state)


def test_masks_are_part_of_the_fingerprint():
    one = [Example(source="x", ids=[1, 2, 3], mask=[False, True, True])]
    two = [Example(source="x", ids=[1, 2, 3], mask=[False, False, True])]
    with pytest.raises(ValueError, match="1 rows then, 1 now"):
        Loader(two, batch_size=1, seed=0).load_state_dict(Loader(one, batch_size=1, seed=0).state_dict())


def test_edited_columns_and_labels_are_reported(capsys):
    def prompt(**columns):
        return Prompt(source="x:1", prompt="?", ids=[1], columns=columns)

    def labelled(label):
        return Labelled(source="x:1", prompt_ids=[1], completion_ids=[2], label=label)

    for before, after, warned in [
        (prompt(answer="4"), prompt(answer="4"), False),
        (prompt(answer="4"), prompt(answer="5"), True),
        (prompt(a=object()), prompt(a=object()), False),
        (labelled(True), labelled(False), True),
    ]:
        state = Loader([before], batch_size=1, seed=0).state_dict()
        Loader([after], batch_size=1, seed=0).load_state_dict(state)
        assert ("columns differ" in capsys.readouterr().err) is warned, after
        del state["columns"]  # as in older checkpoints
        Loader([after], batch_size=1, seed=0).load_state_dict(state)
        assert capsys.readouterr().err == ""


def test_the_fingerprint_of_targets_matches_older_checkpoints():
    """Recorded when the fields were called truth_ids and truth_mask."""
    row = TargetPrompt(source="a", prompt="2+2=", ids=[1, 2], target_ids=[3, 4, 5], target_mask=[True, False, True])
    recorded = "01eefd804c05dfc2197c1101fb7bce15b0ffeb2e867428da2582d98b9a40bc22"
    assert Loader([row], batch_size=1, seed=0).state_dict()["fingerprint"] == recorded


def test_errors():
    for data, batch_size, message in (
        ([], 1, "0 rows sum to 0"),
        (rows(1, weight=0.2), 1, "1 rows sum to 0.2"),
        (rows(1, weight=-1.0), 1, "weight=-1.0 of file:0"),
        (rows(2), 0, "batch_size=0"),
    ):
        with pytest.raises(ValueError, match=message):
            Loader(data, batch_size=batch_size, seed=0)
