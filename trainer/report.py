"""Pages about runs: trainer/metrics/report.py for one, trainer/metrics/compare.py for several.

python -m trainer.report RUN                          # writes RUN/report.html
python -m trainer.report RUN RUN [--out PAGE.html]    # one page with their curves over each other
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

Of several runs it writes one page, comparison.html unless --out names another, with their curves over each other."""


def main(argv: Sequence[str]) -> int:
    """Exit status: 0, or 2 after one sentence about what is wrong."""
    if any(word in HELP for word in argv):
        print(USAGE)
        return 0
    return run_command(lambda: report(argv))


def report(argv: Sequence[str]) -> None:
    runs, out = list(argv), None
    if "--out" in runs:
        place = runs.index("--out")
        if place + 1 == len(runs):
            raise UserError("--out: names no file; write --out PAGE.html")
        out = Path(runs[place + 1])
        del runs[place : place + 2]
    if not runs or (strange := [word for word in runs if word.startswith("-")]):
        raise UserError(f"{strange[0] if runs else 'RUN'}: name run folders; python -m trainer.report RUN [RUN ...]")
    if len(runs) == 1 and out is not None:
        raise UserError(f"--out={out}: is for several runs; the page of one is written to its folder")
    if len(runs) == 1:
        print(write_report(Path(runs[0]), defaults_of(Path(runs[0]))))
    else:
        print(write_comparison([Path(run) for run in runs], out or Path("comparison.html")))


def defaults_of(run_dir: Path) -> dict[str, Any] | None:
    """Default settings of the run's method; None if it is not there, as of a method of the user's own elsewhere."""
    path = run_dir / "config.yaml"
    settings = load_config(path) if path.is_file() else {}
    try:
        return default_tree(load_method(str(settings["method"])).Config, settings)
    except Exception:  # the module may be anybody's, and the page can do without
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
