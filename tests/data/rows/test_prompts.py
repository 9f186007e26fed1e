"""Prompts as token ids: formats, lengths and bad rows."""

from __future__ import annotations

import pytest

from data.chat import render_prompt
from data.rows.prompts import load_prompts


def user(text):
    return [{"role": "user", "content": text}]


def test_text_and_messages(write, chatml):
    path = write({"prompt": "2+2=", "answer": "4", "level": 1}, {"prompt": user("3+3="), "answer": "6"})
    plain, chat = load_prompts([path], chatml)
    assert (plain.prompt, plain.conversational, plain.columns) == ("2+2=", False, {"answer": "4", "level": 1})
    assert chatml.decode(plain.ids) == "2+2="
    assert (chat.prompt, chat.conversational, chat.columns) == (user("3+3="), True, {"answer": "6"})
    assert chatml.decode(chat.ids) == "<|im_start|>user\n3+3=<|im_end|>\n<|im_start|>assistant\n"
    assert chat.source == f"{path}:2"


def test_messages_column_up_to_the_last_user_turn(write, chatml):
    turns = [*user("a"), {"role": "assistant", "content": "b"}, *user("c"), {"role": "assistant", "content": "d"}]
    (prompt,) = load_prompts([write({"messages": turns})], chatml)
    assert prompt.prompt == turns[:3]
    assert prompt.columns == {"messages": turns}


def test_several_specs_with_formats_and_weights(write, chatml):
    one = write({"prompt": "2+2=", "answer": "4"}, name="one.jsonl")
    two = write({"question": "3+3?", "answer": "so 6\n#### 1,006"}, name="two.jsonl")
    prompts = load_prompts([f"{one}:weight=0.5", f"{two}:format=gsm8k", "task:sort:size=2"], chatml)
    assert [prompt.weight for prompt in prompts] == [0.5, 1.0, 1.0, 1.0]
    assert prompts[1].prompt == user("3+3?") and prompts[1].columns == {"answer": "1006"}
    assert prompts[2].source == "task:sort:1"


def test_formats(write, chatml):
    path = write({"question": "3+3?", "answer": "so 6\n#### 6", "id": 9})
    (prompt,) = load_prompts([path], chatml, data_format="question_answer")
    assert (prompt.prompt, prompt.columns) == (user("3+3?"), {"answer": "so 6\n#### 6", "id": 9})
    path = write(
        {"instruction": "Add.", "input": "3 3", "output": "6"}, {"instruction": "Hi", "input": "", "output": ""}
    )
    one, two = load_prompts([path], chatml, data_format="alpaca")
    assert (one.prompt, one.columns) == (user("Add.\n\n3 3"), {"answer": "6"})
    assert two.prompt == user("Hi")


def test_system_prompt(write, chatml):
    system = {"role": "system", "content": "Be brief."}
    (prompt,) = load_prompts([write({"prompt": user("hi")})], chatml, system_prompt="Be brief.")
    assert prompt.prompt == [system, *user("hi")]
    assert prompt.ids == render_prompt(chatml, [system, *user("hi")])
    with pytest.raises(ValueError, match="system_prompt: has no effect"):
        load_prompts([write({"prompt": "hi"})], chatml, system_prompt="Be brief.")


def test_long_prompts_are_skipped_and_counted(write, chatml, capsys):
    path = write({"prompt": "12345"}, {"prompt": "123"}, {"prompt": "1234"})
    prompts = load_prompts([path], chatml, max_prompt_length=4)
    assert [prompt.prompt for prompt in prompts] == ["123", "1234"]
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert lines[0] == "data: skipped 1 of 3 prompts longer than max_prompt_length=4" and captured.out == ""
    assert len(lines) == 2 and "plain text" in lines[1]
    with pytest.raises(ValueError, match="max_prompt_length=2: all 3 prompts"):
        load_prompts([path], chatml, max_prompt_length=2)


def test_prompt_longer_than_the_context(write, chatml):
    path = write({"prompt": "123"}, {"prompt": "12345"})
    assert len(load_prompts([path], chatml, context_length=8, max_completion_length=3)) == 2
    with pytest.raises(ValueError, match=r"rows.jsonl:2: 5 prompt tokens \+ max_completion_length=4 .* of 8"):
        load_prompts([path], chatml, context_length=8, max_completion_length=4)
    assert len(load_prompts([path], chatml, context_length=8, max_completion_length=4, max_prompt_length=4)) == 1


BAD_ROWS = [
    ({"question": "x", "id": 1}, r"rows.jsonl:2: has neither 'prompt' nor 'messages' \(its columns: question, id\)"),
    ({"prompt": ""}, "rows.jsonl:2: the prompt is empty"),
    ({"prompt": " \n"}, "rows.jsonl:2: the prompt is empty"),
    ({"prompt": []}, "rows.jsonl:2: the prompt is empty"),
    ({"prompt": None}, "rows.jsonl:2: has neither"),
    ({"prompt": user("")}, "rows.jsonl:2: the prompt is empty"),
    ({"prompt": 3}, "rows.jsonl:2: messages=3: must be a list"),
    ({"prompt": [{"role": "user"}]}, r"rows.jsonl:2: messages\[0\]"),
    ({"prompt": [{"role": "assistant", "content": "x"}]}, "rows.jsonl:2: the prompt ends with an assistant turn"),
    ({"messages": [{"role": "system", "content": "x"}]}, "rows.jsonl:2: 'messages' has no user turn"),
    ({"prompt": [{"role": "user", "content": None}]}, r"rows.jsonl:2: messages\[0\]: content is None"),
]


def test_bad_rows(write, chatml):
    for row, message in BAD_ROWS:
        with pytest.raises(ValueError, match=message):
            load_prompts([write({"prompt": "fine"}, row)], chatml)


def test_other_errors(write, chatml, tokenizer_of):
    with pytest.raises(ValueError, match="data_format=gsm9k: no such format; did you mean 'gsm8k'"):
        load_prompts([write({"prompt": "x"})], chatml, data_format="gsm9k")
    with pytest.raises(ValueError, match="rows.jsonl:1: 'answer' has no '####'"):
        load_prompts([write({"question": "x", "answer": "3"})], chatml, data_format="gsm8k")
    with pytest.raises(ValueError, match="rows.jsonl:1: has no 'question'"):
        load_prompts([write({"prompt": "x"})], chatml, data_format="question_answer")
    with pytest.raises(ValueError, match="--data is empty"):
        load_prompts([], chatml)
    with pytest.raises(ValueError, match="rows.jsonl:1: chat_template=tokenizer_default: .* no chat template"):
        load_prompts([write({"prompt": user("x")})], tokenizer_of("chatml"))


def test_gsm8k_asset(chatml, asset):
    prompts = load_prompts([f"{asset('data/gsm8k_test.jsonl.gz')}:format=gsm8k,split=train[:5%]"], chatml)
    assert len(prompts) == 66  # 5 % of 1319
    assert all(float(prompt.columns["answer"]) == int(prompt.columns["answer"]) for prompt in prompts)
    assert prompts[0].columns["answer"] == "18" and prompts[0].prompt[0]["content"].startswith("Janet")
