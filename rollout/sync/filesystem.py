"""Weight sync through safetensors files in a folder that servers can read: slower, but needs only files.

Each version is written to v000012.tmp, flushed and renamed to v000012 before any server reads it. After all servers
have loaded it, the next version overwrites the same files, because allocating their pages takes longest.

WeightFolder, also used by sync/lora.py, locates, locks and cleans up the folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import math
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from data.errors import UserError
from rollout.servers.command import BASE
from rollout.servers.launch import sweep
from rollout.servers.options import LOOPBACK
from rollout.sync.base import MIB, Calls, SyncReport, WeightSource, check_loaded, make_buckets, slowest, time_limit
from rollout.tensor_header import Spec, aligned, file_header

if TYPE_CHECKING:
    from rollout.servers.client import VllmServer
    from rollout.servers.loop import Loop

CPU = torch.device("cpu")
MEMORY = Path("/dev/shm")
LOCK = "owner.lock"


class FilesystemSync:
    """Sends all weights through files."""

    needs_pause = True

    def __init__(
        self,
        source: WeightSource,
        loop: Loop,
        *,
        folder: str | None = None,
        bucket_bytes: int = 512 * MIB,
        device: torch.device = CPU,
    ) -> None:
        self.device = device
        self.source = source
        self.loop = loop
        self.is_shared = folder is not None
        specs = source.specs()
        self.buckets = make_buckets(specs, bucket_bytes)
        self.num_bytes = sum(spec.num_bytes for spec in specs)
        self.limit = time_limit(self.num_bytes)
        self.folder = WeightFolder(folder, "strop-weights-", need_bytes=2 * self.num_bytes)
        self._path: Path | None = None  # last version, if its files may be overwritten
        self._files: list[TensorFile] = []
        self._staging: Tensor | None = None  # pinned; GPU copies to it are ten times as fast as to mapped files

    def model_name(self, version: int) -> str:
        return BASE

    def push(self, servers: Sequence[VllmServer], version: int) -> SyncReport:
        started = time.monotonic()
        for server in servers:
            if not self.is_shared and urlsplit(server.url).hostname not in LOOPBACK:
                raise UserError(
                    f"sync.backend=filesystem: {server.url} is on another machine and cannot read {self.folder.path}; "
                    "set --sync.folder to a folder that both can read"
                )
        path = self._save(version)
        saved = time.monotonic()
        kwargs = {"path": str(path), "version": version}
        results = Calls(self.loop, servers, "strop_reload", self.limit, [kwargs] * len(servers)).results()
        check_loaded(results, version, self.num_bytes)
        self._path = path  # may be overwritten now; after a failure a server may still read it
        now = time.monotonic()
        phases = {"save": saved - started, "load": now - saved, **slowest(results)}
        return SyncReport(version, "filesystem", self.num_bytes, now - started, phases)

    def close(self) -> None:
        self._files = []
        self.folder.close()

    def _save(self, version: int) -> Path:
        path = self.folder.path / f"v{version:06d}"
        partial = path.with_suffix(".tmp")
        previous, self._path = self._path, None
        with self.folder.explain_full_disk(partial):
            if previous is not None:
                previous.rename(partial)
            else:
                for old in self.folder.path.glob("v[0-9]*"):
                    shutil.rmtree(old, ignore_errors=True)
                partial.mkdir()
                self._files = [make_file(partial, i, bucket) for i, bucket in enumerate(self.buckets)]
            with closing(self.source.tensors()) as tensors:
                write_files(self._files, tensors, self._staged())
            fsync_folder(partial)
        partial.rename(path)
        return path

    def _staged(self) -> Tensor | None:
        if self._staging is None and self.device.type == "cuda":
            self._staging = torch.empty(max(len(file.data) for file in self._files), dtype=torch.uint8, pin_memory=True)
        return self._staging


@dataclass(frozen=True)
class TensorFile:
    """A memory-mapped safetensors file and the offsets of its tensors."""

    data: Tensor  # (bytes,) mapped file after the header
    tensors: list[tuple[str, torch.dtype, list[int], int]]  # name, dtype, shape, offset; in source order

    def views(self, data: Tensor) -> list[tuple[str, Tensor]]:
        """Return views of the tensors in the file, or in a buffer of its size."""
        return [
            (name, data[offset : offset + dtype.itemsize * math.prod(shape)].view(dtype).view(shape))
            for name, dtype, shape, offset in self.tensors
        ]


def make_file(folder: Path, index: int, bucket: dict[str, Any]) -> TensorFile:
    """Write the header and reserve the space. safetensors itself needs all values in memory and copies them twice."""
    named = {name: Spec(tuple(shape), getattr(torch, dtype)) for name, dtype, shape, _ in bucket["tensors"]}
    specs = aligned(named)
    header = file_header(specs)
    *starts, size = itertools.accumulate((spec.num_bytes for spec in specs.values()), initial=0)
    offsets = dict(zip(specs, starts, strict=True))
    path = folder / f"model-{index + 1:05d}.safetensors"
    begin = len(header)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, begin + size)  # a full disk raises here instead of SIGBUS later
        file.write(header)
    data = torch.from_file(str(path), shared=True, size=begin + size, dtype=torch.uint8)[begin:]
    return TensorFile(data, [(name, spec.dtype, list(spec.shape), offsets[name]) for name, spec in named.items()])


def write_files(files: Sequence[TensorFile], tensors: Iterator[tuple[str, Tensor]], staging: Tensor | None) -> None:
    """Write the values, through pinned memory if they come from a GPU."""
    for file in files:
        for name, view in file.views(file.data if staging is None else staging):
            got, tensor = next(tensors)
            assert got == name and tensor.shape == view.shape, f"{got} {tensor.shape}, planned {name} {view.shape}"
            view.copy_(tensor, non_blocking=staging is not None)
        if staging is not None:
            torch.cuda.synchronize()
            file.data.copy_(staging[: len(file.data)])


# the folder ------------------------------------------------------------------------------------------------------


class WeightFolder:
    """A folder of this run inside `parent`. The run deletes it at its end; if it is killed, the next run does.

    A lock on a file in the folder shows that its run is alive; a killed process loses the lock.
    """

    def __init__(self, parent: str | None, prefix: str, *, need_bytes: int = 0) -> None:
        if parent is not None:
            root = Path(parent).expanduser()
            try:
                root.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(
                    f"sync.folder={parent}: cannot be created ({error.strerror}); set another --sync.folder"
                ) from None
        else:
            root = folder_with_space(need_bytes)
        sweep(root, prefix, LOCK, shutil.rmtree)  # of runs that were killed
        try:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=root)).resolve()
            self._lock = (self.path / LOCK).open("w")
        except OSError as error:
            raise UserError(
                f"sync.folder={root}: cannot be written ({error.strerror}); set another --sync.folder"
            ) from None
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._end = weakref.finalize(self, delete, self.path, os.getpid())  # runs even at interpreter exit

    @contextlib.contextmanager
    def explain_full_disk(self, partial: Path) -> Iterator[None]:
        """Context manager: on any error remove `partial`; report a full disk as a UserError."""
        try:
            yield
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if is_full(error):
                raise UserError(
                    f"sync.folder={self.path}: not enough space for the weights; free space or set --sync.folder"
                ) from None
            raise

    def close(self) -> None:
        self._end()
        self._lock.close()


def delete(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child that exits
        shutil.rmtree(path, ignore_errors=True)


def folder_with_space(need_bytes: int) -> Path:
    """Return /dev/shm if it has 20% more space than needed, otherwise the temporary folder."""
    if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 1.2 * need_bytes:
        return MEMORY
    return Path(tempfile.gettempdir())


def is_full(error: BaseException) -> bool:
    """Return whether the disk is full. safetensors reports it only as text."""
    return (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)) or "os error 28" in str(error)


def fsync_folder(folder: Path) -> None:
    """Flush all files of the folder, and the folder itself, to disk."""
    for path in [*folder.iterdir(), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
