"""Unpaired formats: convert a row to a prompt with one response and a label, true if desirable.

A format is a function (columns, options) -> {"prompt", "completion", "label"}. The pair format of the same name reads
rows that contain a pair, and the loader splits them in two: chosen is desirable, rejected is not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from data.errors import UserError
from data.format_options import FormatOptions
from data.formats.fields import (
    CONVERSATION,
    Columns,
    conversation_of,
    for_template,
    listed,
    messages_of,
    need,
    parse_bool,
    response_after,
    system_turn,
    text_of,
    user_prompt,
    user_turn,
)
from data.formats.pairs import FAMILIES, PAIR_FORMATS, PAIR_OPTIONS, Family, PairFormat
from data.types import Messages


def label_of(columns: Columns, name: str = "label") -> bool:
    need(columns, name)
    label = parse_bool(columns[name])
    if label is None:
        raise UserError(f"{name!r} is {columns[name]!r}; it must be true or false (or 1 or 0)")
    return label


def _text(family: Family, prompt: str, columns: Columns, options: FormatOptions) -> Columns:
    turns = [*system_turn(columns), *user_turn(text_of(columns, prompt))]
    completion = text_of(columns, "completion") + family.close
    return {"prompt": family.prompt(turns), "completion": completion, "label": label_of(columns)}


def _argilla_chat(family: Family, columns: Columns, options: FormatOptions) -> Columns:
    """Read a conversation from `completion`, or its turns from `chosen` and the answer from `completion`."""
    need(columns, "completion")
    completion = messages_of(columns["completion"], "completion")
    turns = completion[:-1]
    if not turns:
        need(columns, "chosen")
        turns = messages_of(columns["chosen"], "chosen")
    (answer,) = response_after(turns, completion, "completion")
    if turns[0]["role"] != "system":
        turns = [*system_turn(columns), *turns]
    for index, turn in enumerate(turns):
        text_of({f"message {index}": turn["content"]}, f"message {index}")
    text = text_of({"completion": answer["content"]}, "completion")
    return {"prompt": family.prompt(turns), "completion": text + family.close, "label": label_of(columns)}


def _user_defined(columns: Columns, options: FormatOptions) -> Columns:
    completion = text_of(columns, options.field_completion)
    return {
        "prompt": user_prompt(columns, options),
        "completion": options.completion_format.format(completion=completion),
        "label": label_of(columns, options.field_label),
    }


def _auto(columns: Columns, options: FormatOptions) -> Columns:
    """Read TRL's rows: a prompt and a completion, as text or messages, or a conversation that ends with the answer."""
    if columns.get("completion") is None:
        name = next((name for name in CONVERSATION if columns.get(name) is not None), None)
        if name is None:
            raise UserError(
                f"has no 'completion' with a 'label', and no 'messages' (its columns: {listed(columns)}); add them or "
                "set --data-format"
            )
        messages = conversation_of(columns)
        return _conversation(columns, messages[:-1], messages, name)
    prompt, completion = columns.get("prompt"), columns["completion"]
    if isinstance(prompt, list):
        return _conversation(columns, messages_of(prompt, "prompt"), completion, "completion")
    if isinstance(completion, str) or prompt is not None:
        prompt, completion = text_of(columns, "prompt"), text_of(columns, "completion")
        return {"prompt": prompt, "completion": completion, "label": label_of(columns)}
    messages = messages_of(completion, "completion")
    return _conversation(columns, messages[:-1], messages, "completion")


def _conversation(columns: Columns, prompt: Messages, completion: Any, name: str) -> Columns:
    if not prompt:
        raise UserError(f"{name!r} has one message; add the turns before the answer")
    answer = response_after(prompt, completion, name)
    return {"prompt": prompt, "completion": answer, "label": label_of(columns), **for_template(columns)}


def _either(unpaired: PairFormat | None, pair: PairFormat | None, columns: Columns, options: FormatOptions) -> Columns:
    """Read a row as a pair if it has both responses and no labelled completion, otherwise as unpaired."""
    if unpaired is None:
        return pair(columns, options)
    label, *responses = (columns.get(name) for name in (options.field_label, options.field_completion, "messages"))
    is_labelled = label is not None and any(response is not None for response in responses)
    return pair(columns, options) if _has_pair(columns, options) and not is_labelled else unpaired(columns, options)


def _has_pair(columns: Columns, options: FormatOptions) -> bool:
    names = ((options.field_chosen, "chosen_response"), (options.field_rejected, "rejected_response"))
    return all(any(columns.get(name) is not None for name in either) for either in names)


def _registry() -> dict[str, PairFormat]:
    single: dict[str, Callable[..., Columns]] = {
        "auto": _auto,
        "sharegpt": _auto,
        "user_defined": _user_defined,
        "user_defined.default": _user_defined,
    }
    columns = {"argilla": "instruction", "intel": "question", "prompt_pairs": "prompt", "ultra": "prompt"}
    for name, family in FAMILIES.items():
        single |= {f"{name}.{kind}": partial(_text, family, prompt) for kind, prompt in columns.items()}
        single[f"{name}.argilla_chat"] = partial(_argilla_chat, family)
    names = [*single, *(name for name in PAIR_FORMATS if name not in single)]
    return {name: partial(_either, single.get(name), PAIR_FORMATS.get(name)) for name in names}


UNPAIRED_FORMATS: dict[str, PairFormat] = _registry()
_UNPAIRED = {"field_prompt", "field_system", "field_completion", "field_label", "prompt_format", "completion_format"}
UNPAIRED_OPTIONS: dict[str, set[str]] = {
    **PAIR_OPTIONS,
    **{name: {*_UNPAIRED, *PAIR_OPTIONS[name]} for name in ("user_defined", "user_defined.default")},
}
