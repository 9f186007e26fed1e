"""Weights to a real vLLM server over NCCL. Both share one GPU, as two hosts for NCCL (NCCL_HOSTID).

pytest -m gpu tests/rollout/sync/test_nccl_vllm.py      # needs vLLM in this interpreter or --vllm.python
"""

from __future__ import annotations

import copy
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

from rollout.servers.client import VllmServer
from rollout.servers.launch import Launched, launch, wait_ready
from rollout.servers.loop import Loop
from rollout.servers.options import VllmConfig
from rollout.sync.base import SyncError
from rollout.sync.choose import pick_backend
from rollout.sync.process_group import ProcessGroupSync
from tests.entry import ROOT, environment, metrics
from tests.test_nccl import record
from trainer.config.blocks import LoraConfig, ModelConfig
from trainer.policy.load import load_policy
from trainer.policy.weights import PolicyWeights

pytestmark = pytest.mark.gpu
IDS = [5, 17, 33, 91, 120, 44, 2, 7, 260, 13, 8, 8, 101, 54]
NUM_SYNCS = 200
TRAINER = {"NCCL_HOSTID": "trainer", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
MODEL = os.environ.get("STROP_NCCL_MODEL", str(ROOT / "trainer" / "tiny"))


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Launched]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (TRAINER | {"NCCL_HOSTID": "server"}).items():
            patch.setenv(name, value)
        cfg = VllmConfig(gpu_memory_utilization=0.1, enforce_eager=True, devices=(0,))
        log_dir = tmp_path_factory.mktemp("vllm")
        found = launch(cfg, model=MODEL, device="cuda", log_dir=log_dir, max_model_len=256)
    with found:
        wait_ready([found], timeout=300)
        yield found


@pytest.fixture(autouse=True)
def own_host(monkeypatch) -> None:
    for name, value in TRAINER.items():
        monkeypatch.setenv(name, value)


def connect(server: Launched, loop: Loop) -> VllmServer:
    client = VllmServer(server.url, token=server.token)
    loop.run(client.connect())
    return client


def make_policy(seed: int, rank: int) -> Any:
    policy = load_policy(ModelConfig(model=MODEL), LoraConfig(r=rank), torch.device("cuda"), with_reference=False)
    generator = torch.Generator(device="cuda").manual_seed(seed)
    with torch.no_grad():
        for p in policy.model.parameters():
            if p.requires_grad:
                p.add_(0.02 * torch.randn(p.shape, generator=generator, device="cuda"))
    return policy


@torch.no_grad()
def logps_of(policy: Any) -> torch.Tensor:
    """Log-probs of a copy in bfloat16, as the server has it."""
    model = copy.deepcopy(policy.model)
    model = (model.merge_and_unload() if policy.is_lora else model).bfloat16()
    logits = model(input_ids=torch.tensor([IDS], device="cuda")).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(IDS[1:], device="cuda")[:, None])[:, 0].cpu()


def push(sync: Any, client: VllmServer, loop: Loop, version: int) -> Any:
    loop.run(client.pause())
    report = sync.push([client], version)
    loop.run(client.resume())
    return report


@pytest.mark.parametrize("rank", [0, 8], ids=["full", "merged adapter"])
def test_200_syncs_are_served_exactly(server, rank):
    loop, device = Loop(), torch.device("cuda")
    client = connect(server, loop)
    assert pick_backend("process_group", [client], is_lora=bool(rank), device_uuid=client.info.device_uuids[0])
    policy = make_policy(1, rank)
    sync = ProcessGroupSync(PolicyWeights(policy, torch.bfloat16), loop, device=device, bucket_bytes=1 << 20)
    before, seconds, gaps, changes = logps_of(policy), [], [], []
    try:
        for version in range(1, NUM_SYNCS + 1):
            with torch.no_grad():
                for p in policy.model.parameters():
                    if p.requires_grad:
                        p.mul_(1.1 if version % 2 else 1 / 1.1)
            started = time.monotonic()
            report = push(sync, client, loop, version)
            seconds.append(time.monotonic() - started)
            assert report.version == version and sync.backend == "nccl"
            if version % 20 == 1:
                served = torch.tensor(loop.run(client.logps(IDS, model="base"), timeout=60))
                ours = logps_of(policy)
                gaps.append(float((served - ours).abs().max()))
                changes.append(float((ours - before).abs().max()))
    finally:
        sync.close()
        loop.run(client.close())
        loop.close()
    seconds.sort()
    record("sync", "merged adapter" if rank else "full", syncs=NUM_SYNCS, median_s=seconds[100],
           slowest_s=seconds[-1], mib=report.num_bytes / 2**20, gap=max(gaps), change=min(changes))  # fmt: skip
    assert max(gaps) < min(changes) / 4, (gaps, changes)  # bfloat16 rounding, much less than what a sync changes


GRPO = (
    "--method", "grpo", "--model", MODEL, "--data", "task:addition:size=64", "--per-device-train-batch-size", "16",
    "--max-completion-length", "8", "--learning-rate", "1e-4", "--rollout.engine", "vllm", "--sync.backend",
    "process_group", "--save-steps", "1", "--eval-steps", "0",
)  # fmt: skip


def train(server: Launched, out: Path, *more: str) -> subprocess.Popen[str]:
    words = [*GRPO, "--vllm.url", server.url, "--output-dir", str(out), *more]
    env = environment() | TRAINER | {"STROP_VLLM_TOKEN": str(server.token)}
    return subprocess.Popen([sys.executable, "-m", "trainer", *words], cwd=out.parent, env=env, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True)  # fmt: skip


def test_trainer_that_was_killed_is_resumed(server, tmp_path):
    out = tmp_path / "run"
    first = train(server, out, "--max-steps", "6")
    deadline = time.monotonic() + 120
    while not (out / "checkpoints" / "step-00000002").is_dir():
        assert first.poll() is None and time.monotonic() < deadline, first.communicate()[0][-3000:]
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    started = time.monotonic()
    second = train(server, out, "--max-steps", "6", "--resume")
    said, _ = second.communicate(timeout=180)
    assert second.returncode == 0, said[-3000:]
    rows = [row for row in metrics(out) if "loss/total" in row]
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert all(row["policy/behaviour_gap"] < 0.1 for row in rows), rows
    record("sync", "killed trainer", seconds=time.monotonic() - started,
           gap=max(row["policy/behaviour_gap"] for row in rows))  # fmt: skip


def test_server_that_was_killed_is_reported(server):
    """The last test: the server is gone afterwards."""
    loop = Loop()
    client = connect(server, loop)
    sync = ProcessGroupSync(PolicyWeights(make_policy(3, 0), torch.bfloat16), loop, device=torch.device("cuda"))
    try:
        push(sync, client, loop, 1)
        for pid in server.pids[1:]:
            os.kill(pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises((SyncError, ValueError, OSError)) as caught:
            sync.push([client], 2)
        record("sync", "killed server", seconds=time.monotonic() - started, said=str(caught.value)[:300])
        assert time.monotonic() - started < 60
    finally:
        sync.close()
        loop.close()
