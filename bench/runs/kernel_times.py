"""GPU activity in a few training steps: the fraction of busy time, and milliseconds per kernel group.

Kernels and copies of this process come from torch's profiler, on the GPU's clock. A kernel that spins for
one cycle marks the end of each step, so profiling adds no host sync. The step in which profiling
begins is not counted, because the host has launched nothing ahead in it, and neither is the last step of the run, after
which strop writes metrics. In grpo another mark separates sampling from training.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

MARK = "spin_kernel"  # launched by torch.cuda._sleep
PART_MARK = "erfinv_kernel"  # launched by Tensor.erfinv_, which nothing else uses
# First match wins. cuBLAS products of the log-prob head count as matrix products.
GROUPS = {
    "attention": r"flex|fmha|flash|sdpa|attention|^_(attend|plan)",
    "optimizer": r"^_step|adam|multi_tensor",
    "head": r"^_(target_logit|exp_product|reduce_sums|redo_|gradient_coefs|scale_|rewrite|move_rows|finish_)",
    "products": r"nvjet|gemm|cutlass|ampere|sm80|sm90|splitk|cublas|triton_tem|^_linear$",
    "copies": r"^mem(cpy|set)|copy_kernel|catarray",
    "elementwise": r"",  # including norms and reductions
}


class Kernel(NamedTuple):
    name: str
    start: float  # microseconds
    end: float


class Watch:
    """Profiler that is called at the end of every step; without a GPU it records nothing."""

    def __init__(self, first: int, extra: int, used: Sequence[float] = ()) -> None:
        """`extra`: steps after `first`; `used`: growing list of GiB in use on the GPU."""
        self.first, self.last, self.used = first, first + extra - 1, used
        self.peak_gib = 0.0  # before profiling, which takes memory
        self.profile: Any = None
        self.found: dict[str, float] = {}

    def part_ended(self) -> None:
        """Mark the end of sampling."""
        if self.profile is not None:
            torch.zeros(1, device="cuda").erfinv_()

    def step_ended(self, step: int) -> None:
        if not torch.cuda.is_available() or not self.first <= step <= self.last:
            return
        if step == self.first:
            self.peak_gib = max(self.used, default=0.0)
            self.profile = profile(activities=[ProfilerActivity.CUDA])
            self.profile.start()
        torch.cuda._sleep(1)
        if step == self.last:
            torch.cuda.synchronize()
            self.profile.stop()
            on_device = torch.autograd.DeviceType.CUDA
            seen = [event for event in self.profile.events() if event.device_type == on_device]
            kernels = [Kernel(e.name, e.time_range.start, e.time_range.end) for e in seen]
            self.found = summary(kernels, self.last - self.first - 1)
            self.profile = None


def summary(kernels: Sequence[Kernel], counted: int) -> dict[str, float]:
    """Return gpu_busy and milliseconds per step and kernel group of the last `counted` steps, and train_busy if parts
    were marked; empty if no step ends were recorded."""
    marks = sorted(kernel.start for kernel in kernels if MARK in kernel.name)[-counted - 1 :]
    if len(marks) <= counted:
        return {}
    begin, end = marks[0], marks[-1]
    inside = [k for k in kernels if not is_mark(k) and begin <= k.start < end]
    sampled = sorted(k.start for k in kernels if PART_MARK in k.name)
    trained = []  # from the last mark of sampling in a step to its end
    for first, last in pairwise(marks):
        trained += [(start, last) for start in [x for x in sampled if first <= x < last][-1:]]
    times = dict.fromkeys(GROUPS, 0.0)
    for kernel in inside:
        times[group_of(kernel.name)] += kernel.end - kernel.start
    groups = {f"{name}_ms": us / 1000 / counted for name, us in sorted(times.items(), key=lambda item: -item[1])}
    busy = {"gpu_busy": busy_us(inside, end) / (end - begin)}
    if trained:
        us = [busy_us([k for k in inside if start <= k.start < stop], stop) for start, stop in trained]
        busy["train_busy"] = sum(us) / sum(stop - start for start, stop in trained)
    return {**busy, **groups}


def is_mark(kernel: Kernel) -> bool:
    return MARK in kernel.name or PART_MARK in kernel.name


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
