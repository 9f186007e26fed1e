"""Unpaired preferences: formats, pairs as two rows, lengths and bad rows."""

from __future__ import annotations

import pytest

from data.format_options import FormatOptions
from data.formats.pairs import PAIR_FORMATS
from data.formats.unpaired import UNPAIRED_FORMATS
from data.rows.unpaired import load_labelled

USER = {"role": "user", "content": "2+2?"}
GOOD = {"role": "assistant", "content": "4"}
BAD = {"role": "assistant", "content": "5"}
PROMPTS = {
    "chatml": "{}<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n",
    "llama3": "{}<|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
}
SYSTEMS = {
    "chatml": "<|im_start|>system\nBe brief<|im_end|>\n",
    "llama3": "<|start_header_id|>system<|end_header_id|>\n\nBe brief<|eot_id|>",
}
CLOSE = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>"}
# The documented rows, without label and system; argilla_chat is documented in two shapes.
ROWS = [
    ("argilla", {"instruction": "2+2?", "completion": "4"}),
    ("argilla_chat", {"chosen": [USER], "completion": [GOOD]}),
    ("argilla_chat", {"completion": [USER, GOOD]}),
    ("intel", {"question": "2+2?", "completion": "4"}),
    ("prompt_pairs", {"prompt": "2+2?", "completion": "4"}),
    ("ultra", {"prompt": "2+2?", "completion": "4"}),
]
CHATML = PROMPTS["chatml"].format("")


@pytest.fixture
def load(write, tokenizer_of, chatml):
    """Return (prompt, completion, label) of each row, as text."""

    def load_rows(rows, name="auto", **settings):
        tokenizer = tokenizer_of("llama3") if name.startswith("llama3") else chatml
        loaded = load_labelled([write(*rows)], tokenizer, data_format=name, **settings)
        return [(tokenizer.decode(row.prompt_ids), tokenizer.decode(row.completion_ids), row.label) for row in loaded]

    return load_rows


def test_text_families(load):
    for family in PROMPTS:
        for kind, row in ROWS:
            rows = [
                {**row, "label": True},
                {**row, "label": False, "system": "Be brief"},
                {**row, "label": 1, "system": ""},
            ]
            prompts = [PROMPTS[family].format(system) for system in ("", SYSTEMS[family], "")]
            answer = "4" + CLOSE[family]
            expected = list(zip(prompts, [answer] * 3, [True, False, True], strict=True))
            assert load(rows, f"{family}.{kind}") == expected


def test_rows_of_a_single_label_cause_a_warning(load, capsys):
    rows = [{"prompt": "2+2?", "completion": "4", "label": True}] * 3
    load(rows)
    warning = capsys.readouterr().err
    assert "\nwarning: " in warning and "all 3 responses are desirable; " in warning
    assert "rows.jsonl" in warning and "only makes them more likely" in warning
    load([{**row, "label": 0} for row in rows])
    warning = "all 3 responses are undesirable; training on these alone only makes them less likely"
    assert warning in capsys.readouterr().err
    load([*rows, {**rows[0], "label": False}])
    assert "warning: " not in capsys.readouterr().err


def test_equal_responses_of_pairs_are_skipped_and_counted(load, capsys):
    pairs = [{"prompt": "2+2?", "chosen": "4", "rejected": "4"}, {"prompt": "2+2?", "chosen": "4", "rejected": "5"}]
    assert len(load(pairs)) == 2
    assert capsys.readouterr().err.startswith("data: of 2 rows, 1 skipped, chosen equals rejected\n")


def test_sharegpt_rows(load):
    turns = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
    rows = [{"conversations": turns, "label": True}, {"conversations": turns, "label": "false"}]
    assert load(rows, "sharegpt") == load(rows)
    assert load(rows) == [(CHATML, "4<|im_end|>", True), (CHATML, "4<|im_end|>", False)]


def test_user_defined(load):
    row = {"system": "Be brief", "prompt": "2+2?", "completion": "4", "label": "true"}
    for name in ("user_defined", "user_defined.default"):
        assert load([row], name) == [("2+2?", "4<|endoftext|>", True)]
    options = FormatOptions(
        field_prompt="q", field_system="s", field_completion="a", field_label="ok",
        prompt_format="[{system}] {prompt} ", completion_format="A: {completion}",
    )  # fmt: skip
    rows = [{"q": "2+2?", "a": "4", "ok": 0}, {"s": "S", "q": "2+2?", "a": "4", "ok": "False"}]
    assert load(rows, "user_defined", options=options) == [
        ("[] 2+2? ", "A: 4<|endoftext|>", False),
        ("[S] 2+2? ", "A: 4<|endoftext|>", False),
    ]


