"""Rows to train on and rows to hold out: --val-set-size takes some out of --data, --dedup removes equal rows.

    rows, held_out = train_and_held_out(cfg.data, cfg.run.seed, read)

Which rows are held out follows from the seed and the number of rows: the same after a resume and on every rank.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from data.errors import UserError

T = TypeVar("T")
NOT_CONTENT = ("source", "weight")  # where a row comes from and how often it is taken


def train_and_held_out(
    data: Any,  # DataConfig
    seed: int,
    read: Callable[[Sequence[str]], list[T]],  # the rows of some specs
    read_eval: Callable[[Sequence[str]], list[T]] | None = None,  # those of held-out ones, if they are read otherwise
    *,
    read_again: bool = False,  # rows taken out of data.data are read by read_eval, too
) -> tuple[list[T], list[T]]:
    """The rows to train on, and the held-out rows, of which a method uses the first max_eval_rows."""
    read_eval = read_eval or read
    rows = _distinct(read(data.data), "data") if data.dedup else read(data.data)
    if data.val_set_size == 0:
        held_out = read_eval(data.eval_data)
        if data.dedup and held_out:
            held_out = _distinct(held_out, "eval_data", known={content_key(row) for row in rows})
        return rows, held_out
    chosen = held_out_numbers(len(rows), data.val_set_size, seed)
    kept = [row for number, row in enumerate(rows) if number not in chosen]
    held_out = [rows[number] for number in sorted(chosen)]
    if read_again:
        sources = {row.source for row in held_out}
        held_out = [row for row in read_eval(data.data) if row.source in sources]
    used = "" if len(held_out) <= data.max_eval_rows else f", of which the first {data.max_eval_rows} are evaluated"
    print(f"data: held out {len(held_out)} of {len(rows)} rows by val_set_size={data.val_set_size:g}{used}",
          file=sys.stderr)  # fmt: skip
    return kept, held_out


def held_out_numbers(num_rows: int, size: float, seed: int) -> set[int]:
    """Which of num_rows rows are held out: a fraction of them (size below 1), rounded up, or that many."""
    count = math.ceil(size * num_rows) if size < 1 else int(size)
    if count >= num_rows:
        raise UserError(
            f"val_set_size={size:g}: takes {count} of {num_rows} rows, so none is left to train on; lower it"
        )
    return set(random.Random(f"{seed}/held out").sample(range(num_rows), count))


def content_key(row: Any) -> bytes:
    """Equal for rows that are trained alike: all fields of the record but its source and weight."""
    content = {field.name: getattr(row, field.name) for field in fields(row) if field.name not in NOT_CONTENT}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=repr).encode()).digest()


def _distinct(rows: list[T], name: str, known: set[bytes] | None = None) -> list[T]:
    """The first of all rows with the same content, and none that is `known`."""
    seen, kept = set(known or ()), []
    for row in rows:
        key = content_key(row)
        if key not in seen:
            seen.add(key)
            kept.append(row)
    if len(kept) < len(rows):
        also = " or the training rows" if known is not None else ""
        print(f"{name}: removed {len(rows) - len(kept)} of {len(rows)} rows that repeat others{also}", file=sys.stderr)
    if not kept:
        raise UserError(f"dedup=True: all {len(rows)} rows of eval_data are among the training rows; give other rows")
    return kept
