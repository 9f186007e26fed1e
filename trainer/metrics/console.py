"""Console output: a live display on a terminal, one live figure in a notebook, a line per logged step elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from trainer.metrics.health import Finding

if TYPE_CHECKING:
    from rich.console import RenderableType

    from data.command.config_file import Earlier

# (label, metric) of the numbers shown, if the method logs them
NUMBERS = (
    ("reward", "reward/mean"),
    ("accuracy", "reward/accuracy"),
    ("accuracy", "reward/step_accuracy"),
    ("kl", "policy/reverse_kl"),
    ("jsd", "policy/jsd"),
    ("margin", "reward/margin"),
    ("chosen", "reward/chosen"),
    ("rejected", "reward/rejected"),
    ("loss", "loss/total"),
    ("entropy", "policy/entropy"),
    ("length", "rollout/len_mean"),
    ("grad norm", "optim/grad_norm"),
    ("tokens/s", "perf/tokens_per_s"),
)
REPLACED_BY = {  # label: hidden if one of these metrics is logged, which is more telling
    "loss": ("reward/mean",),  # the policy loss is near zero at every step by construction
    "chosen": ("reward/margin", "reward/mean"),
    "rejected": ("reward/margin", "reward/mean"),
}
DROPPED_FIRST = ("so far", "tokens/s", "grad norm", "length", "entropy")  # if the terminal is too narrow
EVAL_HEADLINES = (  # the first that a run logs is its main number
    "eval/cfm", "eval/reward/mean", "eval/reward/accuracy", "eval/reward/auc", "eval/reward/macro_f1", "eval/nll",
)  # fmt: skip
NOT_SAMPLED = ("eval/nll", "eval/loss")  # computed on given answers, whatever the decoding
TIES = "all ties"
PACE_STEPS = 30  # recent steps that the estimate of the time left is based on
SAMPLE_SECONDS_LIVE = 3.0  # minimum time between samples, to read them
SAMPLE_SECONDS_PLAIN = 60.0
SPARKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


class Console:
    """Progress display on `stream` (default: standard output); every call is cheap."""

    def __init__(
        self,
        total_steps: int,
        start_step: int,
        title: str,
        logging_steps: int = 1,
        stream: TextIO | None = None,
        config: Mapping[str, Any] | None = None,  # run config, for the sampling settings
    ) -> None:
        self.total_steps, self.title, self.logging_steps = total_steps, title, logging_steps
        self._config = config or {}
        self.step_now = start_step
        self._start_step = start_step
        self._stream = stream if stream is not None else sys.stdout
        self._started_at = time.monotonic()
        self._step_ends: deque[tuple[int, float]] = deque(maxlen=PACE_STEPS)
        self._latest: dict[str, float] = {}
        self._headline_name = ""  # metric of a line's first number
        self._headline: list[float] = []  # its values so far, for the sparkline
        self._evals: list[str] = []
        self._eval_decoding = ""
        self._sample: Mapping[str, Any] | None = None
        self._sample_at = -float("inf")
        self._rich: Any = None
        self._live: Any = None
        self.is_notebook = type(self._stream).__module__.startswith("ipykernel.")
        self.figure: Any = None  # LiveFigure in a notebook; its module imports this one

    def start(self) -> None:
        """Show the title and, on a terminal, the live display; start the clock for the time left."""
        if hasattr(self._stream, "reconfigure"):
            self._stream.reconfigure(errors="replace")  # a sample must not crash a run on an ASCII terminal
        self._started_at = time.monotonic()
        self._step_ends.append((self._start_step, self._started_at))
        if self._stream.isatty():
            self._start_live()
        resumed = f", resumed after step {self._start_step}" if self._start_step else ""
        steps = "1 step" if self.total_steps == 1 else f"{self.total_steps} steps"
        self._print(f"{self.title}: {steps}{resumed}", "bold")

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show a step's metrics, and an evaluation on a separate line."""
        self.step_now = step
        values = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        if any(name in values for _, name in NUMBERS):  # not an evaluation alone
            self._latest = values
            self._step_ends.append((step, time.monotonic()))
            self._headline_name = self._headline_name or next((name for _, name in NUMBERS if name in values), "")
            self._headline += [values[self._headline_name]] if self._headline_name in values else []
            if self.figure is not None:
                shown = [name for label, name in NUMBERS if name in values and label not in self._hidden()]
                self.figure.add(step, {name: values[name] for name in shown}, self._step_line())
            elif self._live is None and (step % self.logging_steps == 0 or step == self.total_steps):
                self._print(self._step_line())
        elif step == self._start_step:
            self._step_ends.clear()  # the pace excludes the evaluation before the first step
            self._step_ends.append((step, time.monotonic()))
        if evaluated := [shown_value(values, name) for name in EVAL_HEADLINES if name in values]:
            self._evals.append(evaluated[0])
            self._eval_decoding = eval_decoding(self._config, values)
        if line := eval_line(values, self._config):
            self._print(f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}  {line}", "green")

    def sample(self, sample: Mapping[str, Any]) -> None:
        """Show {"prompt", "completion", "rewards", "advantage"}, unless another sample was shown a moment ago."""
        wait = SAMPLE_SECONDS_PLAIN if self._live is None else SAMPLE_SECONDS_LIVE
        if time.monotonic() - self._sample_at < wait:
            return
        self._sample, self._sample_at = sample, time.monotonic()
        if self._live is None:
            scores = score_text(sample)
            text = f"{prompt_text(sample['prompt'])} -> {one_line(sample['completion'])}"
            self._print(f"sample: {text}  ({scores})" if scores else f"sample: {text}")

    def note(self, text: str) -> None:
        """Print a line."""
        self._print(text)

    def warn(self, finding: Finding) -> None:
        """Print a finding of the health monitor."""
        kind = "warning" if finding.level == "warning" else "info"
        self._print(f"{kind}: {finding.message}", "yellow" if kind == "warning" else "cyan")

    def stop(self) -> None:
        """Release the terminal, keeping the last state of the display on screen; may be called twice."""
        if self._live is not None:
            self._sample = None
            self._live.stop()
            self._live = None
        if self.figure is not None:
            self.figure.draw()
            self.figure = None

    def _start_live(self) -> None:
        import rich.console
        import rich.live

        self._rich = rich.console.Console(file=self._stream, highlight=False)
        if self._rich.is_dumb_terminal:
            self._rich = None
            return
        self._live = rich.live.Live(get_renderable=self._render, console=self._rich, refresh_per_second=4)
        self._live.start()

    def _print(self, text: str, style: str = "") -> None:
        if self._rich is None:
            print(text, file=self._stream, flush=True)
        else:
            from rich.text import Text

            self._rich.print(Text(text, style=style))  # Text, so that brackets are not markup

    def _step_line(self) -> str:
        width = len(str(self.total_steps))
        parts = [f"step {self.step_now:>{width}}/{self.total_steps}"]
        parts += [f"{label} {value}" if value else label for label, value in self._shown_numbers()]
        if (left := self._seconds_left()) is not None and self.step_now < self.total_steps:
            parts.append(f"left {duration(left)}")
        return "  ".join(parts)

    def _hidden(self) -> set[str]:
        return {label for label, better in REPLACED_BY.items() if any(name in self._latest for name in better)}

    def _shown_numbers(self) -> list[tuple[str, str]]:
        """Return (label, value) pairs of the last step; for a step without signal, the reason replaces its zeros."""
        values, reason = self._latest, nothing_to_learn(self._latest)
        hidden = self._hidden() | ({"entropy", "grad norm", "tokens/s"} if reason else set())
        shown = [
            (label, shown_value(values, name)) for label, name in NUMBERS if name in values and label not in hidden
        ]
        if shown and shown[0][0] == "reward" and train_decoding(self._config):
            shown[0] = ("reward (sampled)", shown[0][1])
        return shown + ([(reason, "")] if reason else [])

    def _seconds_left(self) -> float | None:
        """Estimate from the pace of the last steps, including evaluations and checkpoints between them."""
        (first, started), (last, ended) = self._step_ends[0], self._step_ends[-1]
        if last <= first:
            return None
        pace = (ended - started) / (last - first)
        return max(0.0, (self.total_steps - last) * pace - (time.monotonic() - ended))

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        left = self._seconds_left()
        bar = Table.grid(padding=(0, 2), expand=True)
        for ratio in (1, None, None):
            bar.add_column(ratio=ratio, no_wrap=True)
        clock = f"{duration(time.monotonic() - self._started_at)} elapsed"
        clock += f", {duration(left)} left" if left is not None and self.step_now < self.total_steps else ""
        bar.add_row(
            ProgressBar(total=self.total_steps, completed=self.step_now),
            Text(f"{self.step_now}/{self.total_steps}", style="bold"),
            Text(clock, style="dim"),
        )
        numbers = Table.grid(padding=(0, 3))
        cells = self._cells()
        numbers.add_row(*(Text(label, style="dim") for label, _ in cells))
        numbers.add_row(*(Text(value, style="bold" if i == 0 else "") for i, (_, value) in enumerate(cells)))
        return Group(bar, *([numbers] if cells else []), *self._render_sample())

    def _cells(self) -> list[tuple[str, str]]:
        """Return the (label, value) pairs that fit next to each other."""
        cells = self._shown_numbers()
        if self._evals:
            first, last = self._evals[0], self._evals[-1]
            label = f"eval ({self._eval_decoding})" if self._eval_decoding else "eval"
            cells.append((label, first if len(self._evals) == 1 else f"{first} -> {last}"))
        if len(self._headline) > 1 and not self._rich.options.ascii_only:
            cells.insert(1, ("so far", sparkline(self._headline)))
        for label in DROPPED_FIRST:
            if sum(max(map(len, cell)) + 3 for cell in cells) - 3 > self._rich.width:
                cells = [cell for cell in cells if cell[0] != label]
        return cells

    def _render_sample(self) -> list[RenderableType]:
        from rich.text import Text

        if self._sample is None:
            return []
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(f"{prompt_text(self._sample['prompt'])} ", style="dim")
        line.append(one_line(self._sample["completion"]), style="italic")
        line.append(f"  {score_text(self._sample)}", style="dim")
        return [line]


