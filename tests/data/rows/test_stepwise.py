"""Solutions in steps: label positions, lengths and bad rows."""

from __future__ import annotations

import pytest

from data.rows.stepwise import load_steps


@pytest.fixture
def load(write, tokenizer_of):
    def load_rows(*rows, tokenizer=None, **settings):
        return load_steps([write(*rows)], tokenizer or tokenizer_of("plain"), **settings)

    return load_rows


ROW = {"prompt": "abc", "completions": ["de", "fgh"], "labels": [True, False]}
N = -100


def test_the_last_separator_token_of_each_step_is_labelled(load, tokenizer_of):
    tokenizer = tokenizer_of("plain")
    (row,) = load(ROW)
    assert tokenizer.decode(row.ids) == "abcde\nfgh\n"
    assert row.labels == [N, N, N, N, N, 1, N, N, N, 0]
    (row,) = load({**ROW, "labels": [0, 1]}, step_separator="##", data_format="auto")
    assert tokenizer.decode(row.ids) == "abcde##fgh##"
    assert row.labels == [N, N, N, N, N, N, 0, N, N, N, N, 1]
    (row,) = load({**ROW, "labels": ["True", "false"]})  # text, as in some exports
    assert row.labels == [N, N, N, N, N, 1, N, N, N, 0]


def test_last_step_only(load):
    (row,) = load(ROW, last_step_only=True)
    assert row.labels == [N] * 9 + [0]


def test_steps_are_tokenised_one_by_one(load, tokenizer_of):
    tokenizer = tokenizer_of("plain", merges=(("c", "d"), ("e", "f")))
    (row,) = load(ROW, tokenizer=tokenizer)
    assert [tokenizer.decode([token]) for token in row.ids] == list("abcde\nfgh\n")


def test_bos_and_messages(load, tokenizer_of, chatml):
    tokenizer = tokenizer_of("llama3", bos="<|begin_of_text|>")
    (row,) = load(ROW, tokenizer=tokenizer)
    assert tokenizer.decode(row.ids) == "<|begin_of_text|>abcde\nfgh\n" and row.labels[-1] == 0
    messages = [{"role": "user", "content": "abc"}]
    (row,) = load({**ROW, "prompt": messages}, tokenizer=chatml, system_prompt="S")
    assert chatml.decode(row.ids) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\nde\nfgh\n"
    )
    with pytest.raises(ValueError, match="system_prompt: has no effect"):
        load(ROW, system_prompt="S")


def test_lengths(load, capsys):
    (row,) = load(ROW, max_length=8)
    assert row.labels == [N, N, N, N, N, 1, N, N]
    assert capsys.readouterr().err == "data: of 1 rows, 1 truncated to max_length=8\n"
    (row,) = load(ROW, max_completion_length=3)
    assert row.labels == [N, N, N, N, N, 1]
    assert capsys.readouterr().err == "data: of 1 rows, 1 truncated to max_completion_length=3\n"
    short = {"prompt": "a", "completions": ["b"], "labels": [1]}
    (row,) = load(ROW, short, max_length=5)
    assert row.labels == [N, N, 1]
    assert "data: of 2 rows, 1 skipped, no label" in capsys.readouterr().err
    (row,) = load(ROW, short, max_length=8, last_step_only=True)
    assert row.source.endswith(":2")
    with pytest.raises(ValueError, match="max_length=5: none of the 1 rows"):
        load(ROW, context_length=5)


BAD_ROWS = [
    ({"labels": [True]}, "has 2 completions and 1 labels"),
    ({"labels": [True, "no"]}, r"labels\[1\] is 'no'"),
    ({"labels": [True, 2]}, r"labels\[1\] is 2"),
    ({"labels": True}, "'labels' is True; it must be a list"),
    ({"completions": [], "labels": []}, r"'completions' is \[\]"),
    ({"completions": ["a", 3]}, r"completions\[1\] is of type int, not text"),
    ({"prompt": ""}, "'prompt' is empty"),
    ({"prompt": None}, "'prompt' is null"),
]


def test_bad_rows(load, capsys):
    for change, message in BAD_ROWS:
        with pytest.raises(ValueError, match=rf"rows\.jsonl:2: {message}"):
            load(ROW, {**ROW, **change})
        assert len(load(ROW, {**ROW, **change}, bad_rows="skip")) == 1
        assert "data: of 2 rows, 1 skipped as bad, the first: " in capsys.readouterr().err


def test_invalid_settings_are_rejected(load):
    for name, value in (("step_separator", ""), ("max_length", 1), ("max_completion_length", 0)):
        with pytest.raises(ValueError, match=f"{name}={value!r}: "):
            load(ROW, **{name: value})


def test_built_in_steps(chatml):
    rows = load_steps(["task:steps:size=200"], chatml)
    labels = [[label for label in row.labels if label != N] for row in rows]
    assert len(rows) == 200 and all(len(row) == 3 for row in labels)
    wrong = sum(row.count(0) for row in labels) / 600
    assert abs(wrong - 1 / 3) < 0.06


def test_real_rows(asset, chatml):
    path = asset("data/bbmistake_stepwise.jsonl.gz")
    rows = load_steps([f"{path}:split=train[1600:1800]"], chatml, max_length=None)  # one step among them is empty
    assert len(rows) == 200
    for row in rows:
        assert len(row.ids) == len(row.labels) and {1, 0, N} >= set(row.labels) != {N}
