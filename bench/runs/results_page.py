"""Write docs/results.md from the rows of `python -m bench.runs.results run`: a table and a figure per task.

    python -m bench.runs.results_page OUT/results.jsonl docs/results.md

A section of bench/runs/objectives.py in an existing page is kept.

Failures are detected, not selected: runs that ended early, held-out metrics that did not improve by more than
their noise, seeds that differ by more than the noise, and EBFT if SFT ended closer.
"""

from __future__ import annotations

import math
import shlex
import statistics
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tyro

from bench.common import mean_and_range, pyplot, read, save_figure
from bench.runs.objectives import parts_of, with_section
from bench.runs.results import RUNS, TASKS, Metric, Run, all_jobs

COLOURS = ("#00798c", "#d1495b", "#edae49", "#66a182", "#6a4c93")
NOISE = 2.0  # standard errors
RANGE = 3.3  # 95% bound on the range of three seeds, in standard errors

Row = dict[str, Any]


def latest(rows: Iterable[Row]) -> dict[str, Row]:
    """Return the last row of each run, in list order; raise on --quick rows."""
    by_name = {row["name"]: row for row in rows}
    if quick := [name for name, row in by_name.items() if row["quick"]]:
        raise SystemExit(f"{quick[0]}: measured with --quick; run it again without")
    return {name: by_name[name] for name in all_jobs() if name in by_name}


def with_features(rows: dict[str, Row]) -> dict[str, Row]:
    """Merge measuring runs into the runs that they measure, whose own metrics take precedence.

    "Before" comes from the start of the training run with the same method, "after" from the measuring run.
    """
    merged = dict(rows)
    for judge in [row for row in rows.values() if row["judges"]]:
        del merged[judge["name"]]
        name = f"{judge['judges']}-{judge['seed']}"
        trained = next((row for row in rows.values() if row["method"] == judge["method"] and not row["judges"]), None)
        points = merged.get(name, {}).get("points", [])
        if len(points) > 1 and "points" in judge and trained and "points" in trained:
            before, after = {**trained["points"][0], **points[0]}, {**judge["points"][0], **points[-1]}
            merged[name] = {**merged[name], "points": [before, *points[1:-1], after]}
    return merged


def values_of(row: Row, metric: str) -> list[tuple[int, float]]:
    """Return (step, value) of every evaluation."""
    return [(point["step"], point[metric]) for point in row.get("points", []) if point.get(metric) is not None]


def ends(row: Row, metric: str) -> tuple[float, float] | None:
    """Return the first and last value; None if there are not two evaluations."""
    values = values_of(row, metric)
    return (values[0][1], values[-1][1]) if len(values) > 1 else None


def noise(metric: Metric, before: float, after: float, held_out: int) -> float:
    """Return two standard errors of the difference of two fractions of this many rows; 0 if not a fraction."""
    if not metric.fraction:
        return 0.0
    return NOISE * math.sqrt(sum(max(0.0, x * (1 - x)) for x in (before, after)) / held_out)


def improved(row: Row, name: str, metric: Metric) -> bool:
    before, after = ends(row, name)
    before = before if metric.chance is None else max(before, metric.chance)
    change = after - before if metric.higher else before - after
    return change > noise(metric, before, after, row["held_out"])


def failures(rows: dict[str, Row]) -> list[str]:
    """Return a line for every failure."""
    lines = []
    for name, row in rows.items():
        if "failed" in row:
            lines.append(f"`{name}` did not run to the end ({row['failed']}).")
        for metric_name, metric in TASKS[row["task"]].metrics.items():
            if ends(row, metric_name) and not improved(row, metric_name, metric):
                before, after = ends(row, metric_name)
                guess = "" if metric.chance is None else f" (guessing: {metric.chance:.2f})"
                beyond = " beyond noise" if metric.fraction else ""
                lines.append(
                    f"`{name}`: held-out {metric.label} went from {before:.3f} to {after:.3f}{guess}, not an "
                    f"improvement{beyond}."
                )
    missing = [name for name, (run, _) in all_jobs().items() if name not in rows and not run.judges]
    if missing:
        lines.append(f"Not run: {', '.join(f'`{name}`' for name in missing)}.")
    return [*lines, *seed_differences(rows), *ebft_losses(rows)]


