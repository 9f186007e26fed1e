"""Tensors in safetensors files: written one at a time, and read slice by slice.

    size, sha256 = write_tensors(path, specs_of(tensors), tensors.values())    # one tensor at a time
    stored = TensorFiles(folder, records)
    stored.read("model.norm.weight", (slice(0, 8),))                           # reads only these bytes

A tensor may be stored in parts in several files, as ranks write their shards; reading assembles the slice.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from rollout.tensor_header import DTYPES, NAMES, Spec, file_header

CHUNK = 16 << 20  # bytes written and hashed at once
Slices = tuple[slice, ...]


def specs_of(tensors: Mapping[str, Tensor | Record]) -> dict[str, Spec]:
    return {name: Spec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def write_tensors(
    path: Path, specs: Mapping[str, Spec], tensors: Iterable[Tensor], check: Callable[[], None] = lambda: None
) -> tuple[int, str]:
    """Write `tensors`, in the order of `specs`, to a safetensors file; returns its size and sha256.

    safetensors' own save_file takes all tensors at once. Here bytes are hashed as they are written, and both release
    the GIL. `check` is called before each chunk.
    """
    digest = hashlib.sha256()
    with path.open("wb") as file:

        def write(data: Any) -> None:
            check()
            digest.update(data)
            file.write(data)

        write(file_header(specs))
        for (name, spec), tensor in zip(specs.items(), tensors, strict=True):
            assert (tuple(tensor.shape), tensor.dtype) == spec, f"{name}: {tensor.shape} {tensor.dtype}, not {spec}"
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            data = memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else b""
            for start in range(0, len(data), CHUNK):
                write(data[start : start + CHUNK])
        size = file.tell()
    return size, digest.hexdigest()


class Part(NamedTuple):
    """A block of a tensor: the file that holds it, and its offset in the tensor."""

    file: str
    name: str  # in that file
    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass
class Record:
    """A tensor stored in one or several parts."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: list[Part] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether the parts cover the tensor. They never overlap: each is written by the lowest rank that holds it."""
        return sum(math.prod(part.shape) for part in self.parts) == math.prod(self.shape)


class TensorFiles(Mapping[str, Tensor]):
    """Named tensors in the files of a folder; as a mapping it reads full tensors on access."""

    def __init__(self, folder: Path, records: dict[str, Record]) -> None:
        self.folder, self.records = folder, records
        self._open: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name)

    def __iter__(self) -> Any:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def below(self, prefix: str) -> TensorFiles:
        """Tensors whose names start with the prefix, which is removed."""
        found = {name: record for name, record in self.records.items() if name.startswith(prefix)}
        return TensorFiles(self.folder, {name.removeprefix(prefix): record for name, record in found.items()})

    def read(self, name: str, at: Slices | None = None) -> Tensor:
        """A copy of a tensor, or of a block of it; only that block is read."""
        record = self.records[name]
        at = at or tuple(slice(0, size) for size in record.shape)
        result = torch.empty([piece.stop - piece.start for piece in at], dtype=record.dtype)
        for part in record.parts:
            here, there = [], []  # where the two overlap, in the result and in the part
            for piece, first, size in zip(at, part.start, part.shape, strict=True):
                low, high = max(piece.start, first), min(piece.stop, first + size)
                here.append(slice(low - piece.start, high - piece.start))
                there.append(slice(low - first, high - first))
            if all(overlap.start < overlap.stop for overlap in here):
                result[tuple(here)] = self._block(part, tuple(there))
        return result

    def _block(self, part: Part, at: Slices) -> Tensor:
        if part.file not in self._open:
            self._open[part.file] = safe_open(self.folder / part.file, "pt")
        file = self._open[part.file]
        return file.get_slice(part.name)[at] if at else file.get_tensor(part.name)


def records_of_file(folder: Path, file: str, prefix: str = "") -> dict[str, Record]:
    """The tensors of one file; `prefix` is put before their names."""
    records = {}
    with safe_open(folder / file, "pt") as opened:
        for name in opened.keys():  # noqa: SIM118  it is not a mapping
            found = opened.get_slice(name)
            shape = tuple(found.get_shape())
            part = Part(file, name, (0,) * len(shape), shape)
            records[f"{prefix}{name}"] = Record(shape, DTYPES[found.get_dtype()], [part])
    return records


def records_to_json(records: Mapping[str, Record]) -> dict[str, Any]:
    return {
        name: {
            "dtype": NAMES[record.dtype],
            "shape": list(record.shape),
            "parts": [{"file": p.file, "start": list(p.start), "shape": list(p.shape)} for p in record.parts],
        }
        for name, record in records.items()
    }


def records_from_json(saved: Mapping[str, Any]) -> dict[str, Record]:
    records = {}
    for name, found in saved.items():
        parts = [Part(p["file"], name, tuple(p["start"]), tuple(p["shape"])) for p in found["parts"]]
        records[name] = Record(tuple(found["shape"]), DTYPES[found["dtype"]], parts)
    return records
