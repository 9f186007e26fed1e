"""Run every benchmark that this machine supports (make bench)."""

from __future__ import annotations

from pathlib import Path

import tyro

from bench import adamw, attention, block, decode_attention, ebft, linear_kl, linear_logprob, nf4, train_step


def main(out: Path | None = None) -> None:
    """Print all tables; append every row as JSON to `out`."""
    for bench in (linear_logprob, linear_kl, attention, decode_attention, block, adamw, nf4, train_step, ebft):
        bench.main(out)


if __name__ == "__main__":
    tyro.cli(main)
