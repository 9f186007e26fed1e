"""Handle SIGTERM, which schedulers send before preemption: finish the step, save, and exit with EXIT_CODE.

    with end_on_sigterm() as stop:                # trainer/__main__.py, around the whole run
        stop.grace_s = cfg.run.stop_grace_s
        module.train(cfg)

While a run loads there is nothing to save: Stopped is raised immediately, like KeyboardInterrupt. After work_begins()
the signal only sets a flag. The run calls asked() after every step, where all ranks agree on one answer.

A thread enforces the time limit. The signal wakes it through a pipe, because a Python handler does not run while the
main thread is inside one long call (a hanging CUDA kernel, a collective). The thread ends the process without the main
thread; servers and workers of the run notice that their parent is gone and exit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

EXIT_CODE = 128 + signal.SIGTERM  # 143, as in shells; --resume continues the run


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
        self.is_loading = True  # nothing to save: stop immediately
        self.not_saving = threading.Event()
        self.not_saving.set()
        self.pipe = -1  # write end; a signal arrives as one byte

    def handle(self, *_: object) -> None:
        first, self.signalled = not self.signalled, True
        if first and self.is_loading:  # a second signal must not interrupt the cleanup of the first
            raise Stopped("stopped by SIGTERM while loading; there was nothing to save")

    def watch(self, pipe: int) -> None:
        """Wait for SIGTERM, then end the process after grace_s, or after twice that if a save is running."""
        with os.fdopen(pipe, "rb", buffering=0) as signals:
            while (byte := signals.read(1)) and byte != b"\0":
                if byte[0] == signal.SIGTERM:
                    time.sleep(self.grace_s)
                    self.not_saving.wait(self.grace_s)
                    line = f"stopped by SIGTERM: the run did not end within stop_grace_s={self.grace_s:g}; "
                    os.write(2, f"{line}the checkpoints it has are complete; continue with --resume\n".encode())
                    os._exit(EXIT_CODE)


STOP = Stop()


@contextlib.contextmanager
def end_on_sigterm() -> Iterator[Stop]:
    """Handle SIGTERM during a run. Does nothing outside the main thread, which alone can handle signals."""
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
        if not STOP.signalled:  # otherwise the process is about to end, and the time limit stays active
            signal.signal(signal.SIGTERM, before)
            signal.set_wakeup_fd(pipe_before)
            os.write(STOP.pipe, b"\0")
            os.close(STOP.pipe)
            STOP.pipe = -1


def asked() -> bool:
    """Return whether to save and stop now; the same on every rank."""
    from trainer.parallel.comm import any_rank  # imports torch, which --help should not wait for

    return any_rank(STOP.signalled)


def work_begins() -> None:
    """From now on SIGTERM waits for the end of the step."""
    STOP.is_loading = False


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """While a run loads, delay SIGTERM until the enclosed work is done."""
    is_loading, STOP.is_loading = STOP.is_loading, False
    try:
        yield
    finally:
        STOP.is_loading = is_loading
    if is_loading and STOP.signalled:
        raise Stopped("stopped by SIGTERM before the first step; continue with --resume")


def save_begins() -> None:
    """Give a save the time to finish, in any thread."""
    STOP.not_saving.clear()


def save_ends() -> None:
    STOP.not_saving.set()


def _leave_to_parent() -> None:
    """Restore the default SIGTERM handler and close the pipe in a forked child, such as a library's worker."""
    if STOP.pipe >= 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(STOP.pipe)
        STOP.pipe = -1


os.register_at_fork(after_in_child=_leave_to_parent)
