"""Processes and devices: who there is, and every collective of the training group, each with a name and a time limit.

    with process_group(timeout_s=600):           # joins what torchrun started; nothing at all with one process
        total = all_sum(x, "count of tokens")    # the name is what is shown when a rank does not come

All ranks must call the same collectives in the same order. A rank that does not come would leave the others waiting
for ever: each of them watches how long it has waited, and after timeout_s says where every rank is and ends.

With one process every function here is its own trivial case, and torch.distributed is not even imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainer.ranks import is_main, rank, world_size

T = TypeVar("T")
TIMEOUT_S = 600.0
HUNG = 75  # exit code of a process that has waited too long: a launcher may start it again
BEAT_S = 1.0  # how often a rank says where it is
SPARE_S = 30.0  # torch's own limit is later than ours, which says more


def pick_device() -> torch.device:
    """The device this process trains on."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    number = int(os.environ.get("LOCAL_RANK") or "0")
    if number >= torch.cuda.device_count():
        raise ValueError(
            f"LOCAL_RANK={number}: this machine has {torch.cuda.device_count()} GPUs; start as many processes with "
            "torchrun --nproc-per-node"
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


@contextlib.contextmanager
def process_group(timeout_s: float) -> Iterator[None]:
    """Join the processes that torchrun has started, and leave them at the end, however it comes."""
    if world_size() == 1:
        yield
        return
    if "MASTER_ADDR" not in os.environ:
        raise ValueError(
            f"WORLD_SIZE={world_size()}: nothing says where the other processes are; start them with torchrun "
            "--nproc-per-node N -m trainer ..., or unset it"
        )
    import torch.distributed as dist

    device = pick_device()
    limit = timedelta(seconds=timeout_s + SPARE_S)
    options = {"device_id": device} if device.type == "cuda" else {}
    found, own_rank, world = next(dist.rendezvous("env://", timeout=limit))
    # A launcher keeps its store when it starts processes again: the addresses of those that died must not be found.
    store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", found)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=own_rank, world_size=world, timeout=limit, **options)
    watch = Watch(timeout_s)
    global _watch
    _watch = watch
    try:
        yield
    finally:
        watch.stop()
        _watch = None
        with contextlib.suppress(Exception):  # another rank may be gone already, which was said elsewhere
            dist.destroy_process_group()


class Watch:
    """Where this rank is, told to the others now and then; a thread, as the one that waits cannot look at a clock."""

    def __init__(self, timeout_s: float) -> None:
        from torch.distributed import PrefixStore
        from torch.distributed.distributed_c10d import _get_default_store

        self.timeout_s = timeout_s
        self.store = PrefixStore("strop-watch", _get_default_store())
        self.orders = 0  # given or taken
        self.number = 0  # of the collective this rank is in, or was in last
        self.name = "start"
        self.since: float | None = None  # when it was entered; None: not in one
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dist-watch", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        self.number, self.name, self.since = self.number + 1, name, time.monotonic()
        try:
            yield
        finally:
            self.since = None

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=2 * BEAT_S)

    def _run(self) -> None:
        while not self._stopped.wait(BEAT_S):
            with contextlib.suppress(Exception):  # the store goes with rank 0
                self.store.set(str(rank()), json.dumps(self._where()))
            since = self.since
            if since is not None and time.monotonic() - since > self.timeout_s:
                say(self.report())
                os._exit(HUNG)

    def _where(self) -> dict[str, Any]:
        waited = None if self.since is None else time.monotonic() - self.since
        return {"number": self.number, "name": self.name, "waited_s": waited, "at": time.time()}

    def report(self) -> str:
        """Where all ranks are, as far as they have said."""
        places = [f"rank {rank()}: has waited {self.timeout_s:g} s in {self.name!r} (collective {self.number})"]
        for other in range(world_size()):
            if other != rank():
                places.append(f"rank {other} {self._told(other)}")
        return "; ".join(places) + "; this process ends, start all again with --resume"

    def _told(self, other: int) -> str:
        try:
            if not self.store.check([str(other)]):
                return "never said where it is"
            found = json.loads(self.store.get(str(other)))
        except Exception:  # the store is gone with the process that kept it
            return "cannot be asked"
        place = f"{found['name']!r} (collective {found['number']})"
        if time.time() - found["at"] > 5 * BEAT_S + 1:
            return f"was last heard of {time.time() - found['at']:.0f} s ago, at {place}"
        if found["waited_s"] is None:
            return f"is busy elsewhere, its last collective was {place}"
        return f"has waited {found['waited_s']:.0f} s in {place}"


_watch: Watch | None = None


def inside(name: str) -> contextlib.AbstractContextManager[None]:
    """For a stretch of work that holds collectives of its own (a sharded forward): it has the limit of one."""
    return contextlib.nullcontext() if _watch is None else _watch.inside(name)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def all_sum(x: Tensor, name: str = "sum") -> Tensor:
    """Sum over all ranks; with one process, the tensor itself."""
    return _reduce(x, name, "SUM")


def all_count(count: int, name: str = "count") -> int:
    """A number of things, those of all ranks together."""
    return count if world_size() == 1 else int(all_sum(torch.tensor(count, device=pick_device()), name))


