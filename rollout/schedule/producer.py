"""Rollouts that run ahead of training, as far as the age of their weights admits.

    producer = Producer(source, planner, depth=1, max_staleness=1, tend=engine.tend)
    while step < total_steps:
        if sync_due(step, engine.version, interval):
            engine.load(step)                              # completions under way go on with the new weights
        groups = producer.take(step, engine.version)       # waits; the next batch is being sampled from now on
        ...                                                # train: step += 1
        producer.done()                                    # planner.state_dict() now counts the batch as consumed

A batch is started only once `step it will train - version of the engine <= max_staleness`: steps per batch are fixed,
so the age at which it will be trained is known when it starts, however long its completions take. depth=0 samples each
batch when it is asked for, and nothing else runs meanwhile.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

from data.types import Prompt
from rollout.engine import Completion
from rollout.schedule.planner import Planned, Planner
from rollout.schedule.source import LOOK_S, Source


@dataclass(frozen=True)
class SampledGroup:
    """A group as it came from the source."""

    planned: Planned
    completions: list[Completion]

    @property
    def prompt(self) -> Prompt:
        return self.planned.prompt


@dataclass(frozen=True)
class PendingBatch:
    """A batch that has been started."""

    groups: list[tuple[Planned, Future[list[Completion]]]]
    version: int  # of the engine's weights when it was started


class Producer:
    """Starts batches ahead of time and hands them out in order. All calls come from the thread that trains."""

    def __init__(
        self,
        source: Source,
        planner: Planner,
        *,
        depth: int = 0,  # batches under way beyond the one in training
        max_staleness: int | None = None,  # optimizer steps; None: whatever depth brings
        steps_per_batch: int = 1,  # optimizer steps on each batch
        last_step: int | None = None,  # of the run: nothing is started that would not be trained on
        tend: Callable[[int], None] = lambda step: None,  # called about twice a second while waiting
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[..., object] = wait,  # of concurrent.futures; for a clock of one's own
    ) -> None:
        assert depth >= 0 and steps_per_batch >= 1, (depth, steps_per_batch)
        self.source, self.planner, self.depth = source, planner, depth
        self.max_staleness, self.steps_per_batch, self.last_step = max_staleness, steps_per_batch, last_step
        self._tend, self._clock, self._wait = tend, clock, wait
        self._ahead: deque[PendingBatch] = deque()
        self._current: PendingBatch | None = None
        self._extra: list[PendingBatch] = []  # groups that were added to the current batch
        self._step = 0  # optimizer steps before the first on the current batch
        self._version = -1  # of the engine, as far as we were told
        self._wait_s = 0.0
        self._ages: list[int] = []  # version that made the first token of each completion of the current batch

    def take(self, step: int, version: int | None = None) -> list[SampledGroup]:
        """The groups of the next batch, in the order they were planned; see begin."""
        self.begin(step, version)
        return self._all(self._current)

    def begin(self, step: int, version: int | None = None) -> None:
        """Make the next batch the current one, and start what may run ahead of it; its groups come from arrived().

        `step` is the number of optimizer steps done, `version` that of the weights the engine holds (None: the same).
        """
        assert self._current is None, "done() comes before the next batch"
        self._step, self._wait_s, self._ages = step, 0.0, []
        self._version = step if version is None else version
        self._check_age(self._ahead[0].version if self._ahead else self._version)
        self._current = self._ahead.popleft() if self._ahead else self._start(self.planner.next_batch())
        self.top_up()

    def top_up(self, version: int | None = None) -> None:
        """Start batches ahead as far as depth and staleness admit; to be called whenever the engine got new weights."""
        self._version = self._version if version is None else version
        while self._current is not None and len(self._ahead) < self.depth:
            step = self._step + (len(self._ahead) + 1) * self.steps_per_batch
            too_old = self.max_staleness is not None and step - self._version > self.max_staleness
            if too_old or (self.last_step is not None and step >= self.last_step):
                return
            self._ahead.append(self._start(self.planner.next_batch()))

    def arrived(self) -> Iterator[SampledGroup]:
        """Groups of the current batch, each as soon as it is complete."""
        assert self._current is not None, "begin() comes before arrived()"
        yield from self._arrive(self._current)

    def more(self, count: int) -> list[SampledGroup]:
        """Further groups for the current batch, by the weights the engine has now (dynamic sampling)."""
        assert self._current is not None, "more() adds to a batch that was taken"
        self._check_age(self._version)
        self._extra.append(self._start(self.planner.resample(count)))
        return self._all(self._extra[-1])

    def done(self) -> None:
        """The current batch has been trained on: a checkpoint from now on counts it as consumed."""
        assert self._current is not None, "done() without a batch"
        self._current, self._extra = None, []
        self.planner.done()

    def metrics(self, step: int | None = None) -> dict[str, float]:
        """Of the current batch (before done) and of what runs ahead of it.

        Staleness is as of `step` optimizer steps done; None: when the first on this batch begins.
        """
        ages = [(self._step if step is None else step) - version for version in self._ages]
        futures = [future for batch in self._ahead for _, future in batch.groups]
        metrics = {
            "rollout/staleness_max": float(max(ages, default=0)),
            "rollout/staleness_mean": sum(ages) / len(ages) if ages else 0.0,
            "time/wait_s": self._wait_s,
            **self.planner.metrics(),
        }
        if self.depth:
            metrics["rollout/queued_groups"] = float(len(futures))
            metrics["rollout/queued_ready_frac"] = sum(future.done() for future in futures) / max(len(futures), 1)
        return metrics

    def close(self) -> None:
        """End what runs; the planner goes on counting it as pending. May be called twice."""
        for batch in (*([self._current] if self._current else []), *self._extra, *self._ahead):
            for _, future in batch.groups:
                future.cancel()
        self._ahead.clear()
        self._current, self._extra = None, []
        self.source.close()

    def _start(self, groups: Sequence[Planned]) -> PendingBatch:
        futures = self.source.start([self.planner.jobs(planned) for planned in groups])
        assert len(futures) == len(groups), f"the source began {len(futures)} of {len(groups)} groups"
        return PendingBatch(list(zip(groups, futures, strict=True)), self._version)

    def _all(self, batch: PendingBatch) -> list[SampledGroup]:
        made = {group.planned.number: group for group in self._arrive(batch)}
        return [made[planned.number] for planned, _ in batch.groups]

    def _arrive(self, batch: PendingBatch) -> Iterator[SampledGroup]:
        waiting = {future: planned for planned, future in batch.groups}
        looked = self._clock()
        while waiting:
            started = self._clock()
            self._wait(list(waiting), timeout=LOOK_S, return_when=FIRST_COMPLETED)
            self._wait_s += self._clock() - started
            for future in [future for future in waiting if future.done()]:
                yield self._sampled_group(waiting.pop(future), future, batch)
            if waiting and self._clock() - looked >= LOOK_S:
                self._tend(self._step)
                looked = self._clock()

    def _sampled_group(self, planned: Planned, future: Future[list[Completion]], batch: PendingBatch) -> SampledGroup:
        try:
            completions = future.result()
        except Exception as error:
            words = " ".join(str(error).split()) or type(error).__name__
            kind = ValueError if isinstance(error, ValueError) else RuntimeError
            raise kind(f"prompt={planned.prompt.source}: its completions could not be made; {words}") from error
        size = self.planner.num_generations
        assert len(completions) == size, f"{planned.prompt.source}: {len(completions)} completions, not {size}"
        oldest = [min(version for version, _ in c.versions) for c in completions if c.versions]
        assert min(oldest, default=batch.version) >= batch.version, (planned.number, min(oldest), batch.version)
        self._ages += oldest
        return SampledGroup(planned, completions)

    def _check_age(self, version: int) -> None:
        assert self.max_staleness is None or self._step - version <= self.max_staleness, (
            f"step {self._step + 1} would train on completions begun by version {version}: max_staleness is "
            f"{self.max_staleness}, so load newer weights first, and take {self.steps_per_batch} steps on each batch"
        )


def sync_due(step: int, version: int, interval: int) -> bool:
    """Whether weights as old as `version` are to be replaced; no multiple of the interval can be missed."""
    return step - version >= interval
