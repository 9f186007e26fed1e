"""Weight sync of LoRA adapters: one folder and one name per version, so every request names the weights it wants.

Nothing is paused. A name is used only after every server has loaded it. Older names are unloaded two versions later;
their folders are kept longer, because a server that evicted an adapter from memory reads it again.
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

NAMES = 2  # versions a server knows by name
FOLDERS = 8  # versions kept on disk: more than a server holds in memory
LOAD_S = 120.0
WEIGHTS = "adapter_model.safetensors"


class LoraSync:
    """Sends the adapter only, as versioned folders that servers load at run time."""

    needs_pause = False

    def __init__(self, source: WeightSource, loop: Loop, *, folder: str | None = None) -> None:
        self.source = source
        self.loop = loop
        self.folder = WeightFolder(folder, "strop-lora-")
        # A server may outlive this run, and its prefix cache is keyed by adapter name: names must be new in each run.
        self.tag = secrets.token_hex(3)
        self.in_use: Callable[[], Iterable[int]] = tuple  # versions that requests in flight still name
        self._known: dict[int, tuple[Any, list[int]]] = {}  # by id of server: the server, the versions it has

    def model_name(self, version: int) -> str:
        return f"policy-{self.tag}-v{version}"

    def push(self, servers: Sequence[VllmServer], version: int) -> SyncReport:
        started = time.monotonic()
        path = self._save(version)
        saved = time.monotonic()
        failed, may_pass = self._load(servers, version, path)
        if failed:
            raise SyncError(failed, dirty=set(), may_pass=may_pass)
        self._forget(servers, version)
        now = time.monotonic()
        num_bytes = sum(file.stat().st_size for file in path.iterdir())
        return SyncReport(version, "lora", num_bytes, now - started, {"save": saved - started, "load": now - saved})

    def close(self) -> None:
        """Unload the names from servers that keep running, then delete the folders."""
        for server, versions in self._known.values():
            for version in versions:
                self._unload(server, version)
        self._known.clear()
        self.folder.close()

    def _save(self, version: int) -> Path:
        """Write this version's folder once; the rename at the end makes it visible as a whole."""
        path = self.folder.path / f"v{version:06d}"
        partial = path.with_suffix(".tmp")
        shutil.rmtree(partial, ignore_errors=True)
        with self.folder.explain_full_disk(partial):
            partial.mkdir()
            self.source.save_adapter(partial)
            fsync_folder(partial)
        if path.exists():  # a server that came back must get what the others got
            same = (path / WEIGHTS).read_bytes() == (partial / WEIGHTS).read_bytes()
            assert same, f"version {version} was pushed before with other weights: a version names one set of them"
            shutil.rmtree(partial)
        else:
            partial.rename(path)
        return path

    def _load(self, servers: Sequence[VllmServer], version: int, path: Path) -> tuple[dict[int, str], bool]:
        """(reasons of the servers that failed, whether another attempt may work, that is, none refused)."""
        name = self.model_name(version)
        futures = [self.loop.start(server.load_adapter(name, str(path))) for server in servers]
        failed: dict[int, str] = {}
        may_pass = True
        deadline = time.monotonic() + LOAD_S
        for i, (server, future) in enumerate(zip(servers, futures, strict=True)):
            try:
                future.result(max(deadline - time.monotonic(), 0.0))
            except Exception as error:  # ServerError, RefusedError, a timeout: this server has not loaded it
                reason = " ".join(str(error).split()) or type(error).__name__
                # "already been loaded": by us, as the name is unique to this run, and so from the same folder.
                if "has already been" not in reason:
                    failed[i] = reason
                    may_pass = may_pass and not isinstance(error, ValueError)
                    continue
            _, versions = self._known.setdefault(id(server), (server, []))
            if version not in versions:
                versions.append(version)
        return failed, may_pass

    def _forget(self, servers: Sequence[VllmServer], version: int) -> None:
        used = set(self.in_use()) | {version}
        for server in servers:
            _, versions = self._known[id(server)]
            for old in [v for v in versions[:-NAMES] if v not in used]:
                self._unload(server, old)
                versions.remove(old)
        # A server that was replaced gets no more pushes: forget it once its last version is no longer kept.
        self._known = {key: kept for key, kept in self._known.items() if max(kept[1], default=-1) > version - FOLDERS}
        named = {v for _, versions in self._known.values() for v in versions} | used
        for path in sorted(self.folder.path.glob("v[0-9]*"))[:-FOLDERS]:
            if path.suffix != ".tmp" and int(path.name[1:]) not in named:
                shutil.rmtree(path, ignore_errors=True)

    def _unload(self, server: VllmServer, version: int) -> None:
        with contextlib.suppress(Exception):  # a server that is gone or restarted does not know the name any more
            self.loop.start(server.unload_adapter(self.model_name(version))).result(10.0)
