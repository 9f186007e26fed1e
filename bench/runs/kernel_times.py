"""GPU activity in eight training steps: the fraction of busy time, and milliseconds per kernel group.

Kernels and copies of this process come from torch's profiler, on the GPU's clock. A kernel that spins for
one cycle marks the end of each step, so profiling adds no host sync. The step in which profiling
begins is not counted, because the host has launched nothing ahead in it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from bench.vs_trl import EXTRA_STEPS

WATCHED = EXTRA_STEPS - 1  # strop writes metrics right after the last step of a run, so that step is excluded
COUNTED = WATCHED - 1
MARK = "spin_kernel"  # launched by torch.cuda._sleep
# First match wins. cuBLAS products of the log-prob head count as matrix products.
GROUPS = {
    "attention": r"flex|fmha|flash|sdpa|attention",
    "optimizer": r"^_step|adam|multi_tensor",
    "head": r"^_(target_logit|exp_product|reduce_sums|redo_|gradient_coefs|scale_|rewrite|move_rows|finish_)",
    "products": r"nvjet|gemm|cutlass|ampere|sm80|sm90|splitk|cublas|triton_tem",
    "copies": r"^mem(cpy|set)|copy_kernel|catarray",
    "elementwise": r"",  # including norms and reductions
}


class Kernel(NamedTuple):
    name: str
    start: float  # microseconds
    end: float


class Watch:
    """Profiler that is called at the end of every step; without a GPU it records nothing."""

    def __init__(self, first: int) -> None:
        self.first = first  # step after which profiling begins
        self.profile: Any = None
        self.found: dict[str, float] = {}

    def step_ended(self, step: int) -> None:
        if not torch.cuda.is_available() or not self.first <= step <= self.first + WATCHED:
            return
        if step == self.first:
            self.profile = profile(activities=[ProfilerActivity.CUDA])
            self.profile.start()
        torch.cuda._sleep(1)
        if step == self.first + WATCHED:
            torch.cuda.synchronize()
            self.profile.stop()
            on_device = torch.autograd.DeviceType.CUDA
            seen = [event for event in self.profile.events() if event.device_type == on_device]
            self.found = summary([Kernel(e.name, e.time_range.start, e.time_range.end) for e in seen])
            self.profile = None


def summary(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Return gpu_busy and milliseconds per step and kernel group; empty if no step ends were recorded."""
    marks = sorted(kernel.start for kernel in kernels if MARK in kernel.name)[-COUNTED - 1 :]
    if len(marks) <= COUNTED:
        return {}
    begin, end = marks[0], marks[-1]
    inside = [k for k in kernels if MARK not in k.name and begin <= k.start < end]
    times = dict.fromkeys(GROUPS, 0.0)
    for kernel in inside:
        times[group_of(kernel.name)] += kernel.end - kernel.start
    groups = {f"{name}_ms": us / 1000 / COUNTED for name, us in sorted(times.items(), key=lambda item: -item[1])}
    return {"gpu_busy": busy_us(inside, end) / (end - begin), **groups}


def group_of(name: str) -> str:
    return next(group for group, pattern in GROUPS.items() if re.search(pattern, name, re.IGNORECASE))


def busy_us(kernels: Sequence[Kernel], end: float) -> float:
    """Return the time in which at least one kernel runs, up to `end`."""
    total, covered = 0.0, 0.0
    for kernel in sorted(kernels, key=lambda k: k.start):
        stop = min(kernel.end, end)
        total += max(0.0, stop - max(kernel.start, covered))
        covered = max(covered, stop)
    return total
