"""Replay buffer of groups with signal, to replace groups in which all completions earned the same.

    replay = Replay(size=64, max_age=100, seed=0)
    replay.add(group, score=3.2, step=12)          # kept if it is among the best `size`
    group = replay.draw(step=13, number=0)         # in proportion to score; None when there is none

A group is kept as it was sampled: token ids, the engine's log-probs, rewards. What depends on the current weights
(log-probs, importance weights, advantages) is recomputed by the training step.
"""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from data.types import Prompt
from rollout.engine import Completion, Group


class Replay:
    def __init__(self, *, size: int, max_age: int, seed: int, prompts: Sequence[Prompt]) -> None:
        self.size, self.max_age, self.seed, self.prompts = size, max_age, seed, prompts
        self._heap: list[tuple[float, int, int, Group]] = []  # score, order of arrival, step, group
        self._added = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, group: Group, *, score: float, step: int) -> None:
        """Keep the group if its score beats the lowest one kept; of equal scores the older group stays."""
        assert score > 0, f"score {score}: a group without signal is not worth keeping"
        if not self.size:
            return
        self._added += 1
        entry = (score, -self._added, step, group)  # dropped first: the lowest score, then the newest
        if len(self._heap) < self.size:
            heapq.heappush(self._heap, entry)
        elif score > self._heap[0][0]:
            heapq.heapreplace(self._heap, entry)

    def draw(self, *, step: int, number: int) -> Group | None:
        """One group, drawn in proportion to score. Depends on step and number only, so a resumed run draws the same."""
        self._forget(step)
        if not self._heap:
            return None
        entries = sorted(self._heap, key=lambda entry: -entry[1])
        rng = random.Random(f"{self.seed}/replay/{step}/{number}")
        ((_, _, _, group),) = rng.choices(entries, weights=[entry[0] for entry in entries])
        return replace(group, replayed=True, extra=None)

    def _forget(self, step: int) -> None:
        if any(step - entry[2] > self.max_age for entry in self._heap):
            self._heap = [entry for entry in self._heap if step - entry[2] <= self.max_age]
            heapq.heapify(self._heap)

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
        """Restore the groups; the best ones, if the buffer has become smaller."""
        self._added = state["added"]
        entries = [(g["score"], g["order"], g["step"], self._group(g)) for g in state["groups"]]
        self._heap = heapq.nlargest(self.size, entries, key=lambda entry: entry[:2])
        heapq.heapify(self._heap)

    def _group(self, saved: dict[str, Any]) -> Group:
        completions = [completion_of(completion) for completion in saved["completions"]]
        prompt = self.prompts[saved["row"]]
        return Group(saved["number"], prompt, saved["row"], saved["kind"], completions, saved["values"])


def as_json(completion: Completion) -> dict[str, Any]:
    """A completion as JSON. Environments may put anything into columns: what JSON cannot hold is dropped."""
    saved = asdict(completion)
    saved["versions"] = [list(span) for span in completion.versions]
    saved["columns"] = {name: value for name, value in completion.columns.items() if is_json(value)}
    return saved | ({} if is_json(completion.messages) else {"messages": None})


def is_json(value: Any) -> bool:
    try:
        return json.loads(json.dumps(value)) == value
    except (TypeError, ValueError):
        return False


def completion_of(saved: dict[str, Any]) -> Completion:
    """A completion from its JSON form: spans become tuples again."""
    assert saved.keys() == {field.name for field in fields(Completion)}, sorted(saved)
    return Completion(**(saved | {"versions": [(version, count) for version, count in saved["versions"]]}))
