"""The policy's weights for servers: checkpoint names, serving dtype, the adapter merged or in a separate folder.

    source = PolicyWeights(policy, torch.bfloat16)
    for name, tensor in source.tensors(): ...     # "model.layers.0.self_attn.q_proj.weight", new or shared memory
    source.save_adapter(Path("v000012"))          # for vLLM's LoRA, if the policy has an adapter

An adapter is merged into new tensors, W + scaling B A in float32 and rounded once; the policy itself does not change.
Sharded weights are gathered one tensor at a time, and all ranks must read them together (trainer/rl/rank0_rollout.py).
"""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path

import torch
from torch import Tensor

from data.errors import UserError
from rollout.sync.base import TensorSpec
from rollout.tensor_header import Spec, file_header
from trainer.parallel.comm import inside
from trainer.parallel.dtensor import gather, is_dtensor, reshard
from trainer.policy.adapters import ADAPTER
from trainer.policy.logps import Policy, causal_lm
from trainer.policy.model_files import ExportedModel, unmergeable_setting


class PolicyWeights:
    """WeightSource for a policy under training."""

    def __init__(self, policy: Policy, dtype: torch.dtype) -> None:
        self.policy, self.dtype, self.is_lora = policy, dtype, policy.is_lora
        self._adapter: AdapterFile | None = None
        self._state: dict[str, Tensor] = {}
        if self.is_lora and (setting := unmergeable_setting(policy.model.peft_config[ADAPTER])):
            raise UserError(
                f"{setting}: vLLM cannot serve this adapter; train without this setting, or use --rollout.engine local"
            )
        self._exported = ExportedModel(causal_lm(policy.model), dtype, self._get)

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec(name, spec.shape, spec.dtype) for name, spec in self._exported.specs().items()]

    def tensors(self) -> Generator[tuple[str, Tensor], None, None]:
        self._state = causal_lm(self.policy.model).state_dict(keep_vars=True)
        return self._exported.tensors()

    def _get(self, name: str) -> Tensor:
        if name not in self._state:  # weight of a 4-bit layer, whose state_dict has codes instead
            return causal_lm(self.policy.model).get_submodule(name.removesuffix(".weight")).weight
        tensor = self._state[name].detach()
        is_merged = ".base_layer." in name or ".lora_" in name  # merged in float32, then rounded once
        if tensor.is_floating_point() and not is_merged:
            tensor = tensor.to(self.dtype)  # before the gather: half the bytes in bfloat16
        return gather_on_device(tensor, self.policy, name)

    def save_adapter(self, folder: Path) -> None:
        """Write the same folder as peft's save_pretrained, but several times faster: it may be needed every step."""
        folder.mkdir(parents=True, exist_ok=True)
        self.adapter.write(folder)

    @property
    def adapter(self) -> AdapterFile:
        assert self.is_lora, "the policy has no adapter"
        if self._adapter is None:
            self._adapter = AdapterFile(self.policy, self.dtype)
        return self._adapter


class AdapterFile:
    """One safetensors file and its config, rewritten by one device-to-host copy and one write: per-tensor overhead
    would cost more than the bytes."""

    def __init__(self, policy: Policy, dtype: torch.dtype) -> None:
        config = policy.model.peft_config[ADAPTER]
        for name in ("rank_pattern", "alpha_pattern"):  # vLLM loads one rank and one alpha
            if value := getattr(config, name, None):
                raise UserError(f"{name}={value}: vLLM would ignore it; use --sync.backend filesystem or process_group")
        reshard(policy.model)  # parameters must be the shards, whose tensors do not change
        self.policy = policy
        named = policy.model.named_parameters()
        state = {name.replace(f".{ADAPTER}", ""): p for name, p in named if ".lora_" in name and f".{ADAPTER}" in name}
        self.parameters, self.dtype = list(state.values()), dtype
        self.header = file_header({name: Spec(tuple(p.shape), dtype) for name, p in state.items()})
        on_cuda = policy.device.type == "cuda"
        size = sum(p.numel() for p in self.parameters)
        self.values = torch.empty(size, dtype=dtype, pin_memory=on_cuda)  # (size,) pinned for fast copies
        settings = config.to_dict() | {"base_model_name_or_path": policy.source, "inference_mode": True}
        settings = {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}
        self.config = json.dumps(settings, indent=2, sort_keys=True) + "\n"

    @torch.no_grad()
    def read(self) -> Tensor:  # (size,)
        """Return all values concatenated; a collective if they are sharded."""
        parts = (gather_on_device(p.detach().to(self.dtype), self.policy, "adapter") for p in self.parameters)
        return torch.cat([part.flatten() for part in parts])

    def write(self, folder: Path) -> None:
        self.values.copy_(self.read())
        with (folder / "adapter_model.safetensors").open("wb") as file:
            file.write(self.header)
            file.write(self.values.view(torch.uint8).numpy())
        (folder / "adapter_config.json").write_text(self.config, encoding="utf-8")


def gather_on_device(tensor: Tensor, policy: Policy, name: str) -> Tensor:
    """Return the full weight on this rank's device; a collective if it is sharded."""
    if not is_dtensor(tensor):
        return tensor
    with inside(f"weights for servers: {name}"):
        return gather(tensor)
