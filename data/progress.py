"""Progress of reading rows, on stderr; silent if it is quick."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO, TypeVar

T = TypeVar("T")

QUIET_S = 3.0  # most data is read in less
EVERY_S = {True: 0.5, False: 15.0}  # on a terminal one line is updated, elsewhere lines are appended


def shown(
    rows: Sequence[T], what: str, *, out: TextIO | None = None, clock: Callable[[], float] = time.perf_counter
) -> Iterator[T]:
    """Yield the rows and report progress; `what` names their source."""
    out = out or sys.stderr
    is_terminal = out.isatty()
    started = said = clock()
    for number, row in enumerate(rows):
        if number % 64 == 0 and (now := clock()) - started > QUIET_S and now - said > EVERY_S[is_terminal]:
            left = (now - started) / number * (len(rows) - number)
            line = f"data: {what}: {number:,} of {len(rows):,} rows, {left:.0f} s left"
            print(f"\r{line}\033[K" if is_terminal else line, end="" if is_terminal else "\n", file=out, flush=True)
            said = now
        yield row
    if is_terminal and said != started:
        print("\r\033[K", end="", file=out, flush=True)
