"""What all ways of moving weights share: where they come from, in what order they travel, what is reported.

    sync = ProcessGroupSync(source, loop, device=device)
    report = sync.push(servers, version=12)   # the servers are paused and hold no request of ours
    sync.close()

A push replaces all weights of every server, or raises SyncError and leaves those in `dirty` unfit to serve until a
push to them goes through: the caller keeps them paused. Everything here runs in the thread that owns training, the
HTTP calls in the loop's thread.

The trainer's end of a link to the workers of all servers: who is in it, and when it is made anew.
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

ALIGN = 16  # bytes: any dtype may begin there
MIB = 2**20
SLOWEST = 0.5e9  # bytes a second that a transfer may be as slow as
GRACE_S = 60.0


@dataclass(frozen=True)
class TensorSpec:
    """A weight as servers will get it."""

    name: str  # in a Hugging Face checkpoint
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


class WeightSource(Protocol):
    """The weights under training, as a server wants them."""

    is_lora: bool

    def specs(self) -> list[TensorSpec]:
        """All weights in one fixed order, layer after layer, a tied one once."""

    def tensors(self) -> Generator[tuple[str, Tensor], None, None]:
        """The same in the same order; valid until the next one is asked for. Closed by whoever leaves it half-way:
        other ranks may be in the middle of it."""

    def save_adapter(self, folder: Path) -> None:
        """A peft adapter folder that vLLM can load; only with is_lora."""


@dataclass(frozen=True)
class SyncReport:
    """What one push did."""

    version: int
    backend: str
    num_bytes: int
    seconds: float
    phases: dict[str, float] = field(default_factory=dict)


class SyncError(Exception):
    """A push failed. failed: reason by position in the servers given; dirty: positions that need another push;
    may_pass: only the way to the servers failed, which may be well again in a moment.
    """

    def __init__(self, failed: dict[int, str], dirty: set[int] | None = None, *, may_pass: bool = False) -> None:
        self.failed = failed
        self.may_pass = may_pass
        self.dirty = set(failed) if dirty is None else dirty
        reasons = "; ".join(f"server {i}: {reason}" for i, reason in sorted(failed.items()))
        super().__init__(f"weight sync failed: {reasons}")


class WeightSync(Protocol):
    """A way of moving weights."""

    needs_pause: bool  # servers must be emptied and paused first

    def model_name(self, version: int) -> str:
        """What requests name in their `model` field to get this version."""

    def push(self, servers: Sequence[VllmServer], version: int) -> SyncReport: ...

    def close(self) -> None: ...


def make_buckets(specs: Sequence[TensorSpec], max_bytes: int) -> list[dict[str, Any]]:
    """Cut the weights, in their order, into buffers of at most `max_bytes`; a larger tensor gets one of its own."""
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
    """The next tensors of the source into the buffer, sealed with their sum."""
    for name, view in strop_wire.views(bucket, buffer):
        got, tensor = next(tensors)
        assert got == name and tensor.shape == view.shape, f"{got} {tuple(tensor.shape)}, planned {name} {view.shape}"
        view.copy_(tensor)  # rounds to the serving dtype where the source has not
    strop_wire.seal(bucket, buffer)


def time_limit(num_bytes: int) -> float:
    """Seconds a transfer may take."""
    return GRACE_S + num_bytes / SLOWEST


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class Calls:
    """The same call of our worker extension on several servers, running while this thread does something else."""

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
        """Raise if any of them has failed already."""
        done = {i: future for i, future in enumerate(self.futures) if future.done()}
        reasons = {i: reason for i, future in done.items() if (reason := _reason(future)) is not None}
        if reasons:
            raise self._error(reasons)

    def results(self) -> list[list[dict[str, Any]]]:
        """Per server what each worker answered, once all have; failures after all have ended."""
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
        """Let calls that are about to fail do so: their reasons say more than ours."""
        deadline = time.monotonic() + seconds
        for future in self.futures:
            _reason(future, deadline)

    def _error(self, reasons: dict[int, Reason]) -> SyncError:
        # A worker that lost the others is not to blame when another one has a reason of its own.
        failed = {i: reason for i, reason in reasons.items() if not reason.is_peer} or reasons
        whole = {i for i, future in enumerate(self.futures) if future.done() and _reason(future) is None}
        return SyncError(
            {i: reason.text for i, reason in failed.items()},
            dirty=set(range(len(self.futures))) - whole,
            may_pass=all(reason.may_pass for reason in failed.values()),
        )


class Reason(NamedTuple):
    """Why a call failed."""

    text: str
    is_peer: bool = False  # its worker blames another
    may_pass: bool = False  # the worker was not heard: the same call may go through a moment later


def _reason(future: Future, deadline: float | None = None) -> Reason | None:
    """None for a call that has not failed."""
    try:
        answers = future.result(None if deadline is None else max(deadline - time.monotonic(), 0.0))
    except TimeoutError:
        return Reason("no answer in time")
    except Exception as error:  # ServerError, or a reply that nobody foresaw: this server failed
        text = " ".join(str(error).split()) or type(error).__name__
        return Reason(text, may_pass=not isinstance(error, ValueError))  # a refusal would come again
    if not answers:
        return Reason("no worker answered")
    for answer in answers:
        if not isinstance(answer, dict):
            return Reason(f"a worker answered {str(answer)[:100]!r}, not our extension's reply")
    errors = [answer for answer in answers if "error" in answer]
    own = [answer for answer in errors if not answer.get("peer")]
    if errors:
        worst = (own or errors)[0]
        return Reason(f"worker {worst.get('rank')}: {worst['error']}", is_peer=not own)
    return None


def check_loaded(results: list[list[dict[str, Any]]], version: int, num_bytes: int) -> None:
    """Every worker must say that it now has this version, made of as many bytes as were sent."""
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
    """The longest of each phase over all workers."""
    phases: dict[str, float] = {}
    for answers in results:
        for answer in answers:
            for name, seconds in answer.get("phases", {}).items():
                phases[f"server_{name}"] = max(seconds, phases.get(f"server_{name}", 0.0))
    return phases


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
