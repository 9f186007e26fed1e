"""Proof of on-policy distillation: the tiny model learns to add from a teacher that the GRPO demo made, not rewards."""

from __future__ import annotations

import time
from pathlib import Path

from tests.entry import metrics, run_ok

OBJECTIVES = {"sampled token": (), "`--jsd-beta 0.5`": ("--jsd-beta", "0.5")}
SEEDS = (0, 1, 2)
LEAST = 0.93


def tiny(scratch: Path) -> tuple[str, bool, str]:
    """Held-out accuracy of every run, which the reward function measures and does not train (reward_coef 0)."""
    name = "eval/exact_match/mean"
    teacher = scratch / "teacher"
    run_ok("--method", "grpo", "--output-dir", teacher, cwd=scratch, timeout=1800)
    taught = metrics(teacher)[-1][name]
    lines = ["| objective | seed | accuracy before | after | seconds |", "|---|---|---|---|---|"]
    after = []
    for objective, flags in OBJECTIVES.items():
        for seed in SEEDS:
            folder, started = scratch / f"{len(after)}", time.monotonic()
            run_ok(
                "--method", "opd", "--teacher", teacher, "--seed", seed, *flags, "--output-dir", folder, cwd=scratch,
                timeout=1800,
            )  # fmt: skip
            seconds = time.monotonic() - started
            found = [row[name] for row in metrics(folder) if name in row]
            lines.append(f"| {objective} | {seed} | {found[0]:.3f} | {found[-1]:.3f} | {seconds:.0f} |")
            after.append(found[-1])
    figure = f"teacher {taught:.3f}; from {found[0]:.3f} to {min(after):.3f} or more, two objectives, three seeds each"
    return figure, min(after) >= LEAST, "\n".join(lines)