AUTO = [
    ({"prompt": "2+2?", "completion": "4"}, ("2+2?", "4<|endoftext|>")),
    ({"prompt": [USER], "completion": [GOOD]}, (CHATML, "4<|im_end|>")),
    ({"prompt": [USER], "completion": "4"}, (CHATML, "4<|im_end|>")),
    ({"completion": [USER, GOOD]}, (CHATML, "4<|im_end|>")),
    ({"messages": [USER, GOOD]}, (CHATML, "4<|im_end|>")),
]


def test_auto(load):
    for row, expected in AUTO:
        assert load([{**row, "label": False}]) == [(*expected, False)]


PAIRS = [
    ("auto", {"prompt": "2+2?", "chosen": "4", "rejected": "5"}, "2+2?", "<|endoftext|>"),
    ("auto", {"chosen": [USER, GOOD], "rejected": [USER, BAD]}, CHATML, "<|im_end|>"),
    ("chatml.intel", {"question": "2+2?", "chosen": "4", "rejected": "5"}, CHATML, "<|im_end|>"),
    ("chatml.argilla", {"instruction": "2+2?", "chosen_response": "4", "rejected_response": "5"}, CHATML, "<|im_end|>"),
    ("chatml.icr", {"input": "2+2?", "chosen": "4", "rejected": "5"}, CHATML, "<|im_end|>"),
    ("chatml.ultra", {"prompt": "2+2?", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, CHATML, "<|im_end|>"),
    ("chat_template.default", {"messages": [USER], "chosen": GOOD, "rejected": BAD}, CHATML, "<|im_end|>"),
    ("user_defined", {"prompt": "2+2?", "chosen": "4", "rejected": "5"}, "2+2?", "<|endoftext|>"),
]


def test_a_pair_becomes_two_rows(load):
    for name, row, prompt, close in PAIRS:
        assert load([row], name) == [(prompt, "4" + close, True), (prompt, "5" + close, False)]


def test_every_pair_format_works_here():
    assert PAIR_FORMATS.keys() <= UNPAIRED_FORMATS.keys()


def test_built_in_task_and_sources(chatml):
    rows = load_labelled(["task:addition:size=3"], chatml)
    assert [row.label for row in rows] == [True, False] * 3
    assert [row.source for row in rows[:3]] == ["task:addition:1 chosen", "task:addition:1 rejected",
                                                "task:addition:2 chosen"]  # fmt: skip


def test_lengths(load, capsys):
    rows = [{"prompt": "abc", "completion": text, "label": True} for text in ("d", "defgh")]
    assert load(rows, max_length=5) == [("abc", "d<|endoftext|>", True), ("abc", "de", True)]
    assert capsys.readouterr().err.startswith("data: of 2 rows, 1 truncated to max_length=5\n")
    with pytest.raises(ValueError, match="max_length=3: none of the 2 rows fits"):
        load(rows, max_length=3)


BAD_ROWS = [
    ("auto", {"prompt": "q", "completion": "a"}, "has no 'label'"),
    ("auto", {"prompt": "q", "completion": "a", "label": "good"}, "'label' is 'good'; it must be true or false"),
    ("auto", {"prompt": "q", "completion": "a", "label": -1}, "'label' is -1"),
    ("auto", {"prompt": "q", "completion": "a", "label": 0.7}, "'label' is 0.7"),
    ("auto", {"prompt": "q", "completion": "", "label": True}, "'completion' is empty"),
    ("auto", {"prompt": "q", "completion": [GOOD], "label": True}, "'completion' is of type list, not text"),
    ("auto", {"completion": [GOOD], "label": True}, "'completion' has one message"),
    ("auto", {"messages": [GOOD, USER], "label": True}, "'messages' ends with a user message"),
    ("auto", {"prompt": "q", "label": True}, "has no 'completion' .*'label'.*'messages'.*columns: prompt, label"),
    ("auto", {"prompt": "q", "answer": "4"}, "has no 'completion' .*'label'.* are for --method grpo"),
    ("chatml.argilla", {"instruction": "q", "label": True}, "has no 'completion'"),
    ("chatml.argilla_chat", {"completion": [GOOD], "label": True}, "has no 'chosen'"),
    ("chatml.argilla_chat", {"completion": "a", "label": True}, "'completion' is of type str, not a list of messages"),
    ("llama3.intel", {"prompt": "q", "completion": "a", "label": True}, "has no 'question'"),
    ("user_defined", {"prompt": "q", "completion": "a", "label": None}, "'label' is null"),
]


def test_bad_rows(load):
    for name, row, message in BAD_ROWS:
        with pytest.raises(ValueError, match=rf"rows\.jsonl:1: .*{message}"):
            load([row], name)


def test_real_rows(asset, chatml):
    path = f"{asset('data/llamafactory_kto_en_demo.jsonl.gz')}:split=train[:40]"
    rows = load_labelled([path], chatml, max_length=None)
    assert len(rows) == 40 and {row.label for row in rows} == {True, False}
    assert all(chatml.decode(row.completion_ids).endswith("<|im_end|>") for row in rows[:20])
