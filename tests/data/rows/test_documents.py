"""Documents of the strided mode: prompts, trained tokens, lengths and errors."""

from __future__ import annotations

import pytest

from data.rows.documents import load_documents
from data.strided import StridedPlan, make_strided, require_anchors

USER, ANSWER = {"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}
OPENING = "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n"
AGAIN = [USER, ANSWER, {"role": "user", "content": "33333+3="}, {"role": "assistant", "content": "33336"}]


def parts(tokenizer, document):
    """Return the text of the prompt and the trained text."""
    given = tokenizer.decode(document.ids[: document.prompt_length])
    return given, tokenizer.decode([document.ids[place] for place in document.trained()])


def test_plain_text_has_no_prompt(write, chatml, tokenizer_of):
    (document,) = load_documents([write({"text": "abc"})], chatml)
    assert (document.prompt_length, document.mask) == (0, None)
    assert document.source.endswith("rows.jsonl:1") and document.weight == 1.0
    assert chatml.decode(document.ids) == "abc<|endoftext|>"
    assert document.trained() == [1, 2, 3]
    tokenizer = tokenizer_of("llama3", bos="<|begin_of_text|>")
    (document,) = load_documents([write({"text": "abc"}) + ":weight=0.5"], tokenizer)
    assert tokenizer.decode(document.ids) == "<|begin_of_text|>abc<|endoftext|>"
    assert (document.prompt_length, document.mask, document.weight) == (0, None, 0.5)


TRAINED = [
    ({"prompt": "2+2=", "completion": "4"}, "auto", "2+2=", "4<|endoftext|>"),
    ({"messages": AGAIN}, "auto", OPENING, "4<|im_end|>33336<|im_end|>"),
    ({"question": "2+2=", "answer": "4"}, "question_answer", OPENING, "4<|im_end|>"),
    ({"instruction": "2+2=", "output": "4"}, "auto", OPENING, "4<|im_end|>"),
    ({"input": "2+2=", "output": "4"}, "ebft_strided_structured.transform", "2+2=", "4<|endoftext|>"),
    ({"messages": AGAIN}, "ebft_strided_chat.transform", OPENING, "4<|im_end|>33336<|im_end|>"),
    (
        {"messages": AGAIN}, "ebft_reasoning.transform_strided",
        f"{OPENING}4<|im_end|>\n{OPENING.replace('2+2', '33333+3')}", "33336<|im_end|>",
    ),
]  # fmt: skip


def test_prompt_and_trained_text(write, chatml):
    for row, name, given, trained in TRAINED:
        (document,) = load_documents([write(row)], chatml, data_format=name)
        assert parts(chatml, document) == (given, trained)
        assert document.mask is not None and document.mask.index(True) == document.prompt_length


def test_long_rows_are_truncated_or_skipped(write, chatml, capsys):
    rows = [{"input": "ab", "output": "cdefgh"}, {"input": "abcdefg", "output": "h"}, {"input": "abc", "output": "d"}]
    name = "ebft_strided_structured.transform"
    documents = load_documents([write(*rows)], chatml, data_format=name, max_length=5)
    assert [parts(chatml, document) for document in documents] == [("ab", "cde"), ("abc", "d<|endoftext|>")]
    log = "data: truncated 2 of 3 rows to 5 tokens\ndata: skipped 1 of 3 rows without a trained token\n"
    assert capsys.readouterr().err == log
    documents = load_documents([write(*rows)], chatml, data_format=name, max_length=99, context_length=5)
    assert [len(document.ids) for document in documents] == [5, 5]


def test_user_turns_have_no_anchors_and_are_not_targets(write, chatml):
    (document,) = load_documents([write({"messages": AGAIN})], chatml)
    plan = StridedPlan(stride=1, context_length=1, generate_max_len=2, n_samples_per_prompt=1)
    (batch,) = make_strided([document], plan, max_tokens=1)
    targets = [chatml.decode(batch.input_ids[0, places]) for places in batch.target_place]
    assert targets == ["4<|im_end|>", "33", "33", "33", "36", "6<|im_end|>"]
    assert chatml.decode(document.ids[: batch.anchor[0]]) == OPENING
    require_anchors([document], plan)
    long = StridedPlan(stride=1, context_length=1, generate_max_len=7, n_samples_per_prompt=1)
    with pytest.raises(ValueError, match="^generate_max_len=7: none of the 1 documents"):
        require_anchors([document], long)


def test_a_users_transform_and_errors(write, chatml, tmp_path, monkeypatch):
    (tmp_path / "strided_rows.py").write_text(
        "def shorten(cfg):\n    def transform(example):\n        return {'text': example['body'][:cfg]}\n"
        "    return transform, {'remove_columns': ['body']}\n"
    )
    monkeypatch.chdir(tmp_path)
    (document,) = load_documents([write({"body": "abcdef"})], chatml, data_format="strided_rows.shorten", cfg=3)
    assert chatml.decode(document.ids) == "abc<|endoftext|>"
    with pytest.raises(ValueError, match="^data_format=ebft_reasoning.transform: .*--mode structured"):
        load_documents([write({"messages": AGAIN})], chatml, data_format="ebft_reasoning.transform")
    with pytest.raises(ValueError, match="no such format; .*ebft_strided_chat.transform"):
        load_documents([write({"messages": AGAIN})], chatml, data_format="ebft_strided_chat.transfrom")
    with pytest.raises(ValueError, match="rows.jsonl:2: 'completion' is empty"):
        rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": ""}]
        load_documents([write(*rows)], chatml, data_format="ebft_strided_structured.transform")
