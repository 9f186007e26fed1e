"""Distil SmolLM2-135M-Instruct from its GRPO run, and from itself with the answer in the teacher's prompt.

    python -m bench.runs.smollm2 run --model MODEL_FOLDER --folder WORK --sides ours --seeds 0   # the teacher
    python -m bench.runs.distill WORK --out rows.jsonl                                          # uses ours-0/final

The student is the initial model of GRPO (WORK/start); rows, batch, group, temperature, completion length and learning
rate match that run. No reward is trained on; exact_match is only measured on held-out rows. `gpu_s` is the time of the
steps (sampling, teacher and training), without start-up and evaluations; self-distillation runs share the GPU,
so they have none.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import tyro

from bench.common import commit, hardware, require_commit, versions
from bench.runs.smollm2 import Settings, environment
from trainer.metrics.metrics import read_jsonl

HINT = "bench.runs.distill.hint"


def hint(row: dict[str, Any]) -> list[dict[str, str]]:
    """Add the answer to the question, for the teacher only."""
    question = row["prompt"][-1]["content"]
    return [{"role": "user", "content": f"{question} The right reply is {row['answer']}"}]


def flags_of(work: Path, name: str, teacher: list[str], seed: int, s: Settings) -> list[str]:
    flags = {
        "method": "opd", "model": work / "start", "data": work / "train.jsonl", "eval-data": work / "eval.jsonl",
        "max-eval-rows": s.eval_rows, "eval-steps": s.eval_steps, "rollout.eval-temperature": s.eval_temperature,
        "reward-funcs": "exact_match", "reward-coef": 0, "num-generations": s.group,
        "per-device-train-batch-size": s.prompts * s.group, "max-completion-length": s.completion,
        "max-steps": s.steps, "learning-rate": s.learning_rate, "lr-scheduler-type": "constant", "seed": seed,
        "rollout.engine": "local", "save-steps": 0, "max-tokens-per-micro-batch": 65536, "logging-steps": 10,
        "output-dir": work / name,
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [*words, *teacher, "--overwrite-output-dir"]


def result_of(run: Path, *, timed: bool) -> dict[str, Any]:
    """Return the held-out accuracy at each evaluation, and the seconds of the steps."""
    records = list(read_jsonl(run / "metrics.jsonl"))
    name = "eval/exact_match/mean"
    seconds = sum(r.get("time/step_s", 0.0) for r in records)
    accuracy = {r["step"]: r[name] for r in records if name in r}
    return {"run": run.name, "accuracy": accuracy, "gpu_s": seconds if timed else None}


def main(
    work: tyro.conf.Positional[Path],
    out: Path | None = None,
    seeds: tuple[int, ...] = (0, 1, 2),
    settings: Settings = Settings(),  # noqa: B008  frozen
) -> None:
    """Distil from the GRPO run, then from the model itself, and print the results.

    Args:
        work: Folder of bench.runs.smollm2, with start/, ours-0/ and the rows.
        out: File to append the results to.
        seeds: Of self-distillation.
        settings: Of every run.
    """
    require_commit()
    work = work.resolve()
    jobs = {"opd-0": (["--teacher", str(work / "ours-0" / "final")], 0)}
    alone = {f"self-{seed}": (["--teacher", "self", "--teacher-prompt", HINT], seed) for seed in seeds}
    rows = [result_of(work / "ours-0", timed=True)]
    for group in (jobs, alone):  # the first has the GPU to itself
        started = {
            name: subprocess.Popen(
                [sys.executable, "-m", "trainer", *flags_of(work, name, teacher, seed, settings)],
                cwd=work, env=environment(),
            )
            for name, (teacher, seed) in group.items()
        }  # fmt: skip
        failed = [name for name, child in started.items() if child.wait()]
        if failed:
            raise SystemExit(f"failed: {', '.join(failed)}")
        rows += [result_of(work / name, timed=len(group) == 1) for name in group]
    for row in rows:
        points = list(row["accuracy"].values())
        seconds = "" if row["gpu_s"] is None else f", {row['gpu_s']:.1f} GPU-seconds"
        print(f"{row['run']}: held-out accuracy {points[0]:.3f} -> {points[-1]:.3f}{seconds}", flush=True)
        if out:
            more = {"hardware": hardware(), "versions": versions(), "commit": commit()}
            with out.open("a") as file:
                file.write(json.dumps({**row, **more}) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
