"""Rows, timing and printing shared by the benchmarks. A row without its errors, hardware and commit does not exist.

Providers of one measurement take turns inside one loop, so a machine that heats up slows all of them; every ratio in a
row is between two providers of the same loop. On CUDA a call is timed by events on the device, after a write that
pushes its inputs out of the L2 cache; elsewhere by the clock.
"""

from __future__ import annotations

import json
import os
import platform
import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

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
    """One measurement: what, how long, how much memory, how wrong, against what, on what."""

    bench: str
    provider: str
    shape: dict[str, int]
    dtype: str
    ms_p50: float
    ms_p20: float
    ms_p80: float
    rate: float  # `unit` per second
    unit: str
    peak_gib: float | None  # most memory held during the call beyond its inputs and what it returns; None on a CPU
    errors: dict[str, float]  # relative Frobenius distance to the same in float64 (a bf16 model: float32), by quantity
    floor_ms: float | None  # the matrix products it cannot do without, timed in the same loop
    ratio_to_floor: float | None
    ratio_to: dict[str, float]  # own time over that of another provider of the same loop
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
    def p20(self) -> float:
        return self.at(0.2)

    @property
    def p50(self) -> float:
        return self.at(0.5)

    @property
    def p80(self) -> float:
        return self.at(0.8)


@cache
def hardware() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {torch.get_num_threads()} of {os.cpu_count()} threads"


@cache
def versions() -> dict[str, str]:
    """Python, CUDA and every package here that a row could depend on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


@cache
def commit() -> str:
    """STROP_COMMIT where it is set (a copy of the tree whose git knows nothing of it), else what git says."""
    if name := os.environ.get("STROP_COMMIT", ""):
        return name
    try:
        found = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
        name = found.stdout.strip() if found.returncode == 0 else ""
    except FileNotFoundError:  # no git on this machine
        name = ""
    if not name:
        raise ValueError("commit: not a git checkout; a row names the commit it measured, so set STROP_COMMIT to it")
    return name


def require_commit() -> None:
    """The first line of every benchmark's main: without a commit there is no row, so nothing is measured."""
    commit()


def relative_error(got: Tensor, exact: Tensor) -> float:
    """Frobenius norm of the difference over that of the truth, in float64."""
    return ((got.double() - exact.double()).norm() / exact.double().norm()).item()


def alternate(
    providers: Mapping[str, Callable[[], object]], *, seconds: float = 3.0, rounds: int | None = None
) -> dict[str, Timing]:
    """Time every provider in turn, at least `rounds` times each and until `seconds` are over for all together.

    A call may return the tensors it makes by name (its gradients): they do not count as its peak memory. One whose
    package is not installed or which needs more memory than there is gets a printed line and no timing.
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
        # In another order each round: what ran before decides how warm the machine is.
        for name in order.sample(list(times), len(times)):
            times[name].append(time_one(providers[name]))
    return {name: Timing(taken, peaks[name]) for name, taken in times.items()}


def milliseconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - started)


def cuda_milliseconds(flush: Tensor) -> Callable[[Callable[[], object]], float]:
    """A clock that reads the device's time of one call with cold caches."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def time_one(call: Callable[[], object]) -> float:
        for _ in range(16):  # a millisecond of work ahead, as in a training step: launches are then not what is timed
            flush.zero_()
        start.record()
        made = call()
        stop.record()
        stop.synchronize()
        del made  # freed only now: the next call finds the same free memory
        return start.elapsed_time(stop)

    return time_one


def peak_memory(call: Callable[[], object]) -> float | None:
    """GiB that the call held at its peak beyond what was there before and the tensors it returns by name."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made = call()
    torch.cuda.synchronize()
    own = sum(x.untyped_storage().nbytes() for x in made.values()) if isinstance(made, Mapping) else 0
    return max(0, torch.cuda.max_memory_allocated() - before - own) / GIB


@contextmanager
def watched() -> Iterator[list[float]]:
    """GiB in use on the whole GPU by whoever, looked at ten times a second: torch keeps what it once took, and asking
    the driver more often could slow down what is measured. Without a GPU it stays [0.0]."""
    used = [0.0]
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.1):
            free, total = torch.cuda.mem_get_info()
            used.append((total - free) / GIB)

    thread = threading.Thread(target=look, daemon=True)
    if torch.cuda.is_available():
        thread.start()
    try:
        yield used
    finally:
        over.set()


def make_row(
    bench: str,
    provider: str,
    timing: Timing,
    *,
    shape: dict[str, int],
    dtype: str,
    work: float,  # how many `unit` one call does
    unit: str,
    errors: dict[str, float],
    floor: Timing | None = None,
    against: Mapping[str, Timing | None] | None = None,  # of the same loop, itself aside; None: that one could not run
    extra: dict[str, float] | None = None,
) -> Row:
    if not errors:
        raise ValueError(f"errors of {provider}: empty; a row carries how far its result is from float64")
    p50 = timing.p50
    others = {name: other for name, other in (against or {}).items() if other is not None and name != provider}
    return Row(
        bench=bench, provider=provider, shape=shape, dtype=dtype, ms_p50=p50, ms_p20=timing.p20, ms_p80=timing.p80,
        rate=1000 * work / p50, unit=unit, peak_gib=timing.peak_gib, errors=errors,
        floor_ms=None if floor is None else floor.p50, ratio_to_floor=None if floor is None else p50 / floor.p50,
        ratio_to={name: p50 / other.p50 for name, other in others.items()}, extra=extra or {}, hardware=hardware(),
        versions=versions(), commit=commit(), time=datetime.now(UTC).isoformat(timespec="seconds"),
    )  # fmt: skip


def emit(rows: Sequence[Row], out: Path | None) -> None:
    """A table for people, and one JSON object per row when `out` is given."""
    for (bench, shape, dtype), group in groupby(rows, key=lambda row: (row.bench, named(row.shape, "{}"), row.dtype)):
        print_table(f"{bench}, {shape}, {dtype}", list(group))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a") as file:
            file.writelines(json.dumps(asdict(row), allow_nan=False) + "\n" for row in rows)


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
        rest = [
            named(row.ratio_to, "{:.3f} x", "{value} {key}"),
            named(row.errors, "{:.1e}"),
            named({key: x for key, x in row.extra.items() if key not in shared}, "{:.4g}"),
        ]
        times = f"{row.ms_p50:9.2f} {row.ms_p20:9.2f} {row.ms_p80:9.2f}"
        print(
            f"{row.provider:>30} {times} {rate:>18} {peak:>6} {floor:>7} ", " | ".join(filter(None, rest)), flush=True
        )


def named(values: Mapping[str, float], number: str, form: str = "{key} {value}") -> str:
    return " ".join(form.format(key=key, value=number.format(value)) for key, value in values.items())


def read_rows(paths: Iterable[Path]) -> list[Row]:
    """Rows that `emit` wrote; a file with other fields is refused."""
    rows = []
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                rows.append(Row(**json.loads(line)))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}:{number}: not a benchmark row ({error}); measure it again") from None
    return rows
