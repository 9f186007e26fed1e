"""Shared parts of the weight-sync backends: protocols, buckets, worker calls and the link to the workers.

    sync = ProcessGroupSync(source, loop, device=device)
    report = sync.push(servers, version=12)   # servers are drained and paused
    sync.close()

A push replaces all weights of every server, or raises SyncError. After an error, paused servers must stay paused until
a later push to them succeeds. Everything here runs in the training thread, except the HTTP calls, which run in the
loop's thread.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import math
import secrets
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rollout.servers.command import BASE
from rollout.servers.worker import strop_wire

if TYPE_CHECKING:
    from rollout.servers.client import VllmServer
    from rollout.servers.loop import Loop

ALIGN = 16  # bytes; a valid alignment for every dtype
MIB = 2**20
SLOWEST = 0.5e9  # bytes per second; slower transfers time out
GRACE_S = 60.0
LEAVE_S = 5.0
JOIN_S = 60.0  # for all workers to connect; importing nccl can take seconds


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype of a weight as sent to servers."""

    name: str  # Hugging Face checkpoint name
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


class WeightSource(Protocol):
    """The weights being trained, with the names and dtype that servers expect."""

    is_lora: bool

    def specs(self) -> list[TensorSpec]:
        """Return all weights in a fixed order, layer by layer; a tied weight once."""

    def tensors(self) -> Generator[tuple[str, Tensor], None, None]:
        """Yield the tensors in the same order, each valid until the next. A caller that stops early must close the
        generator, because all ranks take part in it."""

    def save_adapter(self, folder: Path) -> None:
        """Write a peft adapter folder that vLLM can load. Requires is_lora."""


@dataclass(frozen=True)
class SyncReport:
    """Size and timing of one push."""

    version: int
    backend: str
    num_bytes: int
    seconds: float
    phases: dict[str, float] = field(default_factory=dict)


class SyncError(Exception):
    """A push failed.

    failed: reason by server index. may_pass: only the connection failed, so a retry may succeed.
    """

    def __init__(self, failed: dict[int, str], *, may_pass: bool = False) -> None:
        self.failed = failed
        self.may_pass = may_pass
        reasons = "; ".join(f"server {i}: {reason}" for i, reason in sorted(failed.items()))
        super().__init__(f"weight sync failed: {reasons}")


class WeightSync(Protocol):
    """A backend that sends weights to servers."""

    needs_pause: bool  # servers must be drained and paused first

    def model_name(self, version: int) -> str:
        """Return the `model` field of requests for this version."""

    def push(self, servers: Sequence[VllmServer], version: int) -> SyncReport: ...

    def close(self) -> None: ...


# buckets ---------------------------------------------------------------------------------------------------------


