"""SFT rows: trained tokens, boundaries and bad rows."""

from __future__ import annotations

import json
import re

import pytest

from data.chat import Trained, set_chat_template
from data.rows.sft import load_examples

USER = {"role": "user", "content": "2+2="}
ANSWER = {"role": "assistant", "content": "4"}


def texts(tokenizer, example):
    """Return the untrained and the trained text of an example."""
    ids = {False: [], True: []}
    for token, trained in zip(example.ids, example.mask, strict=True):
        ids[trained].append(token)
    return tokenizer.decode(ids[False]), tokenizer.decode(ids[True])


SYSTEM = {"role": "system", "content": "Be brief."}
SYSTEM_TEXT = "<|im_start|>system\nBe brief.<|im_end|>\n"
OPENING = "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n"


KINDS_OF_ROWS = [
    ({"messages": [USER, ANSWER]}, OPENING + "\n", "4<|im_end|>"),
    ({"prompt": "2+2=", "completion": "4"}, "2+2=", "4<|endoftext|>"),
    ({"prompt": "2+2=", "completion": "4<|endoftext|>"}, "2+2=", "4<|endoftext|>"),
    ({"prompt": [USER], "completion": "4"}, OPENING + "\n", "4<|im_end|>"),
    ({"prompt": [USER], "completion": [ANSWER]}, OPENING + "\n", "4<|im_end|>"),
    ({"text": "abc"}, "a", "bc<|endoftext|>"),
    ({"instruction": "2+2=", "input": "", "output": "4"}, OPENING + "\n", "4<|im_end|>"),
    ({"prompt": "2+2=", "completion": None, "text": "abc"}, "a", "bc<|endoftext|>"),
    ({"messages": [USER, ANSWER], "system": "Be brief."}, SYSTEM_TEXT + OPENING + "\n", "4<|im_end|>"),
    ({"messages": [SYSTEM, USER, ANSWER], "system": "Ramble."}, SYSTEM_TEXT + OPENING + "\n", "4<|im_end|>"),
    ({"messages": [USER, ANSWER], "system": ""}, "<|im_start|>system\n<|im_end|>\n" + OPENING + "\n", "4<|im_end|>"),
    ({"messages": [USER, ANSWER], "system": None}, OPENING + "\n", "4<|im_end|>"),
    ({"messages": json.dumps([USER, ANSWER]), "system": "Be brief."}, SYSTEM_TEXT + OPENING + "\n", "4<|im_end|>"),
    ({"messages": [USER | {"role": "human"}, ANSWER | {"role": "gpt", "train": False}]}, OPENING + "\n", "4<|im_end|>"),
    ({"messages": [ANSWER, USER]}, "<|im_start|>assistant\n\n" + OPENING[: -len("<|im_start|>assistant\n")],
     "4<|im_end|>"),
]  # fmt: skip


def test_kinds_of_rows(write, chatml):
    for row, untrained, trained in KINDS_OF_ROWS:
        (example,) = load_examples([write(row)], chatml)
        assert texts(chatml, example) == (untrained, trained)


def test_plain_prompts_are_logged_if_the_model_has_a_template(write, chatml, tokenizer_of, capsys):
    plain, log = {"prompt": "2+2=", "completion": "4"}, "the prompts are plain text and are not rendered"
    load_examples([write(plain)], chatml)
    assert log in capsys.readouterr().err
    load_examples([write(plain)], tokenizer_of("plain"))
    load_examples([f"{write(plain)}:format=user_defined,field_prompt=prompt,field_completion=completion"], chatml)
    load_examples([write(plain, {"messages": [USER, ANSWER]}, {"text": "abc"})], chatml)
    load_examples([write({"text": "abc"})], chatml)
    assert log not in capsys.readouterr().err


def test_a_system_message_can_be_dropped(write, chatml):
    path = write({"messages": [USER, ANSWER], "system": "Be brief."}, {"messages": [SYSTEM, USER, ANSWER]})
    for example in load_examples([f"{path}:format=chat_template,system_message=drop"], chatml):
        assert texts(chatml, example) == (OPENING + "\n", "4<|im_end|>")


