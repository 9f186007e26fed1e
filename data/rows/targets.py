"""Prompts with their targets (true completions), for methods that compare completions with the data.

    load_targets(["sums.jsonl"], tokenizer, max_completion_length=64)            # {"prompt": "2+2=", "completion": "4"}
    -> [TargetPrompt(ids=[...], target_ids=[..., eos], columns={"completion": "4", "ground_truth": "4"}, ...)]

Prompt and target are tokenised as one text and then split: a token that spans both belongs to the target, and rollouts
start before it too. A row without a target is an error: its rewards would be undefined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from data.chat import clean_messages, render_conversation, unwritten
from data.errors import UserError
from data.format_options import FormatOptions
from data.formats.ebft import EBFT_FORMATS, EBFT_STRIDED_FORMATS, TargetFormat, last_turn, refuse_formats
from data.formats.fields import DEFAULT, Columns, listed
from data.formats.pairs import PAIR_FORMATS, PAIR_OPTIONS
from data.formats.registry import PROMPT_FORMATS, SFT_FORMATS, apply, parse_specs, rows_and_formats
from data.formats.template_settings import check_effect
from data.rows.bad_rows import Tally, check_system
from data.rows.pairs import bind, render_row
from data.rows.prompts import check_room, fits, log_left_out, log_plain, tokenise_prompt
from data.sources import Row
from data.types import Messages, TargetPrompt

PAIR = "of_a_pair"  # column added by named pair formats: what render_row reads besides prompt and target


class Rendered(NamedTuple):
    """A row as ids, with the values of its columns."""

    prompt: str | Messages
    ids: list[int]
    target_ids: list[int]
    mask: list[bool]
    text: str  # of the target, or of its first turn if there are several
    later: Messages  # the turns after that
    settings: dict[str, Any]  # what the chat template got besides the messages
    notes: tuple[str, ...]  # remarks about the row, for the log
    takes_system: bool  # whether system_prompt applies to it


def load_targets(
    specs: Sequence[str], tokenizer: Any, *, data_format: str = "auto", system_prompt: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None, max_prompt_length: int | None = None,
    context_length: int | None = None, max_completion_length: int = 256, options: FormatOptions | None = None,
    cfg: Any = None,
) -> list[TargetPrompt]:  # fmt: skip
    """Read prompts with their targets from every spec, in order; prompts are those of load_prompts.

    Prompts over max_prompt_length are left out. Targets over max_completion_length, which no completion could match,
    are cut on the right. Both are counted and logged.
    """
    refuse_formats(specs, data_format, EBFT_STRIDED_FORMATS, "strided")
    if max_completion_length < 1:
        raise UserError(f"max_completion_length={max_completion_length}: must be 1 or more")
    check_room(max_completion_length, context_length)
    pairs = bind(PAIR_FORMATS, PAIR_OPTIONS, specs, tokenizer, data_format, system_prompt, options)
    pairs.pop("auto")
    formats: dict[str, Any] = {name: function.then(_pair) for name, function in pairs.items()} | TARGET_FORMATS
    tally, prompts, takes_system = Tally(), [], False
    for spec, row, function in rows_and_formats(specs, formats, data_format=data_format, tokenizer=tokenizer, cfg=cfg):
        for part in _parts(row, function):
            tally.num_rows += 1
            made: Rendered = apply(render_target, part, tokenizer, system_prompt, chat_template_kwargs)
            takes_system |= made.takes_system
            if not fits(part.source, made.ids, max_prompt_length, context_length, max_completion_length):
                continue
            tally.note(*made.notes)
            if len(made.target_ids) > max_completion_length:
                tally.note(f"with their true completion cut to {max_completion_length=} tokens")
            prompts.append(_target_prompt(part, made, max_completion_length, spec.weight))
    log_left_out(len(prompts), tally.num_rows, max_prompt_length)
    # Pair formats write their delimiters themselves.
    if not {spec.format or data_format for spec in parse_specs(specs)} & pairs.keys():
        log_plain(prompts, tokenizer)
    check_system(system_prompt, takes_system)
    check_effect(chat_template_kwargs, any(prompt.conversational for prompt in prompts))
    tally.log()
    return prompts


def _parts(row: Row, function: TargetFormat) -> list[Row]:
    """The row or rows that a format makes of one; several are numbered from 1."""
    found = apply(function, row)
    if not isinstance(found, list):
        return [Row(source=row.source, columns=found)]
    return [Row(source=f"{row.source}#{number}", columns=columns) for number, columns in enumerate(found, start=1)]


def _target_prompt(row: Row, made: Rendered, limit: int, weight: float) -> TargetPrompt:
    mask = made.mask[:limit]
    while not mask[-1]:  # the cut is within a user turn: a target ends with an assistant token
        mask.pop()
    columns = {name: value for name, value in row.columns.items() if name not in ("prompt", PAIR)}
    columns["ground_truth"] = made.text
    columns.pop("remaining_turns", None)
    if made.later:
        columns["remaining_turns"] = made.later
    return TargetPrompt(
        source=row.source, prompt=made.prompt, ids=made.ids, columns=columns, settings=made.settings, weight=weight,
        target_ids=made.target_ids[: len(mask)], target_mask=None if all(mask) else mask,
    )  # fmt: skip


def render_target(
    columns: Columns, tokenizer: Any, system_prompt: str | None, kwargs: Mapping[str, Any] | None
) -> Rendered:
    """Ids of {"prompt", "ground_truth"}, and of "remaining_turns" if there are any."""
    pair = columns.get(PAIR) or {"takes_system": not isinstance(columns["prompt"], str)}
    columns = {**columns, **pair}
    shown, head, settings, notes = tokenise_prompt(columns, tokenizer, system_prompt, kwargs)
    prompt, target = columns["prompt"], _true_turns(columns)
    later = [] if isinstance(target, str) else target[1:]
    if later:
        turns = [*prompt, *target]
        ids, mask = render_conversation(tokenizer, turns, system_prompt, first_trained=len(prompt), settings=settings)
        notes = unwritten(tokenizer, turns, settings, first_trained=len(prompt))
        start, end = mask.index(True), len(ids) - mask[::-1].index(True)
        prompt_ids, target_ids, mask = ids[:start], ids[start:end], mask[start:end]
    else:
        rendered = render_row({**columns, "ground_truth": target}, ("ground_truth",), tokenizer, system_prompt, kwargs)
        prompt_ids, (target_ids,), notes = rendered.prompt_ids, rendered.responses, rendered.notes
        mask = [True] * len(target_ids)
    if not isinstance(prompt, str) and len(head) > len(prompt_ids) + (not later):
        lost = tokenizer.decode(head[len(prompt_ids) :])
        raise UserError(
            f"the chat template opens an answer with {lost!r}, which the true completion does not begin with; "
            "add it there, or use another chat_template"
        )
    text = target if isinstance(target, str) else target[0]["content"]
    if not text:  # only tool calls
        text = tokenizer.decode(target_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return Rendered(shown, prompt_ids, target_ids, mask, text, later, settings, tuple(notes), pair["takes_system"])


def _true_turns(columns: Columns) -> str | Messages:
    """The target: text after a text prompt, else messages that begin and end with the assistant's."""
    prompt, target, later = (columns.get(name) for name in ("prompt", "ground_truth", "remaining_turns"))
    if isinstance(target, str) and not target.strip():
        raise UserError("the true completion is empty; fill it in or remove the row")
    if isinstance(prompt, str):
        if later:
            raise UserError("'remaining_turns' follow a prompt that is text; give the prompt as messages")
        if not isinstance(target, str):
            raise UserError(
                "the prompt is text but the true completion is not; give both as text, or the prompt as messages"
            )
        return target
    if not isinstance(target, (str, list)):
        raise UserError(f"the true completion is a {type(target).__name__}; give text or messages")
    turns = [{"role": "assistant", "content": target}] if isinstance(target, str) else target
    turns = clean_messages(turns)
    return _checked([*turns, *clean_messages(later)] if later else turns)


