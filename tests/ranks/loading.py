"""Models loaded in shards against the same models loaded whole; called by tests/ranks/sharded.py on two processes."""

from __future__ import annotations

import shutil
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rollout.servers.model_folder import resolve_model
from tests.ranks.worker import one_process
from trainer.config.blocks import LoraConfig, ModelConfig, ParallelConfig
from trainer.parallel.comm import is_main, of_all
from trainer.parallel.dtensor import gather, is_dtensor, local
from trainer.policy import load as meta_load
from trainer.policy import sharding as parallel_module
from trainer.policy.load import load_policy
from trainer.policy.logps import Policy, causal_lm
from trainer.policy.sharding import parallelize

TINY = resolve_model("builtin:tiny")
CPU = torch.device("cpu")


class Held(TorchDispatchMode):
    """Bytes of memory that tensors made inside hold together, and the most there were at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not is_dtensor(tensor) and not tensor.is_meta:
                self.count(tensor.untyped_storage())
        return result

    def count(self, storage: Any) -> None:
        place, size = storage.data_ptr(), storage.nbytes()
        if place == 0 or place in self.known:
            return
        self.known.add(place)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.forget, place, size)

    def forget(self, place: int, size: int) -> None:
        self.known.discard(place)
        self.now -= size


def untied_model(folder: Path) -> str:
    """The tiny model with a head of its own, in two files."""
    from transformers import AutoModelForCausalLM

    if is_main():
        lm = AutoModelForCausalLM.from_pretrained(TINY)
        lm.config.tie_word_embeddings = False
        lm.lm_head.weight = torch.nn.Parameter(lm.lm_head.weight.detach().flip(0) * 0.9)
        shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.py", "__pycache__"))
        lm.save_pretrained(folder, max_shard_size="1MB")
        assert len(list(folder.glob("*.safetensors"))) > 1
    of_all(None, "untied model")
    return str(folder)


def load(model: str, lora: LoraConfig, parallel: dict[str, Any], held: Held, *, with_reference: bool) -> Policy:
    """Counts what loading makes, not the passes that check it."""
    torch.manual_seed(5)
    with held:
        policy = load_policy(ModelConfig(model=model), lora, CPU, with_reference=with_reference)
    return parallelize(ParallelConfig(**parallel), policy)


def counted_fill(held: Held) -> Any:
    def fill(*args: Any) -> None:
        with held:
            meta_load.fill(*args)

    return fill


def compare(
    name: str, lora: LoraConfig, parallel: dict[str, Any], *, model: str = "builtin:tiny", with_reference: bool = False
) -> None:
    with one_process():
        alone = load(model, lora, {}, Held(), with_reference=with_reference)
    held = Held()
    parallel_module.fill = counted_fill(held)
    policy = load(model, lora, parallel, held, with_reference=with_reference)
    total = 0
    for ours, theirs in ((policy.model, alone.model), (policy.reference, alone.reference)):
        if theirs is None:
            assert ours is None
            continue
        mine, want = ours.state_dict(), theirs.state_dict()
        assert mine.keys() == want.keys(), mine.keys() ^ want.keys()
        for key, value in want.items():
            found = gather(mine[key])
            assert found.dtype == value.dtype and torch.equal(found, value), key
        for (key, found), (_, value) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
            assert torch.equal(found, value) and found.dtype == value.dtype, key
        assert [p.requires_grad for p in ours.parameters()] == [p.requires_grad for p in theirs.parameters()]
        tied = [lm.lm_head.weight is lm.model.embed_tokens.weight for lm in (causal_lm(ours), causal_lm(theirs))]
        assert tied == [model == "builtin:tiny"] * 2, tied
        total += sum(p.numel() * p.element_size() for p in theirs.parameters())
        if parallel["mode"] == "fsdp":
            kept = sum(local(p).numel() * p.element_size() for p in ours.parameters())
            assert kept < 0.55 * sum(p.numel() * p.element_size() for p in theirs.parameters())
    if parallel["mode"] == "fsdp":
        assert held.peak < 0.75 * total, (name, held.peak, total)
    if is_main():
        print(f"{name}: peak {held.peak / total:.2f} of the model", flush=True)
    of_all(None, name)


def check_loading(folder: Path) -> None:
    """Full with its reference, LoRA, and a copy on each process: the same numbers, and no whole model in shards."""
    compare("fsdp with reference", LoraConfig(), {"mode": "fsdp"}, with_reference=True)
    compare("fsdp lora", LoraConfig(r=4), {"mode": "fsdp"})
    compare("fsdp untied", LoraConfig(), {"mode": "fsdp"}, model=untied_model(folder / "untied"))
    compare("replicate", LoraConfig(), {"mode": "replicate"})
