"""Context parallelism: ranks share every micro-batch, and each computes a slice of its rows.

    part = slice_batch(batch, multiple=2)               # this rank's positions, and the trained tokens they predict
    key, value = gather_row(key, value)                 # in every attention layer: keys and values of the whole row
    logp, entropy = part.gather(logp, entropy)          # all trained tokens, on every rank

Queries attend to the keys of the whole row, so masks that are defined per query (kernels/attention.py) do not change.
A row is cut into twice as many pieces as there are ranks, and rank c computes piece c and the c-th piece from the end.
This balances the work, because later positions attend to more keys.

Gradients: all ranks compute the same loss from the same log-probs, so each rank back-propagates only through the
log-probs it computed (a sum would count every token once per rank). A rank's keys serve the queries of all ranks, so
their gradients are summed. Each rank ends up with a part of the weight gradient, and the sum over all ranks is the full
gradient, as without context parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from data.packing import Batch
from trainer.parallel.comm import context_gather, context_rank, context_scatter_sum, context_size, context_sum


@dataclass(frozen=True)
class BatchSlice:
    """This rank's slice of a micro-batch; all of it without context parallelism."""

    batch: Batch  # this rank's queries and the trained tokens they predict; key ranges index the whole row
    num_keys: int  # positions of the whole row
    tokens: Tensor | None = None  # (n,) indices of these trained tokens in the whole micro-batch; None: all
    num_tokens: int = 0  # trained tokens of the whole micro-batch

    def gather(self, *values: Tensor | None) -> tuple[Any, ...]:  # (n, ...) each -> (N, ...) each
        """Gather per-token values of this rank into values of all trained tokens."""
        if self.tokens is None:
            return values
        gathered = iter(_GatherTokens.apply(self.tokens, self.num_tokens, *(x for x in values if x is not None)))
        return tuple(None if x is None else next(gathered) for x in values)


def slice_batch(batch: Batch, *, multiple: int) -> BatchSlice:
    """Return this rank's slice, with a multiple of `multiple` positions; padding attends to itself."""
    size, rank = context_size(), context_rank()
    length = batch.input_ids.shape[1]
    piece = -(-length // (size * multiple)) * multiple // 2
    first, second = rank * piece, (2 * size - 1 - rank) * piece  # starts of the two pieces
    steps = torch.arange(piece, device=batch.input_ids.device)
    positions = torch.cat([first + steps, second + steps])  # (S,)

    def take(x: Tensor, filler: Tensor | int) -> Tensor:  # (R, T) -> (R, S)
        return torch.where(positions < length, x[:, positions.clamp(max=length - 1)], filler)

    row, position = batch.index // length, batch.index % length  # (N,)
    piece_index = position // piece
    tokens = (torch.minimum(piece_index, 2 * size - 1 - piece_index) == rank).nonzero().flatten()  # (n,)
    index = row * 2 * piece + torch.where(piece_index < size, position - first, position - second + piece)
    sliced = replace(
        batch,
        input_ids=take(batch.input_ids, 0), position_ids=take(batch.position_ids, 0),
        spans=(*(take(x, 0) for x in batch.spans[:-2]), take(batch.spans[-2], positions),
               take(batch.spans[-1], positions + 1)),
        routes=None if batch.routes is None else batch.routes[:, positions.clamp(max=length - 1)],
        sets=None if batch.sets is None else batch.sets[tokens],
        index=index[tokens], target=batch.target[tokens], sequence=batch.sequence[tokens], slot=batch.slot[tokens],
    )  # fmt: skip
    return BatchSlice(sliced, 2 * piece * size, tokens, len(batch.target))


@torch.compiler.disable
def gather_row(
    key: Tensor,  # (R, H_kv, S, K)
    value: Tensor,  # (R, H_kv, S, K)
) -> tuple[Tensor, Tensor]:  # (R, H_kv, keys, K) each
    """Gather the keys and values of the whole row, in position order."""
    # Under autocast, the rotation may leave keys in float32; attention would round them the same way.
    both = torch.cat([key.to(value.dtype), value], dim=-1)
    return _GatherRow.apply(both).split([key.shape[-1], value.shape[-1]], dim=-1)


class _GatherRow(torch.autograd.Function):
    """All-gather in the forward pass, reduce-scatter in the backward pass."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:  # (R, H, S, C) -> (R, H, keys, C)
        halves = context_gather(both, "keys and values").unflatten(3, (2, -1))  # (ranks, R, H, 2, S / 2, C)
        return torch.cat([*halves[:, :, :, 0], *halves[:, :, :, 1].flip(0)], dim=2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        pieces = grad.unflatten(2, (2 * context_size(), -1)).movedim(2, 0)  # (2 * ranks, R, H, S / 2, C)
        first, second = pieces.tensor_split(2)
        per_rank = torch.cat([first, second.flip(0)], dim=3)  # (ranks, R, H, S, C)
        return context_scatter_sum(per_rank, "gradients of keys and values")


class _GatherTokens(torch.autograd.Function):
    """All-gather of per-token values: each token is nonzero on one rank, so a sum gathers them."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, num_tokens: int, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # an unused entropy costs nothing
        ctx.save_for_backward(tokens)
        padded = torch.stack([x.new_zeros(num_tokens, *x.shape[1:]).index_copy_(0, tokens, x) for x in values])
        return tuple(x.clone() for x in context_sum(padded, "numbers of tokens"))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        return None, None, *(None if grad is None else grad[tokens] for grad in grads)
