"""--val-set-size and --dedup: training rows and held-out rows."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from data.rows.held_out import content_key, held_out_numbers, train_and_held_out
from data.types import Example, Prompt


def settings(**more):
    return SimpleNamespace(**{"data": ("a",), "eval_data": (), "val_set_size": 0.0, "dedup": False,
                              "max_eval_rows": 500, **more})  # fmt: skip


def examples(count: int, name: str = "a") -> list[Example]:
    return [Example(source=f"{name}:{n}", ids=[1, n], mask=[False, True]) for n in range(count)]


def read(specs):
    return [row for spec in specs for row in examples(10, spec)]


@pytest.mark.parametrize(("size", "count"), [(0.1, 1), (0.25, 3), (0.001, 1), (1, 1), (4, 4), (0.89, 9)])
def test_a_fraction_is_rounded_up_and_a_count_is_exact(size, count):
    rows, held_out = train_and_held_out(settings(val_set_size=size), 0, read)
    assert len(held_out) == count == (math.ceil(size * 10) if size < 1 else size)
    assert sorted(rows + held_out, key=lambda row: int(row.source[2:])) == examples(10)
    for split in (rows, held_out):  # in data order
        assert split == sorted(split, key=lambda row: int(row.source[2:]))


def test_the_split_depends_only_on_the_seed():
    first = held_out_numbers(1000, 0.1, 3)
    assert first == held_out_numbers(1000, 100, 3) and len(first) == 100
    assert first != held_out_numbers(1000, 0.1, 4)
    spread = [sum(number // 250 == quarter for number in first) for quarter in range(4)]
    assert min(spread) > 10, "rows are drawn from everywhere"


@pytest.mark.parametrize("size", [0.95, 10, 11])
def test_a_row_must_be_left_to_train_on(size):
    with pytest.raises(ValueError, match=rf"val_set_size={size}: .* 1\d of 10 rows"):
        train_and_held_out(settings(val_set_size=size), 0, read)


def test_without_either_setting_rows_are_unchanged():
    calls = []
    rows, held_out = train_and_held_out(settings(eval_data=("b",)), 0, lambda specs: calls.append(specs) or read(specs))
    assert (rows, held_out) == (examples(10), examples(10, "b")) and calls == [("a",), ("b",)]


def test_rows_that_are_loaded_again_for_evaluation_are_the_same_rows():
    def read_eval(specs):
        return [replace(row, mask=[True, True]) for row in read(specs)]

    rows, held_out = train_and_held_out(settings(val_set_size=3), 0, read, read_eval, read_again=True)
    plain = train_and_held_out(settings(val_set_size=3), 0, read)
    assert rows == plain[0] and [row.source for row in held_out] == [row.source for row in plain[1]]
    assert all(row.mask == [True, True] for row in held_out)


def test_the_split_is_logged(capsys):
    train_and_held_out(settings(val_set_size=0.5, max_eval_rows=2), 0, read)
    log = "data: held out 5 of 10 rows (val_set_size=0.5); evaluating on the first 2\n"
    assert capsys.readouterr().err == log


def test_dedup_keeps_the_first_of_equal_rows_over_all_sources(capsys):
    rows, held_out = train_and_held_out(settings(data=("a", "b"), dedup=True), 0, read)
    assert (rows, held_out) == (examples(10), [])
    assert "data: removed 10 of 20 rows" in capsys.readouterr().err


def test_dedup_removes_training_rows_from_held_out_rows(capsys):
    def read_some(specs):
        return examples(4) if specs == ("a",) else [*examples(6, "b"), *examples(6, "c")]

    rows, held_out = train_and_held_out(settings(eval_data=("b",), dedup=True), 0, read_some)
    assert rows == examples(4) and held_out == examples(6, "b")[4:]
    assert "eval_data: removed 10 of 12 rows" in capsys.readouterr().err
    with pytest.raises(ValueError, match="dedup=True: all 10 rows of eval_data"):
        train_and_held_out(settings(eval_data=("b",), dedup=True), 0, read)


def test_rows_are_split_after_duplicates_are_removed():
    rows, held_out = train_and_held_out(settings(data=("a", "b"), dedup=True, val_set_size=0.5), 0, read)
    keys = [content_key(row) for row in rows + held_out]
    assert len(rows) == len(held_out) == 5 and len(set(keys)) == 10


def test_content_is_everything_but_source_and_weight():
    one = Prompt(source="a:1", prompt="2+2=", ids=[2], columns={"answer": "4", "more": {"x": [1]}})
    assert content_key(one) == content_key(replace(one, source="b:7", weight=0.5))
    for change in ({"columns": {"answer": "5"}}, {"ids": [3]}, {"prompt": [{"role": "user", "content": "2+2="}]}):
        assert content_key(one) != content_key(replace(one, **change))