def number(value: float) -> str:
    """Format with three or four digits: 0.0312, 3.41, 128, 12.3k, 3.2e-05."""
    size = abs(value)
    if size == 0:
        return "0"  # exactly 0, not rounded
    if size >= 1e9 or 0 < size < 1e-3:
        return f"{value:.1e}"
    for scale, suffix in ((1e6, "M"), (1e3, "k")):
        if size >= 10 * scale or (suffix == "M" and size >= scale):
            return f"{value / scale:.3g}{suffix}"
    return f"{value:.0f}" if size >= 100 else f"{value:.2f}" if size >= 1 else f"{value:.3f}"


def figure(value: float) -> str:
    """Format a count in full, any other number with number()."""
    return str(value) if isinstance(value, int) else number(value)


def duration(seconds: float) -> str:
    """Format as 0:42, 12:05, 3:00:09, 2d 3:00:09."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if not hours:
        return f"{minute}:{second:02d}"
    days, hour = divmod(hours, 24)
    return (f"{days}d " if days else "") + f"{hour}:{minute:02d}:{second:02d}"


def sparkline(values: list[float], width: int = 16) -> str:
    """Draw the whole run in a few characters: means of equal stretches, scaled to their range."""
    width = min(width, len(values))
    edges = [i * len(values) // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    low, high = min(means), max(means)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] for value in means)


def shown_value(metrics: Mapping[str, Any], name: str) -> str:
    """Format a metric. An accuracy of 0 if every margin is 0, as before DPO's first step, is shown as ties."""
    is_tie = name.endswith("reward/accuracy") and metrics.get(name.replace("accuracy", "margin")) == 0
    return TIES if is_tie and metrics[name] == 0 else figure(metrics[name])


