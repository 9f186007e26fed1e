"""Context parallelism: ranks share every micro-batch, and each computes a slice of its rows.

    part = slice_of(batch, multiple=2)                  # this rank's positions, and the trained tokens they predict
    key, value = whole_row(key, value)                  # in every attention layer: keys and values of the whole row
    logp, entropy = part.gather(logp, entropy)          # of all trained tokens, on every rank

Queries attend to the keys of the whole row, so masks that are defined per query (kernels/attention.py) need no change.
A row is cut into twice as many pieces as there are ranks, and rank c takes piece c and the c-th from the end: later
positions attend to more keys, so this balances the work.

Gradients: all ranks compute the same loss from the same log-probs, so each back-propagates only through its own
log-probs (summing there would count every token once per rank). The keys of a rank serve the queries of all ranks, so
their gradients are summed. Each rank ends up with its part of the weight gradient, and the sum over all ranks is the
full gradient, as without context parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from data.packing import Batch
from trainer.parallel.comm import context_gather, context_rank, context_scatter_sum, context_size, context_sum


@dataclass(frozen=True)
class Part:
    """This rank's part of a batch; all of it unless ranks share rows."""

    batch: Batch  # queries of this rank and the trained tokens they predict; key ranges index the whole row
    num_keys: int  # positions of the whole row
    tokens: Tensor | None = None  # (n,) indices of those tokens among all trained tokens of the batch; None: all
    num_tokens: int = 0  # trained tokens of the whole batch

    def gather(self, *own: Tensor | None) -> tuple[Any, ...]:  # (n, ...) each -> (N, ...) each
        """Values of all trained tokens from those of each rank."""
        if self.tokens is None:
            return own
        given = [x for x in own if x is not None]
        found = iter(_Whole.apply(self.tokens, self.num_tokens, *given))
        return tuple(None if x is None else next(found) for x in own)


def slice_of(batch: Batch, *, multiple: int) -> Part:
    """This rank's positions of a batch, a multiple of `multiple`; padding attends to itself."""
    size, own = context_size(), context_rank()
    length = batch.input_ids.shape[1]
    piece = -(-length // (size * multiple)) * multiple // 2
    first, second = own * piece, (2 * size - 1 - own) * piece  # where the two pieces begin
    steps = torch.arange(piece, device=batch.input_ids.device)
    places = torch.cat([first + steps, second + steps])  # (S,)

    def take(x: Tensor, filler: Tensor | int) -> Tensor:  # (R, T) -> (R, S)
        return torch.where(places < length, x[:, places.clamp(max=length - 1)], filler)

    row, place = batch.index // length, batch.index % length  # (N,)
    number = place // piece
    tokens = (torch.minimum(number, 2 * size - 1 - number) == own).nonzero().flatten()  # (n,)
    index = row * 2 * piece + torch.where(number < size, place - first, place - second + piece)
    sliced = replace(
        batch,
        input_ids=take(batch.input_ids, 0), position_ids=take(batch.position_ids, 0),
        prefix_start=take(batch.prefix_start, 0), prefix_stop=take(batch.prefix_stop, 0),
        own_start=take(batch.own_start, places), own_stop=take(batch.own_stop, places + 1),
        index=index[tokens], target=batch.target[tokens], sequence=batch.sequence[tokens], slot=batch.slot[tokens],
    )  # fmt: skip
    return Part(sliced, 2 * piece * size, tokens, len(batch.target))


@torch.compiler.disable
def whole_row(
    key: Tensor,  # (R, H_kv, S, K)
    value: Tensor,  # (R, H_kv, S, K)
) -> tuple[Tensor, Tensor]:  # (R, H_kv, keys, K) each
    """Keys and values of the whole row, in its order."""
    # Under autocast the rotation may leave keys in float32; attention would round them the same way.
    both = torch.cat([key.to(value.dtype), value], dim=-1)
    return _WholeRow.apply(both).split([key.shape[-1], value.shape[-1]], dim=-1)


class _WholeRow(torch.autograd.Function):
    """All-gather in the forward pass, reduce-scatter in the backward pass."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:  # (R, H, S, C) -> (R, H, keys, C)
        halves = context_gather(own, "keys and values").unflatten(3, (2, -1))  # (ranks, R, H, 2, S / 2, C)
        return torch.cat([*halves[:, :, :, 0], *halves[:, :, :, 1].flip(0)], dim=2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        pieces = grad.unflatten(2, (2 * context_size(), -1)).movedim(2, 0)  # (2 * ranks, R, H, S / 2, C)
        first, second = pieces.tensor_split(2)
        of_ranks = torch.cat([first, second.flip(0)], dim=3)  # (ranks, R, H, S, C)
        return context_scatter_sum(of_ranks, "gradients of keys and values")


class _Whole(torch.autograd.Function):
    """All-gather of per-token values: each token is non-zero on one rank, so a sum gathers them."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, num_tokens: int, *own: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # an entropy that no loss uses costs nothing
        ctx.save_for_backward(tokens)
        padded = torch.stack([x.new_zeros(num_tokens, *x.shape[1:]).index_copy_(0, tokens, x) for x in own])
        return tuple(x.clone() for x in context_sum(padded, "numbers of tokens"))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        return None, None, *(None if grad is None else grad[tokens] for grad in grads)
