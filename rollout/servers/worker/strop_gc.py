"""Collect garbage in a server's processes at pauses, not during sampling.

    collect()   at every pause; the first call also freezes the remaining objects and raises the thresholds

A full collection visits every object of the process and stalls the current step. vLLM freezes its objects when a
process starts, but the engine then allocates more: requests, blocks, cached graphs. Reference counting frees nearly all
objects of a step; only cycles remain. So a collection runs while the server is paused: in the API process after /pause
and /sleep (strop_generate), and in each worker's process when its weights are marked (strop_worker). With one worker,
that process is also the engine's. A server that is never paused still collects its youngest generation after YOUNG net
allocations, so its memory is bounded.

Imports only the standard library.
"""

from __future__ import annotations

import gc

# Thresholds per generation: net allocations, then collections of the previous generation. 100,000 objects are about
# 20 MB and take about 10 ms; a full collection almost never runs.
YOUNG, MIDDLE, OLD = 100_000, 50, 1000


def collect() -> int:
    """Collect now and make automatic collections rare; return the number of freed objects."""
    freed = gc.collect()
    if gc.get_threshold()[0] != YOUNG:
        gc.freeze()
        gc.set_threshold(YOUNG, MIDDLE, OLD)
    return freed
