"""Transfer weights from the trainer to a server's workers. Both sides run this file, which needs only torch.

Weights are sent in buckets: a flat byte buffer with tensors at known offsets and a checksum in its last 8 bytes. A link
moves buckets from the trainer to the workers: over a process group (nccl or gloo, one broadcast per bucket), or through
two buffers that both processes map (CUDA IPC on one GPU, a file in /dev/shm on a CPU) and use alternately. Both sides
meet at the trainer's TCPStore. Each attempt has its own prefix, so keys of a failed attempt are never read.

A TCPStore accepts every connection and lists its keys. So every link has a secret, which workers receive with the join
call over the authenticated control route. Keys in the store are HMACs under the secret, and the members of a new
process group prove to each other that they know the secret: a process without it cannot join. A relay between members
is not detected, and nothing is encrypted: keep the port in a private network.

The trainer's end of a link is Link in rollout/sync/base.py.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SUM_BYTES = 8
CODE_BYTES = 32  # sha256
BLOCK = 1024  # words per checksum block
POLL_S = 0.25  # how often a waiting side checks whether the other side has aborted
DROP_S = 3.0  # maximum seconds for a group to end; it takes a millisecond unless the other side hangs
END = "end"  # key that the trainer sets when it aborts


class PeerError(RuntimeError):
    """The other side is gone, late or has aborted; this side is not the cause."""

    strop_peer = True


# buckets ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """The tensors of one bucket or one file, under their checkpoint names."""

    tensors: list[tuple[str, Tensor]]
    num_bytes: int
    matches: Tensor | None = None  # () bool: the checksum matches
    is_borrowed: bool = False  # the tensors are views of a buffer that is reused after release
    release: Callable[[], None] = lambda: None


def checksum(data: Tensor) -> Tensor:  # () int64
    """Sum the 32-bit words, weighted by block so that swapped blocks change the sum. The size is a multiple of 4."""
    words = data.view(torch.int32)
    whole = len(words) // BLOCK * BLOCK
    blocks = words[:whole].view(-1, BLOCK).sum(dim=1, dtype=torch.int64)
    odd = torch.arange(1, 2 * len(blocks) + 1, 2, device=data.device)
    return (blocks * odd).sum() + words[whole:].sum(dtype=torch.int64)


def span(bucket: dict[str, Any], buffer: Tensor) -> Tensor:
    """Return the part of the buffer to send: the bucket and its checksum."""
    return buffer[: bucket["size"] + SUM_BYTES]


def seal(bucket: dict[str, Any], buffer: Tensor) -> None:
    """Write the checksum after the bytes."""
    size = bucket["size"]
    buffer[size : size + SUM_BYTES].view(torch.int64).copy_(checksum(buffer[:size]))


def views(bucket: dict[str, Any], buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the bucket's tensors as views of the buffer."""
    for name, dtype_name, shape, offset in bucket["tensors"]:
        dtype = getattr(torch, dtype_name)
        num_bytes = dtype.itemsize * math.prod(shape)
        yield name, buffer[offset : offset + num_bytes].view(dtype).view(shape)


def piece_of(bucket: dict[str, Any], buffer: Tensor, release: Callable[[], None] = lambda: None) -> Piece:
    size = bucket["size"]
    sent = buffer[size : size + SUM_BYTES].view(torch.int64)[0]
    tensors = list(views(bucket, buffer))
    return Piece(tensors, size, checksum(buffer[:size]) == sent, is_borrowed=True, release=release)


# the store, and waiting ------------------------------------------------------------------------------------------


class Store:
    """Keys that one side sets and the other polls; can be closed, unlike torch's store.

    torch's store listens as long as anything references it, even a frame in an old traceback, and waiting sides stop
    only when it ends. Keys are stored as HMACs, so a process without the secret cannot set them.
    """

    def __init__(self, inner: Any, prefix: str, secret: str) -> None:
        self.inner = dist.PrefixStore(prefix, inner)
        self.secret = secret

    def set(self, key: str) -> None:
        self._call(lambda inner: inner.set(self._name(key), b"1"))

    def has(self, keys: list[str]) -> bool:
        return self._call(lambda inner: inner.check([self._name(key) for key in keys]))

    def close(self) -> None:
        self.inner = None

    def _name(self, key: str) -> str:
        return code(self.secret, b"key", key.encode()).hex()

    def _call(self, do: Callable[[Any], Any]) -> Any:
        if self.inner is None:
            raise PeerError("the store is closed")
        try:
            return do(self.inner)
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise PeerError(f"the trainer's store is gone ({str(error)[:80]})") from None


