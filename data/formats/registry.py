"""Data formats: convert the columns of a row to the columns that a loader reads.

A format is a function from columns to columns. PROMPT_FORMATS return a `prompt` (other columns are for the rewards),
SFT_FORMATS return a `prompt` with a `completion`. A dotted name is a user's transform in the working folder:

    def my_transform(cfg):                  # --data-format my_module.my_transform; cfg is the run's config
        def transform(example, tokenizer=None):
            return {"prompt": [{"role": "user", "content": example["problem"]}], "answer": example["solution"]}
        return transform, {"remove_columns": ["problem"]}

If my_transform has a parameter dataset_idx (or **kwargs), it also gets the index of its --data entry. With
{"batched": True}, transform maps a dict of lists, up to batch_size (1000) rows, to another, as in datasets.map.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.format_options import FormatOptions
from data.formats.fields import (
    CONVERSATION,
    Columns,
    conversation_of,
    for_template,
    is_sharegpt,
    listed,
    messages_of,
    need,
    text_of,
    user_prompt,
    user_turn,
    with_nested,
)
from data.hints import other_methods, suggest
from data.sources import DataSpec, Row, load_rows, parse_spec
from data.types import Messages
from data.user_code import describe_error, find_callable

Format = Callable[[Columns], Columns]
# Settings of datasets.map that a transform may return. NO_EFFECT settings only change its speed and are ignored.
MAP_SETTINGS = {"remove_columns", "batched", "batch_size"}
NO_EFFECT = {"num_proc", "desc", "load_from_cache_file", "keep_in_memory", "writer_batch_size"}


@dataclass(frozen=True)
class WithOptions:
    """A format with options, such as a column name, set for the run or for one --data entry."""

    function: Callable[[Columns, FormatOptions], Columns]
    reads: frozenset[str]
    options: FormatOptions = FormatOptions()

    def __call__(self, columns: Columns) -> Columns:
        return self.function(with_nested(columns, self.options), self.options)

    def then(self, after: Format) -> WithOptions:
        """Return this format followed by another function."""
        return replace(self, function=lambda columns, options: after(self.function(columns, options)))


@dataclass(frozen=True)
class UserFormat:
    """A user's transform, followed by the format `then`. It may have state, so it sees all rows, in order."""

    transform: Format
    then: Format

    def __call__(self, columns: Columns) -> Columns:
        return self.then(self.transform(columns))


@dataclass(frozen=True)
class Batched:
    """A user's transform of several rows at a time, followed by the format `then`."""

    name: str
    function: Callable[[Columns], Any]
    size: int
    removed: Any
    then: Format


def formatted_rows(
    specs: Sequence[str], formats: Mapping[str, Format], *, data_format: str, tokenizer: Any, cfg: object
) -> Iterator[tuple[DataSpec, Row]]:
    """Yield the rows of all specs with their format applied; format= in a spec overrides data_format.

    cfg is the run's config; it is only passed to a user's transform, in all loaders.
    """
    options = {"data_format": data_format, "tokenizer": tokenizer, "cfg": cfg}
    for spec, rows, function in rows_and_formats(specs, formats, **options):
        for row in rows:
            yield spec, Row(source=row.source, columns=apply(function, row))


def rows_and_formats(
    specs: Sequence[str], formats: Mapping[str, Format], *, data_format: str, tokenizer: Any, cfg: object
) -> Iterator[tuple[DataSpec, Sequence[Row], Format]]:
    """Yield the unformatted rows of each spec with their format."""
    parsed = parse_specs(specs)
    functions = [
        _find_format(spec, spec.format or data_format, formats, tokenizer, cfg, dataset_idx)
        for dataset_idx, spec in enumerate(parsed)
    ]
    for spec, function in zip(parsed, functions, strict=True):
        rows = load_rows(spec)
        if isinstance(function, Batched):
            rows, function = _transform_batches(function, rows), function.then
        yield spec, rows, function


def parse_specs(specs: Sequence[str]) -> list[DataSpec]:
    if not specs:
        raise UserError("--data is empty; pass a file, a hub id or task:NAME")
    if isinstance(specs, str):
        raise UserError(f"data={specs}: must be a list of paths; write [{specs}]")
    return [parse_spec(spec) for spec in specs]


