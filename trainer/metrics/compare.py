"""Compare several runs on one page: python -m trainer.report RUN RUN [--out PAGE.html]

The page has a table of the runs, a chart for each metric that changed in any run, and the settings that differ. Like
the page of a single run (report.py), it loads nothing and runs no script.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from html import escape
from pathlib import Path

from data.errors import UserError
from trainer.metrics.console import EVAL_HEADLINES, duration, number
from trainer.metrics.page import page_html, text, write_page
from trainer.metrics.report import (
    EXACT,
    LARGE,
    MAX_POINTS,
    SMALL,
    SPARSE,
    Point,
    RunData,
    _line,
    axes,
    charts_html,
    definition,
    is_constant,
    load_run,
    precise,
    shown_values,
    smooth,
    top_names,
)

COLOURS = 8  # in report.css; additional runs repeat them with dashed lines
MAX_RUNS = 24  # more lines are unreadable
OF_A_RUN = {"output_dir", "run_id", "resume", "overwrite_output_dir"}  # settings that always differ
SHORT = 12  # settings up to this many characters, like 1e-05, are not wrapped
X_LABELS = {"step": "steps", "time/wall_s": "seconds"}


def write_comparison(run_dirs: Sequence[Path], out: Path) -> Path:
    if len(run_dirs) > MAX_RUNS:
        raise UserError(f"{len(run_dirs)} runs: at most {MAX_RUNS} fit on one page; pass fewer runs")
    return write_page(out, render([load_run(run_dir) for run_dir in run_dirs], names_of(run_dirs)))


def names_of(run_dirs: Sequence[Path]) -> list[str]:
    """Return the folder names, with more of the path if two are equal."""
    parts = [path.resolve().parts for path in run_dirs]
    depth = next((n for n in range(1, 20) if len({part[-n:] for part in parts}) == len(parts)), 1)
    return ["/".join(part[-depth:]) for part in parts]


def render(runs: Sequence[RunData], names: Sequence[str]) -> str:
    """Return the HTML of the page."""
    head = headline(runs)
    top = list(dict.fromkeys(name for run in runs for name in top_names(run)))
    top_charts = [(head, "step"), (head, "time/wall_s")] if head else []
    top_charts += [(name, "step") for name in top if name != head]
    logged = dict.fromkeys(name for run in runs for name in run.logged)
    curved = [name for name in logged if (name, "step") not in top_charts and is_worth_a_curve(runs, name)]
    charts = "".join(chart_html(runs, name, across, LARGE) for name, across in top_charts)
    return page_html(
        f"{len(runs)} runs: {', '.join(names)}",
        [
            f"<h1>{len(runs)} runs compared</h1>",
            f'<p class="where">written {datetime.now():%Y-%m-%d %H:%M}</p>',
            runs_html(runs, names, head),
            f'<div class="charts wide">{charts}</div>',
            differences_html(runs, names),
            "<h2>Curves</h2>",
            *charts_html(curved, lambda name: chart_html(runs, name)),
            "<footer>Lines: centred moving average over a fifteenth of a run; short curves and the learning rate are "
            "not smoothed.</footer>",
        ],
    )


def headline(runs: Sequence[RunData]) -> str | None:
    """Return the evaluation metric that most runs have."""
    names = [name for name in EVAL_HEADLINES if any(len(run.values(name)) > 1 for run in runs)]
    return max(names, key=lambda name: sum(bool(run.values(name)) for run in runs), default=None)


def is_worth_a_curve(runs: Sequence[RunData], name: str) -> bool:
    return any(len(run.values(name)) > 1 and not is_constant(run, name) for run in runs)


def runs_html(runs: Sequence[RunData], names: Sequence[str], head: str | None) -> str:
    """Return the legend, with the main numbers of each run."""
    label = (head or "").removeprefix("eval/").removesuffix("/mean").replace("_", " ")
    columns = ["", "run", "method", "model", "steps", "wall time", "tokens per second", "peak GiB"]
    columns += [f"held-out {label}"] if head else []

    def cell(column: str, kind: str, value: str) -> str:
        return f'<td class="{kind}" data-label="{text(column)}">{value}</td>'  # narrow pages show "label value"

    cells = "".join(f"<th{' class=num' if n > 3 else ''}>{text(column)}</th>" for n, column in enumerate(columns))
    rows = []
    for i, (run, name) in enumerate(zip(runs, names, strict=True)):
        wall, speed, memory = (run.values(key) for key in ("time/wall_s", "perf/tokens_per_s", "mem/peak_gib"))
        seconds = wall[-1] if wall else sum(run.values("time/step_s"))
        cells_of_run = [
            f'<td><svg class="key" viewBox="0 0 22 10"><line class="{colour(i)}" x1="1" x2="21" y1="5" y2="5"/>'
            "</svg></td>",
            f'<td class="mono">{text(name)}{"" if run.finished else " (unfinished)"}</td>',
            cell("method", "", text(run.config.get("method", ""))),
            cell("model", "mono", text(run.config.get("model", ""))),
            cell("steps", "num", str(run.last_step)),
            cell("wall time", "num", text(duration(seconds))),
            cell("tokens per second", "num", number(sorted(speed)[len(speed) // 2]) if speed else ""),
            cell("peak GiB", "num", f"{max(memory):.2f}" if memory else ""),
        ]
        if head:
            values = shown_values(run, head)
            ends = " &rarr; ".join(values[:: len(values) - 1 or 1][:2])
            cells_of_run.append(cell(columns[-1], "num", ends))
        rows.append(f"<tr>{''.join(cells_of_run)}</tr>")
    return f'<div class="card scroll"><table class="plain runs"><tr>{cells}</tr>{"".join(rows)}</table></div>'


def chart_html(runs: Sequence[RunData], name: str, across: str = "step", size: tuple[int, int] = SMALL) -> str:
    """Draw one metric of all runs that logged it, over steps or seconds."""
    lines = []
    for i, run in enumerate(runs):
        # The evaluation before the first step has no time.
        records = [{across: 0, **record} if record["step"] == 0 else record for record in run.records]
        points = [
            (record[across], record[name])
            for record in records
            if all(isinstance(record.get(key), int | float) for key in (across, name))
        ]
        if points:
            lines.append((i, points))
    if not lines:
        return ""
    values = [value for _, points in lines for _, value in points]
    spread = max(values) - min(values)
    ends = ", ".join(precise(points[-1][1], spread) for _, points in lines)

    def draw(size: tuple[int, int]) -> str:
        return lines_svg(lines, f"{name} over {X_LABELS[across]}", size, smoothed=name not in EXACT)

    svg = draw(size)
    if size == LARGE:  # its text is too small on a narrow page
        svg = f'<div class="wide-only">{svg}</div><div class="narrow-only">{draw(SMALL)}</div>'
    return (
        f'<div class="card"><div class="chart-head"><span class="mono">{text(name)}</span>'
        f'<span class="tag">over {X_LABELS[across]}</span><span class="last">last {ends}</span></div>{svg}'
        f'<p class="definition">{text(definition(name))}</p></div>'
    )


def lines_svg(lines: Sequence[tuple[int, list[Point]]], label: str, size: tuple[int, int], *, smoothed: bool) -> str:
    """Draw (index of the run, points) pairs."""
    values = [value for _, points in lines for _, value in points]
    last = max(x for _, points in lines for x, _ in points)
    body, to_xy, _, _ = axes((min(values), max(values)), (0, last), size)
    for i, points in lines:
        curve = points
        if smoothed and len(points) >= SPARSE:
            curve = list(zip([x for x, _ in points], smooth([value for _, value in points]), strict=True))
        drawn = [*curve[: -1 : max(1, len(curve) // MAX_POINTS)], curve[-1]]
        body.append(_line(colour(i), [to_xy(*point) for point in drawn]))
        if len(points) < SPARSE:
            for x, y in (to_xy(*point) for point in points):
                body.append(f'<circle class="{colour(i)}" cx="{x:.1f}" cy="{y:.1f}" r="2"/>')
    return f'<svg viewBox="0 0 {size[0]} {size[1]}" role="img" aria-label="{escape(label)}">{"".join(body)}</svg>'


def colour(i: int) -> str:
    return f"run run-{i % COLOURS}" + (" again" if i >= COLOURS else "")


def differences_html(runs: Sequence[RunData], names: Sequence[str]) -> str:
    """Show the settings that differ between runs."""
    configs = [run.settings() for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config)
    different = [key for key in keys if key not in OF_A_RUN and len({config.get(key) for config in configs}) > 1]
    if not different:
        return '<h2>Settings that differ</h2><p class="soft">Only the folder.</p>'
    head = "<tr><th></th>" + "".join(f"<th>{text(name)}</th>" for name in names) + "</tr>"

    def cell(value: str) -> str:
        return f'<td class="mono{" short" if len(value) <= SHORT else ""}">{text(value)}</td>'

    rows = "".join(
        f'<tr><td class="mono">{text(key)}</td>'
        + "".join(cell(config.get(key, "no such setting")) for config in configs)
        + "</tr>"
        for key in different
    )
    return f'<h2>Settings that differ</h2><div class="card scroll"><table class="plain">{head}{rows}</table></div>'
