"""Weight sync on one GPU: nccl with one rank, and memory shared with another process."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch

from rollout.servers.loop import Loop
from rollout.servers.worker import strop_wire
from rollout.sync.process_group import ProcessGroupSync
from trainer.config.blocks import LoraConfig, ModelConfig
from trainer.policy.load import load_policy
from trainer.policy.weights import PolicyWeights

pytestmark = pytest.mark.gpu


def test_a_group_of_one_rank_broadcasts_every_bucket_over_nccl():
    device = torch.device("cuda")
    policy = load_policy(ModelConfig(model="builtin:tiny"), LoraConfig(), device, with_reference=False)
    source, loop = PolicyWeights(policy, torch.bfloat16), Loop()
    sync = ProcessGroupSync(source, loop, device=device, bucket_bytes=200_000)
    try:
        for version in (1, 2):
            report = sync.push([], version)
            assert sync.backend == "nccl"
            assert report.version == version
            assert report.num_bytes >= sum(spec.num_bytes for spec in source.specs())
    finally:
        sync.close()
        loop.close()


def test_another_process_reads_and_writes_the_same_cuda_memory():
    buffer = torch.arange(2**22, dtype=torch.int64, device="cuda").view(torch.uint8)
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    child = context.Process(target=read_and_write, args=(strop_wire.share(buffer), answers))
    child.start()
    total = answers.get(timeout=120)
    child.join(60)
    assert total == sum(range(2**22))
    assert child.exitcode == 0
    assert buffer.view(torch.int64)[:3].tolist() == [7, 8, 9]


def read_and_write(shared: dict[str, Any], answers: Any) -> None:
    data = strop_wire.open_shared(shared, torch.device("cuda")).view(torch.int64)
    answers.put(int(data.sum()))
    data[:3] = torch.tensor([7, 8, 9], device="cuda")
    torch.cuda.synchronize()
