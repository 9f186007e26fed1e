"""Run by each rank: a training run that reports its peak GPU memory while sampling and while training.

    python -m tests.ranks.memory --method grpo ...

Prints one JSON line: bytes measured by torch on this rank, and bytes that trainer/plan.py expects.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from rollout.engines.memory import highest_peak, restart_peak
from trainer import plan
from trainer.__main__ import train
from trainer.cli import parse
from trainer.parallel.ranks import rank
from trainer.rl import rank0_rollout


def main(argv: list[str]) -> int:
    module, cfg, _ = parse(argv)
    peaks: dict[str, int] = {"sampling": 0, "training": 0}
    share = rank0_rollout.generate_share

    def measured(*args: Any) -> Any:
        peaks["training"] = max(peaks["training"], restart_peak())
        result = share(*args)
        peaks["sampling"] = max(peaks["sampling"], restart_peak())
        return result

    rank0_rollout.generate_share = measured
    code = train(module, cfg, tell=lambda: True)
    s = plan.sizes_for(cfg)
    work = plan.work_of(cfg, s)
    engine = plan.engine_memory_of(cfg, s, work)
    assert engine is not None
    result = {
        "rank": rank(), **peaks, "highest": highest_peak(), "planned_sampling": plan.sampling_bytes(s, work, engine),
        "parts": {"persistent": plan.persistent_without_gradients(s, work), **engine._asdict(),
                  "gathered": plan.gathered_bytes(s, work)[0]},
    }  # fmt: skip
    print(json.dumps(result), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