def seed_differences(rows: dict[str, Row]) -> list[str]:
    """Return a line for every run whose result depends on the seed."""
    lines = []
    for run in RUNS:
        for name, metric in TASKS[run.task].metrics.items():
            measured = [row for row in rows_of(run, rows) if ends(row, name)]
            if not measured or not metric.fraction:
                continue
            last = [ends(row, name)[1] for row in measured]
            least, most, mean = min(last), max(last), statistics.fmean(last)
            if most - least > RANGE * math.sqrt(mean * (1 - mean) / measured[0]["held_out"]):
                lines.append(
                    f"`{run.name}`: held-out {metric.label} depends on the seed; it ended between {least:.3f} and "
                    f"{most:.3f}, more than noise explains."
                )
    return lines


def ebft_losses(rows: dict[str, Row]) -> list[str]:
    """Return a line for every metric on which SFT on the same rows ended as close as EBFT or closer."""
    lines = []
    of_task = {row["method"]: row for row in rows.values() if row["task"] == "solutions"}
    for name, metric in TASKS["solutions"].metrics.items():
        both = [ends(of_task[method], name) if method in of_task else None for method in ("ebft", "sft")]
        if None not in both and both[0][1] >= both[1][1]:
            lines.append(f"EBFT ended at {metric.label} {both[0][1]:.3f}, SFT on the same rows at {both[1][1]:.3f}.")
    return lines


def table(task: str, rows: dict[str, Row]) -> list[str]:
    """Return a table line per run and metric, over seeds."""
    lines = ["| run | held out | before | after | seeds | steps | wall time |", "|---|---|---|---|---|---|---|"]
    for run in runs_of(task):
        for name, metric in TASKS[task].metrics.items():
            measured = [row for row in rows_of(run, rows) if ends(row, name)]
            if not measured:
                continue
            before, after = (mean_and_range([ends(row, name)[end] for row in measured]) for end in (0, 1))
            seeds = ", ".join(str(row["seed"]) for row in measured)
            wall = statistics.fmean(row["wall_s"] for row in measured)
            lines.append(
                f"| `{run.name}` | {metric.label} | {before} | {after} | {seeds} | {measured[0]['steps']} | "
                f"{wall:.0f} s |"
            )
    return lines


def runs_of(task: str) -> list[Run]:
    return [run for run in RUNS if run.task == task and not run.judges]


def rows_of(run: Run, rows: dict[str, Row]) -> list[Row]:
    return [rows[run.named(seed)] for seed in run.seeds if run.named(seed) in rows]


def commands(rows: Iterable[Row]) -> list[str]:
    """Return a collapsible list of commands for the first seed of each run."""
    first: dict[str, str] = {}
    for row in rows:
        first.setdefault(row["run"], row["command"])
    named = [line for command in first.values() for line in (*broken(command), "")]
    return ["<details><summary>commands</summary>", "", *named, "</details>"] if first else []


def broken(command: str) -> list[str]:
    """Wrap a command between flags, with shell continuations."""
    lines = [""]
    for word in shlex.split(command):
        if word.startswith("--") and len(lines[-1]) > 80:
            lines.append("")
        lines[-1] += f" {shlex.quote(word)}" if lines[-1] else shlex.quote(word)
    first, *rest = lines
    return [f"    {line}" for line in " \\\n".join([first, *(f"    {line}" for line in rest)]).splitlines()]


