"""Memory of a planned run on each GPU, what fits, and a rough speed. Reads a config.json, no weights.

    python -m trainer.plan --model Qwen/Qwen3-1.7B --gpus 1 --method grpo
    python -m trainer.plan --shape llama-3.1-8b --gpus 8 --method dpo --gpu a100-80
    python -m trainer.plan --shape qwen3-8b --gpus 8 --parallel.context 4 --max-tokens-per-micro-batch 131072
    python -m trainer.plan --model builtin:tiny --lora.r 16 --max-tokens-per-micro-batch 16384

trainer/policy/memory.py has the formulas. Checked in tests/trainer/test_plan.py: what autograd saves, tensor by tensor,
on a CPU; the peak of a step there; the head's buffers and the peak of a checkpointed bfloat16 step, against rows
measured on an H200; AdamW's moments, against what the optimizers hold. bench/vs_trl.py compares whole DPO steps on a
GPU. Not measured, so only estimated: FSDP's buffers, and the two constants below. Sequences are packed, with flex
attention: sdpa adds a dense mask and, on some GPUs, scores.

    tokens/s = GPUs x mfu x peak / FLOPs per token        6 N, 8 N with gradient checkpointing; 4 N and 6 N with LoRA
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from data.command.flags import parse_command, run_command
from trainer.config.checks import check_numbers
from trainer.policy.memory import (
    METHODS,
    Sizes,
    Work,
    build,
    busiest,
    flops_per_token,
    head_bytes,
    kept,
    logits_bytes,
    meta_model,
    peak,
    sampling,
    sizes_of,
)  # fmt: skip

GIB = 1 << 30
RESERVE = 2.0  # GiB, assumed: CUDA context, NCCL, cuBLAS workspaces, gaps in the allocator
ASLEEP = 1.5  # GiB, assumed: what a colocated vLLM server keeps while it sleeps
LONGEST = 1 << 20  # largest micro-batch tried, in tokens
STEP = 256


class Card(NamedTuple):
    """Memory as torch reports it, and dense peak rates of the data sheet."""

    gib: float
    bf16: float  # TFLOP/s
    fp32: float
    triton_head: bool  # kernels/linear_logprob_triton.py runs on Hopper and Blackwell


CARDS = {
    "h200": Card(139.8, 989, 67, True),
    "h100": Card(79.1, 989, 67, True),
    "a100-80": Card(79.1, 312, 19.5, False),
    "a100-40": Card(39.4, 312, 19.5, False),
    "l40s": Card(44.4, 362, 91.6, False),
    "4090": Card(23.5, 165, 82.6, False),
}


# hidden_size, intermediate_size, layers, heads, key-value heads, head_dim, vocabulary, tied
KNOWN = {
    "qwen3-0.6b": ("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, True),
    "qwen3-1.7b": ("qwen3", 2048, 6144, 28, 16, 8, 128, 151936, True),
    "qwen3-4b": ("qwen3", 2560, 9728, 36, 32, 8, 128, 151936, True),
    "qwen3-8b": ("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, False),
    "qwen3-14b": ("qwen3", 5120, 17408, 40, 40, 8, 128, 151936, False),
    "qwen3-32b": ("qwen3", 5120, 25600, 64, 64, 8, 128, 151936, False),
    "qwen2.5-0.5b": ("qwen2", 896, 4864, 24, 14, 2, 64, 151936, True),
    "qwen2.5-1.5b": ("qwen2", 1536, 8960, 28, 12, 2, 128, 151936, True),
    "qwen2.5-7b": ("qwen2", 3584, 18944, 28, 28, 4, 128, 152064, False),
    "llama-3.2-1b": ("llama", 2048, 8192, 16, 32, 8, 64, 128256, True),
    "llama-3.2-3b": ("llama", 3072, 8192, 28, 24, 8, 128, 128256, True),
    "llama-3.1-8b": ("llama", 4096, 14336, 32, 32, 8, 128, 128256, False),
    "llama-3.1-70b": ("llama", 8192, 28672, 80, 64, 8, 128, 128256, False),
    "mistral-7b-v0.3": ("mistral", 4096, 14336, 32, 32, 8, 128, 32768, False),
}
FIELDS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "tie_word_embeddings",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Lora:
    r: int = 0
    """Rank of adapters on all linear layers but the head; 0 trains all weights."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    engine: Literal["local", "vllm"] = "local"
    """What samples: this process (local), or vLLM servers."""
    max_batch_size: int = 256
    """Completions that the local engine samples at once."""
    max_length: int = 1024
    """Tokens of prompt and completion together, for the key-value cache of the local engine."""


