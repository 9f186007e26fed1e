"""The collectives of an optimizer step, and the time of each: latency + bytes / bandwidth.

    python -m bench.scaling.collectives [--ranks 2]   # time collectives here, fit latency and bandwidth, check the fit

calls() lists the collectives of a step. tests/test_scaling.py counts them in real steps and asserts equality.

Without a GPU the backend is gloo. With one, it is NCCL over loopback sockets: every rank is a node of its own that
shares GPU 0. For real GPUs, start `torchrun --nproc-per-node 8 -m bench.scaling.collectives`.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import tyro

from trainer.parallel.comm import pick_device
from trainer.parallel.overlap import buckets

KIB, MIB = 1 << 10, 1 << 20
NODE = 8  # GPUs per node
FITTED = tuple(256 * KIB << i for i in range(0, 7, 2))  # bytes of the full tensor
HELD_OUT = tuple(256 * KIB << i for i in range(1, 7, 2))
DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
# Small collectives per step (counts, metrics), by the name that comm.py gives them; their time is latency.
OFFLINE = ("number of micro-batches", "sum", "names of metrics", "metrics")
NOT_EMPTY = ("micro-batches that are not empty: sizes", "micro-batches that are not empty")
BOOKKEEPING = {"sft": OFFLINE, "dpo": OFFLINE, "grpo": (*OFFLINE, "sum", "replayed log-probs", *NOT_EMPTY)}
EVERYONE = ("number of micro-batches", "gradient norm")  # over all ranks; the other names over shards of the data


# collectives of a step -------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A collective."""

    kind: str  # all_gather, reduce_scatter, all_reduce, broadcast
    size: int  # bytes of the full tensor: the result of a gather, the input of a scatter
    ranks: int
    phase: str = "end"  # forward, backward and last (backward pass) overlap with compute; head, context and end do not
    stride: int = 1  # distance between neighbours: copies of a shard are `shards` ranks apart


