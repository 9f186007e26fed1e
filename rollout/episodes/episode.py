"""Episodes: completions that need several calls of the model. An episode is a coroutine that requests tokens.

    async def episode(client, prompt, seed) -> Completion:      # turns.py has helpers for most episodes
        first = await client.generate(prompt.ids, seed)
        ...

    source = EpisodeSource(engine, sampling, episode)
    futures = source.start(groups)                              # one per group of requests (source.py)

With vLLM, episodes run in the engine's loop, each at its own pace. With the in-process engine they run in lockstep:
once every episode waits for tokens, all are sampled in one call. An episode that waits for something else delays all
episodes, so tools need a time limit.
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
    """Interface through which an episode requests tokens."""

    sampling: Sampling
    """Sampling settings of all turns. The episode must keep its total length within max_tokens."""
    tokenizer: Any

    @property
    def version(self) -> int:
        """Version of the weights that would sample the next token."""

    async def generate(self, prompt_ids: Sequence[int], seed: int, max_tokens: int | None = None) -> Completion:
        """Sample one turn after these ids. Every turn needs its own seed (turn_seed)."""


Episode = Callable[[Client, Prompt, int], Awaitable[Completion]]


class EpisodeSource:
    """Source of episodes, for both engines."""

    def __init__(self, engine: Any, sampling: Sampling, episode: Episode) -> None:
        self.engine, self.sampling, self.episode = engine, sampling, episode
        self._lockstep = None if engine.concurrent else Lockstep(engine, sampling)
        self._running: set[Future[list[Completion]]] = set()

    def start(self, groups: Sequence[Sequence[Request]]) -> list[Future[list[Completion]]]:
        """Start all episodes; the in-process engine also finishes them before this returns."""
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
        """Cancel running episodes. May be called twice."""
        for future in list(self._running):
            future.cancel()
        if self._lockstep is not None:
            self._lockstep.close()


class ServerClient:
    """Client for vLLM: every call is a separate request in the engine's loop."""

    def __init__(self, engine: Any, sampling: Sampling) -> None:
        self.engine, self.sampling, self.tokenizer = engine, sampling, engine.local.tokenizer

    @property
    def version(self) -> int:
        return self.engine.version

    async def generate(self, prompt_ids: Sequence[int], seed: int, max_tokens: int | None = None) -> Completion:
        sampling = self.sampling if max_tokens is None else replace(self.sampling, max_tokens=max_tokens)
        return await self.engine.complete(Request(prompt_ids=list(prompt_ids), seed=seed), sampling)


class LocalClient:
    """Client for the in-process engine: a request waits until every episode has a pending request."""

    def __init__(self, lockstep: Lockstep) -> None:
        self.sampling, self.tokenizer = lockstep.sampling, lockstep.engine.tokenizer
        self.num_pending = 0  # unanswered requests
        self._lockstep = lockstep

    @property
    def version(self) -> int:
        return self._lockstep.engine.version

    async def generate(self, prompt_ids: Sequence[int], seed: int, max_tokens: int | None = None) -> Completion:
        limit = self.sampling.max_tokens if max_tokens is None else max_tokens
        if limit < 1:
            raise UserError(f"max_tokens={limit}: must be 1 or more")
        return await self._lockstep.ask(self, Request(prompt_ids=list(prompt_ids), seed=seed), limit)


class PendingRequest(NamedTuple):
    client: LocalClient
    request: Request
    max_tokens: int
    answer: asyncio.Future[Completion]


class Lockstep:
    """Runs episodes in the calling thread and samples for all of them in one call."""

    def __init__(self, engine: Any, sampling: Sampling) -> None:
        self.engine, self.sampling = engine, sampling
        self._loop = asyncio.new_event_loop()  # kept for the whole run, so users' coroutines can keep connections
        self._clients: set[LocalClient] = set()  # clients of running episodes
        self._pending: list[PendingRequest] = []
        self._quiet = asyncio.Event()  # every episode waits for tokens, or none is left

    def run(self, episode: Episode, groups: Sequence[Sequence[Request]]) -> list[Future[list[Completion]]]:
        """Run all episodes to their end; a failed episode sets its error on its group's future."""
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
        pending = PendingRequest(client, request, max_tokens, self._loop.create_future())
        self._pending.append(pending)
        client.num_pending += 1
        self._check_quiet()
        try:
            return await pending.answer
        except asyncio.CancelledError:
            if pending in self._pending:  # the episode no longer needs the tokens
                self._pending.remove(pending)
                client.num_pending -= 1
            raise

    def close(self) -> None:
        if not self._loop.is_closed():
            self._cancel_all()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    async def _drive(
        self, episode: Episode, groups: Sequence[Sequence[Request]]
    ) -> list[list[Completion] | BaseException]:
        work = [together([self._start_episode(episode, request) for request in requests]) for requests in groups]
        done = asyncio.gather(*work, return_exceptions=True)
        while not done.done():
            quiet = asyncio.ensure_future(self._quiet.wait())
            await asyncio.wait([done, quiet], return_when=asyncio.FIRST_COMPLETED)
            quiet.cancel()
            await asyncio.sleep(0)  # let an episode send several requests
            self._quiet.clear()
            pending, self._pending = self._pending, []
            for item in pending:
                item.client.num_pending -= 1
            self._answer(pending)
        return await done

    def _start_episode(self, episode: Episode, request: Request) -> asyncio.Task[Completion]:
        client = LocalClient(self)
        self._clients.add(client)
        task = asyncio.ensure_future(episode(client, request.prompt, request.seed))

        def ended(_: Any) -> None:
            self._clients.discard(client)
            self._check_quiet()

        task.add_done_callback(ended)
        return task

    def _check_quiet(self) -> None:
        if all(client.num_pending for client in self._clients):
            self._quiet.set()

    def _answer(self, pending: list[PendingRequest]) -> None:
        """Sample for all pending requests in one call, each up to its own limit."""
        if not pending:
            return
        requests = [replace(item.request, max_tokens=item.max_tokens, conversation=item.client) for item in pending]
        try:
            completions = self.engine.generate(requests, self.sampling)
        except Exception as error:  # the engine failed: pass the error to all waiting episodes
            for item in pending:
                item.answer.set_exception(error)
            return
        for item, completion in zip(pending, completions, strict=True):
            item.answer.set_result(completion)

    def _cancel_all(self) -> None:
        """Cancel all tasks, after an interrupt or if an episode did not finish its own tasks."""
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._clients.clear()
        self._pending.clear()
        self._quiet.clear()
