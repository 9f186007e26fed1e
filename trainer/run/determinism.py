"""Reproducibility: restrict torch to deterministic algorithms, so that equal commands give equal numbers.

On a CPU the backward of `x[index]` adds rows from several threads in no fixed order (index_put with accumulate=True,
from 32,768 elements on). If an index repeats, like that of a shared prompt's last token, the sum depends on thread
timing. So a run on a CPU always uses torch's deterministic algorithms. On a GPU they are slower and need
--deterministic. The kernels/ are deterministic: their only atomics count integers (linear_logprob_triton.py).
"""

from __future__ import annotations

import os

import torch

# The faster of the two deterministic cuBLAS settings. cuBLAS reads it at the first matmul.
CUBLAS = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
ON_CPU = (
    "deterministic: on a CPU every run is reproducible bit for bit with the same number of threads; in this run a "
    "nondeterministic operation is an error"
)
ON_GPU = (
    "deterministic: only torch's deterministic algorithms, and an operation without one is an error; slower in the "
    "attention backward, in sums by index and without torch.compile's autotuning; completions of vLLM servers are not "
    "covered"
)


class Algorithms:
    """Turns on torch's deterministic algorithms; close() restores the previous settings."""

    def __init__(self, device: str, strict: bool) -> None:
        """`strict` (--deterministic): an operation without a deterministic algorithm is an error, not a warning."""
        fill = torch.utils.deterministic
        self._before = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            fill.fill_uninitialized_memory,
            torch.backends.cudnn.benchmark,
        )
        if device == "cpu" or strict:
            torch.use_deterministic_algorithms(True, warn_only=not strict)
            fill.fill_uninitialized_memory = False  # a slow debugging aid that fills all new memory
        if device == "cuda" and strict:
            os.environ.setdefault(*CUBLAS)
            torch.backends.cudnn.benchmark = False

    def close(self) -> None:
        enabled, warn_only, fill, benchmark = self._before
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.backends.cudnn.benchmark = benchmark
