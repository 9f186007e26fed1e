"""Load preference pairs: a prompt with a chosen and a rejected response, as token ids.

The prompt alone and the prompt with each response are tokenised; the prompt's ids are their common prefix. A response
is never tokenised alone, which could insert a BOS or split tokens that the model sees merged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

from data.chat import (
    DELIMITERS,
    SPECIAL_NOTE,
    check_delimiters,
    common_prefix,
    end_ids,
    list_unwritten,
    mark_special,
    render_prompt,
    render_responses,
    unmark,
)
from data.errors import UserError
from data.format_options import FormatOptions
from data.formats.pairs import FAMILIES, PAIR_FORMATS, PAIR_OPTIONS, PairFormat
from data.formats.registry import Columns, Format, WithOptions, apply, formats_of
from data.formats.template_settings import check_effect, template_settings
from data.rows.bad_rows import BadRows, Tally, check_system
from data.rows.collect import collect
from data.rows.prompts import log_plain
from data.rows.stored import Stored
from data.sources import DataSpec, Row
from data.types import Pair

LongRows = Literal["truncate", "drop"]
T = TypeVar("T")


class Rendered(NamedTuple):
    """A row as ids."""

    prompt_ids: list[int]
    responses: list[list[int]]  # ids after the prompt, one list per response
    notes: tuple[str, ...]  # remarks about the row, for the log
    takes_system: bool  # system_prompt applies to the row
    by_template: bool  # the chat template renders the row
    value: Any = None  # margin or labels


class Limits(NamedTuple):
    """Maximum lengths of a row, in tokens."""

    max_length: int | None
    max_prompt_length: int | None
    long_rows: LongRows


def load_pairs(
    specs: Sequence[str], tokenizer: Any, *, data_format: str = "auto", system_prompt: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None, max_length: int | None = 1024,
    max_prompt_length: int | None = None, context_length: int | None = None, long_rows: LongRows = "truncate",
    bad_rows: BadRows = "error", options: FormatOptions | None = None, cfg: object = None,
    margins: bool = False,
) -> Stored[Pair]:  # fmt: skip
    """Load the pairs of all specs, in order. Log the number of truncated, skipped and bad rows in one line.

    A pair is skipped if its prompt exceeds max_prompt_length, or leaves no room for a response within max_length (or
    the model's context), or if both responses are equal. Longer responses are truncated on the right, or the pair is
    skipped with long_rows="drop".
    margins: read the column `margin`, which most losses do not use.
    """
    formats = bind(PAIR_FORMATS, PAIR_OPTIONS, specs, tokenizer, data_format, system_prompt, options)
    limits = limits_of(max_length, max_prompt_length, context_length, long_rows)

    def records(source: str, weight: float, rendered: Rendered, responses: list[list[int]], tally: Tally) -> list[Pair]:
        chosen, rejected = responses
        return [Pair(source=source, prompt_ids=rendered.prompt_ids, chosen_ids=chosen, rejected_ids=rejected,
                     margin=rendered.value, weight=weight)]  # fmt: skip

    pairs, _ = read_responses(
        Pair, records, specs, formats, partial(render_pair, margins=margins), limits, tokenizer=tokenizer,
        data_format=data_format, system_prompt=system_prompt, kwargs=chat_template_kwargs, bad_rows=bad_rows, cfg=cfg,
    )  # fmt: skip
    return pairs


def read_responses(
    kind: type[T], records: Callable[[str, float, Rendered, list[list[int]], Tally], list[T]], specs: Sequence[str],
    formats: Mapping[str, Format], render: Callable[..., Rendered], limits: Limits, *, tokenizer: Any,
    data_format: str, system_prompt: str | None, kwargs: Mapping[str, Any] | None, bad_rows: BadRows, cfg: object,
) -> tuple[Stored[T], Tally]:  # fmt: skip
    """Return the records of every row that fits, made from (source, weight, row, ids of its responses, tally)."""
    render = partial(render, tokenizer=tokenizer, system_prompt=system_prompt, kwargs=kwargs)

    def convert(spec: DataSpec, row: Row, function: Format, tally: Tally) -> list[T]:
        rendered = apply(lambda columns: render(function(columns)), row)
        tally.counts["takes system"] += rendered.takes_system
        tally.counts["by template"] += rendered.by_template
        responses = fit(rendered, limits, tally)
        if responses is None:
            return []
        if len(responses) == 2 and responses[0] == responses[1]:
            tally.note("skipped, chosen equals rejected")
            return []
        return records(row.source, spec.weight, rendered, responses, tally)

    rows, tally = collect(
        kind, specs, formats, convert, data_format=data_format, tokenizer=tokenizer, cfg=cfg, bad_rows=bad_rows
    )
    if not rows:
        notes = "; ".join(f"{count} {note}" for note, count in tally.notes.items())
        for name in ("max_prompt_length", "max_length"):
            if any(name in note for note in tally.notes):
                none_fits = f"none of the {tally.num_rows} rows fits ({notes})"
                raise UserError(f"{name}={getattr(limits, name)}: {none_fits}; raise it")
        raise UserError(f"data: none of the {tally.num_rows} rows can be trained ({notes}); use pairs that differ")
    check_system(system_prompt, tally.counts["takes system"] > 0)
    check_effect(kwargs, tally.counts["by template"] > 0)
    tally.log()
    if formats_of(specs, data_format) == {"auto"}:  # a named format is deliberate
        log_plain(tally.counts["by template"] > 0, tokenizer)
    return rows, tally


def bind(
    formats: Mapping[str, PairFormat], options_read: Mapping[str, set[str]], specs: Sequence[str], tokenizer: Any,
    data_format: str, system_prompt: str | None, options: FormatOptions | None,
) -> dict[str, Format]:  # fmt: skip
    """Return the formats with the options filled in; raise if an option has no effect on the formats in use."""
    options = options or FormatOptions()
    used = formats_of(specs, data_format)
    for name in used & formats.keys():
        family = name.partition(".")[0]
        if family in FAMILIES:
            check_delimiters(tokenizer, family, f"data_format={name}", "a chat_template format, another family")
    changed = [name for name in vars(options) if getattr(options, name) != getattr(FormatOptions, name)]
    read = set().union(*(options_read.get(name, set()) for name in used))
    for name in changed:
        if name not in read:
            readers = ", ".join(sorted(known for known, names in options_read.items() if name in names))
            raise UserError(
                f"format.{name}={getattr(options, name)}: has no effect on data_format={', '.join(sorted(used))}; it "
                f"is for {readers or 'unpaired rows'}"
            )
    bound: dict[str, Format] = {}
    for name, function in formats.items():
        with_system = partial(_with_system, name, function, system_prompt, tokenizer)
        bound[name] = WithOptions(with_system, frozenset(options_read.get(name, ())), options)
    return bound


def _with_system(
    name: str, function: PairFormat, system_prompt: str | None, tokenizer: Any, columns: Columns,
    options: FormatOptions,
) -> Columns:  # fmt: skip
    system = _system_column(name, options) if system_prompt is not None else None
    if system is not None and not columns.get(system):
        columns = {**columns, system: system_prompt}
    if name.partition(".")[0] in FAMILIES:  # only the format writes delimiters
        columns = mark_special(tokenizer, columns)
    pair = {"margin": columns.get("margin"), **function(columns, options)}
    return {**pair, "takes_system": system is not None or not isinstance(pair["prompt"], str)}


def _system_column(name: str, options: FormatOptions) -> str | None:
    """Return the column of the system text in a text format; system_prompt is its default value."""
    family = name.partition(".")[0]
    if family in FAMILIES:
        return "system"
    return options.field_system if family == "user_defined" and "{system}" in options.prompt_format else None


def limits_of(
    max_length: int | None, max_prompt_length: int | None, context_length: int | None, long_rows: LongRows
) -> Limits:
    if max_length is not None and max_length < 2:
        raise UserError(f"max_length={max_length}: must be 2 or more, for a prompt and a response")
    if max_prompt_length is not None and max_prompt_length < 1:
        raise UserError(f"max_prompt_length={max_prompt_length}: must be 1 or more")
    if long_rows not in ("truncate", "drop"):
        raise UserError(f"long_rows={long_rows}: must be truncate or drop")
    lengths = [length for length in (max_length, context_length) if length is not None]
    return Limits(min(lengths, default=None), max_prompt_length, long_rows)


def fit(rendered: Rendered, limits: Limits, tally: Tally) -> list[list[int]] | None:
    """Return the responses, truncated to fit; None to skip the row."""
    length, limit = len(rendered.prompt_ids), limits.max_length
    if limits.max_prompt_length is not None and length > limits.max_prompt_length:
        tally.note(f"skipped, prompt longer than max_prompt_length={limits.max_prompt_length}")
        return None
    if limit is not None and length >= limit:
        tally.note(f"skipped, no room for a response within max_length={limit}")
        return None
    responses = rendered.responses
    if limit is not None and length + max(map(len, responses)) > limit:
        if limits.long_rows == "drop":
            tally.note(f"skipped, longer than max_length={limit}")
            return None
        tally.note(f"truncated to max_length={limit}")
        responses = [ids[: limit - length] for ids in responses]
    tally.note(*rendered.notes)
    return responses


def render_pair(
    columns: Columns, tokenizer: Any, system_prompt: str | None, kwargs: Mapping[str, Any] | None, margins: bool
) -> Rendered:
    """Tokenise a row {"prompt", "chosen", "rejected"}, with its margin if `margins`."""
    rendered = render_row(columns, ("chosen", "rejected"), tokenizer, system_prompt, kwargs)
    return rendered._replace(value=_margin(columns.get("margin"))) if margins else rendered


def render_row(
    columns: Columns, names: Sequence[str], tokenizer: Any, system_prompt: str | None,
    kwargs: Mapping[str, Any] | None,
) -> Rendered:  # fmt: skip
    """Tokenise a prompt and the responses in the named columns."""
    prompt = columns["prompt"]
    responses = [columns[name] for name in names]
    by_template, notes = not isinstance(prompt, str), []
    if not by_template:
        text = "".join([prompt, *responses])
        notes += [SPECIAL_NOTE] if unmark(text) != text else []
        prompt_ids = render_prompt(tokenizer, prompt)
        sequences = [_close(render_prompt(tokenizer, prompt + response), tokenizer) for response in responses]
    else:
        settings = template_settings(columns, kwargs)
        prompt_ids, sequences = render_responses(tokenizer, prompt, responses, system_prompt, settings, notes)
        for response in responses:
            notes += list_unwritten(tokenizer, prompt + response, settings, first_trained=len(prompt))
        notes = list(dict.fromkeys(notes))
    length = min(common_prefix(prompt_ids, ids) for ids in sequences)
    if length == 0:
        raise UserError("the prompt's text merges completely into the response's tokens; lengthen the prompt")
    if length < len(prompt_ids):
        notes.append("whose prompt ends inside a token of the response, which counts as response")
    responses = [ids[length:] for ids in sequences]
    return Rendered(prompt_ids[:length], responses, tuple(notes), columns["takes_system"], by_template)


def _close(ids: list[int], tokenizer: Any) -> list[int]:
    """Append EOS, unless the ids end with EOS or an end-of-turn token."""
    eos = tokenizer.eos_token_id
    if ids and ids[-1] in {eos, *_closing_ids(tokenizer)}:
        return ids
    if eos is None:
        raise UserError("tokenizer: has no eos token to end a response; set --special-tokens, or use messages")
    return [*ids, eos]


def _closing_ids(tokenizer: Any) -> set[int]:
    """Return the end-of-turn ids of the current template and of all families whose delimiters the tokenizer has."""
    known = tokenizer.get_added_vocab()
    return {known[tokens[-1]] for tokens in DELIMITERS.values() if tokens[-1] in known} | set(end_ids(tokenizer))


def _margin(value: Any) -> float | None:
    if value is None or value == "":
        return None
    try:
        margin = float(value)
    except (TypeError, ValueError):
        margin = math.nan
    if not math.isfinite(margin) or isinstance(value, bool):
        raise UserError(f"'margin' is {value!r}, not a number; fix the row")
    return margin
