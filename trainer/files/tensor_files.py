"""Write tensors to safetensors files one at a time, and read slices of them.

    size, sha256 = write_tensors(path, specs_of(tensors), tensors.values())    # one tensor at a time
    stored = TensorFiles(folder, records)
    stored.read("model.norm.weight", (slice(0, 8),))                           # reads only these bytes

A tensor may be stored in parts in several files, because each rank writes its shards; read() assembles the slice.
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

CHUNK = 16 << 20  # bytes per write and hash update
Slices = tuple[slice, ...]


def specs_of(tensors: Mapping[str, Tensor | Record]) -> dict[str, Spec]:
    return {name: Spec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def write_tensors(
    path: Path, specs: Mapping[str, Spec], tensors: Iterable[Tensor], check: Callable[[], None] = lambda: None
) -> tuple[int, str]:
    """Write `tensors`, in the order of `specs`, to a safetensors file; return its size and sha256.

    Unlike safetensors' save_file, this keeps one tensor in memory at a time. Bytes are hashed as they are written; both
    release the GIL. `check` is called before each chunk.
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
    """A block of a tensor: its file, and its offset in the tensor."""

    file: str
    name: str  # tensor name in the file
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
        """Whether the parts cover the tensor. They never overlap: the lowest rank that has a shard writes it."""
        return sum(math.prod(part.shape) for part in self.parts) == math.prod(self.shape)


class TensorFiles(Mapping[str, Tensor]):
    """Named tensors in the files of a folder; the mapping reads a full tensor on each access."""

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
        """Return the tensors whose names start with the prefix, without the prefix."""
        records = {name.removeprefix(prefix): r for name, r in self.records.items() if name.startswith(prefix)}
        return TensorFiles(self.folder, records)

    def read(self, name: str, at: Slices | None = None) -> Tensor:
        """Return a copy of a tensor, or of the block `at`; only that block is read."""
        record = self.records[name]
        at = at or tuple(slice(0, size) for size in record.shape)
        result = torch.empty([piece.stop - piece.start for piece in at], dtype=record.dtype)
        for part in record.parts:
            in_result, in_part = [], []  # the overlap, in both coordinates
            for piece, first, size in zip(at, part.start, part.shape, strict=True):
                low, high = max(piece.start, first), min(piece.stop, first + size)
                in_result.append(slice(low - piece.start, high - piece.start))
                in_part.append(slice(low - first, high - first))
            if all(overlap.start < overlap.stop for overlap in in_result):
                result[tuple(in_result)] = self._block(part, tuple(in_part))
        return result

    def _block(self, part: Part, at: Slices) -> Tensor:
        if part.file not in self._open:
            self._open[part.file] = safe_open(self.folder / part.file, "pt")
        file = self._open[part.file]
        return file.get_slice(part.name)[at] if at else file.get_tensor(part.name)


def records_of_file(folder: Path, file: str, prefix: str = "") -> dict[str, Record]:
    """Return the records of one file's tensors, with `prefix` added to their names."""
    records = {}
    with safe_open(folder / file, "pt") as opened:
        for name in opened.keys():  # noqa: SIM118  not a mapping
            tensor = opened.get_slice(name)
            shape = tuple(tensor.get_shape())
            part = Part(file, name, (0,) * len(shape), shape)
            records[f"{prefix}{name}"] = Record(shape, DTYPES[tensor.get_dtype()], [part])
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
    for name, record in saved.items():
        parts = [Part(p["file"], name, tuple(p["start"]), tuple(p["shape"])) for p in record["parts"]]
        records[name] = Record(tuple(record["shape"]), DTYPES[record["dtype"]], parts)
    return records
