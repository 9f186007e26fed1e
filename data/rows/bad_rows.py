"""Rows that cannot be used: stop at the first, or skip and count them."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from data.errors import UserError

BadRows = Literal["error", "skip"]


@dataclass
class Tally:
    """Counts of notes and errors about the rows, logged in one line."""

    num_rows: int = 0
    notes: Counter[str] = field(default_factory=Counter)  # note -> number of rows, logged
    counts: Counter[str] = field(default_factory=Counter)  # numbers of rows for the loader's checks
    bad: list[str] = field(default_factory=list)  # errors of skipped rows

    @classmethod
    def restored(cls, saved: dict[str, Any]) -> Tally:
        """Return a tally from its attributes as JSON."""
        return cls(saved["num_rows"], Counter(saved["notes"]), Counter(saved["counts"]), saved["bad"])

    def note(self, *notes: str) -> None:
        self.notes.update(notes)

    def add(self, later: Tally) -> None:
        self.num_rows += later.num_rows
        self.notes.update(later.notes)
        self.counts.update(later.counts)
        self.bad += later.bad

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
