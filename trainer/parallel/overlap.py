"""Sum the gradients of replicas while the backward pass still runs.

    overlap = Overlap(model)                         # once, before the first backward pass
    for mb in overlap.passes(micro_batches): ...     # forward and backward; the last loop of an optimizer step
    overlap.finish()                                 # before gradients are read

Gradients are summed in buckets, from the last layer to the first, as the backward pass of the last micro-batch
completes them. The order of buckets is fixed, so all ranks launch the same collectives in the same order, even a rank
that skips a micro-batch or uses fewer parameters: incomplete buckets are launched at the end of the loop. After the
backward pass, the loop must not contain other collectives over all ranks.
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
MAX_IN_FLIGHT = 8  # maximum buckets in flight, each a copy of its gradients


class Overlap:
    """Sums the gradients of one replicated model."""

    def __init__(self, model: nn.Module) -> None:
        trained = [p for p in model.parameters() if p.requires_grad and not is_dtensor(p)]
        self.buckets = list(buckets(reversed(trained)))
        self.bucket_index = {p: i for i, bucket in enumerate(self.buckets) for p in bucket}
        self.missing: list[set[nn.Parameter]] = []  # per bucket; empty outside of the last micro-batch
        self.launched = 0  # number of buckets
        self.in_flight: deque[tuple[list[nn.Parameter], Tensor, Callable[[], None]]] = deque()
        for p in trained:
            p.register_post_accumulate_grad_hook(self._completed)

    def passes(self, micro_batches: Sequence[T]) -> Iterator[T]:
        """Yield the micro-batches of the last loop of a step; the same number on every rank."""
        assert micro_batches and not self.launched, (len(micro_batches), self.launched)
        for i in range(len(micro_batches)):
            if i == len(micro_batches) - 1:
                self.missing = [set(bucket) for bucket in self.buckets]
            yield micro_batches[i]
        self.missing = []
        while self.launched < len(self.buckets):
            self._launch()

    def finish(self) -> None:
        """Wait for the sums (on CUDA, only the device waits) and write them to p.grad."""
        while self.in_flight:
            self._collect()
        self.launched = 0

    def _completed(self, p: nn.Parameter) -> None:
        """Launch full buckets; called after each backward pass that reaches the parameter."""
        index = self.bucket_index[p]
        assert index >= self.launched, f"the gradient of a {tuple(p.shape)} parameter changed after it was summed"
        if self.missing:
            self.missing[index].discard(p)
            while self.launched < len(self.buckets) and not self.missing[self.launched]:
                self._launch()

    @torch.no_grad()
    def _launch(self) -> None:
        bucket = self.buckets[self.launched]
        self.launched += 1
        flat = flat_gradients(bucket)
        self.in_flight.append((bucket, flat, begin_sum(flat, "gradients")))
        if len(self.in_flight) > MAX_IN_FLIGHT:
            self._collect()

    @torch.no_grad()
    def _collect(self) -> None:
        bucket, flat, wait = self.in_flight.popleft()
        wait()
        write_gradients(bucket, flat)


def buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Split parameters, in order, into lists of one dtype and at most BUCKET bytes."""
    bucket: list[nn.Parameter] = []
    for p in parameters:
        if bucket and (bucket[0].dtype != p.dtype or sum(x.nbytes for x in bucket) + p.nbytes > BUCKET):
            yield bucket
            bucket = []
        bucket.append(p)
    if bucket:
        yield bucket


def flat_gradients(parameters: list[nn.Parameter]) -> Tensor:  # (N,)
    for p in parameters:
        if p.grad is None:  # no micro-batch of this rank reached it
            p.grad = torch.zeros_like(p)
    return torch.cat([p.grad.flatten() for p in parameters])


def write_gradients(
    parameters: list[nn.Parameter],
    flat: Tensor,  # (N,) concatenated gradients
) -> None:
    for p, grad in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad.copy_(grad.view_as(p))
