"""What a chat template gets besides the messages: a row's tools, and switches such as enable_thinking.

--chat-template-kwargs '{"enable_thinking": false}'                 for all rows
{"messages": [...], "chat_template_kwargs": {"enable_thinking": true}, "tools": [...]}      for one row; overrides
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import tyro

from data.errors import UserError
from data.formats.fields import for_template
from data.formats.registry import Columns


def _parse(words: Sequence[str]) -> dict[str, Any]:
    value = json.loads(words[0])  # tyro reports what was expected
    if not isinstance(value, dict):
        raise UserError("not a JSON object")
    return value


# The type of --chat-template-kwargs: a JSON object on the command line, a mapping in YAML and Python.
JsonObject = Annotated[
    dict[str, Any],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar='{"NAME": VALUE}',
        instance_from_str=_parse,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [json.dumps(value)],
    ),
]


def template_settings(columns: Columns, kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Settings for one row: its `tools`, and its `chat_template_kwargs`, which override the flag's."""
    own = for_template(columns)
    tools = own.get("tools")
    return {**(kwargs or {}), **own.get("chat_template_kwargs", {}), **({"tools": tools} if tools else {})}


def check_kwargs(tokenizer: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuse names that the tokenizer's chat template does not read: they would have no effect."""
    taken = inspect.signature(tokenizer.apply_chat_template).parameters
    template = str(tokenizer.chat_template or "")
    given = f"chat_template_kwargs={json.dumps(kwargs)}"
    for name in kwargs:
        if name in taken:
            raise UserError(f"{given}: {name!r} is not a setting of the template; remove it")
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise UserError(
                f"{given}: the chat template does not read {name!r}, so it has no effect; check the name, or remove it"
            )


def check_effect(kwargs: Mapping[str, Any] | None, is_rendered: bool) -> None:
    """Refuse the flag if no row is rendered by a chat template."""
    if kwargs and not is_rendered:
        raise UserError("chat_template_kwargs: has no effect, all rows are plain text; give messages, or leave it out")
