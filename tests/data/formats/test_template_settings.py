"""Template settings, tools, tool calls and thoughts: all loaders treat them alike."""

from __future__ import annotations

import json
import re

import pytest

from data.formats.fields import for_template
from data.formats.template_settings import check_kwargs
from data.rows.documents import load_documents
from data.rows.pairs import load_pairs
from data.rows.prompts import load_prompts
from data.rows.sft import load_examples
from data.rows.stepwise import load_steps
from data.rows.targets import load_targets
from data.rows.unpaired import load_labelled
from data.sources import without_fillers

USER = {"role": "user", "content": "2+2="}
ANSWER = {"role": "assistant", "content": "4"}
OPENING = "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n"
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TOOLS = [{"type": "function", "function": {"name": "add"}}]


# By method: its loader, and the row for a prompt with an answer.
LOADERS = {
    "sft": (load_examples, lambda prompt, answer: {"messages": [*prompt, answer]}),
    "sft_completion": (load_examples, lambda prompt, answer: {"prompt": prompt, "completion": [answer]}),
    "documents": (load_documents, lambda prompt, answer: {"messages": [*prompt, answer]}),
    "pairs": (load_pairs, lambda prompt, answer: {"prompt": prompt, "chosen": [answer], "rejected": "no"}),
    "rejected": (load_pairs, lambda prompt, answer: {"prompt": prompt, "chosen": "no", "rejected": [answer]}),
    "kto": (load_labelled, lambda prompt, answer: {"prompt": prompt, "completion": [answer], "label": True}),
    "ebft": (load_targets, lambda prompt, answer: {"messages": [*prompt, answer]}),
}
PROMPTS = {
    "grpo": (load_prompts, lambda prompt: {"prompt": prompt}),
    "prm": (load_steps, lambda prompt: {"prompt": prompt, "completions": ["4"], "labels": [True]}),
}


def prompt_ids(row):
    """Return the ids before the first trained token, or the whole prompt."""
    if hasattr(row, "prompt_ids"):
        return row.prompt_ids
    if hasattr(row, "labels"):
        return row.ids[:-2]
    return row.ids[: row.mask.index(True)] if getattr(row, "mask", None) else row.ids


def load(method, write, tokenizer, prompt, answer, columns=None, **settings):
    if method in PROMPTS:
        loader, make = PROMPTS[method]
        row = make(prompt)
    else:
        loader, make = LOADERS[method]
        row = make(prompt, answer)
    (loaded,) = loader([write({**row, **(columns or {})})], tokenizer, **settings)
    return loaded


ALL = [*LOADERS, *PROMPTS]


STYLES = [
    ({}, None, OPENING),
    ({"style": "F"}, None, OPENING + "F"),
    ({}, {"style": "R"}, OPENING + "R"),
    ({"style": "F"}, {"style": "R"}, OPENING + "R"),
    ({"style": "F"}, {}, OPENING + "F"),
]


def test_settings_by_flag_and_by_row(write, templated):
    for method in ALL:
        for flag, row, opening in STYLES:
            tokenizer = templated("CALLS")
            opened = opening[len(OPENING) :]  # the answer contains what the prompt opens
            answer = {"role": "assistant", "content": opened + "4"}
            columns = {} if row is None else {"chat_template_kwargs": row}
            if method in ("pairs", "rejected"):
                columns |= {"rejected" if method == "pairs" else "chosen": opened + "5"}
            loaded = load(method, write, tokenizer, [USER], answer, columns, chat_template_kwargs=flag)
            assert tokenizer.decode(prompt_ids(loaded)) == opening
            if method in ("grpo", "ebft"):  # later turns of an episode use the same settings
                assert loaded.settings == {**flag, **(row or {})}


def test_tools_of_a_row_are_written(write, templated, capsys):
    for method in ALL:
        tokenizer = templated("CALLS")
        columns = {"tools": TOOLS} if method != "kto" else {"tools": json.dumps(TOOLS)}
        loaded = load(method, write, tokenizer, [USER], ANSWER, columns)
        system = f"<|im_start|>system\n{json.dumps(TOOLS)}<|im_end|>\n"
        assert tokenizer.decode(prompt_ids(loaded)) == system + OPENING
        assert "with tools" not in capsys.readouterr().err


def test_tools_that_are_not_written_are_counted(write, chatml, capsys):
    for method in [name for name in ALL if name != "prm"]:
        load(method, write, chatml, [USER], ANSWER, {"tools": TOOLS})
        assert "data: of 1 rows, 1 with tools that the chat template does not write" in capsys.readouterr().err


UNSEEN = r"rows.jsonl:1: messages\[1\]: .* tool_calls"


