"""Inputs of checkpointed blocks in main memory, from the forward pass to the backward pass (--activation-offloading).

    offload_inputs(blocks, device)     # after gradient_checkpointing_enable()

Gradient checkpointing keeps the input of every block, from which the backward pass computes the block again. Here these
inputs are copied to page-locked memory on a CUDA stream of their own, and back again while the backward pass is in the
block behind. At most two are on the GPU at a time: in the forward pass that of the running block and the one still
being copied, in the backward pass that of the running block and the next one. The last block's input never leaves, as
it is needed first.

Streams wait for each other by events; the host never waits. Memory of a tensor may be used again only once the copy is
over, so a tensor is held until the stream that computes has been told to wait for its copy. All copies run on one
stream, in order, so a slab of host memory can be written again at once. On a CPU the same code makes plain copies.
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
    """Let checkpointed blocks keep their inputs in main memory."""
    offloader, blocks = Offloader(device), list(blocks)
    for block in blocks:
        assert hasattr(block, "_gradient_checkpointing_func"), f"{type(block).__name__}: is not checkpointed"
        block._gradient_checkpointing_func = partial(offloader.checkpoint, stays=block is blocks[-1])
    return offloader


def offloads(block: nn.Module) -> bool:
    """Whether offload_inputs has been called for it."""
    function = getattr(getattr(block, "_gradient_checkpointing_func", None), "func", None)
    return isinstance(getattr(function, "__self__", None), Offloader)


class Slabs:
    """Host memory in pieces of one size, used again and again; page-locked for a GPU as far as the system allows."""

    def __init__(self, device: torch.device) -> None:
        self.is_locked = device.type == "cuda"
        self.free: list[Tensor] = []  # (SLAB,) uint8 each
        self.count = 0

    def take(self, num_bytes: int) -> list[Tensor]:
        return [self.free.pop() if self.free else self._new() for _ in range(-(-num_bytes // SLAB))]

    def has(self, num_bytes: int, most: float) -> bool:
        """Whether so much can be taken with at most `most` bytes in all, all of them locked."""
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
                log(f"only {self.count * SLAB >> 30} GiB of main memory could be locked; other copies are slower")
        return torch.empty(SLAB, dtype=torch.uint8)


class OffloadedInput:
    """The input of a block, which autograd holds until the block's backward pass is over."""

    def __init__(self, owner: Offloader, like: Tensor, before: Callable[[], OffloadedInput | None]) -> None:
        self.owner, self.before = owner, before  # the input that the backward pass needs next
        self.shape, self.dtype = like.shape, like.dtype
        self.tensor: Tensor | None = None  # on the device
        self.event: torch.cuda.Event | None = None  # of the copy that fills it
        self.slabs: list[Tensor] = []

    def __del__(self) -> None:
        self.owner.drop(self)


class Offloader:
    """Moves the inputs of one model's blocks."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.slabs = device, Slabs(device)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.leaving: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
        self.newest: Callable[[], OffloadedInput | None] = lambda: None  # of the inputs that were kept

    def checkpoint(self, function: Callable[..., Any], *args: Any, stays: bool) -> Any:
        """In place of torch's: the first argument is kept here; `stays` on the device."""
        # The hooks must not hold the tensor itself: autograd holds on to them.
        where = args[0].data_ptr() if args and isinstance(args[0], Tensor) else None
        with saved_tensors_hooks(partial(self.pack, where, stays), self.unpack):
            return checkpoint(function, *args, use_reentrant=False)

    def pack(self, where: int | None, stays: bool, tensor: Tensor) -> Tensor | OffloadedInput:
        if tensor.data_ptr() != where or not tensor.numel() or not tensor.is_contiguous():
            return tensor
        kept = OffloadedInput(self, tensor, self.newest)
        self.newest = weakref.ref(kept)
        if stays:
            kept.tensor = tensor.detach()
            self._let_go(0)
            return kept
        kept.slabs = self.slabs.take(tensor.nbytes)
        event = self._copy(zip(kept.slabs, bytes_of(tensor).split(SLAB), strict=True))
        self.leaving.append((tensor.detach(), event))
        self._let_go(2)
        return kept

    def unpack(self, kept: Tensor | OffloadedInput) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        self._let_go(0)
        self._bring_back(kept)
        self._wait(kept.event)
        tensor, kept.event = kept.tensor, None
        if kept.slabs:
            kept.tensor = None  # a second backward pass copies again
        if before := kept.before():
            self._bring_back(before)
        return tensor

    def drop(self, kept: OffloadedInput) -> None:
        """At the end of a block's backward pass, or of one that never came."""
        self._wait(kept.event)
        self.slabs.give_back(kept.slabs)

    def _let_go(self, most: int) -> None:
        """Hold at most so many tensors whose copies may be under way."""
        while len(self.leaving) > most:
            tensor, event = self.leaving.popleft()
            self._wait(event)
            del tensor

    def _bring_back(self, kept: OffloadedInput) -> None:
        if kept.tensor is None:
            kept.tensor = torch.empty(kept.shape, dtype=kept.dtype, device=self.device)
            kept.event = self._copy(zip(bytes_of(kept.tensor).split(SLAB), kept.slabs, strict=True))

    def _copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
        """Copy (to, from), of which a slab may be the longer; behind what has been computed so far."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):  # None: does nothing
            for to, source in pairs:
                size = min(len(to), len(source))
                to[:size].copy_(source[:size], non_blocking=True)
        return None if self.stream is None else self.stream.record_event()

    def _wait(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


def bytes_of(tensor: Tensor) -> Tensor:  # (nbytes,) uint8
    """The memory of a contiguous tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8)
