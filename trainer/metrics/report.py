"""Write RUN/report.html, a self-contained page about a run: python -m trainer.report RUN

    write_report(Path("runs/grpo-20261115-093000"))

Only files in the run folder are read, so this also works for running and killed runs. The page
loads nothing and runs no script. Curves are hand-written inline SVG: a plotting library's SVG would be ten times larger
and could not follow light and dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from data.command.config_file import Earlier, earlier_settings, flatten, load_config
from data.errors import UserError
from trainer.metrics.console import (
    EVAL_HEADLINES,
    NOT_SAMPLED,
    TIES,
    duration,
    eval_decoding,
    figure,
    number,
    shown_value,
    train_decoding,
)
from trainer.metrics.health import Episode, replay
from trainer.metrics.metrics import GLOSSARY, describe, read_jsonl
from trainer.metrics.page import details_html, page_html, text, write_page
from trainer.metrics.samples import samples_html

Point = tuple[float, float]
AREAS = ("reward", "loss", "policy", "value", "eval", "rollout", "optim")  # in this order, others after them
FOLDED_AREAS = ("perf", "time", "mem", "data")
# Shown at the top of the page: the first of these groups that the run logged.
TOP = (
    ("reward/cfm", "reward/mean", "reward/accuracy", "reward/step_accuracy", "reward/margin"),
    ("reward/chosen", "reward/rejected"),
    ("policy/reverse_kl", "policy/jsd"),
    ("loss/nll",),
    ("loss/total",),
)
LOWER_IS_BETTER = ("eval/nll", "eval/loss", "eval/reward/rejected", "eval/cfm", "eval/cfm_unbiased")
NEITHER = ("eval/len_mean", "eval/rows")
EXACT = ("optim/lr",)  # follows a schedule: nothing to smooth
HEALTHY = {"policy/entropy": (0.05, 0.5)}  # drawn as a shaded band
SMALL, TALL, LARGE = (360, 170), (360, 230), (560, 236)  # chart sizes
RIGHT, TOP_MARGIN, BOTTOM = 10, 10, 24  # margins; the left margin depends on the labels
CHARACTER = 6.4  # width of a digit in a label
MAX_POINTS = 300  # about the pixels of a small chart; longer runs are drawn as a range per stretch
MAX_SLICES = 48  # hover targets
SPARSE = 12  # with fewer points, each point gets a dot
SAME = 5e-7  # relative difference of float32 rounding
ROUNDING = 1e-5  # float32 log-probs of two implementations differ by less


# page ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunData:
    """The data of the page."""

    name: str
    config: dict[str, Any]
    defaults: Mapping[str, Any] | None  # the method's default settings; None if it could not be imported
    records: list[dict[str, Any]]  # one per step, in order
    samples: list[dict[str, Any]]
    finished: bool
    evaluations: list[dict[str, Any]] = field(default_factory=list)  # from python -m trainer.evaluate
    logged: list[str] = field(default_factory=list)  # all metric names, in glossary order
    earlier: Earlier = field(default_factory=dict)  # settings that a resume changed

    @property
    def last_step(self) -> int:
        return self.records[-1]["step"] if self.records else 0

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps that logged a metric, and its values."""
        pairs = [(r["step"], r[name]) for r in self.records if isinstance(r.get(name), int | float)]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def values(self, name: str) -> list[float]:
        return self.series(name)[1]

    def settings(self) -> dict[str, str]:
        """Return all settings as text; "0.001 until step 40, then 0.0005" if a resume changed one."""
        settings = dict(flatten(self.config))
        for key, values in self.earlier.items():
            parts = [f"{value} until step {step}" for step, value in values]
            settings[key] = ", ".join([*parts, f"then {settings.get(key, 'none')}"])
        return settings


def write_report(run_dir: Path, defaults: Mapping[str, Any] | None = None) -> Path:
    """Write report.html into a run folder, atomically, and return its path."""
    return write_page(Path(run_dir) / "report.html", render(load_run(Path(run_dir), defaults)))


