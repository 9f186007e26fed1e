"""Episodes: completions that need several calls of the model. An episode is a coroutine that asks for tokens.

    async def episode(client, prompt, seed) -> Completion:      # turns.py has what most episodes need
        first = await client.generate(prompt.ids, seed)
        ...

    source = EpisodeSource(engine, sampling, episode)
    futures = source.start(groups)                              # one per group of requests (source.py)

With vLLM, episodes run in the engine's loop, each at its own pace. With the in-process engine they run in lockstep:
once every episode waits for tokens, all are sampled in one call. An episode that waits for something else then holds up
the others, so tools need a time limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from data.errors import UserError
from data.types import Prompt
from rollout.engine import Completion, Request, Sampling
from rollout.servers.loop import together


class Client(Protocol):
    """Through which an episode asks for tokens."""

    sampling: Sampling
    """How all turns are sampled; max_tokens limits the whole episode, and the episode has to respect it."""
    tokenizer: Any

    @property
    def version(self) -> int:
        """Version of the weights that would sample the next token."""

    async def generate(self, prompt_ids: Sequence[int], seed: int, max_tokens: int | None = None) -> Completion:
        """One turn after these ids; max_tokens None: the sampling's. Every turn needs another seed (turn_seed)."""


Episode = Callable[[Client, Prompt, int], Awaitable[Completion]]


class EpisodeSource:
    """Source of episodes, for either engine."""

    def __init__(self, engine: Any, sampling: Sampling, episode: Episode) -> None:
        self.engine, self.sampling, self.episode = engine, sampling, episode
        self._lockstep = None if engine.concurrent else Lockstep(engine, sampling)
        self._running: set[Future[list[Completion]]] = set()

    def start(self, groups: Sequence[Sequence[Request]]) -> list[Future[list[Completion]]]:
        """Start all episodes; with the in-process engine they have ended when this returns."""
        if self._lockstep is not None:
            return self._lockstep.run(self.episode, groups)
        client = ServerClient(self.engine, self.sampling)
        futures = []
        for requests in groups:
            future = self.engine.loop.start(
                together([self.episode(client, request.prompt, request.seed) for request in requests])
            )
            self._running.add(future)
            future.add_done_callback(self._running.discard)
            futures.append(future)
        return futures

    def close(self) -> None:
        """Cancel what is running; may be called twice."""
        for future in list(self._running):
            future.cancel()
        if self._lockstep is not None:
            self._lockstep.close()


class ServerClient:
    """Client for vLLM: every call is a separate request, in the engine's loop."""

    def __init__(self, engine: Any, sampling: Sampling) -> None:
        self.engine, self.sampling, self.tokenizer = engine, sampling, engine.local.tokenizer

    @property
    def version(self) -> int:
        return self.engine.version

    async def generate(self, prompt_ids: Sequence[int], seed: int, max_tokens: int | None = None) -> Completion:
        sampling = self.sampling if max_tokens is None else replace(self.sampling, max_tokens=max_tokens)
        return await self.engine.complete(Request(prompt_ids=list(prompt_ids), seed=seed), sampling)


class LocalClient:
    """Client for the in-process engine: a request waits until every episode has made one."""

    def __init__(self, lockstep: Lockstep) -> None:
        self.sampling, self.tokenizer = lockstep.sampling, lockstep.engine.tokenizer
        self.num_asked = 0  # calls that have no answer yet
        self._lockstep = lockstep

    @property
    def version(self) -> int:
        return self._lockstep.engine.version

    async def generate(self, prompt_ids: Sequence[int], seed: int, max_tokens: int | None = None) -> Completion:
        limit = self.sampling.max_tokens if max_tokens is None else max_tokens
        if limit < 1:
            raise UserError(f"max_tokens={limit}: must be 1 or more")
        return await self._lockstep.ask(self, Request(prompt_ids=list(prompt_ids), seed=seed), limit)


class Asked(NamedTuple):
    client: LocalClient
    request: Request
    max_tokens: int
    answer: asyncio.Future[Completion]


class Lockstep:
    """Runs episodes in the calling thread and samples for all of them at once."""

    def __init__(self, engine: Any, sampling: Sampling) -> None:
        self.engine, self.sampling = engine, sampling
        self._loop = asyncio.new_event_loop()  # kept for the whole run, so users' coroutines can keep connections
        self._clients: set[LocalClient] = set()  # of the episodes that have not ended
        self._asked: list[Asked] = []
        self._quiet = asyncio.Event()  # every episode waits for tokens, or none is left

    def run(self, episode: Episode, groups: Sequence[Sequence[Request]]) -> list[Future[list[Completion]]]:
        """Run all episodes to their end; a group with a failed episode gets its error."""
        try:
            outcomes = self._loop.run_until_complete(self._drive(episode, groups))
        finally:
            self._cancel_all()
            self.engine.forget()
        futures: list[Future[list[Completion]]] = []
        for outcome in outcomes:
            future: Future[list[Completion]] = Future()
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
            futures.append(future)
        return futures

    async def ask(self, client: LocalClient, request: Request, max_tokens: int) -> Completion:
        asked = Asked(client, request, max_tokens, self._loop.create_future())
        self._asked.append(asked)
        client.num_asked += 1
        self._look()
        try:
            return await asked.answer
        except asyncio.CancelledError:
            if asked in self._asked:  # the episode does not need it any more
                self._asked.remove(asked)
                client.num_asked -= 1
            raise

    def close(self) -> None:
        if not self._loop.is_closed():
            self._cancel_all()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    async def _drive(
        self, episode: Episode, groups: Sequence[Sequence[Request]]
    ) -> list[list[Completion] | BaseException]:
        work = [together([self._begin(episode, request) for request in requests]) for requests in groups]
        done = asyncio.gather(*work, return_exceptions=True)
        while not done.done():
            quiet = asyncio.ensure_future(self._quiet.wait())
            await asyncio.wait([done, quiet], return_when=asyncio.FIRST_COMPLETED)
            quiet.cancel()
            await asyncio.sleep(0)  # let an episode make several requests at once
            self._quiet.clear()
            asked, self._asked = self._asked, []
            for one in asked:
                one.client.num_asked -= 1
            self._answer(asked)
        return await done

    def _begin(self, episode: Episode, request: Request) -> asyncio.Task[Completion]:
        client = LocalClient(self)
        self._clients.add(client)
        task = asyncio.ensure_future(episode(client, request.prompt, request.seed))

        def ended(_: Any) -> None:
            self._clients.discard(client)
            self._look()

        task.add_done_callback(ended)
        return task

    def _look(self) -> None:
        if all(client.num_asked for client in self._clients):
            self._quiet.set()

    def _answer(self, asked: list[Asked]) -> None:
        """Sample for all of them in one call, each up to its own limit."""
        if not asked:
            return
        requests = [replace(one.request, max_tokens=one.max_tokens, conversation=one.client) for one in asked]
        try:
            made = self.engine.generate(requests, self.sampling)
        except Exception as error:  # of the engine: pass it to all that wait
            for one in asked:
                one.answer.set_exception(error)
            return
        for one, completion in zip(asked, made, strict=True):
            one.answer.set_result(completion)

    def _cancel_all(self) -> None:
        """Leave no task running, whether the caller was interrupted or an episode left one behind."""
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._clients.clear()
        self._asked.clear()
        self._quiet.clear()
