"""Rows, timing and printing shared by the benchmarks. Every row has its errors, hardware and commit.

Providers alternate inside one loop, so a machine that heats up slows all of them; every ratio in a row is between two
providers of the same loop. On CUDA a call is timed by device events, after a write that evicts its inputs from the L2
cache; elsewhere by the clock.
"""

from __future__ import annotations

import inspect
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "triton", "transformers", "vllm", "trl", "liger_kernel", "cut_cross_entropy")
FLUSH_BYTES = 256 << 20  # several times the L2 cache of any GPU
GIB = 1 << 30
QWEN3_1_7B = {
    "hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 6144, "vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 40960,
}  # fmt: skip
QWEN3_0_6B = QWEN3_1_7B | {"hidden_size": 1024, "intermediate_size": 3072}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement."""

    bench: str
    provider: str
    shape: dict[str, int]
    dtype: str
    ms_p50: float
    ms_p20: float
    ms_p80: float
    rate: float  # `unit` per second
    unit: str
    peak_gib: float | None  # peak memory of the call, excluding inputs and results; None on a CPU
    errors: dict[str, float]  # quantity -> relative Frobenius distance to float64 (for a bf16 model, to float32)
    floor_ms: float | None  # unavoidable matrix products, timed in the same loop
    ratio_to_floor: float | None
    ratio_to: dict[str, float]  # time relative to another provider of the same loop
    extra: dict[str, float]
    hardware: str
    versions: dict[str, str]
    commit: str
    time: str  # UTC


@dataclass(frozen=True)
class Timing:
    """Milliseconds of every call of one provider, and its peak memory."""

    times: list[float]
    peak_gib: float | None

    def at(self, fraction: float) -> float:
        return torch.tensor(self.times, dtype=torch.float64).quantile(fraction).item()

    @property
    def p50(self) -> float:
        return self.at(0.5)


@cache
def hardware() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {torch.get_num_threads()} of {os.cpu_count()} threads"


@cache
def versions() -> dict[str, str]:
    """Return the versions of Python, CUDA and every installed package that a row could depend on."""
    installed = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    return installed | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


@cache
def commit() -> str:
    """Return STROP_COMMIT if set (for a copy of the tree without git), otherwise git's description."""
    if name := os.environ.get("STROP_COMMIT", ""):
        return name
    try:
        git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
        name = git.stdout.strip() if git.returncode == 0 else ""
    except FileNotFoundError:  # git is not installed
        name = ""
    if not name:
        raise ValueError("commit: not a git checkout; set STROP_COMMIT to the measured commit")
    return name


def require_commit() -> None:
    """Raise before anything is measured if the commit is unknown."""
    commit()


def relative_error(got: Tensor, exact: Tensor) -> float:
    """Return the Frobenius norm of the difference relative to the norm of `exact`, in float64."""
    return ((got.double() - exact.double()).norm() / exact.double().norm()).item()


def alternate(
    providers: Mapping[str, Callable[[], object]], *, seconds: float = 3.0, rounds: int | None = None
) -> dict[str, Timing]:
    """Time all providers alternately, at least `rounds` times each and for at least `seconds` in total.

    A call may return tensors by name (its gradients), which do not count as its peak memory. A provider that is not
    installed or runs out of memory gets a printed line and no timing.
    """
    on_cuda = torch.cuda.is_available()
    rounds = rounds or (15 if on_cuda else 3)
    peaks: dict[str, float | None] = {}
    for name, call in providers.items():
        try:
            call()  # compilation, autotuning, first allocations
            peaks[name] = peak_memory(call)
        except ImportError as error:
            print(f"{name}: not installed ({error})", flush=True)
        except torch.OutOfMemoryError:
            print(f"{name}: out of memory", flush=True)
            torch.cuda.empty_cache()
    times: dict[str, list[float]] = {name: [] for name in peaks}
    time_one = cuda_milliseconds(torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")) if on_cuda else milliseconds
    deadline, order = time.perf_counter() + seconds, random.Random(0)
    while times and (time.perf_counter() < deadline or min(map(len, times.values())) < rounds):
        # In a new order each round: the previous provider determines how warm the machine is.
        for name in order.sample(list(times), len(times)):
            times[name].append(time_one(providers[name]))
    return {name: Timing(ms, peaks[name]) for name, ms in times.items()}


def milliseconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - started)


def cuda_milliseconds(flush: Tensor) -> Callable[[Callable[[], object]], float]:
    """Return a function that measures the device time of one call with cold caches."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def time_one(call: Callable[[], object]) -> float:
        for _ in range(16):  # queue a millisecond of work, as in a training step, to hide launch overhead
            flush.zero_()
        start.record()
        result = call()
        stop.record()
        stop.synchronize()
        del result  # freed only now, so that every call starts with the same free memory
        return start.elapsed_time(stop)

    return time_one


def peak_memory(call: Callable[[], object]) -> float | None:
    """Return the peak GiB of the call, excluding earlier allocations and tensors that it returns by name."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    returned = sum(x.untyped_storage().nbytes() for x in result.values()) if isinstance(result, Mapping) else 0
    return max(0, torch.cuda.max_memory_allocated() - before - returned) / GIB


