"""Report the progress of reading rows on stderr, if it takes more than a few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO, TypeVar

T = TypeVar("T")

QUIET_S = 3.0  # no report before
EVERY_S = {True: 0.5, False: 15.0}  # report interval on a terminal, which updates one line, and elsewhere


def with_progress(
    rows: Sequence[T], source: str, *, out: TextIO | None = None, clock: Callable[[], float] = time.perf_counter
) -> Iterator[T]:
    """Yield the rows and report progress."""
    out = out or sys.stderr
    is_terminal = out.isatty()
    started = reported = clock()
    for number, row in enumerate(rows):
        if number % 64 == 0 and (now := clock()) - started > QUIET_S and now - reported > EVERY_S[is_terminal]:
            left = (now - started) / number * (len(rows) - number)
            line = f"data: {source}: {number:,} of {len(rows):,} rows, {left:.0f} s left"
            print(f"\r{line}\033[K" if is_terminal else line, end="" if is_terminal else "\n", file=out, flush=True)
            reported = now
        yield row
    if is_terminal and reported != started:
        print("\r\033[K", end="", file=out, flush=True)