def formats_of(specs: Sequence[str], data_format: str) -> set[str]:
    """Return the names of the formats that the specs are read with."""
    return {spec.format or data_format for spec in parse_specs(specs)}


def apply(function: Callable[..., Any], row: Row, *args: Any) -> Any:
    """Call a function on a row's columns; prepend the row's source to its ValueErrors."""
    try:
        return function(row.columns, *args)
    except ValueError as error:
        raise UserError(f"{row.source}: {error}{other_methods(row.columns, str(error))}") from None


def _auto_prompt(columns: Columns) -> Columns:
    prompt, messages = columns.get("prompt"), columns.get("messages")
    if prompt is not None:
        return {**columns, "prompt": messages_of(prompt, "prompt")} if is_sharegpt(prompt) else columns
    if is_sharegpt(messages) or (messages is None and columns.get("conversations") is not None):
        return _chat_prompt(columns, FormatOptions())
    if messages is None:
        raise UserError(
            f"has neither 'prompt' nor 'messages' (its columns: {listed(columns)}); rename one or set --data-format"
        )
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UserError("'messages' must be a list of {'role', 'content'} objects")
    return {**columns, "prompt": _up_to_user(messages, "messages")}


def _up_to_user(messages: Messages, name: str) -> Messages:
    last_user = max((n for n, message in enumerate(messages) if message.get("role") == "user"), default=-1)
    if last_user < 0:
        raise UserError(f"{name!r} has no user turn to answer")
    return messages[: last_user + 1]


def _chat_prompt(columns: Columns, options: FormatOptions) -> Columns:
    """Use a conversation up to its last user turn as the prompt."""
    prompt = _up_to_user(conversation_of(columns, options), options.field_messages)
    return {
        **(_without(columns, options.field_messages) if "." in options.field_messages else columns),
        "prompt": prompt,
    }


def _question_answer(columns: Columns) -> Columns:
    need(columns, "question")
    return {**_without(columns, "question"), "prompt": user_turn(columns["question"])}


def _gsm8k(columns: Columns) -> Columns:
    need(columns, "question", "answer")
    _, marker, number = str(columns["answer"]).rpartition("####")
    if not marker:
        raise UserError("'answer' has no '####' before its result; use --data-format question_answer")
    return {**_question_answer(columns), "answer": number.strip().replace(",", "")}


def _alpaca(columns: Columns) -> Columns:
    need(columns, "instruction")
    rest = _without(columns, "instruction", "input", "output")
    if "output" in columns:
        rest["answer"] = columns["output"]
    return {**rest, "prompt": _instruction(columns)}


def _auto_sft(columns: Columns) -> Columns:
    present = {name for name, value in columns.items() if value is not None}
    if "messages" in present:
        return _chat_sft(columns, FormatOptions())
    if "text" in present or {"prompt", "completion"} <= present:
        return columns
    if "conversations" in present:
        return _chat_sft(columns, FormatOptions())
    if {"instruction", "output"} <= present:
        return _alpaca_sft(columns)
    raise UserError(
        "has none of 'messages', 'conversations', 'prompt' with 'completion', 'text', 'instruction' with 'output' (its "
        f"columns: {listed(columns)}); rename a column or set --data-format"
    )


def _chat_sft(columns: Columns, options: FormatOptions) -> Columns:
    messages = conversation_of(columns, options, any_system=True)
    is_dropped = options.system_message == "drop" and messages[0]["role"] == "system"
    return {**_without(columns, *CONVERSATION), "messages": messages[is_dropped:]}


def _question_answer_sft(columns: Columns) -> Columns:
    need(columns, "question", "answer")
    return {"prompt": user_turn(columns["question"]), "completion": columns["answer"], **for_template(columns)}


def _alpaca_sft(columns: Columns) -> Columns:
    need(columns, "instruction", "output")
    return {"prompt": _instruction(columns), "completion": columns["output"], **for_template(columns)}


def _completion_sft(columns: Columns, options: FormatOptions) -> Columns:
    return {"text": text_of(columns, options.field_text), "long_text": options.long_text}


