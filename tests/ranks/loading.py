"""Models loaded in shards vs. the same models loaded in full; called by tests/ranks/sharded.py on two ranks."""

from __future__ import annotations

import shutil
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rollout.model_folder import resolve_model
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


class Allocations(TorchDispatchMode):
    """Counts the bytes of tensors that are allocated inside, now and at the peak."""

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
        address, size = storage.data_ptr(), storage.nbytes()
        if address == 0 or address in self.known:
            return
        self.known.add(address)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.forget, address, size)

    def forget(self, address: int, size: int) -> None:
        self.known.discard(address)
        self.now -= size


def untied_model(folder: Path) -> str:
    """The tiny model with an untied head, in two files."""
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


def load(
    model: ModelConfig, lora: LoraConfig, parallel: dict[str, Any], allocations: Allocations, *, with_reference: bool
) -> Policy:
    """Load a policy and count the allocations of loading, without the passes that check the model."""
    torch.manual_seed(5)
    with allocations:
        policy = load_policy(model, lora, CPU, with_reference=with_reference)
    return parallelize(ParallelConfig(**parallel), policy)


def counted_fill(allocations: Allocations) -> Any:
    def fill(*args: Any) -> None:
        with allocations:
            meta_load.fill(*args)

    return fill


def compare(
    name: str, lora: LoraConfig, parallel: dict[str, Any], *, model: str = "builtin:tiny", with_reference: bool = False,
    **settings: Any,
) -> None:  # fmt: skip
    cfg = ModelConfig(model=model, **settings)
    with one_process():
        alone = load(cfg, lora, {}, Allocations(), with_reference=with_reference)
    allocations = Allocations()
    parallel_module.fill = counted_fill(allocations)
    policy = load(cfg, lora, parallel, allocations, with_reference=with_reference)
    total = 0
    for loaded, full in ((policy.model, alone.model), (policy.reference, alone.reference)):
        if full is None:
            assert loaded is None
            continue
        tensors, expected = loaded.state_dict(), full.state_dict()
        assert tensors.keys() == expected.keys(), tensors.keys() ^ expected.keys()
        for key, value in expected.items():
            gathered = gather(tensors[key])
            assert gathered.dtype == value.dtype and torch.equal(gathered, value), key
        for (key, buffer), (_, value) in zip(loaded.named_buffers(), full.named_buffers(), strict=True):
            assert torch.equal(buffer, value) and buffer.dtype == value.dtype, key
        assert [p.requires_grad for p in loaded.parameters()] == [p.requires_grad for p in full.parameters()]
        tied = [lm.lm_head.weight is lm.model.embed_tokens.weight for lm in (causal_lm(loaded), causal_lm(full))]
        assert tied == [model == "builtin:tiny"] * 2, tied
        total += sum(p.numel() * p.element_size() for p in full.parameters())
        if parallel["mode"] == "fsdp":
            sharded = sum(local(p).numel() * p.element_size() for p in loaded.parameters())
            assert sharded < 0.55 * sum(p.numel() * p.element_size() for p in full.parameters())
    if parallel["mode"] == "fsdp":
        assert allocations.peak < 0.75 * total, (name, allocations.peak, total)
    if is_main():
        print(f"{name}: peak {allocations.peak / total:.2f} of the model", flush=True)
    of_all(None, name)


def check_loading(folder: Path) -> None:
    """Check all weights with and without reference, LoRA and FSDP; a sharded rank never allocates a full model."""
    compare("fsdp with reference", LoraConfig(), {"mode": "fsdp"}, with_reference=True)
    compare("fsdp lora", LoraConfig(r=4), {"mode": "fsdp"})
    part = ("model.layers.1", "lm_head")
    compare(
        "fsdp untied", LoraConfig(), {"mode": "fsdp"}, model=untied_model(folder / "untied"), trained_parameters=part
    )
    compare("replicate", LoraConfig(), {"mode": "replicate"})
