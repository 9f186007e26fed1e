"""Weight sync to real servers with every CPU backend, and failures during the transfer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rollout.servers.client import RefusedError, VllmServer
from rollout.servers.loop import Loop
from rollout.servers.worker import strop_wire
from rollout.sync.base import SyncError
from rollout.sync.filesystem import FilesystemSync
from rollout.sync.ipc import IpcSync
from rollout.sync.lora import LoraSync
from rollout.sync.process_group import ProcessGroupSync
from tests.entry import ROOT
from tests.rollout.vllm.conftest import wait_for
from trainer.policy.logps import Policy
from trainer.policy.weights import PolicyWeights

CPU = torch.device("cpu")
IDS = [5, 17, 33, 91, 120, 44, 2, 7, 260, 13, 8, 8, 101, 54]
BUCKET = 300_000  # bytes: several buckets, with layers that span two of them
LIMIT = 1e-4


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


def connected(server: Any, loop: Loop) -> Iterator[VllmServer]:
    """A client of the shared server; restores the server's initial weights at the end."""
    client = VllmServer(server.url, token=server.token)
    loop.run(client.connect())
    yield client
    recover("filesystem", Policy(load(server.model_folder), None, "", CPU, torch.float32), client, loop)
    loop.run(client.close())


@pytest.fixture(scope="module")
def tied(tied_server, loop) -> Iterator[VllmServer]:
    yield from connected(tied_server, loop)


@pytest.fixture(scope="module")
def untied(untied_server, loop) -> Iterator[VllmServer]:
    yield from connected(untied_server, loop)


def load(folder: str | Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def policy(folder: str | Path, seed: int) -> Policy:
    """Load the model and change every weight strongly."""
    model = load(folder)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return Policy(model, None, str(folder), CPU, torch.float32)


def with_lora(folder: str | Path, seed: int) -> Policy:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(load(folder), config).eval()
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    return Policy(model, None, str(folder), CPU, torch.float32)


def make(name: str, of: Policy, loop: Loop, source: Any = None) -> Any:
    source = source or PolicyWeights(of, torch.float32)
    if name == "filesystem":
        return FilesystemSync(source, loop, bucket_bytes=BUCKET)
    return {"process_group": ProcessGroupSync, "ipc": IpcSync}[name](source, loop, device=CPU, bucket_bytes=BUCKET)


def push(sync: Any, server: VllmServer, loop: Loop, version: int) -> Any:
    """Sync like the engine: pause, push, and resume on success."""
    loop.run(server.pause())
    report = sync.push([server], version)
    loop.run(server.resume())
    return report


@torch.no_grad()
def logps(model: nn.Module) -> Tensor:
    rows = model(input_ids=torch.tensor([IDS])).logits[0, :-1].log_softmax(dim=-1)
    return rows.gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]


def gap(server: VllmServer, loop: Loop, model: nn.Module, name: str = "base") -> float:
    served = torch.tensor(loop.run(server.logps(IDS, model=name), timeout=60))
    return float((served - logps(model)).abs().max())


@pytest.mark.parametrize(
    ("name", "kind"),
    [("process_group", "tied"), ("process_group", "untied"), ("ipc", "tied"), ("filesystem", "untied")],
)
def test_alternating_policies_are_served_exactly(name, kind, request, loop):
    server = request.getfixturevalue(kind)
    folder = request.getfixturevalue(f"{kind}_server").model_folder
    current = policy(folder, seed=1)
    states = [policy(folder, seed).model.state_dict() for seed in (1, 2)]
    expected = []
    sync = make(name, current, loop)
    try:
        for version, state in enumerate((states[0], states[1], states[0]), start=1):
            current.model.load_state_dict(state)
            report = push(sync, server, loop, version)
            assert gap(server, loop, current.model) < LIMIT
            expected.append(logps(current.model))
            assert (report.version, report.backend) == (version, name)
            (info,) = loop.run(server.rpc("strop_info", timeout=10))
            assert (info["version"], info["dirty"]) == (version, False)
        assert float((expected[0] - expected[1]).abs().max()) > 0.5 and torch.equal(expected[0], expected[2])
    finally:
        sync.close()


