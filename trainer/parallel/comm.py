"""Processes and devices: who there is, and every collective of the training group, each with a name and a time limit.

    with process_group(timeout_s=600):           # joins what torchrun started; nothing at all with one process
        total = all_sum(x, "count of tokens")    # the name is what is shown when a rank does not come

Rows are dealt to data_size() parts. Each is one rank, or with --parallel.context N that many neighbours which hold the
same rows and compute a slice of them each. Sums and gathers are of parts, so that no row counts twice; `everyone=True`
takes all ranks, as for gradients.

All ranks must call the same collectives in the same order. A rank that does not come would leave the others waiting
for ever: each of them watches how long it has waited, and after timeout_s says where every rank is and ends. Passes of
a model in shards hold collectives of their own, within `passing`: these may take as long as they take, unless another
rank has not begun the same pass after timeout_s.

With one process every function here is its own trivial case, and torch.distributed is not even imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from trainer.parallel.ranks import is_main, rank, world_size
from trainer.parallel.watch import Watch, log, record_flight

T = TypeVar("T")
LONGEST_LOOK_S = 0.02  # between two looks for an order
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
def process_group(timeout_s: float, context: int = 1) -> Iterator[None]:
    """Join the processes that torchrun has started, and leave them at the end, however it comes.

    `context` neighbours share their rows.
    """
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
    if backend == "nccl":
        record_flight()
    dist.init_process_group(backend, store=store, rank=own_rank, world_size=world, timeout=limit, **options)
    watch = Watch(timeout_s)
    global _watch, _context
    _watch, _context = watch, _join_context(context, limit)
    try:
        yield
    finally:
        watch.stop()
        _watch = _context = None
        with contextlib.suppress(Exception):  # another rank may be gone already, which was said elsewhere
            dist.destroy_process_group()


class Context(NamedTuple):
    """Which ranks hold the same rows."""

    size: int
    same: Any  # process group of this rank and those with the same rows
    other: Any  # process group of one rank of each part, this one among them


_context: Context | None = None


def _join_context(size: int, limit: timedelta) -> Context | None:
    """Neighbours share rows; every rank has to name all groups, in the same order."""
    if size == 1:
        return None
    import torch.distributed as dist

    world = world_size()
    assert world % size == 0, (world, size)
    same = [dist.new_group(list(range(first, first + size)), timeout=limit) for first in range(0, world, size)]
    other = [dist.new_group(list(range(place, world, size)), timeout=limit) for place in range(size)]
    return Context(size, same[rank() // size], other[rank() % size])


def context_size() -> int:
    """Ranks that share rows; 1: every rank has its own."""
    return 1 if _context is None or world_size() == 1 else _context.size


def context_rank() -> int:
    return rank() % context_size()


def data_size() -> int:
    """Parts that rows are dealt to."""
    return world_size() // context_size()


def data_rank() -> int:
    return rank() // context_size()


_watch: Watch | None = None


def inside(name: str) -> contextlib.AbstractContextManager[None]:
    """For a stretch of work that is a collective, and has the limit of one."""
    return contextlib.nullcontext() if _watch is None else _watch.inside(name)


def passing(name: str) -> contextlib.AbstractContextManager[None]:
    """For a pass of a model in shards, which every rank makes: a forward, and its backward."""
    return contextlib.nullcontext() if _watch is None else _watch.passing(name)


def log_once(text: str) -> None:
    """What ranks may say alike is said by the first of them."""
    with contextlib.suppress(Exception):  # the store goes with rank 0
        if _watch is not None and _watch.store.add(f"said/{hashlib.sha256(text.encode()).hexdigest()}", 1) > 1:
            return
    log(text)


def all_sum(x: Tensor, name: str = "sum", *, everyone: bool = False) -> Tensor:
    """Sum over all parts of the data, or over all ranks; with one, the tensor itself."""
    return _reduce(x, name, "SUM", everyone)


def all_count(count: int, name: str = "count", *, everyone: bool = False) -> int:
    """A number of things, those of all parts of the data together, or of all ranks."""
    if world_size() == 1:
        return count
    return int(all_sum(torch.tensor(count, device=pick_device()), name, everyone=everyone))


def mean_over_ranks(x: Tensor) -> float:
    """Mean of all elements that the parts of the data have together."""
    total, count = all_sum(torch.stack([x.double().sum(), x.new_tensor(x.numel(), dtype=torch.float64)]), "mean")
    return float(total / count.clamp(min=1))


def all_max(x: Tensor, name: str = "maximum") -> Tensor:
    """Over all ranks."""
    return _reduce(x, name, "MAX", True)


def _reduce(x: Tensor, name: str, op: str, everyone: bool) -> Tensor:
    if (world_size() if everyone else data_size()) == 1:
        return x
    import torch.distributed as dist

    result = x.detach().to(pick_device(), copy=True)  # NCCL knows no tensors in main memory
    with inside(name):
        dist.all_reduce(result, op=getattr(dist.ReduceOp, op), group=_group(everyone))
        _wait(result)
    return result.to(x.device)


def _group(everyone: bool) -> Any:
    return None if everyone or _context is None else _context.other


def all_gather(x: Tensor, name: str = "gather", *, everyone: bool = False) -> list[Tensor]:
    """The tensors of all parts of the data, or of all ranks, which may differ in their first size."""
    own, count = (rank(), world_size()) if everyone else (data_rank(), data_size())
    if count == 1:
        return [x]
    import torch.distributed as dist

    size = torch.nn.functional.one_hot(torch.tensor(own), count) * len(x)
    sizes = all_sum(size, f"{name}: sizes", everyone=everyone).tolist()
    longest = max(sizes)
    padded = torch.cat([x, x.new_zeros(longest - len(x), *x.shape[1:])]).to(pick_device()).contiguous()
    found = [torch.empty_like(padded) for _ in sizes]
    with inside(name):
        dist.all_gather(found, padded, group=_group(everyone))
        _wait(padded)
    return [part[:size].to(x.device) for part, size in zip(found, sizes, strict=True)]


def rows_of_all(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """The rows of all parts of the data in one tensor, and which of them are this rank's."""
    parts = all_gather(x, name)
    first = sum(len(part) for part in parts[: data_rank()])
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


