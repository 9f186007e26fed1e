"""python -m trainer.report RUN [RUN ...]: write RUN/report.html, one page about a run (trainer/metrics/report.py)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.command.config_file import load_config
from data.command.flags import HELP, run_command
from trainer.cli import load_method
from trainer.config.defaults import default_tree
from trainer.metrics.report import write_report


def main(argv: Sequence[str]) -> int:
    """Exit status: 0, or 2 after one sentence about what is wrong."""
    if any(word in HELP for word in argv):
        print("usage: python -m trainer.report RUN [RUN ...]\n\nWrites RUN/report.html for each run folder.")
        return 0
    return run_command(lambda: report(argv))


def report(runs: Sequence[str]) -> None:
    if not runs or runs[0].startswith("-"):
        raise ValueError(f"{' '.join(runs) or 'RUN'}: name run folders; python -m trainer.report RUN [RUN ...]")
    for run_dir in runs:
        print(write_report(Path(run_dir), defaults_of(Path(run_dir))))


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
