"""Built-in tasks: answers, splits, rejected answers and imperfect teachers."""

from __future__ import annotations

import itertools
import re

import pytest

from data.tasks import SPLITS, TASKS, add_up, bucket, forget_carries, make_rows


def content(row):
    return row["prompt"][0]["content"]


def pair(row):
    a, b = content(row).rstrip("=").split("+")
    return (min(int(a), int(b)), max(int(a), int(b)))


def check(name: str, text: str) -> str:
    """Compute the answer from the text."""
    body = text.removesuffix("=")
    if name == "reverse":
        return body.removeprefix("reverse ")[::-1]
    if name == "sort":
        return "".join(sorted(body.removeprefix("sort ")))
    return str(eval(body))  # noqa: S307 - "37+58"


def test_addition_row():
    row = make_rows("addition", split="train", size=1)[0]
    assert row.keys() == {"prompt", "answer", "completion", "chosen", "rejected"}
    assert row["prompt"][0]["role"] == "user"
    a, b = pair(row)
    assert content(row) in (f"{a}+{b}=", f"{b}+{a}=") and row["answer"] == str(a + b)


SOLVABLE = [name for name, task in TASKS.items() if not task.tool]
# Difficulties with few enough problems to list quickly.
SMALL = {"sort": 3, "steps": 2, "reverse": 2, "multiplication": 1, "subtraction": 1}


def test_answers_are_right():
    for name in SOLVABLE:
        for split in SPLITS:
            for row in make_rows(name, split=split, size=5, seed=3, difficulty=SMALL.get(name)):
                assert row["answer"] == check(name, content(row))
                assert row["completion"].split("\n")[-1].split("=")[-1] == row["answer"]
                assert name == "steps" or row["completion"] == row["answer"]


def test_rejected_is_wrong_and_as_long_as_chosen():
    for name in SOLVABLE:
        for difficulty in (1, 2, SMALL.get(name, 3)):
            for row in make_rows(name, size=100, seed=1, difficulty=difficulty):
                assert row["chosen"] == row["completion"] != row["rejected"]
                assert len(row["rejected"]) == len(row["chosen"])
                last = row["rejected"].split("=")[-1].removeprefix("-")
                assert name in ("reverse", "sort") or len(last) == 1 or not last.startswith("0")


def test_rejected_sums_forget_carries_if_that_is_wrong_and_as_long():
    rejected = {content(row): row["rejected"] for row in make_rows("addition", split="sft", seed=0)}
    slips = {text: forget_carries(text) for text in rejected}
    fitting = [
        text
        for text, slip in slips.items()
        if slip != check("addition", text) and len(slip) == len(check("addition", text))
    ]
    assert len(fitting) > 900 and all(rejected[text] == slips[text] for text in fitting)


def test_steps():
    assert add_up("3+8+5=") == ["3+8=11", "11+5=16"]
    rows = make_rows("steps", size=2000, seed=0)
    for row in rows:
        labels, completions = row["labels"], row["completions"]
        right = [check("steps", step.split("=")[0]) == step.split("=")[1] for step in completions]
        assert len(completions) == len(labels) == 3
        slip = labels.index(False) if False in labels else 3
        assert labels == [True] * slip + [False] * (3 - slip)
        assert right == [number != slip for number in range(3)]  # steps after a slip are correct sums of a wrong number
        assert row["completion"].split("\n") == add_up(content(row))
    clean = sum(all(row["labels"]) for row in rows) / len(rows)
    assert abs(clean - 0.5) < 0.05
    first = [row["labels"].index(False) for row in rows if False in row["labels"]]
    assert all(abs(first.count(step) / len(first) - 1 / 3) < 0.06 for step in range(3))


def test_a_lookup_is_answered_only_by_its_table():
    rows = make_rows("lookup", split="sft", size=500, seed=3)
    for row in rows:
        key = content(row).removesuffix("?")
        assert row.keys() == {"prompt", "answer", "table", "completion"}
        assert len(key) == 3 and row["table"] == {key: row["answer"]} and re.fullmatch("=[1-9][0-9]", row["answer"])
        assert [(turn["role"], turn["content"]) for turn in row["completion"]] == [
            ("assistant", f"[lookup('{key}')]"), ("tool", row["answer"]), ("assistant", row["answer"])
        ]  # fmt: skip
    assert len({row["answer"] for row in rows}) > 80  # too many to guess
    assert {len(content(row)) for row in make_rows("lookup", size=50, difficulty=5)} == {6}


def test_a_sloppy_lookup_gives_up_without_a_call():
    clean = make_rows("lookup", split="sft", size=1000, seed=5)
    sloppy = make_rows("lookup", split="sft", size=1000, seed=5, sloppy=0.75)
    assert [row["prompt"] for row in clean] == [row["prompt"] for row in sloppy]
    gave_up = [row["completion"] == "?" for row in sloppy]
    assert abs(sum(gave_up) / 1000 - 0.75) < 0.055  # about 4 standard errors
    assert all(lazy or row == other for lazy, row, other in zip(gave_up, sloppy, clean, strict=True))


def test_subtraction_can_go_negative():
    answers = [int(row["answer"]) for row in make_rows("subtraction", size=200)]
    assert min(answers) < 0 < max(answers)


