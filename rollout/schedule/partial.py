"""Partial rollouts: a batch is the groups that finish first; the others continue with the next weights.

    planner = Planner(loader, ..., num_queued=4)                       # groups in flight in addition to a batch
    producer = PartialProducer(engine, sampling, planner, max_staleness=2)

Sampling stops as soon as enough groups have finished, so a few long completions do not keep the engine waiting. The
tokens of unfinished completions stay in planner.queued, and therefore in checkpoints, with the log-prob and the weight
version that sampled each. Before the next batch the engine computes their keys and values with its new weights.

Of the finished groups, those with the oldest tokens are taken first. A group that would be older than max_staleness in
the next batch must finish for this one. At most batch_size groups are queued, so a batch always has room for these.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rollout.engine import Completion, EngineSource, Group, Sampling, finished
from rollout.schedule.planner import Planner
from rollout.schedule.producer import PendingBatch, Producer


class PartialProducer(Producer):
    """A Producer for the in-process engine; groups of a batch arrive together."""

    def __init__(self, engine: Any, sampling: Sampling, planner: Planner, **options: Any) -> None:
        super().__init__(EngineSource(engine, sampling), planner, **options)
        self.engine, self.sampling = engine, sampling

    def metrics(self, step: int | None = None) -> dict[str, float]:
        queued, metrics = self.planner.queued, super().metrics(step)
        batches = (*([self._current] if self._current else []), *self._extra)
        counts = [len(c.versions) for batch in batches for _, future in batch.groups for c in future.result()]
        metrics["rollout/queued_groups"] = float(len(queued))
        metrics["rollout/queued_ready_frac"] = sum(map(is_finished, queued)) / max(len(queued), 1)
        metrics["rollout/continued_frac"] = sum(count > 1 for count in counts) / max(len(counts), 1)
        return metrics

    def _start(self, groups: Sequence[Group]) -> PendingBatch:
        """Sample the queued groups and `groups` until enough have finished; queue the others."""
        in_flight = [self._begun(group) for group in (*self.planner.queued, *groups)]
        count = min(len(in_flight) - self.planner.num_queued, self.planner.batch_size)
        in_flight = self._sample(in_flight, count)
        ready = sorted(filter(is_finished, in_flight), key=lambda group: (self._oldest(group), group.number))
        taken = sorted(ready[:count], key=lambda group: group.number)
        numbers = {group.number for group in taken}
        self.planner.requeue(taken, [group for group in in_flight if group.number not in numbers])
        version = min(map(self._oldest, taken), default=self._version)
        return PendingBatch([(group, finished(group.completions)) for group in taken], version)

    def _begun(self, group: Group) -> Group:
        """Return the group with completions, to be continued or new.

        A group that is too old or does not fit starts again; this happens only if a resume has changed settings.
        """
        if group.completions and not self._is_too_old(group, 0) and all(map(self.sampling.fits, group.completions)):
            return group
        new = Completion(
            prompt_ids=group.prompt.ids, ids=[], logps=[], finish_reason="unfinished", text="", versions=[]
        )
        return replace(group, completions=[new] * self.planner.num_generations)

    def _sample(self, groups: Sequence[Group], count: int) -> list[Group]:
        """Sample until `count` of the groups have finished, and those that would be too old for the next batch."""
        running = [group for group in groups if not is_finished(group)]
        due = [i for i, group in enumerate(running) if self._is_too_old(group, self.steps_per_batch)]
        missing = max(0, count - len(groups) + len(running))
        if not missing and not due:
            return list(groups)
        requests = []
        for group in running:
            pairs = zip(self.planner.requests(group), group.completions, strict=True)
            requests.append([replace(request, so_far=c) for request, c in pairs if is_unfinished(c)])
        sampled = self.engine.generate_groups(requests, self.sampling, count=missing, due=due)
        new = itertools.chain(*sampled)
        return [replace(g, completions=[next(new) if is_unfinished(c) else c for c in g.completions]) for g in groups]

    def _oldest(self, group: Group) -> int:
        """Oldest weight version that sampled a token of the group."""
        return min((version for c in group.completions for version, _ in c.versions), default=self._version)

    def _is_too_old(self, group: Group, steps: int) -> bool:
        """Return whether the group is too old for a batch that begins in this many optimizer steps."""
        return self.max_staleness is not None and self._step + steps - self._oldest(group) > self.max_staleness


def is_unfinished(completion: Completion) -> bool:
    return completion.finish_reason == "unfinished"


def is_finished(group: Group) -> bool:
    return not any(map(is_unfinished, group.completions))
