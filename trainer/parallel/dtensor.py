"""Sharded tensors (DTensor): gather them, read and write this rank's shard. Plain tensors pass through unchanged."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def gather_with_grad(weight: Tensor) -> Tensor:
    """All of a weight on every rank; the backward pass sums its gradient over ranks and scatters it to the shards."""
    if not is_dtensor(weight):
        return weight
    from torch.distributed.tensor import Partial

    return weight.full_tensor(grad_placements=[Partial()] * weight.device_mesh.ndim)


def is_dtensor(x: Any) -> bool:
    return hasattr(x, "full_tensor")


def reshard(model: Any) -> None:
    """Free what a forward pass without a backward pass has left gathered: parameters are shards again."""
    for module in model.modules():
        if hasattr(module, "set_requires_gradient_sync"):  # FSDP2's
            module.reshard()


def gather(tensor: Tensor) -> Tensor:
    """All of a tensor, without gradient; a collective if it is sharded."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's shard."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """The slices of the full tensor that this rank's shard covers."""
    if not is_dtensor(tensor):
        return tuple(slice(0, size) for size in tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, first = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(first, shape, strict=True))


def is_first_copy(tensor: Tensor) -> bool:
    """Whether no lower rank holds the same shard."""
    places = zip(tensor.device_mesh.get_coordinate(), tensor.placements, strict=True)
    return all(at == 0 or placement.is_shard() for at, placement in places)


def copy_into_shard(target: Tensor, value: Tensor) -> None:
    """Copy this rank's slice of a full tensor into its shard; no communication."""
    local(target).copy_(value[local_slices(target)])