def make_buckets(specs: Sequence[TensorSpec], max_bytes: int) -> list[dict[str, Any]]:
    """Split the weights, in order, into buckets of at most `max_bytes`; a larger tensor gets a separate bucket.

    A bucket is JSON: {"size": bytes, "tensors": [[name, dtype, shape, offset], ...]}.
    """
    buckets: list[dict[str, Any]] = []
    tensors: list[list[Any]] = []
    size = 0
    for spec in specs:
        if tensors and size + spec.num_bytes > max_bytes:
            buckets.append({"size": size, "tensors": tensors})
            tensors, size = [], 0
        tensors.append([spec.name, str(spec.dtype).removeprefix("torch."), list(spec.shape), size])
        size += -(-spec.num_bytes // ALIGN) * ALIGN
    if tensors:
        buckets.append({"size": size, "tensors": tensors})
    return buckets


def buffer_size(buckets: Sequence[dict[str, Any]]) -> int:
    return max(bucket["size"] for bucket in buckets) + strop_wire.SUM_BYTES


def fill(bucket: dict[str, Any], tensors: Iterator[tuple[str, Tensor]], buffer: Tensor) -> None:
    """Copy the next tensors of the source into the buffer and append the checksum."""
    for name, view in strop_wire.views(bucket, buffer):
        got, tensor = next(tensors)
        assert got == name and tensor.shape == view.shape, f"{got} {tuple(tensor.shape)}, planned {name} {view.shape}"
        view.copy_(tensor)  # rounds to the serving dtype if needed
    strop_wire.seal(bucket, buffer)


def time_limit(num_bytes: int) -> float:
    """Return the timeout of a transfer in seconds."""
    return GRACE_S + num_bytes / SLOWEST


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


# calls to the workers --------------------------------------------------------------------------------------------


class Calls:
    """One RPC to the worker extension of several servers, run in the background."""

    def __init__(
        self, loop: Loop, servers: Sequence[VllmServer], method: str, timeout: float, kwargs: list[dict]
    ) -> None:
        self.timeout = timeout
        self.futures: list[Future] = [
            loop.start(server.rpc(method, timeout=timeout, **arguments))
            for server, arguments in zip(servers, kwargs, strict=True)
        ]

    def check(self) -> None:
        """Raise if any call has failed already."""
        done = {i: future for i, future in enumerate(self.futures) if future.done()}
        reasons = {i: reason for i, future in done.items() if (reason := _reason(future)) is not None}
        if reasons:
            raise self._error(reasons)

    def results(self) -> list[list[dict[str, Any]]]:
        """Wait for all calls and return each worker's answer, by server. Raises only after all calls have ended."""
        deadline = time.monotonic() + self.timeout + 5.0
        reasons: dict[int, Reason] = {}
        for i, future in enumerate(self.futures):
            if (reason := _reason(future, deadline)) is not None:
                reasons[i] = reason
        if reasons:
            raise self._error(reasons)
        return [future.result() for future in self.futures]

    def wait(self, seconds: float) -> None:
        """Wait for calls that are about to fail, because their errors are more specific."""
        deadline = time.monotonic() + seconds
        for future in self.futures:
            _reason(future, deadline)

    def _error(self, reasons: dict[int, Reason]) -> SyncError:
        # A worker that only lost its peers is not the cause if another worker reports an error.
        failed = {i: reason for i, reason in reasons.items() if not reason.is_peer} or reasons
        texts = {i: reason.text for i, reason in failed.items()}
        return SyncError(texts, may_pass=all(reason.may_pass for reason in failed.values()))


class Reason(NamedTuple):
    """Why a call failed."""

    text: str
    is_peer: bool = False  # the worker failed only because it lost its peers
    may_pass: bool = False  # the worker was not reached, so a retry may succeed


def _reason(future: Future, deadline: float | None = None) -> Reason | None:
    """Return why the call failed, or None if it succeeded."""
    try:
        answers = future.result(None if deadline is None else max(deadline - time.monotonic(), 0.0))
    except TimeoutError:
        return Reason("timed out")
    except Exception as error:  # ServerError or an unexpected reply
        text = " ".join(str(error).split()) or type(error).__name__
        return Reason(text, may_pass=not isinstance(error, ValueError))  # a rejected request would be rejected again
    if not answers:
        return Reason("no worker answered")
    for answer in answers:
        if not isinstance(answer, dict):
            return Reason(f"a worker answered {str(answer)[:100]!r}, which is not a reply of strop's extension")
    errors = [answer for answer in answers if "error" in answer]
    causes = [answer for answer in errors if not answer.get("peer")]
    if errors:
        cause = (causes or errors)[0]
        return Reason(f"worker {cause.get('rank')}: {cause['error']}", is_peer=not causes)
    return None


def check_loaded(results: list[list[dict[str, Any]]], version: int, num_bytes: int) -> None:
    """Raise unless every worker reports this version and the number of bytes sent."""
    wrong = {
        i: f"worker {answer.get('rank')} reports version {answer.get('version')} and {answer.get('bytes')} bytes, "
        f"expected version {version} and {num_bytes} bytes"
        for i, answers in enumerate(results)
        for answer in answers
        if answer.get("version") != version or answer.get("bytes") != num_bytes
    }
    if wrong:
        raise SyncError(wrong)


def slowest(results: list[list[dict[str, Any]]]) -> dict[str, float]:
    """Return the maximum time of each phase over all workers."""
    phases: dict[str, float] = {}
    for answers in results:
        for answer in answers:
            for name, seconds in answer.get("phases", {}).items():
                phases[f"server_{name}"] = max(seconds, phases.get(f"server_{name}", 0.0))
    return phases


# the link to the workers -----------------------------------------------------------------------------------------


class Link:
    """The trainer's end of the connection to all workers, for process_group and ipc.

    The connection is a TCP store. It is kept between pushes and replaced if a push fails or the servers change.
    """

    def __init__(self, source: WeightSource, loop: Loop, *, device: torch.device, bucket_bytes: int, host: str) -> None:
        self.source = source
        self.loop = loop
        self.device = device
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
        self.turns = itertools.count()  # of pushes

    def ready(self, servers: Sequence[VllmServer]) -> bool:
        """Return whether all workers are still connected to this link; raise if a server does not answer."""
        if self.prefix is None:
            return False
        answers = Calls(self.loop, servers, "strop_info", JOIN_S, [{}] * len(servers)).results()
        linked = all(answer.get("link") == self.prefix for workers in answers for answer in workers)
        return self._members == tuple(map(id, servers)) and linked

    def meet(self, servers: Sequence[VllmServer], backend: str, staging: list[Any] | None = None) -> tuple[int, Calls]:
        """Connect all workers to a new store; return (number of ranks, join calls).

        `staging`: shared buffers per server and worker. The caller may enter the process group, which blocks, only
        after this returns.
        """
        self.leave()
        self.prefix = f"strop-{secrets.token_hex(4)}-{next(self._attempts)}"
        self.secret = secrets.token_hex(32)  # workers get it over the authenticated control route
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
            keys = [f"here/{rank}" for rank in range(1, world)]
            try:
                strop_wire.wait_keys(self.store, keys, time.monotonic() + JOIN_S, calls.check)
            except BaseException as error:
                self.leave()  # workers waiting on the store stop when it closes
                raise self._root_cause(calls, error) from None
        self._members, self._servers = tuple(map(id, servers)), list(servers)
        return world, calls

    @contextlib.contextmanager
    def transfer(self, calls: Calls) -> Iterator[None]:
        """Context manager: if either side fails, stop both and raise the root cause."""
        try:
            yield
        except BaseException as error:
            self.stop_workers()
            raise self._root_cause(calls, error) from None

    def _root_cause(self, calls: Calls, error: BaseException) -> BaseException:
        """Return the error to raise, after waiting for the workers to stop, so that they are free for the next push."""
        if not isinstance(error, strop_wire.PeerError | SyncError):
            return error
        calls.wait(5.0)
        try:
            calls.check()
        except SyncError as cause:
            return cause
        reason = f"{error} (no server reported a reason)"
        return error if isinstance(error, SyncError) else SyncError(dict.fromkeys(range(len(calls.futures)), reason))

    def stop_workers(self) -> None:
        """Signal waiting workers to stop. The link is not used again."""
        if self.store is not None:
            with contextlib.suppress(strop_wire.PeerError):
                self.store.set(strop_wire.END)
        self._members = ()

    def close(self) -> None:
        """Disconnect for good. Workers of servers that keep running release their end and any shared GPU memory."""
        self.stop_workers()
        if self.store is not None and self._servers:
            Calls(self.loop, self._servers, "strop_leave", LEAVE_S, [{}] * len(self._servers)).wait(LEAVE_S)
        self._servers = []

    def leave(self) -> None:
        self._members = ()
        self.prefix = None
        if self.store is not None:
            self.store.close()
            self.store = None


class LinkSync(abc.ABC):
    """Base of the backends that send buckets over a Link; a subclass defines how it joins, sends and disconnects."""

    needs_pause = True
    name: str  # in reports

    def __init__(
        self,
        source: WeightSource,
        loop: Loop,
        *,
        device: torch.device,
        bucket_bytes: int = 512 * MIB,
        host: str = "127.0.0.1",  # trainer address that the servers can reach
    ) -> None:
        self.link = Link(source, loop, device=device, bucket_bytes=bucket_bytes, host=host)

    def model_name(self, version: int) -> str:
        return BASE

    def push(self, servers: Sequence[VllmServer], version: int) -> SyncReport:
        """Replace all weights of all servers with `version`, or raise and disconnect."""
        link, started = self.link, time.monotonic()
        is_joined = link.ready(servers)
        try:
            if not is_joined:
                self._drop()
                self._join(servers)
            joined = time.monotonic()
            plan = {"version": version, "buckets": link.buckets, "timeout": link.limit, "turn": str(next(link.turns))}
            calls = Calls(link.loop, servers, "strop_receive", link.limit + 30.0, [{"plan": plan}] * len(servers))
            with link.transfer(calls), contextlib.closing(link.source.tensors()) as tensors:
                self._send(tensors, plan["turn"], calls, joined + link.limit)
                results = calls.results()
            check_loaded(results, version, link.num_bytes)
        except BaseException:
            self._drop()
            raise
        now = time.monotonic()
        phases = {"join": joined - started, "transfer": now - joined, **slowest(results)}
        return SyncReport(version, self.name, link.num_bytes, now - started, phases)

    def close(self) -> None:
        self.link.close()
        self._drop()

    @abc.abstractmethod
    def _join(self, servers: Sequence[VllmServer]) -> None: ...

    @abc.abstractmethod
    def _send(self, tensors: Iterator[tuple[str, Tensor]], turn: str, calls: Calls, deadline: float) -> None:
        """Send all buckets; `turn` is unique per push."""

    @abc.abstractmethod
    def _drop(self) -> None: ...
