"""Resolve --sync.backend auto, and reject backends that cannot work with the given servers."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch

from data.command.checks import reject_unused
from data.errors import UserError
from rollout.model_folder import loading_options, read_settings
from rollout.servers.options import LOOPBACK, SyncConfig
from rollout.servers.worker.strop_wire import address_towards
from rollout.sync.base import MIB, WeightSource, WeightSync

if TYPE_CHECKING:
    from rollout.servers.client import VllmServer
    from rollout.servers.loop import Loop


USED_BY = {
    "folder": ("lora", "filesystem"),
    "host": ("process_group",),
    "bucket_mb": ("filesystem", "process_group", "ipc"),
}


def wants_adapters(name: str) -> bool:
    """Return whether servers should be started with LoRA."""
    return name in ("auto", "lora")


def check_served(model: str, revision: str | None, *, lora_rank: int) -> None:
    """Raise for full weights in MXFP4: vLLM stores them as in the files and cannot replace them by trained weights."""
    if lora_rank == 0 and loading_options(read_settings(model, revision)):
        raise UserError(
            f"model={model}: vLLM cannot load trained weights into a model in MXFP4; pass a copy of the model in "
            "bfloat16, set --lora.r, or use --rollout.engine local"
        )


def pick_backend(name: str, servers: Sequence[Any], *, is_lora: bool, device_uuid: str | None) -> str:
    """Resolve --sync.backend; raise UserError for a backend that these servers cannot use.

    `device_uuid`: the trainer's GPU, None on a CPU. The servers are connected, so `info` is set.
    """
    uuids = [set(server.info.device_uuids) for server in servers]
    shared = [device_uuid is not None and device_uuid in gpus for gpus in uuids]
    mixed = any(bool(gpus) != (device_uuid is not None) for gpus in uuids)
    if name == "auto":
        if is_lora and all(server.info.lora for server in servers):
            return "lora"
        name = _full_backend(shared, mixed)
    if name == "lora":
        if not is_lora:
            raise UserError("sync.backend=lora: needs a LoRA adapter; set --lora.r, or remove --sync.backend")
        for server in servers:
            if not server.info.lora:
                raise UserError(
                    f"sync.backend=lora: {server.url} was started without LoRA; start it with python -m rollout.serve "
                    "--lora.r, or remove --sync.backend to send merged weights"
                )
        return name
    for server in servers:
        if not server.info.extension:
            raise UserError(
                f"sync.backend={name}: {server.url} runs without strop's worker extension and cannot receive weights; "
                "start it with python -m rollout.serve"
            )
    # NCCL rejects two processes on one GPU if it takes them for processes of one machine.
    own_id = os.environ.get("NCCL_HOSTID")
    rejected = any(on_same and server.info.host_id == own_id for on_same, server in zip(shared, servers, strict=True))
    if name == "process_group" and (rejected or mixed):
        on_gpu = "shares the trainer's GPU, but nccl needs one GPU per process"
        reason = on_gpu if rejected else "runs on a different device type"
        other = _full_backend(shared, mixed)
        raise UserError(f"sync.backend=process_group: a server {reason}; use --sync.backend {other}")
    return name


def _full_backend(shared: list[bool], mixed: bool) -> str:
    if shared and all(shared):
        return "ipc"
    return "filesystem" if mixed or any(shared) else "process_group"


def make_sync(
    cfg: SyncConfig, backend: str, source: WeightSource, loop: Loop, servers: Sequence[VllmServer], device: torch.device
) -> WeightSync:
    """Create the backend that pick_backend returned."""
    from rollout.sync.filesystem import FilesystemSync
    from rollout.sync.ipc import IpcSync
    from rollout.sync.lora import LoraSync
    from rollout.sync.process_group import ProcessGroupSync

    for name, users in USED_BY.items():
        if backend not in users:
            flag = name.replace("_", "-")
            why = f"with sync.backend={backend}, only with {' and '.join(users)}; remove --sync.{flag}"
            reject_unused(cfg, why, (name,), "sync.")
    bucket_bytes = cfg.bucket_mb * MIB
    if backend == "lora":
        return LoraSync(source, loop, folder=cfg.folder)
    if backend == "filesystem":
        return FilesystemSync(source, loop, folder=cfg.folder, bucket_bytes=bucket_bytes, device=device)
    if backend == "ipc":
        return IpcSync(source, loop, device=device, bucket_bytes=bucket_bytes)
    host = cfg.host or host_for(servers)
    return ProcessGroupSync(source, loop, device=device, bucket_bytes=bucket_bytes, host=host)


def host_for(servers: Sequence[Any]) -> str:
    """Return the address at which these servers reach the trainer: loopback if all are on this machine."""
    for server in servers:
        name = urlsplit(server.url).hostname or "127.0.0.1"
        if name not in LOOPBACK:
            return address_towards(socket.gethostbyname(name))
    return "127.0.0.1"
