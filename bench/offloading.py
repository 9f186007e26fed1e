"""A checkpointed step with block inputs on the GPU, and in main memory (--activation-offloading).

    python -m bench.offloading [--out rows.jsonl] [--layers 28] [--rows 16] [--length 4096]

Forward, clipped policy gradient and backward of one micro-batch, without an optimizer, for float32 and bfloat16
weights. The model is a random Qwen3-1.7B on a GPU, a tiny model elsewhere. The error is the
largest gradient difference to "on the GPU"; for "on the GPU" itself, between two runs, which shows whether
kernels are deterministic. `planned_gib` is the estimate of trainer/plan.py for GiB, `host_gib` the main memory used.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

from bench.common import GIB, QWEN3_1_7B, Row, alternate, emit, make_row, require_commit
from bench.train_step import TINY, make_policy, make_work, packed_states, step
from data.packing import make_batches
from trainer import plan
from trainer.parallel.comm import pick_device
from trainer.policy.logps import Policy
from trainer.policy.offload import SLAB, Slabs, offload_inputs

HELD = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def largest_difference(got: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max((x.float() - other[name].float()).abs().max().item() for name, x in got.items())


def planned(policy: Policy, held: torch.dtype, tokens: int, trained: int, *, offloading: bool) -> float:
    """Return the GiB of the step in addition to weights and gradients."""
    on_cuda = policy.device.type == "cuda"
    work = plan.Work(
        tokens=tokens, trained_tokens=trained, weight_bytes=held.itemsize, compute=policy.compute_dtype.itemsize,
        checkpointing=True, offloading=offloading, accumulates=False, triton=on_cuda,
    )  # fmt: skip
    s = plan.sizes_of(policy.model)
    return (plan.fullest_point(s, work).total - held.itemsize * s.params) / GIB


def measure(shape: dict[str, Any], num_rows: int, length: int, held: torch.dtype, seconds: float) -> list[Row]:
    device = pick_device()
    compute = torch.bfloat16 if device.type == "cuda" else torch.float32
    work = make_work(num_rows, length // 2, length - length // 2, shape["vocab_size"], device)
    policies: dict[str, Policy] = {}
    slabs: dict[str, Slabs] = {}
    for name in ("on the GPU", "offloaded"):
        policies[name] = replace(make_policy(shape, device, held, attention="auto"), compute_dtype=compute)
        if name == "offloaded":
            slabs[name] = offload_inputs(policies[name].model.base_model.layers, device).slabs
    first = policies["on the GPU"]
    micro_batches = make_batches(work.items, max_tokens=num_rows * length, multiple=first.row_multiple)
    batches = [batch.to(device) for batch in micro_batches]
    assert len(batches) == 1, len(batches)
    calls = {name: partial(step, policy, work, batches, packed_states) for name, policy in policies.items()}
    timings = alternate(calls, seconds=seconds, rounds=5)
    kept = calls["on the GPU"]() if "on the GPU" in timings else None
    sizes = {"rows": num_rows, "T": length, "layers": shape["num_hidden_layers"], "D": shape["hidden_size"]}
    rows = []
    for name, timing in timings.items():
        gap = largest_difference(calls[name](), kept) if kept is not None else float("nan")
        tokens, is_offloaded = batches[0].num_computed, name in slabs
        gib = planned(policies[name], held, tokens, work.num_trained, offloading=is_offloaded)
        host = slabs[name].count * SLAB / GIB if is_offloaded else 0.0
        rows.append(make_row(
            "offloading", name, timing, shape=sizes, dtype=held, work=tokens, unit="tokens",
            errors={"largest gradient difference": gap},
            against={"on the GPU": timings.get("on the GPU")}, extra={"planned_gib": gib, "host_gib": host},
        ))  # fmt: skip
    return rows


def main(
    out: Path | None = None,
    layers: int | None = None,
    rows: int | None = None,
    length: int | None = None,
    held: tuple[str, ...] = ("float32", "bfloat16"),
    seconds: float = 3.0,
) -> None:
    """Print the tables; append every row as JSON to `out`.

    Args:
        out: File to append the rows to.
        layers: Depth of the model. None: 28 on a GPU, 2 elsewhere.
        rows: Sequences per micro-batch. None: 16 on a GPU, 2 elsewhere.
        length: Tokens per sequence; half of them are trained. None: 4096 on a GPU, 32 elsewhere.
        held: Dtypes of the weights.
        seconds: Minimum duration of the loop, which has at least 5 rounds.
    """
    require_commit()
    on_cuda = torch.cuda.is_available()
    shape = QWEN3_1_7B if on_cuda else TINY
    shape = shape | ({} if layers is None else {"num_hidden_layers": layers})
    for name in held:
        sizes = rows or (16 if on_cuda else 2), length or (4096 if on_cuda else 32)
        emit(measure(shape, *sizes, HELD[name], seconds), out)


if __name__ == "__main__":
    tyro.cli(main)
