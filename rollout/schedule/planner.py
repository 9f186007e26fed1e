"""Choose the next prompts and number their groups, which determines the seeds. Saved in the checkpoint.

    planner = Planner(loader, num_generations=8, seed=0)
    batch = planner.next_batch()       # loader.batch_size groups
    planner.done()                     # the oldest batch has been trained on
    state = planner.state_dict()       # JSON

A group is pending from planning until done(). A resumed run first samples the pending groups again, with the same
numbers and therefore the same seeds: no group is lost, and none is trained on twice.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from data.errors import UserError
from data.loader import Loader
from data.types import Prompt
from rollout.engine import Group, Request
from rollout.schedule.replay import as_json, completion_of

REROLL_LIMIT = 1024  # maximum prompts queued for another try

Order = Callable[[int, Sequence[Prompt], Mapping[int, float]], Iterable[int]]
"""A curriculum: (batch index, all prompts, last mean reward by row) -> rows to draw from. A row listed twice is drawn
twice as often. The result must depend on nothing else, because a resumed run must draw the same rows."""


class Planner:
    def __init__(
        self,
        loader: Loader[Prompt],
        *,
        num_generations: int,
        seed: int,
        reroll_from: int | None = None,  # index of the first batch with rerolled prompts; None: never
        reroll_max_groups: int = 1,  # maximum per batch
        reroll_limit: int = REROLL_LIMIT,
        order: Order | None = None,
        num_queued: int = 0,  # partial rollouts: groups in flight in addition to a batch
    ) -> None:
        self.loader, self.num_generations, self.seed = loader, num_generations, seed
        self.batch_size = loader.batch_size
        self.reroll_from, self.reroll_limit, self.order = reroll_from, reroll_limit, order
        self.reroll_max_groups = min(reroll_max_groups, self.batch_size)
        self.num_queued = num_queued
        self.queued: list[Group] = []  # partial rollouts: in flight but not in a batch yet; may have completions
        self.consumed = 0  # number of groups trained on
        self.planned = 0  # groups planned in this run, consumed or pending: the number of the next group
        self._batches = 0  # number of batches consumed
        self._pending: deque[tuple[list[Group], list[Group]]] = deque()  # per batch: (groups, resamples)
        self._restored: deque[Group] = deque()  # pending groups of the loaded checkpoint
        self._restored_extra: deque[Group] = deque()  # its pending resamples
        self._unrewarded: list[Group] = []  # groups of pending batches without any reward
        self._reroll: deque[int] = deque()  # rows queued for another try, oldest first
        self._rewards: dict[int, float] = {}  # last mean reward by row, for the curriculum

    @property
    def epoch(self) -> float:
        """Epochs planned so far. With a curriculum, an epoch is rows_per_epoch draws."""
        return self.loader.epoch if self.order is None else self.planned / self.loader.rows_per_epoch

    @property
    def pending(self) -> list[Group]:
        """Groups planned but not consumed, in the order of consumption."""
        batches = [group for groups, extra in self._pending for group in (*groups, *extra)]
        return [*batches, *self.queued, *self._restored, *self._restored_extra]

    def next_batch(self) -> list[Group]:
        """Plan a batch: first pending groups of the checkpoint, then fresh rows, then rerolled prompts."""
        batch: list[Group] = []
        for restored in (self._restored, self._restored_extra):
            while restored and len(batch) < self.batch_size:
                batch.append(restored.popleft())
        missing = max(0, self.batch_size + self.num_queued - len(self.queued) - len(batch))
        index = self._batches + len(self._pending)
        num_reroll = 0
        if self.reroll_from is not None and index >= self.reroll_from:
            rerolled = {group.row for group in batch if group.kind == "reroll"}
            num_reroll = max(min(self.reroll_max_groups - len(rerolled), len(self._reroll), missing), 0)
        batch += self._plan(self._draw(missing - num_reroll, index), "fresh")
        batch += self._plan([self._reroll.popleft() for _ in range(num_reroll)], "reroll")
        self._pending.append((batch, []))
        return batch

    def resample(self, count: int) -> list[Group]:
        """Plan more fresh groups for the oldest batch, to replace groups without signal (dynamic sampling)."""
        assert self._pending, "resample() called before next_batch()"
        groups = [self._restored_extra.popleft() for _ in range(min(count, len(self._restored_extra)))]
        groups += self._plan(self._draw(count - len(groups), self._batches), "resample")
        self._pending[0][1].extend(groups)
        return groups

    def requeue(self, taken: Sequence[Group], queued: Sequence[Group]) -> None:
        """Replace the groups planned last by those to train on; `queued` wait for a later batch."""
        self.queued = list(queued)
        waiting, planned = {group.number for group in queued}, self._pending[-1]
        known = {group.number for part in planned for group in part}
        groups, extra = ([group for group in part if group.number not in waiting] for part in planned)
        (extra if planned[1] else groups).extend(group for group in taken if group.number not in known)
        self._pending[-1] = (groups, extra)

    def reroll(self, group: Group) -> None:
        """Queue the prompt of a pending group without any reward once more, after its batch is done."""
        if self.reroll_from is not None and group.kind != "reroll":
            self._unrewarded.append(group)

    def observe(self, group: Group, reward: float) -> None:
        """Record the mean reward of a group, for the curriculum."""
        if self.order is not None:
            self._rewards[group.row] = reward

    def done(self) -> list[Group]:
        """Mark the oldest batch as trained on; return its groups, including resampled groups."""
        assert self._pending, "done() without a pending batch"
        groups, extra = self._pending.popleft()
        self._batches += 1
        self.consumed += len(groups) + len(extra)
        numbers = {group.number for group in (*groups, *extra)}
        for group in self._unrewarded:
            full = len(self._reroll) >= self.reroll_limit
            if group.number in numbers and group.row not in self._reroll and not full:
                self._reroll.append(group.row)
        self._unrewarded = [group for group in self._unrewarded if group.number not in numbers]
        return [*groups, *extra]

    def requests(self, group: Group) -> list[Request]:
        """Return one request per completion of a group, with its seed."""
        first = group.number * self.num_generations
        return [Request.of(group.prompt, sample_seed(self.seed, first + i)) for i in range(self.num_generations)]

    def metrics(self) -> dict[str, float]:
        """Return group counts of the oldest pending batch and the length of the reroll queue."""
        groups, extra = self._pending[0] if self._pending else ([], [])
        kinds = [group.kind for group in (*groups, *extra)]
        metrics = {}
        if self.reroll_from is not None:
            metrics["rollout/rerolled_groups"] = float(kinds.count("reroll"))
            metrics["rollout/reroll_waiting"] = float(len(self._reroll))
        return metrics | ({"rollout/resampled_groups": float(len(extra))} if extra else {})

    def state_dict(self) -> dict[str, Any]:
        groups = [group for batch, _ in self._pending for group in batch]
        extra = [group for _, batch in self._pending for group in batch]
        return {
            "loader": self.loader.state_dict(),
            "num_generations": self.num_generations,
            "planned": self.planned,
            "consumed": self.consumed,
            "batches": self._batches,
            "pending": [[group.number, group.row, group.kind] for group in (*groups, *self.queued, *self._restored)],
            "resampled": [[group.number, group.row, group.kind] for group in (*extra, *self._restored_extra)],
            "reroll": list(self._reroll),
            "rewards": [[row, reward] for row, reward in sorted(self._rewards.items())],
            "sampled": [[group.number, list(map(as_json, group.completions))] for group in self.queued],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a checkpoint, before anything has been planned."""
        assert not self.planned, f"{self.planned} groups planned before load_state_dict()"
        if state["num_generations"] != self.num_generations:
            raise UserError(
                f"num_generations={self.num_generations}: the checkpoint has {state['num_generations']}, which "
                f"determines all seeds; resume with --num-generations {state['num_generations']}"
            )
        self.loader.load_state_dict(state["loader"])
        self.planned, self.consumed, self._batches = state["planned"], state["consumed"], state["batches"]
        self._restored, self._restored_extra = (
            deque(Group(number, self.loader.rows[row], row, kind) for number, row, kind in state[name])
            for name in ("pending", "resampled")
        )
        if self.num_queued:
            sampled = {number: list(map(completion_of, saved)) for number, saved in state.get("sampled", ())}
            pending = (*self._restored, *self._restored_extra)
            self.queued = [replace(group, completions=sampled.get(group.number, [])) for group in pending]
            self._restored, self._restored_extra = deque(), deque()
        self._reroll = deque(state["reroll"])
        self._rewards = {row: reward for row, reward in state["rewards"]}
        total = self.consumed + len(self.pending)
        assert total == self.planned, f"{self.planned} groups planned, but {total} consumed or pending"

    def _plan(self, rows: Iterable[int], kind: Literal["fresh", "reroll", "resample"]) -> list[Group]:
        groups = [Group(self.planned + i, self.loader.rows[row], row, kind) for i, row in enumerate(rows)]
        self.planned += len(groups)
        return groups

    def _draw(self, count: int, batch: int) -> list[int]:
        """Return the next rows of a batch, in the loader's order or drawn from the curriculum."""
        if not count:
            return []
        if self.order is None:
            return self.loader.next_numbers(count)
        pool = list(self.order(batch, self.loader.rows, dict(self._rewards)))
        if not pool or not all(isinstance(row, int) and 0 <= row < len(self.loader.rows) for row in pool):
            raise UserError(
                f"curriculum={getattr(self.order, '__name__', self.order)}: returned {str(pool)[:60]} for batch "
                f"{batch}; return at least one row index from 0 to {len(self.loader.rows) - 1}"
            )
        rng = random.Random(f"{self.seed}/curriculum/{self.planned}")
        rows: list[int] = []
        while len(rows) < count:  # draw from a small pool repeatedly
            rows += rng.sample(pool, min(count - len(rows), len(pool)))
        return rows


def sample_seed(run_seed: int, number: int) -> int:
    """Return the seed of a run's number-th completion. It depends only on counters, so a resumed run draws the same."""
    return int.from_bytes(hashlib.blake2b(f"{run_seed}/{number}".encode(), digest_size=8).digest(), "big")
