"""RUN/report.html, one self-contained page about a run: python -m trainer.report RUN

    write_report(Path("runs/grpo-20261115-093000"))

It reads only config.yaml, metrics.jsonl and samples.jsonl, so it works at any time, also for a run that is still going
or was killed. The page loads nothing and runs no script: curves are inline SVG, drawn without a library, with colours
from the style sheet that follow light and dark mode.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from data.command.config_file import load_config
from trainer.metrics.console import duration, number
from trainer.metrics.health import Episode, replay
from trainer.metrics.metrics import GLOSSARY, describe, read_jsonl

Point = tuple[float, float]
AREAS = (("reward", "Reward"), ("loss", "Loss"), ("policy", "Policy"), ("eval", "Evaluation"), ("rollout", "Rollout"),
         ("optim", "Optimizer"))  # fmt: skip
FOLDED_AREAS = (("perf", "Speed"), ("time", "Time"), ("mem", "Memory"), ("data", "Data"))
HEADLINES = ("reward/mean", "loss/nll", "loss/total")
EVAL_HEADLINES = ("eval/reward/mean", "eval/reward/accuracy", "eval/reward/auc", "eval/reward/macro_f1", "eval/nll")
LOWER_IS_BETTER = ("eval/nll", "eval/loss", "eval/reward/rejected")
NEITHER = ("eval/len_mean", "eval/rows")
HEALTHY = {"policy/entropy": (0.05, 0.5)}  # drawn as a band behind the curve
SAMPLES_PER_STEP = 4
MAX_TEXT = 4000  # characters of a sample's prompt or completion
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 24  # margins for the labels
MAX_POINTS = 300  # more than the pixels of a small chart: a longer run is drawn as the range of each stretch
MAX_SLICES = 48  # hover targets
SPARSE = 12  # with fewer points than this each gets a dot


# page ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunData:
    """The data of the page."""

    name: str
    config: dict[str, Any]
    records: list[dict[str, Any]]  # one per step, in order
    logged: set[str]  # every metric name in them
    samples: list[dict[str, Any]]
    finished: bool

    @property
    def last_step(self) -> int:
        return self.records[-1]["step"] if self.records else 0

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric, steps that did not log it left out."""
        pairs = [(r["step"], r[name]) for r in self.records if isinstance(r.get(name), int | float)]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def names(self, area: str) -> list[str]:
        """Metrics of an area that were logged, in the glossary's order."""
        found = [name for name in self.logged if name.startswith(f"{area}/")]
        texts = list(GLOSSARY.values())
        return sorted(found, key=lambda n: (texts.index(t) if (t := describe(n)) else len(texts), n))


def write_report(run_dir: Path) -> Path:
    """Write report.html into a run folder, atomically, and return its path."""
    run_dir = Path(run_dir)
    run = load_run(run_dir)
    path, temporary = run_dir / "report.html", run_dir / ".tmp-report.html"
    page = render(run).encode("utf-8", errors="replace")
    try:
        temporary.write_bytes(page)
        os.replace(temporary, path)
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be written ({error.strerror}); permit it, or copy the run elsewhere"
        ) from None
    return path


def load_run(run_dir: Path) -> RunData:
    if not (run_dir / "config.yaml").is_file():
        raise ValueError(f"{run_dir}: no config.yaml in it, so not a run; pass the folder that --output-dir named")
    config = load_config(run_dir / "config.yaml")
    by_step: dict[int, dict[str, Any]] = {}
    for record in read_jsonl(run_dir / "metrics.jsonl"):
        by_step.setdefault(record["step"], {}).update(record)
    records = [by_step[step] for step in sorted(by_step)]
    last_step, max_steps = (records[-1]["step"] if records else 0), config.get("max_steps")
    return RunData(
        name=run_dir.resolve().name,
        config=config,
        records=records,
        logged={name for record in records for name in record},
        samples=read_jsonl(run_dir / "samples.jsonl"),
        finished=(run_dir / "final").exists() or (max_steps is not None and last_step >= max_steps),
    )


