"""What all weight-sync backends share: the WeightSync protocol, buckets, calls to workers, and the link to them.

    sync = ProcessGroupSync(source, loop, device=device)
    report = sync.push(servers, version=12)   # the servers are paused and hold no request of ours
    sync.close()

A push replaces all weights of every server, or raises SyncError. The servers in SyncError.dirty must not serve until a
later push to them succeeds; the caller keeps them paused. Everything here runs in the training thread, except the HTTP
calls, which run in the loop's thread.

In this file: the protocols and records, then buckets, then Calls (one RPC on several servers), then Link (the
trainer's end of the connection to all workers, for process_group and ipc).
"""

from __future__ import annotations

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

from rollout.servers.worker import strop_wire

if TYPE_CHECKING:
    from rollout.servers.client import VllmServer
    from rollout.servers.loop import Loop

ALIGN = 16  # bytes: every dtype may start at a multiple of it
MIB = 2**20
SLOWEST = 0.5e9  # bytes per second: a slower transfer times out
GRACE_S = 60.0
LEAVE_S = 5.0
JOIN_S = 60.0  # seconds for all workers to connect; connecting takes milliseconds, importing nccl seconds


@dataclass(frozen=True)
class TensorSpec:
    """A weight in the form in which servers get it."""

    name: str  # in a Hugging Face checkpoint
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


class WeightSource(Protocol):
    """The weights under training, under the names and in the dtype that servers expect."""

    is_lora: bool

    def specs(self) -> list[TensorSpec]:
        """All weights in one fixed order, layer by layer; a tied weight once."""

    def tensors(self) -> Generator[tuple[str, Tensor], None, None]:
        """The tensors in the same order, each valid until the next one is taken. A caller that stops early must close
        the generator: other ranks take part in it."""

    def save_adapter(self, folder: Path) -> None:
        """Write a peft adapter folder that vLLM can load; only with is_lora."""


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

    failed: reason by position in the list of servers; dirty: positions that need another push; may_pass: only the
    connection failed, so trying again may work.
    """

    def __init__(self, failed: dict[int, str], dirty: set[int] | None = None, *, may_pass: bool = False) -> None:
        self.failed = failed
        self.may_pass = may_pass
        self.dirty = set(failed) if dirty is None else dirty
        reasons = "; ".join(f"server {i}: {reason}" for i, reason in sorted(failed.items()))
        super().__init__(f"weight sync failed: {reasons}")


class WeightSync(Protocol):
    """A backend that moves weights to the servers."""

    needs_pause: bool  # servers must be drained and paused first

    def model_name(self, version: int) -> str:
        """The `model` field of requests that want this version."""

    def push(self, servers: Sequence[VllmServer], version: int) -> SyncReport: ...

    def close(self) -> None: ...


# buckets ---------------------------------------------------------------------------------------------------------


def make_buckets(specs: Sequence[TensorSpec], max_bytes: int) -> list[dict[str, Any]]:
    """Split the weights, in order, into buckets of at most `max_bytes`; a larger tensor gets its own.

    {"size": bytes, "tensors": [[name, dtype, shape, offset], ...]}, JSON that the workers get with the plan.
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
    """Copy the next tensors of the source into the buffer and write the checksum behind them."""
    for name, view in strop_wire.views(bucket, buffer):
        got, tensor = next(tensors)
        assert got == name and tensor.shape == view.shape, f"{got} {tuple(tensor.shape)}, planned {name} {view.shape}"
        view.copy_(tensor)  # rounds to the serving dtype if the source has not
    strop_wire.seal(bucket, buffer)


def time_limit(num_bytes: int) -> float:
    """Seconds that a transfer may take."""
    return GRACE_S + num_bytes / SLOWEST


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


# calls to the workers --------------------------------------------------------------------------------------------


class Calls:
    """One RPC to the worker extension of several servers, running in the background."""

    def __init__(
        self, loop: Loop, servers: Sequence[VllmServer], method: str, timeout: float, kwargs: list[dict]
    ) -> None:
        self.method = method
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
        """Wait for all calls; per server the answer of each worker. Raises only after all calls have ended."""
        deadline = time.monotonic() + self.timeout + 5.0
        reasons: dict[int, Reason] = {}
        for i, future in enumerate(self.futures):
            reason = _reason(future, deadline)
            if reason is not None:
                reasons[i] = reason
        if reasons:
            raise self._error(reasons)
        return [future.result() for future in self.futures]

    def wait(self, seconds: float) -> None:
        """Give calls that are about to fail the time to do so: their reason says more than ours."""
        deadline = time.monotonic() + seconds
        for future in self.futures:
            _reason(future, deadline)

    def _error(self, reasons: dict[int, Reason]) -> SyncError:
        # A worker that only lost its peers is not the cause if another worker reports an error of its own.
        failed = {i: reason for i, reason in reasons.items() if not reason.is_peer} or reasons
        complete = {i for i, future in enumerate(self.futures) if future.done() and _reason(future) is None}
        return SyncError(
            {i: reason.text for i, reason in failed.items()},
            dirty=set(range(len(self.futures))) - complete,
            may_pass=all(reason.may_pass for reason in failed.values()),
        )


