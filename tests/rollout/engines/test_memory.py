"""Memory policy of the in-process engine, decided by measured peaks."""

from __future__ import annotations

import torch

from rollout.engines import memory
from rollout.engines.memory import GIB, MemoryPolicy


def test_the_engine_keeps_its_memory_only_if_the_second_step_leaves_room(monkeypatch):
    """With a GPU of 100 GiB and an engine of 30, the training peak may be at most 60."""
    peaks: list[float] = []
    monkeypatch.setattr(memory, "restart_peak", lambda: int(peaks.pop(0) * GIB))
    monkeypatch.setattr(memory, "available", lambda device: 100 * GIB)
    lines: list[str] = []
    memory_policy = MemoryPolicy(torch.device("cpu"), lines.append)

    def train(peak: float) -> bool:
        peaks[:] = [0, peak]
        memory_policy.training_begins(30 * GIB)
        memory_policy.training_ended()
        return memory_policy.resident

    memory_policy.training_ended()  # before any training: nothing to measure
    assert not train(20), "the first step allocates the optimizer state at its end: its peak is too low"
    assert not train(61) and not lines
    assert train(60) and all(text in lines[0] for text in ("keeping", "30.0 GiB", "60.0 of 100.0"))
    assert train(60 + 30), "the peak now includes the engine"
    assert not train(61 + 30) and "freeing" in lines[1] and "61.0 of 100.0" in lines[1]
    assert not train(61) and len(lines) == 2


def test_highest_peak_survives_restart_peak(monkeypatch):
    monkeypatch.setattr(memory, "_highest", 0)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda: None)
    for peak, highest in ((5, 5), (9, 9), (3, 9)):
        monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda value=peak: value)
        assert memory.restart_peak() == peak and memory.highest_peak() == highest
