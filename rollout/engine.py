"""The Engine protocol and the types that cross it: plain Python lists, no tensors (routes and sets are NumPy arrays).

    sampling = Sampling(temperature=1.0, max_tokens=8, stop_ids=(2,))
    request  = Request(prompt_ids=[5, 6, 7], seed=11)
    -> Completion(prompt_ids=[5, 6, 7], ids=[9, 8, 2], logps=[-0.1, -1.2, -0.3], finish_reason="stop", text="98")

The training loop asks a Source, never an engine, so every kind of rollout can run ahead of training:

    futures = EngineSource(engine, sampling).start([[Request.of(prompt, seed=1), Request.of(prompt, seed=2)]])
    futures[0].result() -> [Completion, Completion]              # one group of two

A Group is a prompt with its completions and rewards so far. If a stop id ended a completion, `ids` includes the stop
id, so that the model is trained to stop.

Engines: engines/local.py samples in this process, engines/vllm.py on vLLM servers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from data.errors import UserError
from data.types import Prompt
from rollout.sets import LIMIT

T = TypeVar("T")
POLL_S = 0.5  # interval between poll() calls while a thread waits for completions


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling settings shared by all requests of one call."""

    temperature: float = 1.0  # 0 = greedy (evaluation only)
    max_tokens: int = 256
    stop_ids: tuple[int, ...] = ()  # end-of-turn and end-of-text ids; the completion includes the id that ended it
    stop: tuple[str, ...] = ()  # strings that end a completion; it includes the token that completes the string
    top_p: float = 1.0
    top_k: int = 0  # 0 = all
    min_p: float = 0.0  # lowest probability, relative to the most likely token's; training only
    for_training: bool = False  # completions are trained on: log-probs are of the distribution that was sampled from
    tokens_stay: bool = False  # several ranks that sample in process keep ids and log-probs; rank 0 gets their number

    @property
    def set_size(self) -> int:
        """Maximum ids to record per token, for training (rollout/sets.py); 0: none, because all are possible."""
        is_limited = self.top_p < 1 or self.top_k > 0 or self.min_p > 0
        return (self.top_k or LIMIT + 1) if self.for_training and is_limited else 0

    def fits(self, completion: Completion) -> bool:
        """Return whether to use or continue a completion of a checkpoint: a resume may have changed the settings."""
        if completion.finish_reason == "unfinished" and len(completion.ids) >= self.max_tokens:
            return False
        parts = [part for part in (completion, *completion.branches) if part.trained]
        return all((part.sets is None) == (self.set_size == 0) for part in parts)  # a micro-batch has all sets or none


@dataclass(frozen=True, kw_only=True)
class Request:
    """One completion to sample."""

    prompt_ids: list[int]
    seed: int  # same seed, prompt and weights: same completion in any batch
    prompt: Prompt | None = None  # the data row, for sources that need more than ids
    max_tokens: int | None = None  # in-process engine only; None: use Sampling.max_tokens
    conversation: Hashable | None = None  # key under which the in-process engine caches this turn for the next
    so_far: Completion | None = None  # in-process engine only: an unfinished completion to continue

    @classmethod
    def of(cls, prompt: Prompt, seed: int) -> Request:
        return cls(prompt_ids=prompt.ids, seed=seed, prompt=prompt)


@dataclass(frozen=True, kw_only=True)
class Completion:
    prompt_ids: list[int]
    ids: list[int]
    logps: list[float]  # under the sampling distribution, including temperature
    finish_reason: Literal["stop", "length", "unfinished"]  # unfinished: to be continued (partial rollouts)
    text: str  # decoded ids without special tokens and without the stop string
    versions: list[tuple[int, int]]  # (weight version, number of tokens it sampled), in order
    mask: list[bool] | None = None  # True = sampled by the model; environment tokens are False, with logp 0
    messages: list[dict[str, Any]] | None = None  # multi-turn only: all messages after the prompt
    columns: dict[str, Any] = field(default_factory=dict)  # episode columns for rewards: env_reward, num_turns, ...
    routes: np.ndarray | None = field(default=None, compare=False)  # (prompt and ids, L, k) experts: rollout/routes.py
    sets: np.ndarray | None = field(default=None, compare=False)  # ids that top-k, top-p or min-p kept: rollout/sets.py
    branches: tuple[Completion, ...] = ()  # other branches of the episode; each sampled token is trained in one of them

    @property
    def trained(self) -> int:
        """Number of tokens that the model sampled, without those of other branches."""
        return len(self.ids) if self.mask is None else sum(self.mask)


