"""Split rows into training and held-out rows: --val-set-size holds out rows of --data, --dedup removes duplicates.

    rows, held_out = train_and_held_out(cfg.data, cfg.run.seed, read)

The split depends only on the seed and the row count, so it is the same after a resume and on every rank.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Protocol, TypeVar

from data.errors import UserError
from data.rows.stored import Stored

T = TypeVar("T")
NOT_CONTENT = ("source", "weight")  # fields that do not change how a row is trained


class DataSettings(Protocol):
    """The settings used here, a part of trainer's DataConfig."""

    @property
    def data(self) -> Sequence[str]: ...
    @property
    def eval_data(self) -> Sequence[str]: ...
    @property
    def val_set_size(self) -> float: ...
    @property
    def dedup(self) -> bool: ...
    @property
    def max_eval_rows(self) -> int: ...


def train_and_held_out(
    data: DataSettings,
    seed: int,
    read: Callable[[Sequence[str]], Sequence[T]],  # loads the rows of specs
    read_eval: Callable[[Sequence[str]], Sequence[T]] | None = None,  # loads held-out rows; None: read
    *,
    read_again: bool = False,  # load the rows held out of data.data again, with read_eval
) -> tuple[Sequence[T], Sequence[T]]:
    """Return the training rows and the held-out rows; a method evaluates on the first max_eval_rows."""
    read_eval = read_eval or read
    rows = _distinct(read(data.data), "data") if data.dedup else _sequence(read(data.data))
    if data.val_set_size == 0:
        held_out = _sequence(read_eval(data.eval_data))
        if data.dedup and held_out:
            held_out = _distinct(held_out, "eval_data", known={content_key(row) for row in rows})
        return rows, held_out
    indices = held_out_numbers(len(rows), data.val_set_size, seed)
    train_rows = select(rows, [i for i in range(len(rows)) if i not in indices])
    held_out = select(rows, sorted(indices))
    if read_again:
        sources, again = {row.source for row in held_out}, read_eval(data.data)
        held_out = select(again, [i for i, row in enumerate(again) if row.source in sources])
    limit = "" if len(held_out) <= data.max_eval_rows else f"; evaluating on the first {data.max_eval_rows}"
    print(f"data: held out {len(held_out)} of {len(rows)} rows (val_set_size={data.val_set_size:g}){limit}",
          file=sys.stderr)  # fmt: skip
    return train_rows, held_out


def held_out_numbers(num_rows: int, size: float, seed: int) -> set[int]:
    """Return the indices of the held-out rows: `size` rows, or if below 1 this fraction of them, rounded up."""
    count = math.ceil(size * num_rows) if size < 1 else int(size)
    if count >= num_rows:
        raise UserError(
            f"val_set_size={size:g}: holds out {count} of {num_rows} rows, leaving none to train on; lower it"
        )
    return set(random.Random(f"{seed}/held out").sample(range(num_rows), count))


def content_key(row: Any) -> bytes:
    """Hash all fields of a record except its source and weight, so that rows that are trained alike are equal."""
    content = {field.name: getattr(row, field.name) for field in fields(row) if field.name not in NOT_CONTENT}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=repr).encode()).digest()


def _sequence(rows: Sequence[T]) -> Sequence[T]:
    return rows if isinstance(rows, Stored) else list(rows)


def select(rows: Sequence[T], indices: Sequence[int]) -> Sequence[T]:
    return rows.select(indices) if isinstance(rows, Stored) else [rows[i] for i in indices]


def _distinct(rows: Sequence[T], name: str, known: set[bytes] | None = None) -> Sequence[T]:
    """Drop rows whose content repeats an earlier row or is in `known`."""
    seen, distinct = set(known or ()), []
    for i, row in enumerate(rows):
        key = content_key(row)
        if key not in seen:
            seen.add(key)
            distinct.append(i)
    if num_removed := len(rows) - len(distinct):
        others = "other rows" if known is None else "other rows or training rows"
        print(f"{name}: removed {num_removed} of {len(rows)} rows that repeat {others}", file=sys.stderr)
    if not distinct:
        raise UserError(f"dedup=True: all {len(rows)} rows of eval_data are training rows; pass other --eval-data")
    return select(rows, distinct)
