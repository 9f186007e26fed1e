"""Report the progress of reading rows on stderr, if it takes more than a few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO, TypeVar

T = TypeVar("T")

QUIET_S = 3.0  # no report before
EVERY_S = {True: 0.5, False: 15.0}  # report interval on a terminal, which updates one line, and elsewhere


def with_progress(
    chunks: Iterable[T], num_rows: int, source: str, *, size: int, out: TextIO | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[T]:  # fmt: skip
    """Yield the chunks of `size` rows and report progress."""
    out = out or sys.stderr
    is_terminal = out.isatty()
    started = reported = clock()
    for number, chunk in enumerate(chunks, 1):
        yield chunk
        done = min(number * size, num_rows)
        if (now := clock()) - started > QUIET_S and now - reported > EVERY_S[is_terminal]:
            left = (now - started) / done * (num_rows - done)
            line = f"data: {source}: {done:,} of {num_rows:,} rows, {left:.0f} s left"
            print(f"\r{line}\033[K" if is_terminal else line, end="" if is_terminal else "\n", file=out, flush=True)
            reported = now
    if is_terminal and reported != started:
        print("\r\033[K", end="", file=out, flush=True)