def join_versions(versions: Sequence[tuple[int, int]], num_tokens: int) -> list[tuple[int, int]]:
    """Return the versions of the first num_tokens sampled tokens, with equal neighbours merged.

    >>> join_versions([(3, 2), (3, 4), (4, 5)], 8)
    [(3, 6), (4, 2)]
    """
    joined: list[tuple[int, int]] = []
    for version, count in versions:
        count = min(count, num_tokens - sum(before for _, before in joined))
        if count and joined and joined[-1][0] == version:
            joined[-1] = (version, joined[-1][1] + count)
        elif count:
            joined.append((version, count))
    return joined


@dataclass(frozen=True)
class Group:
    """One prompt and its completions: first planned, then sampled, then rewarded."""

    number: int  # index of the group in the run; determines the seeds
    prompt: Prompt
    row: int  # index of the prompt in the data
    kind: Literal["fresh", "reroll", "resample"] = "fresh"
    completions: list[Completion] = field(default_factory=list)  # empty until sampled; may be unfinished if queued
    values: list[list[float | None]] = field(default_factory=list)  # [completion][reward]; None = does not apply
    replayed: bool = False
    extra: list[dict[str, Any]] | None = None  # per completion: columns logged by reward functions; not in checkpoints


def check_sampling(sampling: Sampling) -> None:
    """Raise for invalid settings, and for sets that would be too large to train on."""
    if not sampling.temperature >= 0:
        raise UserError(f"temperature={sampling.temperature}: must be above 0, or 0 for greedy")
    if sampling.max_tokens < 1:
        raise UserError(f"max_tokens={sampling.max_tokens}: must be 1 or more")
    if not 0 < sampling.top_p <= 1:
        raise UserError(f"top_p={sampling.top_p}: must be in (0, 1]; 1 keeps every token")
    if sampling.top_k < 0:
        raise UserError(f"top_k={sampling.top_k}: must be 0 (no limit) or more")
    if any(not text for text in sampling.stop):
        raise UserError("stop='': an empty stop string would end every completion; remove it")
    if not 0 <= sampling.min_p < 1:
        raise UserError(f"min_p={sampling.min_p}: must be 0 or more and below 1; 0 keeps every token")
    if sampling.for_training and sampling.top_k > LIMIT:
        raise UserError(f"top_k={sampling.top_k}: at most {LIMIT:,} ids per token can be recorded; lower --top-k")
    assert sampling.for_training or not sampling.min_p, "min_p is for training"


class Engine(Protocol):
    """Token ids in, token ids and log-probs out."""

    version: int
    """Version of the weights that sample the next token: the optimizer step they come from."""

    concurrent: bool
    """Whether submit returns immediately and sampling runs in the background."""

    @property
    def asleep(self) -> bool:
        """Whether load must be called before the next request, even if the weights have not changed."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Return one completion per request, in order."""

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> Future[list[Completion]]:
        """Start generate without waiting. An in-process engine has finished when this returns."""

    def poll(self, version: int | None = None) -> None:
        """Send weights to restarted servers. The thread that owns the weights calls this while it waits.

        `version`: version of the trainer's current weights, if they may be newer than the loaded weights.
        """

    def load(self, version: int) -> None:
        """Take the trainer's current weights as `version` and wake the engine."""

    def sleep(self) -> None:
        """Release GPU memory to the trainer until the next load."""

    def metrics(self) -> dict[str, float]:
        """Return engine metrics since the last call."""

    def close(self) -> None:
        """Stop everything the engine started. May be called twice."""