def train_decoding(config: Mapping[str, Any], earlier: Earlier | None = None) -> str:
    """Return "sampled at temperature 1" for a method that samples, otherwise "". Training never decodes greedily.

    `earlier` are the settings that a resume changed; "from step 41" is added if the temperature is one of them.
    """
    temperature = config.get("temperature")
    if not isinstance(temperature, int | float):
        return ""
    return f"sampled at temperature {temperature:g}" + _since("temperature", earlier)


def eval_decoding(config: Mapping[str, Any], names: Iterable[str], earlier: Earlier | None = None) -> str:
    """Return how held-out completions are decoded: "greedy", "sampled at temperature 0.6", or "" without sampling."""
    rollout = config.get("rollout")
    if not train_decoding(config) or not isinstance(rollout, Mapping):
        return ""
    if "eval/cfm" in names:  # EBFT samples held-out groups with the training settings
        return train_decoding(config, earlier)
    temperature = rollout.get("eval_temperature")
    decoding = f"sampled at temperature {temperature:g}" if temperature else "greedy"
    return decoding + _since("rollout.eval_temperature", earlier)


def _since(key: str, earlier: Earlier | None) -> str:
    return f" from step {earlier[key][-1][0] + 1}" if earlier and key in earlier else ""


def nothing_to_learn(metrics: Mapping[str, float]) -> str:
    """Return why a step of a group method had no gradient, or ""."""
    if metrics.get("reward/zero_std_frac") != 1.0 or metrics.get("optim/grad_norm") != 0.0:
        return ""
    if metrics.get("reward/std") == 0.0:
        return f"nothing to learn: every completion got reward {number(metrics['reward/mean'])}"
    return "nothing to learn: equal rewards within every group"


