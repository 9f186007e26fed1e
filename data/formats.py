"""Data formats: how the columns of a row become the columns a loader reads.

A format is a function from columns to columns. PROMPT_FORMATS give a `prompt` (and leave the rest to the rewards),
SFT_FORMATS give a `prompt` with a `completion`. A dotted name is a user's own transform, found from the working folder:

    def my_transform(cfg):                                      # --data-format my_module.my_transform
        def transform(example, tokenizer=None):
            return {"prompt": [{"role": "user", "content": example["problem"]}], "answer": example["solution"]}
        return transform, {"remove_columns": ["problem"]}

With a parameter dataset_idx (or **kwargs) my_transform is also told the number of its --data entry, from 0 on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from data.nearest import suggest
from data.progress import shown
from data.sources import DataSpec, Row, load_rows, parse_spec
from data.types import Messages
from data.user_code import attribute_of, load_module, told

Columns = dict[str, Any]
Format = Callable[[Columns], Columns]


def formatted_rows(
    specs: Sequence[str], formats: Mapping[str, Format], *, data_format: str, tokenizer: Any, cfg: Any
) -> Iterator[tuple[DataSpec, Row]]:
    """Rows of all specs with their format applied; format= in a spec wins over data_format."""
    for spec, row, function in rows_and_formats(specs, formats, data_format=data_format, tokenizer=tokenizer, cfg=cfg):
        yield spec, Row(source=row.source, columns=apply(function, row))


def rows_and_formats(
    specs: Sequence[str], formats: Mapping[str, Format], *, data_format: str, tokenizer: Any, cfg: Any
) -> Iterator[tuple[DataSpec, Row, Format]]:
    """Rows of all specs as they were read, each with its format, for a caller that can do without some of them."""
    parsed = parse_specs(specs)
    functions = [
        _find(spec.format or data_format, formats, tokenizer, cfg, dataset_idx)
        for dataset_idx, spec in enumerate(parsed)
    ]
    for spec, function in zip(parsed, functions, strict=True):
        for row in shown(load_rows(spec), spec.path):
            yield spec, row, function


def parse_specs(specs: Sequence[str]) -> list[DataSpec]:
    if not specs:
        raise ValueError("data=(): nothing to read; give at least one file, hub id or task:NAME")
    if isinstance(specs, str):
        raise ValueError(f"data={specs}: must be a list of paths; write [{specs}]")
    return [parse_spec(spec) for spec in specs]


def apply(function: Callable[..., Any], row: Row, *args: Any) -> Any:
    """Call a function on a row's columns; what it refuses is reported with the row's source."""
    try:
        return function(row.columns, *args)
    except ValueError as error:
        raise ValueError(f"{row.source}: {error}") from None


def need(columns: Columns, *names: str) -> None:
    missing = [name for name in names if columns.get(name) is None]
    if missing:
        raise ValueError(
            f"has no {missing[0]!r} (its columns: {', '.join(columns)}); rename one or choose another format"
        )


def template_columns(columns: Columns) -> Columns:
    """The columns that are for the chat template, for a format that makes new columns of a row."""
    return {name: columns[name] for name in ("tools", "chat_template_kwargs") if name in columns}


def user_turn(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def _auto_prompt(columns: Columns) -> Columns:
    if columns.get("prompt") is not None:
        return columns
    messages = columns.get("messages")
    if messages is None:
        raise ValueError(
            f"has neither 'prompt' nor 'messages' (its columns: {', '.join(columns) or 'none'}); rename a column or "
            "set data_format"
        )
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("'messages' must be a list of {'role', 'content'} objects")
    last_user = max((n for n, message in enumerate(messages) if message.get("role") == "user"), default=-1)
    if last_user < 0:
        raise ValueError("'messages' has no user turn to answer")
    return {**columns, "prompt": messages[: last_user + 1]}


def _question_answer(columns: Columns) -> Columns:
    need(columns, "question")
    return {**_without(columns, "question"), "prompt": user_turn(columns["question"])}


def _gsm8k(columns: Columns) -> Columns:
    need(columns, "question", "answer")
    _, marker, number = str(columns["answer"]).rpartition("####")
    if not marker:
        raise ValueError("'answer' has no '####' before its result; use data_format=question_answer")
    return {**_question_answer(columns), "answer": number.strip().replace(",", "")}


def _alpaca(columns: Columns) -> Columns:
    need(columns, "instruction")
    rest = _without(columns, "instruction", "input", "output")
    if "output" in columns:
        rest["answer"] = columns["output"]
    return {**rest, "prompt": _instruction(columns)}


def _auto_sft(columns: Columns) -> Columns:
    present = {name for name, value in columns.items() if value is not None}
    if "messages" in present or "text" in present or {"prompt", "completion"} <= present:
        return columns
    if {"instruction", "output"} <= present:
        return _alpaca_sft(columns)
    raise ValueError(
        "has none of 'messages', 'prompt' with 'completion', 'text', 'instruction' with 'output' (its columns: "
        f"{', '.join(columns) or 'none'}); rename a column or set data_format"
    )


def _question_answer_sft(columns: Columns) -> Columns:
    need(columns, "question", "answer")
    return {"prompt": user_turn(columns["question"]), "completion": columns["answer"], **template_columns(columns)}


def _alpaca_sft(columns: Columns) -> Columns:
    need(columns, "instruction", "output")
    return {"prompt": _instruction(columns), "completion": columns["output"], **template_columns(columns)}


def _instruction(columns: Columns) -> Messages:
    parts = [columns["instruction"], columns.get("input")]
    if not all(part is None or isinstance(part, str) for part in parts):
        raise ValueError("its 'instruction' or 'input' is not text; fix the row")
    return user_turn("\n\n".join(part for part in parts if part))


def _without(columns: Columns, *names: str) -> Columns:
    return {name: value for name, value in columns.items() if name not in names}


PROMPT_FORMATS: dict[str, Format] = {
    "auto": _auto_prompt,
    "question_answer": _question_answer,
    "gsm8k": _gsm8k,
    "alpaca": _alpaca,
}
SFT_FORMATS: dict[str, Format] = {
    "auto": _auto_sft,
    "question_answer": _question_answer_sft,
    "gsm8k": _question_answer_sft,  # the whole solution is imitated, result marker included
    "alpaca": _alpaca_sft,
}


def _find(name: str, formats: Mapping[str, Format], tokenizer: Any, cfg: Any, dataset_idx: int) -> Format:
    if name in formats:
        return formats[name]
    family = name.partition(".")[0]
    ours = any(known.startswith(f"{family}.") for known in formats) and not Path(f"{family}.py").is_file()
    if "." not in name or ours:
        raise ValueError(f"data_format={name}: no such format; {suggest(name, formats)} or give my_module.my_transform")
    transform = load_transform(name, tokenizer, cfg, dataset_idx)
    return lambda columns: formats["auto"](transform(columns))


def load_transform(name: str, tokenizer: Any, cfg: Any, dataset_idx: int = 0) -> Format:
    """A user's transform by dotted name: module.factory(cfg) -> fn, or (fn, {"remove_columns": [...]}).

    A factory that takes dataset_idx is told which entry of --data it is made for, from 0 on.
    """
    module, _, attribute = name.rpartition(".")
    factory = attribute_of(load_module(module, f"data_format={name}"), attribute, f"data_format={name}")
    if not callable(factory):
        raise ValueError(f"data_format={name}: is a {type(factory).__name__}, not a function; name a function of cfg")
    try:
        made = factory(cfg, dataset_idx=dataset_idx) if _takes(factory, "dataset_idx") else factory(cfg)
    except Exception as error:  # the user's code, whatever it raises
        raise ValueError(f"data_format={name}: failed when called with the config ({told(error)})") from None
    function, settings = made if isinstance(made, tuple) and len(made) == 2 else (made, {})
    if not callable(function) or not isinstance(settings, dict):
        raise ValueError(
            f"data_format={name}: returned {type(made).__name__}; it is called with the config and must return a "
            'function of an example, or (function, {"remove_columns": [...]})'
        )
    unknown = sorted(settings.keys() - {"remove_columns"})
    if unknown:
        raise ValueError(f"data_format={name}: the setting {unknown[0]!r} is not supported; only remove_columns is")
    return _row_transform(name, function, settings.get("remove_columns", []), tokenizer)


def _takes(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    named = name in parameters and parameters[name].kind is not inspect.Parameter.POSITIONAL_ONLY
    return named or any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())


def _row_transform(name: str, function: Callable[..., Any], removed: Any, tokenizer: Any) -> Format:
    """Merge what the function returns over the row, as datasets' map does: removed columns go, returned ones stay."""
    parameters = inspect.signature(function).parameters
    extra = {key: tokenizer for key in ("tokenizer", "processing_class") if key in parameters}
    gone = [removed] if isinstance(removed, str) else list(removed or ())

    def transform(columns: Columns) -> Columns:
        try:
            result = function(dict(columns), **extra)
        except Exception as error:  # the user's code, whatever it raises
            raise ValueError(f"data_format={name} failed on this row ({told(error)})") from None
        if not isinstance(result, dict):
            raise ValueError(f"data_format={name} returned {type(result).__name__} for this row; it must return a dict")
        kept = {} if removed == "__all__" else _without(columns, *gone)
        return {**kept, **result}

    return transform
