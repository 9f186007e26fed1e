"""Resolve --rollout.engine auto: servers if a setting needs them or the GPU is too small, otherwise local.

    cfg = resolve_engine(cfg, policy, prompts)      # rollout.engine is local or vllm from here on, and in config.yaml

Rank 0 decides once, after the models are loaded and before the run folder exists; --resume reads the decision from
config.yaml. `choose` depends only on settings and sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from data.command.checks import reject_unused
from data.errors import UserError
from data.types import Prompt
from kernels.nf4 import num_weights
from rollout.engines.forward import shape_of
from rollout.engines.local import PAGE
from rollout.servers.options import VllmConfig
from trainer.config.groups import GroupConfig, servers_asked
from trainer.parallel.comm import from_main, is_main, on_main
from trainer.parallel.dtensor import local
from trainer.parallel.watch import log
from trainer.policy.logps import Policy, causal_lm

GIB = 1 << 30
SPARE = 2 * GIB  # reserved for workspaces, CUDA graphs and fragmentation, as in trainer/plan.py


class Memory(NamedTuple):
    """Bytes needed to sample in process, and bytes available."""

    training: float  # weights and their casts, gradients, optimizer state, frozen models
    copy: float  # weights in the compute dtype
    cache: float  # KV cache of one group
    room: float

    @property
    def fits(self) -> bool:
        return self.training + self.copy + self.cache <= self.room

    def __str__(self) -> str:
        training, copy, cache, room = (size / GIB for size in self)
        return (
            f"{training + copy + cache:.2f} of {room:.2f} GiB (training {training:.2f}, a copy of the weights "
            f"{copy:.2f}, the cache of one group {cache:.2f})"
        )


class Choice(NamedTuple):
    engine: Literal["local", "vllm"]
    line: str  # log line; empty if there was no choice


def resolve_engine(
    cfg: GroupConfig,
    policy: Policy,
    prompts: Sequence[Prompt],
    modules: Iterable[nn.Module] = (),  # trained in addition to the policy
    *,
    extra_tokens: int = 0,  # per sequence, in addition to prompt and completion
) -> GroupConfig:
    """Return the config with the resolved engine."""
    if cfg.rollout.engine != "auto":
        return cfg

    def decide() -> list[str]:
        memory = None
        if policy.device.type == "cuda":
            longest = max((len(prompt.ids) for prompt in prompts), default=0) + extra_tokens
            memory = measure(cfg, policy, [policy.model, *modules], longest)
        return list(choose(cfg, memory, lambda: check_vllm(cfg.vllm)))

    choice = Choice(*from_main(on_main(decide), "engine"))
    if choice.line and is_main():
        log(choice.line)
    return replace(cfg, rollout=replace(cfg.rollout, engine=choice.engine))


def check_vllm(vllm: VllmConfig) -> None:
    from rollout.servers.command import check_build, find_python

    check_build(find_python(vllm), "cuda")


def choose(cfg: GroupConfig, memory: Memory | None, check_vllm: Callable[[], Any]) -> Choice:
    """Choose the engine. `memory` is None on a CPU; `check_vllm` raises a UserError if vLLM cannot start here."""
    if cfg.exact_sampling:
        return Choice("local", "rollout.engine=auto: local, needed by exact_sampling=True")
    if asked := servers_asked(cfg):
        return Choice("vllm", f"rollout.engine=auto: vllm, needed by {asked}")
    if memory is None:
        return Choice("local", "")
    if memory.fits:
        return Choice("local", f"rollout.engine=auto: local, needs at least {memory}")
    short = f"sampling in process needs at least {memory}"
    why = f"with vLLM servers, which auto chose because {short}; remove it, or set --rollout.engine local"
    reject_unused(cfg.rollout, why, ("max_batch_size", "cache_gib", "partial"), "rollout.")
    try:
        check_vllm()
    except UserError as error:
        raise UserError(
            f"rollout.engine=auto: {short}, and servers cannot start: {error}; --rollout.engine local tries anyway"
        ) from None
    return Choice("vllm", f"rollout.engine=auto: vllm, {short}")


def measure(cfg: GroupConfig, policy: Policy, trained: Iterable[nn.Module], prompt_length: int) -> Memory:
    """Measure the allocated GPU memory and add what training and sampling will allocate."""
    free, reserved = torch.cuda.mem_get_info(policy.device)[0], torch.cuda.memory_reserved(policy.device)
    allocated = torch.cuda.memory_allocated(policy.device)
    copy, cache = engine_bytes(cfg, policy, prompt_length)
    cast = 0 if policy.is_sharded else policy.compute_dtype.itemsize
    added = sum(training_bytes(module, cfg.optim.optim, cast) for module in trained)
    return Memory(training=allocated + added, copy=copy, cache=cache, room=free + reserved - SPARE)


def training_bytes(module: nn.Module, optim: str, cast: int) -> int:
    """Bytes that training will allocate on the GPU: gradients, AdamW's moments, and autocast's copies of matrices.

    `cast`: bytes per number in the compute dtype; 0: FSDP casts a block at a time.
    """
    total = 0
    for shard in (local(p) for p in module.parameters() if p.requires_grad):
        if shard.device.type != "cpu":  # otherwise offloaded
            size = shard.element_size()
            moments = 2 if optim == "adamw_8bit" else 2 * size
            total += shard.numel() * (size + moments + (cast if size > cast and shard.ndim > 1 else 0))
    return total


def engine_bytes(cfg: GroupConfig, policy: Policy, prompt_length: int) -> tuple[int, int]:
    """(copy of the weights with merged adapters, KV cache of one group), per rank."""
    size, model = policy.compute_dtype.itemsize, causal_lm(policy.model)
    adapter = sum(p.numel() for p in model.parameters() if policy.is_lora and p.requires_grad)
    copy = size * (num_weights(model) - adapter)
    if not getattr(model.config.get_text_config(), "num_attention_heads", None):  # only recurrent layers: no KV cache
        return copy, 0
    # Each row has a spare page, and there is a scratch page.
    tokens = pages(prompt_length) + cfg.num_generations * (pages(cfg.max_completion_length + 1) + PAGE["cuda"])
    tokens += PAGE["cuda"]
    return copy, tokens * shape_of(model, policy.compute_dtype).bytes_per_token


def pages(num_tokens: int) -> int:
    """Round up to whole pages."""
    return -(-num_tokens // PAGE["cuda"]) * PAGE["cuda"]
