"""Proofs for async rollouts with a real vLLM server: they learn, overlap and do not leak; and for partial rollouts."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollout.servers.command import TOKEN
from tests.entry import environment, metrics, run_ok

ASYNC = ("--async-prefetch",)


@contextlib.contextmanager
def served(scratch: Path) -> Iterator[dict[str, Any]]:
    """Serve the tiny model for several runs, which each send their weights; yield flags and environment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {TOKEN: secrets.token_hex(16)}
    command = [sys.executable, "-m", "rollout.serve", "--model", "builtin:tiny", "--vllm.port", str(port)]
    with (scratch / "server.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment() | env, stdout=log, stderr=log, cwd=scratch)
    url = f"http://127.0.0.1:{port}"
    try:
        request = urllib.request.Request(f"{url}/health", headers={"Authorization": f"Bearer {env[TOKEN]}"})
        deadline = time.monotonic() + 300
        while True:
            assert process.poll() is None, (scratch / "server.log").read_text()[-2000:]
            with contextlib.suppress(OSError):
                urllib.request.urlopen(request, timeout=5).close()
                break
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(1)
        yield {"flags": ("--method", "grpo", "--rollout.engine", "vllm", "--vllm.url", url), "env": env}
    finally:
        process.terminate()
        process.wait(60)


def learns(scratch: Path) -> tuple[str, bool]:
    """Three seeds: the final held-out accuracy of async runs is within 0.05 of synchronous runs."""
    finals: dict[str, list[float]] = {"sync": [], "async": []}
    oldest = 0.0
    with served(scratch) as server:
        for seed in range(3):
            for name, extra in (("sync", ()), ("async", ASYNC)):
                folder = scratch / f"{name}-{seed}"
                run_ok(*server["flags"], *extra, "--seed", seed, "--output-dir", folder, "--eval-steps", 0,
                       cwd=scratch, timeout=1800, **server["env"])  # fmt: skip
                rows = metrics(folder)
                finals[name].append(rows[-1]["eval/exact_match/mean"])
                if name == "async":
                    oldest = max(oldest, *(row.get("rollout/staleness_max", 0.0) for row in rows))
    gaps = [abs(a - b) for a, b in zip(finals["sync"], finals["async"], strict=True)]
    shown = {name: " ".join(f"{x:.3f}" for x in values) for name, values in finals.items()}
    figure = f"sync {shown['sync']}, async {shown['async']}, staleness at most {oldest:.0f} step"
    return figure, max(gaps) <= 0.05 and oldest == 1


def partial(scratch: Path) -> tuple[str, bool]:
    """Three seeds: held-out accuracy, final and mean, is within 0.05 of full rollouts."""
    runs: dict[str, list[tuple[float, float]]] = {"full": [], "partial": []}  # final accuracy, mean over evaluations
    oldest, continued = 0.0, []
    for seed in range(3):
        for name, extra in (("full", ()), ("partial", ("--rollout.partial", 0.5))):
            folder = scratch / f"{name}-{seed}"
            run_ok("--method", "grpo", *extra, "--seed", seed, "--output-dir", folder, cwd=scratch, timeout=1800)
            rows = metrics(folder)
            curve = [row["eval/exact_match/mean"] for row in rows if "eval/exact_match/mean" in row]
            runs[name].append((curve[-1], statistics.fmean(curve)))
            oldest = max(oldest, *(row.get("rollout/staleness_max", 0.0) for row in rows))
            continued += [row["rollout/continued_frac"] for row in rows if "rollout/continued_frac" in row]
    gaps = [abs(a - b) for pair in zip(*runs.values(), strict=True) for a, b in zip(*pair, strict=True)]
    shown = [f"{name} " + " ".join(f"{end:.3f} ({mean:.3f})" for end, mean in each) for name, each in runs.items()]
    figure = (
        f"{', '.join(shown)}; completions up to {oldest:.0f} steps old, {statistics.fmean(continued):.1%} continued"
    )
    return figure, max(gaps) <= 0.05 and oldest > 0 and max(continued) > 0


def overlaps(scratch: Path, seconds: float = 1.5, num_steps: int = 16) -> tuple[str, bool]:
    """Add the same delay to every training and sampling phase: the async run takes at most 0.65 of the time."""
    walls = {}
    with served(scratch) as server:
        for name, extra in (("sync", ()), ("async", ASYNC)):
            folder = scratch / name
            argv = [*server["flags"], *extra, "--max-steps", num_steps, "--per-device-train-batch-size", 16,
                    "--max-eval-rows", 8, "--eval-steps", 0, "--output-dir", folder]  # fmt: skip
            command = [sys.executable, "-m", "tests.slow", str(seconds), *map(str, argv)]
            subprocess.run(command, env=environment() | server["env"], cwd=scratch, check=True, timeout=900)
            walls[name] = metrics(folder)[num_steps]["time/wall_s"]
    ratio = walls["async"] / walls["sync"]
    return (
        f"{num_steps} steps: {walls['sync']:.1f} s sync, {walls['async']:.1f} s async, ratio {ratio:.2f}",
        ratio <= 0.65,
    )


def soak(scratch: Path, num_steps: int = 1000) -> tuple[str, bool]:
    """Run many small async steps with replay and a reward worker."""
    with served(scratch) as server:
        flags = (*server["flags"], *ASYNC, "--prefetch-depth", 2, "--replay-buffer-size", 16, "--reward-num-workers", 1)
        return steady(scratch, num_steps, *flags, "--per-device-train-batch-size", 16, "--save-steps", 250,
                      "--max-eval-rows", 8, "--eval-steps", 0, **server["env"])  # fmt: skip


def steady(scratch: Path, num_steps: int, *flags: Any, **env: str) -> tuple[str, bool]:
    """Run the trainer: memory, threads and open files (including sockets) stop growing after a fifth of the steps."""
    folder = scratch / "run"
    argv = [*flags, "--max-steps", num_steps, "--logging-steps", 250, "--output-dir", folder]
    command = [sys.executable, "-m", "trainer", *map(str, argv)]
    with (scratch / "run.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment() | env, cwd=scratch, stdout=log, stderr=log)
    usages: dict[int, tuple[float, int, int, int]] = {}  # by step
    try:
        while process.poll() is None:
            with contextlib.suppress(OSError, IndexError, ValueError):
                written = sum(path.stat().st_size for path in (*folder.glob("*.jsonl"), *folder.glob("logs/*")))
                usages[metrics(folder)[-1]["step"]] = (*usage(process.pid), written // 2**10)
            time.sleep(2)
    finally:
        process.kill()
    assert process.wait() == 0, (scratch / "run.log").read_text()[-3000:]
    steps = sorted(step for step in usages if num_steps * 0.2 <= step < num_steps)
    early, late = usages[steps[0]], usages[steps[-1]]
    names = ("MiB", "threads", "files", "KiB of metrics, samples and logs")
    figure = ", ".join(f"{name} {a:g} -> {b:g}" for name, a, b in zip(names, early, late, strict=True))
    passed = late[0] - early[0] < 64 and late[1] <= early[1] + 2 and late[2] <= early[2] + 8
    return f"{num_steps} steps; from step {steps[0]} to {steps[-1]}: {figure}", passed


def usage(pid: int) -> tuple[float, int, int]:
    """Return a process's resident MiB, threads and open files."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    resident = int(status["VmRSS"].split()[0]) / 1024
    return round(resident), int(status["Threads"]), len(os.listdir(f"/proc/{pid}/fd"))
