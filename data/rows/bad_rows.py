"""Rows that cannot be used: stop at the first, or skip and count them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from data.errors import UserError
from data.formats.registry import Columns, Format, apply, rows_and_formats
from data.sources import DataSpec, Row

BadRows = Literal["error", "skip"]
T = TypeVar("T")


@dataclass
class Tally:
    """Counts of notes and errors about the rows, logged in one line."""

    num_rows: int = 0
    notes: dict[str, int] = field(default_factory=dict)  # note -> number of rows
    bad: list[str] = field(default_factory=list)  # errors of skipped rows

    def note(self, *notes: str) -> None:
        for note in notes:
            self.notes[note] = self.notes.get(note, 0) + 1

    def log(self) -> None:
        counts = [f"{count} {note}" for note, count in self.notes.items()]
        if self.bad:
            counts.append(f"{len(self.bad)} skipped as bad, the first: {self.bad[0]}")
        if counts:
            print(f"data: of {self.num_rows} rows, {'; '.join(counts)}", file=sys.stderr)


def check_system(system_prompt: str | None, takes_system: bool) -> None:
    """Raise if system_prompt is set but applies to no row."""
    if system_prompt is not None and not takes_system:
        raise UserError("system_prompt: has no effect on plain text; use messages, or remove --system-prompt")


def read_rows(
    specs: Sequence[str], formats: Mapping[str, Format], render: Callable[[Columns], T], tally: Tally, *,
    data_format: str, tokenizer: Any, cfg: object, bad_rows: BadRows,
) -> Iterator[tuple[DataSpec, Row, T]]:  # fmt: skip
    """Yield every row with render(formatted columns); raise at a bad row, or count and skip it."""
    if bad_rows not in ("error", "skip"):
        raise UserError(f"bad_rows={bad_rows}: must be error or skip")
    rows = rows_and_formats(specs, formats, data_format=data_format, tokenizer=tokenizer, cfg=cfg)
    for spec, row, function in rows:
        tally.num_rows += 1
        try:
            rendered = apply(lambda columns, function=function: render(function(columns)), row)
        except ValueError as error:
            if bad_rows == "error":
                raise
            tally.bad.append(str(error))
            continue
        yield spec, row, rendered
    if len(tally.bad) == tally.num_rows:
        raise UserError(f"bad_rows=skip: none of the {tally.num_rows} rows can be used; the first: {tally.bad[0]}")
