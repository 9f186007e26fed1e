"""Reproducibility: which of torch's algorithms a run may use, so that equal commands give equal numbers.

On a CPU the backward of `x[index]` adds rows from several threads in no fixed order (index_put with accumulate=True,
from 32,768 elements on). If an index repeats, as that of a shared prompt's last token does, the sum depends on thread
timing. So a run on a CPU always uses torch's deterministic algorithms. On a GPU they cost time, and --deterministic
turns them on. Our own kernels need no switch: the only atomics in kernels/ count in integers
(linear_logprob_triton.py).
"""

from __future__ import annotations

import os

import torch

# The faster of the two deterministic cuBLAS settings. cuBLAS reads it at the first product.
CUBLAS = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
ON_CPU = (
    "deterministic: on a CPU every run repeats bit for bit with the same number of threads; in this run an operation "
    "that cannot repeat is an error"
)
ON_GPU = (
    "deterministic: torch's deterministic algorithms only, an operation that has none is an error; costs time in "
    "attention's backward, in sums by index and where torch.compile would measure; completions of a vLLM server are "
    "not covered"
)


class Algorithms:
    """Turns on torch's deterministic algorithms; close() restores the previous settings."""

    def __init__(self, device: str, strict: bool) -> None:
        """`strict` (--deterministic): an operation without such an algorithm is an error, else a warning."""
        fill = torch.utils.deterministic
        self._before = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            fill.fill_uninitialized_memory,
            torch.backends.cudnn.benchmark,
        )
        if device == "cpu" or strict:
            torch.use_deterministic_algorithms(True, warn_only=not strict)
            fill.fill_uninitialized_memory = False  # it would fill all new memory, to detect uninitialised reads
        if device == "cuda" and strict:
            os.environ.setdefault(*CUBLAS)
            torch.backends.cudnn.benchmark = False

    def close(self) -> None:
        enabled, warn_only, fill, benchmark = self._before
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.backends.cudnn.benchmark = benchmark
