"""A server on the trainer's GPU sleeps during training, unless both fit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rollout.engines.vllm import VllmEngine
from rollout.engines.weights import ColocatedMemory

GB = 10**9


class Gpu:
    """Fakes torch's memory statistics for a 100 GB GPU: `other` GB used by the server, `reserved` by this process."""

    def __init__(self, monkeypatch):
        self.other, self.reserved, self.peak = 30, 20, 50
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: ((100 - self.other - self.reserved) * GB, 100 * GB))
        monkeypatch.setattr("torch.cuda.memory_reserved", lambda _: self.reserved * GB)
        monkeypatch.setattr("torch.cuda.max_memory_reserved", lambda _: self.peak * GB)


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


def test_a_server_stays_awake_as_long_as_both_fit(gpu):
    lines = []
    memory = ColocatedMemory(torch.device("cpu"), lines.append)
    assert memory.has_room() and memory.has_room()
    gpu.peak = 61  # plus 30 of the server: 91 of 90
    assert not memory.has_room()
    gpu.peak = 40  # the statistics were reset: the old peak still counts
    assert not memory.has_room()
    gpu.other = 29
    assert memory.has_room() and len(lines) == 3
    assert "stays awake" in lines[0] and all(f"{size}.0 GB" in lines[0] for size in (50, 30, 90))
    assert "sleeps" in lines[1] and "61.0 GB" in lines[1]


def engine_on(monkeypatch, *uuids):
    """A VllmEngine with colocate but without loop or servers; `slept` counts calls to sleep."""
    monkeypatch.setattr("rollout.engines.vllm.uuid_of", lambda _: "G0")
    engine = object.__new__(VllmEngine)
    engine.colocate, engine.device, engine.version, engine._first_sampled = True, torch.device("cpu"), -1, None
    engine._colocated_memory = ColocatedMemory(engine.device, lambda text: None)
    member = SimpleNamespace(server=SimpleNamespace(info=SimpleNamespace(device_uuids=uuids)), state="ready")
    engine.pool = SimpleNamespace(members=[member])
    engine.slept = 0

    def sleep(members):
        engine.slept += len(members)

    engine.weights = SimpleNamespace(sleep=sleep, asleep=set())
    engine.loop = SimpleNamespace(start=lambda work: work.close())
    return engine


def test_the_server_sleeps_during_the_first_two_steps(gpu, monkeypatch):
    engine = engine_on(monkeypatch, "G0")
    for version, slept in ((40, 1), (41, 2), (42, 2), (43, 2)):  # resumed at step 40
        engine.version = version
        engine.submit([], None)
        engine.sleep()
        assert engine.slept == slept
    gpu.peak = 70
    engine.sleep()
    assert engine.slept == 3


def test_weight_syncs_do_not_count_as_training(gpu, monkeypatch):
    engine = engine_on(monkeypatch, "G0")
    for engine.version in (0, 1, 2):
        engine.sleep()
    assert engine.slept == 3


def test_a_server_that_also_uses_other_gpus_always_sleeps(gpu, monkeypatch):
    engine = engine_on(monkeypatch, "G0", "G1")
    engine.version, engine._first_sampled = 3, 1
    engine.sleep()
    assert engine.slept == 1
