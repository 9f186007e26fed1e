"""Sample batches ahead of training, as far as max_staleness allows.

    producer = Producer(source, planner, depth=1, max_staleness=1, poll=engine.poll)
    while step < total_steps:
        if sync_due(step, engine.version, interval):
            engine.load(step)                              # completions in flight continue with the new weights
        producer.begin(step, engine.version)               # start the next batch and batches ahead of it
        for group in producer.arrived():                   # wait for each group
            ...                                            # compute rewards
        ...                                                # train: step += 1
        producer.done()                                    # planner.state_dict() now counts the batch as consumed

A batch is started only when `step that will train on it - engine.version <= max_staleness`. The number of steps per
batch is fixed, so the staleness is known at the start, however long the completions take. With depth=0 each batch is
sampled on demand.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace

from data.errors import UserError
from rollout.engine import POLL_S, Completion, Group, Source
from rollout.schedule.planner import Planner


@dataclass(frozen=True)
class PendingBatch:
    """A batch whose sampling has started."""

    groups: list[tuple[Group, Future[list[Completion]]]]
    version: int  # weight version when sampling started


class Producer:
    """Starts batches ahead of time and returns them in order. Called only by the training thread."""

    def __init__(
        self,
        source: Source,
        planner: Planner,
        *,
        depth: int = 0,  # batches sampled ahead of the current batch
        max_staleness: int | None = None,  # optimizer steps; None: limited only by depth
        steps_per_batch: int = 1,  # optimizer steps on each batch
        last_step: int | None = None,  # end of the run; batches beyond it are not started
        poll: Callable[[int], None] = lambda step: None,  # called every POLL_S seconds while waiting
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[..., object] = wait,  # concurrent.futures.wait; tests replace it and the clock
    ) -> None:
        assert depth >= 0 and steps_per_batch >= 1, (depth, steps_per_batch)
        self.source, self.planner, self.depth = source, planner, depth
        self.max_staleness, self.steps_per_batch, self.last_step = max_staleness, steps_per_batch, last_step
        self._poll, self._clock, self._wait = poll, clock, wait
        self._ahead: deque[PendingBatch] = deque()
        self._current: PendingBatch | None = None
        self._extra: list[PendingBatch] = []  # groups added to the current batch
        self._step = 0  # optimizer steps done before the current batch
        self._advance = getattr(source, "advance", lambda: False)
        self._version = -1  # engine version, as last reported
        self._wait_s = 0.0
        self._ages: list[int] = []  # oldest version in each completion of the current batch

    def begin(self, step: int, version: int | None = None) -> None:
        """Make the next batch the current batch and start batches ahead of it. arrived() yields its groups.

        `step`: optimizer steps done. `version`: engine's weight version; None: `step`.
        """
        assert self._current is None, "sample() called before finish_rollout()"
        self._step, self._wait_s, self._ages = step, 0.0, []
        self._version = step if version is None else version
        self._check_age(self._ahead[0].version if self._ahead else self._version)
        self._current = self._ahead.popleft() if self._ahead else self._start(self.planner.next_batch())
        self.top_up()

    def top_up(self, version: int | None = None) -> None:
        """Start batches ahead as far as depth and staleness allow. Call it whenever the engine has new weights."""
        self._version = self._version if version is None else version
        while self._current is not None and len(self._ahead) < self.depth:
            step = self._step + (len(self._ahead) + 1) * self.steps_per_batch
            too_old = self.max_staleness is not None and step - self._version > self.max_staleness
            if too_old or (self.last_step is not None and step >= self.last_step):
                return
            self._ahead.append(self._start(self.planner.next_batch()))

    def arrived(self) -> Iterator[Group]:
        """Yield groups of the current batch as they complete."""
        assert self._current is not None, "arrived() called before begin()"
        yield from self._arrive(self._current)

    def more(self, count: int) -> list[Group]:
        """Sample more groups for the current batch with the current weights; return them in planned order."""
        assert self._current is not None, "more() called before begin()"
        self._check_age(self._version)
        self._extra.append(self._start(self.planner.resample(count)))
        return sorted(self._arrive(self._extra[-1]), key=lambda group: group.number)

    def done(self) -> None:
        """Mark the current batch as trained on; from now on checkpoints count it as consumed."""
        assert self._current is not None, "done() called before begin()"
        self._current, self._extra = None, []
        self.planner.done()

    def metrics(self, step: int | None = None) -> dict[str, float]:
        """Return metrics of the current batch (call this before done) and of the batches ahead.

        Staleness is measured after `step` optimizer steps; None: at the first step on this batch.
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
        """Cancel all sampling. The planner still counts the groups as pending. May be called twice."""
        for batch in (*([self._current] if self._current else []), *self._extra, *self._ahead):
            for _, future in batch.groups:
                future.cancel()
        self._ahead.clear()
        self._current, self._extra = None, []
        self.source.close()

    def _start(self, groups: Sequence[Group]) -> PendingBatch:
        futures = self.source.start([self.planner.requests(group) for group in groups])
        assert len(futures) == len(groups), f"the source started {len(futures)} of {len(groups)} groups"
        return PendingBatch(list(zip(groups, futures, strict=True)), self._version)

    def _arrive(self, batch: PendingBatch) -> Iterator[Group]:
        waiting = {future: group for group, future in batch.groups}
        polled = self._clock()
        while waiting:
            started = self._clock()
            if not self._advance():
                self._wait(list(waiting), timeout=POLL_S, return_when=FIRST_COMPLETED)
            self._wait_s += self._clock() - started
            for future in [future for future in waiting if future.done()]:
                yield self._sampled_group(waiting.pop(future), future, batch)
            if waiting and self._clock() - polled >= POLL_S:
                self._poll(self._step)
                polled = self._clock()

    def _sampled_group(self, group: Group, future: Future[list[Completion]], batch: PendingBatch) -> Group:
        try:
            completions = future.result()
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            kind = UserError if isinstance(error, ValueError) else RuntimeError
            raise kind(f"prompt={group.prompt.source}: sampling failed ({reason})") from error
        size = self.planner.num_generations
        assert len(completions) == size, f"{group.prompt.source}: {len(completions)} completions, not {size}"
        oldest = [min(version for version, _ in c.versions) for c in completions if c.versions]
        assert min(oldest, default=batch.version) >= batch.version, (group.number, min(oldest), batch.version)
        self._ages += oldest
        return replace(group, completions=completions)

    def _check_age(self, version: int) -> None:
        assert self.max_staleness is None or self._step - version <= self.max_staleness, (
            f"step {self._step + 1} would train on completions of version {version}, older than max_staleness="
            f"{self.max_staleness}; load newer weights first, and take {self.steps_per_batch} steps per batch"
        )


def sync_due(step: int, version: int, interval: int) -> bool:
    """Return whether a weight sync is due. Comparing the difference cannot miss a multiple of the interval."""
    return step - version >= interval