def render(run: RunData) -> str:
    """The whole page."""
    _, episodes = replay(run.records)
    headline = next((name for name in HEADLINES if run.series(name)[0]), None)
    method, model = str(run.config.get("method", "run")), str(run.config.get("model", ""))
    parts = [
        f'<h1>{text(method)} <span class="model">{text(model)}</span>'
        + ("" if run.finished else '<span class="badge">unfinished</span>')
        + "</h1>",
        f'<p class="where">{text(run.name)}, written {datetime.now():%Y-%m-%d %H:%M}</p>',
        facts_html(run),
        '<div class="lead">',
        evaluation_html(run),
        chart_html(run, headline, width=560, height=236) if headline else "",
        "</div>",
        "<h2>Health</h2>",
        health_html(run, episodes),
        "<h2>Curves</h2>" if run.records else "",
        *(area_html(run, area, title, headline) for area, title in AREAS),
        folded_html(run),
        samples_html(run),
        "<h2>Config</h2>",
        config_html(run.config),
        "<footer>Light line: every step. Strong line: centred moving mean over a fifteenth of the run. "
        "All numbers are in metrics.jsonl.</footer>",
    ]
    style = (Path(__file__).parent / "report.css").read_text(encoding="utf-8")
    # the policy forbids scripts and the network outright, should an escape ever be missed
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(method)} {text(model)}: {text(run.name)}</title>\n<style>\n{style}</style></head>\n"
        "<body><main>\n" + "\n".join(part for part in parts if part) + "\n</main></body></html>\n"
    )


def text(value: object) -> str:
    """Any text made safe for the page: markup escaped, control characters written out."""
    shown = "".join(c if c.isprintable() or c in "\n\t " else repr(c)[1:-1] for c in str(value))
    return escape(shown)


# facts, evaluation, health ---------------------------------------------------------------------------------------


