"""Clip gradients as trainer.policy.optim does, for tests with their own optimizer step."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from trainer.policy.sharding import gradient_norm, scale_gradients


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> float:
    """Clip gradients to the global norm `limit`; return the norm before clipping."""
    parameters = list(parameters)
    norm = float(gradient_norm(parameters))
    scale_gradients(parameters, norm, limit)
    return norm
