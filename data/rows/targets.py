"""Load prompts with their targets (true completions), for methods that compare completions with the data.

    load_targets(["sums.jsonl"], tokenizer, max_completion_length=64)            # {"prompt": "2+2=", "completion": "4"}
    -> [TargetPrompt(ids=[...], target_ids=[..., eos], columns={"completion": "4", "ground_truth": "4"}, ...)]

Prompt and target are tokenised as one text and then split. A token that spans both belongs to the target, and sampling
also starts before it. A row without a target is an error, because its rewards would be undefined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from data.chat import clean_messages, list_unwritten, render_conversation, unmark
from data.errors import UserError
from data.format_options import FormatOptions
from data.formats.ebft import EBFT_FORMATS, EBFT_STRIDED_FORMATS, TargetFormat, last_turn, reject_formats
from data.formats.fields import DEFAULT, Columns, listed
from data.formats.pairs import PAIR_FORMATS, PAIR_OPTIONS
from data.formats.registry import PROMPT_FORMATS, SFT_FORMATS, apply, formats_of
from data.formats.template_settings import check_effect
from data.rows.bad_rows import Tally, check_system
from data.rows.collect import collect
from data.rows.pairs import bind, render_row
from data.rows.prompts import check_room, fits, log_left_out, log_plain, tokenise_prompt
from data.rows.stored import Stored
from data.sources import DataSpec, Row
from data.types import Messages, TargetPrompt

PAIR = "of_a_pair"  # column added by named pair formats: other inputs of render_row


class Rendered(NamedTuple):
    """A row as ids, with the values for its columns."""

    prompt: str | Messages
    ids: list[int]
    target_ids: list[int]
    mask: list[bool]
    text: str  # text of the target's first turn
    later: Messages  # the target's other turns
    settings: dict[str, Any]  # inputs of the chat template other than messages
    notes: tuple[str, ...]  # remarks about the row, for the log
    takes_system: bool  # system_prompt applies to the row


def load_targets(
    specs: Sequence[str], tokenizer: Any, *, data_format: str = "auto", system_prompt: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None, max_prompt_length: int | None = None,
    context_length: int | None = None, max_completion_length: int = 256, options: FormatOptions | None = None,
    cfg: object = None,
) -> Stored[TargetPrompt]:  # fmt: skip
    """Load the prompts and targets of all specs, in order, with the same prompts as load_prompts.

    Prompts longer than max_prompt_length are skipped. Targets longer than max_completion_length, which no completion
    can match, are truncated on the right. Both are counted and logged.
    """
    reject_formats(specs, data_format, EBFT_STRIDED_FORMATS, "strided")
    if max_completion_length < 1:
        raise UserError(f"max_completion_length={max_completion_length}: must be 1 or more")
    check_room(max_completion_length, context_length)
    pairs = bind(PAIR_FORMATS, PAIR_OPTIONS, specs, tokenizer, data_format, system_prompt, options)
    pairs.pop("auto")
    formats: dict[str, Any] = {name: function.then(_pair) for name, function in pairs.items()} | TARGET_FORMATS

    def convert(spec: DataSpec, row: Row, function: TargetFormat, tally: Tally) -> list[TargetPrompt]:
        prompts, rows = [], _format_row(row, function)
        tally.num_rows += len(rows) - 1  # a format may return several
        for formatted in rows:
            target: Rendered = apply(render_target, formatted, tokenizer, system_prompt, chat_template_kwargs)
            tally.counts["takes system"] += target.takes_system
            if not fits(formatted.source, target.ids, max_prompt_length, context_length, max_completion_length):
                continue
            tally.note(*target.notes)
            if len(target.target_ids) > max_completion_length:
                tally.note(f"with the target truncated to {max_completion_length=}")
            prompts.append(_target_prompt(formatted, target, max_completion_length, spec.weight))
            tally.counts["conversational"] += prompts[-1].conversational
        return prompts

    prompts, tally = collect(
        TargetPrompt, specs, formats, convert, data_format=data_format, tokenizer=tokenizer, cfg=cfg
    )
    conversational = tally.counts["conversational"] > 0
    log_left_out(len(prompts), tally.num_rows, max_prompt_length)
    # Pair formats write delimiters without the chat template.
    if not formats_of(specs, data_format) & pairs.keys():
        log_plain(conversational, tokenizer)
    check_system(system_prompt, tally.counts["takes system"] > 0)
    check_effect(chat_template_kwargs, conversational)
    tally.log()
    return prompts


def _format_row(row: Row, function: TargetFormat) -> list[Row]:
    """Apply a format; if it returns several rows, they are numbered from 1."""
    columns = apply(function, row)
    if not isinstance(columns, list):
        return [Row(source=row.source, columns=columns)]
    return [Row(source=f"{row.source}#{number}", columns=each) for number, each in enumerate(columns, start=1)]


def _target_prompt(row: Row, target: Rendered, limit: int, weight: float) -> TargetPrompt:
    mask = target.mask[:limit]
    while not mask[-1]:  # truncated within a user turn: a target ends with an assistant token
        mask.pop()
    columns = {name: value for name, value in row.columns.items() if name not in ("prompt", PAIR)}
    columns["ground_truth"] = target.text
    columns.pop("remaining_turns", None)
    if target.later:
        columns["remaining_turns"] = target.later
    return TargetPrompt(
        source=row.source, prompt=target.prompt, ids=target.ids, columns=columns, settings=target.settings,
        weight=weight, target_ids=target.target_ids[: len(mask)], target_mask=None if all(mask) else mask,
    )  # fmt: skip


def render_target(
    columns: Columns, tokenizer: Any, system_prompt: str | None, kwargs: Mapping[str, Any] | None
) -> Rendered:
    """Tokenise {"prompt", "ground_truth"}, and "remaining_turns" if present."""
    pair = columns.get(PAIR) or {"takes_system": not isinstance(columns["prompt"], str)}
    columns = {**columns, **pair}
    reward_prompt, engine_ids, settings, notes = tokenise_prompt(columns, tokenizer, system_prompt, kwargs)
    prompt, target = columns["prompt"], _target_turns(columns)
    later = [] if isinstance(target, str) else target[1:]
    if later:
        turns = [*prompt, *target]
        ids, mask = render_conversation(tokenizer, turns, system_prompt, first_trained=len(prompt), settings=settings)
        notes = list_unwritten(tokenizer, turns, settings, first_trained=len(prompt))
        start, end = mask.index(True), len(ids) - mask[::-1].index(True)
        prompt_ids, target_ids, mask = ids[:start], ids[start:end], mask[start:end]
    else:
        rendered = render_row({**columns, "ground_truth": target}, ("ground_truth",), tokenizer, system_prompt, kwargs)
        prompt_ids, (target_ids,), notes = rendered.prompt_ids, rendered.responses, rendered.notes
        mask = [True] * len(target_ids)
    if not isinstance(prompt, str) and len(engine_ids) > len(prompt_ids) + (not later):
        opening = tokenizer.decode(engine_ids[len(prompt_ids) :])
        raise UserError(
            f"the target does not start with {opening!r}, which the chat template adds to the generation prompt; "
            "add it to the target, or use another --chat-template"
        )
    text = unmark(target) if isinstance(target, str) else target[0]["content"]
    if not text:  # only tool calls
        text = tokenizer.decode(target_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return Rendered(
        reward_prompt, prompt_ids, target_ids, mask, text, later, settings, tuple(notes), pair["takes_system"]
    )


def _target_turns(columns: Columns) -> str | Messages:
    """Return the target: text after a text prompt, otherwise messages that start and end with the assistant's."""
    prompt, target, later = (columns.get(name) for name in ("prompt", "ground_truth", "remaining_turns"))
    if isinstance(target, str) and not target.strip():
        raise UserError("the target is empty; fill it in or remove the row")
    if isinstance(prompt, str):
        if later:
            raise UserError("'remaining_turns' need a prompt of messages, not text")
        if not isinstance(target, str):
            raise UserError("the prompt is text but the target is not; use text for both, or messages for the prompt")
        return target
    if not isinstance(target, (str, list)):
        raise UserError(f"the target is of type {type(target).__name__}; use text or messages")
    turns = clean_messages([{"role": "assistant", "content": target}] if isinstance(target, str) else target)
    return _trim_turns([*turns, *clean_messages(later)] if later else turns)


