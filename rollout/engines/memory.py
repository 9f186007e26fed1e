"""Share GPU memory between the in-process engine and training.

    policy = MemoryPolicy(device, log)
    policy.training_begins(engine_bytes)   # bytes of cache, graphs and weight copy
    ...
    policy.training_ended()                # measure the peak and update policy.resident

The first two training steps run without the engine's memory: the first step allocates the optimizer state only at its
end, so the second is the first with the full peak. If that peak leaves enough memory for the engine, its memory stays
allocated. If the peak grows too large later, the engine's memory is again freed for training and reallocated after it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

FULL = 0.9  # usable fraction of the GPU; the rest covers fragmentation and CUDA libraries
GIB = 2**30

_highest = 0  # peak bytes before the last restart


def restart_peak() -> int:
    """Return the peak of allocated bytes since the last call, and reset it."""
    global _highest
    peak = torch.cuda.max_memory_allocated()
    _highest = max(_highest, peak)
    torch.cuda.reset_peak_memory_stats()
    return peak


def highest_peak() -> int:
    """Return the peak of allocated bytes since the process started."""
    return max(_highest, torch.cuda.max_memory_allocated())


def available(device: torch.device) -> int:
    """Return the bytes that this process has reserved or could allocate."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device)


class MemoryPolicy:
    """Decides whether the engine keeps its memory during training (`resident`)."""

    def __init__(self, device: torch.device, log: Callable[[str], None]) -> None:
        self.device, self.log = device, log
        self.resident = False
        self._engine_bytes = -1  # when training began; -1: not training
        self._num_trained = 0  # how often training has ended

    def training_begins(self, engine_bytes: int) -> None:
        self._engine_bytes = engine_bytes
        restart_peak()

    def training_ended(self) -> None:
        if self._engine_bytes < 0:
            return
        engine, self._engine_bytes = self._engine_bytes, -1
        peak, self._num_trained = restart_peak(), self._num_trained + 1
        if self._num_trained < 2:
            return
        total = available(self.device)
        training = peak - engine if self.resident else peak
        resident = training + engine <= FULL * total
        if resident != self.resident:
            self.log(
                f"rollout: {'keeping' if resident else 'freeing'} the engine's {engine / GIB:.1f} GiB (cache, graphs, "
                f"weights) during training; training peak {training / GIB:.1f} of {total / GIB:.1f} GiB"
            )
        self.resident = resident
