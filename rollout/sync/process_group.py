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
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollout.servers.command import BASE
from rollout.servers.worker import strop_wire
from rollout.sync.base import (
    MIB,
    Calls,
    Link,
    SyncReport,
    WeightSource,
    buffer_size,
    check_loaded,
    fill,
    slowest,
    synchronize,
)

if TYPE_CHECKING:
    from rollout.servers.client import VllmServer
    from rollout.servers.loop import Loop


class ProcessGroupSync:
    """Sends all weights through one process group of the trainer and all workers."""

    needs_pause = True

    def __init__(
        self,
        source: WeightSource,
        loop: Loop,
        *,
        device: torch.device,
        bucket_bytes: int = 512 * MIB,
        host: str = "127.0.0.1",  # trainer address that the servers can reach
    ) -> None:
        self.link = Link(source, loop, device=device, bucket_bytes=bucket_bytes, host=host)
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self.group: Any = None

    def model_name(self, version: int) -> str:
        return BASE

    def push(self, servers: Sequence[VllmServer], version: int) -> SyncReport:
        """Replace all weights of all servers with `version`, or raise and leave the group."""
        link, started = self.link, time.monotonic()
        if self.group is None or not link.ready(servers):
            self._join(servers)
        joined = time.monotonic()
        plan = {"version": version, "buckets": link.buckets, "timeout": link.limit}
        calls = Calls(link.loop, servers, "strop_receive", link.limit + 30.0, [{"plan": plan}] * len(servers))
        try:
            with link.transfer(calls), closing(link.source.tensors()) as tensors:
                self._send(tensors, calls, joined + link.limit)
                results = calls.results()
            check_loaded(results, version, link.num_bytes)
        except BaseException:
            self._drop()
            raise
        now = time.monotonic()
        phases = {"join": joined - started, "transfer": now - joined, **slowest(results)}
        return SyncReport(version, "process_group", link.num_bytes, now - started, phases)

    def _join(self, servers: Sequence[VllmServer]) -> None:
        """Form a new process group with all workers and verify that each of them knows the secret."""
        link = self.link
        self._drop()
        world, calls = link.meet(servers, self.backend)
        try:
            with link.transfer(calls):
                self.group = strop_wire.make_group(
                    link.store, 0, world, backend=self.backend, device=link.device, host=link.host, timeout=link.limit
                )
                deadline = time.monotonic() + link.limit
                strop_wire.check_members(
                    self.group, 0, world, link.secret, device=link.device, deadline=deadline, check=calls.check
                )
                calls.results()
        except BaseException:
            self._drop()
            raise

    def _send(self, tensors: Iterator[tuple[str, Tensor]], calls: Calls, deadline: float) -> None:
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

    def close(self) -> None:
        self.link.close()
        self._drop()

    def _drop(self) -> None:
        groups, self.group = [self.group], None
        if groups[0] is not None:
            strop_wire.drop_group(groups, self.backend)
        self.link.leave()