def code(secret: str, *parts: bytes) -> bytes:
    """Return the HMAC of these parts under the secret, CODE_BYTES long."""
    return hmac.digest(secret.encode(), b"".join(len(part).to_bytes(8, "big") + part for part in parts), "sha256")


def new_store(host: str, prefix: str, secret: str, timeout: float) -> tuple[Store, int]:
    """Create the trainer's store on a free port of this address only; return the store and the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    limit = timedelta(seconds=timeout)
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        listener.listen(128)
        port = listener.getsockname()[1]
        handle = listener.detach()  # now owned by the store
        return Store(dist.TCPStore(host, port, None, True, limit, False, master_listen_fd=handle), prefix, secret), port


def wait_keys(store: Store, keys: list[str], deadline: float, check: Callable[[], None]) -> None:
    """Poll until all keys are set; `check` raises if the other side has aborted.

    torch's own wait prints a warning on every timeout.
    """
    wait_until(lambda: store.has(keys), deadline, check, keys[0])


def wait_until(done: Callable[[], bool], deadline: float, check: Callable[[], None], what: str) -> None:
    """Poll without blocking, so that a dead peer is detected with any backend."""
    checked = time.monotonic()
    pause = 1e-5
    while not done():
        now = time.monotonic()
        if now > deadline:
            raise PeerError(f"timed out waiting for {what}")
        if now - checked > POLL_S:
            checked = now
            check()
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)


def wait_work(work: Any, deadline: float, check: Callable[[], None]) -> None:
    """Wait until the collective has finished."""
    wait_until(work.is_completed, deadline, check, "a bucket")
    try:
        work.wait()
    except RuntimeError as error:  # gloo and nccl: the connection broke
        raise PeerError(f"the group broke: {str(error)[:200]}") from None


def address_towards(host: str) -> str:
    """Return this machine's address on the route to `host`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return probe.getsockname()[0]


# the process group -----------------------------------------------------------------------------------------------


def make_group(
    store: Store, rank: int, world: int, *, backend: str, device: torch.device, host: str, timeout: float
) -> Any:
    """Create a separate process group, without changing either side's default group."""
    limit = timedelta(seconds=timeout)
    try:
        if backend == "gloo":
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address_towards(host))]
            options._timeout = limit
            return dist.ProcessGroupGloo(store.inner, rank, world, options)
        with environment("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"), torch.cuda.device(device):
            # 2: clean up after a failure without ending the process.
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            group = dist.ProcessGroupNCCL(store.inner, rank, world, options)
            group.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
            return group
    except RuntimeError as error:  # gloo and nccl: another member did not join
        raise PeerError(f"the group could not be created: {str(error)[:200]}") from None


