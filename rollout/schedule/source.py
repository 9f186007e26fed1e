"""Source: where completions come from (an engine, episodes with tools, a user function, an environment).

    source = EngineSource(engine, sampling)
    futures = source.start([[Job(prompt, seed=1), Job(prompt, seed=2)]])    # one group of two; starts at once
    futures[0].result() -> [Completion, Completion]

The training loop asks a source, never an engine, so every kind of rollout can run ahead of training in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import NamedTuple, Protocol

from data.types import Prompt
from rollout.engine import Completion, Engine, Request, Sampling

LOOK_S = 0.5  # how often a thread that waits for completions calls tend()


class Job(NamedTuple):
    """One completion to sample."""

    prompt: Prompt
    seed: int


class Source(Protocol):
    """Groups of jobs in, groups of completions out."""

    def start(self, groups: Sequence[Sequence[Job]]) -> list[Future[list[Completion]]]:
        """Start sampling; one future per group (G jobs of the same prompt), its completions in the order of the jobs.

        Called only by the thread that owns the weights. In-process sources have finished when this returns.
        """

    def close(self) -> None:
        """Stop what the source itself started, not the engine; may be called twice."""


class EngineSource:
    """One completion per job, straight from the engine."""

    def __init__(self, engine: Engine, sampling: Sampling) -> None:
        self.engine, self.sampling = engine, sampling

    def start(self, groups: Sequence[Sequence[Job]]) -> list[Future[list[Completion]]]:
        requests = [[Request(prompt_ids=job.prompt.ids, seed=job.seed) for job in group] for group in groups]
        if self.engine.concurrent:
            return [self.engine.submit(group, self.sampling) for group in requests]
        # In process the batch is the unit of work: all groups decode together.
        completions = iter(self.engine.generate([request for group in requests for request in group], self.sampling))
        return [finished([next(completions) for _ in group]) for group in requests]

    def close(self) -> None:
        """Nothing to do: the engine stops what it runs."""


def finished(completions: list[Completion]) -> Future[list[Completion]]:
    """A future that already has its result."""
    future: Future[list[Completion]] = Future()
    future.set_result(completions)
    return future


def run_groups(
    source: Source, groups: Sequence[Sequence[Job]], tend: Callable[[], None] = lambda: None
) -> list[list[Completion]]:
    """Start and wait, calling tend() about twice a second. The first group that fails cancels the others."""
    futures = source.start(groups)
    try:
        while True:
            wait(futures, LOOK_S, FIRST_EXCEPTION)
            done = [future.result() for future in futures if future.done()]  # raises what a group has raised
            if len(done) == len(futures):
                return done
            tend()
    finally:
        for future in futures:
            future.cancel()
