"""Steps whose loss or gradient is not finite: the run stops and names them, or leaves them out (--nan-policy).

A skipped step changes neither weights nor moments; the schedule goes on, and its line of metrics is written as always.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from trainer.config.blocks import OptimConfig
from trainer.metrics.counters import Counters
from trainer.metrics.metrics import MetricSums
from trainer.parallel.comm import all_sum


def not_finite(grad_norm: float, sums: MetricSums | None) -> str | None:
    """What of this step is not finite, or None; the same answer on every rank, as gradient norm and loss are global.

    A loss may be infinite with a gradient that is not (a target of probability 0 in float32): such a step is as
    worthless. Its value is at hand after the gradient norm, for the device has just been waited for.
    """
    if not math.isfinite(grad_norm):
        return f"gradient norm {grad_norm}"
    if sums is None or "loss/total" not in sums.pairs:
        return None
    loss = float(all_sum(sums.pairs["loss/total"][0], "loss", everyone=True))
    return None if math.isfinite(loss) else f"loss {loss}"


class BadSteps:
    """What is done about them; the counts are in the checkpoint, so a resumed run stops where an unbroken one would."""

    def __init__(
        self,
        cfg: OptimConfig | None = None,
        counters: Counters | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.cfg, self.counters, self.note = cfg or OptimConfig(), counters or Counters(), note

    def skip(self, problem: str, where: str) -> None:
        """Count and tell; ValueError when the run is to stop instead."""
        counters, limit = self.counters, self.cfg.nan_skip_limit
        if self.cfg.nan_policy == "stop" or counters.skipped_in_a_row >= limit:
            before = f", after {limit} skipped steps in a row" if self.cfg.nan_policy == "skip" else ""
            raise ValueError(f"{where}: {problem} is not finite{before}; lower --learning-rate or mend these rows")
        counters.skipped_steps += 1
        counters.skipped_in_a_row += 1
        self.note(f"skipped {where}: {problem} is not finite ({counters.skipped_in_a_row} in a row, at most {limit})")

    def end(self) -> None:
        """A step was good."""
        self.counters.skipped_in_a_row = 0
