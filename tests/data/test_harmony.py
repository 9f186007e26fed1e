"""Harmony, gpt-oss's format: loss masks, tool calls and their results, and the answer in a completion."""

from __future__ import annotations

import asyncio
import json

import pytest

from data.chat import end_ids, list_unwritten, render_conversation, render_prompt, stop_ids
from data.types import Prompt
from rollout.engine import Completion, Sampling
from rollout.engines.stop import StopCheck
from rollout.episodes.tool_calls import Call, find_format, harmony
from rollout.episodes.tool_episode import ToolEpisode
from rollout.episodes.tools import load_tools
from tests.data.conftest import make_tokenizer

# Written for these tests, with the rules of gpt-oss's template: thoughts of an answer are written only in the last
# turn, and thoughts before a call until an answer follows; an answer ends with <|return|> only in the last turn.
TEMPLATE = (
    "{{ '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'low') + '<|end|>' }}"
    "{% if tools %}{{ '<|start|>developer<|message|>' + (tools | tojson) + '<|end|>' }}{% endif %}"
    "{% set last = namespace(name=none) %}"
    "{% for m in messages %}{% set here = '<|start|>' + m.role %}"
    "{% if m.tool_calls %}"
    "{% set later = namespace(answer=false) %}"
    "{% for n in messages[loop.index:] if n.role == 'assistant' and not n.tool_calls %}"
    "{% set later.answer = true %}{% endfor %}"
    "{% if m.thinking and m.content %}{{ raise_exception('both content and thinking') }}{% endif %}"
    "{% if (m.thinking or m.content) and not later.answer %}"
    "{{ here + '<|channel|>analysis<|message|>' + (m.thinking or m.content) + '<|end|>' }}{% endif %}"
    "{% set last.name = m.tool_calls[0].function.name %}"
    "{{ here + ' to=functions.' + last.name + '<|channel|>commentary json<|message|>' }}"
    "{{ (m.tool_calls[0].function.arguments | tojson) + '<|call|>' }}"
    "{% elif m.role == 'assistant' %}"
    "{% set ends = loop.last and not add_generation_prompt %}"
    "{% if ends and m.thinking %}{{ here + '<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{{ here + '<|channel|>final<|message|>' + m.content + ('<|return|>' if ends else '<|end|>') }}"
    "{% elif m.role == 'tool' %}"
    "{% if last.name is none %}{{ raise_exception('no call before this result') }}{% endif %}"
    "{{ '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}"
    "{{ (m.content | tojson) + '<|end|>' }}"
    "{% else %}{{ here + '<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
USER = {"role": "user", "content": "2+2="}
ADD = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
AS_TEXT = {"type": "function", "function": {"name": "add", "arguments": json.dumps({"a": 2})}}
CALL = {"role": "assistant", "content": "", "thinking": "Add.", "tool_calls": [ADD]}
RESULT = {"role": "tool", "content": "4"}
ANSWER = {"role": "assistant", "content": "It is 4", "thinking": "Done."}
# Texts with the trained tokens in square brackets.
ASKED = "<|start|>user<|message|>2+2=<|end|><|start|>assistant"
ADDED = (
    "<|channel|>analysis<|message|>Add.<|end|><|start|>assistant to=functions.add<|channel|>commentary json<|message|>"
)
BARE = ' to=functions.add<|channel|>commentary json<|message|>{"a": 2}<|call|>'
SHOWN = '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"4"<|end|><|start|>assistant'
FINAL = "<|channel|>final<|message|>It is 4"
DONE = f"<|channel|>analysis<|message|>Done.<|end|><|start|>assistant{FINAL}<|return|>"
ROWS = {
    "answer": ([USER, {"role": "assistant", "content": "It is 4"}], f"{ASKED}[{FINAL}<|return|>]", []),
    "thoughts": ([USER, ANSWER], f"{ASKED}[{DONE}]", []),
    "two turns": ([USER, ANSWER, USER, ANSWER], f"{ASKED}[{FINAL}]<|end|>{ASKED}[{DONE}]", ["thinking"]),
    "call": ([USER, CALL], f'{ASKED}[{ADDED}{{"a": 2}}<|call|>]', []),
    "call as text": ([USER, {**CALL, "thinking": None, "tool_calls": [AS_TEXT]}], f"{ASKED}[{BARE}]", []),
    "episode": (
        [USER, CALL, RESULT, {**CALL, "thinking": None, "content": "Add."}, RESULT, ANSWER],
        f'{ASKED}[{ADDED}{{"a": 2}}<|call|>]{SHOWN}[{ADDED}{{"a": 2}}<|call|>]{SHOWN}[{DONE}]',
        [],
    ),
    "two episodes": (  # the first has no thoughts, as when the model reads it
        [USER, CALL, RESULT, ANSWER, USER, CALL, RESULT, ANSWER],
        f'{ASKED}[{BARE}]{SHOWN}[{FINAL}]<|end|>{ASKED}[{ADDED}{{"a": 2}}<|call|>]{SHOWN}[{DONE}]',
        ["thinking"],
    ),
}


@pytest.fixture
def tokenizer():
    made = make_tokenizer("harmony")
    made.chat_template, made.eos_token = TEMPLATE, "<|return|>"
    return made


def ids_of(tokenizer, *texts: str) -> list[int]:
    return tokenizer("".join(texts), add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", ROWS)
def test_masks_mark_what_the_model_writes(name, tokenizer):
    messages, want, unwritten = ROWS[name]
    ids, mask = render_conversation(tokenizer, messages)
    text, was = "", False
    for token, flag in zip([*ids, ids[0]], [*mask, False], strict=True):
        text += ("[" if flag else "]") * (flag != was) + tokenizer.decode([token])
        was = flag
    assert text.removesuffix("<|start|>").partition("<|end|>")[2] == want
    notes = list_unwritten(tokenizer, messages, None)
    assert len(notes) == len(unwritten) and all(word in note for word, note in zip(unwritten, notes, strict=True))


def test_turns_end_with_a_call_or_an_answer(tokenizer):
    want = ids_of(tokenizer, "<|return|><|call|>")
    assert list(end_ids(tokenizer)) == want == list(stop_ids(tokenizer))


def test_calls_are_parsed_in_both_orders_of_the_header(tokenizer):
    parse = find_format("auto", tokenizer)
    assert parse is harmony
    thought = "<|channel|>analysis<|message|>to=functions.no <|end|><|start|>assistant"
    call = Call(name="lookup", arguments={"key": "ab"})
    for header in (
        "<|channel|>commentary to=functions.lookup <|constrain|>json<|message|>",
        " to=functions.lookup<|channel|>commentary json<|message|>",
        "<|channel|>commentary to=functions.lookup<|message|>",
    ):
        assert parse(f'{thought}{header}{{"key": "ab"}}<|call|>') == ("", [call])
        assert parse(f'{header}{{"key": "ab"}}') == ("", [call])
    said = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    wrong = parse(f"{said}<|channel|>commentary to=functions.lookup<|message|>[1]")
    assert wrong.content == "I look." and "not an object" in wrong.calls[0].error
    assert parse(thought + FINAL) == ("It is 4", []) and parse("plain") == ("plain", [])


def test_the_text_of_a_completion_is_its_answer(tokenizer):
    stop = StopCheck(tokenizer, Sampling(max_tokens=9, stop_ids=stop_ids(tokenizer)))
    rows = [(DONE, True), (ADDED + "{}<|call|>", True), ("<|channel|>analysis<|message|>4?", False), ("It is 4", False)]
    texts = stop.texts([ids_of(tokenizer, text) for text, _ in rows], [stopped for _, stopped in rows])
    assert texts == ["It is 4", "", "", "It is 4"]  # the last row has no channels: a prompt without a template


def test_an_episode_continues_after_a_call(tokenizer):
    """The result has the name of the tool, and the prompt plus all turns is what the template writes."""
    turns = [f'{ADDED.replace(".add", ".lookup")}{{"key": "ab"}}<|call|>', DONE]

    class Client:
        sampling = Sampling(max_tokens=1000)

        async def generate(self, prompt_ids: list[int], seed: int, max_tokens: int) -> Completion:
            ids = ids_of(tokenizer, turns[0 if ids_of(tokenizer, "<|call|>")[0] not in prompt_ids else 1])
            (text,) = StopCheck(tokenizer, self.sampling).texts([ids[:-1]], [False])
            return Completion(prompt_ids=list(prompt_ids), ids=ids, logps=[0.0] * len(ids), finish_reason="stop",
                              text=text, versions=[(0, len(ids))])  # fmt: skip

    toolset = load_tools(("lookup",), timeout=10.0)
    prompt = Prompt(prompt=[USER], ids=render_prompt(tokenizer, [USER]), columns={}, source="row 1")
    done = asyncio.run(ToolEpisode(toolset, tokenizer)(Client(), prompt, 0))
    assert done.text == "It is 4" and done.columns["tool_calls"] == 1
    call, result, answer = done.messages
    assert call["tool_calls"][0]["function"] == {"name": "lookup", "arguments": {"key": "ab"}} and not call["content"]
    messages = [USER, {**call, "thinking": "Add."}, result, {**answer, "thinking": "Done."}]
    ids, mask = render_conversation(tokenizer, messages)
    assert done.prompt_ids + done.ids == ids and [False] * len(done.prompt_ids) + done.mask == mask
    assert "functions.lookup to=assistant" in tokenizer.decode(ids)
