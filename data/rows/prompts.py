"""Load prompts for methods that sample: token ids, with all other columns for the rewards."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from data.chat import clean_messages, list_unwritten, render_prompt, unmark, with_system
from data.errors import UserError
from data.formats.registry import PROMPT_FORMATS, Columns, Format, apply
from data.formats.template_settings import check_effect, template_settings
from data.rows.bad_rows import Tally, check_system
from data.rows.collect import collect
from data.rows.stored import Stored
from data.sources import DataSpec, Row
from data.types import Messages, Prompt


class Rendered(NamedTuple):
    """The prompt of a row."""

    prompt: str | Messages  # as passed to rewards
    ids: list[int]  # as passed to the engine
    settings: dict[str, Any]  # inputs of the chat template other than messages
    notes: list[str]  # remarks about the row, for the log


def load_prompts(
    specs: Sequence[str], tokenizer: Any, *, data_format: str = "auto", system_prompt: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None, max_prompt_length: int | None = None,
    context_length: int | None = None, max_completion_length: int = 0, cfg: object = None,
) -> Stored[Prompt]:  # fmt: skip
    """Load the prompts of all specs, in order. Skip prompts longer than max_prompt_length and log how many."""
    check_room(max_completion_length, context_length)

    def convert(spec: DataSpec, row: Row, function: Format, tally: Tally) -> list[Prompt]:
        row = Row(source=row.source, columns=apply(function, row))
        rendered = apply(tokenise_prompt, row, tokenizer, system_prompt, chat_template_kwargs)
        if not fits(row.source, rendered.ids, max_prompt_length, context_length, max_completion_length):
            return []
        tally.note(*rendered.notes)
        columns = {name: value for name, value in row.columns.items() if name != "prompt"}
        prompt = Prompt(source=row.source, prompt=rendered.prompt, ids=rendered.ids, columns=columns,
                        settings=rendered.settings, weight=spec.weight)  # fmt: skip
        tally.counts["conversational"] += prompt.conversational
        return [prompt]

    prompts, tally = collect(
        Prompt, specs, PROMPT_FORMATS, convert, data_format=data_format, tokenizer=tokenizer, cfg=cfg
    )
    conversational = tally.counts["conversational"] > 0
    log_left_out(len(prompts), tally.num_rows, max_prompt_length)
    log_plain(conversational, tokenizer)
    check_system(system_prompt, conversational)
    check_effect(chat_template_kwargs, conversational)
    tally.log()
    return prompts


def check_room(max_completion_length: int, context_length: int | None) -> None:
    if context_length is not None and max_completion_length >= context_length:
        raise UserError(
            f"max_completion_length={max_completion_length}: leaves no room for a prompt in the model's context of "
            f"{context_length} tokens; lower it"
        )


def fits(
    source: str, ids: Sequence[int], max_prompt_length: int | None, context_length: int | None,
    max_completion_length: int,
) -> bool:  # fmt: skip
    """Return whether to keep a prompt; raise if it leaves no room for a completion."""
    if max_prompt_length is not None and len(ids) > max_prompt_length:
        return False
    if context_length is not None and len(ids) + max_completion_length > context_length:
        room = context_length - max_completion_length
        advice = "lower --max-completion-length, or skip" if len(ids) < context_length else "shorten it, or skip"
        raise UserError(
            f"{source}: {len(ids)} prompt tokens + max_completion_length={max_completion_length} exceed the model's "
            f"context of {context_length}; {advice} long prompts with --max-prompt-length {max(room, 0)}"
        )
    return True


def log_left_out(num_kept: int, num_rows: int, max_prompt_length: int | None) -> None:
    """Log how many prompts were too long; raise if all of them were."""
    if not num_kept:
        raise UserError(f"max_prompt_length={max_prompt_length}: all {num_rows} prompts are longer; raise it")
    if num_kept < num_rows:
        num_skipped = num_rows - num_kept
        print(f"data: skipped {num_skipped} of {num_rows} prompts longer than {max_prompt_length=}", file=sys.stderr)


def log_plain(conversational: bool, tokenizer: Any) -> None:
    """Log if the model has a chat template that no prompt uses."""
    if getattr(tokenizer, "chat_template", None) and not conversational:
        print(
            "data: the prompts are plain text and are not rendered with the chat template; use messages to render them",
            file=sys.stderr,
        )


def tokenise_prompt(
    columns: Columns, tokenizer: Any, system_prompt: str | None, kwargs: Mapping[str, Any] | None
) -> Rendered:
    """Render the prompt of a row; kwargs are --chat-template-kwargs, which the row's settings override."""
    prompt = columns["prompt"]
    if prompt == [] or (isinstance(prompt, str) and not prompt.strip()):
        raise UserError("the prompt is empty; remove the row or fill it in")
    if isinstance(prompt, str):
        return Rendered(unmark(prompt), render_prompt(tokenizer, prompt), {}, [])
    prompt = clean_messages(prompt)
    last = prompt[-1]
    if last["role"] == "assistant":
        raise UserError("the prompt ends with an assistant turn; end it before the assistant's answer")
    if not last["content"].strip():
        raise UserError("the prompt is empty (its last message has no text); remove the row or fill it in")
    settings = template_settings(columns, kwargs)
    ids = render_prompt(tokenizer, prompt, system_prompt, settings)
    notes = list_unwritten(tokenizer, prompt, settings, first_trained=len(prompt))
    return Rendered(with_system(prompt, system_prompt), ids, settings, notes)
