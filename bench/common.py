"""Rows, timing and printing shared by the benchmarks. A row without its error does not exist."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement: what, how long, how wrong, on what."""

    bench: str
    provider: str
    shape: dict[str, int]
    dtype: str
    ms_p50: float
    ms_p20: float
    ms_p80: float
    rate: float  # `unit` per second
    unit: str
    max_rel_err: float  # against float64
    hardware: str
    torch: str
    commit: str


def hardware() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {torch.get_num_threads()} of {os.cpu_count()} threads"


def commit() -> str:
    found = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    if found.returncode != 0:
        raise ValueError("commit: not a git checkout; a benchmark row names the commit it measured")
    return found.stdout.strip()


def alternate(providers: dict[str, Callable[[], object]], seconds: float = 3.0) -> dict[str, list[float]]:
    """Milliseconds per call; providers take turns, so that a machine that slows down slows all of them."""
    for call in providers.values():  # warm up: allocations, caches, compilation
        call()
    times: dict[str, list[float]] = {name: [] for name in providers}
    deadline = time.perf_counter() + seconds * len(providers)
    while time.perf_counter() < deadline or min(map(len, times.values())) < 5:
        for name, call in providers.items():
            started = time.perf_counter()
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[name].append(1000 * (time.perf_counter() - started))
    return times


def make_row(
    bench: str,
    provider: str,
    times: list[float],
    *,
    shape: dict[str, int],
    dtype: str,
    work: float,
    unit: str,
    error: float,
) -> Row:
    p20, *_, p80 = statistics.quantiles(times, n=5)
    p50 = statistics.median(times)
    return Row(
        bench=bench, provider=provider, shape=shape, dtype=dtype, ms_p50=p50, ms_p20=p20, ms_p80=p80,
        rate=1000 * work / p50, unit=unit, max_rel_err=error, hardware=hardware(), torch=torch.__version__,
        commit=commit(),
    )  # fmt: skip


def emit(rows: list[Row], out: Path | None) -> None:
    """A table for people, and one JSON object per row when `out` is given."""
    print(f"\n{rows[0].bench}, {rows[0].hardware}, torch {rows[0].torch}, commit {rows[0].commit}")
    print(
        f"{'provider':>24} {'shape':<34} {'dtype':<9} {'ms':>8} {'p20':>8} {'p80':>8} {'per second':>16} {'error':>8}"
    )
    for row in rows:
        shape = " ".join(f"{key}={value}" for key, value in row.shape.items())
        rate = f"{row.rate:,.0f} {row.unit}"
        print(
            f"{row.provider:>24} {shape:<34} {row.dtype:<9} {row.ms_p50:8.1f} {row.ms_p20:8.1f} {row.ms_p80:8.1f} "
            f"{rate:>16} {row.max_rel_err:8.1e}"
        )
    if out is not None:
        with out.open("a") as file:
            file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)
