"""Unpaired preferences: a prompt with one response, desirable or not. A pair becomes two of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from data.format_options import FormatOptions
from data.formats.registry import Columns
from data.formats.unpaired import UNPAIRED_FORMATS, UNPAIRED_OPTIONS
from data.rows.bad_rows import BadRows
from data.rows.pairs import Rendered, TooLong, bind, limits_of, read_responses, render_row
from data.types import Labelled


def load_labelled(
    specs: Sequence[str], tokenizer: Any, *, data_format: str = "auto", system_prompt: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None, max_length: int | None = 1024,
    max_prompt_length: int | None = None, context_length: int | None = None, too_long: TooLong = "cut",
    bad_rows: BadRows = "error", options: FormatOptions | None = None, cfg: Any = None,
) -> list[Labelled]:  # fmt: skip
    """Read responses from every spec, in order; lengths and bad rows are handled as in load_pairs.

    A pair gives its chosen response as desirable, then its rejected one as undesirable.
    """
    formats = bind(UNPAIRED_FORMATS, UNPAIRED_OPTIONS, specs, tokenizer, data_format, system_prompt, options)
    limits = limits_of(max_length, max_prompt_length, context_length, too_long)
    found = read_responses(
        specs, formats, render_labelled, limits, tokenizer=tokenizer, data_format=data_format,
        system_prompt=system_prompt, kwargs=chat_template_kwargs, bad_rows=bad_rows, cfg=cfg,
    )  # fmt: skip
    labelled = [
        Labelled(source=row.source if name == "completion" else f"{row.source} {name}", prompt_ids=rendered.prompt_ids,
                 completion_ids=ids, label=label, weight=spec.weight)
        for spec, row, rendered, responses in found
        for name, label, ids in zip(*rendered.value, responses, strict=True)
    ]  # fmt: skip
    if len({row.label for row in labelled}) == 1:
        kind, other = ("desirable", "undesirable") if labelled[0].label else ("undesirable", "desirable")
        print(
            f"data: all {len(labelled)} responses are {kind} and none is {other}; KTO learns from the difference, so "
            "add rows of the other label",
            file=sys.stderr,
        )
    return labelled


def render_labelled(
    columns: Columns, tokenizer: Any, system_prompt: str | None, kwargs: Mapping[str, Any] | None
) -> Rendered:
    """Ids of a row {"prompt", "completion", "label"} or of a pair; value = (columns, labels) of its responses."""
    if "completion" in columns:
        names, labels = ("completion",), (columns["label"],)
    else:
        names, labels = ("chosen", "rejected"), (True, False)
    return render_row(columns, names, tokenizer, system_prompt, kwargs)._replace(value=(names, labels))
