"""GPU memory of the in-process engine beside training's.

    residence = Residence(device, log)
    residence.training_begins(held)        # held: bytes of cache, graphs and the copy of the weights
    ...
    residence.training_ended()             # measures; from now on residence.keeps says whether they may stay

The first two training steps run without them: the first one makes the optimizer's moments at its end, so only the
second has everything at once. If its measured peak leaves room for them, they stay from then on; if the peak grows into
that room later, they are freed again while the model trains, and made again after it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

FULL = 0.9  # of the GPU: allocations are rounded and scattered, and CUDA's libraries take memory of their own
GIB = 2**30

_highest = 0  # bytes, before the last restart


def restart_peak() -> int:
    """Bytes that tensors took at the peak since the last call."""
    global _highest
    peak = torch.cuda.max_memory_allocated()
    _highest = max(_highest, peak)
    torch.cuda.reset_peak_memory_stats()
    return peak


def highest_peak() -> int:
    """Bytes that tensors took at the peak, since the start of the process."""
    return max(_highest, torch.cuda.max_memory_allocated())


def available(device: torch.device) -> int:
    """Bytes that this process holds or could get."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device)


class MemoryPolicy:
    """Whether the engine keeps its memory while the model trains."""

    def __init__(self, device: torch.device, log: Callable[[str], None]) -> None:
        self.device, self.log = device, log
        self.resident = False
        self._held = -1  # bytes of the engine when training began; -1: training has not begun
        self._trained = 0  # times that training has ended

    def training_begins(self, held: int) -> None:
        self._held = held
        restart_peak()

    def training_ended(self) -> None:
        if self._held < 0:
            return
        held, self._held = self._held, -1
        peak, self._trained = restart_peak(), self._trained + 1
        if self._trained < 2:
            return
        self.update(peak=peak, held=held, total=available(self.device))

    def update(self, *, peak: int, held: int, total: int) -> None:
        """`peak` of training, with what the engine kept; `held`: what it has when it samples."""
        alone = peak - held if self.resident else peak
        resident = alone + held <= FULL * total
        if resident != self.resident:
            numbers = f"training takes {alone / GIB:.1f} GiB at its peak, of {total / GIB:.1f} GiB"
            what = "stay while training" if resident else "are freed while training"
            self.log(f"rollout: the engine's {held / GIB:.1f} GiB (cache, graphs, weights) {what}; {numbers}")
        self.resident = resident