def _input_output_sft(columns: Columns) -> Columns:
    need(columns, "segments")
    if not isinstance(columns["segments"], list):
        raise UserError(f"'segments' is of type {type(columns['segments']).__name__}, not a list; fix the row")
    return {"text": columns["segments"]}


def _user_defined_sft(columns: Columns, options: FormatOptions) -> Columns:
    completion = text_of(columns, options.field_completion)
    return {
        "prompt": user_prompt(columns, options),
        "completion": options.completion_format.format(completion=completion),
        "tokenise": options.tokenise,
    }


def _instruction(columns: Columns) -> Messages:
    parts = [columns["instruction"], columns.get("input")]
    if not all(part is None or isinstance(part, str) for part in parts):
        raise UserError("'instruction' or 'input' is not text; fix the row")
    return user_turn("\n\n".join(part for part in parts if part))


def _without(columns: Columns, *names: str) -> Columns:
    return {name: value for name, value in columns.items() if name not in names}


USER_OPTIONS = frozenset({"field_prompt", "field_completion", "field_system", "field_input", "prompt_format",
                          "completion_format", "input_format", "system_format", "default_system",
                          "tokenise"})  # fmt: skip
CHAT_OPTIONS = frozenset({"field_messages", "role_key", "content_key", "roles"})
PROMPT_FORMATS: dict[str, Format] = {
    "auto": _auto_prompt,
    "chat_template": WithOptions(_chat_prompt, CHAT_OPTIONS),
    "sharegpt": WithOptions(_chat_prompt, CHAT_OPTIONS),
    "question_answer": _question_answer,
    "gsm8k": _gsm8k,
    "alpaca": _alpaca,
}
SFT_FORMATS: dict[str, Format] = {
    "auto": _auto_sft,
    "chat_template": WithOptions(_chat_sft, CHAT_OPTIONS | {"system_message"}),
    "sharegpt": WithOptions(_chat_sft, CHAT_OPTIONS),
    "question_answer": _question_answer_sft,
    "gsm8k": _question_answer_sft,  # trains the whole solution, including the result marker
    "alpaca": _alpaca_sft,
    "completion": WithOptions(_completion_sft, frozenset({"field_text", "long_text"})),
    "input_output": _input_output_sft,
    "user_defined": WithOptions(_user_defined_sft, USER_OPTIONS),
}


def _find_format(
    spec: DataSpec, name: str, formats: Mapping[str, Format], tokenizer: Any, cfg: object, dataset_idx: int
) -> Format | Batched:
    if name in formats:
        return _with_entry_options(spec, name, formats) if spec.format_options else formats[name]
    family = name.partition(".")[0]
    is_built_in = any(known.startswith(f"{family}.") for known in formats) and not Path(f"{family}.py").is_file()
    if "." not in name or is_built_in:
        raise UserError(f"data_format={name}: no such format; {suggest(name, formats)} or use my_module.my_transform")
    if spec.format_options:
        _with_entry_options(spec, name, formats)
    transform = load_transform(name, formats["auto"], tokenizer, cfg, dataset_idx)
    return transform if isinstance(transform, Batched) else UserFormat(transform, formats["auto"])


def _with_entry_options(spec: DataSpec, name: str, formats: Mapping[str, Format]) -> Format:
    """Return the format with the options of this --data entry."""
    function = formats.get(name)
    for option, value in spec.format_options.items():
        if not isinstance(function, WithOptions) or option not in function.reads:
            readers = [known for known, other in formats.items() if option in getattr(other, "reads", ())]
            raise UserError(
                f"data={spec.path}: {option}={value} has no effect on format={name}; "
                + (f"it is for {', '.join(sorted(readers))}" if readers else "no format of this method reads it")
            )
    try:
        return replace(function, options=replace(function.options, **spec.format_options))
    except ValueError as error:  # an invalid format string or role
        raise UserError(f"data={spec.path}: {error}") from None


