"""Ranks, devices, and every collective of the training group, each with a name and a timeout.

    with process_group(timeout_s=600):           # join the processes of torchrun; no effect with one process
        total = all_sum(x, "count of tokens")    # the name is logged if a rank never joins

Rows are divided into data_size() shards, one per data-parallel rank. With --parallel.context N, N neighbouring ranks
have the same shard, and each computes a slice of its rows. Sums and gathers run over shards, so that no row counts
twice; `everyone=True` runs over all ranks, as gradients need.

All ranks must call the same collectives in the same order. If a rank is missing, the other ranks would wait forever:
each rank measures its wait, and after timeout_s logs the state of every rank and exits. Forward and backward passes of
a sharded model contain FSDP collectives and run within `passing`: they have no time limit, unless another rank has not
started the same pass after timeout_s.

With one process every function is a no-op or returns its input, and torch.distributed is not imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from data.errors import UserError
from trainer.parallel.ranks import is_main, rank, world_size
from trainer.parallel.watch import Watch, log, record_flight

T = TypeVar("T")
COMMAND_WAIT = timedelta(hours=1)  # then torch logs a timeout, and the wait continues
JOIN_S = 0.05  # seconds between checks of rank 0 for ranks that start
SPARE_S = 30.0  # torch's timeout comes later than timeout_s, whose message is more detailed
PEER_LOST = re.compile(  # gloo, torch's store, NCCL
    r"Connection (?:reset|closed) by peer|Broken pipe|Connection was likely closed|remote process exited|"
    r"Connection timed out|No route to host"  # its host disappeared
)


def pick_device() -> torch.device:
    """Return the device that this rank trains on."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK") or "0")
    if index >= (count := torch.cuda.device_count()):
        raise UserError(f"LOCAL_RANK={index}: this machine has {count} GPUs; use torchrun --nproc-per-node {count}")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


@contextlib.contextmanager
def process_group(timeout_s: float, context: int = 1) -> Iterator[None]:
    """Join the processes that torchrun started, and leave on exit or error; `context` neighbouring ranks share rows."""
    if world_size() == 1:
        yield
        return
    if "MASTER_ADDR" not in os.environ:
        raise UserError(
            f"WORLD_SIZE={world_size()}: MASTER_ADDR, the address of rank 0, is not set; start with torchrun "
            "--nproc-per-node N -m trainer ..., or unset WORLD_SIZE"
        )
    import torch.distributed as dist

    device = pick_device()
    limit = timedelta(seconds=timeout_s + SPARE_S)
    options = {"device_id": device} if device.type == "cuda" else {}
    store, this_rank, world = next(dist.rendezvous("env://", timeout=limit))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = dist.PrefixStore(agree_on_attempt(store, this_rank, world, limit), store)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl":
        record_flight()
    dist.init_process_group(backend, store=store, rank=this_rank, world_size=world, timeout=limit, **options)
    watch = Watch(timeout_s, dist.PrefixStore("strop-watch", store), on_cuda=device.type == "cuda")
    watch.command_store = watch.store.clone()
    watch.start()
    global _watch, _context
    _watch, _context = watch, _join_context(context, limit)
    try:
        yield
    finally:
        watch.stop()
        _watch = _context = None
        with contextlib.suppress(Exception):  # another rank may have exited already, which was logged elsewhere
            dist.destroy_process_group()


def agree_on_attempt(store: Any, this_rank: int, world: int, limit: timedelta) -> str:
    """Return a name that the ranks of this attempt share, as a prefix of their keys.

    torchrun keeps its store across restarts, with the addresses of processes that died. The restart count cannot be
    the prefix: it differs between hosts, because each torchrun counts only the restarts that began on its host.
    """
    name = uuid.uuid4().hex
    if this_rank > 0:
        store.set(f"joins/{this_rank}", name)
        store.wait([f"attempt/{name}"], limit)
        attempt = store.get(f"attempt/{name}").decode()
        store.set(f"{attempt}/{this_rank}", "")
        return attempt
    deadline = time.monotonic() + limit.total_seconds()
    missing = list(range(1, world))
    while missing := [other for other in missing if not store.check([f"{name}/{other}"])]:
        for other in missing:
            if store.check([f"joins/{other}"]):  # may be from a process that died: only a live process confirms
                store.set(f"attempt/{store.get(f'joins/{other}').decode()}", name)
        if time.monotonic() > deadline:
            raise UserError(f"ranks {missing} have not joined after {limit.total_seconds():g} s; see their logs")
        time.sleep(JOIN_S)
    return name