def facts_html(run: RunData) -> str:
    max_steps = run.config.get("max_steps")
    steps = (
        str(run.last_step) if run.finished or not max_steps else f"{run.last_step} <small>of {text(max_steps)}</small>"
    )
    wall = run.series("time/wall_s")[1]
    seconds = wall[-1] if wall else sum(run.series("time/step_s")[1])
    facts = [("Steps", steps), ("Wall time", text(duration(seconds)))]
    for label, name in (("Tokens", "data/tokens_total"), ("Epochs", "data/epoch"),
                        ("Tokens per second", "perf/tokens_per_s"), ("Peak memory", "mem/peak_gib")):  # fmt: skip
        values = run.series(name)[1]
        if not values:
            continue
        if name == "perf/tokens_per_s":
            shown = number(sorted(values)[len(values) // 2]) + " <small>median</small>"
        elif name == "mem/peak_gib":
            shown = f"{max(values):.2f} <small>GiB</small>"
        else:
            shown = number(values[-1])
        facts.append((label, shown))
    cells = "".join(f"<div><dt>{label}</dt><dd>{shown}</dd></div>" for label, shown in facts)
    return f'<dl class="facts card">{cells}</dl>'


def evaluation_html(run: RunData) -> str:
    """Before -> after on held-out rows; for an unfinished run, up to now."""
    names = [name for name in run.names("eval") if run.series(name)[1]]  # null throughout if no reward applied
    if not names:
        return (
            '<div class="card"><h3 style="margin-top:0">Held-out evaluation</h3>'
            '<p class="soft">None: the run had no --eval-data.</p></div>'
        )
    head = next((name for name in EVAL_HEADLINES if name in names), names[0])
    steps, values = run.series(head)
    label = head.removeprefix("eval/").removesuffix("/mean").replace("_", " ")
    until = "after" if run.finished else "latest"
    if len(steps) > 1:
        outcome = (
            f'<span class="from">{number(values[0])}</span> <span class="arrow">&rarr;</span> '
            f"{number(values[-1])} {change_html(head, values)}"
        )
        caption = f"{label}, step {steps[0]} \u2192 {steps[-1]}"
    else:
        outcome, caption = number(values[0]), f"{label} at step {steps[0]}, no later evaluation yet"
    rows = [
        f'<tr><th></th><th class="num">before</th><th class="num">{until}</th><th class="num">change</th></tr>',
    ]
    for name in names:
        _, own = run.series(name)
        if own:
            later = f"{number(own[-1])}</td><td class='num'>{change_html(name, own)}" if len(own) > 1 else "</td><td>"
            rows.append(
                f'<tr title="{text(describe(name) or "")}"><td class="mono">{text(name)}</td>'
                f'<td class="num">{number(own[0])}</td><td class="num">{later}</td></tr>'
            )
    return (
        '<div class="card"><h3 style="margin-top:0">Held-out evaluation</h3>'
        f'<p class="soft">{text(caption)}</p><p class="outcome">{outcome}</p>'
        f'<table class="plain">{"".join(rows)}</table></div>'
    )


def change_html(name: str, values: Sequence[float]) -> str:
    change = values[-1] - values[0]
    sign = "+" if change > 0 else "\u2212" if change < 0 else ""
    better = 0.0 if name in NEITHER else -change if name in LOWER_IS_BETTER else change
    colour = " good" if better > 0 else " bad" if better < 0 else ""
    return f'<span class="change{colour}">{sign}{number(abs(change))}</span>'


def health_html(run: RunData, episodes: Iterable[Episode]) -> str:
    parts = []
    for episode in episodes:
        span = f"step {episode.first_step}"
        if episode.last_step > episode.first_step:
            span = f"steps {episode.first_step} to {episode.last_step}, {episode.num_steps} of them"
        state = "at the end of the run" if run.finished else "now"
        when = f"{span}; {f'still so {state}' if episode.now else 'since over'}"
        classes = f"finding {'info' if episode.finding.level == 'info' else ''} {'' if episode.now else 'over'}"
        sentence = episode.finding.message
        parts.append(
            f'<div class="{" ".join(classes.split())}"><p>{text(sentence[:1].upper() + sentence[1:])}.</p>'
            f'<p class="when"><code>health/{text(episode.finding.name)}</code>: {when}</p></div>'
        )
    steps = run.series("optim/grad_norm")[0]
    short = f"No finding, but {len(steps)} steps are too few to judge."
    none = "No finding: every watched number stayed in its range." if len(steps) >= 20 else short
    return "\n".join(parts) or f'<p class="soft">{none}</p>'


# metrics by area -------------------------------------------------------------------------------------------------


def chart_html(run: RunData, name: str, width: int = 360, height: int = 170) -> str:
    steps, values = run.series(name)
    if not steps:
        return ""
    svg = curve_svg(
        steps,
        values,
        label=f"{name} over steps",
        step_range=(0, run.last_step),
        width=width,
        height=height,
        healthy=HEALTHY.get(name),
    )
    band = "" if name not in HEALTHY else " Shaded: healthy range {:g} to {:g}.".format(*HEALTHY[name])
    return (
        f'<div class="card"><div class="chart-head"><span class="mono">{text(name)}</span>'
        f'<span class="last">last {number(values[-1])}</span></div>{svg}'
        f'<p class="definition">{text(describe(name) or "")}{band}</p></div>'
    )


def area_charts(run: RunData, area: str, headline: str | None) -> str:
    names = [name for name in run.names(area) if name != headline]
    if area == "loss" and headline:  # supervised runs have one term, so the total would be the same curve again
        names = [name for name in names if run.series(name) != run.series(headline)]
    if area == "eval":  # two points are a table, not a curve
        names = [name for name in names if len(run.series(name)[0]) > 2]
    charts = "".join(chart_html(run, name) for name in names)
    return f'<div class="charts">{charts}</div>' if charts else ""


def area_html(run: RunData, area: str, title: str, headline: str | None) -> str:
    charts = area_charts(run, area, headline)
    return f"<h3>{title}</h3>{charts}" if charts else ""


def folded_html(run: RunData) -> str:
    parts = [area_html(run, area, title, None) for area, title in FOLDED_AREAS]
    body = "".join(parts)
    return f"<details><summary>Speed, time, memory and data</summary>{body}</details>" if body else ""


# samples and config ----------------------------------------------------------------------------------------------


def samples_html(run: RunData) -> str:
    steps = sorted({sample["step"] for sample in run.samples})
    if not steps:
        return ""
    parts = ["<h2>Samples</h2>"]
    for step in dict.fromkeys((steps[0], steps[-1])):
        own = [sample for sample in run.samples if sample["step"] == step]
        count = min(SAMPLES_PER_STEP, len(own))
        picked = [own[i * len(own) // count] for i in range(count)]  # spread over the step's groups
        rows = "".join(sample_row(sample) for sample in picked)
        parts.append(
            f'<h3>Step {step}</h3><div class="card"><table class="samples"><tr><th>prompt</th><th>completion</th>'
            f"<th>rewards</th><th>advantage</th></tr>{rows}</table></div>"
        )
    return "\n".join(parts)


def sample_row(sample: Mapping[str, Any]) -> str:
    prompt = sample.get("prompt", "")
    if not isinstance(prompt, str):  # a list of messages
        prompt = "\n".join(f"{message.get('role', '')}: {message.get('content', '')}" for message in prompt)
    scores = "".join(
        f"<div><span>{text(name)}</span>{'none' if value is None else number(value)}</div>"
        for name, value in (sample.get("rewards") or {}).items()
    )
    advantage = sample.get("advantage")
    return (
        f'<tr><td class="text" data-label="prompt"><pre>{text(shorten(prompt))}</pre></td>'
        f'<td class="text" data-label="completion"><pre>{text(shorten(str(sample.get("completion", ""))))}</pre></td>'
        f'<td class="scores" data-label="rewards">{scores}</td>'
        f'<td data-label="advantage">{"" if advantage is None else f"{advantage:+.2f}"}</td></tr>'
    )


def shorten(long: str) -> str:
    rest = len(long) - MAX_TEXT
    return long if rest <= 0 else f"{long[:MAX_TEXT]}\n[{rest} more characters in samples.jsonl]"


def config_html(config: Mapping[str, Any]) -> str:
    rows = "".join(f"<div><dt>{text(key)}</dt><dd>{text(value)}</dd></div>" for key, value in flatten(config))
    return f'<div class="card"><dl class="config mono">{rows}</dl></div>'


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        elif isinstance(value, list | tuple):
            yield f"{prefix}{key}", " ".join(str(item) for item in value) or "none"
        else:
            yield f"{prefix}{key}", "none" if value is None else str(value)


# curves as inline SVG --------------------------------------------------------------------------------------------


def curve_svg(
    steps: Sequence[int],
    values: Sequence[float],
    *,
    label: str,
    step_range: tuple[int, int] | None = None,
    width: int = 360,
    height: int = 170,
    healthy: tuple[float, float] | None = None,
) -> str:
    """One metric over steps: values as a light line, the smoothed curve as a strong one."""
    assert len(steps) == len(values) > 0, f"{len(steps)} steps, {len(values)} values"
    low, high, ticks = value_axis(min(values), max(values))
    first, last = step_range or (steps[0], steps[-1])
    last = max(last, first + 1)

    def place(step: float, value: float) -> Point:
        x = LEFT + (step - first) / (last - first) * (width - LEFT - RIGHT)
        return x, TOP + (high - value) / (high - low) * (height - TOP - BOTTOM)

    body = [_grid(place, ticks, first, last, width, height)]
    if healthy and healthy[1] > low and healthy[0] < high:
        top, bottom = place(first, min(healthy[1], high))[1], place(first, max(healthy[0], low))[1]
        body.append(f'<rect class="band" x="{LEFT}" y="{top:.1f}" width="{width - LEFT - RIGHT}" '
                    f'height="{bottom - top:.1f}"/>')  # fmt: skip
    smoothed = smooth(values)
    if len(values) < SPARSE:
        body.append(_line("smooth", [place(*point) for point in zip(steps, values, strict=True)]))
        for step, value in zip(steps, values, strict=True):
            x, y = place(step, value)
            body.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>')
    else:
        body.append(_line("raw", [place(*point) for point in outline(steps, values)]))
        strong = list(zip(steps, smoothed, strict=True))
        stride = max(1, len(strong) // MAX_POINTS)
        kept = [*strong[:-1:stride], strong[-1]]
        body.append(_line("smooth", [place(*point) for point in kept]))
    body.append(_slices(steps, values, smoothed, place, height))
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">' + "".join(body) + "</svg>"


def smooth(values: Sequence[float]) -> list[float]:
    """Centred moving mean over a fifteenth of the run, so that it does not lag; at the ends the window is cut."""
    half = len(values) // 30
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    bounds = [(max(0, i - half), min(len(values), i + half + 1)) for i in range(len(values))]
    return [(sums[end] - sums[start]) / (end - start) for start, end in bounds]


def outline(steps: Sequence[int], values: Sequence[float]) -> list[Point]:
    """All points, or for a long run the lowest and highest of each stretch, so that no spike is lost."""
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
    """Range and three to six round ticks; starts at zero when the values come near it."""
    if low > 0 and low < 0.6 * high:
        low = 0.0
    if high < 0 and high > 0.6 * low:
        high = 0.0
    if high <= low:
        spread = abs(high) * 0.1 or 1.0
        low, high = low - spread, high + spread
    tick = nice_step((high - low) / 3)
    low_tick, high_tick = math.floor(low / tick + 1e-9), math.ceil(high / tick - 1e-9)
    return low_tick * tick, high_tick * tick, [i * tick for i in range(low_tick, high_tick + 1)]


def nice_step(rough: float) -> float:
    """The largest of 1, 2, 2.5, 5 times a power of ten that is not above `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return max(factor for factor in (1.0, 2.0, 2.5, 5.0) if factor <= rough / power + 1e-9) * power


def tick_texts(ticks: Sequence[float]) -> list[str]:
    """As many decimals as the distance between ticks needs; 12.5k from ten thousand on, 2e-4 below a thousandth."""
    tick, largest = ticks[1] - ticks[0], max(map(abs, ticks))
    if largest < 1e-3:
        parts = [f"{value:.2e}".split("e") for value in ticks]
        return [f"{float(mantissa):g}e{int(power)}" if float(mantissa) else "0" for mantissa, power in parts]
    unit, suffix = (1e6, "M") if largest >= 1e6 else (1e3, "k") if largest >= 1e4 else (1.0, "")
    tick /= unit
    decimals = max(0, -math.floor(math.log10(tick) + 1e-9))
    if abs(tick * 10**decimals - round(tick * 10**decimals)) > 1e-6:  # steps of 2.5
        decimals += 1
    return [f"{value / unit:.{decimals}f}{suffix}" if value else "0" for value in ticks]


def _grid(place, ticks: list[float], first: int, last: int, width: int, height: int) -> str:
    parts = []
    for value, text in zip(ticks, tick_texts(ticks), strict=True):
        y = place(first, value)[1]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{text}</text>')
    stride = max(1, round(nice_step((last - first) / (width / 110))))
    marks = list(range(math.ceil(first / stride) * stride, last + 1, stride))
    for step, text in zip(marks, tick_texts(marks) if len(marks) > 1 else map(str, marks), strict=True):
        x = place(step, ticks[0])[0]
        anchor = "end" if x > width - RIGHT - 8 else "middle"
        parts.append(f'<text x="{x:.1f}" y="{height - 7}" text-anchor="{anchor}">{text}</text>')
    return "".join(parts)


def _line(name: str, points: Sequence[Point]) -> str:
    return f'<polyline class="{name}" points="' + " ".join(f"{x:.1f},{y:.1f}" for x, y in points) + '"/>'


def _slices(steps: Sequence[int], values: Sequence[float], smoothed: Sequence[float], place, height: int) -> str:
    """Invisible columns that show a tooltip, without any script."""
    count = min(MAX_SLICES, len(steps))
    picks = sorted({round(i * (len(steps) - 1) / max(1, count - 1)) for i in range(count)})
    middles = [place(steps[i], values[i])[0] for i in picks]
    parts = []
    for k, i in enumerate(picks):
        left = middles[k] - 4 if k == 0 else (middles[k - 1] + middles[k]) / 2
        right = middles[k] + 4 if k == len(picks) - 1 else (middles[k] + middles[k + 1]) / 2
        text = f"step {steps[i]}: {values[i]:.4g}"
        if len(values) >= SPARSE:
            text += f" (smoothed {smoothed[i]:.4g})"
        parts.append(
            f'<rect class="slice" x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" '
            f'height="{height - TOP - BOTTOM}"><title>{text}</title></rect>'
        )
    return "".join(parts)
