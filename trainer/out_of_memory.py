"""Out of memory on the device: what was asked for, what is held, and which flags to lower with what each would save."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Any

RANK = 16  # of adapters suggested to a run that trains all weights


@dataclass(frozen=True)
class Advice:
    """A flag and what it would save, in bytes."""

    flag: str
    saves: float
    remark: str = ""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether this, or what it was raised from, is torch's error for a device that is full."""
    torch = sys.modules.get("torch")  # without it nothing can have been allocated
    while torch is not None and error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def out_of_memory(error: BaseException, cfg: Any) -> str:
    """The message, one flag per line. Never fails: without an estimate it names the flags alone."""
    lines = [f"out of memory: {asked_for(error)}"]
    try:
        from trainer.memory import GIB, estimate, sizes_of

        sizes = sizes_of(cfg.model)
        parts = estimate(sizes, cfg, _device_type())
        held = ", ".join(f"{name} {size / GIB:.3g}" for name, size in parts.items())
        lines.append(f"  this run holds about, in GiB: {held}")
        given = advice(sizes, cfg, _device_type())
        width = max(len(one.flag) for one in given)
        lines += [f"  {one.flag:<{width}}  saves about {one.saves / GIB:.3g} GiB{one.remark}" for one in given]
    except Exception as why:  # whatever a strange model or config raises: the first line is the news
        lines.append(f"  what would help cannot be estimated here ({type(why).__name__}); try")
        lines.append("  --max-tokens-per-micro-batch 4096 or less, --gradient-checkpointing, --lora.r 16")
    lines.append("  checkpoints are whole: --resume goes on from the last one, with these flags added")
    return "\n".join(lines)


def asked_for(error: BaseException) -> str:
    """The figures of torch's message, without its advice about environment variables."""
    text = ""
    while error is not None and not text:
        found = re.search(r"Tried to allocate [^.]*(?:\.\d[^.]*)*\.", str(error))
        text = str(error)[found.start() :] if found else ""
        last, error = error, error.__cause__ or error.__context__
    if not text:
        return " ".join(str(last).split()) or type(last).__name__
    text = re.split(r" If reserved but unallocated| See documentation", text)[0]
    return " ".join(text.split()).replace("Tried", "tried", 1).rstrip(".")


def advice(sizes: Any, cfg: Any, device_type: str) -> list[Advice]:
    """What can be lowered in this run, the most helpful first."""
    from trainer.memory import (
        GIB,
        activations,
        cache,
        copies_reference,
        estimate,
        longest,
        micro_batch_tokens,
        product_bytes,
    )

    found = []
    tokens, length = micro_batch_tokens(cfg), longest(cfg)
    now = activations(sizes, cfg, device_type, tokens)
    half = tokens // 2
    less = now - activations(sizes, cfg, device_type, half)
    if length is None or half >= length:
        found.append(Advice(f"--max-tokens-per-micro-batch {half}", less, f" of activations ({tokens} tokens now)"))
    else:  # one sequence is a micro-batch by itself
        name = "completion-length" if hasattr(cfg, "max_completion_length") else "length"
        found.append(Advice(f"--max-{name} {length // 2}", less, f" of activations, one sequence is {length} tokens"))
    if not cfg.model.gradient_checkpointing:
        saves = now - activations(sizes, cfg, device_type, tokens, recomputed=True)
        found.append(Advice("--gradient-checkpointing", saves, " of activations, a third more time"))
    if cfg.lora.r:
        saves = (cfg.lora.r - cfg.lora.r // 2) * sizes.adapter_per_rank * 16
        found.append(Advice(f"--lora.r {max(1, cfg.lora.r // 2)}", saves, ", in a new run"))
    else:
        before = sum(size for name, size in estimate(sizes, cfg, device_type).items() if name != "activations")
        kept = product_bytes(cfg, device_type) * sizes.parameters + 16 * RANK * sizes.adapter_per_rank
        saves = before - kept - cache(sizes, cfg, device_type)
        found.append(Advice(f"--lora.r {RANK}", saves, ", in a new run: only adapters are trained"))
    if hasattr(cfg, "reference") and copies_reference(cfg):
        saves = product_bytes(cfg, device_type) * sizes.parameters
        found.append(Advice("--ref precomputed", saves, ": no second model while training"))
    if cached := cache(sizes, cfg, device_type):
        size = min(cfg.rollout.max_batch_size, cfg.run.sequences_per_step)
        found.append(Advice(f"--rollout.max-batch-size {max(1, size // 2)}", cached / 2, " while completions are made"))
    total = _device_bytes()
    if hasattr(cfg, "vllm") and cfg.rollout.engine == "vllm" and not cfg.vllm.url and total:
        share = cfg.vllm.gpu_memory_utilization or 0.35
        lower = round(max(0.1, share - 0.1), 2)
        remark = f" for a server on this GPU, of {total / GIB:.3g} GiB"
        found.append(Advice(f"--vllm.gpu-memory-utilization {lower}", (share - lower) * total, remark))
    return sorted((one for one in found if one.saves > 0), key=lambda one: -one.saves)


def _device_type() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _device_bytes() -> int:
    import torch

    return torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else 0
