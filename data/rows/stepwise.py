"""Load solutions in steps, each labelled right or wrong: token ids with one label at the last token of a step.

The ids are the prompt, then each step followed by the separator, whose last token carries the label of the step. Steps
are tokenised separately, as when a process reward model scores them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from data.chat import render_prompt, render_text
from data.errors import UserError
from data.formats.fields import Columns, for_template, messages_of, need, parse_bool, text_of
from data.formats.registry import Format, apply
from data.formats.template_settings import check_effect, template_settings
from data.rows.bad_rows import BadRows, Tally, check_system
from data.rows.collect import collect
from data.rows.stored import Stored
from data.sources import DataSpec, Row
from data.types import Steps

UNLABELLED = -100


class Solution(NamedTuple):
    prompt_ids: list[int]
    ids: list[int]  # all steps, including separators
    labels: list[int]
    conversational: bool


def load_steps(
    specs: Sequence[str], tokenizer: Any, *, data_format: str = "stepwise_supervised", step_separator: str = "\n",
    system_prompt: str | None = None, chat_template_kwargs: Mapping[str, Any] | None = None,
    max_length: int | None = 1024, max_completion_length: int | None = None, context_length: int | None = None,
    last_step_only: bool = False, bad_rows: BadRows = "error", cfg: object = None,
) -> Stored[Steps]:  # fmt: skip
    """Load the solutions of all specs, in order. Truncate long solutions on the right and log how many.

    max_completion_length limits the steps, max_length (or the model's context) the whole row. Rows without a label
    within these limits are skipped. last_step_only labels only the last step.
    """
    for name, value, minimum in (
        ("max_length", max_length, 2),
        ("max_completion_length", max_completion_length, 1),
        ("context_length", context_length, 2),
    ):
        if value is not None and value < minimum:
            raise UserError(f"{name}={value}: must be {minimum} or more")
    limit = min((length for length in (max_length, context_length) if length is not None), default=None)
    separator = separator_ids(tokenizer, step_separator)
    render = partial(
        render_steps, tokenizer=tokenizer, separator=separator, system_prompt=system_prompt, kwargs=chat_template_kwargs
    )

    def convert(spec: DataSpec, row: Row, function: Format, tally: Tally) -> list[Steps]:
        solution = apply(lambda columns: render(function(columns)), row)
        tally.counts["conversational"] += solution.conversational
        labels = _last_only(solution.labels) if last_step_only else solution.labels
        ids = solution.prompt_ids + solution.ids[:max_completion_length]
        labels = [UNLABELLED] * len(solution.prompt_ids) + labels[:max_completion_length]
        ids, labels = ids[:limit], labels[:limit]
        if all(label == UNLABELLED for label in labels):
            tally.note("skipped, no label within the length limits")
            return []
        if len(ids) < len(solution.prompt_ids) + len(solution.ids):
            setting = f"max_length={limit}" if len(ids) == limit else f"{max_completion_length=}"
            tally.note(f"truncated to {setting}")
        return [Steps(source=row.source, ids=ids, labels=labels, weight=spec.weight)]

    rows, tally = collect(
        Steps, specs, STEP_FORMATS, convert, data_format=data_format, tokenizer=tokenizer, cfg=cfg, bad_rows=bad_rows
    )
    if not rows:
        raise UserError(
            f"max_length={limit}: none of the {tally.num_rows} rows has a label within it"
            + (f" and {max_completion_length=}" if max_completion_length else "") + "; raise it"
        )  # fmt: skip
    check_system(system_prompt, tally.counts["conversational"] > 0)
    check_effect(chat_template_kwargs, tally.counts["conversational"] > 0)
    tally.log()
    return rows


def separator_ids(tokenizer: Any, step_separator: str) -> list[int]:
    if not step_separator:
        raise UserError("step_separator='': must not be empty, because its last token carries the label of a step")
    return render_text(tokenizer, step_separator)


def render_steps(
    columns: Columns, tokenizer: Any, separator: list[int], system_prompt: str | None, kwargs: Mapping[str, Any] | None
) -> Solution:
    """Tokenise a row {"prompt", "completions", "labels"}."""
    prompt = columns["prompt"]
    ids, labels = [], []
    for step, label in zip(columns["completions"], columns["labels"], strict=True):
        step_ids = render_text(tokenizer, step) + separator
        ids += step_ids
        labels += [UNLABELLED] * (len(step_ids) - 1) + [label]
    conversational = not isinstance(prompt, str)
    settings = template_settings(columns, kwargs) if conversational else None
    return Solution(render_prompt(tokenizer, prompt, system_prompt, settings), ids, labels, conversational)


def _last_only(labels: list[int]) -> list[int]:
    return [UNLABELLED] * (len(labels) - 1) + labels[-1:]  # the last token carries the label of the last step


def _stepwise_supervised(columns: Columns) -> Columns:
    need(columns, "prompt", "completions", "labels")
    prompt = columns["prompt"]
    prompt = messages_of(prompt, "prompt") if isinstance(prompt, list) else text_of(columns, "prompt")
    steps, labels = columns["completions"], columns["labels"]
    for name, value in (("completions", steps), ("labels", labels)):
        if not isinstance(value, list) or not value:
            raise UserError(f"{name!r} is {value!r}; it must be a list with one entry per step")
    if len(steps) != len(labels):
        raise UserError(f"has {len(steps)} completions and {len(labels)} labels; each step needs one label")
    for index, step in enumerate(steps):
        if not isinstance(step, str):  # a step may be empty: the label is on the separator
            raise UserError(f"completions[{index}] is of type {type(step).__name__}, not text; fix the row")
    for index, label in enumerate(labels):
        if parse_bool(label) is None:
            raise UserError(f"labels[{index}] is {label!r}; it must be true or false (or 1 or 0)")
    labels = [int(bool(parse_bool(label))) for label in labels]
    return {"prompt": prompt, "completions": steps, "labels": labels, **for_template(columns)}


STEP_FORMATS: dict[str, Format] = {"auto": _stepwise_supervised, "stepwise_supervised": _stepwise_supervised}
