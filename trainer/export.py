"""python -m trainer.export SOURCE OUT: export the model of a run or a checkpoint (trainer/run/export.py)."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import tyro

from trainer.run.export import ExportConfig, export_checkpoint


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 after one sentence about what is wrong."""
    try:
        cfg = tyro.cli(ExportConfig, prog="python -m trainer.export", args=argv)
        print(f"{export_checkpoint(cfg)} -> {cfg.out}")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
