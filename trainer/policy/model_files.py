"""Stream a model's tensors in file layout, one at a time, so that no rank needs memory for a full model.

exported = ExportedModel(lm, dtype, get)         # get(name) returns a full tensor of lm
for name, tensor in exported.tensors(): ...      # "model.layers.0.self_attn.q_proj.weight", adapter merged
write_model(folder, exported)                    # files of at most 5 GB, and their index
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from data.errors import UserError
from kernels.nf4 import Linear4bit
from rollout.tensor_header import Spec
from trainer.files.tensor_files import write_tensors
from trainer.policy.adapters import ADAPTER
from trainer.policy.load import INDEX, ONE_FILE, same_layout

LIMIT = 5 * 10**9  # maximum bytes per file
PLAIN = {"use_dora": False, "bias": "none", "lora_bias": False, "modules_to_save": None,
         "trainable_token_indices": None, "target_parameters": None, "layer_replication": None}  # fmt: skip
LAYER = re.compile(r"^(.*?\.\d+)\.")  # model.layers.12


class ExportedModel:
    """The tensors of a model folder for `lm`: adapter merged, checkpoint names and layout, floats in `dtype`.

    `lm` is a transformers model, with or without adapters, on any device: only its names and shapes are used. `get`
    takes a name of its state_dict and returns the full tensor; for a sharded model all ranks call it in the same order.
    W + scaling B A is computed in float32 and rounded once. A 4-bit layer has one tensor, the dequantised "weight".
    """

    def __init__(self, lm: Any, dtype: torch.dtype, get: Callable[[str], Tensor]) -> None:
        self.lm, self.dtype, self.get = lm, dtype, get
        self.layers = lora_layers(lm)
        if self.layers and (setting := unmergeable_setting(lm.peft_config[ADAPTER], ignore="modules_to_save")):
            raise UserError(f"{setting}: strop cannot merge this adapter; export it unmerged and merge it with peft")
        self.names = dict(self._names())
        tensors = packed_as_weights(lm, lm.state_dict())
        # The full shape, even for a sharded tensor.
        self.meta = {
            name: torch.empty(tensors[key].shape, dtype=tensors[key].dtype, device="meta")
            for name, key in self.names.items()
        }
        self.converts = not same_layout(lm, self.meta)

    def specs(self) -> dict[str, Spec]:
        named = self._in_checkpoint(iter(self.meta.items()))
        return {name: Spec(tuple(tensor.shape), self._stored(tensor)) for name, tensor in named}

    @torch.no_grad()  # as a decorator, active only while the generator runs, which the caller may abandon
    def tensors(self) -> Generator[tuple[str, Tensor], None, None]:
        for name, tensor in self._in_checkpoint((name, self._merged(name)) for name in self.names):
            yield name, tensor.to(self._stored(tensor))

    def _names(self) -> Iterator[tuple[str, str]]:
        """Yield (name without adapter, key in state_dict); tied tensors once, under their first name."""
        ignored = [re.compile(pattern) for pattern in getattr(self.lm, "_keys_to_ignore_on_save", None) or ()]
        seen: set[int] = set()
        for key, tensor in packed_as_weights(self.lm, self.lm.state_dict(keep_vars=True)).items():
            name = key.replace(".base_layer.", ".").replace(f".modules_to_save.{ADAPTER}.", ".")
            inner = ".lora_" in key or ".original_module." in key or ".modules_to_save." in name
            if inner or any(pattern.search(name) for pattern in ignored) or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            yield name, key

    def _merged(self, name: str) -> Tensor:
        weight = self.get(self.names[name])
        layer = self.layers.get(name)
        if layer is None:
            return weight
        assert not layer.merged, f"{name}: the adapter is already merged in place"
        is_embedding = ADAPTER in layer.lora_embedding_A
        factor = f"lora_embedding_{{}}.{ADAPTER}" if is_embedding else f"lora_{{}}.{ADAPTER}.weight"
        a, b = (self.get(f"{name.removesuffix('weight')}{factor.format(x)}").float() for x in "AB")
        delta = (b @ a).T if is_embedding or layer.fan_in_fan_out else b @ a
        return weight.float() + delta * layer.scaling[ADAPTER]

    def _stored(self, tensor: Tensor) -> torch.dtype:
        return self.dtype if tensor.is_floating_point() else tensor.dtype

    def _in_checkpoint(self, named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Convert models whose file layout differs from memory (fused experts), one block at a time."""
        return block_by_block(self.lm, named) if self.converts else named


def packed_as_weights(lm: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a state_dict of `lm` with a meta weight instead of codes and absmax for each 4-bit layer."""
    layers = {name: module for name, module in lm.named_modules() if isinstance(module, Linear4bit)}
    tensors = {}
    for name, tensor in state.items():
        prefix, _, leaf = name.rpartition(".")
        if prefix in layers and leaf == "codes":
            layer = layers[prefix]
            tensors[f"{prefix}.weight"] = torch.empty(layer.shape, dtype=layer.dtype, device="meta")
        elif prefix not in layers or leaf != "absmax":
            tensors[name] = tensor
    return tensors


def block_by_block(lm: Any, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield weights in file layout, as save_pretrained writes them: it may fuse or split tensors of a decoder layer."""
    from transformers.core_model_loading import revert_weight_conversion

    group: dict[str, Tensor] = {}
    current: str | None = None
    for name, tensor in named:
        match = LAYER.match(name)
        layer = match.group(1) if match else None
        if group and layer != current:
            yield from revert_weight_conversion(lm, group).items()
            group = {}
        current = layer
        group[name] = tensor
    yield from revert_weight_conversion(lm, group).items()


def lora_layers(lm: nn.Module) -> dict[str, Any]:
    """Return the adapted layers, keyed by the name of their weight."""
    from peft.tuners.lora import LoraLayer

    return {
        f"{name}.weight": module
        for name, module in lm.named_modules()
        if isinstance(module, LoraLayer) and ADAPTER in module.scaling
    }


def unmergeable_setting(config: Any, ignore: str = "") -> str | None:
    """Return `name=value` of a setting with which an adapter is more than W + scaling B A, or None."""
    for name, off in PLAIN.items():
        value = getattr(config, name, off)
        if value and value != off and name != ignore:
            return f"{name}={value}"
    return None


def write_model(folder: Path, exported: ExportedModel, limit: int = LIMIT) -> None:
    """Write the weights of a model folder, one tensor in memory at a time."""
    specs = exported.specs()
    files: list[dict[str, Spec]] = [{}]
    for name, spec in specs.items():
        size = sum(other.num_bytes for other in files[-1].values())
        wider = any(other.dtype.itemsize < spec.dtype.itemsize for other in files[-1].values())  # would be misaligned
        if files[-1] and (size + spec.num_bytes > limit or wider):
            files.append({})
        files[-1][name] = spec
    tensors = (tensor for _, tensor in exported.tensors())
    weight_map = {}
    for i, contents in enumerate(files, 1):
        file = ONE_FILE if len(files) == 1 else f"model-{i:05d}-of-{len(files):05d}.safetensors"
        write_tensors(folder / file, contents, (next(tensors) for _ in contents))
        weight_map |= dict.fromkeys(contents, file)
    if len(files) > 1:
        total = sum(spec.num_bytes for spec in specs.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
