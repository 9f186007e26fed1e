"""python -m trainer.export SOURCE OUT: export the model of a run or a checkpoint (trainer/run/export.py)."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from data.command.flags import parse_command, run_command
from trainer.run.export import ExportConfig, export_checkpoint


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, or 2 after a one-line error."""
    return run_command(lambda: export(parse_command(ExportConfig, argv, "python -m trainer.export")))


def export(cfg: ExportConfig) -> None:
    print(f"{export_checkpoint(cfg)} -> {cfg.out}")


if __name__ == "__main__":
    sys.exit(main())
