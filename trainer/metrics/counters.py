"""Totals that are kept across resumes, and the timer of one step."""

from __future__ import annotations

import resource
import sys
import time

import torch

from trainer.parallel.comm import all_max


class Timer:
    """Seconds of one step, part by part."""

    def __init__(self) -> None:
        self.started = self.last = time.perf_counter()
        self.parts: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Add the time since the last lap to `name`."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # kernels run on after Python has returned
        now = time.perf_counter()
        self.parts[name] = self.parts.get(name, 0.0) + now - self.last
        self.last = now

    def move(self, from_name: str, to_name: str, seconds: float) -> None:
        """Move some of the time of one part to another."""
        self.parts[from_name] -= seconds
        self.parts[to_name] = self.parts.get(to_name, 0.0) + seconds

    @property
    def seconds(self) -> float:
        """From the start to the last lap."""
        return self.last - self.started

    def metrics(self, num_tokens: int) -> dict[str, float]:
        return {
            **{f"time/{name}": seconds for name, seconds in self.parts.items()},
            "time/step_s": self.seconds,
            "perf/tokens_per_s": num_tokens / self.seconds,
            "mem/peak_gib": float(all_max(torch.tensor(peak_gib()), "peak memory")),
        }


class Counters:
    """How much a run has consumed; part of its checkpoint."""

    def __init__(self) -> None:
        self.prompts = 0
        self.tokens = 0
        self.skipped_steps = 0
        self.skipped_in_a_row = 0  # up to the last step
        self.unrewarded_in_a_row = 0  # batches, up to the last one
        self.unrewarded_evaluations = 0  # in a row
        self.started = time.perf_counter()
        self.earlier_s = 0.0  # before the checkpoint that this run resumed from

    @property
    def wall_s(self) -> float:
        return self.earlier_s + time.perf_counter() - self.started

    def metrics(self) -> dict[str, float]:
        return {
            "data/prompts_total": self.prompts,
            "data/tokens_total": self.tokens,
            "time/wall_s": self.wall_s,
            **({"optim/skipped_steps": self.skipped_steps} if self.skipped_steps else {}),
        }

    def state_dict(self) -> dict[str, float]:
        skipped = {"skipped_steps": self.skipped_steps, "skipped_in_a_row": self.skipped_in_a_row}
        unrewarded = {
            "unrewarded_in_a_row": self.unrewarded_in_a_row,
            "unrewarded_evaluations": self.unrewarded_evaluations,
        }
        return {"prompts": self.prompts, "tokens": self.tokens, "wall_s": self.wall_s, **skipped, **unrewarded}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.prompts, self.tokens, self.earlier_s = state["prompts"], state["tokens"], state["wall_s"]
        self.skipped_steps = state.get("skipped_steps", 0)  # checkpoints older than nan_policy have none
        self.skipped_in_a_row = state.get("skipped_in_a_row", 0)
        self.unrewarded_in_a_row = state.get("unrewarded_in_a_row", 0)
        self.unrewarded_evaluations = state.get("unrewarded_evaluations", 0)


def peak_gib() -> float:
    """Most memory held so far: of the GPU where there is one, else of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
