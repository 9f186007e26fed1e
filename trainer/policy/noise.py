"""NEFTune: uniform noise on the input embeddings, in training only.

    add_noise(causal_lm(policy.model), alpha=5.0)

Jain et al. 2023 (arXiv:2310.05914): a sequence of L tokens of width D gets noise of +-alpha / sqrt(L D). In a packed
row each sequence has its own L. Passes without gradient (reference, evaluation) get none. The noise is drawn from
torch's global generator, which a checkpoint keeps; like dropout it depends on how rows are put into micro-batches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from data.errors import UserError
from trainer.parallel.comm import context_size


def add_noise(lm: Any, alpha: float) -> None:
    """Hooks on the model's body, which gets the positions, and on its embedding."""
    if context_size() > 1:
        raise UserError(f"neftune_noise_alpha={alpha:g}: not with parallel.context={context_size()}; leave one out")
    found: dict[str, Tensor] = {}

    def note_positions(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        found.clear()
        if kwargs.get("position_ids") is not None:
            found["positions"] = kwargs["position_ids"]

    def with_noise(module: nn.Module, args: Any, embedded: Tensor) -> Tensor:
        if not (module.training and torch.is_grad_enabled() and "positions" in found):
            return embedded
        lengths = sequence_lengths(found["positions"])  # (R, T)
        scale = alpha / (lengths * embedded.shape[-1]).sqrt()
        noise = torch.rand(embedded.shape, device=embedded.device) * 2 - 1  # (R, T, D)
        return embedded + (noise * scale.unsqueeze(-1)).to(embedded.dtype)

    lm.base_model.register_forward_pre_hook(note_positions, with_kwargs=True)
    lm.get_input_embeddings().register_forward_hook(with_noise)


def sequence_lengths(positions: Tensor) -> Tensor:  # (R, T) -> (R, T) float32
    """Length of the sequence that each place belongs to; positions count from 0 in every sequence."""
    number = (positions == 0).cumsum(dim=1)  # (R, T) of the sequence in its row, from 1
    counts = torch.zeros(positions.shape[0], positions.shape[1] + 1, device=positions.device)
    counts.scatter_add_(1, number, torch.ones_like(number, dtype=counts.dtype))
    return counts.gather(1, number)
