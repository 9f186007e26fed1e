"""The ebft_* formats: convert a conversation, or a question with its answer, to a prompt with its target.

    EBFT_FORMATS            {"prompt", "ground_truth"}, and "remaining_turns" if the conversation continues (targets.py)
    EBFT_STRIDED_FORMATS    rows for data/rows/sft.py: {"prompt", "completion"}, {"messages"}, {"text"} (documents.py)

A target remains a message, so that keys such as tool_calls and reasoning_content reach the chat template.
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
# A format that splits a row into several returns a list.
TargetFormat = Callable[[Columns], Columns | list[Columns]]


def turns_of(columns: Columns) -> Messages:
    """Return the messages of a row, with their content as text."""
    return clean_messages(conversation_of(columns))


def last_turn(columns: Columns) -> Columns:
    """Use the last assistant turn as the target and everything before it as the prompt."""
    messages = turns_of(columns)
    return _target(columns, messages, _assistant_turns(messages)[-1])


def _first_turn(columns: Columns) -> Columns:
    """Use the first assistant turn as the target, and later turns up to the assistant's last as remaining_turns."""
    messages = turns_of(columns)
    turns = _assistant_turns(messages)
    later = messages[turns[0] + 1 : turns[-1] + 1]  # turns after the last answer have no target
    row = _target(columns, messages, turns[0])
    return {**row, "remaining_turns": later} if later else row


def _all_turns(columns: Columns) -> list[Columns]:
    """Return one row per assistant turn; its prompt is the conversation before the turn."""
    messages = turns_of(columns)
    return [_target(columns, messages, index) for index in _assistant_turns(messages)]


def _opencode(columns: Columns) -> Columns:
    rest = {name: value for name, value in columns.items() if name not in ("input", "output")}
    return {**rest, "prompt": user_turn(text_of(columns, "input")), "ground_truth": text_of(columns, "output")}


def _split_thinking(columns: Columns) -> Columns:
    """Move the thoughts of earlier turns to reasoning_content; put <think> tags around the target's thoughts."""
    messages = [_split(message) for message in turns_of(columns)]
    row = _target(columns, messages, _assistant_turns(messages)[-1])
    (last,) = row["ground_truth"]
    thought = last.get("reasoning_content")
    if thought:
        last = {name: value for name, value in last.items() if name != "reasoning_content"}
        last["content"] = f"<think>\n{thought}\n</think>\n\n{last['content']}"
    return {**row, "ground_truth": [last]}


def _split(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    for opening, closing in THOUGHT if message["role"] == "assistant" else ():
        match = re.search(f"{opening}(.*?){closing}", content, re.DOTALL)
        if match:
            answer = content[: match.start()] + content[match.end() :]
            return {**message, "content": answer.strip(), "reasoning_content": match.group(1).strip()}
    return message


def _answer_only(columns: Columns) -> Columns:
    """Use the last assistant turn without its thoughts as the target."""
    row = last_turn(columns)
    last = {name: value for name, value in row["ground_truth"][0].items() if name != "reasoning_content"}
    for opening, closing in THOUGHT:
        last["content"] = re.sub(rf"{opening}.*?{closing}\s*", "", last["content"], flags=re.DOTALL)
    last["content"] = last["content"].strip()
    if not last["content"] and not last.get("tool_calls"):
        raise UserError("the last assistant turn is empty without its thoughts; remove the row")
    return {**row, "ground_truth": [last]}


def _assistant_turns(messages: Messages) -> list[int]:
    """Return the indices of the assistant's messages."""
    indices = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not indices:
        raise UserError("has no assistant turn to use as the target; remove the row")
    return indices


def _target(columns: Columns, messages: Messages, index: int) -> Columns:
    if index == 0:
        raise UserError("the conversation starts with an assistant turn; add a user turn before it")
    rest = {name: value for name, value in columns.items() if name not in CONVERSATION}
    return {**rest, "prompt": messages[:index], "ground_truth": [messages[index]]}


def _strided_structured(columns: Columns) -> Columns:
    prompt = text_of(columns, "input", "prompt", "question")
    return {"prompt": prompt, "completion": text_of(columns, "output", "completion", "answer")}


def _strided_text(columns: Columns) -> Columns:
    return {"text": text_of(columns, "question", "text")}


def _strided_chat(columns: Columns) -> Columns:
    """Train every assistant turn."""
    messages = turns_of(columns)
    _assistant_turns(messages)
    return {"messages": messages, **for_template(columns)}


def _strided_last(columns: Columns) -> Columns:
    """Train only the last assistant turn."""
    row = last_turn(columns)
    return {"prompt": row["prompt"], "completion": row["ground_truth"], **for_template(columns)}


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


def reject_formats(specs: Sequence[str], data_format: str, formats: Mapping[str, Any], mode: str) -> None:
    """Raise if a spec uses one of these formats, which belong to the other mode."""
    for spec in parse_specs(specs):
        name = spec.format or data_format
        if name in formats:
            raise UserError(f"data_format={name}: only works with --mode {mode}; set it, or use another --data-format")
