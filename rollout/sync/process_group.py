"""Weight sync by broadcast: fill a bucket, broadcast it, load it in vLLM, confirm.

The trainer's rank 0 and all workers of all servers form one process group: nccl between GPUs, gloo on CPUs. A bucket is
a flat byte buffer with some of the weights at known offsets and a checksum at its end. One push:

    join      only if the group is new or broken: connect the workers to a store, form the group, verify the secret
    plan      call strop_receive on all workers with the list of buckets (names, dtypes, shapes, offsets)
    send      for each bucket: copy the next weights into one of two buffers, append the checksum, broadcast
    load      workers receive the bucket, verify the checksum and load its tensors (servers/worker/strop_load.py)
    confirm   every worker reports the version and the bytes it loaded; both must match

While bucket i is broadcast, the trainer fills bucket i + 1 and the workers load bucket i - 1. The receiving side is
servers/worker/strop_wire.py (GroupLink) and strop_worker.py. Without servers the group has one rank, which tests the
sending side alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollout.servers.worker import strop_wire
from rollout.sync.base import Calls, LinkSync, WeightSource, buffer_size, fill, synchronize

if TYPE_CHECKING:
    from rollout.servers.client import VllmServer
    from rollout.servers.loop import Loop


class ProcessGroupSync(LinkSync):
    """Sends all weights through one process group of the trainer and all workers."""

    name = "process_group"

    def __init__(self, source: WeightSource, loop: Loop, *, device: torch.device, **options: Any) -> None:
        super().__init__(source, loop, device=device, **options)
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self.group: Any = None

    def _join(self, servers: Sequence[VllmServer]) -> None:
        """Form a new process group with all workers and verify that each of them knows the secret."""
        link = self.link
        world, calls = link.meet(servers, self.backend)
        with link.transfer(calls):
            self.group = strop_wire.make_group(
                link.store, 0, world, backend=self.backend, device=link.device, host=link.host, timeout=link.limit
            )
            deadline = time.monotonic() + link.limit
            strop_wire.check_members(
                self.group, 0, world, link.secret, device=link.device, deadline=deadline, check=calls.check
            )
            calls.results()

    def _send(self, tensors: Iterator[tuple[str, Tensor]], turn: str, calls: Calls, deadline: float) -> None:
        """Fill and broadcast all buckets, two of them in flight."""
        link = self.link
        size = buffer_size(link.buckets)
        buffers = [torch.empty(size, dtype=torch.uint8, device=link.device) for _ in range(2)]
        works: list[Any] = []
        for i, bucket in enumerate(link.buckets):
            if i >= 2:  # bucket i - 2 used this buffer
                strop_wire.wait_work(works[i - 2], deadline, calls.check)
            fill(bucket, tensors, buffers[i % 2])
            synchronize(link.device)  # collectives of the training group must finish before this group is used
            works.append(strop_wire.broadcast(self.group, strop_wire.span(bucket, buffers[i % 2])))
        for work in works[-2:]:
            strop_wire.wait_work(work, deadline, calls.check)

    def _drop(self) -> None:
        groups, self.group = [self.group], None
        if groups[0] is not None:
            strop_wire.drop_group(groups, self.backend)
        self.link.leave()
