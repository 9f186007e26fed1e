"""Load unpaired preferences: a prompt with one response, labelled desirable or not. A pair becomes two rows."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from data.format_options import FormatOptions
from data.formats.registry import Columns
from data.formats.unpaired import UNPAIRED_FORMATS, UNPAIRED_OPTIONS
from data.rows.bad_rows import BadRows, Tally
from data.rows.pairs import LongRows, Rendered, bind, limits_of, read_responses, render_row
from data.rows.stored import Stored
from data.types import Labelled


def load_labelled(
    specs: Sequence[str], tokenizer: Any, *, data_format: str = "auto", system_prompt: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None, max_length: int | None = 1024,
    max_prompt_length: int | None = None, context_length: int | None = None, long_rows: LongRows = "truncate",
    bad_rows: BadRows = "error", options: FormatOptions | None = None, cfg: object = None,
) -> Stored[Labelled]:  # fmt: skip
    """Load the responses of all specs, in order, with the limits of load_pairs.

    A pair becomes two rows: the chosen response as desirable, then the rejected response as undesirable.
    """
    formats = bind(UNPAIRED_FORMATS, UNPAIRED_OPTIONS, specs, tokenizer, data_format, system_prompt, options)
    limits = limits_of(max_length, max_prompt_length, context_length, long_rows)
    labelled, tally = read_responses(
        Labelled, _records, specs, formats, render_labelled, limits, tokenizer=tokenizer, data_format=data_format,
        system_prompt=system_prompt, kwargs=chat_template_kwargs, bad_rows=bad_rows, cfg=cfg,
    )  # fmt: skip
    if tally.counts["desirable"] in (0, len(labelled)):
        # Not an error: TRL trains such rows, and undesirable rows alone are a way to unlearn text.
        kind, change = ("desirable", "more") if tally.counts["desirable"] else ("undesirable", "less")
        print(
            f"warning: {', '.join(specs)}: all {len(labelled)} responses are {kind}; training on these alone only "
            f"makes them {change} likely, so add rows with the other label",
            file=sys.stderr,
        )
    return labelled


def _records(
    source: str, weight: float, rendered: Rendered, responses: list[list[int]], tally: Tally
) -> list[Labelled]:
    tally.counts["desirable"] += sum(rendered.value[1])
    return [
        Labelled(source=source if name == "completion" else f"{source} {name}", prompt_ids=rendered.prompt_ids,
                 completion_ids=ids, label=label, weight=weight)
        for name, label, ids in zip(*rendered.value, responses, strict=True)
    ]  # fmt: skip


def render_labelled(
    columns: Columns, tokenizer: Any, system_prompt: str | None, kwargs: Mapping[str, Any] | None
) -> Rendered:
    """Tokenise a row {"prompt", "completion", "label"} or a pair; value = (columns, labels) of its responses."""
    if "completion" in columns:
        names, labels = ("completion",), (columns["label"],)
    else:
        names, labels = ("chosen", "rejected"), (True, False)
    return render_row(columns, names, tokenizer, system_prompt, kwargs)._replace(value=(names, labels))
