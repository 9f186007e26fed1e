"""Run by each rank: a training run that reports its peak GPU memory while sampling and while training.

    python -m tests.ranks.memory --method grpo ...

Prints one JSON line: bytes measured by torch on this rank, and bytes that trainer/plan.py expects. On a CPU the
measured bytes are 0.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from rollout.engines.memory import highest_peak, restart_peak
from trainer import plan
from trainer.__main__ import train
from trainer.cli import parse
from trainer.parallel.ranks import rank
from trainer.rl import rank0_rollout


def main(argv: list[str]) -> int:
    module, cfg, _ = parse(argv)
    peaks: dict[str, list[int]] = {"training": [], "sampling": []}  # the first: loading the model
    share = rank0_rollout.generate_share

    def end(part: str) -> None:
        peaks[part].append(restart_peak() if torch.cuda.is_available() else 0)

    def measured(*args: Any) -> Any:
        end("training")
        result = share(*args)
        end("sampling")
        return result

    rank0_rollout.generate_share = measured
    code = train(module, cfg, tell=lambda: True)
    end("training")
    s = plan.sizes_for(cfg)
    work = plan.work_of(cfg, s)
    engine = plan.engine_memory_of(cfg, s, work)
    assert engine is not None
    result = {
        "rank": rank(), "sampling": max(peaks["sampling"]), "training": max(peaks["training"]),
        "highest": highest_peak() if torch.cuda.is_available() else 0,
        "planned_sampling": plan.sampling_bytes(s, work, engine), "planned_training": plan.peak(s, work),
        "parts": {**plan.peak_parts(s, work), **engine._asdict(), "copied": plan.copied_bytes(s, work),
                  "gathered": plan.gathered_bytes(s, work)[0]},
        "peaks": peaks,
    }  # fmt: skip
    print(json.dumps(result), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
