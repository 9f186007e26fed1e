"""Offload the inputs of checkpointed blocks to main memory until the backward pass (--activation-offloading).

    offload_inputs(blocks, device)     # after gradient_checkpointing_enable()

Gradient checkpointing keeps the input of every block, and the backward pass recomputes the block from it. This module
copies these inputs to page-locked memory on a separate CUDA stream, and copies each of them back while the backward
pass runs the following block. At most two inputs are on the GPU at a time: the running block's, and the input that is
being copied out (forward pass) or in (backward pass). The last block's input stays on the GPU: it is needed first.

Streams wait on each other's events; the host never waits. A tensor's memory must not be reused before its copy
finishes, so it is kept alive until the compute stream waits on that copy. All copies run in order on one stream, so a
host slab can be rewritten immediately. On a CPU the same code makes plain copies.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from trainer.parallel.watch import log

SLAB = 16 << 20  # bytes; torch rounds page-locked memory up to a power of two


def offload_inputs(blocks: Iterable[nn.Module], device: torch.device) -> Offloader:
    """Make checkpointed blocks keep their inputs in main memory."""
    offloader, blocks = Offloader(device), list(blocks)
    for block in blocks:
        assert hasattr(block, "_gradient_checkpointing_func"), f"{type(block).__name__} is not checkpointed"
        block._gradient_checkpointing_func = partial(offloader.checkpoint, stays=block is blocks[-1])
    return offloader


def offloads(block: nn.Module) -> bool:
    """Return whether offload_inputs was called for the block."""
    function = getattr(getattr(block, "_gradient_checkpointing_func", None), "func", None)
    return isinstance(getattr(function, "__self__", None), Offloader)


class Slabs:
    """Pool of equal pieces of host memory; page-locked for a GPU as far as the system allows."""

    def __init__(self, device: torch.device) -> None:
        self.is_locked = device.type == "cuda"
        self.free: list[Tensor] = []  # (SLAB,) uint8 each
        self.count = 0

    def take(self, num_bytes: int) -> list[Tensor]:
        return [self.free.pop() if self.free else self._new() for _ in range(-(-num_bytes // SLAB))]

    def has(self, num_bytes: int, most: float) -> bool:
        """Return whether this many bytes can be taken while the pool stays within `most` bytes, all of them locked."""
        new = max(0, -(-num_bytes // SLAB) - len(self.free))
        return new == 0 or (self.is_locked and (self.count + new) * SLAB <= most)

    def give_back(self, slabs: list[Tensor]) -> None:
        self.free.extend(slabs)

    def _new(self) -> Tensor:
        self.count += 1
        if self.is_locked:
            try:
                return torch.empty(SLAB, dtype=torch.uint8, pin_memory=True)
            except RuntimeError:
                self.is_locked = False
                log(f"offload: locked only {self.count * SLAB >> 30} GiB of main memory; other copies are slower")
        return torch.empty(SLAB, dtype=torch.uint8)


class OffloadedInput:
    """The input of a block, which autograd keeps until the block's backward pass ends."""

    def __init__(self, owner: Offloader, like: Tensor, previous: Callable[[], OffloadedInput | None]) -> None:
        self.owner, self.previous = owner, previous  # the previous block's input, which the backward pass needs next
        self.shape, self.dtype = like.shape, like.dtype
        self.tensor: Tensor | None = None  # on the device
        self.event: torch.cuda.Event | None = None  # end of the copy to the device
        self.slabs: list[Tensor] = []

    def __del__(self) -> None:
        self.owner.drop(self)


class Offloader:
    """Copies the inputs of one model's blocks to main memory and back."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.slabs = device, Slabs(device)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.leaving: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
        self.newest: Callable[[], OffloadedInput | None] = lambda: None  # most recently packed input

    def checkpoint(self, function: Callable[..., Any], *args: Any, stays: bool) -> Any:
        """Replace torch's checkpoint function: offload the first argument, unless it `stays` on the device."""
        # The hooks take the address, not the tensor: autograd keeps them alive.
        address = args[0].data_ptr() if args and isinstance(args[0], Tensor) else None
        with saved_tensors_hooks(partial(self.pack, address, stays), self.unpack):
            return checkpoint(function, *args, use_reentrant=False)

    def pack(self, address: int | None, stays: bool, tensor: Tensor) -> Tensor | OffloadedInput:
        if tensor.data_ptr() != address or not tensor.numel() or not tensor.is_contiguous():
            return tensor
        packed = OffloadedInput(self, tensor, self.newest)
        self.newest = weakref.ref(packed)
        if stays:
            packed.tensor = tensor.detach()
            self._release(0)
            return packed
        packed.slabs = self.slabs.take(tensor.nbytes)
        event = self._copy(zip(packed.slabs, bytes_of(tensor).split(SLAB), strict=True))
        self.leaving.append((tensor.detach(), event))
        self._release(2)
        return packed

    def unpack(self, packed: Tensor | OffloadedInput) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self._release(0)
        self._load(packed)
        self._wait(packed.event)
        tensor, packed.event = packed.tensor, None
        if packed.slabs:
            packed.tensor = None  # a second backward pass copies again
        if previous := packed.previous():
            self._load(previous)
        return tensor

    def drop(self, packed: OffloadedInput) -> None:
        """Free the slabs of an input, after the block's backward pass or if there was none."""
        self._wait(packed.event)
        self.slabs.give_back(packed.slabs)

    def _release(self, most: int) -> None:
        """Keep at most this many tensors with copies in flight."""
        while len(self.leaving) > most:
            tensor, event = self.leaving.popleft()
            self._wait(event)
            del tensor

    def _load(self, packed: OffloadedInput) -> None:
        if packed.tensor is None:
            packed.tensor = torch.empty(packed.shape, dtype=packed.dtype, device=self.device)
            packed.event = self._copy(zip(bytes_of(packed.tensor).split(SLAB), packed.slabs, strict=True))

    def _copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
        """Copy source to target after all work launched so far. The slab may be longer."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):  # no effect if None
            for target, source in pairs:
                size = min(len(target), len(source))
                target[:size].copy_(source[:size], non_blocking=True)
        return None if self.stream is None else self.stream.record_event()

    def _wait(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


def bytes_of(tensor: Tensor) -> Tensor:  # (nbytes,) uint8
    """Return the memory of a contiguous tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8)
