"""Weight sync of LoRA adapters: one folder and one name per version, so every request names its weights.

Servers are not paused. A name is used only after every server has loaded it. Older names are unloaded two versions
later. Their folders are kept longer, because a server that evicted an adapter from memory reads it again.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.sync.base import SyncError, SyncReport, WeightSource
from rollout.sync.filesystem import WeightFolder, fsync_folder

if TYPE_CHECKING:
    from rollout.servers.client import VllmServer
    from rollout.servers.loop import Loop

NAMES = 2  # versions loaded per server
FOLDERS = 8  # versions kept on disk; more than a server caches in memory
LOAD_S = 120.0
WEIGHTS = "adapter_model.safetensors"


class LoraSync:
    """Sends only the adapter, as versioned folders that servers load at run time."""

    needs_pause = False

    def __init__(self, source: WeightSource, loop: Loop, *, folder: str | None = None) -> None:
        self.source = source
        self.loop = loop
        self.folder = WeightFolder(folder, "strop-lora-")
        # Unique per run: a server may outlive the run, and its prefix cache is keyed by adapter name.
        self.tag = secrets.token_hex(3)
        self.in_use: Callable[[], Iterable[int]] = tuple  # versions named by requests in flight
        self._loaded: dict[int, tuple[Any, list[int]]] = {}  # id(server) -> (server, loaded versions)

    def model_name(self, version: int) -> str:
        return f"policy-{self.tag}-v{version}"

    def push(self, servers: Sequence[VllmServer], version: int) -> SyncReport:
        started = time.monotonic()
        path = self._save(version)
        saved = time.monotonic()
        failed, may_pass = self._load(servers, version, path)
        if failed:
            raise SyncError(failed, may_pass=may_pass)
        self._unload_old(servers, version)
        now = time.monotonic()
        num_bytes = sum(file.stat().st_size for file in path.iterdir())
        return SyncReport(version, "lora", num_bytes, now - started, {"save": saved - started, "load": now - saved})

    def close(self) -> None:
        """Unload all adapters from servers that keep running, then delete the folders."""
        for server, versions in self._loaded.values():
            for version in versions:
                self._unload(server, version)
        self._loaded.clear()
        self.folder.close()

    def _save(self, version: int) -> Path:
        """Write this version's folder once; the final rename publishes it atomically."""
        path = self.folder.path / f"v{version:06d}"
        partial = path.with_suffix(".tmp")
        shutil.rmtree(partial, ignore_errors=True)
        with self.folder.explain_full_disk(partial):
            partial.mkdir()
            self.source.save_adapter(partial)
            fsync_folder(partial)
        if path.exists():  # a restarted server must get the same weights as the others
            same = (path / WEIGHTS).read_bytes() == (partial / WEIGHTS).read_bytes()
            assert same, f"version {version} was already pushed with different weights"
            shutil.rmtree(partial)
        else:
            partial.rename(path)
        return path

    def _load(self, servers: Sequence[VllmServer], version: int, path: Path) -> tuple[dict[int, str], bool]:
        """Load the adapter; return (reasons by failed server index, whether a retry may succeed)."""
        name = self.model_name(version)
        futures = [self.loop.start(server.load_adapter(name, str(path))) for server in servers]
        failed: dict[int, str] = {}
        may_pass = True
        deadline = time.monotonic() + LOAD_S
        for i, (server, future) in enumerate(zip(servers, futures, strict=True)):
            try:
                future.result(max(deadline - time.monotonic(), 0.0))
            except Exception as error:  # ServerError, RefusedError or timeout
                reason = " ".join(str(error).split()) or type(error).__name__
                # "already been loaded": by this run, since names are unique, so from the same folder.
                if "has already been" not in reason:
                    failed[i] = reason
                    may_pass = may_pass and not isinstance(error, ValueError)
                    continue
            _, versions = self._loaded.setdefault(id(server), (server, []))
            if version not in versions:
                versions.append(version)
        return failed, may_pass

    def _unload_old(self, servers: Sequence[VllmServer], version: int) -> None:
        """Unload old adapters that no request in flight names, and delete old folders."""
        used = set(self.in_use()) | {version}
        for server in servers:
            _, versions = self._loaded[id(server)]
            for old in [v for v in versions[:-NAMES] if v not in used]:
                self._unload(server, old)
                versions.remove(old)
        # A replaced server gets no more pushes: drop it once its last version is no longer kept.
        oldest = version - FOLDERS
        self._loaded = {key: entry for key, entry in self._loaded.items() if max(entry[1], default=-1) > oldest}
        named = {v for _, versions in self._loaded.values() for v in versions} | used
        for path in sorted(self.folder.path.glob("v[0-9]*"))[:-FOLDERS]:
            if path.suffix != ".tmp" and int(path.name[1:]) not in named:
                shutil.rmtree(path, ignore_errors=True)

    def _unload(self, server: VllmServer, version: int) -> None:
        with contextlib.suppress(Exception):  # the server may be gone or restarted
            self.loop.start(server.unload_adapter(self.model_name(version))).result(10.0)
