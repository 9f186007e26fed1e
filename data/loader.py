"""Iterate over rows in a seeded order for any number of epochs, with a position that checkpoints save.

    loader = Loader(prompts, batch_size=8, seed=0)
    batch = loader.next()                      # 8 rows; a batch may continue into the next epoch
    state = loader.state_dict()                # JSON

A new Loader over the same rows resumes from there after load_state_dict(state).
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import fields
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np

from data.errors import UserError

T = TypeVar("T")
# Renamed fields: fingerprints use the old name, so that older checkpoints still match.
HASHED_AS = {"target_ids": "truth_ids", "target_mask": "truth_mask"}


class Loader(Generic[T]):
    """Batches of rows. An epoch's order depends only on (seed, epoch), so a position is two numbers."""

    def __init__(self, rows: Sequence[T], *, batch_size: int, seed: int, shuffle: bool = True) -> None:
        if batch_size < 1:
            raise UserError(f"batch_size={batch_size}: must be 1 or more")
        self.rows = rows
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self._weights = getattr(rows, "weights", None) or [float(getattr(row, "weight", 1.0)) for row in rows]
        for i, weight in enumerate(self._weights):
            if not (math.isfinite(weight) and weight >= 0):
                raise UserError(f"weight={weight} of {getattr(rows[i], 'source', rows[i])}: must be 0 or more")
        if sum(self._weights) < 1:
            raise UserError(
                f"weight: the weights of {len(rows)} rows sum to {sum(self._weights):g}, less than one row per epoch; "
                "add rows or raise weight="
            )
        self._epoch = 0
        self._position = 0  # number of rows returned in the current epoch
        self._order = self._epoch_order(0)

    @property
    def epoch(self) -> float:
        """Number of epochs returned so far, including the fraction of the current epoch."""
        return self._epoch + (self._position / len(self._order) if self._order else 0.0)

    @property
    def rows_per_epoch(self) -> int:
        """Number of rows per epoch; with fractional weights, the rounded expectation."""
        return round(sum(self._weights))

    def next(self, count: int | None = None) -> list[T]:
        """Return the next `count` rows (default: batch_size)."""
        return [self.rows[number] for number in self.next_numbers(count)]

    def next_numbers(self, count: int | None = None) -> list[int]:
        """Return the indices of the next `count` rows."""
        batch: list[int] = []
        while len(batch) < (self.batch_size if count is None else count):
            if self._position >= len(self._order):
                self._epoch += 1
                self._position = 0
                self._order = self._epoch_order(self._epoch)
                continue
            batch.append(self._order[self._position])
            self._position += 1
        return batch

    @cached_property
    def _fingerprints(self) -> tuple[str, str]:
        return _fingerprints(self.rows, self._weights)

    def state_dict(self) -> dict[str, Any]:
        fingerprint, columns = self._fingerprints
        return {
            "epoch": self._epoch, "position": self._position, "seed": self.seed, "shuffle": self.shuffle,
            "num_rows": len(self.rows), "fingerprint": fingerprint, "columns": columns,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved position; raise if the rows or their order differ."""
        fingerprint, columns = self._fingerprints
        if (state["num_rows"], state["fingerprint"]) != (len(self.rows), fingerprint):
            raise UserError(
                f"data: differs from the checkpoint's ({state['num_rows']} rows then, {len(self.rows)} now, or "
                "different token ids); resume with the same data, chat template and length limits"
            )
        if state.get("columns", columns) != columns:  # older checkpoints have none
            print(
                "warning: data: columns differ from the checkpoint's (answers, labels or margins were edited); "
                "training continues with the new values",
                file=sys.stderr,
            )
        for name in ("seed", "shuffle"):
            if state[name] != getattr(self, name):
                raise UserError(
                    f"{name}={getattr(self, name)}: the checkpoint has {name}={state[name]}, which determines the row "
                    "order; resume with the same value"
                )
        self._epoch = state["epoch"]
        self._position = state["position"]
        self._order = self._epoch_order(self._epoch)

    def _epoch_order(self, epoch: int) -> list[int]:
        # random.Random hashes a string seed with SHA-512, so the order is the same on every machine.
        rng = random.Random(f"{self.seed}/{epoch}")
        order = []
        for row, weight in enumerate(self._weights):
            copies = math.floor(weight)
            if weight > copies and rng.random() < weight - copies:
                copies += 1
            order += [row] * copies
        if self.shuffle:
            rng.shuffle(order)
        return order


def _fingerprints(rows: Sequence[Any], weights: Sequence[float]) -> tuple[str, str]:
    """Hash every list of integers in a row (ids, masks) and its weight, which determine the batches; and everything
    else but its source: columns for the rewards, labels, margins.
    """
    digest, columns = hashlib.sha256(), hashlib.sha256()
    is_stored = hasattr(rows, "raw")  # data/rows/stored.py: arrays in place of lists
    for i, weight in enumerate(weights):
        digest.update(repr(weight).encode())
        row = rows.raw(i) if is_stored else vars(rows[i])
        for item in fields(rows.kind if is_stored else rows[i]):
            if item.name in ("source", "weight"):
                continue
            value = row[item.name]
            if isinstance(value, list) and all(isinstance(entry, int) for entry in value):
                value = np.array(value, np.int64)
            if isinstance(value, np.ndarray):
                digest.update(f"{HASHED_AS.get(item.name, item.name)}:{len(value)}".encode())
                digest.update(value.astype(np.int64, copy=False).tobytes())
            else:
                columns.update(json.dumps(value, default=lambda x: type(x).__name__, skipkeys=True).encode())
    return digest.hexdigest(), columns.hexdigest()
