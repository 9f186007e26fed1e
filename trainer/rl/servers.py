"""Servers for a run on one or several ranks: checks before the run folder exists, and the engine that talks to them.

An edge: trainer/rl/setup.py imports this file only for --rollout.engine vllm.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.errors import UserError
from data.user_code import PYTHON
from rollout.engine import Engine
from rollout.engines.local import LocalEngine
from rollout.engines.vllm import VllmEngine, check_start
from rollout.model_folder import find_tokenizer
from rollout.servers.command import architecture, shares_gpu
from rollout.servers.lease import Owner
from rollout.servers.options import VllmConfig
from rollout.sync.base import time_limit
from trainer.config.groups import GroupConfig
from trainer.parallel.comm import is_main, on_main, send_command, world_size
from trainer.parallel.ranks import local_world_size
from trainer.policy.logps import Policy, causal_lm
from trainer.policy.weights import PolicyWeights
from trainer.rl.rank0_rollout import AllRanksLogps
from trainer.run.run import Run


def check_servers(cfg: GroupConfig, policy: Policy, run: Run) -> None:
    """Raise if a setting has no effect here or would prevent a server from starting or answering."""
    reject_text_part(policy)
    if world_size() > 1:
        check_several_ranks(cfg, policy)
    if is_main():
        check_start(cfg.vllm, policy.device, run.id)
    if not shares_gpu(cfg.vllm, policy.device):
        return
    if cfg.overlap.vllm_sync_interval > 1:
        raise UserError(
            f"vllm_sync_interval={cfg.overlap.vllm_sync_interval}: has no effect with a server on the trainer's GPU, "
            "which gets new weights whenever it wakes; remove --vllm-sync-interval"
        )
    if cfg.overlap.async_prefetch:
        raise UserError(
            "async_prefetch=True: the server shares the trainer's GPU and sleeps during training; give it another GPU "
            "with --vllm.devices or --vllm.url, or run both concurrently with --vllm.colocate False "
            "--vllm.devices 0 --vllm.gpu-memory-utilization 0.3"
        )


def reject_text_part(policy: Policy) -> None:
    """Raise if servers would load another class (Qwen3.5 with its images), which has other names of weights."""
    stored, trained = architecture(policy.source, policy.revision), type(causal_lm(policy.model)).__name__
    if stored is not None and stored.endswith("ForConditionalGeneration") and stored != trained:
        raise UserError(
            f"rollout.engine=vllm: model={policy.source} is stored as {stored}, and only its text part ({trained}) is "
            "trained; save that part and the tokenizer with transformers' AutoModelForCausalLM and AutoTokenizer and "
            "pass their folder as --model, or use --rollout.engine local"
        )


def check_several_ranks(cfg: GroupConfig, policy: Policy) -> None:
    """With several ranks, servers need separate GPUs, and syncs must fit the time limit of collectives."""
    if policy.device.type == "cuda":
        if shares_gpu(cfg.vllm, policy.device):
            raise UserError(
                f"vllm.colocate={cfg.vllm.colocate}: a server can share the GPU of one rank, but {world_size()} train; "
                "give servers their own GPUs with --vllm.devices or --vllm.url"
            )
        if cfg.sync.backend == "ipc":
            raise UserError(
                f"sync.backend=ipc: needs a server on the trainer's GPU, but {world_size()} ranks train on one each; "
                "use --sync.backend process_group"
            )
        if is_main():  # the run starts its servers on rank 0's machine
            check_gpus(cfg.vllm, local_world_size(), torch.cuda.device_count())
    backend = cfg.sync.backend
    if policy.is_sharded and (backend == "process_group" or (backend == "auto" and not policy.is_lora)):
        size = sum(p.numel() for p in policy.model.parameters()) * getattr(torch, serving_dtype(cfg, policy)).itemsize
        if cfg.parallel.timeout_s < (longest := time_limit(size)):
            raise UserError(
                f"parallel.timeout_s={cfg.parallel.timeout_s:g}: ranks wait for each other during a weight sync, which "
                f"may take {longest:.0f} s if a server hangs; raise --parallel.timeout-s, or use --sync.backend "
                "filesystem"
            )


def check_gpus(vllm: VllmConfig, num_training: int, num_gpus: int) -> None:
    """Servers that the run starts need GPUs that no rank trains on."""
    if vllm.url:
        return
    taken = [device for device in vllm.devices if device < num_training]
    if taken:
        raise UserError(
            f"vllm.devices={' '.join(map(str, vllm.devices))}: GPU {taken[0]} is used for training, as are all below "
            f"{num_training}; name other GPUs"
        )
    needed = vllm.replicas * vllm.tensor_parallel_size
    if not vllm.devices and num_training + needed > num_gpus:
        raise UserError(
            f"vllm.replicas={vllm.replicas}: needs {needed} GPUs in addition to {num_training} that train, but this "
            f"machine has {num_gpus}; start fewer ranks, or run servers elsewhere and name them with --vllm.url"
        )


def start_servers(cfg: GroupConfig, policy: Policy, run: Run, local: LocalEngine, longest: int) -> Engine:
    """The engine that talks to servers, on rank 0; other ranks wait until they are up and return `local`.

    `longest`: tokens of the longest sequence.
    """
    # Servers take minutes to start, and the next collective has a time limit.
    return on_main(lambda: connected(cfg, policy, run, local, longest)) or local


def connected(cfg: GroupConfig, policy: Policy, run: Run, local: LocalEngine, longest: int) -> VllmEngine:
    dtype, tokenizer = serving_dtype(cfg, policy), cfg.model.tokenizer
    engine = VllmEngine(
        cfg.vllm,
        cfg.sync,
        model=policy.source,
        revision=policy.revision,
        tokenizer=tokenizer and find_tokenizer(tokenizer.removeprefix(f"{PYTHON}:")),
        source=(SharedWeights if policy.is_sharded else PolicyWeights)(policy, getattr(torch, dtype)),
        local=AllRanksLogps(policy, local) if policy.is_sharded else local,
        device=policy.device,
        own_gpus=local_world_size(),
        owner=Owner.here(run.id, str(run.dir.resolve())),
        dtype=dtype,
        lora_rank=cfg.lora.r if cfg.sync.backend in ("auto", "lora") else 0,
        log_dir=run.dir / "logs",
        max_model_len=min(longest, policy.context_length or longest),
        trust_remote_code=cfg.model.trust_remote_code,
        samples_ahead=cfg.overlap.async_prefetch,
        vocab_size=causal_lm(policy.model).config.get_text_config().vocab_size,
        log=run.note,
    )
    run.keep(engine)
    return engine


def serving_dtype(cfg: GroupConfig, policy: Policy) -> str:
    return name_of(policy.compute_dtype) if cfg.vllm.dtype == "auto" else cfg.vllm.dtype


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class SharedWeights(PolicyWeights):
    """Sharded weights for rank 0's servers, gathered one tensor at a time by all ranks.

    Only rank 0 knows when weights are needed: after a step, after a server restart, for a comparison. It always asks in
    its main thread and inside Rank0Rollout.run.
    """

    def tensors(self) -> Generator[tuple[str, Tensor], None, None]:
        send_command(f"weights {name_of(self.dtype)}")
        tensors = super().tensors()
        try:
            while (pair := next(tensors, None)) is not None:  # `yield from` would close them with this generator
                yield pair
        finally:
            for _ in tensors:  # after an interrupted transfer: the other ranks gather all tensors
                pass

    def save_adapter(self, folder: Path) -> None:
        _ = self.adapter  # raises before the command is sent if the adapter cannot be served
        send_command(f"adapter {name_of(self.dtype)}")
        super().save_adapter(folder)


class WeightCommands:
    """Rank 0's commands about weights, as the other ranks execute them: they take part in every gather."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._weights: PolicyWeights | None = None
        self.handlers: dict[str, Callable[..., Any]] = {"weights": self.weights, "adapter": self.adapter}

    def weights(self, dtype: str) -> None:
        for _ in self._source(dtype).tensors():
            pass

    def adapter(self, dtype: str) -> None:
        self._source(dtype).adapter.read()

    def _source(self, dtype: str) -> PolicyWeights:
        if self._weights is None:
            self._weights = PolicyWeights(self.policy, getattr(torch, dtype))
        assert name_of(self._weights.dtype) == dtype, (self._weights.dtype, dtype)
        return self._weights
