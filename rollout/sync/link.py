"""The trainer's end of a link to the workers of all servers: who is in it, and when it is made anew."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rollout.servers.worker import strop_wire
from rollout.sync.base import Calls, SyncError, WeightSource, make_buckets, time_limit

if TYPE_CHECKING:
    from rollout.servers.client import VllmServer
    from rollout.servers.loop import Loop

LEAVE_S = 5.0
JOIN_S = 60.0  # seconds to meet all workers; connecting takes milliseconds, importing nccl seconds


class Link:
    """A store that workers connect to, kept over pushes and left behind when one fails or the servers change."""

    def __init__(self, source: WeightSource, loop: Loop, *, device: torch.device, bucket_bytes: int, host: str) -> None:
        self.source = source
        self.loop = loop
        self.device = device
        self.bucket_bytes = bucket_bytes
        self.host = host
        self.buckets = make_buckets(source.specs(), bucket_bytes)
        self.num_bytes = sum(bucket["size"] for bucket in self.buckets)
        self.limit = time_limit(self.num_bytes)
        self.prefix: str | None = None
        self.secret = ""
        self.store: strop_wire.Store | None = None
        self._members: tuple[int, ...] = ()
        self._servers: list[VllmServer] = []
        self._attempts = itertools.count()
        self._turns = itertools.count()

    def turn(self) -> str:
        return str(next(self._turns))

    def ready(self, servers: Sequence[VllmServer]) -> bool:
        """Whether every worker still holds its end of this very link; a server that does not answer raises."""
        calls = Calls(self.loop, servers, "strop_info", JOIN_S, [{}] * len(servers))
        try:
            answers = calls.results()
        except SyncError as error:
            raise SyncError(error.failed, dirty=set(), may_pass=error.may_pass) from None  # nothing has been touched
        linked = all(answer.get("link") == self.prefix for workers in answers for answer in workers)
        return self.prefix is not None and self._members == tuple(map(id, servers)) and linked

    def meet(self, servers: Sequence[VllmServer], backend: str, staging: list[Any] | None = None) -> tuple[int, Calls]:
        """Call all workers to a fresh store and wait until they are there: (ranks in all, the calls they came by).

        `staging`: per server and worker the shared buffers. Only then does the caller enter a group, which blocks.
        """
        self.leave()
        self.prefix = f"strop-{secrets.token_hex(4)}-{next(self._attempts)}"
        self.secret = secrets.token_hex(32)  # told to workers below, over the authenticated control route
        self.store, port = strop_wire.new_store(self.host, self.prefix, self.secret, JOIN_S)
        world = 1 + sum(server.info.workers for server in servers)
        offset = 1
        kwargs = []
        for i, server in enumerate(servers):
            link = {"host": self.host, "port": port, "prefix": self.prefix, "rank_offset": offset, "world": world}
            link |= {"backend": backend, "timeout": self.limit, "staging": staging[i] if staging else None}
            link |= {"secret": self.secret}
            kwargs.append({"link": link})
            offset += server.info.workers
        calls = Calls(self.loop, servers, "strop_join", 2 * self.limit + 30.0, kwargs)
        if world > 1:
            here = [f"here/{rank}" for rank in range(1, world)]
            try:
                strop_wire.wait_keys(self.store, here, time.monotonic() + JOIN_S, calls.check)
            except BaseException as error:
                self.leave()  # without the store, workers that wait in it for the others stop
                raise self.blamed(calls, error) from None
        self._members, self._servers = tuple(map(id, servers)), list(servers)
        return world, calls

    @contextlib.contextmanager
    def blaming(self, calls: Calls) -> Iterator[None]:
        """A transfer during which a failure of either side ends both, with the reason of the one that knows it."""
        try:
            yield
        except BaseException as error:
            self.give_up()
            raise self.blamed(calls, error) from None

    def blamed(self, calls: Calls, error: BaseException) -> BaseException:
        """The error to raise, when the workers have stopped too, so that the next push finds them free."""
        if not isinstance(error, strop_wire.PeerError | SyncError):
            return error
        calls.wait(5.0)
        try:
            calls.check()
        except SyncError as known:
            return known
        reason = f"{error}, and no server said why"
        return error if isinstance(error, SyncError) else SyncError(dict.fromkeys(range(len(calls.futures)), reason))

    def give_up(self) -> None:
        """Tell workers that wait for us; the link is not used again."""
        if self.store is not None:
            with contextlib.suppress(strop_wire.PeerError):
                self.store.set(strop_wire.END)
        self._members = ()

    def close(self) -> None:
        """For good: workers of servers that live on let go of their end, which may be memory of our GPU."""
        self.give_up()
        if self.store is not None and self._servers:
            Calls(self.loop, self._servers, "strop_leave", LEAVE_S, [{}] * len(self._servers)).wait(LEAVE_S)
        self._servers = []

    def leave(self) -> None:
        self._members = ()
        self.prefix = None
        if self.store is not None:
            self.store.close()
            self.store = None
