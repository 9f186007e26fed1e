"""Show curves of a run in a notebook, as the last expression of a cell.

from trainer.notebook import curves
curves("runs/quickstart", "reward/mean", "eval/reward/mean")
"""

from __future__ import annotations

from pathlib import Path

from data.errors import UserError
from trainer.metrics.figure import Curves
from trainer.metrics.report import load_run


def curves(run_dir: str | Path, *names: str) -> Curves:
    """Draw metrics of a run over its steps, from metrics.jsonl; the run may still be running."""
    run = load_run(Path(run_dir))
    series = {name: run.series(name) for name in names}
    for name, (steps, _) in series.items():
        if not steps:
            raise UserError(f"{name}: not logged by this run; use one of {', '.join(run.logged)}")
    return Curves(series, run.last_step)
