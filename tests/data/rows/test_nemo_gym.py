"""NeMo Gym rows: prompts that keep all fields."""

from __future__ import annotations

import json
import re

import pytest

from data.chat import render_prompt
from data.rows.nemo_gym import input_messages, load_nemo_gym, split_dataset
from trainer.tiny.build import make_tokenizer

ROW = {
    "responses_create_params": {
        "input": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2="}],
        "tools": None,
    },
    "agent_ref": {"type": "responses_api_agents", "name": "math_simple_agent"},
    "answer": "4",
    "metadata": {"source": "x", "solution": [True, None]},
}


def test_the_prompt_has_every_turn_and_the_columns_have_the_whole_row(write):
    tokenizer = make_tokenizer()
    path = write(ROW)
    (prompt,) = load_nemo_gym([path], tokenizer)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2="}]
    assert prompt.source == f"{path}:1"
    assert prompt.prompt == messages
    assert prompt.ids == render_prompt(tokenizer, messages)
    assert json.loads(prompt.columns["verify_extra"]) == ROW
    assert prompt.columns["nemo_gym_ref"] == {"server": None, "name": "math_simple_agent", "source": prompt.source}
    assert prompt.columns["nemo_gym_index"] == 0
    assert prompt.columns["answer"] == "4"
    assert "responses_create_params" not in prompt.columns


def test_equal_questions_have_different_indices(write):
    path = write(ROW, ROW | {"answer": "5"})
    prompts = load_nemo_gym([f"{path}@math", f"{path}:split=train[1:]@other"], make_tokenizer())
    assert [p.columns["nemo_gym_index"] for p in prompts] == [0, 1, 2]
    assert [p.columns["nemo_gym_ref"]["server"] for p in prompts] == ["math", "math", "other"]
    assert [json.loads(p.columns["verify_extra"])["answer"] for p in prompts] == ["4", "5", "5"]


def test_the_system_prompt_is_for_rows_without_one(write):
    bare = ROW | {"responses_create_params": {"input": "2+2="}}
    prompts = load_nemo_gym([write(ROW, bare)], make_tokenizer(), system_prompt="Think.")
    assert [p.prompt[0]["content"] for p in prompts] == ["Be brief.", "Think."]


def test_calls_and_their_outputs_in_the_input_become_messages():
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": text} for text in ("sf ", "weather?")]},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "a", "name": "get", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "put", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "cold"},
        {"type": "function_call_output", "call_id": "b", "output": {"ok": True}},
    ]
    calls = [
        {"id": name, "type": "function", "function": {"name": function, "arguments": "{}"}}
        for name, function in (("a", "get"), ("b", "put"))
    ]
    assert input_messages(items) == [
        {"role": "user", "content": "sf weather?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "cold", "tool_call_id": "a"},
        {"role": "tool", "content": '{"ok": true}', "tool_call_id": "b"},
    ]


def test_a_relative_path_starts_from_the_gyms_folder_and_a_tilde_from_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert split_dataset("a/rows.jsonl@math", "~/Gym") == ("/home/me/Gym/a/rows.jsonl", "math")
    assert split_dataset("~/rows.jsonl", "/gym") == ("/home/me/rows.jsonl", None)
    assert split_dataset("/x/rows.jsonl:split=train[:5]@math", "/gym") == ("/x/rows.jsonl:split=train[:5]", "math")
    assert split_dataset("rows.jsonl", None) == ("rows.jsonl", None)


BAD_ROWS = [
    ({"question": "2+2="}, "has no 'responses_create_params' object"),
    (ROW | {"agent_ref": None}, "has no agent_ref, and its dataset has no server"),
    (ROW | {"agent_ref": {"type": "x"}}, "agent_ref={'type': 'x'}"),
    (ROW | {"verify_extra": 1}, "'verify_extra' is reserved"),
    (ROW | {"responses_create_params": {"input": []}}, "must be text, or a list of at least one message"),
    (ROW | {"responses_create_params": {"input": [{"type": "image"}]}}, "input[0]: type=image is unknown"),
    (ROW | {"responses_create_params": {"input": [{"role": "user", "content": [{"image": 1}]}]}},
     "input[0]: content is not text"),
    (ROW | {"responses_create_params": {"input": [{"role": "assistant", "content": "4"}]}},
     "the prompt ends with an assistant turn"),
]  # fmt: skip


def test_bad_rows(write):
    for row, message in BAD_ROWS:
        with pytest.raises(ValueError, match=rf"rows.jsonl:2: .*{re.escape(message)}"):
            load_nemo_gym([write(ROW, row)], make_tokenizer())


def test_long_prompts_are_skipped_or_rejected(write, capsys):
    long = ROW | {"responses_create_params": {"input": "x" * 50}}
    path = write(ROW, long)
    assert len(load_nemo_gym([path], make_tokenizer(), max_prompt_length=40)) == 1
    assert "skipped 1 of 2 prompts longer than max_prompt_length=40" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"rows.jsonl:2: .* max_completion_length=20 .* context of 60"):
        load_nemo_gym([path], make_tokenizer(), context_length=60, max_completion_length=20)


def test_tools_that_a_single_turn_cannot_call_are_logged(write, capsys):
    tools = ROW | {"responses_create_params": {"input": "2+2=", "tools": [{"name": "add"}]}}
    path = write(ROW, tools)
    load_nemo_gym([path], make_tokenizer(), multi_turn=True)
    assert capsys.readouterr().err == ""
    load_nemo_gym([path], make_tokenizer())
    assert "ignoring the tools of 1 of 2 rows" in capsys.readouterr().err


def test_a_dataset_without_a_path_or_a_name_is_rejected():
    for text in ["@math", "rows.jsonl@", " @ "]:
        with pytest.raises(ValueError, match=f"nemo_gym.datasets={text}: "):
            split_dataset(text, None)


def test_settings_of_the_chat_template_by_flag_and_by_row(write):
    tokenizer = make_tokenizer()
    tokenizer.chat_template += "{{ style or '' }}"
    params = ROW["responses_create_params"] | {"metadata": {"chat_template_kwargs": '{"style": "R"}'}}
    path = write(ROW, ROW | {"responses_create_params": params})
    prompts = load_nemo_gym([path], tokenizer, chat_template_kwargs={"style": "F"})
    assert [tokenizer.decode(prompt.ids)[-1] for prompt in prompts] == ["F", "R"]
    assert [prompt.settings for prompt in prompts] == [{"style": "F"}, {"style": "R"}]
