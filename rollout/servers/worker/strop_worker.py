"""What our vLLM servers can do beside serving: `--worker-extension-cls strop_worker.Worker`.

Mixed into every worker of a server, which finds this file through PYTHONPATH. All methods are called by name through
/collective_rpc with JSON arguments and answer with a dict; a failure is {"error": reason}, not an exception: with
several workers vLLM raises at the first one and leaves the others' answers in its queue for the next call to find.

One strop_receive or strop_reload replaces all weights within one call, so no forward pass can see half a model. If it
fails the worker is dirty, which it remembers and strop_info tells, until another one has gone through.

A worker also ends itself and its engine when the API server is gone: vLLM's engine survives its kill -9 otherwise.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class State:
    """What the extension remembers between calls."""

    version: int | None = None  # None: the weights the server was started with
    tag: str | None = None  # whose version that is, "RUN:12", as its trainer calls it
    dirty: bool = False  # a change of weights has begun and not been finished
    link: Any = None  # strop_wire.Link to the trainer
    seconds: dict[str, float] = field(default_factory=dict)  # phases of the last change


class Worker:
    """The extension; every name begins with strop_ since vLLM refuses names its own worker has."""

    def strop_info(self) -> dict[str, Any]:
        state = strop_state(self)
        config = self.vllm_config.model_config
        return {
            "version": state.version,
            "tag": state.tag,
            "dirty": state.dirty,
            "rank": self.rank,
            "device": self.device.type,
            "device_uuid": device_uuid(self.device),
            "dtype": str(config.dtype).removeprefix("torch."),
            "lora": self.vllm_config.lora_config is not None,
            "link": state.link.prefix if state.link is not None else None,
            "seconds": state.seconds,
        }

    def strop_mark(self, tag: str) -> dict[str, Any]:
        """Remember whose weights these are: another trainer that loads its own leaves its own tag."""
        strop_state(self).tag = tag
        return {}

    def strop_join(self, link: dict[str, Any]) -> dict[str, Any]:
        """Meet the trainer, which waits at a store; `link` as in strop_wire.join."""
        import strop_wire

        def join() -> dict[str, Any]:
            leave(self)
            strop_state(self).link = strop_wire.join(rank=self.rank, device=self.device, **link)
            return {}

        return answer(self, join)

    def strop_leave(self) -> dict[str, Any]:
        return answer(self, lambda: leave(self) or {})

    def strop_receive(self, plan: dict[str, Any]) -> dict[str, Any]:
        """Take all weights from the trainer: `plan` as made by rollout/sync/base.py."""

        def receive() -> dict[str, Any]:
            link = strop_state(self).link
            if link is None:
                raise ValueError("this worker has not joined the trainer, or has lost it; join again")
            return replace(self, link.receive(plan), plan["version"])

        result = answer(self, receive)
        if "error" in result:  # what is left of the group cannot be used again
            leave(self)
        give_back(self.device)
        return result

    def strop_reload(self, path: str, version: int) -> dict[str, Any]:
        """Take all weights from the safetensors files of a folder."""
        import strop_load

        return answer(self, lambda: replace(self, strop_load.files(path, self.device), version))


def strop_state(worker: Any) -> State:
    return worker.__dict__.setdefault("_strop_state", State())


def leave(worker: Any) -> None:
    state = strop_state(worker)
    link, state.link = state.link, None
    if link is not None:
        link.close()


def answer(worker: Any, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    started = time.monotonic()
    try:
        result = call()
    except Exception as error:  # whatever vLLM or torch raise: the trainer is told, the server lives on
        traceback.print_exc()
        text = " ".join(str(error).split()) or "no reason given"
        result = {"error": f"{type(error).__name__}: {text[:500]}", "peer": getattr(error, "strop_peer", False)}
    state = strop_state(worker)
    return {**result, "rank": worker.rank, "dirty": state.dirty, "seconds": time.monotonic() - started}


def replace(worker: Any, pieces: Iterator[Any], version: int) -> dict[str, Any]:
    """All weights from `pieces` (strop_wire.Piece), or an exception and a dirty worker."""
    import strop_load

    state = strop_state(worker)
    with strop_load.Loading(worker) as loading:
        for piece in pieces:
            if not loading.begun:  # nothing is touched before the first bytes have come
                state.dirty = True
                loading.begin()
            loading.add(piece)
        loading.finish()
    state.dirty, state.version, state.seconds = False, version, loading.seconds
    return {"version": version, "bytes": loading.num_bytes, "tensors": loading.num_tensors, "phases": loading.seconds}


def give_back(device: Any) -> None:
    """Memory of buffers and of half-made layers: a server has little to spare beside its cache."""
    import torch

    if device.type == "cuda":
        torch.cuda.empty_cache()


def device_uuid(device: Any) -> str | None:
    """Which GPU this is, whatever number CUDA_VISIBLE_DEVICES gives it; None for a CPU."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def end_with_server(grace: float = 10.0, every: float = 1.0) -> None:
    """In a thread of this process: when a process between us and the API server has lost its parent, end all below.

    vLLM runs a worker in its engine's process or in a child of it. Not by Linux's parent-death signal, which is also
    sent when only the thread that started a process ends.
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
    """Its parent's process id; 0 when it is gone, or on a system without /proc."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return int(stat.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0


# As vLLM imports it, in a worker's process, of a server that our guard started: there the API server leads its process
# group. Of a server started by hand, that may be a shell that ends.
if __name__ == "strop_worker" and os.environ.get("STROP_GUARDED") == "1":
    end_with_server()
