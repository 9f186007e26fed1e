"""The Qwen templates: system messages, tools, calls, results and thoughts; special and end-of-turn tokens."""

from __future__ import annotations

import json

import pytest

from data.chat import (
    end_ids,
    end_of_turn_id,
    render_conversation,
    render_prompt,
    render_responses,
    set_chat_template,
    set_special_tokens,
    stop_ids,
)

USER = {"role": "user", "content": "2+2="}
ANSWER = {"role": "assistant", "content": "4"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "a1", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "zw\u00f6lf"}}}
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": "zw\u00f6lf"}}\n</tool_call>'
DEFAULT = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function "
    'signatures within <tools></tools> XML tags:\n<tools>\n{"type": "function", "function": {"name": "add", '
    '"parameters": {"type": "object", "properties": {}}}}\n</tools>\n\nFor each function call, return a json object '
    "with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
ANSWERING = "<|im_start|>assistant\n"


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


@pytest.fixture
def rendered(tokenizer_of):
    def render(name: str, messages, *, prompt: bool = False, **settings) -> str:
        tokenizer = tokenizer_of(name)
        set_chat_template(tokenizer, name)
        if prompt:
            return tokenizer.decode(render_prompt(tokenizer, messages, None, settings))
        return tokenizer.decode(render_conversation(tokenizer, messages, None, settings=settings)[0])

    return render


def test_qwen_25_writes_its_system_message_unless_there_is_one(rendered):
    asked = turn("user", "2+2=") + ANSWERING
    assert rendered("qwen_25", [USER], prompt=True) == turn("system", DEFAULT) + asked
    messages = [{"role": "system", "content": "Be brief."}, USER]
    assert rendered("qwen_25", messages, prompt=True) == turn("system", "Be brief.") + asked
    assert rendered("qwen_25", [USER, ANSWER]) == turn("system", DEFAULT) + turn("user", "2+2=") + turn(
        "assistant", "4"
    )
    assert rendered("qwen_25", [USER], prompt=True, tools=[TOOL]) == turn("system", f"{DEFAULT}\n\n{TOOLS}") + asked


def test_qwen3_has_no_default_system_message(rendered):
    asked = turn("user", "2+2=") + ANSWERING
    assert rendered("qwen3", [USER], prompt=True) == asked
    assert rendered("qwen3", [USER], prompt=True, tools=[TOOL]) == turn("system", TOOLS) + asked
    messages = [{"role": "system", "content": "Be brief."}, USER]
    assert rendered("qwen3", messages, prompt=True) == turn("system", "Be brief.") + asked
    assert rendered("qwen3", messages, prompt=True, tools=[TOOL]) == turn("system", f"Be brief.\n\n{TOOLS}") + asked


@pytest.mark.parametrize("arguments", [CALL["function"]["arguments"], json.dumps(CALL["function"]["arguments"])])
@pytest.mark.parametrize("name", ["qwen_25", "qwen3"])
def test_calls_and_their_results(name, arguments, rendered):
    arguments = arguments if isinstance(arguments, dict) else arguments.encode().decode("unicode_escape")
    call = {**CALL, "function": {"name": "add", "arguments": arguments}}
    results = [{"role": "tool", "content": "4"}, {"role": "tool", "content": "5"}]
    silent = {"role": "assistant", "content": None, "tool_calls": [call]}
    spoken = {"role": "assistant", "content": "Adding.", "tool_calls": [call, call]}
    begin = turn("system", DEFAULT) if name == "qwen_25" else ""
    shown = "\n<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response>"
    last = "4" if name == "qwen_25" else "<think>\n\n</think>\n\n4"
    assert rendered(name, [USER, silent, *results, ANSWER]) == (
        begin + turn("user", "2+2=") + turn("assistant", CALLED) + f"<|im_start|>user{shown}<|im_end|>\n"
        + turn("assistant", last)
    )  # fmt: skip
    assert rendered(name, [USER, spoken, results[0], ANSWER]) == (
        begin + turn("user", "2+2=") + turn("assistant", f"Adding.\n{CALLED}\n{CALLED}")
        + turn("user", "<tool_response>\n4\n</tool_response>") + turn("assistant", last)
    )  # fmt: skip