def test_assistant_turns_of_a_prompt_are_context(write, chatml):
    prompt = [USER, ANSWER, {"role": "user", "content": "3+3="}]
    (example,) = load_examples([write({"prompt": prompt, "completion": "6"})], chatml)
    assert texts(chatml, example)[1] == "6<|im_end|>"
    (example,) = load_examples([write({"messages": [*prompt, {"role": "assistant", "content": "6"}]})], chatml)
    assert texts(chatml, example)[1] == "4<|im_end|>6<|im_end|>"


PARTS = [  # parts of the answer, and the trained ones; "abc" is one token
    ([{"type": "text", "text": "4 ", "train": False}, {"text": "so"}], "so"),
    ([{"text": "x", "weight": 1}, {"content": "y", "weight": 0}, {"value": "z", "train": None}], "xz"),
    ([{"text": "xab", "train": True}, {"text": "c", "train": False}], "xabc"),
    ([{"text": "xa", "train": True}, {"text": "bc", "train": False}], "x"),
    ([{"text": "xa", "train": False}, {"text": "bc", "train": True}], "abc"),
    ([{"text": "xab", "train": False}, {"text": "cy", "train": True}], "y"),
    ([{"text": "x", "train": False}], ""),
    ([{"text": "x"}, {"text": ""}], "x"),
]


def test_parts_of_a_message_can_be_excluded(write, tokenizer_of):
    tokenizer = tokenizer_of("llama3", bos="<|begin_of_text|>", merges=(("a", "b"), ("ab", "c")))
    set_chat_template(tokenizer, "llama3")
    for parts, wanted in PARTS:
        padded = [{"text": "  "}, *parts]  # stripped by the template
        for row in ({"messages": [USER, {**ANSWER, "content": padded}]},
                    {"prompt": [USER], "completion": [{**ANSWER, "content": padded}]}):  # fmt: skip
            (example,) = load_examples([write(row)], tokenizer)
            assert texts(tokenizer, example)[1] == wanted + "<|eot_id|>"
    ask = {**USER, "content": [{"text": "2+", "weight": 0}, {"text": "2=", "weight": 1}]}
    (example,) = load_examples([write({"messages": [ask, ANSWER]})], tokenizer)
    assert texts(tokenizer, example)[1] == "2=<|eot_id|>4<|eot_id|>"
    thought = {**ANSWER, "reasoning_content": [{"text": "hm", "train": False}]}
    marked = {**ANSWER, "content": [{"text": "<|begin_of_text|>", "train": True}]}
    for answer, message in ((thought, "reasoning_content has parts with train"), (marked, "cannot be found")):
        with pytest.raises(ValueError, match=rf"rows.jsonl:1: messages\[1\]: .*{message}"):
            load_examples([write({"messages": [USER, answer]})], tokenizer)


def test_a_system_text_in_the_turn_of_the_assistant_is_not_trained(write, tokenizer_of):
    tokenizer = tokenizer_of("gemma", bos="<bos>")
    set_chat_template(tokenizer, "gemma")
    (example,) = load_examples([write({"messages": [SYSTEM, ANSWER, USER]})], tokenizer)
    assert texts(tokenizer, example)[1] == "4<end_of_turn>"


USER_DEFINED = "format=user_defined,tokenise=apart,field_prompt=ask,field_completion=reply,"
TWO_INPUTS = USER_DEFINED + "prompt_format={system}{prompt} ,input_format={system}{prompt}|{input} ,default_system=S "
OTHER_COLUMNS = TWO_INPUTS + ",system_format=<{system}>,field_input=more,field_system=sys"
USER_DEFINED_ROWS = [
    (TWO_INPUTS, {}, "S Q "),
    (TWO_INPUTS, {"input": "", "system": "T "}, "T Q "),
    (TWO_INPUTS, {"input": "I", "system": ""}, "Q|I "),
    (TWO_INPUTS, {"input": "I", "system": None}, "Q|I "),
    (OTHER_COLUMNS, {"input": "I", "system": "T"}, "<S >Q "),
    (OTHER_COLUMNS, {"more": "I", "sys": "T"}, "<T>Q|I "),
]


