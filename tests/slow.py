"""`python -m tests.slow SECONDS [trainer flags]`: the trainer, with as much added to every sampling and every training.

Stands for a model that takes that long, so that overlap can be measured on a machine too small to show it: a group's
completions come SECONDS after they were asked for, and a backward pass takes SECONDS more.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from rollout.engines.vllm import VllmEngine
from trainer import __main__ as entry
from trainer.methods import grpo


def slow_down(seconds: float) -> None:
    submit, backward = VllmEngine.submit, grpo.backward

    def late_submit(self: VllmEngine, *args: Any) -> Any:
        inner = submit(self, *args)

        async def late() -> Any:
            made, _ = await asyncio.gather(asyncio.wrap_future(inner), asyncio.sleep(seconds))
            return made

        return self.loop.start(late())

    def late_backward(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return backward(*args, **kwargs)

    VllmEngine.submit, grpo.backward = late_submit, late_backward


if __name__ == "__main__":
    slow_down(float(sys.argv.pop(1)))
    entry.main()
