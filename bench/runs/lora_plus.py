"""LoRA and LoRA+ on SmolLM2-135M-Instruct, a sweep of learning rates on a CPU: a table of docs/python.md.

    python -m bench.runs.lora_plus SmolLM2-135M-Instruct OUT/rows.jsonl
    python -m bench.runs.lora_plus SmolLM2-135M-Instruct OUT/rows.jsonl --rates 1e-3 --plus-rates 3e-5 --seeds 1 2

SFT on sums and differences of two-digit numbers, `17 + 25 =` with the completion ` 42`. Held out: the cross-entropy of
the completion for problems that no training row contains. Runs in the file of rows are not repeated.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import tyro

from bench.common import append, commit, mean_and_range, read, require_commit, versions
from trainer import train

RATIO = 16.0  # learning rate of B divided by that of A
RANK, STEPS, EVAL_STEPS, BATCH, HELD_OUT = 16, 30, 15, 8, 100


def problems() -> list[dict[str, str]]:
    """All problems in an order that does not depend on a run's seed."""
    numbers = range(10, 100)
    rows = [{"prompt": f"{a} + {b} =", "completion": f" {a + b}"} for a in numbers for b in numbers]
    rows += [{"prompt": f"{a} - {b} =", "completion": f" {a - b}"} for a in numbers for b in numbers]
    random.Random(0).shuffle(rows)
    return rows


def run(model: Path, ratio: float, rate: float, seed: int) -> dict[str, Any]:
    """Train; return a row with the held-out nll by step. A ratio of 1 is LoRA."""
    rows, plus = problems(), {} if ratio == 1 else {"loraplus_lr_ratio": ratio}
    with tempfile.TemporaryDirectory() as folder:
        metrics = train(
            "sft", model=model, data=rows[HELD_OUT : HELD_OUT + BATCH * STEPS], eval_data=rows[:HELD_OUT], lora_r=RANK,
            learning_rate=rate, lr_scheduler_type="constant", per_device_train_batch_size=BATCH, max_steps=STEPS,
            eval_steps=EVAL_STEPS, save_steps=0, dtype="float32", seed=seed, output_dir=f"{folder}/run", **plus,
        ).metrics  # fmt: skip
    found = metrics if isinstance(metrics, list) else metrics.to_dict("records")
    nll = {row["step"]: row["eval/nll"] for row in found if row.get("eval/nll") == row.get("eval/nll") is not None}
    return {"ratio": ratio, "rate": rate, "seed": seed, "nll": nll, "commit": commit(), "torch": versions()["torch"]}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """A line per ratio and rate: mean and range over seeds at each evaluation."""
    steps = sorted({int(step) for row in rows for step in row["nll"]})
    lines = [f"| | rate of A | rate of B | seeds | {' | '.join(f'step {step}' for step in steps)} |"]
    lines.append("|" + "---|" * (4 + len(steps)))
    for ratio, rate in sorted({(row["ratio"], row["rate"]) for row in rows}):
        runs = [row for row in rows if (row["ratio"], row["rate"]) == (ratio, rate)]
        courses = [{int(step): nll for step, nll in row["nll"].items()} for row in runs]
        cells = [mean_and_range([course[step] for course in courses]) for step in steps]
        seeds = ", ".join(str(row["seed"]) for row in runs)
        name = "LoRA" if ratio == 1 else f"LoRA+, {ratio:g}"
        lines.append(f"| {name} | {rate:g} | {rate * ratio:g} | {seeds} | {' | '.join(cells)} |")
    return lines


def main(
    model: tyro.conf.Positional[Path], rows: tyro.conf.Positional[Path], rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3),
    plus_rates: tuple[float, ...] = (3e-5, 1e-4, 3e-4), seeds: tuple[int, ...] = (0,),
) -> None:  # fmt: skip
    """Train what the file of rows lacks, one run at a time, and print the table.

    Args:
        model: Folder of SmolLM2-135M-Instruct.
        rows: JSON lines, one per run.
        rates: Learning rates of LoRA.
        plus_rates: Learning rates of A with LoRA+.
        seeds: Seeds.
    """
    require_commit()
    done = read(rows) if rows.exists() else []
    both = [*((1.0, rate) for rate in rates), *((RATIO, rate) for rate in plus_rates)]
    for seed in seeds:
        for ratio, rate in both:
            if not any((row["ratio"], row["rate"], row["seed"]) == (ratio, rate, seed) for row in done):
                done.append(run(model, ratio, rate, seed))
                append(rows, done[-1])
    print("\n".join(table(done)))


if __name__ == "__main__":
    tyro.cli(main)