def test_calls_of_an_answer_that_are_not_written_are_rejected(write, chatml, templated):
    for method in list(LOADERS):
        with pytest.raises(ValueError, match=UNSEEN):
            load(method, write, chatml, [USER], CALLS)
        tokenizer = templated("CALLS")
        loaded = load(method, write, tokenizer, [USER], CALLS)
        if method != "ebft":
            ids = {"kto": "completion_ids", "pairs": "chosen_ids", "rejected": "rejected_ids"}.get(method)
            trained = getattr(loaded, ids) if ids else [t for t, on in zip(loaded.ids, loaded.mask, strict=True) if on]
        else:
            trained = loaded.target_ids
            assert loaded.columns["ground_truth"] == '<call>{"name": "add", "arguments": {"a": 2}}</call>'
        assert tokenizer.decode(trained) == '<call>{"name": "add", "arguments": {"a": 2}}</call><|im_end|>'


def test_calls_of_a_prompt_that_are_not_written_are_rejected(write, chatml, templated):
    for method in ALL:
        prompt = [USER, CALLS, {"role": "tool", "content": "4"}]
        with pytest.raises(ValueError, match=UNSEEN):
            load(method, write, chatml, prompt, ANSWER)
        tokenizer = templated("CALLS")
        loaded = load(method, write, tokenizer, prompt, ANSWER)
        ids = loaded.prompt_ids if method in ("pairs", "rejected", "kto") else loaded.ids
        assert '<call>{"name": "add", "arguments": {"a": 2}}</call><|im_end|>' in tokenizer.decode(ids)


THOUGHTS = [
    ("R1", {"content": "<think>two and two</think>4"}, "with thoughts before </think>"),
    ("R1", {"content": "4", "reasoning_content": "hm"}, "with reasoning_content"),
    ("CALLS", {"content": "4", "reasoning": "hm"}, "with reasoning that"),
    ("QWEN3", {"content": "<think>two and two</think>4"}, None),
    ("QWEN3", {"content": "4", "reasoning_content": "hm"}, None),
]


def test_thoughts_that_are_not_written_are_counted(write, templated, capsys):
    for method in list(LOADERS):
        for name, answer, note in THOUGHTS:
            if name == "R1" and method == "ebft":
                with pytest.raises(ValueError, match=r"the target does not start with '<think>\\n'"):
                    load(method, write, templated(name), [USER], {"role": "assistant", **answer})
                continue
            load(method, write, templated(name), [USER], {"role": "assistant", **answer})
            error = capsys.readouterr().err
            assert f" 1 {note}" in error if note else "that the chat" not in error, (method, name, error)


def test_thoughts_that_are_removed_from_earlier_turns_are_counted(write, templated, capsys):
    thought = {"role": "assistant", "content": "<think>two</think>4"}
    path = write({"messages": [USER, thought, USER, thought]}, {"messages": [USER, thought]})
    load_examples([path], templated("QWEN3"))
    assert capsys.readouterr().err.startswith("data: of 2 rows, 1 with thoughts before </think>")


@pytest.mark.parametrize("method", ["pairs", "grpo"])
def test_nulls_that_a_table_adds_are_removed(method, tmp_path, templated, monkeypatch):
    """Arrow gives all structs of a column the same keys; JSON does not."""
    import pyarrow
    import pyarrow.parquet

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")

    def call(**arguments):
        function = {"name": "turn", "arguments": arguments}
        return {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}

    def tool(**properties):
        return {"function": {"name": "turn", "parameters": properties}}

    rows = []
    for arguments in ({"theta": 2}, {"phi": {"x": 1}}):
        messages = [USER, call(**arguments), {"role": "tool", "content": "ok"}]
        answer = {"prompt": messages, "chosen": [call(**arguments)], "rejected": [ANSWER]}
        kwargs = {"style": "a"} if arguments.get("theta") else {"other": "b"}
        rows.append({**answer, "tools": [tool(**arguments)], "chat_template_kwargs": kwargs})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "train.parquet").write_bytes((tmp_path / "rows.parquet").read_bytes())
    loader = {"pairs": load_pairs, "grpo": load_prompts}[method]
    tokenizer = templated("CALLS")
    from_json = loader([str(tmp_path / "rows.jsonl")], tokenizer)
    for path in ("rows.parquet", "hub"):  # the datasets library reads a folder like a hub dataset
        from_table = loader([str(tmp_path / path)], tokenizer)
        for arguments, one, other in zip(('{"theta": 2}', '{"phi": {"x": 1}}'), from_table, from_json, strict=True):
            ids = [getattr(row, "ids", None) or row.prompt_ids + row.chosen_ids for row in (one, other)]
            assert ids[0] == ids[1]
            assert f'"arguments": {arguments}' in tokenizer.decode(ids[0]) and "null" not in tokenizer.decode(ids[0])
        if method == "grpo":
            settings = [{name: row.settings[name] for name in row.settings if name != "tools"} for row in from_table]
            assert settings == [{"style": "a"}, {"other": "b"}]


