"""Processes and devices, and every collective of the training group, each with a name and a timeout.

    with process_group(timeout_s=600):           # joins the processes of torchrun; does nothing with one process
        total = all_sum(x, "count of tokens")    # the name is logged if a rank never joins

Rows are divided into data_size() parts, one per data-parallel rank. With --parallel.context N a part is held by N
neighbouring ranks, each of which computes a slice of its rows. Sums and gathers run over parts, so no row counts twice;
`everyone=True` runs over all ranks, as gradients need.

All ranks must call the same collectives in the same order. If a rank is missing, the others would wait forever: each
measures its own wait, and after timeout_s logs where every rank is and exits. Forward and backward passes of a sharded
model contain collectives of FSDP and run within `passing`: they have no time limit, unless another rank has not started
the same pass after timeout_s.

With one process every function is a no-op or returns its input, and torch.distributed is not imported.
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

from data.errors import UserError
from trainer.parallel.ranks import is_main, rank, world_size
from trainer.parallel.watch import Watch, log, record_flight

T = TypeVar("T")
LONGEST_LOOK_S = 0.02  # between two polls for a command
SPARE_S = 30.0  # torch's own timeout comes after ours, whose message says more


def pick_device() -> torch.device:
    """The device this process trains on."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    number = int(os.environ.get("LOCAL_RANK") or "0")
    if number >= torch.cuda.device_count():
        raise UserError(
            f"LOCAL_RANK={number}: this machine has {torch.cuda.device_count()} GPUs; start as many processes with "
            "torchrun --nproc-per-node"
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


@contextlib.contextmanager
def process_group(timeout_s: float, context: int = 1) -> Iterator[None]:
    """Join the processes that torchrun has started, and leave on exit or error; `context` neighbours share rows."""
    if world_size() == 1:
        yield
        return
    if "MASTER_ADDR" not in os.environ:
        raise UserError(
            f"WORLD_SIZE={world_size()}: nothing says where the other processes are; start them with torchrun "
            "--nproc-per-node N -m trainer ..., or unset it"
        )
    import torch.distributed as dist

    device = pick_device()
    limit = timedelta(seconds=timeout_s + SPARE_S)
    options = {"device_id": device} if device.type == "cuda" else {}
    found, own_rank, world = next(dist.rendezvous("env://", timeout=limit))
    # A launcher keeps its store across restarts: addresses of processes that died must not be found.
    store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", found)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl":
        record_flight()
    dist.init_process_group(backend, store=store, rank=own_rank, world_size=world, timeout=limit, **options)
    watch = Watch(timeout_s, dist.PrefixStore("strop-watch", store), on_cuda=device.type == "cuda")
    watch.start()
    global _watch, _context
    _watch, _context = watch, _join_context(context, limit)
    try:
        yield
    finally:
        watch.stop()
        _watch = _context = None
        with contextlib.suppress(Exception):  # another rank may be gone already, which was logged elsewhere
            dist.destroy_process_group()


class Context(NamedTuple):
    """Process groups of context parallelism."""

    size: int
    same: Any  # process group of the ranks that hold the same rows as this one
    other: Any  # process group of one rank of each part, including this one


_context: Context | None = None


def _join_context(size: int, limit: timedelta) -> Context | None:
    """Neighbours share rows. Every rank must create all groups, in the same order."""
    if size == 1:
        return None
    import torch.distributed as dist

    world = world_size()
    assert world % size == 0, (world, size)
    same = [dist.new_group(list(range(first, first + size)), timeout=limit) for first in range(0, world, size)]
    other = [dist.new_group(list(range(place, world, size)), timeout=limit) for place in range(size)]
    return Context(size, same[rank() // size], other[rank() % size])


def context_size() -> int:
    """Ranks that share rows; 1 if every rank has rows of its own."""
    return 1 if _context is None or world_size() == 1 else _context.size


def context_rank() -> int:
    return rank() % context_size()


def data_size() -> int:
    """Parts that rows are divided into."""
    return world_size() // context_size()


def data_rank() -> int:
    return rank() // context_size()


_watch: Watch | None = None


def inside(name: str, *, timed: bool = True) -> contextlib.AbstractContextManager[None]:
    """Time the enclosed work as one collective; without `timed`, on CUDA, only its launch."""
    return contextlib.nullcontext() if _watch is None else _watch.inside(name, timed=timed)


def passing(name: str) -> contextlib.AbstractContextManager[None]:
    """For one forward and backward pass of a sharded model, which every rank runs."""
    return contextlib.nullcontext() if _watch is None else _watch.passing(name)


def log_once(text: str) -> None:
    """Log a line that several ranks may produce once, from the first of them."""
    with contextlib.suppress(Exception):  # the store ends with rank 0
        if _watch is not None and _watch.store.add(f"said/{hashlib.sha256(text.encode()).hexdigest()}", 1) > 1:
            return
    log(text)


def all_sum(x: Tensor, name: str = "sum", *, everyone: bool = False) -> Tensor:
    """Sum over all parts of the data, or over all ranks; with one process, the tensor itself."""
    return _reduce(x, name, "SUM", everyone)


def begin_sum(x: Tensor, name: str) -> Callable[[], None]:
    """Start to sum a tensor over all ranks, in place. The call returned waits for it; on CUDA only the device does."""
    import torch.distributed as dist

    with inside(name, timed=False):
        work = dist.all_reduce(x, async_op=True)

    def wait() -> None:
        with inside(name):
            work.wait()

    return wait


def all_count(count: int, name: str = "count", *, everyone: bool = False) -> int:
    """Sum of a count over all parts of the data, or over all ranks."""
    if world_size() == 1:
        return count
    return int(all_sum(torch.tensor(count, device=pick_device()), name, everyone=everyone))


def mean_over_ranks(x: Tensor) -> float:
    """Mean over the elements of all parts of the data."""
    total, count = all_sum(torch.stack([x.double().sum(), x.new_full((), x.numel(), dtype=torch.float64)]), "mean")
    return float(total / count.clamp(min=1))


def all_max(x: Tensor, name: str = "maximum") -> Tensor:
    """Maximum over all ranks."""
    return _reduce(x, name, "MAX", True)


def _reduce(x: Tensor, name: str, op: str, everyone: bool) -> Tensor:
    if (world_size() if everyone else data_size()) == 1:
        return x
    import torch.distributed as dist

    result = x.detach().to(pick_device(), copy=True)  # NCCL takes no tensors in main memory
    with inside(name):
        dist.all_reduce(result, op=getattr(dist.ReduceOp, op), group=_group(everyone))
    return result.to(x.device)


def _group(everyone: bool) -> Any:
    return None if everyone or _context is None else _context.other


def all_gather(x: Tensor, name: str = "gather", *, everyone: bool = False) -> list[Tensor]:
    """Tensors of all parts of the data, or of all ranks; their first dimension may differ."""
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
    return [part[:size].to(x.device) for part, size in zip(found, sizes, strict=True)]


def rows_of_all(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Rows of all parts of the data in one tensor, and the indices of this rank's."""
    parts = all_gather(x, name)
    first = sum(len(part) for part in parts[: data_rank()])
    return torch.cat(parts), torch.arange(first, first + len(x), device=x.device)


def from_main(value: T | None, name: str) -> T:
    """Broadcast a JSON value from rank 0: numbers, text, lists and dicts."""
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
    return json.loads(buffer.cpu().numpy().tobytes())


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
        found.append(buffer.cpu())
    return found


def of_all(value: Any, name: str) -> list[Any]:
    """Gather a JSON value from every rank, in rank order; also serves as a barrier."""
    if world_size() == 1:
        return [value]
    own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    return [json.loads(part.numpy().tobytes()) for part in all_gather(own, name, everyone=True)]


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
    # store.wait would block the connection, which the watch needs, and signal handlers.
    while not _watch.store.check([key]):
        time.sleep(pause)
        pause = min(1.2 * pause, LONGEST_LOOK_S)
    return _watch.store.get(key).decode()


def on_main(work: Callable[[], T]) -> T | None:
    """Run `work` on rank 0 while the others wait, without a timeout; returns its result there, None elsewhere.

    If it fails the others exit silently: rank 0 reports the error.
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


def context_gather(x: Tensor, name: str) -> Tensor:  # (ranks, *x.shape)
    """Gather tensors of one shape from all ranks that share rows; asynchronous on CUDA, for use in a forward pass."""
    import torch.distributed as dist

    found = x.new_empty(context_size(), *x.shape)
    with inside(name, timed=False):  # within a pass, which has no time limit
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
        gather(found.view(-1), x.contiguous().view(-1), group=_context.same)
    return found


def context_scatter_sum(x: Tensor, name: str) -> Tensor:  # (ranks, ...) -> (...)
    """Reduce-scatter over the ranks that share rows: the sum of what they hold for this rank."""
    import torch.distributed as dist

    own = x.new_empty(x.shape[1:])
    with inside(name, timed=False):  # within a pass, which has no time limit
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        scatter(own.view(-1), x.contiguous().view(-1), group=_context.same)
    return own


def context_sum(x: Tensor, name: str) -> Tensor:
    """Sum over the ranks that share rows."""
    import torch.distributed as dist

    total = x.detach().clone()
    with inside(name, timed=False):  # within a pass, which has no time limit
        dist.all_reduce(total, group=_context.same)
    return total


def local_shard(rows: Sequence[T], sizes: Sequence[int]) -> list[T]:
    """This rank's rows of a step, in order; ranks get about equal sums of `sizes` (tokens)."""
    return [rows[i] for i in balanced_shards(sizes, data_size())[data_rank()]]


def balanced_shards(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Indices divided into `parts` with close sums of sizes: greedily, the largest first, to the smallest part."""
    if parts == 1:
        return [list(range(len(sizes)))]
    dealt: list[list[int]] = [[] for _ in range(parts)]
    held = [0] * parts
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        least = min(range(parts), key=lambda part: (held[part], len(dealt[part]), part))
        dealt[least].append(i)
        held[least] += sizes[i]
    return [sorted(part) for part in dealt]


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank, so that all ranks decide alike."""
    return flag if world_size() == 1 else all_count(int(flag), "decision", everyone=True) > 0
