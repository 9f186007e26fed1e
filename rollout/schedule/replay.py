"""Replay buffer of groups with signal, to replace groups whose completions all have the same reward.

    replay = Replay(size=64, max_age=100, seed=0, prompts=prompts, sampling=sampling)
    replay.add(group, score=3.2, step=12)          # keep the `size` highest scores
    group = replay.draw(step=13, number=0)         # with probability proportional to score; None if empty

A group is stored as sampled: token ids, behaviour log-probs, rewards. The training step recomputes everything that
depends on the current weights: log-probs, importance weights, advantages.
"""

from __future__ import annotations

import base64
import heapq
import json
import random
import zlib
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np

from data.types import Prompt
from rollout.engine import Completion, Group, Sampling


class Replay:
    def __init__(self, *, size: int, max_age: int, seed: int, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        self.size, self.max_age, self.seed, self.prompts, self.sampling = size, max_age, seed, prompts, sampling
        self._heap: list[tuple[float, int, int, Group]] = []  # score, -arrival index, step, group
        self._added = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, group: Group, *, score: float, step: int) -> None:
        """Store the group if its score is above the lowest stored score. If scores are equal, the older group stays."""
        assert score > 0, f"score={score}: the group has no signal"
        if not self.size:
            return
        self._added += 1
        entry = (score, -self._added, step, group)  # dropped first: the lowest score, then the newest
        if len(self._heap) < self.size:
            heapq.heappush(self._heap, entry)
        elif score > self._heap[0][0]:
            heapq.heapreplace(self._heap, entry)

    def draw(self, *, step: int, number: int) -> Group | None:
        """Draw a group in proportion to score, depending only on step and number, so a resumed run draws the same."""
        if any(step - entry[2] > self.max_age for entry in self._heap):
            self._heap = [entry for entry in self._heap if step - entry[2] <= self.max_age]
            heapq.heapify(self._heap)
        if not self._heap:
            return None
        entries = sorted(self._heap, key=lambda entry: -entry[1])
        rng = random.Random(f"{self.seed}/replay/{step}/{number}")
        ((_, _, _, group),) = rng.choices(entries, weights=[entry[0] for entry in entries])
        return replace(group, replayed=True, extra=None)

    def state_dict(self) -> dict[str, Any]:
        groups = [
            {
                "score": score,
                "order": order,
                "step": step,
                "number": group.number,
                "row": group.row,
                "kind": group.kind,
                "completions": [as_json(completion) for completion in group.completions],
                "values": group.values,
            }
            for score, order, step, group in self._heap
        ]
        return {"added": self._added, "groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the groups that fit the current sampling; a smaller buffer keeps the highest scores."""
        self._added = state["added"]
        entries = []
        for saved in state["groups"]:
            prompt, completions = self.prompts[saved["row"]], list(map(completion_of, saved["completions"]))
            group = Group(saved["number"], prompt, saved["row"], saved["kind"], completions, saved["values"])
            if all(map(self.sampling.fits, completions)):
                entries.append((saved["score"], saved["order"], saved["step"], group))
        self._heap = heapq.nlargest(self.size, entries, key=lambda entry: entry[:2])
        heapq.heapify(self._heap)


def as_json(completion: Completion) -> dict[str, Any]:
    """Convert a completion to JSON. Columns and messages that JSON cannot represent are dropped."""
    saved = asdict(completion)
    saved["versions"] = [list(span) for span in completion.versions]
    saved |= {"routes": encode(completion.routes), "sets": encode(completion.sets)}
    saved["branches"] = list(map(as_json, completion.branches))
    saved["columns"] = {name: value for name, value in completion.columns.items() if is_json(value)}
    return saved | ({} if is_json(completion.messages) else {"messages": None})


def is_json(value: Any) -> bool:
    try:
        return json.loads(json.dumps(value)) == value
    except (TypeError, ValueError):
        return False


def completion_of(saved: dict[str, Any]) -> Completion:
    """Convert JSON back to a completion; version spans become tuples again."""
    saved = {"routes": None, "sets": None, "branches": [], **saved}  # older checkpoints have none
    assert saved.keys() == {field.name for field in fields(Completion)}, sorted(saved)
    versions = [(version, count) for version, count in saved["versions"]]
    arrays = {name: decode(saved[name]) for name in ("routes", "sets")}
    branches = tuple(map(completion_of, saved["branches"]))
    return Completion(**(saved | {"versions": versions, "branches": branches} | arrays))


def encode(array: np.ndarray | None) -> list[Any] | None:
    """Return [dtype, shape, compressed data as text]."""
    if array is None:
        return None
    return [array.dtype.name, list(array.shape), base64.b64encode(zlib.compress(array.tobytes(), 1)).decode()]


def decode(saved: list[Any] | None) -> np.ndarray | None:
    if saved is None:
        return None
    dtype, shape, text = saved
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype).reshape(shape).copy()
