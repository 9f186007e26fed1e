"""Run the real entry point in a process of its own, as a user does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NOT_REPRODUCIBLE = ("time/", "perf/", "mem/")  # clocks and memory: everything else must repeat bit for bit


def environment(threads: int = 1) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}


def run(*argv: Any, cwd: Path, timeout: float = 300, threads: int = 1, **env: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "trainer", *map(str, argv)]
    return subprocess.run(
        command, cwd=cwd, env=environment(threads) | env, capture_output=True, text=True, timeout=timeout
    )


def run_ok(*argv: Any, cwd: Path, timeout: float = 300, threads: int = 1, **env: str) -> subprocess.CompletedProcess:
    done = run(*argv, cwd=cwd, timeout=timeout, threads=threads, **env)
    assert done.returncode == 0, f"{argv}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


def processes_with(setting: str) -> list[int]:
    """Living processes that were started with NAME=value in their environment: what a run has left behind."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if setting.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # it has ended, or is not ours
            continue
    return found


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def repeatable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if not key.startswith(NOT_REPRODUCIBLE)} for row in rows]
