"""All ranks gather weights at rank 0's commands; which servers are allowed with several ranks."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rollout.rewards.table import load_rewards
from rollout.servers.options import SyncConfig, VllmConfig
from tests.entry import run_ranks
from tests.ranks import handover
from tests.trainer.policy.test_weights import make_model, policy_of, with_lora
from trainer.config.blocks import ParallelConfig
from trainer.parallel import comm
from trainer.policy import weights
from trainer.rl import servers
from trainer.rl.rank0_rollout import AllRanksRewards
from trainer.rl.servers import SharedWeights, WeightCommands


@pytest.fixture
def read(monkeypatch) -> list[str]:
    """Commands sent and tensors gathered, in order."""
    events: list[str] = []
    gather = weights.gather_on_device
    monkeypatch.setattr(servers, "send_command", lambda command: events.append(f"command {command}"))
    monkeypatch.setattr(
        weights, "gather_on_device", lambda tensor, policy, name: (events.append(name), gather(tensor, policy, name))[1]
    )
    return events


# Weights in the model's layout, and converted layer by layer.
@pytest.mark.parametrize(("kind", "left_after"), [("llama-tied", 5), ("qwen3-moe", 1), ("qwen3-moe", None)])
def test_all_tensors_are_gathered_even_if_the_transfer_is_interrupted(kind, left_after, read):
    policy = policy_of(make_model(kind))
    WeightCommands(policy).weights("bfloat16")
    others = list(read)
    read.clear()
    tensors = SharedWeights(policy, torch.bfloat16).tensors()
    assert read == [], "nothing is gathered before the first tensor is requested"
    for _ in range(left_after or len(SharedWeights(policy, torch.bfloat16).specs())):
        next(tensors)
    tensors.close()
    assert read == ["command weights bfloat16", *others]


def test_all_ranks_gather_an_adapter_only_if_it_can_be_served(read, tmp_path):
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
    assert read == [], "the other ranks would deadlock"


def test_only_the_main_thread_sends_commands_and_only_while_other_ranks_wait(monkeypatch):
    sent: list[str] = []
    store = SimpleNamespace(set=lambda _, command: sent.append(command), delete_key=lambda *_: None)
    monkeypatch.setattr(comm, "_watch", SimpleNamespace(commands=0, rank0_alone=False, store=store))
    with pytest.raises(AssertionError, match="weights: .*commands"):
        comm.send_command("weights")
    errors: list[str] = []

    def send() -> None:
        try:
            comm.send_command("weights")
        except AssertionError as error:
            errors.append(str(error))

    with comm.rank0_alone():
        comm.send_command("weights")
        thread = threading.Thread(target=send)
        thread.start()
        thread.join()
    assert len(errors) == 1 and "main thread" in errors[0] and sent == ["weights", "done"]
    with pytest.raises(KeyError), comm.rank0_alone():
        raise KeyError
    assert sent[2:] == ["failed"], "the other ranks would wait until the launcher kills them"


def test_four_ranks_receive_only_their_own_groups_and_each_prompt_once(tmp_path):
    """tests/ranks/handover.py checks the contents; here are the bytes that each rank received."""
    done = run_ranks("-m", "tests.ranks.handover", cwd=tmp_path, num_ranks=4)
    assert done.returncode == 0, done.stderr[-4000:]
    checks = {check["check"]: check for check in map(json.loads, done.stdout.splitlines())}
    tokens = [len(c.ids) for c in handover.COMPLETIONS]
    per_prompt, per_token = 3 * handover.PROMPT, 3 + 9  # pickles of small ints and floats
    total = per_token * sum(tokens)

    def received(check: str, name: str) -> list[int]:
        return [each.get(name, 0) for each in checks[check]["received"]]

    for check in ("stay", "to rank 0"):
        asked = received(check, "requests")
        assert asked[0] == 0  # six requests each, for two of the six prompts
        assert all(2 * per_prompt < count < 2 * per_prompt + 1000 for count in asked[1:]), asked
        assert max(received(check, "groups of the step")) < 1000  # no prompts: every rank has the data
        assert received(check, "completions")[1:] == [0, 0, 0]
    assert received("stay", "completions")[0] < 18 * 100 < per_token * sum(tokens[6:])
    assert received("to rank 0", "completions")[0] > per_token * sum(tokens[6:])
    for check in ("stay", "to rank 0", "servers"):
        groups = received(check, "tokens of the step")
        assert sum(groups) < 1.2 * total and max(groups) < 0.5 * total, (check, groups, total)
    assert received("servers", "tokens of the step")[0] == received("to rank 0", "tokens of the step")[0] == 0
    assert checks["wait"]["calls"] == [[], *[["wait", "get"]] * 3]
    assert [early > 0.1 for each in checks["wait"]["early"] for early in each] == [True]


def test_rewards_that_other_ranks_cannot_compute_are_rejected():
    class Stateful:
        __name__ = "stateful"

        def __call__(self, completions: list[str]) -> list[float]:
            return [1.0] * len(completions)

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    for spec in (Stateful(), "nemo_gym:verify"):
        with pytest.raises(ValueError, match="^reward_on_all_ranks=True: reward_funcs=.* state, "):
            AllRanksRewards(load_rewards([spec]))
    rewards = AllRanksRewards(load_rewards(["exact_match", "env"]))
    cases = {"client": {"columns": {"turns": 1, "client": print}}, "messages": {"messages": [print]}}
    for name, fields in cases.items():
        completion = replace(handover.COMPLETIONS[0], **fields)
        with pytest.raises(ValueError, match=f"^reward_on_all_ranks=True: '{name}' "):
            rewards.submit(handover.PROMPTS[:1], [completion])


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


REJECTED = [
    ("cuda", {"colocate": True}, {}, "vllm.colocate=True: .* 4 train; .*--vllm.devices or --vllm.url"),
    ("cuda", {"colocate": False}, {"backend": "ipc"}, "sync.backend=ipc: .* 4 .*--sync.backend process_group"),
    ("cpu", {}, {"backend": "process_group"}, "parallel.timeout_s=30: .* 60 s .*--sync.backend filesystem"),
]


def test_settings_of_servers_that_do_not_work_with_several_ranks_are_rejected(monkeypatch):
    """A short time limit only if ranks wait for a server."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    for device, vllm, sync, message in REJECTED:
        cfg = settings(vllm=VllmConfig(**vllm), sync=SyncConfig(**sync), timeout_s=30.0)
        with pytest.raises(ValueError, match=f"^{message}$"):
            servers.check_several_ranks(cfg, policy_on(device))
    servers.check_several_ranks(settings(vllm=VllmConfig(), timeout_s=30.0), policy_on("cpu", is_lora=True))
    filesystem = SyncConfig(backend="filesystem")
    servers.check_several_ranks(settings(vllm=VllmConfig(), sync=filesystem, timeout_s=30.0), policy_on("cpu"))


def test_servers_need_gpus_that_no_rank_trains_on():
    servers.check_gpus(VllmConfig(replicas=2, devices=(6, 7)), 6, 8)
    servers.check_gpus(VllmConfig(replicas=2), 6, 8)
    servers.check_gpus(VllmConfig(url=("http://127.0.0.1:8000",)), 8, 8)
    with pytest.raises(ValueError, match=r"^vllm.devices=5 7: GPU 5 "):
        servers.check_gpus(VllmConfig(replicas=2, devices=(5, 7)), 6, 8)
    with pytest.raises(ValueError, match=r"^vllm.replicas=2: needs 4 GPUs .* 6 "):
        servers.check_gpus(VllmConfig(replicas=2, tensor_parallel_size=2), 6, 8)
