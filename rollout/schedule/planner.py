"""Planner: which prompts come next, and the number (hence seeds) of each group. Saved in the checkpoint.

    planner = Planner(loader, num_generations=8, seed=0)
    batch = planner.next_batch()       # as many groups as the loader's batch_size
    planner.done()                     # the oldest batch has been trained on
    state = planner.state_dict()       # JSON

A group is pending from the moment it is planned until done(). A resumed run first samples the pending groups again,
with the same numbers and so the same seeds: no group is lost, none is trained on twice.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from data.errors import UserError
from data.loader import Loader
from data.types import Prompt
from rollout.engine import Group, Request

REROLL_LIMIT = 1024  # prompts queued for another try; further ones are not queued

Order = Callable[[int, Sequence[Prompt], Mapping[int, float]], Iterable[int]]
"""A curriculum: (number of the batch, all prompts, last mean reward by row) -> rows to draw from; a row listed twice is
twice as likely. It must depend on nothing else, or a resumed run draws other rows."""


class Planner:
    def __init__(
        self,
        loader: Loader[Prompt],
        *,
        num_generations: int,
        seed: int,
        reroll_from: int | None = None,  # number of the first batch that may hold rerolled prompts; None: never
        reroll_max_groups: int = 1,  # per batch
        reroll_limit: int = REROLL_LIMIT,
        order: Order | None = None,
    ) -> None:
        self.loader, self.num_generations, self.seed = loader, num_generations, seed
        self.batch_size = loader.batch_size
        self.reroll_from, self.reroll_limit, self.order = reroll_from, reroll_limit, order
        self.reroll_max_groups = min(reroll_max_groups, self.batch_size)
        self.consumed = 0  # groups
        self._rows = {id(prompt): row for row, prompt in enumerate(loader.rows)}
        self._number = 0  # groups planned so far, hence the number of the next one
        self._batches = 0  # batches consumed
        self._pending: deque[tuple[list[Group], list[Group]]] = deque()  # per batch: its groups, its resamples
        self._again: deque[Group] = deque()  # pending in the checkpoint that was loaded
        self._spare: deque[Group] = deque()  # likewise, planned as resamples
        self._earned_nothing: list[Group] = []  # groups of pending batches without any reward
        self._reroll: deque[int] = deque()  # rows queued for another try, oldest first
        self._rewards: dict[int, float] = {}  # last mean reward by row, for the curriculum

    @property
    def planned(self) -> int:
        """Groups planned in this run: consumed and pending."""
        return self._number

    @property
    def epoch(self) -> float:
        """Epochs planned so far; with a curriculum, one epoch is as many draws as there are rows in an epoch."""
        return self.loader.epoch if self.order is None else self._number / self.loader.rows_per_epoch

    @property
    def pending(self) -> list[Group]:
        """Groups planned but not consumed, in the order in which they will be."""
        batches = [planned for groups, extra in self._pending for planned in (*groups, *extra)]
        return [*batches, *self._again, *self._spare]

    def next_batch(self) -> list[Group]:
        """Groups pending in the checkpoint first, then fresh rows, then rerolled prompts."""
        batch: list[Group] = []
        for waiting in (self._again, self._spare):
            while waiting and len(batch) < self.batch_size:
                batch.append(waiting.popleft())
        free = self.batch_size - len(batch)
        number = self._batches + len(self._pending)
        open_ = self.reroll_from is not None and number >= self.reroll_from
        taken = {planned.row for planned in batch if planned.kind == "reroll"}
        num_again = max(min(self.reroll_max_groups - len(taken), len(self._reroll), free), 0) if open_ else 0
        batch += self._plan(self._draw(free - num_again, number), "fresh")
        batch += self._plan([self._reroll.popleft() for _ in range(num_again)], "reroll")
        self._pending.append((batch, []))
        return batch

    def resample(self, count: int) -> list[Group]:
        """More fresh groups for the oldest batch, to replace groups without signal (dynamic sampling)."""
        assert self._pending, "resample() belongs to a batch: next_batch() comes first"
        groups = [self._spare.popleft() for _ in range(min(count, len(self._spare)))]
        groups += self._plan(self._draw(count - len(groups), self._batches), "resample")
        self._pending[0][1].extend(groups)
        return groups

    def reroll(self, planned: Group) -> None:
        """A pending group earned no reward at all: queue its prompt once more, after its batch is done."""
        if self.reroll_from is not None and planned.kind != "reroll":
            self._earned_nothing.append(planned)

    def observe(self, planned: Group, reward: float) -> None:
        """Record the mean reward of a group, for the curriculum."""
        if self.order is not None:
            self._rewards[planned.row] = reward

    def done(self) -> list[Group]:
        """Mark the oldest batch as trained on; returns its groups, resampled ones included."""
        assert self._pending, "done() without a pending batch"
        groups, extra = self._pending.popleft()
        self._batches += 1
        self.consumed += len(groups) + len(extra)
        numbers = {planned.number for planned in (*groups, *extra)}
        for planned in self._earned_nothing:
            full = len(self._reroll) >= self.reroll_limit
            if planned.number in numbers and planned.row not in self._reroll and not full:
                self._reroll.append(planned.row)
        self._earned_nothing = [planned for planned in self._earned_nothing if planned.number not in numbers]
        return [*groups, *extra]

    def requests(self, planned: Group) -> list[Request]:
        """One for each completion of a group, with its seed."""
        first = planned.number * self.num_generations
        return [Request.of(planned.prompt, sample_seed(self.seed, first + i)) for i in range(self.num_generations)]

    def metrics(self) -> dict[str, float]:
        """Counts for the oldest pending batch, and the length of the reroll queue."""
        groups, extra = self._pending[0] if self._pending else ([], [])
        kinds = [planned.kind for planned in (*groups, *extra)]
        metrics = {}
        if self.reroll_from is not None:
            metrics["rollout/rerolled_groups"] = float(kinds.count("reroll"))
            metrics["rollout/reroll_waiting"] = float(len(self._reroll))
        return metrics | ({"rollout/resampled_groups": float(len(extra))} if extra else {})

    def state_dict(self) -> dict[str, Any]:
        groups = [planned for batch, _ in self._pending for planned in batch]
        extra = [planned for _, extra in self._pending for planned in extra]
        return {
            "loader": self.loader.state_dict(),
            "num_generations": self.num_generations,
            "planned": self._number,
            "consumed": self.consumed,
            "batches": self._batches,
            "pending": [saved(planned) for planned in (*groups, *self._again)],
            "resampled": [saved(planned) for planned in (*extra, *self._spare)],
            "reroll": list(self._reroll),
            "rewards": [[row, reward] for row, reward in sorted(self._rewards.items())],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a checkpoint, before anything has been planned."""
        assert not self._number, f"{self._number} groups have been planned already"
        if state["num_generations"] != self.num_generations:
            raise UserError(
                f"num_generations={self.num_generations}: the checkpoint was made with {state['num_generations']}, "
                "which decides the seeds of all completions; resume with the same value"
            )
        self.loader.load_state_dict(state["loader"])
        self._number, self.consumed, self._batches = state["planned"], state["consumed"], state["batches"]
        self._again = deque(self._restored(row) for row in state["pending"])
        self._spare = deque(self._restored(row) for row in state["resampled"])
        self._reroll = deque(state["reroll"])
        self._rewards = {row: reward for row, reward in state["rewards"]}
        known = self.consumed + len(self._again) + len(self._spare)
        assert known == self._number, f"{self._number} groups planned, but {known} consumed or pending"

    def _restored(self, row: list[Any]) -> Group:
        number, index, kind = row
        return Group(number, self.loader.rows[index], index, kind)

    def _plan(self, rows: Iterable[int], kind: Literal["fresh", "reroll", "resample"]) -> list[Group]:
        groups = [Group(self._number + i, self.loader.rows[row], row, kind) for i, row in enumerate(rows)]
        self._number += len(groups)
        return groups

    def _draw(self, count: int, batch: int) -> list[int]:
        """The next rows for a batch: in the loader's order, or drawn from the curriculum's rows."""
        if not count:
            return []
        if self.order is None:
            return [self._rows[id(prompt)] for prompt in self.loader.next(count)]
        pool = list(self.order(batch, self.loader.rows, dict(self._rewards)))
        if not pool or not all(isinstance(row, int) and 0 <= row < len(self.loader.rows) for row in pool):
            raise UserError(
                f"curriculum={getattr(self.order, '__name__', self.order)}: gave {str(pool)[:60]} for batch {batch}; "
                f"return numbers of rows, from 0 to {len(self.loader.rows) - 1}, at least one"
            )
        rng = random.Random(f"{self.seed}/curriculum/{self._number}")
        rows: list[int] = []
        while len(rows) < count:  # a small pool is drawn from more than once
            rows += rng.sample(pool, min(count - len(rows), len(pool)))
        return rows


def saved(planned: Group) -> list[Any]:
    return [planned.number, planned.row, planned.kind]


def sample_seed(run_seed: int, number: int) -> int:
    """Seed of the number-th completion of a run: depends on counters only, so a resumed run draws the same."""
    return int.from_bytes(hashlib.blake2b(f"{run_seed}/{number}".encode(), digest_size=8).digest(), "big")