def test_qwen3_keeps_thoughts_after_the_last_question(rendered):
    thought = {**ANSWER, "reasoning_content": "two and two"}
    inline = {"role": "assistant", "content": "<think>\ntwo and two\n</think>\n\n4"}
    thinking, empty = "<think>\ntwo and two\n</think>\n\n4", "<think>\n\n</think>\n\n4"
    for answer in (thought, inline):
        assert rendered("qwen3", [USER, answer]) == turn("user", "2+2=") + turn("assistant", thinking)
        assert rendered("qwen3", [USER, answer, USER, ANSWER]) == (
            turn("user", "2+2=") + turn("assistant", "4") + turn("user", "2+2=") + turn("assistant", empty)
        )
    calling = {"role": "assistant", "content": "", "reasoning_content": "add them", "tool_calls": [CALL]}
    result = {"role": "tool", "content": "4"}
    assert rendered("qwen3", [USER, calling, result, ANSWER]) == (
        turn("user", "2+2=") + turn("assistant", f"<think>\nadd them\n</think>\n\n{CALLED}")
        + turn("user", "<tool_response>\n4\n</tool_response>") + turn("assistant", empty)
    )  # fmt: skip


def test_qwen3_answers_without_thinking_on_request(rendered):
    asked = turn("user", "2+2=") + ANSWERING
    assert rendered("qwen3", [USER], prompt=True, enable_thinking=False) == asked + "<think>\n\n</think>\n\n"
    assert rendered("qwen3", [USER], prompt=True, enable_thinking=True) == asked


def test_special_tokens_are_set_and_never_added(tokenizer_of):
    tokenizer = tokenizer_of("chatml")
    size = len(tokenizer)
    set_special_tokens(tokenizer, {"eos_token": "<|im_end|>", "pad_token": "<|im_start|>", "bos_token": "<|im_start|>"})
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == ("<|im_end|>", *["<|im_start|>"] * 2)
    assert stop_ids(tokenizer) == (tokenizer.convert_tokens_to_ids("<|im_end|>"),) and len(tokenizer) == size
    with pytest.raises(ValueError, match=r"special_tokens=pad_token: .*'<\|pad\|>'"):
        set_special_tokens(tokenizer, {"pad_token": "<|pad|>"})
    with pytest.raises(ValueError, match="special_tokens=additional_special_tokens: "):
        set_special_tokens(tokenizer, {"additional_special_tokens": ["<|im_end|>"]})
    with pytest.raises(ValueError, match="eot_tokens: .*'</turn>'"):
        set_special_tokens(tokenizer, {}, ["</turn>"])


CALLING = (  # closes a turn that calls a tool with another token, as Llama's templates may
    "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>' + m.content }}"
    "{{ '<|eom_id|>' if m.content.startswith('call') else '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>' }}{% endif %}"
)


def test_eot_tokens_end_turns_in_data_and_in_sampling(tokenizer_of):
    tokenizer = tokenizer_of("llama3")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|eom_id|>"]})  # as the model's files would
    tokenizer.chat_template = CALLING
    turns = [USER, {"role": "assistant", "content": "call add"}, {"role": "tool", "content": "4"}, ANSWER]
    eot, eom = tokenizer.convert_tokens_to_ids(["<|eot_id|>", "<|eom_id|>"])
    ids, mask = render_conversation(tokenizer, turns)
    trained = [id for id, trains in zip(ids, mask, strict=True) if trains]
    assert tokenizer.decode(trained) == "call add<|eom_id|>4<|eot_id|>"  # the turn is trained up to the next one
    with pytest.raises(ValueError, match="does not close"):
        render_responses(tokenizer, [USER], [turns[1:2]])
    set_special_tokens(tokenizer, {}, ["<|eom_id|>"])
    assert end_of_turn_id(tokenizer) == eot and end_ids(tokenizer) == (eot, eom)
    assert stop_ids(tokenizer, 7) == (7, tokenizer.eos_token_id, eot, eom)
    assert render_conversation(tokenizer, turns) == (ids, mask)
    head, (whole,) = render_responses(tokenizer, [USER], [turns[1:2]])
    assert tokenizer.decode(whole[len(head) :]) == "call add<|eom_id|>"
    text = {"role": "assistant", "content": "odd<|eom_id|>text"}
    with pytest.raises(ValueError, match=r"messages\[1\]: .*'<\|eom_id\|>'"):
        render_conversation(tokenizer, [USER, text])
