"""Memory policy of the in-process engine, decided by measured peaks."""

from __future__ import annotations

import torch

from rollout.engines import local, memory
from rollout.engines.forward import TransformersForward
from rollout.engines.local import LocalEngine
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


def test_the_cache_leaves_memory_for_a_prefill_pass(make_model, tokenizer, monkeypatch):
    """Two passes of 16,384 tokens are measured: by sequences of up to 128 tokens and up to 64; 8,192 of wide models."""
    engine, passes = LocalEngine(make_model(), tokenizer), []
    engine._forward, engine.kind = TransformersForward(engine.lm, torch.float32), "cuda"
    engine._forward.prefill = lambda batch, cache: passes.append(batch)
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda: None)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: GIB)
    monkeypatch.setattr(local, "available", lambda device: 5 * GIB)
    monkeypatch.setattr(local, "restart_peak", lambda: 2 * GIB)  # 1 GiB for the pass
    page_bytes = engine._forward.shape.bytes_per_token * local.PAGE["cuda"]
    for length in (100, 120, 50):
        engine._longest = length
        assert 1.7 * GIB < engine._page_budget() * page_bytes < 1.8 * GIB, "0.9 of 2 GiB without the logits"
    monkeypatch.setattr(local, "NARROW", 8)
    engine._longest = 200
    engine._page_budget()
    assert [batch.index.shape[1] for batch in passes] == [128, 64, 256]
    for batch, most in zip(passes, (16384, 16384, 8192), strict=True):
        assert most - batch.ids.shape[1] < batch.ids.numel() <= most