def load_transform(name: str, then: Format, tokenizer: Any, cfg: object, dataset_idx: int) -> Format | Batched:
    """Load a user's transform by dotted name: module.factory(cfg) -> fn, or (fn, {"remove_columns": [...]})."""
    factory = find_callable(name, f"data_format={name}")[1]
    try:
        result = factory(cfg, dataset_idx=dataset_idx) if _takes(factory, "dataset_idx") else factory(cfg)
    except Exception as error:  # the user's code may raise anything
        raise UserError(f"data_format={name}: failed when called with the config ({describe_error(error)})") from None
    function, settings = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not callable(function) or not isinstance(settings, dict):
        raise UserError(
            f"data_format={name}: returned {type(result).__name__}; called with the config, it must return a function "
            'of a row, or (function, {"remove_columns": [...]})'
        )
    unknown = sorted(settings.keys() - MAP_SETTINGS - NO_EFFECT)
    if unknown:
        supported = ", ".join(sorted(MAP_SETTINGS))
        raise UserError(f"data_format={name}: the setting {unknown[0]!r} is unknown; only {supported} are supported")
    removed = settings.get("remove_columns", [])
    if not settings.get("batched"):
        return _row_transform(name, function, removed, tokenizer)
    size = settings.get("batch_size", 1000)
    if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
        raise UserError(f"data_format={name}: batch_size={size!r} is not an integer")
    extra = _tokenizers(function, tokenizer)
    size = size if size is not None and size > 0 else sys.maxsize  # all rows in one batch, as in datasets
    return Batched(name, lambda batch: function(batch, **extra), size, removed, then)


def _takes(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    named = name in parameters and parameters[name].kind is not inspect.Parameter.POSITIONAL_ONLY
    return named or any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())


def _tokenizers(function: Callable[..., Any], tokenizer: Any) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    return {key: tokenizer for key in ("tokenizer", "processing_class") if key in parameters}


def _remove(columns: Columns, removed: Any) -> Columns:
    if removed == "__all__":
        return {}
    return _without(columns, *([removed] if isinstance(removed, str) else removed or ()))


def _row_transform(name: str, function: Callable[..., Any], removed: Any, tokenizer: Any) -> Format:
    """Remove the `removed` columns and merge the function's result into the row, as datasets.map does."""
    extra = _tokenizers(function, tokenizer)

    def transform(columns: Columns) -> Columns:
        try:
            result = function(dict(columns), **extra)
        except Exception as error:  # the user's code may raise anything
            raise UserError(f"data_format={name} failed on this row ({describe_error(error)})") from None
        if not isinstance(result, dict):
            raise UserError(f"data_format={name} returned {type(result).__name__} for this row; it must return a dict")
        return {**_remove(columns, removed), **result}

    return transform


def _transform_batches(transform: Batched, rows: Sequence[Row]) -> list[Row]:
    """Apply a batched transform; if it changes the number of rows, they are numbered within their batch."""
    transformed: list[Row] = []
    for start in range(0, len(rows), transform.size):
        chunk = rows[start : start + transform.size]
        where = f"{chunk[0].source} to {chunk[-1].source}" if len(chunk) > 1 else chunk[0].source
        names = dict.fromkeys(name for row in chunk for name in row.columns)
        batch = {name: [row.columns.get(name) for row in chunk] for name in names}
        try:
            result = transform.function({name: list(values) for name, values in batch.items()})
        except Exception as error:  # the user's code may raise anything
            raise UserError(
                f"{where}: data_format={transform.name} failed on these rows ({describe_error(error)})"
            ) from None
        if not isinstance(result, Mapping) or not all(isinstance(values, list) for values in result.values()):
            raise UserError(f"{where}: data_format={transform.name} is batched; it must return a dict of lists")
        columns = {**_remove(batch, transform.removed), **result}
        lengths = {len(values) for values in columns.values()}
        if len(lengths) > 1:
            counts = ", ".join(f"{name}: {len(values)}" for name, values in columns.items())
            raise UserError(
                f"{where}: data_format={transform.name} returned columns of different lengths ({counts}); return equal "
                "lengths, or list the other columns in remove_columns"
            )
        count = lengths.pop() if lengths else 0
        sources = [row.source for row in chunk] if count == len(chunk) else [f"{where}#{n + 1}" for n in range(count)]
        transformed += [
            Row(source=source, columns={name: values[n] for name, values in columns.items()})
            for n, source in enumerate(sources)
        ]
    if not transformed:
        raise UserError(f"data_format={transform.name}: returned no rows for {len(rows)} rows")
    return transformed