def test_a_prompt_of_user_defined_has_two_inputs_and_a_system_text(write, tokenizer_of):
    tokenizer = tokenizer_of("plain", merges=(("\u0120", "4"),))
    for options, columns, prompt in USER_DEFINED_ROWS:
        path = write({"ask": "Q", "reply": "4", **columns})
        (example,) = load_examples([f"{path}:{options}"], tokenizer)
        assert texts(tokenizer, example) == (prompt, "4<|endoftext|>")
        (together,) = load_examples([f"{path}:{options.replace('apart', 'together')}"], tokenizer)
        assert texts(tokenizer, together) == (prompt[:-1], " 4<|endoftext|>")


def test_long_text_is_split(write, chatml, capsys):
    path = write({"text": "abcdefghi"}, {"text": "ab"}, {"text": "abcdefg"}, {"text": "abcd"})
    spec = f"{path}:format=completion,long_text="
    examples = load_examples([spec + "split"], chatml, max_length=4)
    assert [texts(chatml, example) for example in examples] == [
        ("a", "bcd"), ("e", "fgh"), ("i", "<|endoftext|>"), ("a", "b<|endoftext|>"), ("a", "bcd"),
        ("e", "fg<|endoftext|>"), ("a", "bcd"),
    ]  # fmt: skip
    names = [example.source.rpartition(":")[2] for example in examples]
    assert names == ["1#1", "1#2", "1#3", "2", "3#1", "3#2", "4#1"]
    assert capsys.readouterr().err == "data: of 4 rows, 3 split into chunks of 4 tokens\n"
    assert len(load_examples([spec + "truncate"], chatml, max_length=4)) == 4
    assert "truncated 3 of 4 rows" in capsys.readouterr().err
    with pytest.raises(ValueError, match="long_text=cut: must be truncate or split"):
        load_examples([spec + "cut"], chatml)


def test_segments(write, tokenizer_of):
    tokenizer = tokenizer_of("llama3", bos="<|begin_of_text|>")
    segments = [{"label": False, "text": "2+2="}, {"label": True, "text": "4<|eot_id|>"}, {"label": 0, "text": "!"}]
    spec = f"{write({'segments': segments})}:format=input_output"
    (example,) = load_examples([spec], tokenizer)
    assert texts(tokenizer, example) == ("2+2=!", "4<|eot_id|>")
    (example,) = load_examples([spec], tokenizer, trained=Trained(inputs=True))
    assert texts(tokenizer, example) == ("2", "+2=4<|eot_id|>!")
    for bad in ({"segments": "x"}, {"segments": [{"text": "x"}]}, {"segments": [{"label": True}]}):
        with pytest.raises(ValueError, match="rows.jsonl:1: '?segments"):
            load_examples([f"{write(bad)}:format=input_output"], tokenizer)


def test_formats(write, chatml):
    path = write({"question": "2+2=", "answer": "so\n#### 4"})
    for name in ("gsm8k", "question_answer"):
        (example,) = load_examples([path], chatml, data_format=name)
        assert texts(chatml, example) == (OPENING + "\n", "so\n#### 4<|im_end|>")
    path = write({"instruction": "Add.", "input": "2 2", "output": "4"})
    (example,) = load_examples([path], chatml, data_format="alpaca")
    assert "Add.\n\n2 2" in texts(chatml, example)[0]


def test_bos_is_added_once_and_never_trained(write, tokenizer_of):
    tokenizer = tokenizer_of("llama3", bos="<|begin_of_text|>")
    one, two = load_examples([write({"prompt": "a", "completion": "b"}, {"text": "ab"})], tokenizer)
    assert texts(tokenizer, one) == ("<|begin_of_text|>a", "b<|endoftext|>")
    assert texts(tokenizer, two) == ("<|begin_of_text|>", "ab<|endoftext|>")


