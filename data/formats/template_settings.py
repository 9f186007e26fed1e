"""Inputs of a chat template other than messages: a row's tools, and switches such as enable_thinking.

--chat-template-kwargs '{"enable_thinking": false}'                                         for all rows
{"messages": [...], "chat_template_kwargs": {"enable_thinking": true}, "tools": [...]}      for one row; overrides
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any

import tyro

from data.chat import SPECIAL_TOKENS
from data.errors import UserError
from data.formats.fields import for_template
from data.formats.registry import Columns


def _parse(words: Sequence[str]) -> dict[str, Any]:
    value = json.loads(words[0])  # tyro reports the expected form
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
    """Return the settings of one row: its `tools`, and its `chat_template_kwargs`, which override the flag."""
    inputs = for_template(columns)
    tools, row_kwargs = inputs.get("tools"), inputs.get("chat_template_kwargs", {})
    reserved = [name for name in row_kwargs if name in _reserved()]
    if reserved:
        raise UserError(f"chat_template_kwargs: {reserved[0]!r} is not a variable that a row may set; remove it")
    return {**(kwargs or {}), **row_kwargs, **({"tools": tools} if tools else {})}


@cache
def _reserved() -> frozenset[str]:
    """Return the arguments of apply_chat_template, such as chat_template, that are not inputs of the template."""
    from transformers import PreTrainedTokenizerBase

    arguments = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    return frozenset((*arguments, "messages", *SPECIAL_TOKENS)) - {"tools", "documents"}


def check_kwargs(tokenizer: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise if the tokenizer's chat template does not read a name, which would have no effect."""
    reserved = inspect.signature(tokenizer.apply_chat_template).parameters
    template = str(tokenizer.chat_template or "")
    label = f"chat_template_kwargs={json.dumps(kwargs)}"
    for name in kwargs:
        if name in reserved:
            raise UserError(f"{label}: {name!r} is not a setting of the template; remove it")
        if not isinstance(name, str) or not re.search(rf"\b{re.escape(name)}\b", template):
            raise UserError(f"{label}: the chat template does not read {name!r}, so it has no effect; check the name")


def check_effect(kwargs: Mapping[str, Any] | None, is_rendered: bool) -> None:
    """Raise if the flag is set but no row is rendered by a chat template."""
    if kwargs and not is_rendered:
        raise UserError("chat_template_kwargs: has no effect on plain text; use messages or remove the flag")