def load_run(run_dir: Path, defaults: Mapping[str, Any] | None = None) -> RunData:
    if not (run_dir / "config.yaml").is_file():
        raise UserError(f"{run_dir}: not a run folder (no config.yaml); pass a run's --output-dir")
    config = load_config(run_dir / "config.yaml")
    by_step: dict[int, dict[str, Any]] = {}
    for record in read_jsonl(run_dir / "metrics.jsonl"):
        by_step.setdefault(record["step"], {}).update(record)
    records = [by_step[step] for step in sorted(by_step)]
    last_step, max_steps = (records[-1]["step"] if records else 0), config.get("max_steps")
    texts = list(GLOSSARY.values())
    return RunData(
        name=run_dir.resolve().name,
        config=config,
        defaults=defaults,
        records=records,
        samples=read_jsonl(run_dir / "samples.jsonl"),
        evaluations=read_jsonl(run_dir / "evaluations.jsonl"),
        earlier=earlier_settings(run_dir),
        finished=(run_dir / "final").exists() or (max_steps is not None and last_step >= max_steps),
        logged=sorted(
            {name for record in records for name in record} - {"step"},
            key=lambda name: (texts.index(line) if (line := describe(name)) else len(texts), name),
        ),
    )


def render(run: RunData) -> str:
    """Return the HTML of the page."""
    _, episodes = replay(run.records)
    method, model = str(run.config.get("method", "run")), str(run.config.get("model", ""))
    parts = [
        f'<h1>{text(method)} <span class="model">{text(model)}</span>'
        + ("" if run.finished else '<span class="badge">unfinished</span>')
        + "</h1>",
        f'<p class="where">{text(run.name)}, written {datetime.now():%Y-%m-%d %H:%M}</p>',
        resumes_html(run),
        facts_html(run),
        top_html(run),
        evaluations_html(run),
        "<h2>Health</h2>",
        health_html(run, episodes),
        samples_html(run.samples, run.config),
        curves_html(run, {f"health/{episode.finding.name}" for episode in episodes}),
        config_html(run),
        "<footer>Light line: every step. Strong line: centred moving average over a fifteenth of the run; the learning "
        "rate is not smoothed. "
        "All numbers are in metrics.jsonl.</footer>",
    ]
    return page_html(f"{method} {model}: {run.name}", parts)


# facts, evaluation, health ---------------------------------------------------------------------------------------


def resumes_html(run: RunData) -> str:
    """Show which settings a resume changed, and when; the section Config shows their values."""
    by_step: dict[int, list[str]] = {}
    for key, values in run.earlier.items():
        for step, _ in values:
            by_step.setdefault(step, []).append(key)
    changes = "; ".join(f"after step {step}: {', '.join(keys)}" for step, keys in sorted(by_step.items()))
    return f'<p class="where">Resumed with other settings {text(changes)}</p>' if changes else ""


