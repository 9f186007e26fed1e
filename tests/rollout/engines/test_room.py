"""A server that shares the trainer's GPU sleeps while the trainer works, unless both fit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rollout.engines.vllm import VllmEngine
from rollout.engines.weights import Room

GB = 10**9


class Gpu:
    """What torch reports of a GPU of 100 GB: `other` GB are held by the server, `held` and `peak` by this process."""

    def __init__(self, monkeypatch):
        self.other, self.held, self.peak = 30, 20, 50
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: ((100 - self.other - self.held) * GB, 100 * GB))
        monkeypatch.setattr("torch.cuda.memory_reserved", lambda _: self.held * GB)
        monkeypatch.setattr("torch.cuda.max_memory_reserved", lambda _: self.peak * GB)


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


def test_a_server_stays_awake_as_long_as_both_fit(gpu):
    said = []
    room = Room(torch.device("cpu"), said.append)
    assert room.is_enough() and room.is_enough()
    gpu.peak = 61  # with 30 of the server, one more than 90
    assert not room.is_enough()
    gpu.peak = 40  # somebody has reset the statistics: the peak may come again
    assert not room.is_enough()
    gpu.other = 29
    assert room.is_enough()
    numbers = "training needs 50.0 GB, the server and others hold 30.0 GB, and 90.0 GB are to be shared"
    assert said[0] == f"vLLM: the server stays awake while the trainer works: {numbers}"
    assert (
        said[1].startswith("vLLM: the server sleeps while the trainer works: training needs 61.0 GB") and len(said) == 3
    )


def engine_on(monkeypatch, *uuids):
    """A VllmEngine with colocate, without a loop and servers: `slept` counts how often they were put to sleep."""
    monkeypatch.setattr("rollout.engines.vllm.uuid_of", lambda _: "G0")
    engine = object.__new__(VllmEngine)
    engine.colocate, engine.device, engine.version, engine._first_sampled = True, torch.device("cpu"), -1, None
    engine._room = Room(engine.device, lambda text: None)
    member = SimpleNamespace(server=SimpleNamespace(info=SimpleNamespace(device_uuids=uuids)), state="ready")
    engine.pool = SimpleNamespace(members=[member])
    engine.slept = 0

    def sleep(members):
        engine.slept += len(members)

    engine.weights = SimpleNamespace(sleep=sleep, asleep=set())
    engine.loop = SimpleNamespace(start=lambda work: work.close())
    return engine


def test_the_first_two_steps_are_trained_beside_a_sleeping_server(gpu, monkeypatch):
    engine = engine_on(monkeypatch, "G0")
    for version, slept in (
        (40, 1),
        (41, 2),
        (42, 2),
        (43, 2),
    ):  # resumed at 40: nothing has been trained in this process
        engine.version = version
        engine.submit([], None)
        engine.sleep()
        assert engine.slept == slept
    gpu.peak = 70
    engine.sleep()
    assert engine.slept == 3


def test_syncs_alone_show_nothing_about_training(gpu, monkeypatch):
    engine = engine_on(monkeypatch, "G0")
    for engine.version in (0, 1, 2):
        engine.sleep()
    assert engine.slept == 3


def test_a_server_on_other_gpus_too_always_sleeps(gpu, monkeypatch):
    engine = engine_on(monkeypatch, "G0", "G1")
    engine.version, engine._first_sampled = 3, 1
    engine.sleep()
    assert engine.slept == 1
