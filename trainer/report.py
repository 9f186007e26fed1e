"""Write RUN/report.html, one self-contained page about a run: python -m trainer.report RUN

It reads config.yaml, metrics.jsonl and samples.jsonl and nothing else, so it can be written at any time, also for a run
that is still going or was killed. The page loads nothing and runs no script.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from trainer.config.yaml import load_config
from trainer.console import duration, number
from trainer.curves import curve_svg
from trainer.health import Episode, replay
from trainer.metrics import GLOSSARY, describe, read_jsonl

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


@dataclass(frozen=True)
class RunData:
    """What the page is made of."""

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


# header ----------------------------------------------------------------------------------------------------------


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
    """Before -> after on held-out rows; what an unfinished run has of it."""
    names = [name for name in run.names("eval") if run.series(name)[1]]  # null throughout: no reward applied
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


# curves ----------------------------------------------------------------------------------------------------------


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


def main(argv: Sequence[str]) -> int:
    if not argv or any(word.startswith("-") for word in argv):
        print("usage: python -m trainer.report RUN [RUN ...]\n\nWrites RUN/report.html for each run folder.")
        return 0 if argv and argv[0] in ("-h", "--help") else 2
    try:
        for run_dir in argv:
            print(write_report(Path(run_dir)))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
