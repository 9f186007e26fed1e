"""NEFTune: uniform noise on the input embeddings, in training only.

    add_noise(policy, alpha=5.0)

Jain et al. 2023 (arXiv:2310.05914): a sequence of L tokens of width D gets noise of +-alpha / sqrt(L D), where L counts
each packed sequence separately. No-grad passes (reference, evaluation) get no noise. Noise is drawn from torch's global
generator, whose state is in checkpoints; like dropout it depends on how rows are packed into micro-batches.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from data.errors import UserError
from trainer.parallel.comm import context_size
from trainer.policy.logps import Policy, causal_lm


def add_noise(policy: Policy, alpha: float) -> ExitStack:
    """Add a hook to the model's embedding; closing the result removes it."""
    if context_size() > 1:
        raise UserError(
            f"neftune_noise_alpha={alpha:g} is not supported with parallel.context={context_size()}; remove one of the "
            "two"
        )

    def with_noise(module: nn.Module, args: Any, embedded: Tensor) -> Tensor:
        if not (module.training and torch.is_grad_enabled()):
            return embedded
        assert policy.positions is not None, "only hidden_states() runs the model with gradients"
        lengths = sequence_lengths(policy.positions)  # (R, T)
        scale = alpha / (lengths * embedded.shape[-1]).sqrt()
        noise = torch.rand(embedded.shape, device=embedded.device) * 2 - 1  # (R, T, D)
        return embedded + (noise * scale.unsqueeze(-1)).to(embedded.dtype)

    stack = ExitStack()
    stack.callback(causal_lm(policy.model).get_input_embeddings().register_forward_hook(with_noise).remove)
    return stack


def sequence_lengths(positions: Tensor) -> Tensor:  # (R, T) -> (R, T) float32
    """Return, at each position, the length of its sequence; positions start at 0 in every sequence."""
    sequence = (positions == 0).cumsum(dim=1)  # (R, T) index of the sequence in its row, from 1
    counts = torch.zeros(positions.shape[0], positions.shape[1] + 1, device=positions.device)
    counts.scatter_add_(1, sequence, torch.ones_like(sequence, dtype=counts.dtype))
    return counts.gather(1, sequence)
