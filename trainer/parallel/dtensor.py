"""Tensors that lie in shards over ranks (DTensor): gathered, and written from whole ones. Others pass through."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def gather_with_grad(weight: Tensor) -> Tensor:
    """A sharded weight gathered, its gradient added up over ranks and scattered; any other as it is."""
    if not is_dtensor(weight):
        return weight
    from torch.distributed.tensor import Partial

    return weight.full_tensor(grad_placements=[Partial()] * weight.device_mesh.ndim)


def is_dtensor(x: Any) -> bool:
    return hasattr(x, "full_tensor")


def reshard(model: Any) -> None:
    """Give back what a forward pass without a backward has left gathered: the model's parameters are shards again."""
    for module in model.modules():
        if hasattr(module, "set_requires_gradient_sync"):  # FSDP2's
            module.reshard()


def gather(tensor: Tensor) -> Tensor:
    """All of a tensor, sharded or not; every rank takes part."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of it."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Which part of the whole that is."""
    if not is_dtensor(tensor):
        return tuple(slice(0, size) for size in tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, first = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(first, shape, strict=True))


def is_first_copy(tensor: Tensor) -> bool:
    """Whether no rank before this one holds the same part of a sharded tensor."""
    places = zip(tensor.device_mesh.get_coordinate(), tensor.placements, strict=True)
    return all(at == 0 or placement.is_shard() for at, placement in places)


def copy_into_shard(target: Tensor, value: Tensor) -> None:
    """Write a whole tensor into one that may be sharded: each rank takes its part, nothing is sent."""
    local(target).copy_(value[local_slices(target)])