@dataclass(frozen=True, kw_only=True)
class Vllm:
    colocate: bool | None = None
    """Whether the server shares the trainer's GPU, asleep while the trainer works. None: only if there is one GPU."""
    gpu_memory_utilization: float = 0.35
    """Share of the GPU's memory that a colocated server takes while it is awake."""


@dataclass(frozen=True, kw_only=True)
class Parallel:
    mode: Literal["auto", "replicate", "fsdp"] = "auto"
    """How GPUs hold the model. auto: the table shows both."""
    shard: int | None = None
    """Number of GPUs that one copy is sharded over. None: all of them."""
    context: int = 1
    """Number of GPUs that share each micro-batch, a slice of its tokens each."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Memory of a run on each GPU, what fits, and a rough speed. Trains nothing, loads no weights."""

    model: str | None = None
    """Model to plan for: a hub id, a folder with a config.json, an adapter or finished run, or builtin:tiny."""
    trust_remote_code: bool = False
    """Allow running the Python code that comes with the model."""
    shape: str | None = None
    """Name of a known size instead of a model, without the hub: qwen3-1.7b, llama-3.1-8b, ..."""
    gpus: int = 1
    """Number of GPUs that train."""
    gpu: Literal["here", "h200", "h100", "a100-80", "a100-40", "l40s", "4090"] | None = None
    """GPU to plan for. None: the one in this machine, or h200 if it has none."""
    gpu_memory: float | None = None
    """Memory of one GPU in GiB. None: that of the card."""
    method: str = "sft"
    """Training method, which decides about reference model, log-prob head and sampling."""
    beta: float = 0.0
    """KL weight of GRPO and its relatives: above 0 a reference model is held."""
    ref: Literal["auto", "precomputed"] = "auto"
    """How the reference is held. precomputed: its log-probs are on disk, and no copy is in memory."""
    lora: Lora = field(default_factory=Lora)
    max_tokens_per_micro_batch: int = 8192
    """Most tokens of one forward pass."""
    gradient_checkpointing: bool = False
    """Give the verdict for gradient checkpointing; the table shows both."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of matrix products."""
    trained_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of trained weights, their gradients and AdamW's moments; adapters are always float32."""
    optim: Literal["adamw", "adamw_8bit"] = "adamw"
    """Optimizer. adamw_8bit keeps the two moments in 8 bits."""
    rollout: Rollout = field(default_factory=Rollout)
    vllm: Vllm = field(default_factory=Vllm)
    parallel: Parallel = field(default_factory=Parallel)
    mfu: float = 0.35
    """Fraction of the GPU's peak FLOP/s to assume. A 1.7B step with checkpointing reached 0.38 on an H200."""

    def __post_init__(self) -> None:
        if (self.model is None) == (self.shape is None):
            raise ValueError(f"model={self.model}, shape={self.shape}: give one of --model and --shape")
        if self.shape is not None and self.shape not in KNOWN:
            raise ValueError(f"shape={self.shape}: not known here; there is {', '.join(KNOWN)}, or use --model")
        if self.method not in METHODS:
            raise ValueError(f"method={self.method}: not known here; there is {', '.join(METHODS)}")
        check_numbers(
            self,
            {
                "1 or more": "gpus max_tokens_per_micro_batch",
                "above 0": "gpu_memory",
                "above 0 and at most 1": "mfu",
            },
        )
        check_numbers(self.lora, {"0 or more": "r"}, "lora.")
        check_numbers(self.vllm, {"above 0 and at most 1": "gpu_memory_utilization"}, "vllm.")
        if self.trained_dtype == "bfloat16" and (self.lora.r or self.dtype == "float32"):
            raise ValueError(
                f"trained_dtype=bfloat16: not with lora.r={self.lora.r}, dtype={self.dtype}; adapters are float32, and "
                "weights are not held lower than they are multiplied in"
            )
        for name, value in (("shard", self.parallel.shard), ("context", self.parallel.context)):
            if value is not None and (value < 1 or self.gpus % value):
                raise ValueError(f"parallel.{name}={value}: must divide the {self.gpus} GPUs")
        if self.parallel.mode == "fsdp" and self.gpus == 1:
            raise ValueError("parallel.mode=fsdp: has no effect with one GPU; say how many by --gpus")
        if self.parallel.mode == "replicate" and self.parallel.shard is not None:
            raise ValueError(f"parallel.shard={self.parallel.shard}: has no effect with parallel.mode=replicate")
        if self.beta and METHODS[self.method].reference != "with beta":
            raise ValueError(f"beta={self.beta}: decides nothing about the memory of {self.method}; leave it out")

    @property
    def has_reference(self) -> bool:
        wants = METHODS[self.method].reference
        return self.ref == "auto" and (wants == "always" or (wants == "with beta" and self.beta > 0))

    @property
    def shares_with_vllm(self) -> bool:
        if not METHODS[self.method].samples or self.rollout.engine != "vllm":
            return False
        return self.gpus == 1 if self.vllm.colocate is None else self.vllm.colocate


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 after one sentence about what is wrong."""
    return run_command(lambda: plan(parse_command(PlanConfig, argv, "python -m trainer.plan")))


def plan(cfg: PlanConfig) -> None:
    trusts = cfg.trust_remote_code
    model = build(known_config(cfg.shape)) if cfg.shape else meta_model(cfg.model, trust_remote_code=trusts)
    print("\n".join(report(cfg, sizes_of(model), *pick_card(cfg), notes(model))))


def known_config(name: str) -> Any:
    from transformers import AutoConfig

    kind, *values = KNOWN[name]
    return AutoConfig.for_model(kind, **dict(zip(FIELDS, values, strict=True)))


def notes(model: Any) -> list[str]:
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    if {"gate_proj", "up_proj", "down_proj", "q_proj", "o_proj"} <= names:
        return []
    return [f"{type(model).__name__} is not built like a Llama; its activations are counted as if it were."]


def pick_card(cfg: PlanConfig) -> tuple[str, Card]:
    import torch

    if cfg.gpu == "here" and not torch.cuda.is_available():
        raise ValueError(f"gpu=here: this machine has no CUDA device; name a card: {', '.join(CARDS)}")
    if cfg.gpu in (None, "here") and torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        like = next((x for name, x in CARDS.items() if name.partition("-")[0].upper() in found.name), CARDS["h200"])
        card = like._replace(gib=found.total_memory / GIB, triton_head=found.major in (9, 10))
        name = found.name
    else:
        name = cfg.gpu or "h200"
        card = CARDS[name]
    return name, card if cfg.gpu_memory is None else card._replace(gib=cfg.gpu_memory)


def columns(cfg: PlanConfig, card: Card) -> dict[str, Work]:
    """The settings compared: replicate and, with several GPUs, fsdp, each without and with gradient checkpointing."""
    head, parallel = METHODS[cfg.method].head, cfg.parallel
    base = Work(
        tokens=cfg.max_tokens_per_micro_batch, lora_r=cfg.lora.r, held=2 if cfg.trained_dtype == "bfloat16" else 4,
        compute=2 if cfg.dtype == "bfloat16" else 4, has_reference=cfg.has_reference, optim=cfg.optim,
        triton=card.triton_head, context=parallel.context,
        head="any loss" if parallel.context > 1 and head == "one pass" else head,  # model.token_loss
    )  # fmt: skip
    made, modes = {}, {}
    if parallel.mode != "fsdp" and parallel.shard is None:
        modes["replicate"] = base
    if cfg.gpus > 1 and parallel.mode != "replicate":
        modes["fsdp"] = replace(base, shards=parallel.shard or cfg.gpus)
    modes = modes or {"replicate": base}
    for name, work in modes.items():
        made[name] = work
        made[f"{name} + gc"] = replace(work, checkpointing=True)
    return made


def room(cfg: PlanConfig, card: Card) -> float:
    """GiB for tensors while the trainer works."""
    return card.gib - RESERVE - (ASLEEP if cfg.shares_with_vllm else 0.0)


def largest(s: Sizes, work: Work, gib: float) -> int:
    """Most tokens of a micro-batch, in steps of 256, whose peak stays within; 0 when not even those fit."""
    low, high = 0, LONGEST // STEP
    while low < high:
        middle = (low + high + 1) // 2
        if peak(s, replace(work, tokens=middle * STEP)) <= gib * GIB:
            low = middle
        else:
            high = middle - 1
    return low * STEP


def sampling_gib(cfg: PlanConfig, s: Sizes, work: Work, card: Card) -> float:
    """GiB while completions are made: no gradients or activations, but the engine's share."""
    if cfg.rollout.engine == "local":
        return sampling(s, work, cfg.rollout.max_batch_size * cfg.rollout.max_length) / GIB
    held = sum(size for name, size in kept(s, work).items() if name != "gradients") / GIB
    return held + (cfg.vllm.gpu_memory_utilization * card.gib if cfg.shares_with_vllm else 0.0)


