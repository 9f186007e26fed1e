"""Predict steps on 8 to 1,024 GPUs: time, efficiency, memory, and vLLM servers per trainer (docs/scaling.md).

    python -m bench.scaling                              # print the tables
    python -m bench.scaling --write docs/scaling.md      # replace the text between the two markers; --check compares
    python -m bench.scaling --calibrate 2                # time collectives on 2 ranks, fit latency and bandwidth

Collectives and their times come from bench/scaling/collectives.py, compute from bench/results/h200, memory from
trainer/plan.py. docs/scaling.md lists the formulas and assumptions.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from bench.common import GIB, ROOT, Row, read_rows
from bench.scaling import collectives
from bench.scaling.collectives import (
    NODE,
    Call,
    Layout,
    Model,
    Network,
    Step,
    bookkeeping,
    calls,
    least_squares,
    model_of,
    sync_calls,
)
from bench.table import between_markers, latest
from trainer import plan

BEGIN, END = "<!-- scaling -->", "<!-- /scaling -->"
GPUS = (8, 64, 256, 1024)
MODELS = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-8b", "qwen3-32b", "llama-3.1-70b")
NETWORKS = (Network(nics=1), Network(nics=8))  # 400 Gb/s per node, and per GPU
TOKENS = 8192  # per micro-batch
LENGTHS = ((256, 256), (512, 1024), (1024, 4096), (1024, 16384))  # prompt, completion
ATTENTION = 242e12  # FLOP/s of flex attention, forward and backward, 8 x 2,048 after a shared prompt of 512, on an H200
HAND_OVER = (0.058e-6, 0.022e-6)  # rank 0's CPU seconds per completion token and prompt id, 8 ranks (bench.handover)


# measured compute ------------------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """Figures from bench/results/h200."""

    flops: dict[str, float]  # per second, in compiled and checkpointed training, by method
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
    tensors = one.tensors + block * (layers - 1)
    sizes = replace(one, layers=layers, tensors=tensors, trained=tensors, matrices=one.matrices * layers,
                    ends=one.ends * layers)  # fmt: skip
    return sizes, replace(model, layers=layers)


def decode_floor(s: plan.Sizes, rows: int, prompts: int, prompt: int, completion: int) -> float:
    """Return the least seconds of a decode step: 4.8 TB/s and 750 TFLOP/s, prompts read once per group."""
    weights = s.params - (0 if s.tied else s.embedding)
    cache = plan.cache_bytes(s, 2, prompts * prompt + rows * completion // 2)
    return max(2 * weights / 4.8e12, 2 * weights * rows / 750e12) + cache / 4.8e12


@cache
def measured() -> Measured:
    folder = ROOT / "bench" / "results" / "h200"
    rows = latest(read_rows([folder / "vs_trl.jsonl", folder / "rollout.jsonl"]))
    work = plan.Work(tokens=0, checkpointing=True)
    (sft,) = [row for row in rows if row.bench == "vs_trl/sft" and row.provider == "ours, bf16, compile"]
    large = shape_of("qwen3-1.7b")[0]
    kernels = {name: ms / 1000 for name, ms in sft.extra.items() if name.endswith("_ms")}
    update = kernels.pop("optimizer_ms")
    (grpo,) = [row for row in rows if row.bench == "vs_trl/grpo" and row.provider == "ours, bf16, compile, local"
               and row.shape["prompts"] == 64]  # fmt: skip
    x, small = grpo.shape, shape_of("qwen3-0.6b")[0]
    rates = {
        "sft": plan.flops_per_token(large, work) * sft.extra["step_tokens"] / sum(kernels.values()),
        "grpo": plan.flops_per_token(small, work) * trained_tokens(x["prompts"], x["G"], x["P"], x["R"])
        / grpo.extra["train_s"],
    }  # fmt: skip
    engines = {name: fit_decode([row for row in rows if row.bench == "rollout" and row.provider == name])
               for name in ("local", "vllm, seeded")}  # fmt: skip
    return Measured(rates, update / large.params, engines)


def trained_tokens(prompts: int, group: int, prompt: int, completion: int) -> int:
    """Return the tokens of a training pass, which computes each prompt once."""
    return prompts * (prompt + group * completion)


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
    compute: float  # seconds of the same work without communication
    gib: float

    @property
    def efficiency(self) -> float:
        return self.compute / self.seconds

    @property
    def fits(self) -> bool:
        return self.gib <= plan.CARDS["h200"].gib


def train(name: str, layout: Layout, network: Network, *, micro_batches: int = 4, method: str = "sft") -> Prediction:
    """Predict an optimizer step of full fine-tuning: bfloat16 weights, checkpointing, TOKENS per micro-batch."""
    sizes, model = shape_of(name)
    has_copies = 1 < layout.shards < layout.ranks and not layout.reduce_once
    work = plan.Work(tokens=TOKENS, weight_bytes=2, checkpointing=True, shards=layout.shards, has_copies=has_copies)
    once = TOKENS * plan.flops_per_token(sizes, work) / measured().flops[method]
    forward, backward = once / 4, once * 3 / 4  # 2 of 8 FLOPs per weight and token; the backward pass recomputes
    found = calls(model, layout, Step(micro_batches))
    last = Counter({call: n // micro_batches if call.phase == "backward" else n for call, n in found.items()})
    seconds = max(micro_batches * forward, network.overlapped(found, "forward"))
    seconds += (micro_batches - 1) * max(backward, network.overlapped(last, "backward"))
    seconds += max(backward, network.overlapped(last, "backward", "last")) + network.total(found, "head", "end")
    update = measured().update * sizes.params / layout.shards
    small = sum(bookkeeping(method, layout).values()) * network.seconds(Call("all_reduce", 1024, layout.ranks))
    gradients = 4 * sizes.params * layout.reduce_once  # whole, in float32
    gib = (plan.peak(sizes, work) + gradients) / GIB + plan.RESERVE
    return Prediction(seconds + small + update, micro_batches * once + update, gib)


def decode_seconds(s: plan.Sizes, engine: str, rows: int, group: int, prompt: int, completion: int) -> float:
    """Return the seconds that an engine takes for a decode step of all rows."""
    terms = decode_terms(s, rows, rows // group, prompt, completion)
    return sum(x * y for x, y in zip(measured().decode[engine][0], terms, strict=True))


class Rollout(NamedTuple):
    """A GRPO step per GPU."""

    prompts: int
    group: int
    prompt: int
    completion: int


ROLLOUTS = (
    ("qwen3-0.6b", Rollout(64, 8, 256, 256), GPUS),
    ("qwen3-8b", Rollout(32, 8, 256, 1024), GPUS),
    ("llama-3.1-8b", Rollout(4, 32, 100, 960), (16,)),  # the size of NeMo RL's published run
)


def grpo(name: str, rollout: Rollout, layout: Layout, network: Network) -> dict[str, float]:
    """Predict the parts of an on-policy step in seconds: every rank samples and trains its own groups."""
    sizes, model = shape_of(name)
    prompts, group, prompt, completion = rollout
    rows = prompts * group
    micro_batches = -(-trained_tokens(*rollout) // TOKENS)
    trained = train(name, layout, network, micro_batches=micro_batches, method="grpo")
    ids = layout.ranks * rows * (HAND_OVER[0] * completion + HAND_OVER[1] * prompt)
    sampled = completion * decode_seconds(sizes, "local", rows, group, prompt, completion)
    copied = network.total(sync_calls(model, layout), "end")
    total = sampled + copied + ids + trained.seconds
    return {"sampling": sampled, "weights": copied, "hand-over": ids, "training": trained.seconds, "step": total,
            "efficiency": (sampled + trained.compute) / total,
            "tokens": rows * (prompt + completion) / total}  # fmt: skip


def servers_per_trainer(name: str, prompt: int, completion: int, group: int = 8) -> tuple[float, int]:
    """Return server GPUs per training GPU for which neither waits (async), and the GPUs of one server."""
    sizes, _ = shape_of(name)
    room, weights = 0.9 * plan.CARDS["h200"].gib * GIB, 2 * sizes.params
    gpus = next(n for n in (1, 2, 4, 8) if weights <= 0.6 * room * n)
    cache = plan.cache_bytes(sizes, 2, completion + prompt // group)
    rows = max(group, min(256, int((room * gpus - weights) // cache)) // group * group)
    a, b, c = measured().decode["vllm, seeded"][0]
    fixed, floor, by_rows = decode_terms(sizes, rows, rows // group, prompt, completion)
    served = gpus * (a * fixed + b * floor / gpus + c * by_rows) / rows  # GPU seconds per completion token
    trained = plan.flops_per_token(sizes, plan.Work(tokens=0, checkpointing=True)) / measured().flops["grpo"]
    attended = prompt + completion / 2  # keys per completion token; 3.5 times the forward FLOPs with the backward pass
    trained += 3.5 * 4 * attended * sizes.heads * sizes.head_dim * sizes.layers / ATTENTION
    return served / trained * completion / (prompt / group + completion), gpus


# tables ----------------------------------------------------------------------------------------------------------


def render() -> str:
    """Return the tables of docs/scaling.md."""
    steps = (
        "Optimizer step of full fine-tuning with 4 micro-batches of 8,192 tokens per GPU: efficiency with 400 Gb/s per "
        "node / per GPU, and memory per GPU. In parentheses: does not fit."
    )
    rollouts = (
        "GRPO on policy, prompts x completions x (prompt + completion tokens) per GPU, sampled in process; seconds per "
        "step with 400 Gb/s per GPU. 0.6B is replicated, 8B has `--parallel.shard 8`."
    )
    servers = "vLLM server GPUs per training GPU (async, groups of 8) by prompt + completion tokens."
    parts = (steps, train_table(), rollouts, grpo_table(), servers, server_table())
    return "\n\n".join(parts) + "\n"


def cell(predictions: Sequence[Prediction]) -> str:
    first = predictions[0]
    shares = " / ".join(f"{x.efficiency:.0%}" for x in predictions)
    return f"{shares}, {first.gib:.0f} GiB" if first.fits else f"({first.gib:.0f} GiB)"


def train_table() -> str:
    modes = ["replicate", "fsdp", "shard 8", "shard 8, reduce-once"]
    lines = [f"| model | GPUs | {' | '.join(modes)} | best step, s |", "|---" * 7 + "|"]
    for name in MODELS:
        for gpus in GPUS:
            layouts = [Layout(gpus), Layout(gpus, gpus), Layout(gpus, NODE), Layout(gpus, NODE, reduce_once=True)]
            found = [[train(name, layout, network) for network in NETWORKS] for layout in layouts]
            best = [min(x[i].seconds for x in found if x[i].fits) for i in range(len(NETWORKS))]
            shown = " / ".join(f"{x:.2f}" for x in best)
            lines.append(f"| {name} | {gpus:,} | {' | '.join(map(cell, found))} | {shown} |")
    return "\n".join(lines)


def grpo_table() -> str:
    lines = ["| per GPU | GPUs | sampling | weights | hand-over | training | step | efficiency | tokens/s per GPU |"]
    lines.append("|---" * 9 + "|")
    for name, rollout, counts in ROLLOUTS:
        for gpus in counts:
            layout = Layout(gpus) if train(name, Layout(gpus), NETWORKS[0]).gib < 60 else Layout(gpus, NODE)
            x = grpo(name, rollout, layout, NETWORKS[-1])
            parts = " | ".join(f"{x[key]:.2f}" for key in ("sampling", "weights", "hand-over", "training", "step"))
            work = f"{name}, {rollout.prompts} x {rollout.group} x ({rollout.prompt} + {rollout.completion})"
            lines.append(f"| {work} | {gpus:,} | {parts} | {x['efficiency']:.0%} | {x['tokens']:,.0f} |")
    return "\n".join(lines)


def server_table() -> str:
    names = " | ".join(f"{prompt:,} + {completion:,}" for prompt, completion in LENGTHS)
    lines = [f"| model | {names} |", "|---" * (len(LENGTHS) + 1) + "|"]
    for name in MODELS:
        found = [servers_per_trainer(name, *lengths) for lengths in LENGTHS]
        label = name if found[0][1] == 1 else f"{name} ({found[0][1]} GPUs per server)"
        lines.append(f"| {label} | {' | '.join(f'{ratio:.1f}' for ratio, _ in found)} |")
    return "\n".join(lines)


def main(write: Path | None = None, check: Path | None = None, calibrate: int = 0) -> None:
    """Print the tables, or replace or check the tables of a page.

    Args:
        write: Page whose tables are replaced.
        check: Page whose tables must match.
        calibrate: Instead, time collectives on this many ranks of this machine (bench/scaling/collectives.py).
    """
    if calibrate:
        collectives.main(calibrate)
    elif write is not None:
        before, _, after = between_markers(write.read_text(encoding="utf-8"), BEGIN, END)
        write.write_text(before + render() + after, encoding="utf-8")
    elif check is not None:
        if between_markers(check.read_text(encoding="utf-8"), BEGIN, END)[1] != render():
            sys.exit(f"check={check}: its tables do not match; update them with --write")
    else:
        print(render(), end="")
