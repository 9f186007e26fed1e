"""Reading the fields of a row: text, messages, responses. What is not as it should be is named in the error."""

from __future__ import annotations

import json
from typing import Any

from data.chat import ROLES
from data.format_options import FormatOptions
from data.formats import Columns, need
from data.types import Messages

DEFAULT = FormatOptions()


def text_of(columns: Columns, *names: str) -> str:
    """The text of the first of these columns that the row has."""
    name = next((name for name in names if columns.get(name) is not None), None)
    if name is None and len(names) == 1:
        need(columns, *names)
    if name is None:
        raise ValueError(f"has none of {', '.join(map(repr, names))} (its columns: {', '.join(columns) or 'none'})")
    value = columns[name]
    if not isinstance(value, str):
        raise ValueError(f"{name!r} is a {type(value).__name__}, not text; fix the row or choose another format")
    if not value.strip():
        raise ValueError(f"{name!r} is empty; fill it in or remove the row")
    return value


def system_turn(columns: Columns, name: str = "system") -> Messages:
    """The system message of a row, or nothing where the column is absent or empty."""
    value = columns.get(name)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name!r} is a {type(value).__name__}, not text; fix the row")
    return [{"role": "system", "content": value}] if value else []


def messages_of(value: Any, name: str, options: FormatOptions = DEFAULT) -> Messages:
    """A list of messages with the data's own keys and roles translated; keys such as tool_calls are kept."""
    if not isinstance(value, list) or not value:
        found = "empty" if value == [] else f"a {type(value).__name__}"
        raise ValueError(f"{name!r} is {found}, not a list of messages; fix the row or choose another format")
    return [_message(message, f"{name}[{number}]", options) for number, message in enumerate(value)]


def _message(value: Any, where: str, options: FormatOptions) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is a {type(value).__name__}, not a message with a role and content; fix the row")
    calls = value.get("tool_calls")
    for setting in ("role_key", "content_key"):
        key = getattr(options, setting)
        if key not in value and not (setting == "content_key" and calls):
            keys = ", ".join(map(str, value))
            raise ValueError(f"{where} has no {key!r} (its keys: {keys}); fix the row, or see format.{setting}")
    role, content = value[options.role_key], value.get(options.content_key)
    role = options.role_names.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        raise ValueError(
            f"{where}: role {role!r} is unknown; chat_template.* can map it with format.roles, as in user=human"
        )
    if not isinstance(content, (str, list)) and not (content is None and calls):
        raise ValueError(f"{where}: its content is {content!r}, not text; fix the row")
    mapped = (options.role_key, options.content_key)
    extra = {key: item for key, item in value.items() if key not in mapped and item is not None}
    return {"role": role, "content": content, **extra}


def response_after(prompt: Messages, value: Any, name: str, options: FormatOptions = DEFAULT) -> Messages:
    """The one assistant message of a response given as text, a message, or a list that may repeat the prompt."""
    if isinstance(value, str):
        messages = [{"role": "assistant", "content": value}]
    elif isinstance(value, dict):
        messages = [_message(value, name, options)]
    else:
        messages = messages_of(value, name, options)
    *before, last = messages
    if before and before != prompt[-len(before) :]:
        raise ValueError(
            f"{name!r} has {len(messages)} messages that are not the prompt with one answer; a response is one "
            "assistant message, and the turns before it must be those of the prompt"
        )
    if last["role"] != "assistant":
        raise ValueError(f"{name!r} ends with a {last['role']} message; the last must be the assistant's")
    content = last["content"]
    if isinstance(content, str) and not content.strip() and not last.get("tool_calls"):
        raise ValueError(f"{name!r} is empty; fill it in or remove the row")
    return [last]


def for_template(columns: Columns) -> Columns:
    """What a row hands to the chat template besides messages: tools, and settings of the template."""
    found = {name: columns[name] for name in ("tools", "chat_template_kwargs") if columns.get(name) is not None}
    for name, kind in (("tools", list), ("chat_template_kwargs", dict)):
        if isinstance(found.get(name), str):  # tables whose rows differ in shape hold them as JSON
            try:
                found[name] = json.loads(found[name])
            except json.JSONDecodeError as error:
                raise ValueError(f"{name!r} is not valid JSON ({error.msg}); fix the row") from None
        if name in found and not isinstance(found[name], kind):
            raise ValueError(f"{name!r} is a {type(found[name]).__name__}, not a {kind.__name__}; fix the row")
    return found