class Weight(NamedTuple):
    shape: tuple[int, ...]
    is_trained: bool

    def padded(self, shards: int) -> int:
        """Return the numbers after FSDP pads the first dimension to a multiple of the shards."""
        return -(-self.shape[0] // shards) * shards * math.prod(self.shape[1:])


@dataclass(frozen=True)
class Model:
    """Weights by FSDP group."""

    root: tuple[Weight, ...]  # embedding, last norm
    block: tuple[Weight, ...]
    head: Weight  # gathered separately, also if tied
    layers: int
    tied: bool
    kv_width: int  # of keys and values together

    def in_order(self) -> Iterable[Weight]:
        return [self.root[0], *self.block * self.layers, *self.root[1:], *([] if self.tied else [self.head])]


class RowPass(NamedTuple):
    """A forward pass of a micro-batch that several ranks share."""

    keys: int  # positions of the row, with padding
    values: int  # per-token numbers that are gathered: trained tokens x numbers per token
    trains: bool


@dataclass(frozen=True)
class Layout:
    ranks: int
    shards: int = 1  # GPUs per copy; 1: replicate
    reduce_once: bool = False
    context: int = 1


@dataclass(frozen=True)
class Step:
    micro_batches: int
    frozen_passes: int = 0  # reference passes per micro-batch
    compute: int = 2  # bytes per gathered number
    trained: int = 2  # bytes per trained weight and its gradient
    reduced: int = 4  # bytes per number that FSDP reduces
    row_passes: tuple[RowPass, ...] = ()  # with context parallelism
    checkpointing: bool = True


@cache
def calls(model: Model, layout: Layout, step: Step) -> Counter[Call]:
    """Return the collectives of an optimizer step, without bookkeeping."""
    found: Counter[Call] = Counter()
    if layout.shards > 1:
        found += group_calls("root", model.root, 1, layout, step)
        found += group_calls("block", model.block, model.layers, layout, step)
        found += group_calls("head", [model.head], 1, layout, step)
    elif layout.ranks > 1:
        dtype = DTYPES[step.trained]
        trained = [torch.nn.Parameter(torch.empty(w.shape, device="meta", dtype=dtype))
                   for w in model.in_order() if w.is_trained]  # fmt: skip
        order, phase = (reversed(trained), "last") if layout.context == 1 else (trained, "end")
        for bucket in buckets(order):
            found[Call("all_reduce", sum(p.nbytes for p in bucket), layout.ranks, phase)] += 1
    for row in step.row_passes:  # keys and values are gathered again where a checkpointed block is recomputed
        size = step.compute * row.keys * model.kv_width
        passes = 2 if row.trains and step.checkpointing else 1
        found[Call("all_gather", size, layout.context, "context")] += passes * model.layers
        found[Call("all_reduce", step.compute * row.values, layout.context, "context")] += 1
        found[Call("reduce_scatter", size, layout.context, "context")] += row.trains * model.layers
    return +found


def group_calls(name: str, weights: Sequence[Weight], count: int, layout: Layout, step: Step) -> Counter[Call]:
    """Return the collectives of one FSDP group, which occurs `count` times in the model."""
    shards, copies = layout.shards, layout.ranks // layout.shards
    forward, backward, last = ("head", "head", "head") if name == "head" else ("forward", "backward", "last")
    gather = step.compute * sum(w.padded(shards) for w in weights)
    reduce = step.reduced * sum(w.padded(shards) for w in weights if w.is_trained)
    passes = 1 if name == "root" else 1 + step.frozen_passes  # the root stays gathered until the backward pass
    found = Counter({Call("all_gather", gather, shards, forward): count * step.micro_batches * passes})
    if name == "block":
        found[Call("all_gather", gather, shards, backward)] += count * step.micro_batches
    if reduce:
        times, phase = (1, last) if layout.reduce_once else (step.micro_batches, backward)
        found[Call("reduce_scatter", reduce, shards, phase)] += count * times
        if copies > 1:
            found[Call("all_reduce", reduce // shards, copies, last, stride=shards)] += count
    return found


def sync_calls(model: Model, layout: Layout, compute: int = 2) -> Counter[Call]:
    """Return the gathers of a weight sync, one per weight: for the in-process engine's copy or for servers."""
    if layout.shards == 1:
        return Counter()
    return Counter(Call("all_gather", compute * w.padded(layout.shards), layout.shards) for w in model.in_order())


def bookkeeping(method: str, layout: Layout) -> Counter[str]:
    """Return the names of the small collectives of a step."""
    names = [*BOOKKEEPING[method], *["gradient norm"] * (layout.shards > 1)]
    data = layout.ranks // layout.context
    return Counter(name for name in names if (layout.ranks if name in EVERYONE else data) > 1)


def model_of(lm: Any, blocks: Sequence[torch.nn.Module]) -> Model:
    """Return the FSDP groups of a causal LM whose blocks are alike."""
    config, head = lm.config, lm.get_output_embeddings().weight
    inside = {id(p) for block in blocks for p in block.parameters()}

    def weight(p: torch.nn.Parameter) -> Weight:
        return Weight(tuple(p.shape), p.requires_grad)

    root = tuple(weight(p) for p in lm.base_model.parameters() if id(p) not in inside)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    tied = head is lm.get_input_embeddings().weight
    width = 2 * config.num_key_value_heads * head_dim
    return Model(root, tuple(map(weight, blocks[0].parameters())), weight(head), len(blocks), tied, width)


# time of a collective --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """NVLink within a node, `nics` x 400 Gb/s between nodes. Bandwidth in bytes/s, latency in seconds.

    Latencies are those of NCCL's own tuning model (src/graph/tuning.cc, Simple protocol, ring and tree).
    """

    nics: int = 1
    nvlink: float = 360e9  # assumed: 80 % of 450 GB/s per direction
    nic: float = 45e9  # assumed: 90 % of 50 GB/s
    base: float = 8.4e-6
    near: float = 3.4e-6  # a step of the ring within a node
    far: float = 14e-6  # a step between nodes

    def is_far(self, call: Call) -> bool:
        return call.ranks * call.stride > NODE

    def seconds(self, call: Call) -> float:
        n, size = call.ranks, call.size
        if n == 1:
            return 0.0
        per_node = max(1, min(n, NODE // call.stride)) if self.is_far(call) else n
        nodes = n // per_node
        bandwidth = self.nvlink if nodes == 1 else min(self.nvlink, self.nics * self.nic * per_node / NODE)
        ring = (n - nodes) * self.near + (nodes - 1) * self.far
        if call.kind == "all_reduce":
            tree = 2 * ((per_node - 1) * self.near + math.log2(nodes) * self.far) + 2 * size / bandwidth
            return self.base + min(2 * ring + 2 * (n - 1) / n * size / bandwidth, tree)
        share = 1.0 if call.kind == "broadcast" else (n - 1) / n
        return self.base + ring + share * size / bandwidth

    def total(self, found: Counter[Call], *phases: str) -> float:
        """Return the seconds of the calls of these phases, one after the other."""
        return sum(count * self.seconds(call) for call, count in found.items() if call.phase in phases)

    def overlapped(self, found: Counter[Call], *phases: str) -> float:
        """Return the same while NVLink and the network work concurrently, on separate streams."""
        far = Counter({call: count for call, count in found.items() if self.is_far(call)})
        return max(self.total(found - far, *phases), self.total(far, *phases))


def least_squares(terms: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[list[float], float]:
    """Return coefficients, 0 or more, that minimize squared relative errors, and the largest relative error."""
    a = torch.tensor(terms, dtype=torch.float64) / torch.tensor(seconds, dtype=torch.float64)[:, None]
    used = list(range(a.shape[1]))
    while True:
        x = torch.linalg.lstsq(a[:, used], torch.ones(len(a), 1, dtype=torch.float64)).solution[:, 0]
        if (x >= 0).all():
            break
        used.pop(int(x.argmin()))
    coefficients = [0.0] * a.shape[1]
    for i, value in zip(used, x.tolist(), strict=True):
        coefficients[i] = value
    return coefficients, float((a[:, used] @ x - 1).abs().max())


# calibration -----------------------------------------------------------------------------------------------------


def wire_bytes(kind: str, ranks: int) -> float:
    """Return the bytes that each rank sends, as a fraction of the full tensor, in a ring."""
    return {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0}.get(kind, (ranks - 1) / ranks)


def collective(kind: str, size: int, device: torch.device) -> Callable[[], Any]:
    """Return a call of a collective on a full tensor of this many bytes."""
    import torch.distributed as dist

    ranks = dist.get_world_size()
    whole = torch.zeros(size // 4 // ranks * ranks, device=device)
    part = torch.zeros(len(whole) // ranks, device=device)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return {
        "all_gather": lambda: gather(whole, part),
        "reduce_scatter": lambda: scatter(part, whole),
        "all_reduce": lambda: dist.all_reduce(whole),
        "broadcast": lambda: dist.broadcast(whole, src=0),
    }[kind]


def timed(call: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of one call, from a common start."""
    import torch.distributed as dist

    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def measure(rounds: int) -> dict[str, dict[int, float]]:
    """Return the least seconds of every collective by size; sizes alternate, so that load affects all of them alike."""
    import torch.distributed as dist

    device = pick_device()
    kinds, sizes = ("all_gather", "reduce_scatter", "all_reduce", "broadcast"), sorted(FITTED + HELD_OUT)
    providers = {(kind, size): collective(kind, size, device) for kind in kinds for size in sizes}
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in providers}
    for i in range(rounds + 1):
        for key, call in providers.items():
            slowest = torch.tensor(timed(call, device), device=device)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if i:  # the first round connects the ranks
                seconds[key].append(float(slowest))
    return {kind: {size: min(seconds[kind, size]) for size in sizes} for kind in kinds}


def fits(measured: dict[str, dict[int, float]], ranks: int) -> list[str]:
    """Fit seconds = latency + bytes / bandwidth on some sizes; return a line per collective with the errors."""
    lines = [
        "| collective | latency, us | bandwidth, GB/s | largest error, fitted sizes | held-out sizes |",
        "|---" * 5 + "|",
    ]
    for kind, seconds in measured.items():
        terms = {size: [1e-6, 1e-9 * wire_bytes(kind, ranks) * size] for size in seconds}
        (latency, inverse), error = least_squares([terms[x] for x in FITTED], [seconds[x] for x in FITTED])
        predicted = {x: latency * terms[x][0] + inverse * terms[x][1] for x in HELD_OUT}
        held_out = max(abs(predicted[x] / seconds[x] - 1) for x in HELD_OUT)
        lines.append(f"| {kind} | {latency:.0f} | {1 / (inverse or math.nan):.2f} | {error:.1%} | {held_out:.1%} |")
    return lines


def environments(ranks: int) -> Iterator[dict[str, str]]:
    """Yield the variables of each rank on this machine. NCCL lets ranks share GPU 0 only if their host ids differ."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for i in range(ranks):
        yield {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "RANK": str(i),
               "LOCAL_RANK": "0", "NCCL_HOSTID": f"node{i}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",
               "OMP_NUM_THREADS": "1"}  # fmt: skip


def main(ranks: int = 2, rounds: int = 200) -> None:
    """Time all collectives, fit latency and bandwidth, and print the error of the fit on held-out sizes.

    Args:
        ranks: Processes to start on this machine. Ignored under torchrun.
        rounds: Calls per collective and size; the fastest counts.
    """
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "bench.scaling.collectives", "--rounds", str(rounds)]
        processes = [subprocess.Popen(command, env=os.environ | env) for env in environments(ranks)]
        sys.exit(max(process.wait() for process in processes))
    import torch.distributed as dist

    device = pick_device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    measured = measure(rounds)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {dist.get_backend()}, {FITTED[0] // KIB} KiB to {FITTED[-1] // MIB} MiB")
        print("\n".join(fits(measured, dist.get_world_size())))
        print(json.dumps(measured))
    dist.destroy_process_group()


if __name__ == "__main__":
    tyro.cli(main)
