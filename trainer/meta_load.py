"""Models built without their numbers, which are read when it is known which part of them a rank holds.

    lm = load_causal_lm(path, cfg, dtype, device, on_meta=True)
    files = files_of(lm, path)           # None: it is laid out otherwise in its files, and has to be loaded whole
    make_hollow(lm)                      # parameters of the right shape and dtype that take no memory
    ...adapters around it, shards of it...
    fill(lm, files, device)              # memory for what this rank holds, and those slices of the files in it

A hollow parameter is one number seen as a whole tensor (all strides 0). Unlike one on the meta device it lets peft put
adapters beside it that are real, and drawn from the same random numbers as beside a loaded one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.files.tensor_files import Record, TensorFiles, records_of_file
from trainer.parallel.dtensor import local, local_slices

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def model_tensors(path: str) -> TensorFiles:
    """The tensors of a model folder or hub id, as transformers finds them; none is read yet."""
    from transformers.utils import cached_file

    def find(name: str) -> Path | None:
        found = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        return None if found is None else Path(found)

    index = None if find(ONE_FILE) else find(INDEX)
    names = [ONE_FILE] if index is None else sorted(set(json.loads(index.read_text())["weight_map"].values()))
    records: dict[str, Record] = {}
    folder = Path()
    for name in names:
        file = find(name)
        if file is None:
            raise ValueError(f"model={path}: has no {name}")
        folder = file.parent
        records |= records_of_file(folder, name)
    return TensorFiles(folder, records)


def files_of(lm: Any, path: str) -> TensorFiles | None:
    """Files from which each tensor of `lm`, which is on the meta device, can be read by its own name; None: not so."""
    files = model_tensors(path)
    wanted: dict[int, tuple[str, Tensor]] = {}  # of tensors that are one and the same, the first
    for name, tensor in lm.state_dict(keep_vars=True).items():
        wanted.setdefault(id(tensor), (name, tensor))
    named = dict(wanted.values())
    if not same_layout(lm, named):
        return None
    found = [files.records.get(name) for name in named]
    fits = all(r is not None and r.shape == tuple(t.shape) for r, t in zip(found, named.values(), strict=True))
    return files if fits and compute_buffers(lm) else None


def same_layout(lm: Any, named: dict[str, Tensor]) -> bool:
    """Whether files hold these tensors as they are in memory; fused experts, for one, they do not."""
    from transformers.core_model_loading import revert_weight_conversion

    converted = revert_weight_conversion(lm, dict(named))
    return converted.keys() == named.keys() and all(converted[name] is tensor for name, tensor in named.items())


@torch.no_grad()
def compute_buffers(lm: Any) -> bool:
    """Bring what no file holds (the frequencies of rotary positions) off the meta device, as transformers does.

    Whether that was possible: every number must have been written by the model's own initialisation.
    """
    for module in lm.modules():
        names = [name for name in module._non_persistent_buffers_set if module._buffers[name] is not None]
        for name in names:
            buffer = module._buffers[name]
            if not buffer.is_floating_point():
                return False  # no value that says it was never written
            module._buffers[name] = torch.full_like(buffer, torch.nan, device="cpu")
        if names:
            lm._init_weights(module)
        if any(module._buffers[name].isnan().any() for name in names):
            return False
        if any(isinstance(value, Tensor) and value.is_meta for value in vars(module).values()):
            return False
    return True


def make_hollow(lm: nn.Module) -> None:
    """From the meta device into main memory, one number for each tensor."""

    def hollow(tensor: Tensor) -> Tensor:
        return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape) if tensor.is_meta else tensor

    _replace(lm, hollow, {name for name, _ in lm.named_parameters()} | {name for name, _ in lm.named_buffers()})


def to_meta(lm: nn.Module, files: TensorFiles) -> None:
    """Hollow parameters back to the meta device, where sharding costs nothing; adapters stay as they are."""
    _replace(lm, lambda tensor: torch.empty_like(tensor, device="meta"), set(_from_files(lm, files)))


@torch.no_grad()
def fill(lm: nn.Module, files: TensorFiles, device: torch.device) -> None:
    """Give memory to what is on the meta device, whole or in shards, and read this rank's part of it."""
    shared: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in lm.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                shared.setdefault(id(parameter), []).append((module, name))
    lm._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))
    for (first, own), *others in shared.values():  # tied parameters are tied again
        for module, name in others:
            module._parameters[name] = first._parameters[own]
    tensors = lm.state_dict(keep_vars=True)
    for name, on_disk in _from_files(lm, files).items():
        local(tensors[name]).copy_(files.read(on_disk, local_slices(tensors[name])))


def _from_files(lm: nn.Module, files: TensorFiles) -> dict[str, str]:
    """Names of the tensors that the files hold -> their names there; of tied ones the first."""
    seen: set[int] = set()
    found = {}
    for name, tensor in lm.state_dict(keep_vars=True).items():
        on_disk = name.replace(".base_layer.", ".")
        if on_disk in files.records and id(tensor) not in seen:
            found[name] = on_disk
            seen.add(id(tensor))
    return found


def _replace(lm: nn.Module, change: Any, names: set[str]) -> None:
    """Change tensors in place of the modules' own; what was shared stays shared."""
    known: dict[int, tuple[Tensor, Tensor]] = {}  # by id: (old, new); while the old one is held its id is its own
    for prefix, module in lm.named_modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                full_name = f"{prefix}.{name}" if prefix else name
                if tensor is None or (full_name not in names and id(tensor) not in known):
                    continue
                if id(tensor) not in known:
                    new = change(tensor.detach())
                    is_parameter = isinstance(tensor, nn.Parameter)
                    known[id(tensor)] = tensor, nn.Parameter(new, tensor.requires_grad) if is_parameter else new
                held[name] = known[id(tensor)][1]
