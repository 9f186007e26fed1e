"""Convert all rows of a loader to records, in several processes if that takes more than a second.

    def convert(spec, row, function, tally):   # the records of one row, usually one
        ids = tokenise(function(row.columns))
        return [Example(source=row.source, ids=ids, mask=[...], weight=spec.weight)]

    rows, tally = collect(Example, specs, SFT_FORMATS, convert, data_format="auto", tokenizer=tokenizer, cfg=cfg)

Processes are forked, so they share the tokenizer and the rows, and `convert` need not be picklable. They return arrays,
which are joined in the order of the rows: the records, the log and the first error do not depend on their number.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import re
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from data.errors import UserError
from data.formats.progress import with_progress
from data.formats.registry import Format, UserFormat, rows_and_formats
from data.rows.bad_rows import BadRows, Tally
from data.rows.stored import Columns, Stored, open_stored
from data.sources import DataSpec, Row

T = TypeVar("T")
Convert = Callable[[DataSpec, Row, Format, Tally], Iterable[T]]
Chunk = tuple[Columns[T], Tally]
CHUNK = 64  # rows
UNUSED_DAYS = 30  # cached rows that no run has read for this time are deleted
PR_SET_PDEATHSIG = 1  # prctl: the signal to a process whose parent has ended
ALONE_S = 1.0  # rows that take less are converted without other processes


def collect(
    kind: type[T], specs: Sequence[str], formats: Mapping[str, Format], convert: Convert[T], *, data_format: str,
    tokenizer: Any, cfg: object, bad_rows: BadRows = "error",
) -> tuple[Stored[T], Tally]:  # fmt: skip
    """Return the records of all specs, in order; raise at the first bad row, or count and skip it."""
    if bad_rows not in ("error", "skip"):
        raise UserError(f"bad_rows={bad_rows}: must be error or skip")
    entry = _entry.get()
    if entry is not None:
        with contextlib.suppress(Exception):  # missing or damaged
            stored, about = open_stored(kind, entry)
            with contextlib.suppress(OSError):  # another user's entry
                os.utime(entry)
            print(f"data: {len(stored)} rows from {entry}", file=sys.stderr)
            return stored, Tally.restored(about)
    columns, tally = Columns(kind), Tally()
    for spec, rows, function in rows_and_formats(specs, formats, data_format=data_format, tokenizer=tokenizer, cfg=cfg):

        def convert_chunk(start: int, spec=spec, rows=rows, function=function) -> Chunk[T]:
            columns, tally = Columns(kind), Tally()
            for index in range(start, min(start + CHUNK, len(rows))):
                tally.num_rows += 1
                try:
                    records = convert(spec, rows[index], function, tally)
                except ValueError as error:
                    if bad_rows == "error":
                        raise
                    tally.bad.append(str(error))
                    continue
                for record in records:
                    columns.append(record)
            return columns, tally

        chunks = _in_order(convert_chunk, range(0, len(rows), CHUNK), 1 if isinstance(function, UserFormat) else None)
        for more, counts in with_progress(chunks, len(rows), spec.path, size=CHUNK):
            columns.extend(more)
            tally.add(counts)
    if tally.bad and len(tally.bad) == tally.num_rows:
        raise UserError(f"bad_rows=skip: none of the {tally.num_rows} rows can be used; the first: {tally.bad[0]}")
    stored = columns.stored()
    return (stored if entry is None else _saved(stored, tally, entry)), tally


# The cache (data/rows/cache.py).

_entry: ContextVar[Path | None] = ContextVar("entry", default=None)  # folder of the rows that are being loaded


@contextlib.contextmanager
def using_entry(entry: Path) -> Iterator[None]:
    """Let collect() read its result from this folder, or write it."""
    token = _entry.set(entry)
    try:
        yield
    finally:
        _entry.reset(token)


def _saved(stored: Stored[T], tally: Tally, entry: Path) -> Stored[T]:
    """Write the entry, delete old entries, and return its rows, mapped; if that fails, return the rows in memory."""
    partial = entry.with_name(f"{entry.name}.tmp")  # only the process that has the lock writes it
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
        partial.mkdir()
        stored.save(partial, vars(tally))
        shutil.rmtree(entry, ignore_errors=True)  # if it was damaged
        partial.rename(entry)
        with contextlib.suppress(OSError):  # another process may delete them too
            for other in entry.parent.iterdir():
                is_entry = re.fullmatch(r"[0-9a-f]{32}(\.tmp(-\d+)?)?", other.name)  # the folder may have other files
                if is_entry and time.time() - other.stat().st_mtime > UNUSED_DAYS * 86400:
                    shutil.rmtree(other, ignore_errors=True)
        return open_stored(stored.kind, entry)[0]
    except (OSError, TypeError, ValueError) as error:  # a full disk, or values that are not JSON
        print(f"data: rows not written to {entry.parent} ({error})", file=sys.stderr)
        return stored
    finally:
        shutil.rmtree(partial, ignore_errors=True)


# Processes.


def num_processes() -> int:
    """Return this process's share of the cores; 1 where processes cannot be forked safely."""
    if not sys.platform.startswith("linux"):
        return 1
    # If rows are cached, the other ranks of this machine wait for them.
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE") or 1) if _entry.get() is None else 1
    return max(1, len(os.sched_getaffinity(0)) // sharing)


def _in_order(call: Callable[[int], T], starts: Sequence[int], processes: int | None) -> Iterator[T]:
    """Yield call(start) for each start; after ALONE_S seconds, compute the other results in several processes."""
    started = time.monotonic()
    for number, start in enumerate(starts):
        left = starts[number:]
        if time.monotonic() - started > ALONE_S:
            count = min(num_processes() if processes is None else processes, len(left))
            if count > 1:
                yield from _forked(call, left, count)
                return
        yield call(start)


_call: Callable[[int], Any]  # what a worker computes


def _start(call: Callable[[int], Any]) -> None:
    global _call
    _call = call
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the main process, which ends the workers
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # they also end if it is killed


def _run(start: int) -> Any:
    return _call(start)


def _forked(call: Callable[[int], T], starts: Sequence[int], count: int) -> Iterator[T]:
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("fork"), initializer=_start, initargs=(call,))
    try:
        with _quiet_fork():
            results = pool.map(_run, starts)
        yield from results
    except BrokenProcessPool:
        raise UserError(f"data: one of {count} processes that convert rows was killed; check the memory") from None
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _quiet_fork() -> Iterator[None]:
    """Turn off tokenizers' threads in forked processes, and the warnings of tokenizers and Python about forking."""
    known = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        if known is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = known
