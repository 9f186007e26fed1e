"""Render the benchmark tables of docs/kernels_and_benchmarks.md from the rows of the benchmarks.

    python -m bench.table bench/results/h200/*.jsonl                  # print the tables
    python -m bench.table bench/results/h200/*.jsonl --write PAGE.md  # replace the text between the two markers
    python -m bench.table bench/results/h200/*.jsonl --check PAGE.md  # fail if the tables in the page differ

A newer row replaces the earlier row of the same benchmark, provider, shape and machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import tyro

from bench.common import Row, read_rows

BEGIN, END = "<!-- bench -->", "<!-- /bench -->"
PEERS = {"trl": "TRL", "liger_kernel": "Liger", "cut_cross_entropy": "cut-cross-entropy", "vllm": "vLLM"}
PROVIDERS = {
    "ours": "ours", "trl": "TRL", "liger": "Liger", "cce": "CCE", "cce, exact": "CCE, no filter", "torch": "torch",
    "torch.compile": "torch.compile",
}  # fmt: skip
ANY_LOSS = {"trl", "torch", "torch.compile"}  # peers that return log-probs to a custom loss
# (benchmark, strop's provider) -> label, in table order
LABELS = {
    ("linear_logprob/forward", "ours"): "log-probs only, ms",
    ("linear_logprob/loss", "ours"): "loss and gradients in one pass, ms",
    ("linear_logprob/loss", "ours, general entry"): "gradients of any loss, ms",
    ("linear_logprob/frozen", "ours"): "one pass, frozen head, ms",
    ("linear_logprob/peaked", "ours"): "one pass, likely targets, ms",
}


def latest(rows: Iterable[Row]) -> list[Row]:
    return list({(row.hardware, row.bench, row.provider, str(row.shape), row.dtype): row for row in rows}.values())


def render(rows: Iterable[Row]) -> str:
    """Render Markdown: for each machine its description, the log-prob table, and one table of all other rows."""
    rows = latest(rows)
    parts = []
    for machine in dict.fromkeys(row.hardware for row in rows):
        machine_rows = [row for row in rows if row.hardware == machine]
        heads = [row for row in machine_rows if row.bench.startswith("linear_logprob/")]
        others = [row for row in machine_rows if row not in heads]
        parts += [
            provenance(machine, machine_rows),
            logprob_table(heads) if heads else "",
            step_table(others) if others else "",
        ]
    return "\n\n".join(part for part in parts if part) + "\n"


def provenance(machine: str, rows: list[Row]) -> str:
    """Describe machine, versions, dates and commits in one line."""
    versions: dict[str, str] = {}
    for row in rows:
        versions |= row.versions
    base = [f"{name} {versions[name]}" for name in ("torch", "triton", "transformers") if name in versions]
    peers = [f"{name} {versions[package]}" for package, name in PEERS.items() if package in versions]
    days = sorted({row.time[:10] for row in rows})
    commits = ", ".join(sorted({row.commit for row in rows}))
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    how = "Medians. Providers are timed alternately; whole runs (vs_trl) and engines (rollout) sequentially."
    return f"One {machine}, {', '.join(base + peers)}; {when}, commit {commits}. {how}"


def logprob_table(rows: list[Row]) -> str:
    """Render a line per shape and quantity and a column per provider; the floor is the matrix products alone."""
    providers = [name for name in PROVIDERS if any(row.provider == name for row in rows)]
    lines = [f"| N, D, V | | {' | '.join(PROVIDERS[name] for name in providers)} | floor | ours / TRL |"]
    lines.append("|---" * (len(providers) + 4) + "|")
    for shape in dict.fromkeys(shape_of(row) for row in rows):
        first = shape
        for label, cells in quantities([row for row in rows if shape_of(row) == shape]):
            filled = [cells.get(name, "") for name in (*providers, "floor", "ratio")]
            lines.append(f"| {first} | {label} | {' | '.join(filled)} |")
            first = ""
    return "\n".join(lines)


def quantities(rows: list[Row]) -> Iterable[tuple[str, dict[str, str]]]:
    """Yield the lines of one shape: times of every section, then memory and error of loss and gradients."""
    for (bench, ours), label in LABELS.items():
        section = {row.provider: row for row in rows if row.bench == bench}
        if ours in section:
            row = section[ours]
            comparable = section.keys() if ours == "ours" else section.keys() & ANY_LOSS
            cells = {name: number(section[name].ms_p50) for name in comparable}
            ratio = f"{row.ratio_to['trl']:.2f}" if "trl" in row.ratio_to else ""
            yield label, cells | {"ours": number(row.ms_p50), "floor": number(row.floor_ms), "ratio": ratio}
    loss_rows = [row for row in rows if row.bench == "linear_logprob/loss"]
    columns: dict[str, Callable[[Row], str]] = {
        "loss and gradients, GiB": lambda row: "" if row.peak_gib is None else f"{row.peak_gib:.2f}",
        "error of dX": lambda row: error(row, "dX"),
        "error of dW": lambda row: error(row, "dW"),
    }
    for label, cell in columns.items():
        cells = {row.provider: cell(row) for row in loss_rows}
        if any(cells.values()):
            yield label, cells


def step_table(rows: list[Row]) -> str:
    lines = ["| what | shape | layout | ms | rate | GiB | error | time over | commit |", "|---" * 9 + "|"]
    dtypes: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        dtypes.setdefault((row.bench, shape_of(row)), set()).add(row.dtype)
    for row in rows:
        shape = " ".join(f"{key}={value}" for key, value in row.shape.items())
        if len(dtypes[row.bench, shape_of(row)]) > 1:
            shape += f" {row.dtype}"
        peak = "" if row.peak_gib is None else f"{row.peak_gib:.1f}"
        errors = "; ".join(f"{key} {value:.1e}" for key, value in row.errors.items())
        shown = [name for name in ("TRL", "best TRL") if "best TRL" in row.ratio_to] or list(row.ratio_to)
        ratios = "; ".join(f"{name} {row.ratio_to[name]:.2f}" for name in shown if name in row.ratio_to)
        rate = f"{row.rate:,.0f} {row.unit}/s"
        cells = [row.bench, shape, row.provider, number(row.ms_p50), rate, peak, errors, ratios, row.commit]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def shape_of(row: Row) -> str:
    return ", ".join(str(value) for value in row.shape.values())


def number(value: float | None) -> str:
    """Format with about three digits."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def error(row: Row, quantity: str) -> str:
    return f"{row.errors[quantity]:.1e}" if quantity in row.errors else ""


def between_markers(text: str, first: str = BEGIN, last: str = END) -> tuple[str, str, str]:
    """Split a text into the parts before, between and after the markers."""
    before, begin, rest = text.partition(first + "\n")
    inside, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"markers {first} and {last}: not both in the file; add them around the tables")
    return before + begin, inside, end + after


def main(files: tyro.conf.Positional[tuple[Path, ...]], check: Path | None = None, write: Path | None = None) -> None:
    """Print the tables, or check or replace the tables of a page.

    Args:
        files: JSON lines written by the benchmarks.
        check: Page whose tables must match.
        write: Page whose tables are replaced.
    """
    tables = render(read_rows(files))
    if write is not None:
        before, _, after = between_markers(write.read_text(encoding="utf-8"))
        write.write_text(before + tables + after, encoding="utf-8")
    elif check is not None:
        if between_markers(check.read_text(encoding="utf-8"))[1] != tables:
            sys.exit(f"check={check}: its benchmark tables do not match the rows; update them with --write")
    else:
        print(tables, end="")


if __name__ == "__main__":
    tyro.cli(main)