METASPACE = [  # prompt, completion, and the pieces before and after the start of the mask
    ("2+2=", "4", ["_", "2", "+", "2", "="], ["4"]),
    ("Once upon", " a time", ["_Once", "_upon"], ["_a", "_time"]),
    ("Once upon ", "a time", ["_Once", "_upon"], ["_a", "_time"]),  # the space is part of the completion's first token
    ("Once upon ", " a time", ["_Once", "_upon", "_"], ["_a", "_time"]),
    ("a", "bc", ["_a"], ["bc"]),
    ("2 a", "b", ["_", "2"], ["_ab"]),  # _ab straddles
    ("2+2=", "4</s>", ["_", "2", "+", "2", "="], ["4"]),  # not a second eos
]


def test_a_completion_gains_no_space(write, metaspace_of):
    for bos in [True, False]:
        for prompt, completion, before, after in METASPACE:
            tokenizer = metaspace_of(bos=bos)
            (example,) = load_examples([write({"prompt": prompt, "completion": completion})], tokenizer)
            pieces = [piece.replace("\u2581", "_") for piece in tokenizer.convert_ids_to_tokens(example.ids)]
            before = ["<s>"] * bos + before
            assert pieces == [*before, *after, "</s>"]
            assert example.mask == [False] * len(before) + [True] * (len(after) + 1)


BOUNDARIES = [
    ("2+2=", "4"),
    ("Once upon", " a time"),
    ("Once upon ", "a time"),
    ("hel", "lo"),
    ("She said", "\n\u00e9!"),
]


def test_a_completion_gains_no_space_in_a_real_tokenizer(write, asset):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(asset("models/stories260K"))
    for prompt, completion in BOUNDARIES:
        (example,) = load_examples([write({"prompt": prompt, "completion": completion})], tokenizer)
        assert example.ids == [*tokenizer(prompt + completion)["input_ids"], tokenizer.eos_token_id]
        offsets = tokenizer(prompt + completion, return_offsets_mapping=True)["offset_mapping"]
        assert example.mask == [end > len(prompt) for _, end in offsets] + [True]
        assert tokenizer.decode(example.ids, skip_special_tokens=True) == prompt + completion


def test_a_merge_across_the_boundary_is_trained(write, tokenizer_of):
    tokenizer = tokenizer_of("plain", merges=(("b", "c"),))
    (example,) = load_examples([write({"prompt": "ab", "completion": "cd"})], tokenizer)
    assert texts(tokenizer, example) == ("a", "bcd<|endoftext|>")


def test_built_in_task(chatml):
    examples = load_examples(["task:addition:split=sft,size=5,sloppy=0.5"], chatml)
    assert len(examples) == 5 and examples[0].source == "task:addition:1"
    assert all(texts(chatml, example)[1].removesuffix("<|im_end|>").isdigit() for example in examples)
    (example,) = load_examples(["task:addition:split=eval,size=1"], chatml)
    a, b = re.search(r"(\d+)\+(\d+)=", texts(chatml, example)[0]).groups()
    assert texts(chatml, example)[1] == f"{int(a) + int(b)}<|im_end|>"


