"""A model's tensors as its files hold them, one at a time, so that no process holds a full model.

exported = ExportedModel(lm, dtype, get)         # get(name) returns a full tensor of lm
for name, tensor in exported.tensors(): ...      # "model.layers.0.self_attn.q_proj.weight", adapter merged
write_model(folder, exported)                    # files of at most 5 GB, and their index
"""

from __future__ import annotations

import copy
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

LIMIT = 5 * 10**9  # bytes of one file
LAYER = re.compile(r"^(.*?\.\d+)\.")  # model.layers.12


class ExportedModel:
    """The tensors of a model folder of `lm`: adapter merged, checkpoint names and layout, floats in `dtype`.

    `lm` is a transformers model, with or without adapters, on any device: only its names and shapes are used. `get`
    takes a name of its state_dict and returns the full tensor; for a sharded model all ranks call it in the same order.
    W + scaling B A is computed in float32 and rounded once. A 4-bit layer has the one name "weight", dequantised.
    """

    def __init__(self, lm: Any, dtype: torch.dtype, get: Callable[[str], Tensor]) -> None:
        self.lm, self.dtype, self.get = lm, dtype, get
        self.layers = lora_layers(lm)
        if self.layers:
            refuse_others(lm.peft_config[ADAPTER])
        self.names = dict(self._names())
        shapes = packed_as_weights(lm, lm.state_dict())
        # Of a sharded tensor too, the full shape.
        self.meta = {
            name: torch.empty(shapes[own].shape, dtype=shapes[own].dtype, device="meta")
            for name, own in self.names.items()
        }
        self.converts = not same_layout(lm, self.meta)

    def specs(self) -> dict[str, Spec]:
        named = self._in_checkpoint(iter(self.meta.items()))
        return {name: Spec(tuple(tensor.shape), self._stored(tensor)) for name, tensor in named}

    @torch.no_grad()  # as a decorator it is active only while the generator runs, which may be abandoned half-way
    def tensors(self) -> Generator[tuple[str, Tensor], None, None]:
        for name, tensor in self._in_checkpoint((name, self._merged(name)) for name in self.names):
            yield name, tensor.to(self._stored(tensor))

    def _names(self) -> Iterator[tuple[str, str]]:
        """(name without an adapter, name here); of tied tensors, the first."""
        ignored = [re.compile(pattern) for pattern in getattr(self.lm, "_keys_to_ignore_on_save", None) or ()]
        seen: set[int] = set()
        for own, tensor in packed_as_weights(self.lm, self.lm.state_dict(keep_vars=True)).items():
            name = own.replace(".base_layer.", ".").replace(f".modules_to_save.{ADAPTER}.", ".")
            inner = ".lora_" in own or ".original_module." in own or ".modules_to_save." in name
            if inner or any(pattern.search(name) for pattern in ignored) or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            yield name, own

    def _merged(self, name: str) -> Tensor:
        weight = self.get(self.names[name])
        layer = self.layers.get(name)
        if layer is None:
            return weight
        assert not layer.merged, f"{name}: an adapter is merged in place"
        is_embedding = ADAPTER in layer.lora_embedding_A
        factor = f"lora_embedding_{{}}.{ADAPTER}" if is_embedding else f"lora_{{}}.{ADAPTER}.weight"
        a, b = (self.get(f"{name.removesuffix('weight')}{factor.format(x)}").float() for x in "AB")
        delta = (b @ a).T if is_embedding or layer.fan_in_fan_out else b @ a
        return weight.float() + delta * layer.scaling[ADAPTER]

    def _stored(self, tensor: Tensor) -> torch.dtype:
        return self.dtype if tensor.is_floating_point() else tensor.dtype

    def _in_checkpoint(self, named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Convert models whose file layout differs from memory (fused experts), a block at a time."""
        return block_by_block(self.lm, named) if self.converts else named


def packed_as_weights(lm: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state_dict of `lm` whose 4-bit layers have a weight, on the meta device, instead of codes and absmax."""
    layers = {name: module for name, module in lm.named_modules() if isinstance(module, Linear4bit)}
    found = {}
    for name, tensor in state.items():
        prefix, _, leaf = name.rpartition(".")
        if prefix in layers and leaf == "codes":
            layer = layers[prefix]
            found[f"{prefix}.weight"] = torch.empty(layer.shape, dtype=layer.dtype, device="meta")
        elif prefix not in layers or leaf != "absmax":
            found[name] = tensor
    return found


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
            raise UserError(
                f"{name}={value}: an adapter with it cannot be served by vLLM; train one without, or use "
                "--rollout.engine local"
            )
    if getattr(config, "layer_replication", None):
        raise UserError("layer_replication: such an adapter cannot be served by vLLM; use --rollout.engine local")


def refuse_others(config: Any) -> None:
    """Refuse an adapter that is more than W + scaling B A; a fully trained head is allowed."""
    config = copy.copy(config)
    config.modules_to_save = None
    try:
        refuse_unmergeable(config)
    except ValueError as error:
        setting = str(error).partition(":")[0]
        raise UserError(f"{setting}: such an adapter is not merged here; export it as it is, merge by peft") from None


def write_model(folder: Path, exported: ExportedModel, limit: int = LIMIT) -> None:
    """Write the weights of a model folder, one tensor in memory at a time."""
    specs = exported.specs()
    files: list[dict[str, Spec]] = [{}]
    for name, spec in specs.items():
        held = sum(other.num_bytes for other in files[-1].values())
        wider = any(other.dtype.itemsize < spec.dtype.itemsize for other in files[-1].values())  # it would not align
        if files[-1] and (held + spec.num_bytes > limit or wider):
            files.append({})
        files[-1][name] = spec
    source = (tensor for _, tensor in exported.tensors())
    weight_map = {}
    for number, held in enumerate(files, 1):
        file = ONE_FILE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write_tensors(folder / file, held, (next(source) for _ in held))
        weight_map |= dict.fromkeys(held, file)
    if len(files) > 1:
        total = sum(spec.num_bytes for spec in specs.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
