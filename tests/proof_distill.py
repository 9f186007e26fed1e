"""Proof for on-policy distillation: the tiny model learns addition from the GRPO demo's model, without rewards."""

from __future__ import annotations

import time
from pathlib import Path

from tests.entry import metrics, run_ok

OBJECTIVES = {"sampled token": (), "`--jsd-beta 0.5`": ("--jsd-beta", "0.5")}
SEEDS = (0, 1, 2)
MIN_ACCURACY = 0.93


def tiny(scratch: Path) -> tuple[str, bool, str]:
    """Measure every run's held-out accuracy; the reward is only measured, not trained on (reward_coef 0)."""
    name = "eval/exact_match/mean"
    teacher = scratch / "teacher"
    run_ok("--method", "grpo", "--output-dir", teacher, cwd=scratch, timeout=1800)
    teacher_accuracy = metrics(teacher)[-1][name]
    lines = ["| objective | seed | accuracy before | after | seconds |", "|---|---|---|---|---|"]
    after = []
    for objective, flags in OBJECTIVES.items():
        for seed in SEEDS:
            folder, start = scratch / f"{len(after)}", time.monotonic()
            run_ok(
                "--method", "opd", "--teacher", teacher, "--seed", seed, *flags, "--output-dir", folder, cwd=scratch,
                timeout=1800,
            )  # fmt: skip
            seconds = time.monotonic() - start
            values = [row[name] for row in metrics(folder) if name in row]
            lines.append(f"| {objective} | {seed} | {values[0]:.3f} | {values[-1]:.3f} | {seconds:.0f} |")
            after.append(values[-1])
    figure = (
        f"teacher {teacher_accuracy:.3f}; from {values[0]:.3f} to at least {min(after):.3f}, two objectives with three "
        "seeds each"
    )
    return figure, min(after) >= MIN_ACCURACY, "\n".join(lines)