def name_lost_rank(error: Exception) -> Exception:
    """Return a UserError if a collective failed because another rank has died, otherwise the error itself."""
    reason = PEER_LOST.search(str(error)) if isinstance(error, RuntimeError) and _watch is not None else None
    if reason is None:
        return error
    return UserError(
        f"lost another rank in {_watch.activity.name!r} ({reason[0]}): its process crashed or was killed, for example "
        "because memory ran out, or its host is unreachable; restart all ranks with --resume"
    )


class Context(NamedTuple):
    """Process groups of context parallelism."""

    size: int
    same: Any  # process group of the ranks with this rank's rows
    other: Any  # process group of one rank per shard, including this rank


_context: Context | None = None


def _join_context(size: int, limit: timedelta) -> Context | None:
    """Create the groups. Every rank must create all of them, in the same order."""
    if size == 1:
        return None
    import torch.distributed as dist

    world = world_size()
    assert world % size == 0, (world, size)
    same = [dist.new_group(list(range(first, first + size)), timeout=limit) for first in range(0, world, size)]
    other = [dist.new_group(list(range(first, world, size)), timeout=limit) for first in range(size)]
    return Context(size, same[rank() // size], other[rank() % size])


def context_size() -> int:
    """Return the number of ranks that share each micro-batch; 1 without context parallelism."""
    return 1 if _context is None or world_size() == 1 else _context.size


def context_rank() -> int:
    return rank() % context_size()


def data_size() -> int:
    """Return the number of shards that rows are divided into."""
    return world_size() // context_size()


def data_rank() -> int:
    return rank() // context_size()


_watch: Watch | None = None


def inside(name: str, *, timed: bool = True) -> contextlib.AbstractContextManager[None]:
    """Context manager: time the enclosed work as one collective; on CUDA without `timed`, only its launch."""
    return contextlib.nullcontext() if _watch is None else _watch.inside(name, timed=timed)


def passing(name: str) -> contextlib.AbstractContextManager[None]:
    """Context manager: one forward and backward pass of a sharded model, which every rank runs."""
    return contextlib.nullcontext() if _watch is None else _watch.passing(name)


def log_once(text: str) -> None:
    """Log a line only from the first rank that produces it."""
    with contextlib.suppress(Exception):  # the store ends with rank 0
        if _watch is not None and _watch.store.add(f"logged/{hashlib.sha256(text.encode()).hexdigest()}", 1) > 1:
            return
    log(text)


def all_sum(x: Tensor, name: str = "sum", *, everyone: bool = False) -> Tensor:
    """Sum over all shards of the data, or over all ranks; with one process, return the tensor itself."""
    return _reduce(x, name, "SUM", everyone)


def begin_sum(x: Tensor, name: str) -> Callable[[], None]:
    """Start an in-place sum over all ranks and return a function that waits for it; on CUDA only the device waits."""
    import torch.distributed as dist

    with inside(name, timed=False):
        work = dist.all_reduce(x, async_op=True)

    def wait() -> None:
        with inside(name):
            work.wait()

    return wait


def all_count(count: int, name: str = "count", *, everyone: bool = False) -> int:
    """Sum a count over all shards of the data, or over all ranks."""
    if world_size() == 1:
        return count
    return int(all_sum(torch.tensor(count, device=pick_device()), name, everyone=everyone))


def mean_over_ranks(x: Tensor) -> float:
    """Return the mean over the elements of all shards of the data."""
    total, count = all_sum(torch.stack([x.double().sum(), x.new_full((), x.numel(), dtype=torch.float64)]), "mean")
    return float(total / count.clamp(min=1))


def all_max(x: Tensor, name: str = "maximum") -> Tensor:
    """Return the maximum over all ranks."""
    return _reduce(x, name, "MAX", True)


def _reduce(x: Tensor, name: str, op: str, everyone: bool) -> Tensor:
    if (world_size() if everyone else data_size()) == 1:
        return x
    import torch.distributed as dist

    result = x.detach().to(pick_device(), copy=True)  # NCCL cannot reduce tensors in main memory
    with inside(name):
        dist.all_reduce(result, op=getattr(dist.ReduceOp, op), group=_group(everyone))
    return result.to(x.device)


def _group(everyone: bool) -> Any:
    return None if everyone or _context is None else _context.other


def all_gather(x: Tensor, name: str = "gather", *, everyone: bool = False) -> list[Tensor]:
    """Gather the tensors of all shards of the data, or of all ranks; their first dimension may differ."""
    index, count = (rank(), world_size()) if everyone else (data_rank(), data_size())
    if count == 1:
        return [x]
    import torch.distributed as dist

    size = torch.nn.functional.one_hot(torch.tensor(index), count) * len(x)
    sizes = all_sum(size, f"{name}: sizes", everyone=everyone).tolist()
    longest = max(sizes)
    padded = torch.cat([x, x.new_zeros(longest - len(x), *x.shape[1:])]).to(pick_device()).contiguous()
    gathered = [torch.empty_like(padded) for _ in sizes]
    with inside(name):
        dist.all_gather(gathered, padded, group=_group(everyone))
    return [shard[:size].to(x.device) for shard, size in zip(gathered, sizes, strict=True)]


def rows_of_all(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return the rows of all shards of the data in one tensor, and the indices of this rank's rows."""
    shards = all_gather(x, name)
    first = sum(len(shard) for shard in shards[: data_rank()])
    return torch.cat(shards), torch.arange(first, first + len(x), device=x.device)


def from_main(value: Any, name: str) -> Any:
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
    """Broadcast rank 0's tensors to main memory on every rank."""
    if world_size() == 1:
        assert tensors is not None
        return list(tensors)
    import torch.distributed as dist

    kinds = None if tensors is None else [[str(x.dtype).removeprefix("torch."), list(x.shape)] for x in tensors]
    received = []
    for i, (dtype, shape) in enumerate(from_main(kinds, f"{name}: shapes")):
        buffer = torch.empty(shape, dtype=getattr(torch, dtype), device=pick_device())
        if tensors is not None:
            buffer.copy_(tensors[i])
        with inside(name):
            dist.broadcast(buffer, src=0)
        received.append(buffer.cpu())
    return received


def of_all(value: Any, name: str) -> list[Any]:
    """Gather a JSON value from every rank, in rank order; also a barrier."""
    if world_size() == 1:
        return [value]
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    return [json.loads(each.numpy().tobytes()) for each in all_gather(data, name, everyone=True)]


def exchange(parts: Sequence[Any], name: str) -> list[Any]:
    """Send parts[r] to rank r, as a pickle; return what each rank sent to this rank. None sends no bytes."""
    import torch.distributed as dist

    here, device = rank(), pick_device()
    pickles = [b"" if part is None or r == here else pickle.dumps(part, 5) for r, part in enumerate(parts)]
    sizes = list(map(len, pickles))
    arriving = torch.empty(len(parts), dtype=torch.int64, device=device)
    with inside(f"{name}: sizes"):
        dist.all_to_all_single(arriving, torch.tensor(sizes, device=device))
    arriving_sizes = arriving.tolist()
    sent = torch.from_numpy(np.frombuffer(bytearray().join(pickles), np.uint8)).to(device)
    received = sent.new_empty(sum(arriving_sizes))
    with inside(name):
        dist.all_to_all_single(received, sent, arriving_sizes, sizes)
    arrived = [pickle.loads(x.numpy()) if len(x) else None for x in received.cpu().split(arriving_sizes)]
    arrived[here] = parts[here]
    return arrived


@contextlib.contextmanager
def rank0_alone() -> Iterator[None]:
    """Context manager: rank 0 works alone while the other ranks wait for its commands, the last of them "done".

    If it fails, the other ranks exit silently and rank 0 reports the error.
    """
    assert _watch is not None and is_main(), "only rank 0 of several sends commands"
    _watch.rank0_alone = True
    try:
        yield
        send_command("done")
    except BaseException:
        with contextlib.suppress(Exception):  # the store may be lost
            send_command("failed")
        raise
    finally:
        _watch.rank0_alone = False


def send_command(command: str) -> None:
    """Send a command from rank 0 to the ranks in next_command(). Main thread only: collectives follow."""
    assert _watch is not None, "commands need several ranks"
    assert _watch.rank0_alone, f"{command}: the other ranks are not waiting for commands"
    assert threading.current_thread() is threading.main_thread(), f"{command}: only the main thread may send it"
    _watch.commands += 1
    _watch.store.set(f"command/{_watch.commands}", command)
    _watch.store.delete_key(f"command/{_watch.commands - 64}")  # every rank has read it


def next_command() -> str:
    """Wait for rank 0's next command, without a timeout: the launcher ends this process if rank 0 exits.

    A thread blocks in the store, on a connection that the watch does not use: signal handlers run in this thread.
    """
    assert _watch is not None, "commands need several ranks"
    _watch.commands += 1
    command: Future[str] = Future()
    threading.Thread(target=_await_command, args=(_watch, command), name="next-command", daemon=True).start()
    if command.result() == "failed":
        raise SystemExit(2)
    return command.result()


def _await_command(watch: Watch, command: Future[str]) -> None:
    import torch.distributed as dist

    key = f"command/{watch.commands}"
    while not command.done():
        try:
            watch.command_store.wait([key], COMMAND_WAIT)
            command.set_result(watch.command_store.get(key).decode())
        except dist.DistStoreError:  # timeout
            continue
        except Exception as error:  # raised by result()
            command.set_exception(error)


def on_main(work: Callable[[], T]) -> T | None:
    """Run `work` on rank 0 while the other ranks wait without a timeout; return its result there, None elsewhere."""
    if world_size() == 1:
        return work()
    if not is_main():
        next_command()
        return None
    with rank0_alone():
        return work()


def context_gather(x: Tensor, name: str) -> Tensor:  # (ranks, *x.shape)
    """Gather tensors of one shape from all ranks that share rows; asynchronous on CUDA, for use in a forward pass."""
    import torch.distributed as dist

    result = x.new_empty(context_size(), *x.shape)
    with inside(name, timed=False):  # within a pass, which has no time limit
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
        gather(result.view(-1), x.contiguous().view(-1), group=_context.same)
    return result


def context_scatter_sum(x: Tensor, name: str) -> Tensor:  # (ranks, ...) -> (...)
    """Reduce-scatter over the ranks that share rows."""
    import torch.distributed as dist

    result = x.new_empty(x.shape[1:])
    with inside(name, timed=False):  # within a pass, which has no time limit
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        scatter(result.view(-1), x.contiguous().view(-1), group=_context.same)
    return result


def context_sum(x: Tensor, name: str) -> Tensor:
    """Sum over the ranks that share rows."""
    import torch.distributed as dist

    total = x.detach().clone()
    with inside(name, timed=False):  # within a pass, which has no time limit
        dist.all_reduce(total, group=_context.same)
    return total


def local_shard(rows: Sequence[T], sizes: Sequence[int]) -> list[T]:
    """Return this rank's rows of a step, in order; ranks get about equal sums of `sizes` (tokens)."""
    return [rows[i] for i in balanced_shards(sizes, data_size())[data_rank()]]


def balanced_shards(sizes: Sequence[int], num_shards: int) -> list[list[int]]:
    """Divide indices into shards with similar sums of sizes: greedily, largest first, into the smallest shard."""
    if num_shards == 1:
        return [list(range(len(sizes)))]
    shards: list[list[int]] = [[] for _ in range(num_shards)]
    totals = [0] * num_shards
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        smallest = min(range(num_shards), key=lambda shard: (totals[shard], len(shards[shard]), shard))
        shards[smallest].append(i)
        totals[smallest] += sizes[i]
    return [sorted(shard) for shard in shards]


def any_rank(flag: bool) -> bool:
    """Return whether the flag is set on any rank, so that all ranks make the same decision."""
    return flag if world_size() == 1 else all_count(int(flag), "decision", everyone=True) > 0