def tensors_from_main(tensors: Sequence[Tensor] | None, name: str) -> list[Tensor]:
    """Rank 0's tensors on every rank, in main memory."""
    if world_size() == 1:
        assert tensors is not None
        return list(tensors)
    import torch.distributed as dist

    kinds = None if tensors is None else [[str(x.dtype).removeprefix("torch."), list(x.shape)] for x in tensors]
    found = []
    for place, (dtype, shape) in enumerate(from_main(kinds, f"{name}: shapes")):
        buffer = torch.empty(shape, dtype=getattr(torch, dtype), device=pick_device())
        if tensors is not None:
            buffer.copy_(tensors[place])
        with inside(name):
            dist.broadcast(buffer, src=0)
            _wait(buffer)
        found.append(buffer.cpu())
    return found


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


@contextlib.contextmanager
def rank0_alone() -> Iterator[None]:
    """For rank 0, while it works alone and the other ranks wait for its commands."""
    assert _watch is not None and is_main(), "commands are rank 0's, to several processes"
    _watch.rank0_alone = True
    try:
        yield
    finally:
        _watch.rank0_alone = False


def send_command(command: str) -> None:
    """Rank 0 names what the other ranks do next; they wait in next_command. Main thread only: collectives follow."""
    assert _watch is not None, "commands are for several processes"
    assert _watch.rank0_alone, f"{command}: the other ranks do not wait for commands now"
    assert threading.current_thread() is threading.main_thread(), f"{command}: only the main thread may send it"
    _watch.commands += 1
    _watch.store.set(f"command/{_watch.commands}", command)
    _watch.store.delete_key(f"command/{_watch.commands - 64}")  # every rank is past that one


def next_command() -> str:
    """Rank 0's next command, however long it takes: the launcher ends this process when rank 0 has ended."""
    assert _watch is not None, "commands are for several processes"
    _watch.commands += 1
    key = f"command/{_watch.commands}"
    pause = 0.001
    # store.wait would hold the connection, which the watch needs, and keep a signal's handler from running.
    while not _watch.store.check([key]):
        time.sleep(pause)
        pause = min(1.2 * pause, LONGEST_LOOK_S)
    return _watch.store.get(key).decode()


def on_main(work: Callable[[], T]) -> T | None:
    """What rank 0 does while the others wait, however long it takes: its result there, None elsewhere.

    When it fails the others end as well, without a word: rank 0 says why.
    """
    if world_size() == 1:
        return work()
    if not is_main():
        if next_command() == "failed":
            raise SystemExit(2)
        return None
    with rank0_alone():
        try:
            result = work()
        except BaseException:
            send_command("failed")
            raise
        send_command("done")
    return result


def barrier(name: str) -> None:
    """Everybody has come this far."""
    all_sum(torch.zeros((), device=pick_device()), name, everyone=True)


def context_gather(x: Tensor, name: str) -> Tensor:  # (ranks, *x.shape)
    """The tensors, of one shape, of all ranks that share rows. Queued on CUDA: it runs within a forward pass."""
    import torch.distributed as dist

    found = x.new_empty(context_size(), *x.shape)
    with inside(name):
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
        gather(found.view(-1), x.contiguous().view(-1), group=_context.same)
    return found


def context_scatter_sum(x: Tensor, name: str) -> Tensor:  # (ranks, ...) -> (...)
    """The reverse: what all ranks that share rows have for this one, added up."""
    import torch.distributed as dist

    own = x.new_empty(x.shape[1:])
    with inside(name):
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        scatter(own.view(-1), x.contiguous().view(-1), group=_context.same)
    return own


def context_sum(x: Tensor, name: str) -> Tensor:
    """Sum over the ranks that share rows."""
    import torch.distributed as dist

    total = x.detach().clone()
    with inside(name):
        dist.all_reduce(total, group=_context.same)
    return total


def share(rows: Sequence[T], sizes: Sequence[int]) -> list[T]:
    """This rank's part of the rows of a step, in order; about as many tokens (`sizes`) in each, largest first."""
    return [rows[i] for i in shares(sizes, data_size())[data_rank()]]


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
    return flag if world_size() == 1 else all_count(int(flag), "decision", everyone=True) > 0
