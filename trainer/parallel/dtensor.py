"""Sharded tensors (DTensor): gather them, read and write this rank's shard. Plain tensors pass through unchanged."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Gatherer:
    """Gathers a sharded weight that is used outside of FSDP modules: the output head.

    Shards are cast to `dtype` before the gather; gradients are summed in float32 or wider, as FSDP does for the other
    weights. `reduce_once`: each rank keeps the sum over micro-batches until end() sums it over ranks.
    """

    def __init__(self, dtype: torch.dtype | None = None, *, reduce_once: bool = False) -> None:
        self.dtype, self.reduce_once = dtype, reduce_once
        self.local_grad: Tensor | None = None  # this rank's gradient, not reduced yet

    def __call__(self, weight: Tensor) -> Tensor:
        """Return the full weight; the backward pass sums its gradient over ranks and scatters it."""
        return _Gather.apply(weight, self) if is_dtensor(weight) else weight

    def end(self, weight: nn.Parameter) -> None:
        """Reduce the gradient after the last micro-batch; a collective on all ranks or on none."""
        if self.local_grad is not None:
            total = scatter_sum(self.local_grad, weight)
            weight.grad = total if weight.grad is None else weight.grad + total
            self.local_grad = None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, gatherer: Gatherer) -> Tensor:
        ctx.weight, ctx.gatherer = weight.detach(), gatherer
        return gather(weight.detach().to(gatherer.dtype or weight.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        gatherer = ctx.gatherer
        grad = grad.to(torch.promote_types(ctx.weight.dtype, torch.float32))
        if not gatherer.reduce_once:
            return scatter_sum(grad, ctx.weight), None
        gatherer.local_grad = grad if gatherer.local_grad is None else gatherer.local_grad.add_(grad)
        return None, None


def scatter_sum(full: Tensor, like: Any) -> Tensor:
    """Sum full tensors over ranks; return the sum sharded like `like`, in its dtype."""
    from torch.distributed.tensor import DTensor, Partial

    summands = DTensor.from_local(full, like.device_mesh, [Partial()] * like.device_mesh.ndim, run_check=False)
    # Within a copy first: torch would sum the full tensor over copies, between nodes, and then keep one shard of it.
    summands = summands.redistribute(placements=[Partial()] * (like.device_mesh.ndim - 1) + [like.placements[-1]])
    return summands.redistribute(placements=like.placements).to(like.device, like.dtype)


def is_dtensor(x: Any) -> bool:
    return hasattr(x, "full_tensor")


def reshard(model: Any) -> None:
    """Free weights that a forward pass without a backward pass left gathered."""
    for module in model.modules():
        if hasattr(module, "set_requires_gradient_sync"):  # FSDP2 module
            module.reshard()


def gather(tensor: Tensor) -> Tensor:
    """Return the full tensor, without gradient; a collective if it is sharded, on the device even if offloaded."""
    if not is_dtensor(tensor):
        return tensor
    return tensor.to(tensor.device_mesh.device_type).full_tensor()  # NCCL cannot send from main memory


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Return the slices of the full tensor that this rank's shard covers."""
    if not is_dtensor(tensor):
        return tuple(slice(0, size) for size in tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, first = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(first, shape, strict=True))


def is_first_copy(tensor: Tensor) -> bool:
    """Return whether no lower rank has the same shard."""
    dimensions = zip(tensor.device_mesh.get_coordinate(), tensor.placements, strict=True)
    return all(coordinate == 0 or placement.is_shard() for coordinate, placement in dimensions)


def copy_into_shard(target: Tensor, value: Tensor) -> None:
    """Copy this rank's slice of a full tensor into its shard; no communication."""
    local(target).copy_(value[local_slices(target)])
