"""make bench: every benchmark that runs on this machine."""

from __future__ import annotations

from pathlib import Path

import tyro

from bench import adamw, attention, ebft, linear_logprob, tiny_step, train_step


def main(out: Path | None = None) -> None:
    """Print all tables; append every row as JSON to `out`."""
    linear_logprob.main(out)
    attention.main(out)
    adamw.main(out)
    tiny_step.main(out)
    train_step.main(out)
    ebft.main(out)


if __name__ == "__main__":
    tyro.cli(main)
