"""Records in flat arrays: 4 bytes per token id and 1 per mask entry, in memory or mapped from files.

    columns = Columns(Example)
    columns.append(example)
    rows = columns.stored()                    # a Sequence[Example]; rows[3] builds the record, with lists
    rows.save(folder, about)                   # and rows, about = open_stored(Example, folder)

Fields declared as lists of int or bool become arrays, and so do the weights. All other fields stay Python values, one
dict per row; files store them as JSON.
"""

from __future__ import annotations

import array
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import numpy as np

T = TypeVar("T")
CODES = {"list[int]": "i", "list[bool]": "B"}  # type of a field -> type code of its array
DTYPES = {"i": np.int32, "B": np.bool_, "q": np.int64, "d": np.float64}


def list_fields(kind: type) -> dict[str, str]:
    """Return the type code of each field that becomes an array."""
    codes = {item.name: CODES.get(str(item.type).removesuffix(" | None")) for item in fields(kind)}
    return {name: code for name, code in codes.items() if code}


class Columns(Generic[T]):
    """Arrays that grow."""

    def __init__(self, kind: type[T]) -> None:
        self.kind, self.codes = kind, list_fields(kind)
        self.names = [item.name for item in fields(kind) if item.name not in (*self.codes, "weight")]
        self.values = {name: array.array(code) for name, code in self.codes.items()}
        self.lengths = {name: array.array("q") for name in self.codes}
        self.weights = array.array("d")
        self.rest: list[dict[str, Any]] = []

    def append(self, record: T) -> None:
        rest = {name: getattr(record, name) for name in self.names}
        for name, code in self.codes.items():
            value = getattr(record, name)
            if value is None:
                rest[name] = None
            self.values[name].extend(array.array(code, value or ()))
            self.lengths[name].append(len(value or ()))
        self.weights.append(record.weight)
        self.rest.append(rest)

    def extend(self, other: Columns[T]) -> None:
        for name in self.codes:
            self.values[name].extend(other.values[name])
            self.lengths[name].extend(other.lengths[name])
        self.weights.extend(other.weights)
        self.rest += other.rest

    def stored(self) -> Stored[T]:
        """Return the records; the arrays are shared and can no longer grow."""
        values = {name: np.frombuffer(self.values[name], DTYPES[code]) for name, code in self.codes.items()}
        lengths = {name: np.frombuffer(x, np.int64) for name, x in self.lengths.items()}
        return Stored(self.kind, values, lengths, np.frombuffer(self.weights, np.float64), self.rest)


class Stored(Sequence[T]):
    """Records in arrays. Equal to a list of the same records."""

    def __init__(
        self, kind: type[T], values: Mapping[str, np.ndarray], lengths: Mapping[str, np.ndarray], weights: np.ndarray,
        rest: Sequence[dict[str, Any]], chosen: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        self.kind, self.values, self.lengths, self.all_weights, self.rest = kind, values, lengths, weights, rest
        self.ends = {name: np.cumsum(x) for name, x in lengths.items()}
        self.chosen = np.arange(len(weights)) if chosen is None else chosen  # row numbers

    def __len__(self) -> int:
        return len(self.chosen)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Stored[T]: ...
    def __getitem__(self, index: int | slice) -> T | Stored[T]:
        if isinstance(index, slice):
            return self.select(range(len(self))[index])
        values = {name: x.tolist() if isinstance(x, np.ndarray) else x for name, x in self.raw(index).items()}
        return self.kind(**values, weight=float(self.all_weights[self.chosen[index]]))

    def raw(self, index: int) -> dict[str, Any]:
        """Return the fields of a record except its weight, with arrays in place of lists."""
        row = int(self.chosen[index])
        spans = ((name, int(ends[row]), int(self.lengths[name][row])) for name, ends in self.ends.items())
        return {name: self.values[name][end - length : end] for name, end, length in spans} | self.rest[row]

    def select(self, indices: Iterable[int]) -> Stored[T]:
        """Return these rows, without a copy of their values."""
        chosen = self.chosen[np.fromiter(indices, np.int64)]
        return Stored(self.kind, self.values, self.lengths, self.all_weights, self.rest, chosen)

    @property
    def weights(self) -> list[float]:
        return self.all_weights[self.chosen].tolist()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} stored rows of {self.kind.__name__}>"

    def save(self, folder: Path, about: dict[str, Any]) -> None:
        """Write all rows, and `about` as JSON, into an empty folder; raise ValueError if JSON changes a value."""
        lines = []
        for rest in self.rest:
            lines.append(json.dumps(rest).encode())
            if json.loads(lines[-1]) != rest:
                raise ValueError(f"{rest.get('source')}: has a value that JSON changes")
        arrays = {f"{name}.values": x for name, x in self.values.items()}
        arrays |= {f"{name}.lengths": x for name, x in self.lengths.items()}
        arrays |= {"weights": self.all_weights, "rest": np.frombuffer(b"".join(lines), np.uint8),
                   "rest.lengths": np.fromiter(map(len, lines), np.int64)}  # fmt: skip
        for name, x in arrays.items():
            with (folder / f"{name}.npy").open("wb") as file:
                np.save(file, x, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        sizes = {name: len(x) for name, x in arrays.items()}
        (folder / "about.json").write_text(json.dumps({**about, "sizes": sizes}))


class _JsonLines(Sequence[dict[str, Any]]):
    def __init__(self, text: np.ndarray, lengths: np.ndarray) -> None:
        self.text, self.ends = text, np.concatenate([[0], np.cumsum(lengths)])

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: Any) -> Any:
        return json.loads(self.text[self.ends[index] : self.ends[index + 1]].tobytes())


def open_stored(kind: type[T], folder: Path) -> tuple[Stored[T], dict[str, Any]]:
    """Map the files of Stored.save; raise an error if one is missing or damaged."""
    about = json.loads((folder / "about.json").read_text())
    arrays = {
        name: np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r" if size else None, allow_pickle=False))
        for name, size in about["sizes"].items()
    }
    values, lengths = ({name: arrays[f"{name}.{part}"] for name in list_fields(kind)} for part in ("values", "lengths"))
    rest = _JsonLines(arrays["rest"], arrays["rest.lengths"])
    parts = [*((values[name], x) for name, x in lengths.items()), (arrays["rest"], arrays["rest.lengths"])]
    if any(len(x) != int(each.sum()) or len(each) != len(arrays["weights"]) for x, each in parts):
        raise ValueError(f"{folder}: the sizes of its files do not match")
    return Stored(kind, values, lengths, arrays["weights"], rest), about