def eval_line(metrics: Mapping[str, float], config: Mapping[str, Any]) -> str:
    """Return "eval (greedy): reward 0.412  exact_match 0.412  length 3.40", or "" if the step was not evaluated."""
    decoding = eval_decoding(config, metrics)
    sampled, given = [], []
    for name in sorted((name for name in metrics if name.startswith("eval/")), key=headlines_first):
        label = name.removeprefix("eval/").removesuffix("/mean")
        shown = f"{metrics[name]:.0f}" if label == "rows" else shown_value(metrics, name)
        parts = given if decoding and name in NOT_SAMPLED else sampled
        parts.append(f"{'length' if label == 'len_mean' else label} {shown}")
    if not sampled + given:
        return ""
    line = (f"eval ({decoding}): " if decoding else "eval: ") + "  ".join(sampled)
    return f"{line}; on given answers: {'  '.join(given)}" if given else line


def headlines_first(name: str) -> int:
    return EVAL_HEADLINES.index(name) if name in EVAL_HEADLINES else len(EVAL_HEADLINES)


def evaluation_lines(
    records: Sequence[Mapping[str, Any]], config: Mapping[str, Any], earlier: Earlier | None = None
) -> list[str]:
    """Return held-out numbers before and after, one line per eval/* metric with at least two values; and the training
    reward if held-out completions are decoded differently, because the two may move in opposite directions."""
    series: dict[str, list[tuple[int, str]]] = {}
    for record in records:
        for name, value in record.items():
            if name.startswith("eval/") and name != "eval/rows" and value is not None:
                series.setdefault(name, []).append((record["step"], shown_value(record, name)))
    decoding = eval_decoding(config, series, earlier)
    lines = []
    for name in sorted((name for name, points in series.items() if len(points) > 1), key=headlines_first):
        (first, before), (last, after) = series[name][0], series[name][-1]
        what = name.removeprefix("eval/").removesuffix("/mean")
        what += f" ({decoding})" if decoding and name not in NOT_SAMPLED else ""
        length = f"{last - first} step{'s' * (last - first != 1)}"
        lines.append(f"held-out {what}: {before} before, {after} after ({length})")
    rewards = [record["reward/mean"] for record in records if record.get("reward/mean") is not None]
    sampled = train_decoding(config, earlier)
    if sampled and sampled != decoding and len(rewards) > 1:
        n = max(1, len(rewards) // 10)
        first, last = (number(sum(part) / n) for part in (rewards[:n], rewards[-n:]))
        steps = ("step", "one") if n == 1 else (f"{n} steps", str(n))
        line = f"training reward ({sampled}): {first} in the first {steps[0]}, {last} in the last {steps[1]}"
        lines.insert(1, line)
    return lines


def one_line(text: str, limit: int = 160) -> str:
    """Make a model's text safe to print: escape line ends and control characters, and truncate it."""
    text = text[: limit + 1]
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:limit])
    return shown + "..." if len(text) > limit else shown


def prompt_text(prompt: Any, limit: int = 160) -> str:
    """Return a prompt as one line: the end of the text, where the question is, or the last message."""
    text = prompt if isinstance(prompt, str) else str(prompt[-1]["content"]) if prompt else ""
    return one_line(text) if len(text) <= limit else "..." + one_line(text[-limit:])


def score_text(sample: Mapping[str, Any]) -> str:
    """Return "exact_match 1.000, advantage +0.53"."""
    parts = [f"{name} {number(value)}" for name, value in (sample.get("rewards") or {}).items() if value is not None]
    if sample.get("advantage") is not None:
        parts.append(f"advantage {sample['advantage']:+.2f}")
    return ", ".join(parts)
