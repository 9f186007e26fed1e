"""The Engine protocol and the types that cross it: plain Python lists, no tensors.

    sampling = Sampling(temperature=1.0, max_tokens=8, stop_ids=(2,))
    request  = Request(prompt_ids=[5, 6, 7], seed=11)
    -> Completion(prompt_ids=[5, 6, 7], ids=[9, 8, 2], logps=[-0.1, -1.2, -0.3], finish_reason="stop", text="98")

The training loop asks a Source, never an engine, so every kind of rollout can run ahead of training in the same way:

    futures = EngineSource(engine, sampling).start([[Request.of(prompt, seed=1), Request.of(prompt, seed=2)]])
    futures[0].result() -> [Completion, Completion]              # one group of two

A Group is a prompt with the completions and rewards it has got so far. When a stop id ended a completion, `ids` ends
with it, so that the model is trained to stop.

Engines: engines/local.py samples in this process, engines/vllm.py on vLLM servers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from data.errors import UserError
from data.types import Prompt

LOOK_S = 0.5  # how often a thread that waits for completions calls tend()


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to sample; shared by all requests of one call."""

    temperature: float = 1.0  # 0 = greedy (evaluation only)
    max_tokens: int = 256
    stop_ids: tuple[int, ...] = ()  # end-of-turn and end-of-text ids; the completion keeps the id that ended it
    stop: tuple[str, ...] = ()  # strings that end a completion, with the token that completes the string
    top_p: float = 1.0  # evaluation only: training needs log-probs of the full distribution
    top_k: int = 0  # 0 = all; evaluation only
    for_training: bool = False  # the samples will be trained on: refuse anything but the full distribution


@dataclass(frozen=True, kw_only=True)
class Request:
    """One completion to sample."""

    prompt_ids: list[int]
    seed: int  # same seed, prompt and weights: same completion, whatever else is in the batch
    prompt: Prompt | None = None  # the row it came from, for sources that need more than ids
    max_tokens: int | None = None  # of this completion; None: the sampling's (in-process engine only)
    conversation: Hashable | None = None  # its next turn may re-use what the in-process engine has cached of this one

    @classmethod
    def of(cls, prompt: Prompt, seed: int) -> Request:
        return cls(prompt_ids=prompt.ids, seed=seed, prompt=prompt)


@dataclass(frozen=True, kw_only=True)
class Completion:
    prompt_ids: list[int]
    ids: list[int]
    logps: list[float]  # log-prob of each id under the distribution it was sampled from (temperature included)
    finish_reason: Literal["stop", "length"]
    text: str  # decoded ids without special tokens and without the stop string
    versions: list[tuple[int, int]]  # (weight version, number of tokens it sampled), in order
    mask: list[bool] | None = None  # True = sampled by the model; tokens of an environment are False, with logp 0
    messages: list[dict[str, Any]] | None = None  # several turns only: everything after the prompt
    columns: dict[str, Any] = field(default_factory=dict)  # from the episode, for rewards: env_reward, num_turns, ...

    @property
    def trained(self) -> int:
        """Number of tokens that the model sampled."""
        return len(self.ids) if self.mask is None else sum(self.mask)


@dataclass(frozen=True)
class Group:
    """One prompt and its completions: planned first, then sampled, then rewarded."""

    number: int  # of the group in the run, from 0; decides the seeds
    prompt: Prompt
    row: int  # of the prompt in the data
    kind: Literal["fresh", "reroll", "resample"] = "fresh"
    completions: list[Completion] = field(default_factory=list)  # empty until sampled
    values: list[list[float | None]] = field(default_factory=list)  # per completion, per reward; None = does not apply
    replayed: bool = False
    extra: list[dict[str, Any]] | None = None  # per completion, what reward functions logged; not in checkpoints


def check_sampling(sampling: Sampling) -> None:
    """Refuse settings that no engine supports, and those that would bias a training sample."""
    if not sampling.temperature >= 0:
        raise UserError(f"temperature={sampling.temperature}: must be above 0, or 0 for greedy")
    if sampling.max_tokens < 1:
        raise UserError(f"max_tokens={sampling.max_tokens}: must be 1 or more")
    if not 0 < sampling.top_p <= 1:
        raise UserError(f"top_p={sampling.top_p}: must be in (0, 1]; 1 keeps every token")
    if sampling.top_k < 0:
        raise UserError(f"top_k={sampling.top_k}: must be 0 (all) or more")
    if any(not text for text in sampling.stop):
        raise UserError("stop='': an empty stop string would end every completion; remove it")
    for name, neutral in (("top_p", 1.0), ("top_k", 0)) if sampling.for_training else ():
        if getattr(sampling, name) != neutral:
            raise UserError(
                f"{name}={getattr(sampling, name)}: a training sample must come from the whole distribution, or its "
                f"log-probs are not the trainer's; set {neutral:g}"
            )


