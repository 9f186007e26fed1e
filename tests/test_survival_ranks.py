"""kill -9 of a whole job at once, launcher, processes and server: what was saved is there, and the run goes on."""

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
        with contextlib.suppress(OSError):  # it has ended
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = set(pids)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def kill_all(process: subprocess.Popen[bytes], run: Path) -> int:
    """Everything that the job has started, at once; the number of processes."""
    found = with_children(processes_with(f"STROP_TEST_RUN={run}"))  # vLLM's write their names over their environment
    for pid in found:
        with contextlib.suppress(ProcessLookupError):  # gone with its parent
            os.kill(pid, signal.SIGKILL)
    process.wait(timeout=30)
    deadline = time.monotonic() + 30
    while processes_with(f"STROP_TEST_RUN={run}"):
        assert time.monotonic() < deadline, "a process outlived its SIGKILL"
        time.sleep(0.1)
    return len(found)


@pytest.mark.vllm
@pytest.mark.slow  # starts a server of its own three times
@pytest.mark.parametrize("flags", [(), ("--async-prefetch", "--lora.r", 8)])
def test_server_and_trainer_killed_together_lose_nothing_that_was_saved(flags, tmp_path):
    run = tmp_path / "run"
    argv: tuple[Any, ...] = (*GRPO, *flags, "--output-dir", run)
    for at_step in (3, 6):
        process = start(run, *argv)
        try:
            wait_for(process, run, at_step)
            saved, rows = steps_saved(run), metrics(run)
            assert saved, "something was reported as saved"
            assert kill_all(process, run) >= 5, "the launcher, two processes, the guard, its server and more"
        finally:
            kill_all(process, run)
        assert set(saved) <= set(steps_saved(run))  # all of them whole
        newest = max(steps_saved(run))
        kept = [row for row in repeatable(rows) if row["step"] <= max(saved)]
        assert repeatable(metrics(run))[: len(kept)] == kept
        argv = ("--resume", run)
    process = start(run, *argv)
    assert process.wait(timeout=900) == 0, text(run)[-3000:]
    assert f"resuming after step {newest} of {STEPS}" in text(run)
    assert repeatable(metrics(run))[: len(kept)] == kept
    assert [row["step"] for row in metrics(run)] == list(range(STEPS + 1))
    assert max(row["policy/sync_gap"] for row in metrics(run)[1:]) < 1e-3
    assert (run / "final").is_dir() and not processes_with(f"STROP_TEST_RUN={run}")