def test_merged_adapter_is_loaded_by_a_server_with_lora_layers(tied, tied_server, loop):
    current = with_lora(tied_server.model_folder, seed=3)
    sync = make("process_group", current, loop)
    push(sync, tied, loop, 5)
    sync.close()
    assert gap(tied, loop, current.model) < LIMIT
    assert gap(tied, loop, load(tied_server.model_folder)) > 0.1


def test_server_keeps_two_adapter_versions_and_unloads_older_ones(tied, tied_server, loop, tmp_path):
    base = load(tied_server.model_folder)
    recover("filesystem", Policy(base, None, "", CPU, torch.float32), tied, loop)
    current = with_lora(tied_server.model_folder, seed=4)
    sync = LoraSync(PolicyWeights(current, torch.float32), loop, folder=str(tmp_path))
    assert not sync.needs_pause
    expected: dict[int, Tensor] = {}
    for version in (1, 2, 3):
        with torch.no_grad():
            for name, parameter in current.model.named_parameters():
                if "lora_" in name:
                    parameter.mul_(1.2)
        report = sync.push([tied], version)
        expected[version] = logps(current.model)
        for loaded in [v for v in expected if v > version - 2]:
            served = torch.tensor(loop.run(tied.logps(IDS, model=sync.model_name(loaded))))
            assert float((served - expected[loaded]).abs().max()) < LIMIT
    assert float((expected[3] - expected[2]).abs().max()) > 0.05
    assert report.num_bytes > 10_000 and report.backend == "lora"
    assert gap(tied, loop, base) < LIMIT
    with pytest.raises(RefusedError):
        loop.run(tied.logps(IDS, model=sync.model_name(1)))
    sync.push([tied], 3)  # again, as for a server that came back: no change
    assert gap(tied, loop, current.model, sync.model_name(3)) < LIMIT
    sync.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RefusedError):
        loop.run(tied.logps(IDS, model=sync.model_name(3)))


def test_adapter_on_a_pushed_base_is_exact(tied, tied_server, loop, tmp_path):
    moved = policy(tied_server.model_folder, seed=6)
    recover("process_group", moved, tied, loop)
    moved.model.save_pretrained(tmp_path / "base")
    current = with_lora(tmp_path / "base", seed=7)
    sync = LoraSync(PolicyWeights(current, torch.float32), loop, folder=str(tmp_path / "adapters"))
    sync.push([tied], 1)
    assert gap(tied, loop, current.model, sync.model_name(1)) < LIMIT
    assert gap(tied, loop, moved.model) < LIMIT
    sync.close()


class Without(PolicyWeights):
    """Weights without one tensor."""

    left_out = "model.layers.1.self_attn.k_proj.weight"

    def specs(self):
        return [spec for spec in super().specs() if spec.name != self.left_out]

    def tensors(self):
        return ((name, tensor) for name, tensor in super().tensors() if name != self.left_out)


class Breaks(PolicyWeights):
    """Weights that fail halfway, as in a trainer out of memory."""

    def tensors(self):
        for i, pair in enumerate(super().tensors()):
            if i == 20:
                raise MemoryError("out of memory")
            yield pair


def expect_dirty(server: VllmServer, loop: Loop) -> None:
    status = loop.run(server.check(timeout=30))
    assert status.dirty and status.paused


@pytest.mark.parametrize("name", ["ipc", "filesystem"])  # test_engine.py tests process_group
def test_missing_tensor_is_detected_and_a_full_push_recovers(name, tied, tied_server, loop):
    current = policy(tied_server.model_folder, seed=8)
    sync = make(name, current, loop, Without(current, torch.float32))
    with pytest.raises(SyncError, match=r"layers\.1\.self_attn\.qkv_proj \(32768 of 49152 elements\)") as caught:
        push(sync, tied, loop, 9)
    sync.close()
    assert caught.value.failed.keys() == {0}
    expect_dirty(tied, loop)
    recover(name, current, tied, loop)