class Reason(NamedTuple):
    """Why a call failed."""

    text: str
    is_peer: bool = False  # the worker lost its peers and did nothing wrong itself
    may_pass: bool = False  # the worker was not reached: the same call may succeed later


def _reason(future: Future, deadline: float | None = None) -> Reason | None:
    """Why the call failed; None if it has not."""
    try:
        answers = future.result(None if deadline is None else max(deadline - time.monotonic(), 0.0))
    except TimeoutError:
        return Reason("timed out")
    except Exception as error:  # ServerError, or an unforeseen reply: this server failed
        text = " ".join(str(error).split()) or type(error).__name__
        return Reason(text, may_pass=not isinstance(error, ValueError))  # a refusal would be repeated
    if not answers:
        return Reason("no worker answered")
    for answer in answers:
        if not isinstance(answer, dict):
            return Reason(f"a worker answered {str(answer)[:100]!r}, not our extension's reply")
    errors = [answer for answer in answers if "error" in answer]
    causes = [answer for answer in errors if not answer.get("peer")]
    if errors:
        worst = (causes or errors)[0]
        return Reason(f"worker {worst.get('rank')}: {worst['error']}", is_peer=not causes)
    return None


def check_loaded(results: list[list[dict[str, Any]]], version: int, num_bytes: int) -> None:
    """Confirm the push: every worker must report this version and as many bytes as were sent."""
    wrong = {
        i: f"worker {answer.get('rank')} reports version {answer.get('version')} and {answer.get('bytes')} bytes, "
        f"sent were version {version} and {num_bytes}"
        for i, answers in enumerate(results)
        for answer in answers
        if answer.get("version") != version or answer.get("bytes") != num_bytes
    }
    if wrong:
        raise SyncError(wrong)


def slowest(results: list[list[dict[str, Any]]]) -> dict[str, float]:
    """The longest time of each phase over all workers."""
    phases: dict[str, float] = {}
    for answers in results:
        for answer in answers:
            for name, seconds in answer.get("phases", {}).items():
                phases[f"server_{name}"] = max(seconds, phases.get(f"server_{name}", 0.0))
    return phases


# the link to the workers -----------------------------------------------------------------------------------------


class Link:
    """The trainer's end of the connection to all workers: a TCP store, kept between pushes and replaced when a push
    fails or the servers change.
    """

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
        """Whether every worker still holds its end of this link; raises if a server does not answer."""
        calls = Calls(self.loop, servers, "strop_info", JOIN_S, [{}] * len(servers))
        try:
            answers = calls.results()
        except SyncError as error:
            raise SyncError(error.failed, dirty=set(), may_pass=error.may_pass) from None  # nothing has been touched
        linked = all(answer.get("link") == self.prefix for workers in answers for answer in workers)
        return self.prefix is not None and self._members == tuple(map(id, servers)) and linked

    def meet(self, servers: Sequence[VllmServer], backend: str, staging: list[Any] | None = None) -> tuple[int, Calls]:
        """Call all workers to a new store and wait until they are connected: (number of ranks, the join calls).

        `staging`: the shared buffers, per server and worker. The caller enters the process group, which blocks, only
        after this.
        """
        self.leave()
        self.prefix = f"strop-{secrets.token_hex(4)}-{next(self._attempts)}"
        self.secret = secrets.token_hex(32)  # sent to the workers below, over the authenticated control route
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
                self.leave()  # workers that wait in the store stop when it is gone
                raise self.blamed(calls, error) from None
        self._members, self._servers = tuple(map(id, servers)), list(servers)
        return world, calls

    @contextlib.contextmanager
    def blaming(self, calls: Calls) -> Iterator[None]:
        """Around a transfer: a failure of either side stops both, and the error raised is that of its cause."""
        try:
            yield
        except BaseException as error:
            self.give_up()
            raise self.blamed(calls, error) from None

    def blamed(self, calls: Calls, error: BaseException) -> BaseException:
        """The error to raise. Waits until the workers have stopped too, so that the next push finds them free."""
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
        """Signal waiting workers to stop; the link is not used again."""
        if self.store is not None:
            with contextlib.suppress(strop_wire.PeerError):
                self.store.set(strop_wire.END)
        self._members = ()

    def close(self) -> None:
        """For good: workers of servers that keep running release their end, which may be memory of our GPU."""
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
