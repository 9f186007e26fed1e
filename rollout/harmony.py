"""Harmony, the format of gpt-oss: a turn is several messages, each with a header that names its channel.

    <|channel|>analysis<|message|>2 and 2 is 4<|end|>                                          thoughts
    <|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 2}<|call|>   a tool call
    <|start|>assistant<|channel|>final<|message|>4<|return|>                                   the answer

The recipient of a call may also precede its channel, as chat templates write it.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Message(NamedTuple):
    channel: str
    recipient: str | None
    text: str


def split_messages(text: str) -> list[Message]:
    """Split a turn, decoded with its special tokens, into messages; a text without headers has none."""
    messages = []
    for part in text.split("<|start|>"):
        header, found, body = part.partition("<|message|>")
        channel = re.search(r"<\|channel\|>\s*(\w+)", header)
        if found and channel:
            recipient = re.search(r"\bto=([^\s<]+)", header)
            body = re.split(r"<\|(?:end|call|return)\|>", body)[0]
            messages.append(Message(channel[1], recipient[1] if recipient else None, body))
    return messages
