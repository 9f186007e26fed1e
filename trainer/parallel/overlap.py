"""Replicas sum their gradients while the backward pass still runs.

    overlap = Overlap(model)                    # once, before the first backward pass
    for row in overlap.passes(rows): ...        # forward and backward; the last loop of an optimizer step
    overlap.finish()                            # before gradients are read

Gradients are summed in buckets, from the last layer to the first, as the backward pass of the last micro-batch
completes them. The order of buckets is fixed, so all ranks launch the same collectives in the same order, also one that
skips a micro-batch or uses fewer parameters: what the backward pass has not completed is launched at the end of the
loop. Behind the backward pass, the loop must contain no other collective of all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trainer.parallel.comm import begin_sum
from trainer.parallel.dtensor import is_dtensor

T = TypeVar("T", bound=Any)
BUCKET = 25 << 20  # bytes
UNDER_WAY = 8  # most buckets that are summed at a time, beside the gradients themselves


class Overlap:
    """Gradients of one model, which every rank holds in full."""

    def __init__(self, model: nn.Module) -> None:
        trained = [p for p in model.parameters() if p.requires_grad and not is_dtensor(p)]
        self.buckets = list(buckets(reversed(trained)))
        self.number = {p: number for number, bucket in enumerate(self.buckets) for p in bucket}
        self.missing: list[set[nn.Parameter]] = []  # of each bucket; empty outside of the last micro-batch
        self.launched = 0  # buckets
        self.under_way: deque[tuple[list[nn.Parameter], Tensor, Callable[[], None]]] = deque()
        for p in trained:
            p.register_post_accumulate_grad_hook(self._completed)

    def passes(self, rows: Sequence[T]) -> Iterator[T]:
        """The micro-batches of the last loop of a step; equally many on every rank."""
        assert rows and not self.launched, (len(rows), self.launched)
        for number in range(len(rows)):
            if number == len(rows) - 1:
                self.missing = [set(bucket) for bucket in self.buckets]
            yield rows[number]
        self.missing = []
        while self.launched < len(self.buckets):
            self._launch()

    def finish(self) -> None:
        """Wait for the sums, on CUDA only on the device; they are then in p.grad."""
        while self.under_way:
            self._collect()
        self.launched = 0

    def _completed(self, p: nn.Parameter) -> None:
        """After each backward pass that reaches the parameter."""
        number = self.number[p]
        assert number >= self.launched, f"the gradient of a {tuple(p.shape)} parameter has changed after it was summed"
        if self.missing:
            self.missing[number].discard(p)
            while self.launched < len(self.buckets) and not self.missing[self.launched]:
                self._launch()

    @torch.no_grad()
    def _launch(self) -> None:
        bucket = self.buckets[self.launched]
        self.launched += 1
        flat = flat_gradients(bucket)
        self.under_way.append((bucket, flat, begin_sum(flat, "gradients")))
        if len(self.under_way) > UNDER_WAY:
            self._collect()

    @torch.no_grad()
    def _collect(self) -> None:
        bucket, flat, wait = self.under_way.popleft()
        wait()
        write_gradients(bucket, flat)


def buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Split parameters, in order, into lists of one dtype and at most BUCKET bytes."""
    held: list[nn.Parameter] = []
    for p in parameters:
        if held and (held[0].dtype != p.dtype or sum(x.nbytes for x in held) + p.nbytes > BUCKET):
            yield held
            held = []
        held.append(p)
    if held:
        yield held


def flat_gradients(parameters: list[nn.Parameter]) -> Tensor:  # (N,)
    for p in parameters:
        if p.grad is None:  # no micro-batch of this rank reached it
            p.grad = torch.zeros_like(p)
    return torch.cat([p.grad.flatten() for p in parameters])


def write_gradients(
    parameters: list[nn.Parameter],
    flat: Tensor,  # (N,) of all of them
) -> None:
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad.copy_(part.view_as(p))
