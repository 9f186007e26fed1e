"""Tensors that lie in shards over ranks (DTensor): gathered, and written from whole ones. Others pass through."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def whole(weight: Tensor) -> Tensor:
    """A sharded weight gathered, its gradient added up over ranks and scattered; any other as it is."""
    if not is_dtensor(weight):
        return weight
    from torch.distributed.tensor import Partial

    return weight.full_tensor(grad_placements=[Partial()] * weight.device_mesh.ndim)


def is_dtensor(x: Any) -> bool:
    return hasattr(x, "full_tensor")


def settle(model: Any) -> None:
    """Give back what a forward pass without a backward has left gathered: the model's parameters are shards again."""
    for module in model.modules():
        if hasattr(module, "set_requires_gradient_sync"):  # FSDP2's
            module.reshard()


def full(tensor: Tensor) -> Tensor:
    """All of a tensor, sharded or not; every rank takes part."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def put(target: Tensor, value: Tensor) -> None:
    """Write a whole tensor into one that may be sharded: each rank takes its part, nothing is sent."""
    if not is_dtensor(target):
        target.copy_(value)
        return
    from torch.distributed.tensor import distribute_tensor

    part = distribute_tensor(value.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
    target.to_local().copy_(part.to_local())
