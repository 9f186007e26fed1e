"""kill -9 of a whole job (launcher, ranks and server): saved checkpoints survive, and the run resumes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.entry import environment, metrics, processes_with, repeatable
from tests.test_ranks import TORCHRUN
from tests.test_survival import steps_saved

STEPS = 8
GRPO = (
    "--method", "grpo", "--rollout.engine", "vllm", "--parallel.mode", "fsdp", "--max-steps", STEPS, "--save-steps", 2,
    "--save-total-limit", 10, "--max-eval-rows", 20, "--eval-steps", 0, "--per-device-train-batch-size", 16,
)  # fmt: skip


def start(run: Path, *argv: Any) -> subprocess.Popen[bytes]:
    env = environment() | {"STROP_TEST_RUN": str(run)}
    with (run.parent / "log").open("ab") as log:
        command = [*TORCHRUN, "-m", "trainer", *map(str, argv)]
        return subprocess.Popen(command, cwd=run.parent, env=env, stdout=log, stderr=log)


def text(run: Path) -> str:
    return (run.parent / "log").read_text()


def wait_for(process: subprocess.Popen[bytes], run: Path, step: int, timeout: float = 900) -> None:
    deadline = time.monotonic() + timeout
    while not ((run / "metrics.jsonl").exists() and any(row["step"] >= step for row in metrics(run))):
        assert process.poll() is None and time.monotonic() < deadline, text(run)[-3000:]
        time.sleep(0.05)


def with_children(pids: Iterable[int]) -> set[int]:
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    tree = set(pids)
    while more := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= more
    return tree


def kill_all(process: subprocess.Popen[bytes], run: Path) -> int:
    """Kill all processes of the job; return their number."""
    pids = with_children(processes_with(f"STROP_TEST_RUN={run}"))  # vLLM's titles overwrite the environment in /proc
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # ended with its parent
            os.kill(pid, signal.SIGKILL)
    process.wait(timeout=30)
    deadline = time.monotonic() + 30
    while processes_with(f"STROP_TEST_RUN={run}"):
        assert time.monotonic() < deadline, "a process survived SIGKILL"
        time.sleep(0.1)
    return len(pids)


@pytest.mark.vllm
@pytest.mark.slow  # starts a server three times
@pytest.mark.parametrize("flags", [(), ("--async-prefetch", "--lora.r", 8)])
def test_checkpoints_survive_killing_server_and_trainer(flags, tmp_path):
    run = tmp_path / "run"
    argv: tuple[Any, ...] = (*GRPO, *flags, "--output-dir", run)
    for at_step in (3, 6):
        process = start(run, *argv)
        try:
            wait_for(process, run, at_step)
            saved, rows = steps_saved(run), metrics(run)
            assert saved
            assert kill_all(process, run) >= 5, "at least the launcher, two ranks, the guard and its server"
        finally:
            kill_all(process, run)
        assert set(saved) <= set(steps_saved(run))
        newest = max(steps_saved(run))
        saved_rows = [row for row in repeatable(rows) if row["step"] <= max(saved)]
        assert repeatable(metrics(run))[: len(saved_rows)] == saved_rows
        argv = ("--resume", run)
    process = start(run, *argv)
    assert process.wait(timeout=900) == 0, text(run)[-3000:]
    assert f"resuming after step {newest} of {STEPS}" in text(run)
    assert repeatable(metrics(run))[: len(saved_rows)] == saved_rows
    assert [row["step"] for row in metrics(run)] == list(range(STEPS + 1))
    assert max(row["policy/sync_gap"] for row in metrics(run)[1:]) < 1e-3
    assert (run / "final").is_dir() and not processes_with(f"STROP_TEST_RUN={run}")
