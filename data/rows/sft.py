"""Load SFT rows: conversations, prompts with completions, or plain text, as token ids with a loss mask."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from data.chat import (
    ASSISTANT,
    THOUGHT_KEYS,
    Trained,
    clean_messages,
    list_unwritten,
    render_completion,
    render_conversation,
    render_prompt,
    render_text,
)
from data.errors import UserError
from data.formats.fields import parse_bool
from data.formats.registry import SFT_FORMATS, Columns, Format, apply, formats_of
from data.formats.template_settings import check_effect, template_settings
from data.rows.bad_rows import Tally, check_system
from data.rows.collect import collect
from data.rows.pairs import LongRows
from data.rows.prompts import log_plain
from data.rows.stored import Stored
from data.sources import DataSpec, Row
from data.types import Example, Messages

EMPTY = "skipped, an answer is empty"


def load_examples(
    specs: Sequence[str], tokenizer: Any, *, data_format: str = "auto", system_prompt: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None, max_length: int = 1024, context_length: int | None = None,
    cfg: object = None, formats: Mapping[str, Format] = SFT_FORMATS, trained: Trained = ASSISTANT,
    long_rows: LongRows = "truncate", kind: type[Any] = Example,
    record: Callable[[Example], Any] = lambda example: example,
) -> Stored[Any]:  # fmt: skip
    """Load the rows of all specs, in order, truncated on the right to max_length tokens (or the context, if shorter).

    A text with long_text=split becomes one example for each max_length tokens instead. Rows without a trained token, or
    with an empty answer to train, are skipped, and with long_rows="drop" also longer rows; the numbers of truncated and
    skipped rows are logged. `record` converts an example to another `kind` of record.
    """
    if max_length < 2:
        raise UserError(f"max_length={max_length}: must be 2 or more, because the first token is never trained")
    limit = max_length if context_length is None else min(max_length, context_length)
    too_long = f"skipped, longer than max_length={limit}"

    def convert(spec: DataSpec, row: Row, function: Format, tally: Tally) -> list[Any]:
        row = Row(source=row.source, columns=apply(function, row))
        is_text, has_prompt = _is_text(row.columns), row.columns.get("completion") is not None
        tally.counts["conversational"] += not is_text
        tally.counts["only text"] += is_text and not has_prompt and not isinstance(row.columns.get("text"), list)
        tally.counts["plain prompts"] += is_text and has_prompt
        ids, mask, notes = apply(_tokenise, row, tokenizer, system_prompt, chat_template_kwargs, trained)
        tally.note(*notes)
        is_split = len(ids) > limit and row.columns.get("long_text") == "split"
        if is_split:
            tally.note(f"split into chunks of {limit} tokens")
        elif len(ids) > limit and long_rows == "drop":
            tally.note(too_long)
            return []
        tally.counts["truncated"] += len(ids) > limit and not is_split
        chunks = [
            Example(source=f"{row.source}#{start // limit + 1}" if is_split else row.source,
                    ids=ids[start : start + limit],
                    mask=[False, *mask[start + 1 : start + limit]],  # nothing predicts the first token
                    weight=spec.weight)
            for start in (range(0, len(ids), limit) if is_split else (0,))
        ]  # fmt: skip
        chunks = [chunk for chunk in chunks if any(chunk.mask)]
        tally.counts["trained"] += bool(chunks)
        return [record(chunk) for chunk in chunks]

    examples, tally = collect(kind, specs, formats, convert, data_format=data_format, tokenizer=tokenizer, cfg=cfg)
    num_rows, num_empty, num_long = tally.num_rows, tally.notes[EMPTY], tally.notes[too_long]
    num_truncated, conversational = tally.counts["truncated"], tally.counts["conversational"] > 0
    num_skipped = num_rows - num_empty - num_long - tally.counts["trained"]
    if not examples and num_empty:
        raise UserError(f"data: none of the {num_rows} rows can be trained ({num_empty} {EMPTY}); fill in the answers")
    if not examples and not num_truncated and not num_long:
        roles = "an assistant turn" if trained.roles == ASSISTANT.roles else f"a turn of {', '.join(trained.roles)}"
        raise UserError(f"data: none of the {num_rows} rows has {roles} to train; check the roles")
    if not examples:
        why = f"{num_long} are longer" if num_long else "none has a trained token within it"
        raise UserError(f"max_length={limit}: none of the {num_rows} rows is left ({why}); raise it")
    if num_truncated:
        print(f"data: truncated {num_truncated} of {num_rows} rows to {limit} tokens", file=sys.stderr)
    if num_skipped:
        print(f"data: skipped {num_skipped} of {num_rows} rows without a trained token", file=sys.stderr)
    check_system(system_prompt, conversational)
    check_effect(chat_template_kwargs, conversational)
    if trained.roles != ASSISTANT.roles and not conversational:
        raise UserError("roles_to_train: has no effect on plain text; use messages, or remove --roles-to-train")
    if trained.inputs and tally.counts["only text"] == num_rows:
        raise UserError("train_on_inputs=True: has no effect on plain text, which is always trained; remove the flag")
    tally.log()
    if tally.counts["plain prompts"] and formats_of(specs, data_format) == {"auto"}:  # a named format is deliberate
        log_plain(conversational, tokenizer)
    return examples


def _is_text(columns: Columns) -> bool:
    if columns.get("messages") is not None:
        return False
    return columns.get("completion") is None or isinstance(columns.get("prompt"), str)


def _tokenise(
    columns: Columns, tokenizer: Any, system_prompt: str | None, kwargs: Mapping[str, Any] | None, trained: Trained
) -> tuple[list[int], list[bool], list[str]]:
    """Return ids, mask and notes about the row."""
    if columns.get("messages") is not None:
        return _conversation(columns["messages"], 0, columns, tokenizer, system_prompt, kwargs, trained)
    with_end = trained.eos != "none"
    if columns.get("prompt") is None or columns.get("completion") is None:
        if isinstance(columns["text"], list):
            return *_tokenise_segments(columns["text"], tokenizer, trained.inputs), []
        return *_tokenise_text(columns["text"], tokenizer, with_end), []
    prompt, completion = columns["prompt"], columns["completion"]
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        raise UserError("the prompt is empty; remove the row or fill it in")
    if isinstance(prompt, str):
        if not isinstance(completion, str):
            raise UserError(
                "the prompt is text but the completion is not; use text for both, or messages for the prompt"
            )
        if not completion.strip():
            return [], [], [EMPTY]
        ids, start = render_completion(tokenizer, prompt, completion, apart=columns.get("tokenise") == "apart")
        answer = _with_eos(ids[start:], tokenizer)
        mask = [trained.inputs] * start + [True] * len(answer)
        return ids[:start] + answer, [*mask[:-1], with_end], []
    if clean_messages(prompt)[-1]["role"] == "assistant":
        raise UserError("the prompt ends with an assistant turn; end it before the completion")
    if not isinstance(completion, (str, list)):
        raise UserError(f"the completion is of type {type(completion).__name__}; use text or messages")
    answer = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    # Assistant turns in the prompt are context and not trained.
    first = 0 if trained.inputs else len(prompt)
    return _conversation(prompt + answer, first, columns, tokenizer, system_prompt, kwargs, trained)


def _conversation(
    messages: Messages, first_trained: int, columns: Columns, tokenizer: Any, system_prompt: str | None,
    kwargs: Mapping[str, Any] | None, trained: Trained,
) -> tuple[list[int], list[bool], list[str]]:  # fmt: skip
    settings = template_settings(columns, kwargs)
    notes: list[str] = []
    ids, mask = render_conversation(
        tokenizer, messages, system_prompt, first_trained=first_trained, settings=settings, notes=notes,
        trained=trained,
    )  # fmt: skip
    if trained.trains("assistant") and any(map(_is_empty_answer, clean_messages(messages)[first_trained:])):
        return [], [], [EMPTY]
    return ids, mask, notes + list_unwritten(tokenizer, messages, settings, first_trained=first_trained)


def _is_empty_answer(turn: dict[str, Any]) -> bool:
    """Return whether the model would learn to end its turn without a word."""
    parts = (turn["content"].strip(), *(turn.get(key) for key in ("tool_calls", *THOUGHT_KEYS)))
    return turn["role"] == "assistant" and not any(parts)


def _tokenise_text(text: Any, tokenizer: Any, with_end: bool) -> tuple[list[int], list[bool]]:
    if not isinstance(text, str):
        raise UserError(f"the text is of type {type(text).__name__}; put it in quotes")
    if not text.strip():
        raise UserError("the text is empty; remove the row or fill it in")
    ids = _with_eos(render_prompt(tokenizer, text), tokenizer)
    return ids, [False] + [True] * (len(ids) - 2) + [with_end] if len(ids) > 1 else [False]


def _tokenise_segments(segments: list[Any], tokenizer: Any, inputs: bool) -> tuple[list[int], list[bool]]:
    """Tokenise every segment alone, without BOS or EOS; a segment is trained if its label is true."""
    ids: list[int] = []
    mask: list[bool] = []
    for index, segment in enumerate(segments):
        text, label = (segment.get(key) if isinstance(segment, dict) else None for key in ("text", "label"))
        if not isinstance(text, str) or parse_bool(label) is None:
            raise UserError(f"segments[{index}]={segment!r}: must have a text, and a label that is true or false")
        piece = render_text(tokenizer, text)
        ids, mask = ids + piece, mask + [inputs or bool(parse_bool(label))] * len(piece)
    return ids, mask


def _with_eos(ids: list[int], tokenizer: Any) -> list[int]:
    eos = tokenizer.eos_token_id
    if eos is None:
        raise UserError("tokenizer: has no eos token to end plain text; set --special-tokens, or use messages")
    return ids if ids and ids[-1] == eos else [*ids, eos]
