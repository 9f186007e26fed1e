"""SIGTERM, as a scheduler sends it to make room: the run finishes its step, saves, and exits with a code of its own.

    with end_on_sigterm() as stop:                # trainer/__main__.py, around all of a run
        stop.grace_s = cfg.run.stop_grace_s
        module.train(cfg)

While a run loads there is nothing to save: Stopped is raised wherever it stands, as Ctrl-C would be. From work_begins()
on the signal is only noted, and the run asks after every step: asked() is the one decision that all ranks must share.

A thread sees to the bound. The signal itself wakes it, through a pipe, because a handler written in Python does not run
while the main thread is inside one long call (a CUDA kernel that hangs, a collective). It ends the process without
another word from the main thread; what the run has started (servers, workers) notices that its owner is gone and ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

EXIT_CODE = 128 + signal.SIGTERM  # 143, what shells show for SIGTERM: stopped, and --resume goes on


class Stopped(SystemExit):
    """Ends a run that SIGTERM came to; not an Exception, so that no code which forgives errors forgives this."""

    def __init__(self, message: str) -> None:
        super().__init__(EXIT_CODE)
        self.message = message

    def __str__(self) -> str:
        return self.message


class Stop:
    """What SIGTERM has to do with this process; there is one, STOP."""

    def __init__(self) -> None:
        self.grace_s = 60.0
        self._reset()

    def _reset(self) -> None:
        self.signalled = False
        self.at_once = True  # nothing to save yet
        self.not_saving = threading.Event()
        self.not_saving.set()
        self.pipe = -1  # write end; the signal arrives there as one byte

    def handle(self, *_: object) -> None:
        first, self.signalled = not self.signalled, True
        if first and self.at_once:  # a second one must not break up the tidying that the first has begun
            raise Stopped("stopped by SIGTERM while loading; there was nothing to save")

    def watch(self, pipe: int) -> None:
        """Until the end of the run; from SIGTERM on, until the bound. A save under way has as long again."""
        with os.fdopen(pipe, "rb", buffering=0) as signals:
            while (got := signals.read(1)) and got != b"\0":
                if got[0] == signal.SIGTERM:
                    time.sleep(self.grace_s)
                    self.not_saving.wait(self.grace_s)
                    line = f"stopped by SIGTERM: the run had not ended after stop_grace_s={self.grace_s:g}; "
                    os.write(2, f"{line}its checkpoints are whole, continue with --resume\n".encode())
                    os._exit(EXIT_CODE)


STOP = Stop()


@contextlib.contextmanager
def end_on_sigterm() -> Iterator[Stop]:
    """Take SIGTERM for the time of a run. In a thread signals cannot be taken, and nothing changes."""
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
        if not STOP.signalled:  # else the process is about to end, and the bound holds for that too
            signal.signal(signal.SIGTERM, before)
            signal.set_wakeup_fd(pipe_before)
            os.write(STOP.pipe, b"\0")
            os.close(STOP.pipe)
            STOP.pipe = -1


def asked() -> bool:
    """Whether to save and stop now; the same answer on every rank."""
    from trainer.parallel.comm import any_rank  # torch is slow to import, and --help is not to wait for it

    return any_rank(STOP.signalled)


def work_begins() -> None:
    """From here on there is something to lose: SIGTERM waits for the end of the step."""
    STOP.at_once = False


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """What must not be done by halves while a run loads; SIGTERM takes effect after it."""
    at_once, STOP.at_once = STOP.at_once, False
    try:
        yield
    finally:
        STOP.at_once = at_once
    if at_once and STOP.signalled:
        raise Stopped("stopped by SIGTERM before the first step; continue with --resume")


def save_begins() -> None:
    """A save that has begun is let finish, in whatever thread."""
    STOP.not_saving.clear()


def save_ends() -> None:
    STOP.not_saving.set()


def _leave_to_parent() -> None:
    """A fork of ours, such as a worker of some library, is ended by SIGTERM as any process; the pipe is not its."""
    if STOP.pipe >= 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(STOP.pipe)
        STOP.pipe = -1


os.register_at_fork(after_in_child=_leave_to_parent)
