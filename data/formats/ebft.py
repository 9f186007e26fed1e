"""The ebft_* formats: a conversation, or a question with its answer, as a prompt with its target.

    EBFT_FORMATS            {"prompt", "ground_truth"}, and "remaining_turns" if the conversation goes on (targets.py)
    EBFT_STRIDED_FORMATS    what data/rows/sft.py reads: {"prompt", "completion"}, {"messages"}, {"text"} (documents.py)

A target stays a message, so that keys such as tool_calls and reasoning_content reach the chat template.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from data.chat import clean_messages
from data.errors import UserError
from data.formats.fields import CONVERSATION, Columns, conversation_of, for_template, text_of, user_turn
from data.formats.registry import Format, parse_specs
from data.types import Messages

# Tags around thoughts; the first pair found in a message is used.
THOUGHT = [
    (re.escape(opening), re.escape(closing))
    for opening, closing in (
        ("<think>", "</think>"),
        ("<reasoning>", "</reasoning>"),
        ("<|begin_of_thought|>", "<|end_of_thought|>"),
    )
]
# A format that makes several rows of one returns a list.
TargetFormat = Callable[[Columns], Columns | list[Columns]]


def turns_of(columns: Columns) -> Messages:
    """The messages of a row, their content as text."""
    return clean_messages(conversation_of(columns))


def last_turn(columns: Columns) -> Columns:
    """The last assistant turn is the target, everything before it the prompt."""
    messages = turns_of(columns)
    return _target(columns, messages, _assistant_turns(messages)[-1])


def _first_turn(columns: Columns) -> Columns:
    """The first assistant turn is the target; later turns, up to the assistant's last, are remaining_turns."""
    messages = turns_of(columns)
    turns = _assistant_turns(messages)
    rest = messages[turns[0] + 1 : turns[-1] + 1]  # turns without an answer have no target
    made = _target(columns, messages, turns[0])
    return {**made, "remaining_turns": rest} if rest else made


def _all_turns(columns: Columns) -> list[Columns]:
    """One row per assistant turn, each after the conversation as it is in the data."""
    messages = turns_of(columns)
    return [_target(columns, messages, number) for number in _assistant_turns(messages)]


def _opencode(columns: Columns) -> Columns:
    rest = {name: value for name, value in columns.items() if name not in ("input", "output")}
    return {**rest, "prompt": user_turn(text_of(columns, "input")), "ground_truth": text_of(columns, "output")}


def _split_thinking(columns: Columns) -> Columns:
    """Thoughts of earlier turns become reasoning_content; those of the target get <think> tags."""
    messages = [_split(message) for message in turns_of(columns)]
    made = _target(columns, messages, _assistant_turns(messages)[-1])
    (last,) = made["ground_truth"]
    thought = last.get("reasoning_content")
    if thought:
        last = {name: value for name, value in last.items() if name != "reasoning_content"}
        last["content"] = f"<think>\n{thought}\n</think>\n\n{last['content']}"
    return {**made, "ground_truth": [last]}


def _split(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    for opening, closing in THOUGHT if message["role"] == "assistant" else ():
        found = re.search(f"{opening}(.*?){closing}", content, re.DOTALL)
        if found:
            answer = content[: found.start()] + content[found.end() :]
            return {**message, "content": answer.strip(), "reasoning_content": found.group(1).strip()}
    return message


def _answer_only(columns: Columns) -> Columns:
    """The last assistant turn without its thoughts."""
    made = last_turn(columns)
    last = {name: value for name, value in made["ground_truth"][0].items() if name != "reasoning_content"}
    for opening, closing in THOUGHT:
        last["content"] = re.sub(rf"{opening}.*?{closing}\s*", "", last["content"], flags=re.DOTALL)
    last["content"] = last["content"].strip()
    if not last["content"] and not last.get("tool_calls"):
        raise UserError("the last assistant turn is empty without its thoughts; remove the row")
    return {**made, "ground_truth": [last]}


def _assistant_turns(messages: Messages) -> list[int]:
    """Indices of the assistant's messages."""
    found = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not found:
        raise UserError("has no assistant turn, so there is no true completion; remove the row")
    return found


def _target(columns: Columns, messages: Messages, number: int) -> Columns:
    if number == 0:
        raise UserError("the conversation opens with an assistant turn; put a user turn before it")
    rest = {name: value for name, value in columns.items() if name not in CONVERSATION}
    return {**rest, "prompt": messages[:number], "ground_truth": [messages[number]]}


def _strided_structured(columns: Columns) -> Columns:
    prompt = text_of(columns, "input", "prompt", "question")
    return {"prompt": prompt, "completion": text_of(columns, "output", "completion", "answer")}


def _strided_text(columns: Columns) -> Columns:
    """Plain text: every token is part of the document."""
    return {"text": text_of(columns, "question", "text")}


def _strided_chat(columns: Columns) -> Columns:
    """Every assistant turn is trained."""
    messages = turns_of(columns)
    _assistant_turns(messages)
    return {"messages": messages, **for_template(columns)}


def _strided_last(columns: Columns) -> Columns:
    """Only the last assistant turn is trained."""
    made = last_turn(columns)
    return {"prompt": made["prompt"], "completion": made["ground_truth"], **for_template(columns)}


EBFT_FORMATS: dict[str, TargetFormat] = {
    "ebft_opencode.transform": _opencode,
    "ebft_chat_multiturn.transform": _first_turn,
    "ebft_chat_multiturn.transform_last_turn": last_turn,
    "ebft_chat_multiturn.transform_all_turns": _all_turns,
    "ebft_reasoning.transform": last_turn,
    "ebft_reasoning.transform_split_thinking": _split_thinking,
    "ebft_reasoning.transform_answer_only": _answer_only,
}
EBFT_STRIDED_FORMATS: dict[str, Format] = {
    "ebft_reasoning.transform_strided": _strided_last,
    "ebft_strided_structured.transform": _strided_structured,
    "ebft_pretrain.transform": _strided_text,
    "ebft_strided_chat.transform": _strided_chat,
}


def refuse_formats(specs: Sequence[str], data_format: str, others: Mapping[str, Any], mode: str) -> None:
    """Refuse formats of the other mode."""
    for spec in parse_specs(specs):
        name = spec.format or data_format
        if name in others:
            raise UserError(f"data_format={name}: gives rows for --mode {mode}; set that, or choose another format")
