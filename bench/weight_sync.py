"""Weight sync time of every backend that works on this machine, with a check of the result.

    python -m bench.weight_sync [--shape qwen3-1.7b] [--backends ipc filesystem lora] [--syncs 5] [--out rows.jsonl]

Each sync sends new weights: pause, transfer, load, resume. The error is the largest gap between
the server's and the trainer's log-probs of the same fixed tokens after each sync; for bfloat16 the mean gap. On a
GPU, the server is colocated, and the memory that it frees while asleep is also measured. Backends with full weights
alternate on one server; lora has another server.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
import tyro

from bench.common import Row, Timing, emit, make_row, require_commit
from bench.served import change, free_gib, serving, shape_config
from rollout.engines.vllm import VllmEngine
from rollout.servers.options import SyncConfig, VllmConfig
from rollout.sync.choose import make_sync
from trainer.policy.logps import Policy
from trainer.policy.weights import PolicyWeights

Backend = Literal["ipc", "process_group", "filesystem", "lora"]
LORA_RANK = 16


def main(
    out: Path | None = None,
    shape: Literal["tiny", "qwen3-0.6b", "qwen3-1.7b"] | None = None,
    backends: tuple[Backend, ...] = (),
    syncs: int = 5,
    vllm: VllmConfig = VllmConfig(),  # noqa: B008  frozen
) -> None:
    """Print the table; append every row as JSON to `out`."""
    require_commit()
    on_cuda = torch.cuda.is_available()
    shape = shape or ("qwen3-1.7b" if on_cuda else "tiny")
    backends = backends or (("filesystem", "ipc", "lora") if on_cuda else ("process_group", "filesystem", "lora"))
    full = [backend for backend in backends if backend != "lora"]
    if full:
        with serving(shape, vllm=vllm, sync=SyncConfig(backend=full[0]), lora_rank=0) as (policy, engine):
            rows = [measure(shape, backend, policy, engine, syncs) for backend in full]
            emit(rows, out)  # now, so that a later failure does not lose the rows
            if engine.colocate:
                emit([measure_sleep(shape, policy, engine)], out)
    if "lora" in backends:
        with serving(shape, vllm=vllm, sync=SyncConfig(backend="lora"), lora_rank=LORA_RANK) as (policy, engine):
            emit([measure(shape, "lora", policy, engine, syncs)], out)


def measure(shape: str, backend: str, policy: Policy, engine: VllmEngine, syncs: int) -> Row:
    """Run `syncs` syncs after a first sync for set-up."""
    servers = [member.server for member in engine.pool.members]
    source = PolicyWeights(policy, torch.bfloat16 if policy.device.type == "cuda" else torch.float32)
    engine.weights.sync.close()
    engine.sync_cfg = replace(engine.sync_cfg, backend=backend, probe_every=10**9)
    engine.weights.sync = make_sync(engine.sync_cfg, backend, source, engine.loop, servers, policy.device)
    times, gaps = [], []
    for number in range(syncs + 1):
        change(policy, seed=number)
        if policy.device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        engine.load(engine.version + 1)
        times.append(1000 * (time.perf_counter() - started))
        engine.probe(engine.pool.members)
        gaps.append(engine.metrics()["policy/sync_gap"])
    report = engine.weights.report
    assert report is not None and report.backend == backend
    return make_row(
        "weight_sync", backend, Timing(times[1:], None), shape=sizes(shape, policy), dtype=policy.compute_dtype,
        work=report.num_bytes, unit="bytes", errors={"logp_gap": max(gaps)},
        extra={"first_ms": times[0], **{f"{name}_s": seconds for name, seconds in report.phases.items()}},
    )  # fmt: skip


def measure_sleep(shape: str, policy: Policy, engine: VllmEngine) -> Row:
    """Measure sleep, wake with new weights until requests are answered, and the memory that sleep frees."""
    awake = free_gib()
    times = []
    asleep = 0.0
    for number in range(3):
        started = time.perf_counter()
        engine.sleep()
        slept = time.perf_counter() - started
        asleep = free_gib()
        change(policy, seed=100 + number)
        started = time.perf_counter()
        engine.load(engine.version + 1)
        times.append(1000 * (slept + time.perf_counter() - started))
        engine.probe(engine.pool.members)
    return make_row(
        "weight_sync/sleep", engine.weights.report.backend, Timing(times, None), shape=sizes(shape, policy),
        dtype=policy.compute_dtype, work=engine.weights.report.num_bytes, unit="bytes",
        errors={"logp_gap": engine.metrics()["policy/sync_gap"]},
        extra={"free_awake_gib": awake, "free_asleep_gib": asleep, "free_awake_again_gib": free_gib()},
    )  # fmt: skip


def sizes(shape: str, policy: Policy) -> dict[str, int]:
    num_parameters = sum(p.numel() for p in policy.model.parameters())
    config = shape_config(shape)
    return {"D": config.hidden_size, "layers": config.num_hidden_layers, "params": num_parameters}


if __name__ == "__main__":
    tyro.cli(main)
