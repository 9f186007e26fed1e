"""Objectives on the demo: held-out accuracy over the first steps, one thread per run, on a CPU.

    python -m bench.runs.objectives --jobs 8               # three seeds each; prints the table of docs/grpo.md
    python -m bench.runs.objectives --only grpo max_rl --seeds 0

The demo needs about 20 steps, so the table shows how fast each objective learns, not where it ends. DPPO masks nothing
while the ratio is 1, so it and the GRPO run next to it take four optimizer steps per rollout.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tyro

from bench.common import ROOT
from trainer.metrics.metrics import read_jsonl

METRIC = "eval/exact_match/mean"
FOUR = ("--num-iterations", "4")
OBJECTIVES: dict[str, tuple[str, ...]] = {
    "grpo": ("--method", "grpo"),
    "max_rl": ("--method", "grpo", "--advantage-estimator", "max_rl"),
    "opo": ("--method", "grpo", "--advantage-estimator", "opo"),
    "reinforce_plus_plus": ("--method", "grpo", "--advantage-estimator", "reinforce_plus_plus"),
    "sdpo": ("--method", "sdpo"),
    "grpo, 4 steps": ("--method", "grpo", *FOUR),
    "dppo_tv, 4 steps": ("--method", "grpo", "--loss-type", "dppo_tv", "--proximal-policy", "behaviour", *FOUR),
    "dppo_kl, 4 steps": ("--method", "grpo", "--loss-type", "dppo_kl", "--proximal-policy", "behaviour", *FOUR),
}


def train(name: str, seed: int, max_steps: int, eval_steps: int) -> dict[int, float]:
    """Run the demo; return the held-out accuracy by step."""
    with tempfile.TemporaryDirectory() as scratch:
        settings = {
            "max-steps": max_steps,
            "eval-steps": eval_steps,
            "save-steps": 0,
            "seed": seed,
            "output-dir": "run",
        }
        flags = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "trainer", *OBJECTIVES[name], *flags]
        subprocess.run(command, cwd=scratch, env=env, check=True, stdout=subprocess.DEVNULL)
        return {row["step"]: row[METRIC] for row in read_jsonl(Path(scratch, "run", "metrics.jsonl")) if METRIC in row}


def line(name: str, runs: Sequence[dict[int, float]]) -> str:
    """A row of the table: mean and range over seeds at each evaluation."""
    cells = []
    for step in runs[0]:
        values = [run[step] for run in runs]
        spread = f" ({min(values):.3f} to {max(values):.3f})" if len(set(values)) > 1 else ""
        cells.append(f"{statistics.fmean(values):.3f}{spread}")
    return f"| `{name}` | {' | '.join(cells)} |"


def main(
    only: tuple[str, ...] = tuple(OBJECTIVES), seeds: tuple[int, ...] = (0, 1, 2), max_steps: int = 20,
    eval_steps: int = 10, jobs: int = 1,
) -> None:  # fmt: skip
    """Train and print a table.

    Args:
        only: Objectives.
        seeds: Seeds of each.
        max_steps: Optimizer steps.
        eval_steps: Steps between evaluations.
        jobs: Concurrent runs, one thread each.
    """
    with ThreadPoolExecutor(jobs) as pool:
        runs = {name: [pool.submit(train, name, seed, max_steps, eval_steps) for seed in seeds] for name in only}
        for name, futures in runs.items():
            print(line(name, [future.result() for future in futures]), flush=True)


if __name__ == "__main__":
    tyro.cli(main)