def _checked(turns: Messages) -> Messages:
    """The turns up to the last assistant turn; they begin with one, and never have two in a row."""
    roles = [turn["role"] for turn in turns]
    if roles[0] != "assistant":
        raise UserError(f"the true completion begins with a {roles[0]} message; it must be the assistant's")
    turns = turns[: len(roles) - roles[::-1].index("assistant")]
    for number, turn in enumerate(turns):
        role, content = turn["role"], turn["content"]
        if role == "assistant" and number and turns[number - 1]["role"] == "assistant":
            raise UserError("the true completion has two assistant turns in a row; join them")
        if role not in ("assistant", "user"):
            raise UserError(
                f"the true completion holds a {role} message, which cannot be given to a model that wrote something "
                "else before it; use ebft_chat_multiturn.transform_last_turn"
            )
        if not content.strip() and not turn.get("tool_calls"):
            raise UserError(f"the true completion has an empty {role} turn; fill it in or remove the row")
    return turns


def _auto(columns: Columns) -> Columns:
    present = {name for name, value in columns.items() if value is not None}
    if {"prompt", "ground_truth"} <= present:
        return columns
    if "messages" in present or ("conversations" in present and not {"prompt", "chosen"} & present):
        return last_turn(columns)
    if {"prompt", "completion"} <= present:
        if columns.get("label") is False:
            raise UserError("its completion is labelled false, so it is not a target; leave such rows out")
        return {**columns, "ground_truth": columns["completion"]}
    if {"instruction", "output"} <= present:
        return _named("alpaca", columns)
    if "chosen" in present and present & {"prompt", "rejected", "conversations"}:
        pair = {**columns, "rejected": columns["rejected"] if "rejected" in present else columns["chosen"]}
        made = PAIR_FORMATS["auto"](pair, DEFAULT)
        return {**columns, "prompt": made["prompt"], "ground_truth": made["chosen"]}
    if "text" in present:
        raise UserError("has a 'text' but no prompt with a true completion; whole texts are for --mode strided")
    raise UserError(
        "has no true completion: none of 'messages', 'prompt' with 'completion', 'ground_truth' or 'chosen', "
        f"'instruction' with 'output' (its columns: {listed(columns)}); rename a column or set data_format"
    )


def _sharegpt(columns: Columns) -> Columns:
    """The chosen response of a pair, else the last assistant turn of the conversation."""
    return last_turn(columns) if columns.get("chosen") is None else _auto({**columns, "messages": None})


def _named(name: str, columns: Columns) -> Columns:
    """A format of both prompts and SFT: the prompt of the former with the completion of the latter."""
    completion = SFT_FORMATS[name](columns)["completion"]
    return {**PROMPT_FORMATS[name](columns), "ground_truth": completion}


def _pair(made: Columns) -> Columns:
    more = {name: made[name] for name in ("takes_system", "tools", "chat_template_kwargs") if name in made}
    return {"prompt": made["prompt"], "ground_truth": made["chosen"], PAIR: more}


TARGET_FORMATS: dict[str, TargetFormat] = {
    "auto": _auto,
    **{name: partial(_named, name) for name in SFT_FORMATS
       if name in PROMPT_FORMATS and name not in ("auto", "chat_template", "sharegpt")},
    "sharegpt": _sharegpt,
    **EBFT_FORMATS,
}  # fmt: skip