def tokens_per_s(cfg: PlanConfig, s: Sizes, work: Work, card: Card) -> float:
    top = (card.bf16 if work.compute == 2 else card.fp32) * 1e12
    return cfg.gpus * cfg.mfu * top / flops_per_token(s, work)


def line(name: str, cells: Sequence[str]) -> str:
    return f"{name:<36}" + "".join(f"{cell:>16}" for cell in cells)


def report(cfg: PlanConfig, s: Sizes, card_name: str, card: Card, more: Sequence[str]) -> list[str]:
    works, limit = columns(cfg, card), room(cfg, card)
    num_adapter = f", {s.adapter(cfg.lora.r):,} in adapters" if cfg.lora.r else ""
    sharing = f", a slice of it on each of {cfg.parallel.context}" if cfg.parallel.context > 1 else ""
    held = f", weights held in {cfg.trained_dtype}" if cfg.trained_dtype != "float32" else ""
    out = [
        f"{cfg.shape or cfg.model}: {s.params:,} parameters{num_adapter}; {cfg.method}, {cfg.dtype}, {cfg.optim}{held}",
        f"{cfg.gpus} x {card_name}, {card.gib:.1f} GiB each, {limit:.1f} for tensors of the trainer; "
        f"{cfg.max_tokens_per_micro_batch} tokens in a micro-batch{sharing}; gc = gradient checkpointing",
        "",
        line("GiB on each GPU", list(works)),
    ]
    parts = {name: kept(s, work) for name, work in works.items()}
    times = {name: busiest(s, work) for name, work in works.items()}
    for part in ("weights", "adapters", "gradients", "optimizer state", "reference"):
        if any(x[part] for x in parts.values()):
            out.append(line(part, [f"{x[part] / GIB:.2f}" for x in parts.values()]))
    out.append(line("activations", [f"{x.activations / GIB:.2f}" for x in times.values()]))
    out.append(line("passing buffers beside them", [f"{x.passing / GIB:.2f}" for x in times.values()]))
    peaks = {name: peak(s, work) / GIB for name, work in works.items()}
    out.append(line("peak", [f"{x:.2f}" for x in peaks.values()]))
    fits = {name: x <= limit for name, x in peaks.items()}
    can_sample = dict.fromkeys(works, True)
    if METHODS[cfg.method].samples:
        made = {name: sampling_gib(cfg, s, work, card) for name, work in works.items()}
        whose = "vLLM's share" if cfg.shares_with_vllm else "servers elsewhere"
        with_what = whose if cfg.rollout.engine == "vllm" else "local cache"
        out.append(line(f"while sampling, {with_what}", [f"{x:.2f}" for x in made.values()]))
        can_sample = {name: x <= card.gib - RESERVE for name, x in made.items()}
        fits = {name: ok and can_sample[name] for name, ok in fits.items()}
    out.append(line("fits", ["yes" if ok else "no" for ok in fits.values()]))
    best = {name: largest(s, work, limit) if can_sample[name] else 0 for name, work in works.items()}
    out.append(line("largest max-tokens-per-micro-batch", [f"{x:,}" if x else "none" for x in best.values()]))
    rates = [tokens_per_s(cfg, s, work, card) for work in works.values()]
    out.append(line("tokens/s, all GPUs, rough", [f"{x:,.0f}" for x in rates]))
    return [*out, "", *explain(cfg, s, works, times, fits), *more]


