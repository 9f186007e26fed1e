"""Write the report of a run (trainer/metrics/report.py) or compare several runs (trainer/metrics/compare.py).

python -m trainer.report RUN                          # writes RUN/report.html
python -m trainer.report RUN RUN [--out PAGE.html]    # one page with the curves of all runs
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.command.config_file import load_config
from data.command.flags import HELP, run_command
from data.errors import UserError
from trainer.cli import load_method
from trainer.config.defaults import default_tree
from trainer.metrics.compare import write_comparison
from trainer.metrics.report import write_report

USAGE = """usage: python -m trainer.report RUN              writes RUN/report.html
       python -m trainer.report RUN RUN [...] [--out PAGE.html]

For several runs, writes one page with the curves of all of them: PAGE.html, by default comparison.html."""


def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0, or 2 after a one-line error."""
    if any(word in HELP for word in argv):
        print(USAGE)
        return 0
    return run_command(lambda: report(argv))


def report(argv: Sequence[str]) -> None:
    runs, out = list(argv), None
    if "--out" in runs:
        i = runs.index("--out")
        if i + 1 == len(runs):
            raise UserError("--out: no file; pass --out PAGE.html")
        out = Path(runs[i + 1])
        del runs[i : i + 2]
    if not runs or (flags := [word for word in runs if word.startswith("-")]):
        raise UserError(f"{flags[0] if runs else 'RUN'}: pass run folders; python -m trainer.report RUN [RUN ...]")
    if len(runs) == 1 and out is not None:
        raise UserError(f"--out={out}: has no effect with one run, whose report is in its folder; remove --out")
    if len(runs) == 1:
        print(write_report(Path(runs[0]), defaults_of(Path(runs[0]))))
    else:
        print(write_comparison([Path(run) for run in runs], out or Path("comparison.html")))


def defaults_of(run_dir: Path) -> dict[str, Any] | None:
    """Return the default settings of the run's method; None if it cannot be imported, like a custom method now."""
    path = run_dir / "config.yaml"
    settings = load_config(path) if path.is_file() else {}
    try:
        return default_tree(load_method(str(settings["method"])).Config, settings)
    except Exception:  # a custom module may raise anything, and the page works without defaults
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
