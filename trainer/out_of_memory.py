"""Out of memory on the device: what was asked for, what is held, and which flags to lower with what each would save."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from typing import Any

GIB = 2**30
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
        from trainer.memory import cached_tokens, sizes_for, work_of
        from trainer.plan_memory import at_peak, cache_bytes

        sizes = sizes_for(cfg)
        work = work_of(cfg, sizes)
        parts = at_peak(sizes, work) | {"cache": cache_bytes(sizes, work.compute, cached_tokens(cfg))}
        held = ", ".join(f"{name} {size / GIB:.3g}" for name, size in parts.items() if size)
        lines.append(f"  this run holds about, in GiB: {held}")
        given = advice(sizes, work, cfg)
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


def advice(sizes: Any, work: Any, cfg: Any) -> list[Advice]:
    """What can be lowered in this run, the most helpful first."""
    from trainer.memory import cached_tokens, completions, longest
    from trainer.plan_memory import cache_bytes, peak

    def saves(**changed: Any) -> float:
        return peak(sizes, work) - peak(sizes, replace(work, **changed))

    found = []
    length, half = longest(cfg), work.tokens // 2
    if length is None or half >= length:
        less = saves(tokens=half, accumulates=True)
        while less <= 0 and half // 2 >= (length or 1):  # a second micro-batch finds the gradients of the first
            half //= 2
            less = saves(tokens=half, accumulates=True)
        found.append(Advice(f"--max-tokens-per-micro-batch {half}", less, f", {work.tokens} tokens now"))
    else:  # one sequence is a micro-batch by itself
        name = "completion-length" if hasattr(cfg, "rollout") else "length"
        less = saves(tokens=half)
        found.append(Advice(f"--max-{name} {length // 2}", less, f", one sequence is {length} tokens"))
    if not work.checkpointing:
        found.append(Advice("--gradient-checkpointing", saves(checkpointing=True), ", a third more time"))
    if work.optim == "adamw":
        found.append(Advice("--optim adamw_8bit", saves(optim="adamw_8bit"), " of moments (needs torchao)"))
    if work.lora_r:
        rank = max(1, work.lora_r // 2)
        found.append(Advice(f"--lora.r {rank}", saves(lora_r=rank), ", in a new run"))
    else:
        if work.held == 4 and work.compute == 2:
            remark = ", in a new run: weights, gradients and moments"
            found.append(Advice("--trained-dtype bfloat16", saves(held=2), remark))
        less = saves(lora_r=RANK)
        found.append(Advice(f"--lora.r {RANK}", less, ", in a new run: only adapters are trained"))
    if hasattr(cfg, "reference") and (work.has_reference or work.others):
        less = saves(has_reference=False, others=0.0)
        found.append(Advice("--ref precomputed", less, ": no second model while training"))
    if cached := cache_bytes(sizes, work.compute, cached_tokens(cfg)):
        size = max(1, completions(cfg) // 2)
        found.append(Advice(f"--rollout.max-batch-size {size}", cached / 2, " while completions are made"))
    total = _device_bytes()
    if hasattr(cfg, "vllm") and cfg.rollout.engine == "vllm" and not cfg.vllm.url and total:
        share = cfg.vllm.gpu_memory_utilization or 0.35
        lower = round(max(0.1, share - 0.1), 2)
        remark = f" for a server on this GPU, of {total / GIB:.3g} GiB"
        found.append(Advice(f"--vllm.gpu-memory-utilization {lower}", (share - lower) * total, remark))
    return sorted((one for one in found if one.saves > 0), key=lambda one: -one.saves)


def _device_bytes() -> int:
    import torch

    return torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else 0