def test_addition_splits_share_no_unordered_pair_for_any_seed():
    pairs = {
        split: {pair(row) for seed in (0, 1) for row in make_rows("addition", split=split, seed=seed)}
        for split in SPLITS
    }
    for one, other in itertools.combinations(SPLITS, 2):
        assert not pairs[one] & pairs[other]
    total = sum(map(len, pairs.values()))
    fractions = {split: len(keys) / total for split, keys in pairs.items()}
    assert abs(fractions["sft"] - 0.5) < 0.05 and abs(fractions["train"] - 0.4) < 0.05
    assert abs(fractions["eval"] - 0.1) < 0.03


def test_splits_share_no_content():
    for name in TASKS:
        seen = {
            split: {content(r) for r in make_rows(name, split=split, difficulty=SMALL.get(name))} for split in SPLITS
        }
        for one, other in itertools.combinations(SPLITS, 2):
            assert not seen[one] & seen[other]


def test_large_spaces_are_sampled_without_repeats_and_stay_disjoint():
    splits = {split: make_rows("addition", split=split, size=400, difficulty=9) for split in SPLITS}
    pairs = {split: {pair(row) for row in rows} for split, rows in splits.items()}
    assert all(len(keys) == 400 for keys in pairs.values())
    for split, keys in pairs.items():
        assert all(bucket("addition", f"{a},{b}") in SPLITS[split] for a, b in keys)


def test_bucket_is_stable():
    assert [bucket("addition", key) for key in ("0,0", "37,58", "99,99")] == [74, 55, 74]


def test_the_seed_determines_rows():
    assert make_rows("addition", size=20, seed=1) == make_rows("addition", size=20, seed=1)
    assert make_rows("addition", size=20, seed=1) != make_rows("addition", size=20, seed=2)


def test_default_sizes_and_difficulty():
    rows = {split: make_rows("addition", split=split) for split in ("train", "sft", "eval")}
    assert [len(split) for split in rows.values()] == [4096, 8192, 500]
    operands = {n for row in rows["train"] for n in pair(row)}
    assert (min(operands), max(operands)) == (0, 99)
    assert max(n for row in make_rows("addition", difficulty=1) for n in pair(row)) == 9


def test_eval_rows_are_distinct_and_others_repeat():
    rows = make_rows("addition", split="eval", difficulty=1)
    assert len({content(row) for row in rows}) == len(rows) < 100
    with pytest.raises(ValueError, match=f"size=101 exceeds the {len(rows)} problems of split=eval at difficulty=1"):
        make_rows("addition", split="eval", difficulty=1, size=101)
    repeated = make_rows("addition", split="train", difficulty=1, size=300)
    assert len(repeated) == 300 and len({content(row) for row in repeated}) < 100


def test_forget_carries():
    cases = {"37+58=": "85", "58+37=": "85", "99+1=": "90", "9+1=": "0", "12+34=": "46", "50+50=": "0", "7+98=": "95"}
    assert {text: forget_carries(text) for text in cases} == cases


def test_boxed_rows():
    plain = make_rows("addition", split="sft", size=1000, seed=5, sloppy=0.5)
    boxed = make_rows("addition", split="sft", size=1000, seed=5, sloppy=0.5, boxed=0.25)
    marked = [row["completion"].startswith("[") for row in boxed]
    assert [row["completion"].strip("[]") for row in boxed] == [row["completion"] for row in plain]
    assert all(row["completion"].endswith("]") == mark for row, mark in zip(boxed, marked, strict=True))
    assert 200 < sum(marked) < 300


def test_sloppy_rows():
    clean = make_rows("addition", split="sft", size=1000, seed=5)
    sloppy = make_rows("addition", split="sft", size=1000, seed=5, sloppy=0.5)
    always = make_rows("addition", split="sft", size=1000, seed=5, sloppy=1.0)
    assert [row["prompt"] for row in clean] == [row["prompt"] for row in sloppy]
    assert all(row["completion"] == forget_carries(content(row)) for row in always)
    assert all(row["completion"] in (row["answer"], forget_carries(content(row))) for row in sloppy)
    carrying = [row for row in sloppy if forget_carries(content(row)) != row["answer"]]
    slipped = sum(row["completion"] != row["answer"] for row in carrying) / len(carrying)
    assert abs(slipped - 0.5) < 0.07  # about 4 standard errors
    assert sloppy == make_rows("addition", split="sft", size=1000, seed=5, sloppy=0.5)


ERRORS = [
    (dict(name="adition"), "did you mean 'addition'"),
    (dict(name="addition", split="test"), "split=test does not exist"),
    (dict(name="addition", size=0), "size=0"),
    (dict(name="addition", difficulty=0), "difficulty=0"),
    (dict(name="addition", sloppy=0.5), "sloppy=0.5 has no effect"),
    (dict(name="sort", split="sft", sloppy=0.5), "sloppy=0.5 has no effect"),
    (dict(name="lookup", split="sft", boxed=0.5), "boxed=0.5 has no effect .* task:addition:split=sft"),
    (dict(name="addition", split="sft", sloppy=2.0), "sloppy=2.0"),
]


def test_errors():
    for call, message in ERRORS:
        with pytest.raises(ValueError, match=message):
            make_rows(**call)
