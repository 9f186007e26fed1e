"""Weight sync by broadcast: fill a bucket, broadcast it, load it in vLLM, confirm.

The trainer's rank 0 and every worker of every server form one process group: nccl between GPUs, gloo on CPUs. A bucket
is a flat byte buffer that holds some of the weights at known offsets, with a checksum at its end. One push:

    join      only if the group is new or broken: call the workers to a store, form the group, prove the secret
    plan      call strop_receive on all workers with the list of buckets (names, dtypes, shapes, offsets)
    send      for each bucket: copy the next weights into one of two buffers, add the checksum, broadcast
    load      the workers receive a bucket, check the sum and load its tensors (servers/worker/strop_load.py)
    confirm   every worker answers with the version and the bytes it loaded, and both are compared

While bucket i is being broadcast, bucket i + 1 is being filled here and bucket i - 1 loaded by the workers. The other
half of the transfer is servers/worker/strop_wire.py (GroupLink) and strop_worker.py. Without servers the group has one
rank, which tests the sending side alone.
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
        host: str = "127.0.0.1",  # an address of this process that the servers can reach
    ) -> None:
        self.link = Link(source, loop, device=device, bucket_bytes=bucket_bytes, host=host)
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self.group: Any = None

    def model_name(self, version: int) -> str:
        return BASE

    def push(self, servers: Sequence[VllmServer], version: int) -> SyncReport:
        """Replace all weights of all servers by `version`, or raise and leave the group."""
        link, started = self.link, time.monotonic()
        if self.group is None or not link.ready(servers):
            self._join(servers)
        joined = time.monotonic()
        plan = {"version": version, "buckets": link.buckets, "timeout": link.limit}
        calls = Calls(link.loop, servers, "strop_receive", link.limit + 30.0, [{"plan": plan}] * len(servers))
        try:
            with link.blaming(calls), closing(link.source.tensors()) as tensors:
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
        """A new process group with all workers, each of which has proved that it holds the secret."""
        link = self.link
        self._drop()
        world, calls = link.meet(servers, self.backend)
        try:
            with link.blaming(calls):
                self.group = strop_wire.make_group(
                    link.store, 0, world, backend=self.backend, device=link.device, host=link.host, timeout=link.limit
                )
                strop_wire.check_members(
                    self.group,
                    0,
                    world,
                    link.secret,
                    device=link.device,
                    deadline=time.monotonic() + link.limit,
                    check=calls.check,
                )
                calls.results()
        except BaseException:
            self._drop()
            raise

    def _send(self, tensors: Iterator[tuple[str, Tensor]], calls: Calls, deadline: float) -> None:
        """Fill and broadcast bucket after bucket, two of them in flight."""
        link = self.link
        size = buffer_size(link.buckets)
        buffers = [torch.empty(size, dtype=torch.uint8, device=link.device) for _ in range(2)]
        works: list[Any] = []
        for i, bucket in enumerate(link.buckets):
            if i >= 2:  # bucket i - 2 went out from this buffer
                strop_wire.wait_work(works[i - 2], deadline, calls.check)
            fill(bucket, tensors, buffers[i % 2])
            synchronize(link.device)  # collectives of the training group must be done before this group is used
            works.append(strop_wire.broadcast(self.group, strop_wire.span(bucket, buffers[i % 2])))
        for work in works[-2:]:
            strop_wire.wait_work(work, deadline, calls.check)

    def close(self) -> None:
        self.link.close()
        self._drop()

    def _drop(self) -> None:
        held = [self.group]
        self.group = None
        if held[0] is not None:
            strop_wire.drop_group(held, self.backend)
        self.link.leave()
