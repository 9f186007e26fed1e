"""Predict steps on 8 to 1,024 GPUs: time, efficiency, memory, and vLLM servers per trainer (docs/scaling.md).

    python -m bench.scaling                              # print the tables
    python -m bench.scaling --write docs/scaling.md      # replace the text between the two markers; --check compares
    python -m bench.scaling --calibrate 2                # time collectives on 2 ranks, fit latency and bandwidth

calls() lists every collective of an optimizer step; tests/test_scaling.py counts them in real steps on 1, 2 and 4 ranks
and asserts equality. Network.seconds() gives the time of one call. Compute comes from bench/results/h200, memory from
trainer/plan.py. docs/scaling.md lists the assumptions.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import tyro

from bench import collectives
from bench.collectives import NODE, Call, Network, least_squares
from bench.common import GIB, ROOT, Row, read_rows
from bench.table import latest
from trainer import plan
from trainer.parallel.overlap import buckets

BEGIN, END = "<!-- scaling -->", "<!-- /scaling -->"
GPUS = (8, 64, 256, 1024)
MODELS = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-8b", "qwen3-32b", "llama-3.1-70b")
DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
# Small collectives per step (counts, metrics), by the name that comm.py gives them; their time is latency.
OFFLINE = ("number of micro-batches", "sum", "names of metrics: sizes", "names of metrics", "metrics")
NOT_EMPTY = ("micro-batches that are not empty: sizes", "micro-batches that are not empty")
BOOKKEEPING = {"sft": OFFLINE, "dpo": OFFLINE, "grpo": (*OFFLINE, "sum", "replayed log-probs", *NOT_EMPTY)}
EVERYONE = ("number of micro-batches", "gradient norm")  # over all ranks; the other names over shards of the data


# collectives of a step -------------------------------------------------------------------------------------------


class Weight(NamedTuple):
    shape: tuple[int, ...]
    is_trained: bool


@dataclass(frozen=True)
class Model:
    """Weights by FSDP group."""

    root: Sequence[Weight]  # embedding, last norm
    block: Sequence[Weight]
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
    row_passes: Sequence[RowPass] = ()  # with context parallelism
    checkpointing: bool = True


def calls(model: Model, layout: Layout, step: Step) -> Counter[Call]:
    """Return the collectives of an optimizer step, without bookkeeping."""
    sharded, found = layout.shards > 1, Counter()
    if sharded:
        for name, weights, count in (("root", model.root, 1), ("block", model.block, model.layers),
                                     ("head", [model.head], 1)):  # fmt: skip
            found += group_calls(name, weights, count, layout, step)
    elif layout.ranks > 1:
        dtype = DTYPES[step.trained]
        trained = [torch.nn.Parameter(torch.empty(w.shape, device="meta", dtype=dtype))
                   for w in model.in_order() if w.is_trained]  # fmt: skip
        order, phase = (reversed(trained), "backward") if layout.context == 1 else (trained, "end")
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
    forward, backward = ("head", "head") if name == "head" else ("forward", "backward")

    def padded(w: Weight) -> int:  # FSDP pads the first dimension to a multiple of the shards
        return -(-w.shape[0] // shards) * shards * math.prod(w.shape[1:])

    gather = step.compute * sum(map(padded, weights))
    reduce = step.reduced * sum(padded(w) for w in weights if w.is_trained)
    passes = 1 if name == "root" else 1 + step.frozen_passes  # the root stays gathered until the backward pass
    found = Counter({Call("all_gather", gather, shards, forward): count * step.micro_batches * passes})
    if name == "block":
        found[Call("all_gather", gather, shards, backward)] += count * step.micro_batches
    if reduce:
        times = count * (1 if layout.reduce_once else step.micro_batches)
        found[Call("reduce_scatter", reduce, shards, backward)] += times
        if copies > 1:
            found[Call("all_reduce", reduce // shards, copies, backward, stride=shards)] += times
    return found


def sync_calls(model: Model, layout: Layout, compute: int = 2) -> Counter[Call]:
    """Return the gathers of a weight sync, one per weight: for the in-process engine's copy or for servers."""
    if layout.shards == 1:
        return Counter()
    sizes = [-(-w.shape[0] // layout.shards) * layout.shards * math.prod(w.shape[1:]) for w in model.in_order()]
    return Counter(Call("all_gather", compute * size, layout.shards) for size in sizes)


def bookkeeping(method: str, layout: Layout) -> Counter[str]:
    """Return the names of the small collectives of a step."""
    names = [*BOOKKEEPING[method], *["gradient norm"] * (layout.shards > 1)]
    data = layout.ranks // layout.context
    return Counter(name for name in names if (layout.ranks if name in EVERYONE else data) > 1)


# measured compute ------------------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """Figures from bench/results/h200."""

    flops: float  # per second, of a compiled and checkpointed training step, without the optimizer
    update: float  # seconds per weight, AdamW
    decode: dict[str, tuple[list[float], float]]  # engine -> coefficients and largest relative error of the fit


@cache
def shape_of(name: str) -> tuple[plan.Sizes, Model]:
    """Return sizes and weights of a shape; one block is built and counted `layers` times."""
    config = plan.known_config(name)
    layers, config.num_hidden_layers = config.num_hidden_layers, 1
    lm = plan.build(config)
    one, model = plan.sizes_of(lm), model_of(lm, list(lm.model.layers))
    block = tuple(math.prod(w.shape) for w in model.block)
    sizes = replace(one, layers=layers, tensors=one.tensors + block * (layers - 1), matrices=one.matrices * layers,
                    ends=one.ends * layers)  # fmt: skip
    return sizes, replace(model, layers=layers)


def model_of(lm: Any, blocks: Sequence[torch.nn.Module]) -> Model:
    """Return the FSDP groups of a causal LM whose blocks are alike."""
    config, head = lm.config, lm.get_output_embeddings().weight
    inside = {id(p) for block in blocks for p in block.parameters()}

    def weight(p: torch.nn.Parameter) -> Weight:
        return Weight(tuple(p.shape), p.requires_grad)

    root = [weight(p) for p in lm.base_model.parameters() if id(p) not in inside]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    tied = head is lm.get_input_embeddings().weight
    width = 2 * config.num_key_value_heads * head_dim
    return Model(root, [weight(p) for p in blocks[0].parameters()], weight(head), len(blocks), tied, width)


def decode_floor(s: plan.Sizes, rows: int, prompts: int, prompt: int, completion: int) -> float:
    """Return the least seconds of a decode step: 4.8 TB/s and 750 TFLOP/s, prompts read once per group."""
    weights = s.params - (0 if s.tied else s.embedding)
    cache = plan.cache_bytes(s, 2, prompts * prompt + rows * completion // 2)
    return max(2 * weights / 4.8e12, 2 * weights * rows / 750e12) + cache / 4.8e12


@cache
def measured() -> Measured:
    folder = ROOT / "bench" / "results" / "h200"
    rows = latest(read_rows([folder / "vs_trl.jsonl", folder / "rollout.jsonl"]))
    (sft,) = [row for row in rows if row.bench == "vs_trl/sft" and row.provider == "ours, bf16, compile"]
    sizes = shape_of("qwen3-1.7b")[0]
    kernels = {name: ms / 1000 for name, ms in sft.extra.items() if name.endswith("_ms")}
    flops = plan.flops_per_token(sizes, plan.Work(tokens=0, checkpointing=True)) * sft.extra["step_tokens"]
    update = kernels.pop("optimizer_ms")
    engines = {name: fit_decode([row for row in rows if row.bench == "rollout" and row.provider == name])
               for name in ("local", "vllm, seeded")}  # fmt: skip
    return Measured(flops / sum(kernels.values()), update / sizes.params, engines)


def decode_terms(s: plan.Sizes, rows: int, prompts: int, prompt: int, completion: int) -> list[float]:
    return [1e-3, decode_floor(s, rows, prompts, prompt, completion), 1e-5 * rows]


def fit_decode(rows: list[Row]) -> tuple[list[float], float]:
    """Fit seconds per decode step as a constant, a multiple of the floor, and seconds per row."""
    names = {(28, 1024): "qwen3-0.6b", (28, 2048): "qwen3-1.7b", (32, 4096): "llama-3.1-8b"}
    terms, seconds = [], []
    for row in rows:
        x = row.shape
        if name := names.get((x["layers"], x["D"])):
            terms.append(decode_terms(shape_of(name)[0], x["prompts"] * x["G"], x["prompts"], x["P"], x["R"]))
            seconds.append(row.ms_p50 / 1000 / x["R"])
    return least_squares(terms, seconds)


# predictions -----------------------------------------------------------------------------------------------------


class Prediction(NamedTuple):
    seconds: float
    compute: float  # seconds without communication
    gib: float

    @property
    def efficiency(self) -> float:
        return self.compute / self.seconds

    @property
    def fits(self) -> bool:
        return self.gib <= plan.CARDS["h200"].gib


def train(name: str, layout: Layout, network: Network, *, tokens: int = 8192, micro_batches: int = 4,
          method: str = "sft") -> Prediction:  # fmt: skip
    """Predict an optimizer step of full fine-tuning in bfloat16, checkpointed, with `tokens` per micro-batch."""
    sizes, model = shape_of(name)
    frozen = int(method == "dpo")
    work = plan.Work(tokens=tokens, weight_bytes=2, checkpointing=True, has_reference=bool(frozen), shards=layout.shards,
                     accumulates=micro_batches > 1)  # fmt: skip
    forward = tokens * plan.flops_per_token(sizes, replace(work, checkpointing=False)) / measured().flops
    forward, whole = forward * (2 + 2 * frozen) / (6 + 2 * frozen), tokens * plan.flops_per_token(sizes, work) / measured().flops
    found = calls(model, layout, Step(micro_batches, frozen))
    overlapped = {phase: network.total(found, phase) for phase in ("forward", "backward")}
    if layout.shards > 1:
        times = micro_batches * whole
        seconds = max(micro_batches * forward, overlapped["forward"])
        seconds += max(micro_batches * (whole - forward), overlapped["backward"])
    else:  # replicas sum gradients during the last backward pass
        times = micro_batches * whole
        seconds = times - (whole - forward) + max(whole - forward, overlapped["backward"])
    update = measured().update * sizes.params / layout.shards
    small = sum(bookkeeping(method, layout).values()) * network.seconds(Call("all_reduce", 1024, layout.ranks))
    exposed = network.total(found, "head") + network.total(found, "end") + small
    gib = plan.peak(sizes, work) / GIB + plan.RESERVE
    return Prediction(seconds + update + exposed, times + update, gib)