def broadcast(group: Any, data: Tensor) -> Any:
    """Start a broadcast from rank 0."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return group.broadcast([data], options)


def check_members(
    group: Any, rank: int, world: int, secret: str, *, device: torch.device, deadline: float, check: Callable[[], None]
) -> None:
    """Raise unless every member of a new group knows the secret.

    Each member sends a random challenge, then an HMAC of its rank and all challenges, so a proof cannot be replayed.
    """

    def exchange(payload: bytes) -> list[bytes]:
        sent = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)  # (CODE_BYTES,)
        received = [torch.empty_like(sent) for _ in range(world)]
        wait_work(group.allgather([received], [sent]), deadline, check)
        return [data.cpu().numpy().tobytes() for data in received]

    challenges = exchange(secrets.token_bytes(CODE_BYTES))
    proofs = exchange(code(secret, b"member", str(rank).encode(), *challenges))
    for other, proof in enumerate(proofs):
        if not hmac.compare_digest(proof, code(secret, b"member", str(other).encode(), *challenges)):
            raise PeerError(f"rank {other} of the weight group does not know the secret: an unknown process has joined")


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def drop_group(only_reference: list[Any], backend: str) -> None:
    """End the group in the list, whatever its state. The list must contain the only reference to it."""
    if backend == "nccl":
        only_reference[0].abort()  # shutdown would wait for collectives that never end
        return
    # A gloo group ends with its last reference, and its destructor waits for the other side's collectives. The wait is
    # limited, but a process that exits during it aborts.
    end = threading.Thread(target=only_reference.clear, daemon=True)
    end.start()
    end.join(DROP_S)


# shared buffers --------------------------------------------------------------------------------------------------


def share(buffer: Tensor, path: str | None = None) -> dict[str, Any]:
    """Return a JSON handle to map the buffer in another process. For CUDA, call this once per opening process."""
    if buffer.device.type != "cuda":
        return {"kind": "file", "path": path, "size": len(buffer)}
    _, handle, size, offset, counter, counter_offset, event, wait = buffer.untyped_storage()._share_cuda_()
    return {
        "kind": "cuda",
        "handle": base64.b64encode(handle).decode(),
        "size": size,
        "offset": offset,
        "counter": base64.b64encode(counter).decode(),
        "counter_offset": counter_offset,
        "event": base64.b64encode(event).decode(),
        "wait": wait,
        "length": len(buffer),
    }


def open_shared(shared: dict[str, Any], device: torch.device) -> Tensor:
    """Map a buffer from `share` in another process on the same machine."""
    if shared["kind"] == "file":
        return torch.from_file(shared["path"], shared=True, size=shared["size"], dtype=torch.uint8)
    storage = torch.UntypedStorage._new_shared_cuda(
        device.index if device.index is not None else torch.cuda.current_device(),
        base64.b64decode(shared["handle"]),
        shared["size"],
        shared["offset"],
        base64.b64decode(shared["counter"]),
        shared["counter_offset"],
        base64.b64decode(shared["event"]),
        shared["wait"],
    )
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[: shared["length"]]


# the worker's end of a link --------------------------------------------------------------------------------------


def join(
    *,
    rank: int,  # this worker's rank in its server
    device: torch.device,
    host: str,
    port: int,
    prefix: str,
    secret: str,
    rank_offset: int,
    world: int,
    backend: str,
    timeout: float,
    staging: list[list[dict[str, Any]]] | None = None,  # for ipc: shared buffers per worker of this server
) -> GroupLink | SharedLink:
    """Connect to the trainer's store and, with process_group, join the group."""
    tcp = dist.TCPStore(host, port, None, False, timedelta(seconds=timeout), wait_for_workers=False)
    store = Store(tcp, prefix, secret)
    group_rank = rank_offset + rank
    if backend == "ipc":
        assert staging is not None
        shared = SharedLink(prefix, store, group_rank, [open_shared(handle, device) for handle in staging[rank]])
        store.set(f"here/{group_rank}")
        return shared
    store.set(f"here/{group_rank}")  # once all workers are here, the trainer joins the group, which blocks
    group = make_group(store, group_rank, world, backend=backend, device=device, host=host, timeout=timeout)
    link = GroupLink(prefix, store, group, backend, device)
    try:
        check_members(
            group, group_rank, world, secret, device=device, deadline=time.monotonic() + timeout, check=link.check
        )
    except BaseException:
        del group  # a gloo group ends with its last reference
        link.close()
        raise
    return link


@dataclass
class GroupLink:
    """A worker's end of a process group: receives bucket i + 1 while bucket i is being loaded."""

    prefix: str
    store: Store
    group: Any
    backend: str
    device: torch.device

    def receive(self, plan: dict[str, Any]) -> Iterator[Piece]:
        """Yield the buckets of the plan; the caller must load each bucket before taking the next."""
        deadline = time.monotonic() + plan["timeout"]
        buckets = plan["buckets"]
        size = max(bucket["size"] for bucket in buckets) + SUM_BYTES
        buffers = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2)]
        work = broadcast(self.group, span(buckets[0], buffers[0]))
        for i, bucket in enumerate(buckets):
            wait_work(work, deadline, self.check)
            if i + 1 < len(buckets):  # into the buffer whose tensors are already loaded
                work = broadcast(self.group, span(buckets[i + 1], buffers[(i + 1) % 2]))
            yield piece_of(bucket, buffers[i % 2])

    def check(self) -> None:
        check_end(self.store)

    def close(self) -> None:
        only_reference = [self.group]
        self.group = None
        self.store.close()
        drop_group(only_reference, self.backend)


@dataclass
class SharedLink:
    """A worker's end of two shared buffers: bucket i is in buffer i % 2 from ready/i until done/i."""

    prefix: str
    store: Store
    group_rank: int
    buffers: list[Tensor]

    def receive(self, plan: dict[str, Any]) -> Iterator[Piece]:
        """Yield the buckets of the plan; Piece.release reports the buffer as free to the trainer."""
        deadline = time.monotonic() + plan["timeout"]
        turn = plan["turn"]
        for i, bucket in enumerate(plan["buckets"]):
            wait_keys(self.store, [f"{turn}/ready/{i}"], deadline, lambda: check_end(self.store))
            done = f"{turn}/done/{i}/{self.group_rank}"
            yield piece_of(bucket, self.buffers[i % 2], lambda done=done: self.store.set(done))

    def close(self) -> None:
        self.buffers = []
        self.store.close()


def check_end(store: Store) -> None:
    if store.has([END]):
        raise PeerError("the trainer aborted the transfer")
