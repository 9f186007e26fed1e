"""Whether the in-process engine keeps its memory while the model trains: decided by measured peaks."""

from __future__ import annotations

import torch

from rollout.engines import memory
from rollout.engines.memory import GIB, MemoryPolicy


def test_it_stays_only_where_the_second_step_left_room_for_it(monkeypatch):
    """A GPU of 100 GiB, an engine of 30: training may take 60 at its peak."""
    peaks: list[float] = []
    monkeypatch.setattr(memory, "restart_peak", lambda: int(peaks.pop(0) * GIB))
    monkeypatch.setattr(memory, "available", lambda device: 100 * GIB)
    said: list[str] = []
    memory_policy = MemoryPolicy(torch.device("cpu"), said.append)

    def train(peak: float) -> bool:
        peaks[:] = [0, peak]
        memory_policy.training_begins(30 * GIB)
        memory_policy.training_ended()
        return memory_policy.resident

    memory_policy.training_ended()  # before any training: nothing to judge
    assert not train(20), "the first step makes the moments at its end: its peak says too little"
    assert not train(61) and not said
    assert train(60)
    assert said == [
        "rollout: the engine's 30.0 GiB (cache, graphs, weights) stay while training; training takes 60.0 GiB at its "
        "peak, of 100.0 GiB"
    ]
    assert train(60 + 30), "the peak now has the engine in it"
    assert not train(61 + 30) and "are freed while training; training takes 61.0 GiB" in said[1]
    assert not train(61) and len(said) == 2


def test_the_highest_peak_survives_restarts(monkeypatch):
    monkeypatch.setattr(memory, "_highest", 0)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda: None)
    for peak, highest in ((5, 5), (9, 9), (3, 9)):
        monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda value=peak: value)
        assert memory.restart_peak() == peak and memory.highest_peak() == highest
