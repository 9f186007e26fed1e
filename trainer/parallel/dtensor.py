"""Sharded tensors (DTensor): gather them, read and write this rank's shard. Plain tensors pass through unchanged."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainer.parallel.comm import inside


class Gatherer:
    """Gathers a sharded weight that is used outside of FSDP modules: the output head.

    Shards are cast to `dtype` before the gather; gradients are summed in float32 or wider, as FSDP does for the other
    weights. Several copies of the weight: each rank keeps its shard of its copy's sum until end() sums it over copies.
    `reduce_once`: each rank keeps the sum over its micro-batches until end() sums it over all ranks.
    """

    def __init__(self, dtype: torch.dtype | None = None, *, reduce_once: bool = False) -> None:
        self.dtype, self.reduce_once = dtype, reduce_once
        self.partial: Tensor | None = None  # gradient of this step, not summed over all ranks yet

    def __call__(self, weight: Tensor) -> Tensor:
        """Return the full weight; the backward pass sums its gradient over ranks and scatters it."""
        return _Gather.apply(weight, self) if is_dtensor(weight) else weight

    def end(self, weight: nn.Parameter) -> None:
        """Reduce the gradient after the last micro-batch; a collective on all ranks or on none."""
        if self.partial is not None:
            with inside("gradient of the head"):
                total = scatter_sum(self.partial, weight)
            weight.grad = total if weight.grad is None else weight.grad + total
            self.partial = None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, gatherer: Gatherer) -> Tensor:
        ctx.weight, ctx.gatherer = weight.detach(), gatherer
        return gather(weight.detach().to(gatherer.dtype or weight.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        gatherer, weight = ctx.gatherer, ctx.weight
        grad = grad.to(torch.promote_types(weight.dtype, torch.float32))
        if not gatherer.reduce_once:
            grad = sum_within_copy(grad, weight)
            if weight.device_mesh.ndim == 1:
                return scatter_sum(grad, weight), None
        gatherer.partial = grad if gatherer.partial is None else gatherer.partial.add_(grad)
        return None, None


def scatter_sum(partial: Any, like: Any) -> Tensor:
    """Sum full tensors, or results of sum_within_copy, over ranks; return the sum sharded like `like`, in its dtype."""
    # Within a copy first: torch would sum the full tensor over copies, between nodes, and then keep one shard of it.
    summands = partial if is_dtensor(partial) else sum_within_copy(partial, like)
    return summands.redistribute(placements=like.placements).to(like.device, like.dtype)


def sum_within_copy(full: Tensor, like: Any) -> Any:
    """Sum full tensors over the ranks of a copy; return shards, whose sum over copies is pending."""
    from torch.distributed.tensor import DTensor, Partial

    copies = [Partial()] * (like.device_mesh.ndim - 1)
    summands = DTensor.from_local(full, like.device_mesh, [*copies, Partial()], run_check=False)
    return summands.redistribute(placements=[*copies, like.placements[-1]])


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
