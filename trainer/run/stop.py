"""SIGTERM, as schedulers send it before preemption: the run finishes its step, saves, and exits with its own code.

    with end_on_sigterm() as stop:                # trainer/__main__.py, around all of a run
        stop.grace_s = cfg.run.stop_grace_s
        module.train(cfg)

While a run loads there is nothing to save: Stopped is raised at once, like KeyboardInterrupt. After work_begins() the
signal only sets a flag, and the run calls asked() after every step, where all ranks agree on one answer.

A thread enforces the time limit. The signal wakes it through a pipe, because a Python handler does not run while the
main thread is inside one long call (a CUDA kernel that hangs, a collective). It ends the process without the main
thread; servers and workers of the run notice that their owner is gone and exit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

EXIT_CODE = 128 + signal.SIGTERM  # 143, what shells show for SIGTERM; --resume continues the run


class Stopped(SystemExit):
    """Ends a run after SIGTERM; not an Exception, so that `except Exception` does not catch it."""

    def __init__(self, message: str) -> None:
        super().__init__(EXIT_CODE)
        self.message = message

    def __str__(self) -> str:
        return self.message


class Stop:
    """State of SIGTERM handling in this process; one instance, STOP."""

    def __init__(self) -> None:
        self.grace_s = 60.0
        self._reset()

    def _reset(self) -> None:
        self.signalled = False
        self.at_once = True  # nothing to save yet
        self.not_saving = threading.Event()
        self.not_saving.set()
        self.pipe = -1  # write end; a signal arrives as one byte

    def handle(self, *_: object) -> None:
        first, self.signalled = not self.signalled, True
        if first and self.at_once:  # a second signal must not interrupt the cleanup of the first
            raise Stopped("stopped by SIGTERM while loading; there was nothing to save")

    def watch(self, pipe: int) -> None:
        """Wait for SIGTERM, then end the process after grace_s; a running save gets as long again."""
        with os.fdopen(pipe, "rb", buffering=0) as signals:
            while (got := signals.read(1)) and got != b"\0":
                if got[0] == signal.SIGTERM:
                    time.sleep(self.grace_s)
                    self.not_saving.wait(self.grace_s)
                    line = f"stopped by SIGTERM: the run had not ended after stop_grace_s={self.grace_s:g}; "
                    os.write(2, f"{line}its checkpoints are complete, continue with --resume\n".encode())
                    os._exit(EXIT_CODE)


STOP = Stop()


@contextlib.contextmanager
def end_on_sigterm() -> Iterator[Stop]:
    """Handle SIGTERM during a run. Only the main thread can; in others nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield STOP
        return
    STOP._reset()
    read_end, STOP.pipe = os.pipe()
    os.set_blocking(STOP.pipe, False)
    threading.Thread(target=STOP.watch, args=(read_end,), name="sigterm", daemon=True).start()
    pipe_before = signal.set_wakeup_fd(STOP.pipe, warn_on_full_buffer=False)
    before = signal.signal(signal.SIGTERM, STOP.handle)
    try:
        yield STOP
    finally:
        if not STOP.signalled:  # else the process is about to end, within the time limit
            signal.signal(signal.SIGTERM, before)
            signal.set_wakeup_fd(pipe_before)
            os.write(STOP.pipe, b"\0")
            os.close(STOP.pipe)
            STOP.pipe = -1


def asked() -> bool:
    """Whether to save and stop now; the same answer on every rank."""
    from trainer.parallel.comm import any_rank  # torch is slow to import, and --help should not wait for it

    return any_rank(STOP.signalled)


def work_begins() -> None:
    """From here on SIGTERM waits for the end of the step."""
    STOP.at_once = False


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay SIGTERM until the enclosed work is done, while a run loads."""
    at_once, STOP.at_once = STOP.at_once, False
    try:
        yield
    finally:
        STOP.at_once = at_once
    if at_once and STOP.signalled:
        raise Stopped("stopped by SIGTERM before the first step; continue with --resume")


def save_begins() -> None:
    """A save that has started may finish, in any thread."""
    STOP.not_saving.clear()


def save_ends() -> None:
    STOP.not_saving.set()


def _leave_to_parent() -> None:
    """A forked child, such as a library's worker, gets the default SIGTERM handler back, and not the pipe."""
    if STOP.pipe >= 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(STOP.pipe)
        STOP.pipe = -1


os.register_at_fork(after_in_child=_leave_to_parent)
