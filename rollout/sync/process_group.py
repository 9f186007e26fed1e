"""Weights by broadcast: nccl between GPUs, gloo on CPUs, one flat bucket at a time to every worker of every server.

The trainer's rank 0 and all workers form a group of their own. While bucket i is on its way, bucket i + 1 is being
made here and bucket i - 1 loaded there. Without servers the group has one rank: that runs this side alone.
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
    """All weights through one process group of trainer and workers."""

    needs_pause = True

    def __init__(
        self,
        source: WeightSource,
        loop: Loop,
        *,
        device: torch.device,
        bucket_bytes: int = 512 * MIB,
        host: str = "127.0.0.1",  # address of this process that servers can reach
    ) -> None:
        self.link = Link(source, loop, device=device, bucket_bytes=bucket_bytes, host=host)
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self.group: Any = None

    def model_name(self, version: int) -> str:
        return BASE

    def push(self, servers: Sequence[VllmServer], version: int) -> SyncReport:
        link, started = self.link, time.monotonic()
        self._refuse_shared_gpu(servers)
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

    def close(self) -> None:
        self.link.close()
        self._drop()

    def _send(self, tensors: Iterator[tuple[str, Tensor]], calls: Calls, deadline: float) -> None:
        link = self.link
        size = buffer_size(link.buckets)
        buffers = [torch.empty(size, dtype=torch.uint8, device=link.device) for _ in range(2)]
        works: list[Any] = []
        for i, bucket in enumerate(link.buckets):
            if i >= 2:
                strop_wire.wait_work(works[i - 2], deadline, calls.check)
            fill(bucket, tensors, buffers[i % 2])
            synchronize(link.device)  # a gather of the training group must be over before this group is used
            works.append(strop_wire.broadcast(self.group, strop_wire.span(bucket, buffers[i % 2])))
        for work in works[-2:]:
            strop_wire.wait_work(work, deadline, calls.check)

    def _join(self, servers: Sequence[VllmServer]) -> None:
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

    def _drop(self) -> None:
        held = [self.group]
        self.group = None
        if held[0] is not None:
            strop_wire.drop_group(held, self.backend)
        self.link.leave()

    def _refuse_shared_gpu(self, servers: Sequence[VllmServer]) -> None:
        if self.link.device.type != "cuda":
            return
        ours = str(torch.cuda.get_device_properties(self.link.device).uuid)
        for server in servers:
            if ours in (server.info.device_uuids or ()):
                raise ValueError(
                    f"sync.backend=process_group: {server.url} runs on the trainer's GPU, where nccl cannot join two "
                    "processes; use --sync.backend ipc, or give the server another GPU"
                )
