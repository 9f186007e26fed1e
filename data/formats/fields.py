"""Read the fields of a row: text, messages and responses. Errors name the field.

Messages are {"role", "content"} or, in ShareGPT data, {"from": "human", "value"}; the keys tell them apart.
"""

from __future__ import annotations

import json
from typing import Any

from data.chat import ROLES
from data.errors import UserError
from data.format_options import FormatOptions
from data.types import Messages

Columns = dict[str, Any]
DEFAULT = FormatOptions()
CONVERSATION = ("messages", "conversations")  # columns of a conversation; the first present one is used
SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
                  "model": "assistant", "function_call": "assistant", "system": "system", "tool": "tool",
                  "observation": "tool", "function_response": "tool"}  # fmt: skip
OTHER_ROLES = {"human": "user", "gpt": "assistant"}  # read in other messages, unless the option roles is set
BOOL_TEXTS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}  # in CSV, for example
NOT_FOR_TEMPLATE = "fix the row, or rename the column if it is not for the chat template"


def need(columns: Columns, *names: str) -> None:
    for name in names:
        if name in columns and columns[name] is None:
            raise UserError(f"{name!r} is null; fill it in, remove the row or use another --data-format")
        if name not in columns:
            raise UserError(f"has no {name!r} (its columns: {listed(columns)}); rename one or set --data-format")


def listed(columns: Columns) -> str:
    """List the column names for an error message, with null columns marked."""
    return ", ".join(name if value is not None else f"{name} (null)" for name, value in columns.items()) or "none"


