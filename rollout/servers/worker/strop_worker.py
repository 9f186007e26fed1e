"""vLLM worker extension that receives new weights: `--worker-extension-cls strop_worker.Worker`.

    strop_join(link)            connect to the trainer (strop_wire.join)
    strop_receive(plan)         receive all weights over the link: receive a bucket, load it (strop_load), confirm
    strop_reload(path, version) load all weights from the safetensors files in a folder
    strop_mark(tag)             set the owner tag of the weights and collect garbage (strop_gc)
    strop_info()                return version, tag, dirty and link, for health checks and to decide whether to rejoin

vLLM mixes the class into every worker and finds this file through PYTHONPATH. The trainer calls the methods by name
through /collective_rpc with JSON arguments. Each returns a dict. A failure is {"error": reason}, not an exception: with
several workers, vLLM would raise the first exception and leave the other replies in its queue for the next call.

strop_receive and strop_reload replace all weights within one call, so no forward pass sees mixed weights. If a call
fails, the worker is dirty, and strop_info reports this until a later call succeeds.

The worker also ends itself and its engine when the API server is gone: vLLM's engine would survive kill -9 of the API
server.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass
class State:
    """State that the extension keeps between calls."""

    version: int | None = None  # None: the initial weights
    tag: str | None = None  # owner tag of that version, "RUN:12"
    dirty: bool = False  # a weight change has started and not finished
    link: Any = None  # GroupLink or SharedLink to the trainer


class Worker:
    """The extension. Names begin with strop_, because vLLM rejects names that its own worker has."""

    def strop_info(self) -> dict[str, Any]:
        state = strop_state(self)
        return {
            "version": state.version,
            "tag": state.tag,
            "dirty": state.dirty,
            "device_uuid": device_uuid(self.device),
            "host_id": os.environ.get("NCCL_HOSTID"),
            "link": state.link.prefix if state.link is not None else None,
        }

    def strop_mark(self, tag: str) -> dict[str, Any]:
        """Set the owner tag: another trainer that replaces the weights sets its own. Also collects garbage, because the
        server is paused.
        """
        import strop_gc

        strop_state(self).tag = tag
        return {"freed": strop_gc.collect()}

    def strop_join(self, link: dict[str, Any]) -> dict[str, Any]:
        """Connect to the trainer, which waits at a store; `link`: arguments of strop_wire.join."""
        import strop_wire

        def join() -> dict[str, Any]:
            leave(self)
            strop_state(self).link = strop_wire.join(rank=self.rank, device=self.device, **link)
            return {}

        return answer(self, join)

    def strop_leave(self) -> dict[str, Any]:
        return answer(self, lambda: leave(self) or {})

    def strop_receive(self, plan: dict[str, Any]) -> dict[str, Any]:
        """Receive all weights from the trainer; `plan`: version, buckets and timeout, from
        rollout/sync/process_group.py or ipc.py.
        """

        def receive() -> dict[str, Any]:
            link = strop_state(self).link
            if link is None:
                raise ValueError("this worker has no connection to the trainer; call strop_join again")
            return load_weights(self, link.receive(plan), plan["version"])

        result = answer(self, receive)
        if "error" in result:  # a broken group cannot be reused
            leave(self)
        free_memory(self.device)
        return result

    def strop_reload(self, path: str, version: int) -> dict[str, Any]:
        """Load all weights from the safetensors files in a folder."""
        import strop_load

        return answer(self, lambda: load_weights(self, strop_load.files(path, self.device), version))


def load_weights(worker: Any, pieces: Iterator[Any], version: int) -> dict[str, Any]:
    """Load all weights from `pieces` (strop_wire.Piece); on an exception the worker stays dirty."""
    import strop_load

    state = strop_state(worker)
    with strop_load.Loading(worker) as loading:
        for piece in pieces:
            if not loading.started:  # change nothing before the first bytes arrive
                state.dirty = True
                loading.begin()
            loading.add(piece)
        loading.finish()
    state.dirty, state.version = False, version
    return {"version": version, "bytes": loading.num_bytes, "phases": loading.seconds}


def answer(worker: Any, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the call's reply, or {"error": reason} if it raises."""
    try:
        result = call()
    except Exception as error:  # vLLM and torch may raise anything: report it to the trainer and keep serving
        traceback.print_exc()
        text = " ".join(str(error).split()) or "no message"
        result = {"error": f"{type(error).__name__}: {text[:500]}", "peer": getattr(error, "strop_peer", False)}
    return {**result, "rank": worker.rank}


def strop_state(worker: Any) -> State:
    return worker.__dict__.setdefault("_strop_state", State())


def leave(worker: Any) -> None:
    state = strop_state(worker)
    link, state.link = state.link, None
    if link is not None:
        link.close()


def free_memory(device: Any) -> None:
    """Free buffers and temporary layers: a server has little memory left outside its KV cache."""
    import strop_gc
    import torch

    strop_gc.collect()  # reference cycles may keep some alive
    if device.type == "cuda":
        torch.cuda.empty_cache()


def device_uuid(device: Any) -> str | None:
    """Return the GPU's UUID, which does not depend on CUDA_VISIBLE_DEVICES; None for a CPU."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def end_with_server(grace: float = 10.0, every: float = 1.0) -> None:
    """Start a thread that ends this process and its ancestors below the API server once any of them loses its parent.

    vLLM runs a worker in the engine's process or in a child of it. Linux's parent-death signal does not work here: it
    is also sent when only the thread that started a process ends.
    """
    chain = [os.getpid()]  # up to the API server, which leads the process group
    while (parent := parent_of(chain[-1])) > 1 and os.getpgid(parent) == os.getpgrp():
        chain.append(parent)

    def watch() -> None:
        while all(parent_of(child) == parent for child, parent in zip(chain, chain[1:], strict=False)):
            time.sleep(every)
        top = next(i for i, child in enumerate(chain) if parent_of(child) not in chain)
        for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, 0.0)):
            for pid in reversed(chain[: top + 1]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(seconds)

    if len(chain) > 1:
        threading.Thread(target=watch, name="strop-end-with-server", daemon=True).start()


def parent_of(pid: int) -> int:
    """Return the parent's process id; 0 if the process has ended or the system has no /proc."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return int(stat.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0


# Only under strop_guard.py, where the API server leads the process group. If the server was started by hand, the leader
# may be a shell that exits.
if __name__ == "strop_worker" and os.environ.get("STROP_GUARDED") == "1":
    end_with_server()