@contextmanager
def watched() -> Iterator[list[float]]:
    """Sample the GiB in use on the GPU by all processes, ten times per second; [0.0] without a GPU.

    Torch keeps what it has allocated, and more frequent driver calls could slow down the measured code.
    """
    used = [0.0]
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(0.1):
            free, total = torch.cuda.mem_get_info()
            used.append((total - free) / GIB)

    thread = threading.Thread(target=sample, daemon=True)
    if torch.cuda.is_available():
        thread.start()
    try:
        yield used
    finally:
        stop.set()


def make_row(
    bench: str,
    provider: str,
    timing: Timing,
    *,
    shape: dict[str, int],
    dtype: torch.dtype | str,
    work: float,  # `unit` per call
    unit: str,
    errors: dict[str, float],
    floor: Timing | None = None,
    against: Mapping[str, Timing | None] | None = None,  # providers of the same loop; None: the provider did not run
    extra: dict[str, float] | None = None,
) -> Row:
    if not errors:
        raise ValueError(f"errors of {provider}: empty; a row must contain its error relative to float64")
    p50 = timing.p50
    others = {name: other for name, other in (against or {}).items() if other is not None and name != provider}
    return Row(
        bench=bench, provider=provider, shape=shape, dtype=str(dtype).removeprefix("torch."), ms_p50=p50,
        ms_p20=timing.at(0.2), ms_p80=timing.at(0.8), rate=1000 * work / p50, unit=unit, peak_gib=timing.peak_gib,
        errors=errors, floor_ms=None if floor is None else floor.p50,
        ratio_to_floor=None if floor is None else p50 / floor.p50,
        ratio_to={name: p50 / other.p50 for name, other in others.items()}, extra=extra or {}, hardware=hardware(),
        versions=versions(), commit=commit(), time=datetime.now(UTC).isoformat(timespec="seconds"),
    )  # fmt: skip


def emit(rows: Sequence[Row], out: Path | None) -> None:
    """Print the rows as tables, and append them to `out` as JSON lines."""
    for (bench, shape, dtype), group in groupby(rows, key=lambda row: (row.bench, named(row.shape, "{}"), row.dtype)):
        print_table(f"{bench}, {shape}, {dtype}", list(group))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        append(out, *map(asdict, rows))


def print_table(title: str, rows: list[Row]) -> None:
    print(f"\n{title}\n{rows[0].hardware}, torch {torch.__version__}, commit {rows[0].commit}")
    shared = {key: x for key, x in rows[0].extra.items() if all(row.extra.get(key) == x for row in rows)}
    if shared:
        print(named(shared, "{:.4g}"))
    print(f"{'provider':>30} {'ms':>9} {'p20':>9} {'p80':>9} {'per second':>18} {'GiB':>6} {'x floor':>7}")
    for row in rows:
        rate = f"{row.rate:,.0f} {row.unit}"
        peak = "" if row.peak_gib is None else f"{row.peak_gib:.2f}"
        floor = "" if row.ratio_to_floor is None else f"{row.ratio_to_floor:.2f}"
        details = [
            named(row.ratio_to, "{:.3f} x", "{value} {key}"),
            named(row.errors, "{:.1e}"),
            named({key: x for key, x in row.extra.items() if key not in shared}, "{:.4g}"),
        ]
        times = f"{row.ms_p50:9.2f} {row.ms_p20:9.2f} {row.ms_p80:9.2f}"
        print(
            f"{row.provider:>30} {times} {rate:>18} {peak:>6} {floor:>7} ",
            " | ".join(filter(None, details)),
            flush=True,
        )


def named(values: Mapping[str, float], number: str, form: str = "{key} {value}") -> str:
    return " ".join(form.format(key=key, value=number.format(value)) for key, value in values.items())


def append(path: Path, *records: dict[str, Any]) -> None:
    """Append the records to a file of JSON lines."""
    with path.open("a") as file:
        file.writelines(json.dumps(record, allow_nan=False) + "\n" for record in records)


def read(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_rows(paths: Iterable[Path]) -> list[Row]:
    """Read rows that `emit` wrote, without the outcomes that `python -m bench` writes; raise on other fields."""
    rows = []
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                record = json.loads(line)
                if "claim" not in record:
                    rows.append(Row(**record))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}:{number}: not a benchmark row ({error}); measure it again") from None
    return rows


def mean_and_range(values: Sequence[float]) -> str:
    if len({f"{value:.3f}" for value in values}) == 1:
        return f"{values[0]:.3f}"
    return f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a child process in any working folder, with additional variables."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **more}


def pyplot(**settings: Any) -> Any:
    """Return matplotlib's pyplot, without a display; the same points give the same file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "strop", **settings})
    return plt


def save_figure(fig: Any, path: Path) -> None:
    fig.tight_layout()
    fig.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def torch_code(model: nn.Module) -> AbstractContextManager[Any]:
    """Run the model's linear attention with transformers' torch code, whose precision is that of the inputs."""
    code, name = sys.modules[type(model).__module__], "torch_chunk_gated_delta_rule"
    return patch.object(code, name, inspect.unwrap(getattr(code, name))) if hasattr(code, name) else nullcontext()