class Engine(Protocol):
    """Token ids in, token ids and log-probs out."""

    version: int
    """Version of the weights that will sample the next token: the optimizer step they came from."""

    concurrent: bool
    """Whether submit returns at once and completions are sampled in the background."""

    asleep: bool
    """Whether load must be called before the next request, even if the weights have not changed."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """One completion per request, in order."""

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> Future[list[Completion]]:
        """generate without waiting; an in-process engine has finished when this returns."""

    def poll(self, version: int | None = None) -> None:
        """Called about twice a second by the thread that owns the weights, while it waits for completions.

        Servers that came back get weights here. `version` is that of the trainer's current weights, if they may be
        newer than the ones loaded last.
        """

    def load(self, version: int) -> None:
        """Take the trainer's current weights as `version`; the engine is awake and ready afterwards."""

    def sleep(self) -> None:
        """Release GPU memory to the trainer; load takes it back."""

    def metrics(self) -> dict[str, float]:
        """Metrics of the engine itself since the last call."""

    def close(self) -> None:
        """Stop everything the engine started; may be called twice."""


class Source(Protocol):
    """Groups of requests in, groups of completions out."""

    def start(self, groups: Sequence[Sequence[Request]]) -> list[Future[list[Completion]]]:
        """Start sampling; one future per group (G requests of the same prompt), its completions in order.

        Called only by the thread that owns the weights. In-process sources have finished when this returns, or sample
        in a method advance(), which whoever waits calls until it returns False.
        """

    def close(self) -> None:
        """Stop what the source itself started, not the engine; may be called twice."""


class EngineSource:
    """One completion per request, straight from the engine."""

    def __init__(self, engine: Engine, sampling: Sampling, *, streams: bool = False) -> None:
        """streams: an in-process engine samples in advance(), so that groups can be rewarded as they end."""
        self.engine, self.sampling = engine, sampling
        self._streams = streams and not engine.concurrent and hasattr(engine, "stream")
        self._sampling: Iterator[None] | None = None  # what start() has begun

    def start(self, groups: Sequence[Sequence[Request]]) -> list[Future[list[Completion]]]:
        if self.engine.concurrent:
            return [self.engine.submit(group, self.sampling) for group in groups]
        # In process the batch is the unit of work: all groups decode together.
        requests = [request for group in groups for request in group]
        if self._streams:
            assert self._sampling is None, "one batch at a time: the last one has not arrived"
            futures: list[Future[list[Completion]]] = [Future() for _ in groups]
            self._sampling = self._sample(requests, groups, futures)
            return futures
        completions = iter(self.engine.generate(requests, self.sampling))
        return [finished([next(completions) for _ in group]) for group in groups]

    def advance(self) -> bool:
        """Sample until another group has ended; False if nothing is being sampled here."""
        if self._sampling is None:
            return False
        try:
            next(self._sampling)
        except StopIteration:
            self._sampling = None
        return True

    def close(self) -> None:
        """Stop what was begun here; the engine stops what it runs itself."""
        if self._sampling is not None:
            self._sampling.close()
            self._sampling = None

    def _sample(
        self, requests: Sequence[Request], groups: Sequence[Sequence[Request]], futures: Sequence[Future]
    ) -> Iterator[None]:
        group_of = [number for number, group in enumerate(groups) for _ in group]
        completed: list[dict[int, Completion]] = [{} for _ in groups]  # by number of the request
        for ended in self.engine.stream(requests, self.sampling):
            for number, completion in ended:
                completed[group_of[number]][number] = completion
            full = [n for n in {group_of[number] for number, _ in ended} if len(completed[n]) == len(groups[n])]
            for number in sorted(full):
                futures[number].set_result([completed[number][place] for place in sorted(completed[number])])
            if full and not all(future.done() for future in futures):
                yield  # not after the last one: the engine must leave its own state, no_grad for one, behind


def finished(completions: list[Completion]) -> Future[list[Completion]]:
    """A future that already has its result."""
    future: Future[list[Completion]] = Future()
    future.set_result(completions)
    return future


def run_groups(
    source: Source, groups: Sequence[Sequence[Request]], poll: Callable[[], None] = lambda: None
) -> list[list[Completion]]:
    """Start and wait, calling tend() about twice a second. The first group that fails cancels the others."""
    futures = source.start(groups)
    advance = getattr(source, "advance", lambda: False)
    try:
        while True:
            if not advance():
                wait(futures, LOOK_S, FIRST_EXCEPTION)
            done = [future.result() for future in futures if future.done()]  # raises what a group has raised
            if len(done) == len(futures):
                return done
            poll()
    finally:
        for future in futures:
            future.cancel()