def recover(name: str, current: Policy, server: VllmServer, loop: Loop) -> None:
    """Push all weights with a new sync, as after a restart."""
    sync = make(name, current, loop)
    push(sync, server, loop, 10)
    sync.close()
    assert gap(server, loop, current.model) < LIMIT
    assert not loop.run(server.check(timeout=30)).dirty


@pytest.mark.parametrize("name", ["process_group", "ipc"])
def test_failed_push_leaves_a_dirty_server_that_the_same_sync_recovers(name, tied, tied_server, loop):
    current = policy(tied_server.model_folder, seed=9)
    source = Breaks(current, torch.float32)
    sync = make(name, current, loop, source)
    start = time.monotonic()
    with pytest.raises(MemoryError):
        push(sync, tied, loop, 11)
    expect_dirty(tied, loop)
    assert time.monotonic() - start < 10
    source.tensors = PolicyWeights(current, torch.float32).tensors
    push(sync, tied, loop, 12)
    sync.close()
    assert gap(tied, loop, current.model) < LIMIT


def test_corrupted_bytes_are_detected(tied, tied_server, loop, monkeypatch):
    current = policy(tied_server.model_folder, seed=10)
    seal = strop_wire.seal

    def corrupt(bucket: dict[str, Any], buffer: Tensor) -> None:
        seal(bucket, buffer)
        buffer[bucket["size"] // 2] ^= 1

    sync = make("process_group", current, loop)
    with monkeypatch.context() as patch:
        patch.setattr(strop_wire, "seal", corrupt)
        with pytest.raises(SyncError, match="checksum mismatch"):
            push(sync, tied, loop, 13)
    expect_dirty(tied, loop)
    push(sync, tied, loop, 14)
    sync.close()
    assert gap(tied, loop, current.model) < LIMIT


def test_tied_server_rejects_a_separate_head(tied, untied_server, tied_server, loop):
    sync = make("filesystem", policy(untied_server.model_folder, seed=11), loop)
    with pytest.raises(SyncError, match="lm_head.weight"):
        push(sync, tied, loop, 15)
    sync.close()
    expect_dirty(tied, loop)
    recover("filesystem", policy(tied_server.model_folder, seed=12), tied, loop)


def test_reload_from_a_missing_folder_changes_nothing(tied, tied_server, loop):
    (answer,) = loop.run(tied.rpc("strop_reload", timeout=30, path="/nowhere", version=99))
    assert "path=/nowhere: " in answer["error"] and not loop.run(tied.check(timeout=30)).dirty


KILLED = """
import sys, time
from pathlib import Path
import torch
from tests.rollout.vllm import test_sync as t
from rollout.servers.loop import Loop
from rollout.servers.client import VllmServer

class Stalls(t.PolicyWeights):
    def tensors(self):
        for i, pair in enumerate(super().tensors()):
            if i == 24:
                Path(sys.argv[5]).touch()
                time.sleep(600)
            yield pair

loop = Loop()
server = VllmServer(sys.argv[1], token=sys.argv[2])
loop.run(server.connect())
current = t.policy(sys.argv[3], seed=13)
t.push(t.make(sys.argv[4], current, loop, Stalls(current, torch.float32)), server, loop, 16)
"""


def test_trainer_killed_during_a_push_leaves_a_dirty_server_that_the_next_recovers(tied, tied_server, loop, tmp_path):
    """With ipc; test_runs.py tests process_group."""
    reached = tmp_path / "reached"
    arguments = [tied_server.url, tied_server.token, str(tied_server.model_folder), "ipc", str(reached)]
    trainer = subprocess.Popen(
        [sys.executable, "-c", KILLED, *arguments], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    try:
        wait_for(reached.exists, 300)  # imports take minutes on a busy machine
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    killed = time.monotonic()
    expect_dirty(tied, loop)  # the worker detected it: it does not respond while waiting
    assert time.monotonic() - killed < 10
    recover("ipc", policy(tied_server.model_folder, seed=14), tied, loop)
