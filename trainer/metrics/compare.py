"""One page with the curves of several runs over each other: python -m trainer.report RUN RUN [--out PAGE.html]

The runs in a table, a chart for each metric that changed in one of them, and the settings in which they differ. Like a
run's own page (report.py) it loads nothing and runs no script.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from html import escape
from pathlib import Path

from data.errors import UserError
from trainer.metrics.console import EVAL_HEADLINES, duration, number
from trainer.metrics.report import (
    AREAS,
    FOLDED_AREAS,
    LARGE,
    MAX_POINTS,
    SMALL,
    SPARSE,
    Point,
    RunData,
    _line,
    axes,
    definition,
    details_html,
    flatten,
    is_constant,
    load_run,
    page_html,
    precise,
    smooth,
    text,
    top_names,
    write_page,
)

COLOURS = 8  # of report.css; further runs repeat them with a dashed line
MAX_RUNS = 24  # more lines than this are no picture
OF_A_RUN = {"output_dir", "run_id", "resume", "overwrite_output_dir"}  # settings that always differ
SHORT = 12  # characters of a setting that stay on one line, as 1e-05
X_LABELS = {"step": "steps", "time/wall_s": "seconds"}


def write_comparison(run_dirs: Sequence[Path], out: Path) -> Path:
    if len(run_dirs) > MAX_RUNS:
        raise UserError(f"{len(run_dirs)} runs: at most {MAX_RUNS} fit on one page; name fewer")
    return write_page(out, render([load_run(run_dir) for run_dir in run_dirs], names_of(run_dirs)))


def names_of(run_dirs: Sequence[Path]) -> list[str]:
    """Folder names; with more of the path where two are the same."""
    parts = [path.resolve().parts for path in run_dirs]
    depth = next((n for n in range(1, 20) if len({part[-n:] for part in parts}) == len(parts)), 1)
    return ["/".join(part[-depth:]) for part in parts]


def render(runs: Sequence[RunData], names: Sequence[str]) -> str:
    """The whole page."""
    head = headline(runs)
    top = list(dict.fromkeys(name for run in runs for name in top_names(run)))
    lead = [(head, "step"), (head, "time/wall_s")] if head else []
    lead += [(name, "step") for name in top if name != head]
    logged = dict.fromkeys(name for run in runs for name in run.logged)
    rest = [name for name in logged if (name, "step") not in lead and is_worth_a_curve(runs, name)]
    known = {**AREAS, **FOLDED_AREAS}

    def section(title: str, names_of_area: list[str]) -> str:
        charts = "".join(chart_html(runs, name) for name in names_of_area)
        return f'<h3>{title}</h3><div class="charts">{charts}</div>' if charts else ""

    def of(title: str) -> list[str]:
        return [name for name in rest if known.get(name.partition("/")[0], "Other metrics") == title]

    charts = "".join(chart_html(runs, name, across, LARGE) for name, across in lead)
    return page_html(
        f"{len(runs)} runs: {', '.join(names)}",
        [
            f"<h1>{len(runs)} runs compared</h1>",
            f'<p class="where">written {datetime.now():%Y-%m-%d %H:%M}</p>',
            runs_html(runs, names, head),
            f'<div class="charts wide">{charts}</div>',
            differences_html(runs, names),
            "<h2>Curves</h2>",
            *(section(title, of(title)) for title in (*AREAS.values(), "Other metrics")),
            details_html("Speed, time, memory and data", "".join(section(t, of(t)) for t in FOLDED_AREAS.values())),
            "<footer>Lines: centred moving mean over a fifteenth of a run; few points are drawn as they are.</footer>",
        ],
    )


def headline(runs: Sequence[RunData]) -> str | None:
    """The evaluation that most of the runs have."""
    names = [name for name in EVAL_HEADLINES if any(len(run.values(name)) > 1 for run in runs)]
    return max(names, key=lambda name: sum(bool(run.values(name)) for run in runs), default=None)


def is_worth_a_curve(runs: Sequence[RunData], name: str) -> bool:
    return any(len(run.values(name)) > 1 and not is_constant(run, name) for run in runs)


def runs_html(runs: Sequence[RunData], names: Sequence[str], head: str | None) -> str:
    """The legend, with the numbers people compare first."""
    label = (head or "").removeprefix("eval/").removesuffix("/mean").replace("_", " ")
    columns = ["", "run", "method", "model", "steps", "wall time", "tokens per second", "peak GiB"]
    columns += [f"held-out {label}"] if head else []

    def cell(column: str, kind: str, value: str) -> str:
        return f'<td class="{kind}" data-label="{text(column)}">{value}</td>'  # a narrow page shows it as "label value"

    cells = "".join(f"<th{' class=num' if n > 3 else ''}>{text(column)}</th>" for n, column in enumerate(columns))
    rows = []
    for place, (run, name) in enumerate(zip(runs, names, strict=True)):
        wall, speed, memory = (run.values(key) for key in ("time/wall_s", "perf/tokens_per_s", "mem/peak_gib"))
        seconds = wall[-1] if wall else sum(run.values("time/step_s"))
        own = [
            f'<td><svg class="key" viewBox="0 0 22 10"><line class="{colour(place)}" x1="1" x2="21" y1="5" y2="5"/>'
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
            values = run.values(head)
            own.append(cell(columns[-1], "num", " &rarr; ".join(map(number, values[:: len(values) - 1 or 1][:2]))))
        rows.append(f"<tr>{''.join(own)}</tr>")
    return f'<div class="card scroll"><table class="plain runs"><tr>{cells}</tr>{"".join(rows)}</table></div>'


def chart_html(runs: Sequence[RunData], name: str, across: str = "step", size: tuple[int, int] = SMALL) -> str:
    """One metric of all runs that logged it, over steps or over seconds."""
    lines = []
    for place, run in enumerate(runs):
        # The evaluation before the first step has no time of its own.
        records = [{across: 0, **record} if record["step"] == 0 else record for record in run.records]
        points = [
            (record[across], record[name])
            for record in records
            if all(isinstance(record.get(key), int | float) for key in (across, name))
        ]
        if points:
            lines.append((place, points))
    if not lines:
        return ""
    values = [value for _, points in lines for _, value in points]
    spread = max(values) - min(values)
    ends = ", ".join(precise(points[-1][1], spread) for _, points in lines)
    label = f"{name} over {X_LABELS[across]}"
    svg = lines_svg(lines, label, size)
    if size == LARGE:  # whose text would be too small on a narrow page
        svg = f'<div class="wide-only">{svg}</div><div class="narrow-only">{lines_svg(lines, label, SMALL)}</div>'
    return (
        f'<div class="card"><div class="chart-head"><span class="mono">{text(name)}</span>'
        f'<span class="tag">over {X_LABELS[across]}</span><span class="last">last {ends}</span></div>{svg}'
        f'<p class="definition">{text(definition(name))}</p></div>'
    )


def lines_svg(lines: Sequence[tuple[int, list[Point]]], label: str, size: tuple[int, int]) -> str:
    """The points of each run, by its place among the runs."""
    values = [value for _, points in lines for _, value in points]
    last = max(x for _, points in lines for x, _ in points)
    body, place_of, _, _ = axes((min(values), max(values)), (0, last), size)
    for place, points in lines:
        smoothed = smooth([value for _, value in points]) if len(points) >= SPARSE else [v for _, v in points]
        drawn = list(zip([x for x, _ in points], smoothed, strict=True))
        kept = [*drawn[: -1 : max(1, len(drawn) // MAX_POINTS)], drawn[-1]]
        body.append(_line(colour(place), [place_of(*point) for point in kept]))
        if len(points) < SPARSE:
            for x, y in (place_of(*point) for point in points):
                body.append(f'<circle class="{colour(place)}" cx="{x:.1f}" cy="{y:.1f}" r="2"/>')
    return f'<svg viewBox="0 0 {size[0]} {size[1]}" role="img" aria-label="{escape(label)}">{"".join(body)}</svg>'


def colour(place: int) -> str:
    return f"run run-{place % COLOURS}" + (" again" if place >= COLOURS else "")


def differences_html(runs: Sequence[RunData], names: Sequence[str]) -> str:
    """Settings that are not the same in all runs."""
    settings = [dict(flatten(run.config)) for run in runs]
    keys = dict.fromkeys(key for own in settings for key in own)
    different = [key for key in keys if key not in OF_A_RUN and len({own.get(key) for own in settings}) > 1]
    if not different:
        return '<h2>Settings that differ</h2><p class="soft">None, apart from the folder.</p>'
    head = "<tr><th></th>" + "".join(f"<th>{text(name)}</th>" for name in names) + "</tr>"

    def cell(value: str) -> str:
        return f'<td class="mono{" short" if len(value) <= SHORT else ""}">{text(value)}</td>'

    rows = "".join(
        f'<tr><td class="mono">{text(key)}</td>'
        + "".join(cell(own.get(key, "no such setting")) for own in settings)
        + "</tr>"
        for key in different
    )
    return f'<h2>Settings that differ</h2><div class="card scroll"><table class="plain">{head}{rows}</table></div>'