def test_truncated_and_skipped_rows_are_counted(write, chatml, capsys):
    path = write({"prompt": "abc", "completion": "defgh"}, {"prompt": "abcdef", "completion": "g"}, {"text": "ab"})
    examples = load_examples([path], chatml, max_length=5)
    assert [texts(chatml, example) for example in examples] == [("abc", "de"), ("a", "b<|endoftext|>")]
    log = "data: truncated 2 of 3 rows to 5 tokens\ndata: skipped 1 of 3 rows without a trained token\n"
    assert capsys.readouterr().err.startswith(log)
    examples = load_examples([path], chatml, max_length=5, long_rows="drop")
    assert [texts(chatml, example) for example in examples] == [("a", "b<|endoftext|>")]
    assert capsys.readouterr().err.startswith("data: of 3 rows, 2 skipped, longer than max_length=5\n")
    assert max(len(example.ids) for example in load_examples([path], chatml, context_length=4)) == 4
    with pytest.raises(ValueError, match="max_length=3: none of the 1 rows"):
        load_examples([write({"prompt": "abc", "completion": "d"})], chatml, max_length=3, long_rows="drop")
    with pytest.raises(ValueError, match="max_length=1"):
        load_examples([path], chatml, max_length=1)


def test_a_conversation_without_an_answer_is_skipped(write, chatml, capsys):
    assert len(load_examples([write({"messages": [USER]}, {"messages": [USER, ANSWER]})], chatml)) == 1
    assert "skipped 1 of 2" in capsys.readouterr().err


def test_rows_with_an_empty_answer_are_skipped_and_counted(write, chatml, capsys):
    blank = {"role": "assistant", "content": " "}
    empty = [
        {"messages": [USER, blank]},
        {"messages": [USER, ANSWER, USER, blank]},
        {"prompt": "2+2=", "completion": ""},
        {"prompt": [USER], "completion": ""},
        {"prompt": [USER], "completion": [blank]},
    ]
    kept = [
        {"messages": [USER, ANSWER]},
        {"prompt": [USER, blank, USER], "completion": "4"},  # context is not trained
    ]
    assert len(load_examples([write(*empty, *kept)], chatml)) == 2
    assert capsys.readouterr().err == "data: of 7 rows, 5 skipped, an answer is empty\n"
    with pytest.raises(ValueError, match=r"^data: none of the 5 rows .*5 skipped, an answer is empty"):
        load_examples([write(*empty)], chatml)
    assert len(load_examples([write(empty[0])], chatml, trained=Trained(roles=("user",)))) == 1


def test_system_prompt(write, chatml):
    (example,) = load_examples([write({"messages": [USER, ANSWER]})], chatml, system_prompt="Be brief.")
    assert texts(chatml, example) == ("<|im_start|>system\nBe brief.<|im_end|>\n" + OPENING + "\n", "4<|im_end|>")
    for row in ({"text": "abc"}, {"prompt": "a", "completion": "b"}):
        with pytest.raises(ValueError, match="system_prompt: has no effect"):
            load_examples([write(row)], chatml, system_prompt="Be brief.")


BAD_ROWS = [
    ({"prompt": "x"}, r"rows.jsonl:2: has none of .*\(its columns: prompt\)"),
    ({}, r"rows.jsonl:2: has none of .*\(its columns: none\)"),
    ({"prompt": "", "completion": "x"}, "rows.jsonl:2: the prompt is empty"),
    ({"prompt": "x", "completion": [ANSWER]}, "rows.jsonl:2: the prompt is text but the completion is not"),
    ({"prompt": [USER, ANSWER], "completion": "x"}, "rows.jsonl:2: the prompt ends with an assistant turn"),
    ({"text": " "}, "rows.jsonl:2: the text is empty"),
    ({"messages": []}, "rows.jsonl:2: 'messages' is empty"),
    ({"messages": "hi"}, "rows.jsonl:2: 'messages' is text, but not JSON"),
    ({"messages": "{}"}, "rows.jsonl:2: 'messages' is of type dict"),
    ({"messages": [USER, ANSWER], "system": 3}, "rows.jsonl:2: 'system' is of type int"),
]


def test_bad_rows(write, chatml):
    for row, message in BAD_ROWS:
        with pytest.raises(ValueError, match=message):
            load_examples([write({"text": "fine"}, row)], chatml)


def test_tokenizer_without_eos(write, tokenizer_of):
    tokenizer = tokenizer_of("plain")
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="rows.jsonl:1: tokenizer: has no eos token"):
        load_examples([write({"text": "abc"})], tokenizer)