def user_turn(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def text_of(columns: Columns, *names: str) -> str:
    """Return the text of the first of these columns that is present."""
    name = next((name for name in names if columns.get(name) is not None), None)
    if name is None and len(names) == 1:
        need(columns, *names)
    if name is None:
        raise UserError(f"has none of {', '.join(map(repr, names))} (its columns: {listed(columns)})")
    value = columns[name]
    if not isinstance(value, str):
        kind = type(value).__name__
        raise UserError(f"{name!r} is of type {kind}, not text; fix the row or use another --data-format")
    if not value.strip():
        raise UserError(f"{name!r} is empty; fill it in or remove the row")
    return value


def optional_text(columns: Columns, name: str) -> str:
    """Return the text of a column, or "" if the column is absent or null."""
    value = columns.get(name)
    if value is not None and not isinstance(value, str):
        raise UserError(f"{name!r} is of type {type(value).__name__}, not text; fix the row")
    return value or ""


def system_turn(columns: Columns) -> Messages:
    """Return the system message of a row, or [] if the column is absent or empty."""
    value = optional_text(columns, "system")
    return [{"role": "system", "content": value}] if value else []


def user_prompt(columns: Columns, options: FormatOptions) -> str:
    """Format the prompt of user_defined, by input_format if the row has an input; without a system text it is ""."""
    is_given = options.field_system in columns
    system = optional_text(columns, options.field_system) if is_given else options.default_system
    system = options.system_format.format(system=system) if system else ""
    second = optional_text(columns, options.field_input) if options.input_format else ""
    template = options.input_format if second else options.prompt_format
    return template.format(prompt=text_of(columns, options.field_prompt), input=second, system=system)


def parse_bool(value: Any) -> bool | None:
    """Parse a bool, 0 or 1, or text; return None if it is neither true nor false."""
    if isinstance(value, str):
        return BOOL_TEXTS.get(value.strip().lower())
    return bool(value) if isinstance(value, (bool, int, float)) and value in (0, 1) else None


def with_nested(columns: Columns, options: FormatOptions) -> Columns:
    """Add the nested columns that options name as a.b: key b of the object in column a."""
    dotted = [value for name, value in vars(options).items() if name.startswith("field_") and "." in value]
    nested = {name: _nested(columns, name) for name in dotted if name not in columns}
    return {**columns, **{name: value for name, value in nested.items() if value is not None}}


def _nested(columns: Columns, name: str) -> Any:
    value: Any = columns
    for key in name.split("."):
        if not isinstance(value, dict) or key not in value:
            return None
        value = value[key]
    return value


def conversation_of(columns: Columns, options: FormatOptions = DEFAULT, *, any_system: bool = False) -> Messages:
    """Return the messages of a row, from the column field_messages or one of CONVERSATION; a list, or one as JSON.

    The system column of a ShareGPT row becomes its first message, unless it is empty.
    any_system: so does the system column of other rows, even if it is empty.
    """
    name = options.field_messages
    if name == DEFAULT.field_messages:
        name = next((name for name in CONVERSATION if columns.get(name) is not None), None)
    if name is None:
        raise UserError(
            f"has neither 'messages' nor 'conversations' (its columns: {listed(columns)}); rename one or set "
            "--data-format"
        )
    need(columns, name)
    value = columns[name]
    if isinstance(value, str):  # tables store conversations as JSON if their messages differ in shape
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise UserError(f"{name!r} is text, but not JSON ({error.msg}); fix the row") from None
    messages = messages_of(value, name, options)
    if messages[0]["role"] == "system":
        return messages
    if _reads_sharegpt(value[0], options):
        return [*system_turn(columns), *messages]
    if not any_system or columns.get("system") is None:
        return messages
    return [{"role": "system", "content": optional_text(columns, "system")}, *messages]


def is_sharegpt(value: Any) -> bool:
    """Return whether the value is a message with `from` and `value`, or a list of such messages."""
    if isinstance(value, list):
        return bool(value) and is_sharegpt(value[0])
    return isinstance(value, dict) and {"from", "value"} <= value.keys() and not {"role", "content"} & value.keys()


def _reads_sharegpt(message: Any, options: FormatOptions) -> bool:
    """Return whether a message is read as ShareGPT's: by its keys, unless the options name these keys."""
    return is_sharegpt(message) and "from" not in (options.role_key, options.content_key)


def messages_of(value: Any, name: str, options: FormatOptions = DEFAULT) -> Messages:
    """Map keys and roles to `role`, `content` and ROLES; keep other keys such as tool_calls."""
    if not isinstance(value, list) or not value:
        kind = "empty" if value == [] else f"of type {type(value).__name__}"
        raise UserError(f"{name!r} is {kind}, not a list of messages; fix the row or use another --data-format")
    return [_message(message, f"{name}[{index}]", options) for index, message in enumerate(value)]


def _message(value: Any, where: str, options: FormatOptions) -> dict[str, Any]:
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise UserError(f"{where} is of type {kind}, not a message with a role and content; fix the row")
    if _reads_sharegpt(value, options):
        return _sharegpt_message(value, where, options)
    calls = value.get("tool_calls")
    for setting in ("role_key", "content_key"):
        key = getattr(options, setting)
        if key not in value and not (setting == "content_key" and calls):
            keys = ", ".join(map(str, value))
            raise UserError(f"{where} has no {key!r} (its keys: {keys}); fix the row, or set format.{setting}")
    role, content = value[options.role_key], value.get(options.content_key)
    role = (options.role_names or OTHER_ROLES).get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        raise UserError(
            f"{where}: role {role!r} is unknown; fix the row, or map the role with format=chat_template,"
            f"roles=user={role} in --data"
        )
    if not isinstance(content, (str, list)) and not (content is None and calls):
        raise UserError(f"{where}: content is {content!r}, not text; fix the row")
    mapped = (options.role_key, options.content_key)
    extra = {key: item for key, item in value.items() if key not in mapped and item is not None}
    return {"role": role, "content": content, **extra}


def _sharegpt_message(value: dict[str, Any], where: str, options: FormatOptions) -> dict[str, Any]:
    sender, text = value["from"], value["value"]
    names = {**SHAREGPT_ROLES, **options.role_names}
    role = names.get(sender) if isinstance(sender, str) else None
    if role is None:
        raise UserError(f"{where}: from={sender!r} is unknown; use one of {', '.join(SHAREGPT_ROLES)}")
    if sender == "function_call":
        return {"role": role, "content": "", "tool_calls": _tool_calls(text, where)}
    if not isinstance(text, str):
        raise UserError(f"{where}: value is {text!r}, not text; fix the row")
    extra = {key: item for key, item in value.items() if key not in ("from", "value") and item is not None}
    return {"role": role, "content": text, **extra}


def _tool_calls(text: Any, where: str) -> list[dict[str, Any]]:
    """Parse calls in JSON: {"name", "arguments"}, or a list of these."""
    tool_calls = []
    try:
        calls = json.loads(text) if isinstance(text, str) else text
        for call in calls if isinstance(calls, list) else [calls]:
            arguments = call["arguments"]
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            tool_calls.append({"type": "function", "function": {"name": call["name"], "arguments": arguments}})
    except (ValueError, TypeError, KeyError):
        tool_calls = []
    if not tool_calls:
        raise UserError(f'{where}: function_call is not JSON with "name" and "arguments"; fix the row')
    return tool_calls


def response_after(prompt: Messages, value: Any, name: str, options: FormatOptions = DEFAULT) -> Messages:
    """Return the assistant message of a response: text, a message, or a list that may repeat the prompt."""
    if isinstance(value, str):
        messages = [{"role": "assistant", "content": value}]
    elif isinstance(value, dict):
        messages = [_message(value, name, options)]
    else:
        messages = messages_of(value, name, options)
    *before, last = messages
    if before and before != prompt[-len(before) :]:
        raise UserError(
            f"{name!r} has {len(messages)} messages that are not the prompt and one answer; a response is one "
            "assistant message, optionally after the turns of the prompt"
        )
    if last["role"] != "assistant":
        raise UserError(f"{name!r} ends with a {last['role']} message; it must end with the assistant's")
    content = last["content"]
    if isinstance(content, str) and not content.strip() and not last.get("tool_calls"):
        raise UserError(f"{name!r} is empty; fill it in or remove the row")
    return [last]


def for_template(columns: Columns) -> Columns:
    """Return the row's inputs of the chat template other than messages: tools and chat_template_kwargs."""
    inputs = {name: columns[name] for name in ("tools", "chat_template_kwargs") if columns.get(name) not in (None, "")}
    for name, kind in (("tools", list), ("chat_template_kwargs", dict)):
        if isinstance(inputs.get(name), str):  # tables store these as JSON if rows differ in shape
            try:
                inputs[name] = json.loads(inputs[name])
            except json.JSONDecodeError as error:
                raise UserError(f"{name!r} is not valid JSON ({error.msg}); {NOT_FOR_TEMPLATE}") from None
        if name in inputs and not isinstance(inputs[name], kind):
            found = type(inputs[name]).__name__
            raise UserError(f"{name!r} is of type {found}, not a {kind.__name__}; {NOT_FOR_TEMPLATE}")
    for index, tool in enumerate(inputs.get("tools", ())):
        if not isinstance(tool, dict):
            raise UserError(f"tools[{index}] is {tool!r}, not a JSON schema; {NOT_FOR_TEMPLATE}")
    return inputs
