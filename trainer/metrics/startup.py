"""Seconds from the command to the end of the first step, by part, and the folders of compiled code.

    keep_compiled_code()               # python -m trainer, before torch is imported
    startup.begin()
    with importing():                  # torch and the method
        ...
    startup.lap("weights")             # adds the time since the last lap to a part, without compiling
    text = startup.end()               # "startup: 9.8 s to the end of the first step: imports 5.1, weights 1.2, ..."

Runs from Python do not call begin(), so that lap() and end() do nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STARTED = time.perf_counter() - time.process_time()  # of the process, which so far has mostly imported modules


def keep_compiled_code() -> None:
    """Keep compiled graphs and kernels in the user's cache folder, unless the environment names other folders.

    Inductor's default is in /tmp, which a reboot or a new container clears.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "strop"
    for name, folder in (("TORCHINDUCTOR_CACHE_DIR", home / "graphs"), ("TRITON_CACHE_DIR", home / "kernels")):
        if name in os.environ or (name == "TRITON_CACHE_DIR" and "TRITON_HOME" in os.environ):
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:  # a read-only home
            continue
        if os.access(folder, os.W_OK):
            os.environ[name] = str(folder)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import torch without garbage collection, and exempt what exists then from later collections.

    Modules create half a million objects that live as long as the process, and each collection would search all of
    them: a fifth of the time of importing. Later calls do nothing, because what they would exempt may be garbage.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # otherwise Triton's bindings report a leak when Python exits
        gc.enable()


class Startup:
    """Parts of the time before the first step ends. Compiling counts as `graphs` or `kernels` wherever it happens."""

    def __init__(self) -> None:
        self.parts: dict[str, float] | None = None  # seconds; None: not measuring
        self.last: float | None = None  # the last lap
        self.compiled = {"graphs": 0.0, "kernels": 0.0}  # seconds in this process, at the last lap
        self.kernels_s = 0.0  # Triton kernels outside of graphs, including reading them from the cache

    def begin(self) -> None:
        """Start measuring; the first run of a process includes what was imported before."""
        self.last = STARTED if self.last is None else time.perf_counter()
        self.parts, self.compiled = {}, self._compiled()

    def lap(self, name: str) -> None:
        if self.parts is None:
            return
        now, before = time.perf_counter(), self.compiled
        seconds, self.last = now - self.last, now
        self.compiled = self._compiled()
        new = {part: total - before[part] for part, total in self.compiled.items()}
        side_by_side = max(1.0, sum(new.values()) / max(seconds, 1e-9))  # kernels that threads compiled
        new = {part: spent / side_by_side for part, spent in new.items()}
        for part, spent in {name: seconds - sum(new.values()), **new}.items():
            self.parts[part] = self.parts.get(part, 0.0) + spent
        self._listen(self._add_kernel)

    def _compiled(self) -> dict[str, float]:
        return {"graphs": graph_seconds(), "kernels": self.kernels_s}

    def end(self) -> str:
        self.lap("first step")
        if self.parts is None:
            return ""
        parts, self.parts = self.parts, None
        self._listen(None)
        shown = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items() if seconds >= 0.05)
        return f"startup: {sum(parts.values()):.1f} s to the end of the first step" + (f": {shown}" if shown else "")

    def _listen(self, listener: Any) -> None:
        """Let Triton report the kernels it compiles or reads, once it is imported."""
        if knobs := sys.modules.get("triton.knobs"):
            knobs.compilation.listener = listener

    def _add_kernel(self, *, times: Any, **_: Any) -> None:
        from torch._guards import CompileContext

        if CompileContext.current_compile_id() is None:
            self.kernels_s += times.total / 1e6


def graph_seconds() -> float:
    """Return the time that torch.compile has taken in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.calculate_time_spent()["total_wall_time"] if dynamo else 0.0


startup = Startup()