def mean_over_ranks(x: Tensor) -> float:
    """Mean of all elements that ranks have together."""
    total, count = all_sum(torch.stack([x.double().sum(), x.new_tensor(x.numel(), dtype=torch.float64)]), "mean")
    return float(total / count.clamp(min=1))


def all_max(x: Tensor, name: str = "maximum") -> Tensor:
    return _reduce(x, name, "MAX")


def _reduce(x: Tensor, name: str, op: str) -> Tensor:
    if world_size() == 1:
        return x
    import torch.distributed as dist

    result = x.detach().to(pick_device(), copy=True)  # NCCL knows no tensors in main memory
    with inside(name):
        dist.all_reduce(result, op=getattr(dist.ReduceOp, op))
        _wait(result)
    return result.to(x.device)


def all_gather(x: Tensor, name: str = "gather") -> list[Tensor]:
    """The tensors of all ranks, which may differ in their first size."""
    if world_size() == 1:
        return [x]
    import torch.distributed as dist

    sizes = all_sum(torch.nn.functional.one_hot(torch.tensor(rank()), world_size()) * len(x), f"{name}: sizes").tolist()
    longest = max(sizes)
    padded = torch.cat([x, x.new_zeros(longest - len(x), *x.shape[1:])]).to(pick_device()).contiguous()
    found = [torch.empty_like(padded) for _ in sizes]
    with inside(name):
        dist.all_gather(found, padded)
        _wait(padded)
    return [part[:size].to(x.device) for part, size in zip(found, sizes, strict=True)]


def rows_of_all(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """The rows of all ranks in one tensor, and which of them are this rank's."""
    parts = all_gather(x, name)
    first = sum(len(part) for part in parts[: rank()])
    return torch.cat(parts), torch.arange(first, first + len(x), device=x.device)


def from_main(value: T | None, name: str) -> T:
    """What rank 0 has, on every rank. JSON: numbers, text, lists and dicts."""
    if world_size() == 1:
        assert value is not None
        return value
    import torch.distributed as dist

    data = json.dumps(value).encode() if is_main() else b""
    device = pick_device()
    size = all_max(torch.tensor(len(data), device=device), f"{name}: size")
    buffer = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if is_main():
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    with inside(name):
        dist.broadcast(buffer, src=0)
        _wait(buffer)
    return json.loads(bytes(buffer.cpu().numpy().tobytes()))


def of_all(value: Any, name: str) -> list[Any]:
    """What each rank has, on every rank, in their order. JSON."""
    if world_size() == 1:
        return [value]
    import torch.distributed as dist

    data = json.dumps(value).encode()
    size = torch.tensor(len(data), device=pick_device())
    with inside(f"{name}: size"):
        dist.all_reduce(size, op=dist.ReduceOp.MAX)
        _wait(size)
    own = torch.frombuffer(bytearray(data.ljust(int(size))), dtype=torch.uint8).to(pick_device())
    found = [torch.empty_like(own) for _ in range(world_size())]
    with inside(name):
        dist.all_gather(found, own)
        _wait(own)
    return [json.loads(bytes(part.cpu().numpy().tobytes())) for part in found]


def give_order(order: str) -> None:
    """A word to all other ranks, which wait for it in await_order."""
    assert _watch is not None, "orders are for several processes"
    _watch.orders += 1
    _watch.store.set(f"order/{_watch.orders}", order)
    _watch.store.delete_key(f"order/{_watch.orders - 64}")  # everybody is past that


def await_order() -> str:
    """The next word of rank 0, however long it takes: a launcher ends this process when rank 0 has ended."""
    assert _watch is not None, "orders are for several processes"
    _watch.orders += 1
    key = f"order/{_watch.orders}"
    _watch.store.wait([key], timedelta(days=365))
    return _watch.store.get(key).decode()


def barrier(name: str) -> None:
    """Everybody has come this far."""
    all_sum(torch.zeros((), device=pick_device()), name)


def share(rows: Sequence[T], sizes: Sequence[int]) -> list[T]:
    """This rank's part of the rows of a step, in order; about as many tokens (`sizes`) for each rank, largest first."""
    parts = shares(sizes, world_size())
    return [rows[i] for i in parts[rank()]]


def shares(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Numbers dealt to `parts` so that the sums of their sizes are close: the largest first, to whoever has least."""
    if parts == 1:
        return [list(range(len(sizes)))]
    dealt: list[list[int]] = [[] for _ in range(parts)]
    held = [0] * parts
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        least = min(range(parts), key=lambda part: (held[part], len(dealt[part]), part))
        dealt[least].append(i)
        held[least] += sizes[i]
    return [sorted(part) for part in dealt]


def _wait(x: Tensor) -> None:
    """A collective on CUDA returns before it has run; the watch is about when it has."""
    if x.device.type == "cuda":
        torch.cuda.current_stream(x.device).synchronize()


def any_rank(flag: bool) -> bool:
    """Whether it is true on any rank, so that all of them decide alike; with one process, the flag itself."""
    return flag if world_size() == 1 else all_count(int(flag), "decision") > 0
