"""Grouped matmuls of experts in the dtype of autocast.

    use_grouped_matmuls()              # once per process, before a model with experts runs

transformers runs all experts of a layer in one grouped matmul (experts_implementation="grouped_mm"), in the dtype of
the weights, even under autocast. In float32 torch has no grouped kernel on a GPU: it loops over the experts after a
host sync, and blocks cannot be compiled. So under autocast the weights are rounded first, as autocast does for linear
layers.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


@functools.cache
def use_grouped_matmuls() -> None:
    """Replace transformers' grouped_mm by the same function on rounded weights."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

    uncompiled_forward = torch.compiler.disable(grouped_mm_experts_forward)

    def grouped_mm(experts: Any, hidden: Tensor, *routing: Tensor) -> Tensor:
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        if torch.is_autocast_enabled(kind):
            experts = RoundedExperts(experts, dtype)
        is_fallback = torch.compiler.is_compiling() and dtype != torch.bfloat16  # its backward cannot be compiled
        return (uncompiled_forward if is_fallback else grouped_mm_experts_forward)(experts, hidden, *routing)

    ALL_EXPERTS_FUNCTIONS["grouped_mm"] = grouped_mm


class RoundedExperts:
    """Experts whose weights are read in another dtype."""

    def __init__(self, experts: Any, dtype: torch.dtype) -> None:
        self._experts, self._dtype = experts, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        return value.to(self._dtype) if isinstance(value, Tensor) else value
