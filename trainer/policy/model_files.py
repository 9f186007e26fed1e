"""Model folders read and written one tensor at a time, so that no process holds a full model.

files = model_tensors("Qwen/Qwen3-0.6B")                        # a TensorFiles: reads slices
export = ExportedModel(lm, dtype, get)                             # get(name) returns a full tensor of lm
write_model(folder, export.specs(), export.tensors())           # files of at most 5 GB, and their index
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.files.tensor_files import Spec, write_tensors
from trainer.policy.adapters import ADAPTER
from trainer.policy.load import INDEX, ONE_FILE, same_layout
from trainer.policy.weights import block_by_block, lora_layers, refuse_unmergeable

LIMIT = 5 * 10**9  # bytes of one file


class ExportedModel:
    """The tensors of a model folder of `lm`: adapter merged, checkpoint names and layout, floats in `dtype`.

    `lm` is a transformers model, with or without adapters, on any device: only its names and shapes are used. `get`
    takes a name of its state_dict and returns the full tensor; for a sharded model all ranks call it in the same order.
    W + scaling B A is computed in float32 and rounded once.
    """

    def __init__(self, lm: Any, dtype: torch.dtype, get: Callable[[str], Tensor]) -> None:
        self.lm, self.dtype, self.get = lm, dtype, get
        self.layers = lora_layers(lm)
        if self.layers:
            refuse_others(lm.peft_config[ADAPTER])
        self.names = dict(self._names())
        shapes = lm.state_dict()
        self.meta = {name: torch.empty_like(shapes[own], device="meta") for name, own in self.names.items()}

    def specs(self) -> dict[str, Spec]:
        named = self._in_checkpoint(iter(self.meta.items()))
        return {name: Spec(tuple(tensor.shape), self._stored(tensor)) for name, tensor in named}

    @torch.no_grad()
    def tensors(self) -> Iterator[Tensor]:
        for _, tensor in self._in_checkpoint((name, self._merged(name)) for name in self.names):
            yield tensor.to(self._stored(tensor))

    def _names(self) -> Iterator[tuple[str, str]]:
        """(name without an adapter, name here); of tied tensors, the first."""
        ignored = [re.compile(pattern) for pattern in getattr(self.lm, "_keys_to_ignore_on_save", None) or ()]
        seen: set[int] = set()
        for own, tensor in self.lm.state_dict(keep_vars=True).items():
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
        module = name.removesuffix(".weight")
        a, b = (self.get(f"{module}.lora_{x}.{ADAPTER}.weight").float() for x in "AB")
        delta = (b @ a).T if layer.fan_in_fan_out else b @ a
        return weight.float() + delta * layer.scaling[ADAPTER]

    def _stored(self, tensor: Tensor) -> torch.dtype:
        return self.dtype if tensor.is_floating_point() else tensor.dtype

    def _in_checkpoint(self, named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Convert models whose file layout differs from memory (fused experts), a block at a time."""
        return named if same_layout(self.lm, self.meta) else block_by_block(self.lm, named)


def refuse_others(config: Any) -> None:
    """Refuse an adapter that is more than W + scaling B A; a fully trained head is allowed."""
    config = copy.copy(config)
    config.modules_to_save = None
    try:
        refuse_unmergeable(config)
    except ValueError as error:
        setting = str(error).partition(":")[0]
        raise ValueError(f"{setting}: such an adapter is not merged here; export it as it is, merge by peft") from None


def write_model(folder: Path, specs: dict[str, Spec], tensors: Iterable[Tensor], limit: int = LIMIT) -> None:
    """Write the weights of a model folder from tensors in the order of `specs`, one in memory at a time."""
    files: list[dict[str, Spec]] = [{}]
    for name, spec in specs.items():
        held = sum(other.num_bytes for other in files[-1].values())
        wider = any(other.dtype.itemsize < spec.dtype.itemsize for other in files[-1].values())  # it would not align
        if files[-1] and (held + spec.num_bytes > limit or wider):
            files.append({})
        files[-1][name] = spec
    source = iter(tensors)
    weight_map = {}
    for number, held in enumerate(files, 1):
        file = ONE_FILE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write_tensors(folder / file, held, (next(source) for _ in held))
        weight_map |= dict.fromkeys(held, file)
    if len(files) > 1:
        total = sum(spec.num_bytes for spec in specs.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
