"""The policy's weights for servers: checkpoint names, serving dtype, the adapter merged or in its own folder.

    source = PolicyWeights(policy, torch.bfloat16)
    for name, tensor in source.tensors(): ...     # "model.layers.0.self_attn.q_proj.weight", new or shared memory
    source.save_adapter(Path("v000012"))          # for vLLM's LoRA, if the policy has an adapter

An adapter is merged into new tensors, W + scaling B A in float32 and rounded once; the policy itself is not changed.
Sharded weights are gathered one tensor at a time, and all ranks must read them together (trainer/rl/lend.py).
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollout.sync.base import TensorSpec, synchronize
from trainer.files.tensor_files import Spec, file_header
from trainer.parallel.comm import inside
from trainer.parallel.dtensor import gather, is_dtensor, reshard
from trainer.policy.adapters import ADAPTER
from trainer.policy.load import same_layout
from trainer.policy.logps import Policy, causal_lm

LAYER = re.compile(r"^(.*?\.\d+)\.")  # model.layers.12


class PolicyWeights:
    """WeightSource over a policy under training."""

    def __init__(self, policy: Policy, dtype: torch.dtype) -> None:
        self.policy = policy
        self.dtype = dtype
        self.is_lora = policy.is_lora
        self._adapter: AdapterFile | None = None
        if self.is_lora:
            refuse_unmergeable(policy.model.peft_config[ADAPTER])
        lm = causal_lm(policy.model)
        plain = dict(self._shapes())
        self._converts = not same_layout(lm, plain)

    def specs(self) -> list[TensorSpec]:
        named = self._in_checkpoint(self._shapes())
        return [TensorSpec(name, tuple(tensor.shape), self._serving(tensor)) for name, tensor in named]

    @torch.no_grad()
    def tensors(self) -> Generator[tuple[str, Tensor], None, None]:
        # The generator may be abandoned half-way: as a decorator, no_grad is active only while it runs.
        for name, tensor in self._in_checkpoint(self._merged()):
            yield name, tensor.to(self._serving(tensor))

    def save_adapter(self, folder: Path) -> None:
        """Write the folder that peft's save_pretrained writes, several times faster: it may be due at every step."""
        folder.mkdir(parents=True, exist_ok=True)
        self.adapter.write(folder)

    @property
    def adapter(self) -> AdapterFile:
        assert self.is_lora, "an adapter file is for a policy with an adapter"
        if self._adapter is None:
            self._adapter = AdapterFile(self.policy, self.dtype)
        return self._adapter

    def _serving(self, tensor: Tensor) -> torch.dtype:
        return self.dtype if tensor.is_floating_point() else tensor.dtype

    def _plain(self) -> Iterator[tuple[str, Tensor]]:
        """Base weights by their names without an adapter; of tied tensors, the first."""
        lm = causal_lm(self.policy.model)
        ignored = [re.compile(pattern) for pattern in getattr(lm, "_keys_to_ignore_on_save", None) or ()]
        seen: set[int] = set()
        for name, tensor in lm.state_dict(keep_vars=True).items():
            name = name.replace(".base_layer.", ".")
            if ".lora_" in name or any(pattern.search(name) for pattern in ignored) or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            yield name, tensor.detach()

    def _shapes(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._plain():
            yield name, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")  # the full shape, also of a shard

    def _merged(self) -> Iterator[tuple[str, Tensor]]:
        layers = lora_layers(causal_lm(self.policy.model))
        for name, tensor in self._plain():
            layer = layers.get(name)
            if layer is None:
                tensor = tensor.to(self._serving(tensor))  # half the bytes in bfloat16
                yield name, gather_on_device(tensor, self.policy, name)
                continue
            assert not layer.merged, f"{name}: an adapter is merged in place"
            tensor = gather_on_device(tensor, self.policy, name).float()
            with gathered_factors(layer, self.policy, name):
                tensor = tensor + layer.get_delta_weight(ADAPTER).float()
            yield name, tensor

    def _in_checkpoint(self, named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Names and layout of a checkpoint, one decoder layer at a time."""
        return block_by_block(causal_lm(self.policy.model), named) if self._converts else named


class AdapterFile:
    """One safetensors file and its config, rewritten with new values by one copy off the device and one write, as
    per-tensor overhead would cost more than the bytes."""

    def __init__(self, policy: Policy, dtype: torch.dtype) -> None:
        config = policy.model.peft_config[ADAPTER]
        refuse_unservable(config)
        reshard(policy.model)  # parameters must be the shards, whose tensors do not change
        self.policy = policy
        named = policy.model.named_parameters()
        state = {name.replace(f".{ADAPTER}", ""): p for name, p in named if ".lora_" in name and f".{ADAPTER}" in name}
        self.parameters, self.dtype = list(state.values()), dtype
        self.header = file_header({name: Spec(tuple(p.shape), dtype) for name, p in state.items()})
        on_cuda = policy.device.type == "cuda"
        size = sum(p.numel() for p in self.parameters)
        self.values = torch.empty(size, dtype=dtype, pin_memory=on_cuda)  # (size,) pinned, for fast copies
        settings = config.to_dict() | {"base_model_name_or_path": policy.source, "inference_mode": True}
        settings = {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}
        self.config = json.dumps(settings, indent=2, sort_keys=True) + "\n"

    @torch.no_grad()
    def read(self) -> Tensor:  # (size,)
        """All values, concatenated; a collective if they are sharded."""
        parts = (gather_on_device(p.detach().to(self.dtype), self.policy, "adapter") for p in self.parameters)
        return torch.cat([part.flatten() for part in parts])

    def write(self, folder: Path) -> None:
        # Rounded to the serving dtype, as the server would.
        self.values.copy_(self.read())
        with (folder / "adapter_model.safetensors").open("wb") as file:
            file.write(self.header)
            file.write(self.values.view(torch.uint8).numpy())
        (folder / "adapter_config.json").write_text(self.config, encoding="utf-8")


def gather_on_device(tensor: Tensor, policy: Policy, name: str) -> Tensor:
    """All of a weight on this rank's device; a collective if it is sharded."""
    if not is_dtensor(tensor):
        return tensor
    with inside(f"weights for servers: {name}"):
        gathered = gather(tensor.to(policy.device))  # NCCL cannot send shards that are in main memory
        synchronize(policy.device)
    return gathered


@contextlib.contextmanager
def gathered_factors(layer: Any, policy: Policy, name: str) -> Iterator[None]:
    """Gather A and B of an adapted layer, so that peft can multiply them; then restore the shards."""
    linear = [(factor[ADAPTER], "weight") for factor in (layer.lora_A, layer.lora_B) if ADAPTER in factor]
    embedding = [(f, ADAPTER) for f in (layer.lora_embedding_A, layer.lora_embedding_B) if ADAPTER in f]
    kept = [(module, key, p) for module, key in linear + embedding if is_dtensor(p := getattr(module, key))]
    for module, key, p in kept:
        setattr(module, key, nn.Parameter(gather_on_device(p.detach(), policy, name), requires_grad=False))
    try:
        yield
    finally:
        for module, key, p in kept:
            setattr(module, key, p)


def block_by_block(lm: Any, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Weights in file layout, which may fuse or split the tensors of a decoder layer."""
    group: dict[str, Tensor] = {}
    current: str | None = None
    for name, tensor in named:
        found = LAYER.match(name)
        layer = found.group(1) if found else None
        if group and layer != current:
            yield from as_in_checkpoint(lm, group).items()
            group = {}
        current = layer
        group[name] = tensor
    yield from as_in_checkpoint(lm, group).items()


def as_in_checkpoint(lm: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """What transformers' save_pretrained would write for these weights."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(lm, state)


def lora_layers(lm: nn.Module) -> dict[str, Any]:
    """Adapted layers by the name of their weight."""
    from peft.tuners.lora import LoraLayer

    return {
        f"{name}.weight": module
        for name, module in lm.named_modules()
        if isinstance(module, LoraLayer) and ADAPTER in module.scaling
    }


def refuse_unmergeable(config: Any) -> None:
    """Refuse an adapter that changes more than W + scaling B A."""
    for name, off in (("use_dora", False), ("bias", "none"), ("lora_bias", False), ("modules_to_save", None),
                      ("trainable_token_indices", None), ("target_parameters", None)):  # fmt: skip
        value = getattr(config, name, off)
        if value and value != off:
            raise ValueError(
                f"{name}={value}: an adapter with it cannot be served by vLLM; train one without, or use "
                "--rollout.engine local"
            )
    if getattr(config, "layer_replication", None):
        raise ValueError("layer_replication: such an adapter cannot be served by vLLM; use --rollout.engine local")


def refuse_unservable(config: Any) -> None:
    """Refuse an adapter that can be merged, but that vLLM would load wrongly: it takes one rank and one alpha."""
    for name in ("rank_pattern", "alpha_pattern"):
        value = getattr(config, name, None)
        if value:
            raise ValueError(f"{name}={value}: vLLM would ignore it; use --sync.backend filesystem or process_group")
