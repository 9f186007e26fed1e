"""Weight sync through shared memory: CUDA IPC if trainer and server share a GPU, files in /dev/shm on CPUs.

Two buffers are shared when the workers join. For bucket i, the trainer waits until all workers have set done/(i - 2),
fills buffer i % 2 and sets ready/i in the store; each worker loads the bucket and sets done/i/RANK. Handles are sent as
JSON; nothing is pickled. The receiving side is SharedLink in servers/worker/strop_wire.py.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from data.errors import UserError
from rollout.servers.options import LOOPBACK
from rollout.servers.worker import strop_wire
from rollout.sync.base import Calls, LinkSync, WeightSource, buffer_size, fill, synchronize

if TYPE_CHECKING:
    from rollout.servers.client import VllmServer
    from rollout.servers.loop import Loop

ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class IpcSync(LinkSync):
    """Sends all weights through two shared buffers."""

    name = "ipc"

    def __init__(self, source: WeightSource, loop: Loop, *, device: torch.device, **options: Any) -> None:
        if device.type == "cuda":
            check_allocator()
        super().__init__(source, loop, device=device, **options)
        self.buffers: list[Tensor] = []
        self.world = 1

    def _send(self, tensors: Iterator[tuple[str, Tensor]], turn: str, calls: Calls, deadline: float) -> None:
        link = self.link
        workers = range(1, self.world)
        for i, bucket in enumerate(link.buckets):
            if i >= 2 and workers:
                keys = [f"{turn}/done/{i - 2}/{rank}" for rank in workers]
                strop_wire.wait_keys(link.store, keys, deadline, calls.check)
            fill(bucket, tensors, self.buffers[i % 2])
            synchronize(link.device)  # the bytes must be written before ready is set
            link.store.set(f"{turn}/ready/{i}")

    def _join(self, servers: Sequence[VllmServer]) -> None:
        size = buffer_size(self.link.buckets)
        check_devices(servers, self.link.device)
        with shared_buffers(size, self.link.device) as (buffers, paths):
            staging = [
                # One set of handles per worker, because torch counts the processes that open a handle.
                [[strop_wire.share(b, path) for b, path in zip(buffers, paths, strict=True)] for _ in range(workers)]
                for workers in (server.info.workers for server in servers)
            ]
            self.world, calls = self.link.meet(servers, "ipc", staging)
            with self.link.transfer(calls):
                calls.results()
        self.buffers = buffers

    def _drop(self) -> None:
        self.buffers = []
        self.link.leave()
        if self.link.device.type == "cuda":
            torch.cuda.ipc_collect()  # frees memory that workers have closed


@contextlib.contextmanager
def shared_buffers(size: int, device: torch.device) -> Iterator[tuple[list[Tensor], list[str | None]]]:
    """Context manager: two buffers and, on a CPU, their files. The files are unlinked at the end."""
    if device.type == "cuda":
        yield [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)], [None, None]
        return
    memory = "/dev/shm"
    parent = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="strop-ipc-", dir=parent) as folder:
        paths: list[str | None] = []
        buffers = []
        for name in ("0", "1"):
            path = Path(folder) / name
            with path.open("wb") as file:  # reserve space: a full disk would kill the process later
                os.posix_fallocate(file.fileno(), 0, size)
            paths.append(str(path))
            buffers.append(torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8))
        yield buffers, paths


def check_allocator() -> None:
    """Raise if PyTorch uses expandable segments, which CUDA IPC cannot share."""
    for name in ALLOCATOR:
        value = os.environ.get(name, "").replace(" ", "").lower()
        if "expandable_segments:true" in value or "expandable_segments:1" in value:
            raise UserError(
                f"{name}={os.environ[name]}: expandable segments cannot be shared with another process; remove "
                "expandable_segments, or use --sync.backend filesystem"
            )


def check_devices(servers: Sequence[Any], device: torch.device) -> None:
    """Raise unless all servers use the trainer's device, or on a CPU the trainer's machine."""
    uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    for server in servers:
        if uuid is None and urlsplit(server.url).hostname not in LOOPBACK:
            raise UserError(f"sync.backend=ipc: {server.url} is on another machine; use --sync.backend process_group")
        server_uuids = set(server.info.device_uuids or ()) - {None}
        if server_uuids != ({uuid} if uuid else set()):
            raise UserError(
                f"sync.backend=ipc: {server.url} runs on {', '.join(sorted(server_uuids)) or 'a CPU'}, but the trainer "
                f"on {uuid or 'a CPU'}; ipc needs the same device, use --sync.backend process_group"
            )
