"""Show curves of a run in a notebook, as the last expression of a cell.

from trainer.notebook import curves
curves("runs/quickstart", "reward/mean", "eval/reward/mean")
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from data.errors import UserError
from trainer.metrics.report import EXACT, SMALL, curve_svg, load_run

# The light-mode colours of report.css, which a notebook does not load.
STYLE = (
    ".grid{stroke:#e3e3dd}.raw{fill:none;stroke:#2660a4;opacity:.32}.smooth{fill:none;stroke:#2660a4;stroke-width:1.9}"
    ".dot{fill:#2660a4}.band{fill:#1e7a46;opacity:.09}.slice{fill:transparent}"
    "text{font:10.5px system-ui,sans-serif;fill:#666b73}.name{font-size:12px;fill:#1d1f23}"
)
GAP, HEAD = 16, 22  # pixels between charts, and above a chart for its name


class Curves:
    """A row of charts; Jupyter calls _repr_svg_ to show it."""

    def __init__(self, svg: str) -> None:
        self.svg = svg

    def _repr_svg_(self) -> str:
        return self.svg


def curves(run_dir: str | Path, *names: str) -> Curves:
    """Draw metrics of a run over its steps, from metrics.jsonl; the run may still be running."""
    run = load_run(Path(run_dir))
    width, height = SMALL
    parts = []
    for i, name in enumerate(names):
        steps, values = run.series(name)
        if not steps:
            raise UserError(f"{name}: not logged by this run; use one of {', '.join(run.logged)}")
        chart = curve_svg(steps, values, label=name, step_range=(0, run.last_step), smoothed=name not in EXACT)
        left = i * (width + GAP)
        parts.append(f'<text class="name" x="{left + 14}" y="14">{escape(name)}: {values[-1]:.3g}</text>')
        parts.append(chart.replace("<svg ", f'<svg x="{left}" y="{HEAD}" width="{width}" height="{height}" ', 1))
    total_width = len(names) * (width + GAP) - GAP
    return Curves(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total_width}" height="{height + HEAD}"><style>{STYLE}</style>'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>'
    )