def explain(
    cfg: PlanConfig, s: Sizes, works: dict[str, Work], times: dict[str, Any], fits: dict[str, bool]
) -> list[str]:
    first = next(iter(works.values()))
    out = ["A step is fullest at: " + "; ".join(f"{x}: {y.name}" for x, y in times.items()) + "."]
    if first.head != "none":
        out.append(
            f"The log-prob head takes {head_bytes(s, first, first.precision) / GIB:.2f} GiB if all tokens train; "
            f"storing their logits would take {logits_bytes(s, first.rows) / GIB:.2f} (avoided)."
        )
    suffix = " + gc" if cfg.gradient_checkpointing else ""
    asked = {name: ok for name, ok in fits.items() if name.endswith("gc") == cfg.gradient_checkpointing}
    verdict = ", ".join(f"{name.removesuffix(suffix)} {'fits' if ok else 'does not fit'}" for name, ok in asked.items())
    how = "with" if cfg.gradient_checkpointing else "without"
    out.append(f"Asked for, {how} gradient checkpointing: {verdict}.")
    out.append(
        f"Rough: speed is {cfg.mfu:.2f} of the data sheet's peak, training alone, neither sampling nor waiting; "
        f"{RESERVE:g} GiB are set aside for CUDA and the allocator. Memory: trainer/policy/memory.py."
    )
    return out


if __name__ == "__main__":
    sys.exit(main())
