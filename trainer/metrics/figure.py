"""Curves of a run as SVG for notebooks: of a finished run (trainer/notebook.py), or one figure updated during a run."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from trainer.metrics.report import EXACT, SMALL, curve_svg

# The light-mode colours of report.css, which a notebook does not load.
STYLE = (
    ".grid{stroke:#e3e3dd}.raw{fill:none;stroke:#2660a4;opacity:.32}.smooth{fill:none;stroke:#2660a4;stroke-width:1.9}"
    ".dot{fill:#2660a4}.band{fill:#1e7a46;opacity:.09}.slice{fill:transparent}"
    "text{font:10.5px system-ui,sans-serif;fill:#666b73}.name{font-size:12px;fill:#1d1f23}"
)
GAP, HEAD = 16, 22  # pixels between charts, and above a chart for its name
MOST_CHARTS = 3
REDRAWN_S = 1.0  # minimum time between two drawings
Series = tuple[Sequence[int], Sequence[float]]  # steps and values


class Curves:
    """A row of charts below a title; Jupyter calls _repr_svg_ to show it."""

    def __init__(self, series: Mapping[str, Series], last_step: int, title: str = "") -> None:
        width, height = SMALL
        top = HEAD if title else 0
        parts = [f'<text class="name" x="14" y="14">{escape(title)}</text>'] if title else []
        for i, (name, (steps, values)) in enumerate(series.items()):
            chart = curve_svg(steps, values, label=name, step_range=(0, last_step), smoothed=name not in EXACT)
            left, y = i * (width + GAP), top + HEAD
            parts.append(f'<text class="name" x="{left + 14}" y="{y - 8}">{escape(name)}: {values[-1]:.3g}</text>')
            parts.append(chart.replace("<svg ", f'<svg x="{left}" y="{y}" width="{width}" height="{height}" ', 1))
        total_width = len(series) * (width + GAP) - GAP
        self.svg = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{total_width}" height="{height + top + HEAD}">'
            f'<style>{STYLE}</style><rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>'
        )

    def _repr_svg_(self) -> str:
        return self.svg


class LiveFigure:
    """One figure of the first metrics that a run logs, updated during the run."""

    def __init__(self, last_step: int) -> None:
        self.last_step, self.title = last_step, ""
        self.series: dict[str, tuple[list[int], list[float]]] = {}
        self._handle: Any = None
        self._drawn_at = -REDRAWN_S

    def add(self, step: int, metrics: Mapping[str, float], title: str) -> None:
        """Add a step, and draw unless the figure was drawn a moment ago."""
        self.title = title
        for name, value in metrics.items():
            if math.isfinite(value) and (name in self.series or len(self.series) < MOST_CHARTS):
                steps, values = self.series.setdefault(name, ([], []))
                steps.append(step)
                values.append(value)
        if time.monotonic() - self._drawn_at >= REDRAWN_S:
            self.draw()

    def draw(self) -> None:
        from IPython.display import display

        if self.series:
            curves = Curves(self.series, self.last_step, self.title)
            if self._handle is None:
                self._handle = display(curves, display_id=True)
            else:
                self._handle.update(curves)
            self._drawn_at = time.monotonic()
