"""Garbage collection of a server's processes: at pauses, not while they generate.

    calm()      at every pause: collect; the first time, also freeze what is left and raise the thresholds

A full collection visits every object of the process and stops the step that it falls into. vLLM freezes its objects
when a process starts, but the engine's process goes on to make more of them: requests, blocks, cached graphs. Reference
counts free nearly everything that a step makes; what they miss are cycles. So a collection runs when the server is
paused anyway: in the API process after /pause and /sleep (strop_generate), in each worker's process, which is also the
engine's unless a server has several workers, when its weights are marked (strop_worker). A server that is never paused
still collects its youngest objects once YOUNG more have been made than freed, so its memory is bounded.

The server finds this file through PYTHONPATH; it imports nothing outside the standard library.
"""

from __future__ import annotations

import gc

# Objects made and not freed since the last collection of the youngest generation; collections of it between two of the
# next; and so on. 100,000 objects are some 20 MB and take about 10 ms; a full collection practically never comes.
YOUNG, MIDDLE, OLD = 100_000, 50, 1000


def calm() -> int:
    """Collect now, and from now on hardly ever by itself; returns the number of objects freed."""
    freed = gc.collect()
    if gc.get_threshold()[0] != YOUNG:
        gc.freeze()
        gc.set_threshold(YOUNG, MIDDLE, OLD)
    return freed
