"""What rank 0 reads for its servers, the others read with it; and servers that several processes cannot have."""

from __future__ import annotations

import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rollout.servers.options import SyncConfig, VllmConfig
from tests.trainer.policy.test_weights import make_model, policy_of, with_lora
from trainer.config.blocks import ParallelConfig
from trainer.parallel import comm
from trainer.policy import weights
from trainer.rl import servers
from trainer.rl.servers import SharedWeights, WeightCommands


@pytest.fixture
def read(monkeypatch) -> list[str]:
    """Commands sent and tensors gathered, in order; on one rank, whose gathers are as real as they get there."""
    done: list[str] = []
    real = weights.gather_on_device
    monkeypatch.setattr(servers, "send_command", lambda command: done.append(f"command {command}"))
    monkeypatch.setattr(
        weights, "gather_on_device", lambda tensor, policy, name: (done.append(name), real(tensor, policy, name))[1]
    )
    return done


# Weights as they are, and converted a layer at a time.
@pytest.mark.parametrize(("kind", "left_after"), [("llama-tied", 5), ("qwen3-moe", 1), ("qwen3-moe", None)])
def test_a_transfer_that_breaks_off_is_read_to_the_end(kind, left_after, read):
    policy = policy_of(make_model(kind))
    WeightCommands(policy).weights("bfloat16")
    others = list(read)
    read.clear()
    tensors = SharedWeights(policy, torch.bfloat16).tensors()
    assert read == [], "nothing is read, and nobody told, before the first tensor is asked for"
    for _ in range(left_after or len(SharedWeights(policy, torch.bfloat16).specs())):
        next(tensors)
    tensors.close()
    assert read == ["command weights bfloat16", *others]


def test_an_adapter_is_read_by_all_once_it_is_known_to_be_servable(read, tmp_path):
    policy = policy_of(with_lora(make_model("llama")))
    WeightCommands(policy).adapter("float32")
    others = list(read)
    assert set(others) == {"adapter"} and len(others) == 2 * 7 * 2  # A and B of seven matrices in two layers
    read.clear()
    SharedWeights(policy, torch.float32).save_adapter(tmp_path)
    assert read == ["command adapter float32", *others]
    read.clear()
    odd = policy_of(with_lora(make_model("llama"), rank_pattern={"q_proj": 2}))
    with pytest.raises(ValueError, match="rank_pattern="):
        SharedWeights(odd, torch.float32).save_adapter(tmp_path)
    assert read == [], "the others would wait for ever"


def test_commands_come_from_the_main_thread_while_the_others_wait(monkeypatch):
    store = SimpleNamespace(set=lambda *_: None, delete_key=lambda *_: None)
    monkeypatch.setattr(comm, "_watch", SimpleNamespace(commands=0, rank0_alone=False, store=store))
    with pytest.raises(AssertionError, match="do not wait for commands"):
        comm.send_command("weights")
    failed: list[str] = []

    def elsewhere() -> None:
        try:
            comm.send_command("weights")
        except AssertionError as error:
            failed.append(str(error))

    with comm.rank0_alone():
        comm.send_command("weights")
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert failed == ["weights: only the main thread may send it"] and comm._watch.commands == 1


def settings(*, vllm: VllmConfig, sync: SyncConfig | None = None, timeout_s: float = 600.0) -> Any:
    return SimpleNamespace(
        vllm=vllm, sync=sync or SyncConfig(), overlap=SimpleNamespace(vllm_lora_sync=False),
        parallel=ParallelConfig(timeout_s=timeout_s),
    )  # fmt: skip


def policy_on(device: str, *, is_lora: bool = False) -> Any:
    return SimpleNamespace(
        device=torch.device(device), model=nn.Linear(1000, 1000), compute_dtype=torch.bfloat16, is_sharded=True,
        is_lora=is_lora,
    )  # fmt: skip


REFUSED = [
    ("cuda", {"colocate": True}, {}, "vllm.colocate=True: a server shares the GPU of one process, but 4 train; give "
     "servers their own GPUs with --vllm.devices or --vllm.url"),
    ("cuda", {"colocate": False}, {"backend": "ipc"}, "sync.backend=ipc: needs a server on the trainer's GPU, but 4 "
     "processes train on one each; use --sync.backend process_group"),
    ("cpu", {}, {"backend": "process_group"}, "parallel.timeout_s=30: processes wait for each other while weights go "
     "to servers, which may take 60 s when one hangs; raise it, or use --sync.backend filesystem"),
]  # fmt: skip


def test_servers_that_do_not_go_with_several_processes_are_refused(monkeypatch):
    """A short time limit only where processes wait for a server."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    for device, vllm, sync, message in REFUSED:
        cfg = settings(vllm=VllmConfig(**vllm), sync=SyncConfig(**sync), timeout_s=30.0)
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            servers.check_several_ranks(cfg, policy_on(device))
    servers.check_several_ranks(settings(vllm=VllmConfig(), timeout_s=30.0), policy_on("cpu", is_lora=True))
    filesystem = SyncConfig(backend="filesystem")
    servers.check_several_ranks(settings(vllm=VllmConfig(), sync=filesystem, timeout_s=30.0), policy_on("cpu"))


def test_servers_get_gpus_that_nobody_trains_on():
    servers.check_gpus(VllmConfig(replicas=2, devices=(6, 7)), 6, 8)
    servers.check_gpus(VllmConfig(replicas=2), 6, 8)
    servers.check_gpus(VllmConfig(url=("http://127.0.0.1:8000",)), 8, 8)
    with pytest.raises(ValueError, match=r"^vllm.devices=5 7: GPU 5 is used for training"):
        servers.check_gpus(VllmConfig(replicas=2, devices=(5, 7)), 6, 8)
    with pytest.raises(ValueError, match=r"^vllm.replicas=2: needs 4 GPUs beside 6 that train, but this "):
        servers.check_gpus(VllmConfig(replicas=2, tensor_parallel_size=2), 6, 8)