def _trim_turns(turns: Messages) -> Messages:
    """Drop turns after the last assistant turn; raise unless the target starts with one and they are never adjacent."""
    roles = [turn["role"] for turn in turns]
    if roles[0] != "assistant":
        raise UserError(f"the target starts with a {roles[0]} message; it must start with the assistant's")
    turns = turns[: len(roles) - roles[::-1].index("assistant")]
    for number, turn in enumerate(turns):
        role, content = turn["role"], turn["content"]
        if role == "assistant" and number and turns[number - 1]["role"] == "assistant":
            raise UserError("the target has two consecutive assistant turns; join them")
        if role not in ("assistant", "user"):
            raise UserError(
                f"the target contains a {role} message, which does not match what a model sampled before it; use "
                "--data-format ebft_chat_multiturn.transform_last_turn"
            )
        if not content.strip() and not turn.get("tool_calls"):
            raise UserError(f"the target has an empty {role} turn; fill it in or remove the row")
    return turns


def _auto(columns: Columns) -> Columns:
    present = {name for name, value in columns.items() if value is not None}
    if {"prompt", "ground_truth"} <= present:
        return columns
    if "messages" in present or ("conversations" in present and not {"prompt", "chosen"} & present):
        return last_turn(columns)
    if {"prompt", "completion"} <= present:
        if columns.get("label") is False:
            raise UserError("the completion is labelled false, so it is not a target; remove the row")
        return {**columns, "ground_truth": columns["completion"]}
    if {"instruction", "output"} <= present:
        return _named("alpaca", columns)
    if "chosen" in present and present & {"prompt", "rejected", "conversations"}:
        pair = {**columns, "rejected": columns["rejected"] if "rejected" in present else columns["chosen"]}
        pair = PAIR_FORMATS["auto"](pair, DEFAULT)
        return {**columns, "prompt": pair["prompt"], "ground_truth": pair["chosen"]}
    if "text" in present:
        raise UserError("has 'text' but no prompt with a target; use --mode strided for whole texts")
    raise UserError(
        "has no target: none of 'messages', 'prompt' with 'completion', 'ground_truth' or 'chosen', "
        f"'instruction' with 'output' (its columns: {listed(columns)}); rename a column or set --data-format"
    )


def _sharegpt(columns: Columns) -> Columns:
    """Use the chosen response of a pair, or the last assistant turn of a conversation, as the target."""
    return last_turn(columns) if columns.get("chosen") is None else _auto({**columns, "messages": None})


def _named(name: str, columns: Columns) -> Columns:
    """Combine the prompt of PROMPT_FORMATS[name] with the completion of SFT_FORMATS[name]."""
    completion = SFT_FORMATS[name](columns)["completion"]
    return {**PROMPT_FORMATS[name](columns), "ground_truth": completion}


def _pair(pair: Columns) -> Columns:
    inputs = {name: pair[name] for name in ("takes_system", "tools", "chat_template_kwargs") if name in pair}
    return {"prompt": pair["prompt"], "ground_truth": pair["chosen"], PAIR: inputs}


TARGET_FORMATS: dict[str, TargetFormat] = {
    "auto": _auto,
    **{name: partial(_named, name) for name in SFT_FORMATS
       if name in PROMPT_FORMATS and name not in ("auto", "chat_template", "sharegpt")},
    "sharegpt": _sharegpt,
    **EBFT_FORMATS,
}  # fmt: skip
