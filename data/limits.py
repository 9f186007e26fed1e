"""Limits on work, in CPU time, and on the size of input.

On a busy machine, wall time includes waiting for a core, so only CPU time measures work.

Work may also wait for something that never comes. Waiting is the wall time beyond SLOWDOWN times the CPU time, more
than a busy machine explains, and has the same limit: a call that sleeps from its start ends after `seconds`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from data.errors import UserError

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")
SLOWDOWN = 100.0  # 20 busy loops on the same core slow a thread down by 50
POLL_SECONDS = 0.01
DEFAULTS = {  # limits on input, changed by environment variables of the same name
    "STROP_MAX_UNPACKED_GIB": 10.0,  # size of a .gz or .parquet data file when unpacked
    "STROP_MAX_YAML_NODES": 1e6,  # nodes of a YAML file, aliases expanded
    "STROP_MAX_PATTERN_S": 1.0,  # CPU seconds for the patterns of an adapter
}


class WorkTimeout(TimeoutError):
    """Raised by a limit on work; any other TimeoutError comes from the work itself."""


class WorkLimit:
    """A limit on work that begins now; `used` returns its CPU seconds so far."""

    def __init__(self, seconds: float, used: Callable[[], float]) -> None:
        self.seconds, self.used, self.started = seconds, used, time.monotonic()

    def left(self) -> float:
        """Return the seconds until the limit can be reached at the earliest; 0 or less: it is reached."""
        elapsed = time.monotonic() - self.started
        used = min(self.used(), elapsed)  # several threads may use more
        return self.seconds - max(used, elapsed - SLOWDOWN * used)


def thread_clock() -> Callable[[], float]:
    """Return a function that any thread can call: the CPU seconds that the calling thread has used since now."""
    clock = time.CLOCK_MONOTONIC
    if hasattr(time, "pthread_getcpuclockid"):  # not on macOS
        clock = time.pthread_getcpuclockid(threading.get_ident())
    started = time.clock_gettime(clock)

    def used() -> float:
        try:
            return time.clock_gettime(clock) - started
        except OSError:  # the thread has ended
            return 0.0

    return used


def process_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and its descendants; 0 if it has ended, or without /proc."""
    seconds = 0.0
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        seconds += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            seconds += sum(process_seconds(int(child)) for child in children.read_text().split())
    return seconds


async def wait_for_thread(outcome: asyncio.Future[T], clocks: list[Callable[[], float]], seconds: float) -> T:
    """Return the outcome of work in a thread; after the time limit cancel the outcome and raise WorkTimeout.

    The thread appends its thread_clock() to `clocks` when it begins the work, and cannot be stopped.
    """
    import asyncio  # slow to import, and reward workers do not need it

    limit = WorkLimit(seconds, lambda: sum(used() for used in clocks))
    try:
        while not outcome.done():
            if (left := limit.left()) <= 0:
                raise WorkTimeout(f"took more than {seconds:g} s")
            await asyncio.wait([outcome], timeout=max(left, POLL_SECONDS))
        return outcome.result()
    finally:
        outcome.cancel()  # no effect once it is done


def input_limit(name: str) -> float:
    """Return a limit of DEFAULTS, or the value of the environment variable with its name."""
    text = os.environ.get(name)
    try:
        value = DEFAULTS[name] if text is None else float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise UserError(f"{name}={text}: must be a number above 0; unset it for {DEFAULTS[name]:g}")
    return value
