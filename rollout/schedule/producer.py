"""Producer: starts rollouts ahead of training, as far as max_staleness admits.

    producer = Producer(source, planner, depth=1, max_staleness=1, tend=engine.tend)
    while step < total_steps:
        if sync_due(step, engine.version, interval):
            engine.load(step)                              # completions in flight continue with the new weights
        producer.begin(step, engine.version)               # the next batch, and batches ahead of it
        for group in producer.arrived():                   # waits for each group
            ...                                            # rewards
        ...                                                # train: step += 1
        producer.done()                                    # planner.state_dict() now counts the batch as consumed

A batch is started only once `step that will train on it - engine.version <= max_staleness`. Steps per batch are fixed,
so its staleness is known when it starts, however long its completions take. With depth=0 each batch is sampled when it
is asked for, and nothing runs ahead.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace

from rollout.engine import LOOK_S, Completion, Group, Source
from rollout.schedule.planner import Planner


@dataclass(frozen=True)
class PendingBatch:
    """A batch whose sampling has started."""

    groups: list[tuple[Group, Future[list[Completion]]]]
    version: int  # of the engine's weights when sampling started


class Producer:
    """Starts batches ahead of time and returns them in order. Called only by the thread that trains."""

    def __init__(
        self,
        source: Source,
        planner: Planner,
        *,
        depth: int = 0,  # batches sampled ahead of the one in training
        max_staleness: int | None = None,  # optimizer steps; None: limited by depth alone
        steps_per_batch: int = 1,  # optimizer steps on each batch
        last_step: int | None = None,  # of the run: no batch is started that would not be trained on
        poll: Callable[[int], None] = lambda step: None,  # called about twice a second while waiting
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[..., object] = wait,  # of concurrent.futures; tests replace it with the clock
    ) -> None:
        assert depth >= 0 and steps_per_batch >= 1, (depth, steps_per_batch)
        self.source, self.planner, self.depth = source, planner, depth
        self.max_staleness, self.steps_per_batch, self.last_step = max_staleness, steps_per_batch, last_step
        self._tend, self._clock, self._wait = poll, clock, wait
        self._ahead: deque[PendingBatch] = deque()
        self._current: PendingBatch | None = None
        self._extra: list[PendingBatch] = []  # groups added to the current batch
        self._step = 0  # optimizer steps done before the current batch
        self._advance = getattr(source, "advance", lambda: False)
        self._version = -1  # of the engine, as last reported
        self._wait_s = 0.0
        self._ages: list[int] = []  # oldest version in each completion of the current batch

    def begin(self, step: int, version: int | None = None) -> None:
        """Make the next batch the current one and start batches ahead of it; its groups come from arrived().

        `step`: optimizer steps done. `version`: that of the engine's weights; None means `step`.
        """
        assert self._current is None, "finish_rollout() comes before the next sample()"
        self._step, self._wait_s, self._ages = step, 0.0, []
        self._version = step if version is None else version
        self._check_age(self._ahead[0].version if self._ahead else self._version)
        self._current = self._ahead.popleft() if self._ahead else self._start(self.planner.next_batch())
        self.top_up()

    def top_up(self, version: int | None = None) -> None:
        """Start batches ahead as far as depth and staleness admit; call it whenever the engine got new weights."""
        self._version = self._version if version is None else version
        while self._current is not None and len(self._ahead) < self.depth:
            step = self._step + (len(self._ahead) + 1) * self.steps_per_batch
            too_old = self.max_staleness is not None and step - self._version > self.max_staleness
            if too_old or (self.last_step is not None and step >= self.last_step):
                return
            self._ahead.append(self._start(self.planner.next_batch()))

    def arrived(self) -> Iterator[Group]:
        """Groups of the current batch, each yielded as soon as it is complete."""
        assert self._current is not None, "begin() comes before arrived()"
        yield from self._arrive(self._current)

    def more(self, count: int) -> list[Group]:
        """More groups for the current batch, sampled with the engine's current weights (dynamic sampling).

        Waits for all of them; they are in the order in which they were planned.
        """
        assert self._current is not None, "begin() comes before more()"
        self._check_age(self._version)
        self._extra.append(self._start(self.planner.resample(count)))
        return sorted(self._arrive(self._extra[-1]), key=lambda group: group.number)

    def done(self) -> None:
        """The current batch has been trained on: checkpoints count it as consumed from now on."""
        assert self._current is not None, "done() without a batch"
        self._current, self._extra = None, []
        self.planner.done()

    def metrics(self, step: int | None = None) -> dict[str, float]:
        """Metrics of the current batch (before done) and of the batches ahead of it.

        Staleness is measured at `step` optimizer steps done; None: at the first step on this batch.
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
        """Cancel what runs; the planner still counts it as pending. May be called twice."""
        for batch in (*([self._current] if self._current else []), *self._extra, *self._ahead):
            for _, future in batch.groups:
                future.cancel()
        self._ahead.clear()
        self._current, self._extra = None, []
        self.source.close()

    def _start(self, groups: Sequence[Group]) -> PendingBatch:
        futures = self.source.start([self.planner.requests(planned) for planned in groups])
        assert len(futures) == len(groups), f"the source started {len(futures)} of {len(groups)} groups"
        return PendingBatch(list(zip(groups, futures, strict=True)), self._version)

    def _arrive(self, batch: PendingBatch) -> Iterator[Group]:
        waiting = {future: planned for planned, future in batch.groups}
        looked = self._clock()
        while waiting:
            started = self._clock()
            if not self._advance():
                self._wait(list(waiting), timeout=LOOK_S, return_when=FIRST_COMPLETED)
            self._wait_s += self._clock() - started
            for future in [future for future in waiting if future.done()]:
                yield self._sampled_group(waiting.pop(future), future, batch)
            if waiting and self._clock() - looked >= LOOK_S:
                self._tend(self._step)
                looked = self._clock()

    def _sampled_group(self, planned: Group, future: Future[list[Completion]], batch: PendingBatch) -> Group:
        try:
            completions = future.result()
        except Exception as error:
            words = " ".join(str(error).split()) or type(error).__name__
            kind = ValueError if isinstance(error, ValueError) else RuntimeError
            raise kind(f"prompt={planned.prompt.source}: its completions could not be sampled; {words}") from error
        size = self.planner.num_generations
        assert len(completions) == size, f"{planned.prompt.source}: {len(completions)} completions, not {size}"
        oldest = [min(version for version, _ in c.versions) for c in completions if c.versions]
        assert min(oldest, default=batch.version) >= batch.version, (planned.number, min(oldest), batch.version)
        self._ages += oldest
        return replace(planned, completions=completions)

    def _check_age(self, version: int) -> None:
        assert self.max_staleness is None or self._step - version <= self.max_staleness, (
            f"step {self._step + 1} would train on completions started by version {version}: max_staleness is "
            f"{self.max_staleness}, so load newer weights first, and take {self.steps_per_batch} steps on each batch"
        )


def sync_due(step: int, version: int, interval: int) -> bool:
    """Whether a weight sync is due; as a difference, no multiple of the interval can be missed."""
    return step - version >= interval