def facts_html(run: RunData) -> str:
    max_steps = run.config.get("max_steps")
    steps = (
        str(run.last_step) if run.finished or not max_steps else f"{run.last_step} <small>of {text(max_steps)}</small>"
    )
    wall = run.values("time/wall_s")
    facts = [("Steps", steps), ("Wall time", text(duration(wall[-1] if wall else sum(run.values("time/step_s")))))]
    for label, name, show in (
        ("Tokens", "data/tokens_total", lambda values: number(values[-1])),
        ("Epochs", "data/epoch", lambda values: number(values[-1])),
        ("Tokens per second", "perf/tokens_per_s",
         lambda values: number(sorted(values)[len(values) // 2]) + " <small>median</small>"),
        ("Peak memory", "mem/peak_gib", lambda values: f"{max(values):.2f} <small>GiB</small>"),
    ):  # fmt: skip
        if values := run.values(name):
            facts.append((label, show(values)))
    cells = "".join(f"<div><dt>{label}</dt><dd>{shown}</dd></div>" for label, shown in facts)
    return f'<dl class="facts card">{cells}</dl>'


def top_names(run: RunData) -> list[str]:
    logged = ([name for name in group if run.values(name)] for group in TOP)
    return next((names for names in logged if names), [])


def top_html(run: RunData) -> str:
    """Show the held-out evaluation and the method's most important curves."""
    names = top_names(run)
    if len(names) == 1:  # drawn twice, because the labels of a shrunk chart are unreadable
        charts = chart_html(run, names[0], LARGE, "wide-only") + chart_html(run, names[0], SMALL, "narrow-only")
    else:
        charts = "".join(chart_html(run, name, TALL) for name in names)
    kind = "lead-2" if len(names) == 1 else "charts"
    return f'<div class="lead {kind}">{evaluation_html(run)}{charts}</div>'


def evaluation_html(run: RunData) -> str:
    """Show held-out metrics before and after training, or up to now for an unfinished run."""
    names = [name for name in run.logged if name.startswith("eval/") and run.values(name)]
    if not names:
        empty = '<p class="soft">None: the run has no --eval-data.</p>'
        return f'<div class="card"><h3>Held-out evaluation</h3>{empty}</div>'
    head = next((name for name in EVAL_HEADLINES if name in names), names[0])
    steps, values = run.series(head)
    label = head.removeprefix("eval/").removesuffix("/mean").replace("_", " ")
    if len(steps) > 1:
        outcome = (
            f'<span class="from">{shown_values(run, head)[0]}</span> <span class="arrow">&rarr;</span> '
            f"{number(values[-1])} {change_html(run, head)}"
        )
        caption = f"{label}, step {steps[0]} \u2192 {steps[-1]}"
    else:
        outcome, caption = shown_values(run, head)[0], f"{label} at step {steps[0]}, no later evaluation yet"
    until = "after" if run.finished else "latest"
    decoding = eval_decoding(run.config, names, run.earlier)
    rows = [f'<tr><th></th><th class="num">before</th><th class="num">{until}</th><th class="num">change</th></tr>']
    for name in names:
        if name == "eval/rows" and is_constant(run, name):
            caption += f", {run.values(name)[0]:.0f} rows"
            continue
        shown, later = shown_values(run, name), "</td><td>"
        if len(shown) > 1:
            later = f"{shown[-1]}</td><td class='num'>{change_html(run, name)}"
        given = tag_html("on given answers") if decoding and name in NOT_SAMPLED else ""
        rows.append(
            f'<tr title="{text(f"{name}: {definition(name)}")}">'
            f'<td class="mono">{text(name.removeprefix("eval/"))}{given}</td>'
            f'<td class="num">{shown[0]}</td><td class="num">{later}</td></tr>'
        )
    return (
        f'<div class="card"><h3>Held-out evaluation{tag_html(decoding)}</h3>'
        f'<p class="soft">{text(caption)}</p><p class="outcome">{outcome}</p>'
        f'<table class="plain">{"".join(rows)}</table></div>'
    )


def evaluations_html(run: RunData) -> str:
    """Show the results of python -m trainer.evaluate, one row per number."""
    rows = "".join(
        f'<tr><td class="soft">{text(str(record.get("time", ""))[:16].replace("T", " "))}</td>'
        f'<td class="mono">{text(record.get("tasks") or " ".join(record.get("data", [])))}'
        f"{tag_html(conditions(run, record))}</td>"
        f'<td class="mono">{text(name)}</td><td class="num">{figure(value)}</td></tr>'
        for record in run.evaluations
        for name, value in (record.get("results") or {}).items()
        if isinstance(value, int | float)
    )
    head = '<tr><th>when (UTC)</th><th>on</th><th>metric</th><th class="num">value</th></tr>'
    table = f'<div class="card"><table class="plain">{head}{rows}</table></div>'
    return f"<h2>Evaluations after training</h2>{table}" if rows else ""


def conditions(run: RunData, record: Mapping[str, Any]) -> str:
    """Return what distinguishes an evaluation from others on the same rows: "step 20, temperature 0.6, 4 each"."""
    step, shots, limit = (record.get(name) for name in ("step", "num_fewshot", "limit"))
    parts = [
        f"step {step}" if step != run.last_step else "",
        record.get("decoding") or "",
        f"{shots}-shot" if shots is not None else "",
        f"first {limit}" if limit is not None else "",
    ]
    return ", ".join(str(part) for part in parts if part)


def tag_html(words: str) -> str:
    return f' <span class="tag">{text(words)}</span>' if words else ""


def shown_values(run: RunData, name: str) -> list[str]:
    return [shown_value(record, name) for record in run.records if isinstance(record.get(name), int | float)]


def change_html(run: RunData, name: str) -> str:
    values = run.values(name)
    if shown_values(run, name)[0] == TIES:  # no number to compare with
        return ""
    change = values[-1] - values[0]
    sign = "+" if change > 0 else "\u2212" if change < 0 else ""
    unknown = name in NEITHER or name.startswith("eval/log/") or describe(name) is None
    better = 0.0 if unknown else -change if name in LOWER_IS_BETTER else change
    colour = " good" if better > 0 else " bad" if better < 0 else ""
    return f'<span class="change{colour}">{sign}{number(abs(change))}</span>'


def health_html(run: RunData, episodes: Iterable[Episode]) -> str:
    parts = []
    for episode in episodes:
        span = f"step {episode.first_step}"
        if episode.last_step > episode.first_step:
            span = f"{episode.num_steps} steps from {episode.first_step} to {episode.last_step}"
        state = "at the end of the run" if run.finished else "now"
        when = f"{span}; {f'still active {state}' if episode.now else 'no longer active'}"
        classes = f"finding {'info' if episode.finding.level == 'info' else ''} {'' if episode.now else 'over'}"
        sentence = episode.finding.message
        parts.append(
            f'<div class="{" ".join(classes.split())}"><p>{text(sentence[:1].upper() + sentence[1:])}.</p>'
            f'<p class="when"><code>health/{text(episode.finding.name)}</code>: {when}</p></div>'
        )
    num_steps = len(run.values("optim/grad_norm"))
    short = f"No findings, but {num_steps} steps are too few to tell."
    none = "No findings: all monitored metrics stayed within their range." if num_steps >= 20 else short
    return "\n".join(parts) or f'<p class="soft">{none}</p>'


# metrics by area -------------------------------------------------------------------------------------------------


def curves_html(run: RunData, findings: set[str]) -> str:
    """Show every metric that is not elsewhere on the page: a curve, or a row in the table of constants."""
    elsewhere = {*top_names(run), *findings, *names_in_table_only(run)}
    names = [name for name in run.logged if name not in elsewhere]
    flat = {name: shown for name in names if (shown := flat_value(run, name))}
    curved = [name for name in names if name not in flat]
    rows = "".join(
        f'<tr><td class="mono">{text(name)}</td><td class="num">{shown}</td>'
        f'<td class="soft">{text(definition(name))}</td></tr>'
        for name, shown in flat.items()
    )
    table = f'<div class="card"><table class="plain constants">{rows}</table></div>' if rows else ""
    parts = [
        *charts_html(curved, lambda name: chart_html(run, name)),
        details_html(f"{len(flat)} metrics that did not change or repeat another", table),
    ]
    return "<h2>Curves</h2>" + "\n".join(part for part in parts if part) if any(parts) else ""


def charts_html(names: Sequence[str], chart: Callable[[str], str]) -> tuple[str, str]:
    """Return a grid of charts in the order of AREAS, and a folded one. A grid per area would have half-empty rows."""

    def area(name: str) -> str:
        return name.partition("/")[0]

    def grid(names: Iterable[str]) -> str:
        charts = "".join(map(chart, names))
        return f'<div class="charts">{charts}</div>' if charts else ""

    order = [*AREAS, *(area(name) for name in names if area(name) not in AREAS)]
    ordered = sorted(names, key=lambda name: order.index(area(name)))
    folded = grid(name for name in ordered if area(name) in FOLDED_AREAS)
    shown = grid(name for name in ordered if area(name) not in FOLDED_AREAS)
    return shown, details_html("Speed, time, memory and data", folded)


def names_in_table_only(run: RunData) -> set[str]:
    """Return the evaluation metrics without a curve: the table at the top shows all of their values."""
    evaluated = [name for name in run.logged if name.startswith("eval/") and run.values(name)]
    return {name for name in evaluated if len(run.values(name)) < 3 or is_constant(run, name)}


def is_constant(run: RunData, name: str) -> bool:
    values = run.values(name)
    return max(values) - min(values) <= SAME * max(map(abs, values))


def flat_value(run: RunData, name: str) -> str:
    """Return the value in the table of constants, or "" for a metric that needs a curve."""
    values = run.values(name)
    if not values:
        return "never a finite number"
    if is_constant(run, name):
        return f"{values[0]:.7g}"
    if name.startswith("policy/behaviour_"):  # an in-process engine differs from the trainer only by rounding
        for ideal in (0, 1):
            if all(abs(value - ideal) < ROUNDING for value in values):
                return f"{ideal} up to rounding"
    earlier = (*top_names(run), *run.logged[: run.logged.index(name)])
    twin = next((other for other in earlier if repeats(run, other, name)), None)
    return f"same as {text(twin)}" if twin else ""


def repeats(run: RunData, first: str, second: str) -> bool:
    """Return whether two metrics of an area have the same curve, like a total with a single term."""
    (steps, values), (other_steps, others) = run.series(first), run.series(second)
    if first.partition("/")[0] != second.partition("/")[0] or steps != other_steps:
        return False
    limit = min(10 * SAME * max(map(abs, values)), 1e-3 * (max(values) - min(values)))
    return all(abs(a - b) <= limit for a, b in zip(values, others, strict=True))


def definition(name: str) -> str:
    return describe(name) or "Logged by custom code."


def chart_html(run: RunData, name: str, size: tuple[int, int] = SMALL, kind: str = "") -> str:
    steps, values = run.series(name)
    svg = curve_svg(steps, values, label=f"{name} over steps", step_range=(0, run.last_step), size=size,
                    healthy=HEALTHY.get(name), smoothed=name not in EXACT)  # fmt: skip
    band = "" if name not in HEALTHY else " Shaded: healthy range {:g} to {:g}.".format(*HEALTHY[name])
    sampled = tag_html(train_decoding(run.config, run.earlier)) if name == "reward/mean" else ""
    return (
        f'<div class="card {kind}"><div class="chart-head"><span class="mono">{text(name)}</span>{sampled}'
        f'<span class="last">last {precise(values[-1], max(values) - min(values))}</span></div>{svg}'
        f'<p class="definition">{text(definition(name))}{band}</p></div>'
    )


def precise(value: float, spread: float) -> str:
    """Format with enough digits to distinguish the value from others of its curve."""
    digits = 2 + math.ceil(math.log10(abs(value) / spread)) if spread and value else 0
    return f"{value:#.{min(digits, 12)}g}".rstrip(".") if digits > 3 else number(value)


# config ------------------------------------------------------------------------------------------------------------


def config_html(run: RunData) -> str:
    """Show the settings that differ from the method's defaults, then all settings, folded."""
    settings = run.settings()
    all_settings = settings_html((key, value, "") for key, value in settings.items())
    if run.defaults is None:
        return f"<h2>Config</h2>{all_settings}"
    defaults = dict(flatten(run.defaults))
    changed = [(key, value, defaults.get(key, "")) for key, value in settings.items()
               if key != "method" and defaults.get(key) != value]  # fmt: skip
    unchanged = '<p class="soft">Every setting has its default.</p>'
    return (
        "<h2>Config</h2><h3>Different from the defaults</h3>"
        + (settings_html(changed) if changed else unchanged)
        + details_html(f"All {len(settings)} settings", all_settings)
    )


def settings_html(rows: Iterable[tuple[str, str, str]]) -> str:
    cells = "".join(
        f"<div><dt>{text(key)}</dt><dd>{text(value)}"
        + (f' <span class="default">default {text(default)}</span>' if default else "")
        + "</dd></div>"
        for key, value, default in rows
    )
    return f'<div class="card"><dl class="config mono">{cells}</dl></div>'


# curves as inline SVG --------------------------------------------------------------------------------------------


def curve_svg(
    steps: Sequence[int],
    values: Sequence[float],
    *,
    label: str,
    step_range: tuple[int, int] | None = None,
    size: tuple[int, int] = SMALL,
    healthy: tuple[float, float] | None = None,
    smoothed: bool = True,
) -> str:
    """Draw one metric over steps: a light line for the values, a strong line for the smoothed curve, if any."""
    assert len(steps) == len(values) > 0, f"{len(steps)} steps, {len(values)} values"
    width, height = size
    first = (step_range or steps)[0]
    body, to_xy, left, (low, high) = axes((min(values), max(values)), step_range or (steps[0], steps[-1]), size)
    if healthy and healthy[1] > low and healthy[0] < high:
        top, bottom = to_xy(first, min(healthy[1], high))[1], to_xy(first, max(healthy[0], low))[1]
        body.append(f'<rect class="band" x="{left:.1f}" y="{top:.1f}" width="{width - left - RIGHT:.1f}" '
                    f'height="{bottom - top:.1f}"/>')  # fmt: skip
    average = smooth(values) if smoothed and len(values) >= SPARSE else None
    if len(values) < SPARSE:
        points = [to_xy(*point) for point in zip(steps, values, strict=True)]
        body.append(_line("smooth", points))
        body += [f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in points]
    elif average is None:
        body.append(_line("smooth", [to_xy(*point) for point in outline(steps, values)]))
    else:
        body.append(_line("raw", [to_xy(*point) for point in outline(steps, values)]))
        strong = list(zip(steps, average, strict=True))
        kept = [*strong[: -1 : max(1, len(strong) // MAX_POINTS)], strong[-1]]
        body.append(_line("smooth", [to_xy(*point) for point in kept]))
    body.append(_slices(steps, values, average, to_xy, height))
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">' + "".join(body) + "</svg>"


def axes(
    values: tuple[float, float], across: tuple[float, float], size: tuple[int, int]
) -> tuple[list[str], Callable[[float, float], Point], float, tuple[float, float]]:
    """Return the SVG of grid and labels, the map from (step, value) to (x, y), the left edge, and the value range."""
    width, height = size
    low, high, ticks = value_axis(*values)
    labels = tick_texts(ticks)
    left = 14 + CHARACTER * max(map(len, labels))
    first, last = across[0], max(across[1], across[0] + 1)

    def to_xy(step: float, value: float) -> Point:
        x = left + (step - first) / (last - first) * (width - left - RIGHT)
        return x, TOP_MARGIN + (high - value) / (high - low) * (height - TOP_MARGIN - BOTTOM)

    body = []
    for value, shown in zip(ticks, labels, strict=True):
        y = to_xy(first, value)[1]
        body.append(f'<line class="grid" x1="{left:.1f}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        body.append(f'<text x="{left - 6:.1f}" y="{y + 3.5:.1f}" text-anchor="end">{shown}</text>')
    stride = max(1, round(nice_step((last - first) / (width / 110))))
    marks = list(range(math.ceil(first / stride) * stride, math.floor(last) + 1, stride))
    for step, shown in zip(marks, tick_texts(marks) if len(marks) > 1 else map(str, marks), strict=True):
        x = to_xy(step, low)[0]
        anchor = "end" if x + CHARACTER * len(shown) / 2 > width else "middle"
        body.append(f'<text x="{x:.1f}" y="{height - 7}" text-anchor="{anchor}">{shown}</text>')
    return body, to_xy, left, (low, high)


def smooth(values: Sequence[float]) -> list[float]:
    """Return a moving average over a fifteenth of the run, centred to avoid lag; the window shrinks at the ends."""
    half = len(values) // 30
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    bounds = [(max(0, i - half), min(len(values), i + half + 1)) for i in range(len(values))]
    return [(sums[end] - sums[start]) / (end - start) for start, end in bounds]


def outline(steps: Sequence[int], values: Sequence[float]) -> list[Point]:
    """Return all points or, for a long run, the minimum and maximum of each stretch, so that no spike is lost."""
    points = list(zip(steps, values, strict=True))
    if len(points) <= MAX_POINTS:
        return points
    num_stretches = MAX_POINTS // 2
    kept = []
    for i in range(num_stretches):
        stretch = points[i * len(points) // num_stretches : (i + 1) * len(points) // num_stretches]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept


def value_axis(low: float, high: float) -> tuple[float, float, list[float]]:
    """Return the range and three to six round ticks; the range starts at zero if the values come near it."""
    if low > 0 and low < 0.6 * high:
        low = 0.0
    if high < 0 and high > 0.6 * low:
        high = 0.0
    if high - low <= SAME * max(abs(low), abs(high)):
        spread = abs(high) * 0.1 or 1.0
        low, high = low - spread, high + spread
    tick = nice_step((high - low) / 3)
    low_tick, high_tick = math.floor(low / tick + 1e-9), math.ceil(high / tick - 1e-9)
    return low_tick * tick, high_tick * tick, [i * tick for i in range(low_tick, high_tick + 1)]


def nice_step(rough: float) -> float:
    """Return the largest number up to `rough` that is 1, 2, 2.5 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return max(factor for factor in (1.0, 2.0, 2.5, 5.0) if factor <= rough / power + 1e-9) * power


def tick_texts(ticks: Sequence[float]) -> list[str]:
    """Format ticks with enough decimals to distinguish them: 12.5k from 10,000 on, 2e-4 below 0.001, 2e9 from 1e9."""
    tick, largest = ticks[1] - ticks[0], max(map(abs, ticks))
    if 1e-3 <= largest < 1e9:
        unit, suffix = (1e6, "M") if largest >= 1e6 else (1e3, "k") if largest >= 1e4 else (1.0, "")
    else:
        power = math.floor(math.log10(largest) + 1e-9)
        unit, suffix = 10.0**power, f"e{power}"
    tick /= unit
    decimals = max(0, -math.floor(math.log10(tick) + 1e-9))
    if abs(tick * 10**decimals - round(tick * 10**decimals)) > 1e-6:  # steps of 2.5
        decimals += 1
    return [f"{value / unit:.{decimals}f}{suffix}" if value else "0" for value in ticks]


def _line(name: str, points: Sequence[Point]) -> str:
    return f'<polyline class="{name}" points="' + " ".join(f"{x:.1f},{y:.1f}" for x, y in points) + '"/>'


def _slices(steps: Sequence[int], values: Sequence[float], average: Sequence[float] | None, to_xy, height: int) -> str:
    """Return invisible columns with tooltips, which need no script."""
    count = min(MAX_SLICES, len(steps))
    picks = sorted({round(i * (len(steps) - 1) / max(1, count - 1)) for i in range(count)})
    middles = [to_xy(steps[i], values[i])[0] for i in picks]
    spread = max(values) - min(values)
    parts = []
    for k, i in enumerate(picks):
        left = middles[k] - 4 if k == 0 else (middles[k - 1] + middles[k]) / 2
        right = middles[k] + 4 if k == len(picks) - 1 else (middles[k] + middles[k + 1]) / 2
        shown = f"step {steps[i]}: {precise(values[i], spread)}"
        if average is not None:
            shown += f" (smoothed {precise(average[i], spread)})"
        parts.append(
            f'<rect class="slice" x="{left:.1f}" y="{TOP_MARGIN}" width="{right - left:.1f}" '
            f'height="{height - TOP_MARGIN - BOTTOM}"><title>{shown}</title></rect>'
        )
    return "".join(parts)