def draw(task: str, rows: dict[str, Row], figure: Path) -> bool:
    """Draw a panel per metric: seeds as light lines, the mean as a strong line. Return False if there are no points."""
    shown = {
        name: metric
        for name, metric in TASKS[task].metrics.items()
        if any(values_of(row, name) for run in runs_of(task) for row in rows_of(run, rows))
    }
    if not shown:
        return False
    plt = pyplot(**{"svg.fonttype": "none", "font.size": 9})
    fig, panels = plt.subplots(1, len(shown), figsize=(4.6 * len(shown), 3.0), squeeze=False)
    for axes, (name, metric) in zip(panels[0], shown.items(), strict=True):
        for run, colour in zip(runs_of(task), COLOURS, strict=False):
            lines = [values for row in rows_of(run, rows) if (values := values_of(row, name))]
            for values in lines:
                axes.plot(*zip(*values, strict=True), color=colour, alpha=0.35 if len(lines) > 1 else 1, linewidth=1)
            steps = [step for step, _ in lines[0]] if lines else []
            if lines and all([step for step, _ in values] == steps for values in lines):
                means = [statistics.fmean(values[i][1] for values in lines) for i in range(len(steps))]
                axes.plot(steps, means, color=colour, linewidth=2, label=run.name)
        if metric.chance is not None:
            axes.axhline(metric.chance, color="black", linewidth=0.8, linestyle=":")
        axes.set(xlabel="optimizer step", title=f"{metric.label}, held out")
        if metric.fraction and metric.chance is None:
            axes.set_ylim(-0.03, 1.03)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    save_figure(fig, figure)
    plt.close(fig)
    return True


def heading(rows: list[Row]) -> list[str]:
    commits, hardware = sorted({row["commit"] for row in rows}), sorted({row["hardware"] for row in rows})
    packages = rows[0]["versions"]
    named = ", ".join(f"{name} {packages[name]}" for name in ("torch", "transformers") if name in packages)
    return [
        "# Results on a small model",
        "",
        f"SmolLM2-135M-Instruct (Apache-2.0; weights dequantised from a 4-bit file) on {' and '.join(hardware)}, with "
        f"{named}, at commit {', '.join(commits)}. Runs shared the GPU ({rows[0]['jobs']} from this page at a time, "
        "plus others), so wall times, which include startup and evaluations, are longer than for a run alone. "
        "With three seeds, the table shows the mean and, in parentheses, the lowest and highest.",
        "",
        "Sampling tasks start from the model after a few SFT steps on the reply format (`start-0`); "
        '"before" is measured after these steps. No held-out problem was trained on, in these steps or later. '
        "[bench/runs/results.py](../bench/runs/results.py) has every setting and produces rows, runs and this page:",
        "",
        "    python -m bench.runs.results rows ROWS",
        "    python -m bench.runs.results run --model SmolLM2-135M-Instruct --data ROWS --out OUT",
        "    python -m bench.runs.results_page OUT/results.jsonl docs/results.md",
    ]


def write_page(rows: list[Row], out: Path) -> None:
    measured = latest(rows)
    if not measured:
        raise SystemExit("results: no runs; start them with `python -m bench.runs.results run`")
    merged = with_features(measured)
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = heading(list(measured.values()))
    for name, task in TASKS.items():
        of_task = [row for row in measured.values() if row["task"] == name]
        if not of_task:
            continue
        lines += ["", f"## {task.title}", "", task.text, ""]
        if task.metrics:
            figure = out.with_name(f"{out.stem}_{name}.svg")
            lines += [*table(name, merged), ""]
            if draw(name, merged, figure):
                lines += [f"![{task.title}: held-out metrics over steps]({figure.name})", ""]
        lines += commands(of_task)
    lines += ["", "## What did not work", ""]
    lines += [f"- {line}" for line in failures(merged)] or [
        "Every run improved its held-out metrics (fractions by more than two standard errors)."
    ]
    page = "\n".join(wrapped(line) for line in lines) + "\n"
    out.write_text(with_section(page, parts_of(out.read_text())[1]) if out.exists() else page)


def wrapped(line: str) -> str:
    """Wrap paragraphs and list items at 120 columns; keep tables, code, figures and headings."""
    if not line or line[0] in " |#!<":
        return line
    hang = "  " if line.startswith("- ") else ""
    return textwrap.fill(line, 120, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False)


def main(results: tyro.conf.Positional[Path], out: tyro.conf.Positional[Path]) -> None:
    """Write the page and its figures.

    Args:
        results: What `bench.runs.results run` wrote.
        out: The page; figures are written to the same folder.
    """
    write_page(read(results), out)


if __name__ == "__main__":
    tyro.cli(main)
