"""Rows in a seeded order, epoch after epoch, with a position that a checkpoint can save.

    loader = Loader(prompts, batch_size=8, seed=0)
    batch = loader.next()                      # 8 rows; a batch may continue into the next epoch
    state = loader.state_dict()                # JSON

A new Loader over the same rows resumes there after load_state_dict(state).
"""

from __future__ import annotations

import array
import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Generic, TypeVar

from data.errors import UserError

T = TypeVar("T")
# Fields that had another name when older checkpoints were saved; fingerprints keep that name.
HASHED_AS = {"target_ids": "truth_ids", "target_mask": "truth_mask"}


class Loader(Generic[T]):
    """The order of an epoch depends only on (seed, epoch), so a position is two numbers."""

    def __init__(self, rows: Sequence[T], *, batch_size: int, seed: int, shuffle: bool = True) -> None:
        if batch_size < 1:
            raise UserError(f"batch_size={batch_size}: must be 1 or more")
        self.rows = rows
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self._weights = [float(getattr(row, "weight", 1.0)) for row in rows]
        for row, weight in zip(rows, self._weights, strict=True):
            if not (math.isfinite(weight) and weight >= 0):
                raise UserError(f"weight={weight}: the weight of {getattr(row, 'source', row)} must be 0 or more")
        if sum(self._weights) < 1:
            raise UserError(
                f"weight: {len(rows)} rows weigh {sum(self._weights):g} together, less than one row an epoch; "
                "give more rows or a higher weight"
            )
        self._fingerprint = _fingerprint(rows, self._weights)
        self._epoch = 0
        self._position = 0  # rows of the current epoch already returned
        self._order = self._epoch_order(0)

    @property
    def epoch(self) -> float:
        """Epochs returned so far, the current one as a fraction."""
        return self._epoch + (self._position / len(self._order) if self._order else 0.0)

    @property
    def rows_per_epoch(self) -> int:
        """Rows per epoch; with fractional weights the expected number, rounded."""
        return round(sum(self._weights))

    def next(self, count: int | None = None) -> list[T]:
        """The next batch_size rows, or `count` of them."""
        batch: list[T] = []
        while len(batch) < (self.batch_size if count is None else count):
            if self._position >= len(self._order):
                self._epoch += 1
                self._position = 0
                self._order = self._epoch_order(self._epoch)
                continue
            batch.append(self.rows[self._order[self._position]])
            self._position += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch, "position": self._position, "seed": self.seed, "shuffle": self.shuffle,
            "num_rows": len(self.rows), "fingerprint": self._fingerprint,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved position; refuses one of other rows or another order."""
        if (state["num_rows"], state["fingerprint"]) != (len(self.rows), self._fingerprint):
            raise UserError(
                f"data: the checkpoint was made with other data ({state['num_rows']} rows, now {len(self.rows)}, or "
                "other token ids); resume with the same data, template and length limits"
            )
        for name in ("seed", "shuffle"):
            if state[name] != getattr(self, name):
                raise UserError(
                    f"{name}={getattr(self, name)}: the checkpoint was made with {name}={state[name]}, which decides "
                    "the order of the rows; resume with the same value"
                )
        self._epoch = state["epoch"]
        self._position = state["position"]
        self._order = self._epoch_order(self._epoch)

    def _epoch_order(self, epoch: int) -> list[int]:
        # random.Random seeds from a string through SHA-512: the same order on every machine.
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


def _fingerprint(rows: Sequence[Any], weights: Sequence[float]) -> str:
    """Hash of what determines the batches: every list of integers in a row (ids, masks), and its weight."""
    digest = hashlib.sha256()
    for row, weight in zip(rows, weights, strict=True):
        digest.update(repr(weight).encode())
        for item in fields(row):
            value = getattr(row, item.name)
            if isinstance(value, list) and all(isinstance(entry, int) for entry in value):
                digest.update(f"{HASHED_AS.get(item.name, item.name)}:{len(value)}".encode())
                digest.update(array.array("q", value).tobytes())
    return digest.hexdigest()