def test_nulls_that_a_user_wrote_stay_and_are_counted(write, templated, capsys):
    function = {"name": "find", "arguments": {"where": None}}
    row = {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": function}]}]}
    tokenizer = templated("CALLS")
    (example,) = load_examples([write(row)], tokenizer)
    assert '"arguments": {"where": null}' in tokenizer.decode(example.ids)
    assert "data: of 1 rows, 1 with null in the arguments" in capsys.readouterr().err


def test_settings_without_effect_are_rejected(write, templated):
    for method in ALL:
        tokenizer = templated("CALLS")
        text = {"text": "a", "prompt": "2+2=", "completion": "4", "label": True, "completions": ["4"], "labels": [True]}
        if method in ("pairs", "rejected"):
            text = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
        loader = (LOADERS | PROMPTS)[method][0]
        with pytest.raises(ValueError, match="^chat_template_kwargs: has no effect"):
            loader([write(text)], tokenizer, chat_template_kwargs={"style": "F"})


def test_formats_keep_the_columns_for_the_template(write, templated):
    tokenizer = templated("CALLS")
    row = {"question": "2+2=", "answer": "!4", "instruction": "2+2=", "output": "!4", "chat_template_kwargs": '{"style": "!"}'}  # fmt: skip # noqa: E501
    for name in ("question_answer", "gsm8k", "alpaca", "auto"):
        (example,) = load_examples([write(row)], tokenizer, data_format=name)
        assert tokenizer.decode(prompt_ids(example)) == OPENING + "!"
    messages = {"messages": [USER, {"role": "assistant", "content": "!4"}], "chat_template_kwargs": {"style": "!"}}
    for name in ("ebft_strided_chat.transform", "ebft_reasoning.transform_strided"):
        (document,) = load_documents([write(messages)], tokenizer, data_format=name)
        assert tokenizer.decode(prompt_ids(document)) == OPENING + "!"


def test_a_conversation_of_targets_has_the_settings_in_all_turns(write, templated):
    tokenizer = templated("QWEN3")
    talk = [USER, ANSWER, {"role": "user", "content": "3+3="}, {"role": "assistant", "content": "6"}]
    row = {"messages": talk[:2], "chat_template_kwargs": {"enable_thinking": False}}
    (prompt,) = load_targets([write(row)], tokenizer)
    assert tokenizer.decode(prompt.ids) == OPENING + "<think>\n\n</think>\n\n"
    assert tokenizer.decode(prompt.target_ids) == "4<|im_end|>"
    with pytest.raises(ValueError, match="rows.jsonl:1: the target does not start with '<think>"):
        load_targets([write({**row, "messages": talk})], tokenizer, data_format="ebft_chat_multiturn.transform")


UNREAD = [
    ({"enable_thinkng": False}, "the chat template does not read 'enable_thinkng'"),
    ({"tokenize": True}, "'tokenize' is not a setting of the template"),
    ({"tools": []}, "'tools' is not a setting of the template"),
]


def test_names_that_the_template_does_not_read_are_rejected(templated):
    check_kwargs(templated("QWEN3"), {"enable_thinking": False})
    for kwargs, message in UNREAD:
        with pytest.raises(ValueError, match=rf"^chat_template_kwargs=\{{.*\}}: {message}"):
            check_kwargs(templated("QWEN3"), kwargs)


@pytest.mark.parametrize("method", ["pairs", "kto"])
def test_an_answer_that_begins_like_the_opened_text_keeps_its_first_letter(method, write, templated, capsys):
    tokenizer = templated("R1")
    columns = {"rejected": "<i>5</i>"} if method == "pairs" else {}
    loaded = load(method, write, tokenizer, [USER], {"role": "assistant", "content": "<b>4</b>"}, columns)
    assert tokenizer.decode(loaded.prompt_ids) == "[user]2+2=<|im_start|>"
    trained = loaded.chosen_ids if method == "pairs" else loaded.completion_ids
    assert tokenizer.decode(trained) == "<b>4</b><|im_end|>"
    assert r"data: of 1 rows, 1 whose answer does not start with '<think>\n'" in capsys.readouterr().err


NOT_TOOLS = [
    ("python", "'tools' is not valid JSON"),
    ({"a": 1}, "'tools' is of type dict, not a list"),
    (["python"], "tools[0] is 'python'"),
]


def test_a_column_tools_with_other_content_is_rejected():
    for tools, what in NOT_TOOLS:
        with pytest.raises(ValueError, match=re.escape(what) + ".*rename the column"):
            for_template({"tools": tools})
    assert for_template({"tools": "", "chat_template_kwargs": None}) == {}


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "add_generation_prompt", "messages", "eos_token"])
def test_a_row_cannot_replace_the_template(name, write, templated):
    row = {"messages": [USER, {"role": "assistant", "content": "4"}], "chat_template_kwargs": {name: "{{ 1 }}"}}
    with pytest.raises(ValueError, match=f":1: chat_template_kwargs: '{name}'"):
        load_examples([write(row)], templated("CALLS"))


def test_nulls_that_a_table_adds_inside_an_object_are_removed():
    call = {"function": {"name": "add", "arguments": {"theta": 1, "phi": None}}}
    turns = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    cleaned = without_fillers({"request": {"input": turns, "note": None}, "messages": turns})
    assert cleaned["request"]["input"] == cleaned["messages"] and cleaned["request"]["note"] is None
    assert cleaned["messages"][0]["tool_calls"][0]["function"]["arguments"] == {"theta": 1}
