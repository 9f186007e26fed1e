"""CPU time of threads and processes, for limits on work: on a busy machine, wall time includes waiting for a core.

Work that can also sleep or wait for something gets a second limit, of WAIT_FACTOR times as many seconds of wall time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")
WAIT_FACTOR = 10.0
POLL_SECONDS = 0.01


class WorkTimeout(TimeoutError):
    """Raised by a limit on work; any other TimeoutError comes from the work itself."""


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
    """Return the CPU seconds of a process and of its children that have ended; wall time without /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return time.monotonic()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


async def wait_for_thread(outcome: asyncio.Future[T], clocks: list[Callable[[], float]], seconds: float) -> T:
    """Return the outcome of work in a thread; after the time limit cancel the outcome and raise WorkTimeout.

    The thread appends its thread_clock() to `clocks` when it begins the work, and cannot be stopped.
    """
    import asyncio  # slow to import, and reward workers do not need it

    end = time.monotonic() + WAIT_FACTOR * seconds
    try:
        while not outcome.done():
            left = min(seconds - sum(used() for used in clocks), end - time.monotonic())
            if left <= 0:
                raise WorkTimeout(f"took more than {seconds:g} s")
            await asyncio.wait([outcome], timeout=max(left, POLL_SECONDS))
        return outcome.result()
    finally:
        outcome.cancel()  # no effect once it is done