class Source(Protocol):
    """Groups of requests in, groups of completions out."""

    def start(self, groups: Sequence[Sequence[Request]]) -> list[Future[list[Completion]]]:
        """Start sampling and return one future per group (G requests of the same prompt), completions in order.

        Called only by the thread that owns the weights. An in-process source has finished when this returns, or samples
        in advance(), which the waiting thread calls until it returns False.
        """

    def close(self) -> None:
        """Stop everything the source started, except the engine. May be called twice."""


class EngineSource:
    """Single-turn source: one engine completion per request."""

    def __init__(self, engine: Engine, sampling: Sampling, *, streams: bool = False) -> None:
        """streams: sample in advance() with an in-process engine, so that groups can be rewarded as they finish."""
        self.engine, self.sampling = engine, sampling
        self._streams = streams and not engine.concurrent and hasattr(engine, "stream")
        self._sampling: Iterator[None] | None = None  # the batch in progress

    def start(self, groups: Sequence[Sequence[Request]]) -> list[Future[list[Completion]]]:
        if self.engine.concurrent:
            return [self.engine.submit(group, self.sampling) for group in groups]
        # In process, all groups decode in one batch.
        requests = [request for group in groups for request in group]
        if self._streams:
            assert self._sampling is None, "start() called before the previous batch was complete"
            futures: list[Future[list[Completion]]] = [Future() for _ in groups]
            self._sampling = self._sample(requests, groups, futures)
            return futures
        completions = iter(self.engine.generate(requests, self.sampling))
        return [finished([next(completions) for _ in group]) for group in groups]

    def advance(self) -> bool:
        """Sample until another group has finished; return False if no batch is in progress."""
        if self._sampling is None:
            return False
        try:
            next(self._sampling)
        except StopIteration:
            self._sampling = None
        return True

    def close(self) -> None:
        if self._sampling is not None:
            self._sampling.close()
            self._sampling = None

    def _sample(
        self, requests: Sequence[Request], groups: Sequence[Sequence[Request]], futures: Sequence[Future]
    ) -> Iterator[None]:
        group_of = [g for g, group in enumerate(groups) for _ in group]
        completed: list[dict[int, Completion]] = [{} for _ in groups]  # by request index
        for ended in self.engine.stream(requests, self.sampling):
            for i, completion in ended:
                completed[group_of[i]][i] = completion
            full = [g for g in {group_of[i] for i, _ in ended} if len(completed[g]) == len(groups[g])]
            for g in sorted(full):
                futures[g].set_result([completed[g][i] for i in sorted(completed[g])])
            if full and not all(future.done() for future in futures):
                yield  # not after the last group: the engine must first restore its state, such as no_grad


def finished(result: T) -> Future[T]:
    """Return a future that already has its result."""
    future: Future[T] = Future()
    future.set_result(result)
    return future


def run_groups(
    source: Source, groups: Sequence[Sequence[Request]], poll: Callable[[], None] = lambda: None
) -> list[list[Completion]]:
    """Sample groups and wait, calling poll() every POLL_S seconds. If a group fails, the others are cancelled."""
    futures = source.start(groups)
    advance = getattr(source, "advance", lambda: False)
    try:
        while True:
            if not advance():
                wait(futures, POLL_S, FIRST_EXCEPTION)
            done = [future.result() for future in futures if future.done()]  # raises a group's error
            if len(done) == len(futures):
                return done
            poll()
    finally:
        for future in futures:
            future.cancel()


def context_of(config: Any) -> int | None:
    """Return the longest sequence that a model can run; None if it has no limit."""
    config = config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # longer sequences would change the frequencies of all others in a pass
        return rope["original_max_position_embeddings"]
    return getattr(config, "max_position_embeddings", None)
