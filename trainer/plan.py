"""Estimate the memory of a training run per GPU, for the command and for the advice after an out-of-memory error.

    python -m trainer.plan --config trainer/recipes/grpo_gsm8k.yaml --gpus 4          # a run's flags and YAML
    python -m trainer.plan --shape llama-3.1-8b --gpus 8 --method dpo --gpu a100-80
    python -m trainer.plan --shape qwen3-8b --gpus 8 --parallel.context 4 --max-tokens-per-micro-batch 131072

    num_bytes = planned_peak(cfg, tokens)      # peak of a training step with this many tokens
    text = out_of_memory(error, cfg)           # flags to lower and what each would save

Only config.json is read, no weights.

L layers, D width, H query heads, G key-value heads, K head size, I width inside the gated MLP, V vocabulary, P
parameters, n tokens of a micro-batch on this GPU (packed, so no padding). Bytes per number: h in a trained weight, w in
the residual stream, c in a matrix product.

    full fine-tuning (float32 weights, bfloat16 autocast)      h 4, w 4, c 2
    --trained-dtype bfloat16                                   h 2, w 2, c 2
    --dtype float32                                            h 4, w 4, c 4
    frozen LoRA base; blocks that FSDP gathers in bfloat16          w 2, c 2
    the same base with the in-process engine                        w 4, c 2

With --load-in-4bit the matrices of the base take PACKED bytes per weight, plus c per weight of the matrix in use.

tests/trainer/test_plan.py checks saved activations and the peak of a step on a CPU, the head's buffers and the peak of
a checkpointed bfloat16 step against an H200, a step with experts on any GPU, and AdamW's state. bench/vs_trl.py
compares whole DPO steps on a GPU. tests/test_nccl.py compares sampling from sharded weights with the peak of one rank,
without the cuBLAS workspaces (0.1 GB). FSDP's buffers in training, RESERVE and ASLEEP are unverified estimates.

Not counted: activations that --compile saves, or kernels/block.py on a GPU without it (norms keep neither float32 nor
normalised inputs, MLPs no silu(gate)); dense masks and scores of sdpa (packed rows use flex attention); reward models.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from data.command.checks import check_numbers
from data.command.flags import CONFIG, HELP, flag_table, print_help, read_argv, run_command
from data.command.flags import build as build_config
from data.errors import UserError
from data.hub import check_hub
from data.user_code import PythonObject
from rollout.model_folder import find_base, resolve_model
from trainer.cli import DRY_RUN, load_method, parse, peek
from trainer.config.blocks import MethodConfig, check_4bit, check_fp8
from trainer.config.errors import load_error
from trainer.parallel.ranks import is_main, world_size

CHUNK, PART, SLICE = 4096, 512, 1 << 28  # as in kernels/linear_logprob_triton.py, which needs triton to import
TRITON_HEAD = (9, 10)  # compute capabilities of that kernel: Hopper and Blackwell
TORCH_BLOCK = 1 << 25  # BLOCK_ELEMENTS of kernels/linear_logprob.py
SCALED, SMALLEST = 256, 4096  # torchao's 8-bit moments: numbers per scale, and the smallest tensor in 8 bits
PACKED = 0.5 + 2 / 64  # bytes per weight in kernels/nf4.py: a code and its share of a bfloat16 scale
GIB = 1 << 30
BYTES = {"float32": 4, "bfloat16": 2}
RESERVE = 2.0  # GiB, assumed: CUDA context, NCCL, cuBLAS workspaces, allocator fragmentation
USABLE = 0.92  # fraction of the memory to plan with; plans have been up to 2% below measured peaks (bench/results)
ASLEEP = 1.5  # GiB, assumed: a sleeping colocated vLLM server
PAGE = 64  # tokens per page of the in-process engine's cache
ROWS = {"cuda": 512, "cpu": 256}  # default max_batch_size of the in-process engine
LONGEST, STEP = 1 << 20, 256  # largest micro-batch tried and the step between two, in tokens
RANK = 16  # --lora.r suggested to a run that trains all weights
EVERY_BLOCK: dict[str, Any] = {"checkpointing": True, "recomputed": None}  # of a Work
SHARE = 0.35  # default --vllm.gpu-memory-utilization of a colocated server
ROWS_FROM = ("data", "nemo_gym.datasets", "verifiers.env")
PROMPT = 768  # tokens of a prompt in a plan, without --max-prompt-length


# what is counted -------------------------------------------------------------------------------------------------


class Experts(NamedTuple):
    """Sizes of the layers that route each token to some of their experts."""

    layers: int
    num: int  # experts per layer
    top_k: int  # experts per token
    inner: int  # width inside one expert
    shared: int  # width inside the experts that all tokens use
    params: int  # parameters of all routed experts
    adapted: bool  # LoRA on all linear layers adapts the experts


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder with RMS norms, grouped-query attention and a gated MLP or experts."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    tied: bool
    qk_norm: bool
    is_llama: bool  # has Llama blocks
    tensors: tuple[int, ...]  # parameters per tensor; a tied tensor counts once
    trained: tuple[int, ...]  # the same for tensors that are trained without LoRA
    matrices: int  # parameters in the linear layers of the blocks
    ends: tuple[int, ...]  # input and output width of each of these layers: adapter sizes of rank 1
    experts: Experts | None = None

    @property
    def params(self) -> int:
        return sum(self.tensors)

    @property
    def expert_params(self) -> int:
        return self.experts.params if self.experts else 0

    @property
    def block_params(self) -> float:
        """Parameters in the matrices of the largest block."""
        num_routed = self.experts.layers if self.experts else 1
        return self.matrices / self.layers + self.expert_params / num_routed

    @property
    def embedding(self) -> int:
        return self.vocab * self.width

    def adapter(self, r: int) -> int:
        return r * sum(self.ends)


@dataclass(frozen=True)
class Work:
    """A micro-batch and the settings that decide its memory."""

    tokens: int
    lora_r: int = 0
    is_wide: bool = False  # LoRA with a float32 residual stream
    in_4bit: bool = False  # frozen base in 4 bits
    fp8: bool = False  # two FP8 copies of the frozen base
    weight_bytes: int = 4  # h, in full fine-tuning
    compute: int = 2  # c
    checkpointing: bool = False
    recomputed: int | None = None  # blocks to checkpoint, counted from the first; None: all
    offloading: bool = False  # checkpointed activations are offloaded
    compiled: bool = False  # may be compiled: checkpointed blocks then keep the attention output
    fused: bool = False  # norms and activations of Llama blocks save their inputs only (kernels/block.py, or compiled)
    head: str = "one pass"
    has_reference: bool = False
    other_bytes: float = 0.0  # other frozen models
    critic: float = 0.0  # bytes of PPO's critic, which is not sharded
    optim: str = "adamw"
    shards: int = 1  # GPUs that FSDP shards over; 1: replicas
    has_copies: bool = False  # several copies of the shards
    triton: bool = True
    trained_tokens: int | None = None  # None: all tokens
    accumulates: bool = True  # gradients of earlier micro-batches exist
    context: int = 1  # GPUs that share the micro-batch

    @property
    def local_tokens(self) -> int:
        """n, tokens per GPU."""
        return -(-self.tokens // self.context)

    @property
    def local_trained_tokens(self) -> int:
        """Trained tokens per GPU."""
        return self.local_tokens if self.trained_tokens is None else -(-self.trained_tokens // self.context)

    @property
    def full(self) -> bool:
        return self.lora_r == 0

    @property
    def gradient_bytes(self) -> int:
        """Bytes per gradient; before the last micro-batch, copies of the shards keep float32 sums."""
        size = self.weight_bytes if self.full else 4
        return max(size, 4) if self.has_copies and self.accumulates else size

    @property
    def used_bytes(self) -> int:
        """Bytes of a weight in use; FSDP casts the blocks it gathers, so autocast does not."""
        return self.weight_bytes if self.full and self.shards == 1 else self.compute

    @property
    def stream(self) -> int:
        """w: bytes per number in the residual stream"""
        return 4 if self.is_wide and self.shards == 1 else self.used_bytes


class RolloutSize(NamedTuple):
    """Completions that the in-process engine samples for a step on one GPU."""

    rows: int  # decoded concurrently
    prompts: int  # distinct prompts
    prompt_length: int
    completion_length: int

    @property
    def tokens(self) -> int:
        """Tokens in the cache, in whole pages: each prompt once, plus the completion and a spare page of each row, plus
        a scratch page."""
        row = whole_pages(self.completion_length + 1) + PAGE
        return self.prompts * whole_pages(self.prompt_length) + self.rows * row + PAGE

    def group(self, num_generations: int) -> RolloutSize:
        """Return the size of one group, the least that the engine needs room for."""
        return self._replace(rows=num_generations, prompts=1)


class EngineMemory(NamedTuple):
    """Bytes of the in-process engine while it samples."""

    copy: float  # weights in the compute dtype; 0 on a CPU, which samples from the trained weights
    cache: float  # keys and values
    logits: float  # one decode step, float32


class StepPoint(NamedTuple):
    """A point in the step and its bytes in addition to persistent_bytes."""

    name: str
    activations: float
    buffers: float  # temporary
    gradients: float = 0.0  # computed so far, if gradients are not persistent

    @property
    def total(self) -> float:
        return self.activations + self.buffers + self.gradients


def sizes_of(model: Any, trained_parameters: Sequence[str] = ()) -> Sizes:
    """Return the sizes of a transformers causal LM, which may be on the meta device."""
    from torch import nn

    from rollout.engines.forward import block_obstacle

    config, head = model.config, model.get_output_embeddings()
    linears = [x for x in model.modules() if isinstance(x, nn.Linear) and x is not head]
    heads, patterns = config.num_attention_heads, trained_parameters or ("",)
    trained = (x for name, x in model.named_parameters() if any(re.match(pattern, name) for pattern in patterns))
    experts = experts_of(model)
    ends = tuple(end for x in linears for end in (x.in_features, x.out_features))
    if experts is not None:
        adapters = adapters_of(model)
        ends, experts = tuple(adapters.values()), experts._replace(adapted=any(".experts." in x for x in adapters))
    return Sizes(
        layers=config.num_hidden_layers, width=config.hidden_size, heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        inner=config.intermediate_size, vocab=head.weight.shape[0], tied=bool(config.tie_word_embeddings),
        qk_norm=any(name.endswith("q_norm") for name, _ in model.named_modules()),
        is_llama=block_obstacle(model) is None,
        tensors=tuple(x.numel() for x in model.parameters()),
        trained=tuple(x.numel() for x in trained), matrices=sum(x.weight.numel() for x in linears),
        ends=ends, experts=experts,
    )  # fmt: skip


def experts_of(model: Any) -> Experts | None:
    from rollout.routes import expert_blocks  # imports torch

    blocks = expert_blocks(model)
    if not blocks:
        return None
    config, first = model.config, blocks[0].experts
    shared = (x.out_features for name, x in blocks[0].named_modules() if name.endswith("gate_proj"))
    return Experts(
        layers=len(blocks), num=first.num_experts, top_k=config.num_experts_per_tok,
        inner=first.down_proj.numel() // (first.num_experts * config.hidden_size), shared=sum(shared),
        params=sum(x.numel() for block in blocks for x in block.experts.parameters()), adapted=False,
    )  # fmt: skip


def adapters_of(model: Any) -> dict[str, int]:
    """Return the size of each adapter tensor of rank 1: whether experts have adapters depends on the model and peft."""
    from peft import LoraConfig, get_peft_model

    settings = [(x, x.requires_grad) for x in model.parameters()]
    wrapped = get_peft_model(model, LoraConfig(r=1, target_modules="all-linear", task_type="CAUSAL_LM"))
    sizes = {name: x.numel() for name, x in wrapped.named_parameters() if "lora_" in name}
    wrapped.unload()
    for parameter, requires_grad in settings:
        parameter.requires_grad_(requires_grad)
    return sizes


# bytes -----------------------------------------------------------------------------------------------------------


def persistent_bytes(s: Sizes, work: Work) -> dict[str, float]:
    """Return the bytes per GPU that last for the whole step, by kind.

    AdamW's step allocates nothing: on a GPU it is one kernel, or one kernel per weight. With LoRA the base serves as
    the reference.
    """
    trained_bytes = work.weight_bytes if work.full else 4
    tensors = s.trained if work.full else tuple(work.lora_r * end for end in s.ends)
    trained = sum(tensors)
    in_8bit = 0
    if work.optim == "adamw_8bit":  # a byte per number, a float32 scale per 256; other sizes are not quantised
        shards = [(num, num / work.shards) for num in tensors]
        in_8bit = sum(num for num, shard in shards if shard >= SMALLEST and shard % SCALED == 0)
    base = work.compute * s.params - (work.compute - PACKED) * s.matrices * work.in_4bit + 2 * s.matrices * work.fp8
    total = {
        "weights": work.weight_bytes * s.params if work.full else base,
        "adapters": 4 * s.adapter(work.lora_r),
        "gradients": work.gradient_bytes * trained,
        "optimizer state": 2 * (1 + 4 / SCALED) * in_8bit + 2 * trained_bytes * (trained - in_8bit),
        "reference": work.compute * s.params * (work.has_reference and work.full) + work.other_bytes,
    }
    return {name: size / work.shards for name, size in total.items()} | ({"critic": work.critic} if work.critic else {})


def critic_bytes(s: Sizes, work: Work, model: Sizes | None) -> float:
    """Return the bytes of a critic: a two-layer head on the policy (model=None) or a separate model."""
    if model is None:
        return 16 * (2 * s.width * (s.width + 2) + 1)
    alone = replace(work, shards=1, has_reference=False, other_bytes=0.0, critic=0.0)
    return sum(persistent_bytes(model, alone).values())


def block_activation_bytes(s: Sizes, work: Work, *, routed: bool | None = None) -> int:
    """Return the bytes that autograd saves per block: the terms below per local token, plus remote keys and values.

    `routed`: whether the block has experts. None: the block that saves the most.
    """
    if routed is None:
        kinds = {s.experts is not None, s.experts is not None and s.experts.layers == s.layers}
        return max(block_activation_bytes(s, work, routed=kind) for kind in kinds)
    w, c, d, inner = work.stream, work.compute, s.width, s.experts.shared if routed else s.inner
    experts = expert_activation_bytes(s, work) if routed else 0
    num_inputs = 5 if inner else 3  # q, k, v, gate, up
    heads, keys = s.heads + s.kv_heads, (s.heads + s.kv_heads) * s.head_dim
    if work.fused and not routed:
        terms = {
            "two norms": 2 * (w + c) * d,  # input, and output rounded once for all matrices
            "inside the adapters": c * 7 * work.lora_r,
            "q, k norms": c * keys * s.qk_norm,
            "MLP": 3 * c * inner,  # gate, up, product
        }
    elif work.full:
        terms = {
            "two norms": 2 * ((4 + w) * d + 4),  # float32 input, normalised input, one root
            "norm outputs": (num_inputs if w != c else 2) * c * d,  # autocast casts once for each matrix
            "q, k norms": ((4 + c) * keys + 4 * heads) * s.qk_norm,
            "MLP": 4 * c * inner,  # gate, silu(gate), up, their product
        }
    else:
        terms = {
            "two norms": 2 * (4 * d + 4),
            "inputs of matrices": c * ((num_inputs if w != c else 2) * d + inner),  # rounded for each matrix, or shared
            "inside the adapters": c * (7 if inner else 4) * work.lora_r,
            "q, k norms": (4 * keys + 4 * heads) * s.qk_norm,
            "MLP": 3 * c * inner,
        }
    terms["attention"] = 2 * c * keys + 4 * s.heads  # q, k, v, output, log-sum-exp; no T x T scores
    terms["experts"] = experts
    return work.local_tokens * sum(terms.values()) + 2 * c * s.kv_heads * s.head_dim * (work.tokens - work.local_tokens)


def expert_activation_bytes(s: Sizes, work: Work) -> int:
    """Return the bytes per token that autograd saves in the router and the routed experts of a block."""
    w, c, d, e = work.stream, work.compute, s.width, s.experts
    router = 2 * 4 * e.num + c * d * (w != c)  # logits and probabilities; its cast input
    indices = 4 * 8 + 2 * 4  # int64 of sorting and gathering, float32 gate weights
    # input, gate, up, silu(gate), their product, output; frozen experts keep neither input nor product
    states = c * (2 * d + 4 * e.inner if work.full or e.adapted else d + 3 * e.inner)
    return router + e.top_k * (indices + states)


def cast_bytes(s: Sizes, work: Work, *, cached: bool = False) -> int:
    """Return the bytes of bfloat16 copies of the trained float32 matrices, over all blocks.

    `cached`: only the copies that autocast keeps until the forward ends. Experts are copied for the backward, by a cast
    or by adding their adapters.
    """
    if not cached and not work.full and s.experts is not None and s.experts.adapted:
        return cast_bytes(s, work, cached=True) + work.compute * s.expert_params
    if work.compute == 4:
        return 0
    matrices = s.matrices + s.expert_params * (not cached)
    return work.compute * (matrices * (work.stream != work.compute) if work.full else s.adapter(work.lora_r))


def activation_bytes(s: Sizes, work: Work) -> int:
    """Return the bytes of activations and casts kept between forward and backward: w D per checkpointed block and token
    (plus the attention output if compiled), two blocks of it with offloading."""
    n, w, d = work.local_tokens, work.stream, s.width
    outside = n * (4 * d + 4 + w * d * work.full + 2 * w * s.head_dim + 8)  # last norm, rotary table, ids
    if work.offloading:
        return outside + n * w * d * min(2, s.layers)
    attention = s.heads * (work.compute * s.head_dim + 4) * work.compiled  # output and log-sum-exp
    return outside + n * (w * d + attention) * num_recomputed(s, work) + kept_bytes(s, work)


def num_recomputed(s: Sizes, work: Work) -> int:
    """Return the number of checkpointed blocks. They are the first, because their backward comes when the activations
    of all other blocks have been freed."""
    return (s.layers if work.recomputed is None else work.recomputed) * work.checkpointing


def kept_bytes(s: Sizes, work: Work) -> int:
    """Return the bytes of activations and casts of the blocks that are not checkpointed."""
    num = s.layers - num_recomputed(s, work)
    # embeddings are frozen, so the first norm saves nothing
    first = 0 if work.full or num < s.layers else work.local_tokens * (4 * s.width + 4)
    routed = min(num, s.experts.layers if s.experts else 0)  # blocks with experts are the last
    blocks = {kind: count for kind, count in ((False, num - routed), (True, routed)) if count}
    saved = sum(count * block_activation_bytes(s, work, routed=kind) for kind, count in blocks.items())
    return saved - first + cast_bytes(s, work) * num // s.layers


def offloaded_bytes(s: Sizes, work: Work) -> int:
    """Return the bytes of main memory that offloading takes per GPU: the inputs of all blocks but the last."""
    return work.local_tokens * work.stream * s.width * (s.layers - 1) * work.offloading


def head_bytes(s: Sizes, work: Work) -> int:
    """Return the peak of the log-prob head (kernels/linear_logprob.py), including its new gradients dX and dW.

    The head stores one chunk of exponentials E instead of logits; `part` is a chunk of E @ W in float32.
    """
    if work.head == "none":
        return 0
    rows, d, v, w, c = work.local_trained_tokens, s.width, s.vocab, work.used_bytes, work.compute
    cast, dx = c * s.embedding * (w != c), c * rows * d
    if not work.triton or c == 4:  # float32 blocks: four, or three plus the summand of dW
        block = 4 * v * min(rows, max(1, TORCH_BLOCK // v))
        low = 0 if c == 4 else block // 2
        dw = s.embedding * work.full
        return cast + dx + 4 * dw + max(4 * block, 3 * block + low + c * dw)
    if work.head == "any loss" and work.full:  # E for some columns and all rows
        columns = min(v, max(256, SLICE // max(1, rows) // 256 * 256))
        return cast + 2 * rows * columns + 4 * d * columns + 4 * rows * d + dx + w * s.embedding
    is_one_chunk = work.full and w != 4 and rows <= 2 * d
    chunk = rows if is_one_chunk else min(rows, CHUNK)
    e = 2 * -(-chunk // 128) * 128 * v
    part = 4 * d * min(chunk, PART * max(1, d // 1024))
    if not work.full:
        return e + dx + part
    if w == 4 or is_one_chunk:
        return cast + e + dx + part + w * s.embedding
    return max(e + dx + part + 4 * s.embedding, dx + (4 + w) * s.embedding)  # the sum is float32, then rounded


def logits_bytes(s: Sizes, rows: int) -> int:
    """Return the peak if logits were stored: logits, float32 copy, log-softmax, gradient."""
    return 12 * rows * s.vocab


def gathered_bytes(s: Sizes, work: Work) -> tuple[float, float]:
    """Return FSDP's bytes in addition to its shards: in forward and head, and in the backward of a block.

    Blocks take 3 c per weight: the block in use, the prefetched block and its gather buffer. Embeddings and head stay
    gathered (c), each of them even if tied. The backward adds the block's unsharded gradient (c) and its float32 copy
    for the reduction (4).
    """
    if work.shards == 1:
        return 0.0, 0.0
    c, block = work.compute, s.block_params
    gathered = 2 * c * s.embedding + 3 * c * block
    return gathered, gathered + (c + 4) * block * work.full


def step_points(s: Sizes, work: Work) -> list[StepPoint]:
    """Return the points of a step that may be its peak.

    A step with a single micro-batch starts without gradients, which grow as activations are freed (`is_first`). The
    25 MiB buckets in which replicas sum gradients are not counted.
    """
    w, c, n, d = work.stream, work.compute, work.local_tokens, s.width
    has_head = work.head != "none"
    is_first, is_tied = work.full and not work.accumulates, work.full and s.tied and has_head
    saved, (gathered, reduced) = activation_bytes(s, work), gathered_bytes(s, work)
    casts = cast_bytes(s, work, cached=True)
    expert_casts = (cast_bytes(s, work) - casts) / (s.experts.layers if s.experts else 1)  # of one block
    block = block_activation_bytes(s, work) + casts / s.layers + expert_casts
    grad = work.gradient_bytes / work.shards
    head_grad = grad * s.embedding * has_head  # a tied head's gradient is kept until the embedding's is computed
    waiting, new = (0, head_grad) if is_first else (head_grad * is_tied, 0)
    # In the MLP: gradients of product, silu and up in place of the product, the gradient of the residual stream, and
    # one matrix's new gradient before it is accumulated.
    inner, largest = s.inner, d * s.inner  # of a token, and in one weight
    if e := s.experts:
        inner, largest = e.top_k * e.inner + e.shared, 2 * d * e.inner * e.num
    matrix = largest * (w + c * (w != c)) if work.full and work.accumulates else 0
    unpacked = c * d * s.inner * work.in_4bit  # dequantised matrix in use
    inside = 2 * n * c * inner + matrix
    if e:  # gradients of the experts' outputs, sorted and not; later one weight's, when the outputs are freed
        inside = max(2 * n * e.top_k * d * max(c, w), matrix - n * c * e.top_k * d)
    worst = inside + n * w * d + unpacked + reduced
    offloaded = n * w * d * (work.offloading and s.layers > 1)  # one of two inputs is offloaded before the head
    head = c * work.local_trained_tokens * d + head_bytes(s, work) + gathered
    points = [StepPoint("log-prob head", saved - offloaded, head)]
    recomputed = num_recomputed(s, work)
    if recomputed:  # autocast caches the casts of all blocks until the forward ends
        forward = n * (4 * c * inner + w * d) * (recomputed == s.layers) + unpacked + gathered + expert_casts
        points.append(StepPoint("forward, casts of all weights", saved, forward + casts * recomputed / s.layers))
    if recomputed < s.layers:
        points.append(StepPoint("backward of a block", saved, worst + waiting, new))
    if recomputed:  # the activations of all kept blocks are freed
        later = grad * min(sum(s.trained), (s.layers - recomputed) * s.block_params) * is_first
        points.append(
            StepPoint("backward of a block", saved - kept_bytes(s, work) + block, worst + waiting, new + later)
        )
    if is_first:  # all later blocks have gradients; the first block has only its last matrix's gradient
        last = block + n * (w * d + 2 * w * s.head_dim + 8)
        later = grad * min(sum(s.trained), s.params - s.block_params + largest)
        points.append(StepPoint("backward of the first block", last, worst, later))
    # An embedding's gradient is dense and is added to an existing gradient.
    summand = w * s.embedding * work.full if work.accumulates or is_tied else 0
    every = grad * sum(s.trained) if is_first else 0
    points.append(StepPoint("embedding's gradient", n * w * d, waiting + summand + gathered, every))
    return points


def fullest_point(s: Sizes, work: Work) -> StepPoint:
    """Return the peak of forward and backward."""
    return max(step_points(s, work), key=lambda point: point.total)


def peak_parts(s: Sizes, work: Work) -> dict[str, float]:
    """Return the bytes of each kind on one GPU at the peak of forward and backward."""
    parts, fullest = persistent_bytes(s, work), fullest_point(s, work)
    if work.full and not work.accumulates:
        parts["gradients"] = fullest.gradients
    return parts | {"activations": fullest.activations, "buffers": fullest.buffers}


def peak(s: Sizes, work: Work) -> float:
    """Return the peak bytes of tensors on one GPU during forward, backward and update."""
    return sum(peak_parts(s, work).values())


def largest_micro_batch(s: Sizes, work: Work, gib: float) -> int:
    """Return the largest micro-batch in tokens that fits, a multiple of STEP; 0 if none fits."""
    sizes = range(STEP, LONGEST + 1, STEP)
    return STEP * bisect_right(sizes, gib * GIB, key=lambda tokens: peak(s, replace(work, tokens=tokens)))


def persistent_without_gradients(s: Sizes, work: Work) -> float:
    return sum(size for name, size in persistent_bytes(s, work).items() if name != "gradients")


def engine_memory(s: Sizes, work: Work, rollout: RolloutSize, device: str, most: float = math.inf) -> EngineMemory:
    """Return the memory of the in-process engine on cuda or cpu; `most` limits its cache."""
    copy = work.compute * s.params if device == "cuda" else 0
    return EngineMemory(copy, min(most, cache_bytes(s, work.compute, rollout.tokens)), 4 * rollout.rows * s.vocab)


def copied_bytes(s: Sizes, work: Work) -> float:
    """Return the bytes to copy the largest sharded weight: a cast of the shard and the full weight."""
    if work.shards == 1:
        return 0.0
    c, cast = work.compute, work.compute * (work.full and work.weight_bytes != work.compute)
    return (c + cast / work.shards) * s.embedding


def sampling_bytes(s: Sizes, work: Work, engine: EngineMemory) -> float:
    """Return the bytes while this process samples: no gradients or activations. With a copy of the weights, which is
    filled before the cache is allocated, there are no casts; otherwise all shards are gathered."""
    persistent = persistent_without_gradients(s, work)
    if engine.copy:
        return persistent + engine.copy + max(copied_bytes(s, work), engine.cache + engine.logits)
    return persistent + sum(engine) + (cast_bytes(s, work) if work.shards == 1 else work.compute * s.params)


def cache_bytes(s: Sizes, compute: int, num_tokens: int) -> int:
    """Return the bytes of keys and values."""
    return 2 * s.layers * s.kv_heads * s.head_dim * compute * num_tokens


def whole_pages(num_tokens: int) -> int:
    """Round up to whole pages."""
    return -(-num_tokens // PAGE) * PAGE


def room_for_cache(s: Sizes, work: Work, rollout: RolloutSize, room: float) -> float:
    """Return the bytes of `room` that are left for the engine's cache on a GPU."""
    without_cache = engine_memory(s, work, rollout, "cuda", most=0)
    return max(0.0, room - persistent_without_gradients(s, work) - sum(without_cache))


def rows_that_fit(s: Sizes, work: Work, rollout: RolloutSize, cache: float) -> int:
    """Return how many rows the engine can decode concurrently with this many bytes of cache."""

    def needed(rows: int) -> int:
        fewer = rollout._replace(rows=rows, prompts=-(-rows * rollout.prompts // rollout.rows))
        return cache_bytes(s, work.compute, fewer.tokens)

    return bisect_right(range(1, rollout.rows + 1), cache, key=needed)


def fits_in_process(s: Sizes, work: Work, group: RolloutSize, room: float) -> bool:
    """Decide as trainer/rl/engine_choice.py does: training without tokens, a copy of the weights and the cache of one
    group must fit."""
    engine = engine_memory(s, work, group, "cuda")
    return sum(persistent_bytes(s, work).values()) + cast_bytes(s, work) + engine.copy + engine.cache <= room


def peak_with_engine(s: Sizes, work: Work, engine: EngineMemory | None, room: float) -> float:
    """Return the peak bytes of training; the engine's memory counts if both fit, otherwise it is freed."""
    top = peak(s, work)
    if engine is None or not engine.copy:
        return top
    return top + sum(engine) if top + sum(engine) <= room else top


def flops_per_token(s: Sizes, work: Work) -> int:
    """Return 2 N for forward, 4 N for backward (2 N if weights are frozen), 2 N to recompute, 2 N for a reference.

    N excludes an untied embedding and the experts that a token does not use. Attention scores are not
    counted: they are small for short sequences.
    """
    num = s.params - (0 if s.tied else s.embedding)
    if s.experts:  # a token runs top_k of the experts
        num -= round(s.expert_params * (1 - s.experts.top_k / s.experts.num))
    again = 2 * num * num_recomputed(s, work) // s.layers
    return num * (2 + (4 if work.full else 2) + 2 * work.has_reference) + again


# a run, from its Config ------------------------------------------------------------------------------------------


def meta_model(model: str, revision: str | None = None, *, trust_remote_code: bool = False) -> Any:
    """Build the model on the meta device."""
    from transformers import AutoConfig

    if isinstance(model, PythonObject):
        return build(model.value.config.get_text_config())
    path, revision = find_base(resolve_model(model), revision)
    if not Path(path).is_dir():
        check_hub("model", path)
    try:
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
        config = config.get_text_config()
    except Exception as error:  # damaged files make transformers raise anything
        raise UserError(f"model={model}: cannot read its config.json: {load_error(error, path)}") from None
    for name in ("num_attention_heads", "intermediate_size", "num_hidden_layers"):
        if not hasattr(config, name):
            raise UserError(f"model={model}: config.json has no {name}; the planner supports only decoder models")
    return build(config, trust_remote_code=trust_remote_code)


def build(config: Any, *, trust_remote_code: bool = False) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def sizes_for(cfg: MethodConfig, model: str | None = None) -> Sizes:
    """Return the sizes of the trained model, or of another model that the run loads."""
    settings = cfg.model if model is None else cfg.model.for_model(model)
    lm = meta_model(settings.model, settings.revision, trust_remote_code=settings.trust_remote_code)
    return sizes_of(lm, settings.trained_parameters)


def planned_peak(cfg: MethodConfig, tokens: int, *, trained_tokens: int | None = None) -> float:
    """Return the peak bytes of tensors on this device, sampling included, in a step with this many tokens on it."""
    s, parts = sizes_for(cfg), cfg.run.gradient_accumulation_steps
    most = min(math.ceil(tokens / parts), max(cfg.run.max_tokens_per_micro_batch, longest_sequence(cfg) or 0))
    trained = None if trained_tokens is None else math.ceil(most * trained_tokens / tokens)
    work = replace(work_of(cfg, s), tokens=most, trained_tokens=trained, accumulates=most < tokens)
    engine = engine_memory_of(cfg, s, work)
    sampling = 0.0 if engine is None else sampling_bytes(s, work, engine)
    return max(peak_with_engine(s, work, engine, memory_here()), sampling)


def unsharded_work(cfg: MethodConfig, s: Sizes, device: str) -> Work:
    """Return the Work of this run at its largest micro-batch, with replicas and without automatic checkpointing."""
    facts = type(cfg).memory
    compute = BYTES[{"cuda": "bfloat16", "cpu": "float32"}[device] if cfg.model.dtype == "auto" else cfg.model.dtype]
    tokens, is_part = micro_batch(cfg)
    work = Work(
        tokens=tokens, lora_r=cfg.lora.r, in_4bit=cfg.model.load_in_4bit, weight_bytes=BYTES[cfg.model.trained_dtype],
        fp8=cfg.model.fp8_base, compute=compute, is_wide=bool(cfg.lora.r) and s.is_llama and may_sample_here(cfg),
        checkpointing=cfg.model.gradient_checkpointing is True or cfg.model.activation_offloading,
        offloading=cfg.model.activation_offloading,
        head=facts.head_for(cfg.parallel.context), has_reference=has_reference(cfg),
        other_bytes=compute * sum(sizes_for(cfg, name).params for name in other_models(cfg)), optim=cfg.optim.optim,
        accumulates=is_part, context=cfg.parallel.context, triton=device == "cuda",
        compiled=device == "cuda" and cfg.model.compile is not False and cfg.parallel.context == 1,
        fused=device == "cuda" and s.is_llama,
    )  # fmt: skip
    moves = getattr(getattr(cfg, "distill", None), "teacher_update_rate", None) is not None
    if moves and compute < 4 and not cfg.lora.r:
        work = replace(work, other_bytes=work.other_bytes + 4 * s.params)  # the teacher's average in float32
    if hasattr(cfg, "value_model"):
        work = replace(work, critic=critic_bytes(s, work, cfg.value_model and sizes_for(cfg, cfg.value_model)))
    return work


def may_sample_here(cfg: MethodConfig) -> bool:
    """Return whether the run samples with the in-process engine; "auto" may still choose vLLM for lack of memory."""
    from trainer.config.groups import servers_asked

    engine = getattr(getattr(cfg, "rollout", None), "engine", "vllm")
    return engine == "local" or (engine == "auto" and not servers_asked(cfg))


def work_of(cfg: MethodConfig, s: Sizes, device: str | None = None) -> Work:
    """Return the Work of this run as it would start here, on cuda or cpu. None: this machine's device."""
    import torch

    device = device or device_here()
    work = unsharded_work(cfg, s, device)
    if torch.cuda.is_available():
        work = replace(work, triton=work.triton and torch.cuda.get_device_capability()[0] in TRITON_HEAD)
    shards = shards_of(cfg, s, work, device)
    work = replace(work, shards=shards, has_copies=1 < shards < world_size() and not cfg.parallel.reduce_once)
    if cfg.model.gradient_checkpointing == "auto" and not work.offloading:
        chosen = recompute_by_memory(s, fullest_work(cfg, work), room_to_train(cfg, s, work, device))
        return replace(work, checkpointing=chosen.checkpointing, recomputed=chosen.recomputed)
    return work


def fullest_work(cfg: MethodConfig, work: Work) -> Work:
    """Return the work of a full micro-batch if prompts, which count as 0 tokens without a limit, may fill it."""
    if getattr(cfg, "max_prompt_length", 0) is None:
        return replace(work, tokens=max(work.tokens, cfg.run.max_tokens_per_micro_batch))
    return work


def room_to_train(cfg: MethodConfig, s: Sizes, work: Work, device: str) -> float:
    """Return the bytes to plan training with. An in-process engine keeps its memory if training then fits."""
    room, engine = USABLE * min(memory_here(), free_here()), engine_memory_of(cfg, s, work, device)
    if engine is None or not engine.copy:
        has_server = device == "cuda" and engine is None and hasattr(cfg, "vllm")
        return room - ASLEEP * GIB * has_server
    least = peak(s, replace(work, **EVERY_BLOCK))
    return room - sum(engine) if least + sum(engine) <= room else room


def blocks_to_recompute(cfg: MethodConfig) -> int:
    """Return the number of blocks to checkpoint with gradient_checkpointing=auto, equal on all ranks, and log it.

    It is not saved: --resume decides for the GPU it finds. On a CPU it is 0, and for a model that cannot be planned.
    """
    import torch

    from trainer.config.errors import one_line
    from trainer.parallel.comm import all_max, is_main
    from trainer.parallel.watch import log

    model = getattr(cfg, "model", None)  # a custom method may not have the block
    if model is None or model.gradient_checkpointing != "auto" or model.activation_offloading or device_here() == "cpu":
        return 0
    try:
        num, line = recompute_choice(cfg)
    except Exception as error:  # the run may still fit
        num, line = 0, f"off, because memory could not be estimated ({one_line(error)})"
    most = int(all_max(torch.tensor(num), "blocks to recompute"))  # ranks must gather shards in the same order
    if is_main():
        log(f"gradient_checkpointing=auto: {line}" + (f"; another rank needs {most}" if most > num else ""))
    return most


def recompute_choice(cfg: MethodConfig) -> tuple[int, str]:
    """Return the number of blocks and the reason."""
    s, device = sizes_for(cfg), device_here()
    work = fullest_work(cfg, work_of(cfg, s, device))
    num, room = num_recomputed(s, work), room_to_train(cfg, s, work, device) / GIB
    whole, least = (peak(s, x) / GIB for x in (replace(work, checkpointing=False), work))
    if num == 0:
        return 0, f"off; a micro-batch of {work.tokens:,} tokens needs {whole:.3g} of {room:.3g} GiB"
    text = f"recomputing {num} of {s.layers} blocks: a micro-batch of {work.tokens:,} tokens would need {whole:.3g} of "
    text += f"{room:.3g} GiB"
    return num, text if least <= room else f"{text}, and still needs {least:.3g}"


def recompute_by_memory(s: Sizes, work: Work, room: float) -> Work:
    """Return the work with as few checkpointed blocks as fit in `room`; all blocks if even that does not fit."""
    for num in range(s.layers):
        fewer = replace(work, checkpointing=num > 0, recomputed=num or None)
        if peak(s, fewer) <= room:
            return fewer
    return replace(work, **EVERY_BLOCK)


def shards_of(cfg: MethodConfig, s: Sizes, work: Work, device: str) -> int:
    """Return the number of GPUs that the model is sharded over; auto is resolved as in training."""
    import torch

    from trainer.policy.sharding import room_for_a_copy

    parallel, world = cfg.parallel, world_size()
    if world == 1 or parallel.mode == "replicate" or work.in_4bit or work.fp8:
        return 1
    if not parallel.must_shard:
        replica = persistent_bytes(s, replace(work, optim="adamw", other_bytes=0.0, critic=0.0))
        if sum(replica.values()) <= room_for_a_copy(torch.device(device)):
            return 1
    return parallel.shard or world


def has_reference(cfg: MethodConfig) -> bool:
    """Return whether training uses the starting point as a reference; without LoRA that is a second model."""
    if hasattr(cfg, "reference"):
        is_free = getattr(cfg, "reference_free", False)
        return not is_free and cfg.reference.ref != "precomputed" and cfg.reference.ref_model is None
    return getattr(cfg, "has_reference", False)


def other_models(cfg: MethodConfig) -> Iterator[str]:
    """Yield the frozen models other than --model."""
    if hasattr(cfg, "reference") and cfg.reference.ref_model is not None and cfg.reference.ref != "precomputed":
        yield cfg.reference.ref_model
    if hasattr(cfg, "features") and cfg.features.feature_model is not None:
        yield cfg.features.feature_model
    if hasattr(cfg, "distill") and cfg.distill.teacher not in (None, "self"):
        yield cfg.distill.teacher


def micro_batch(cfg: MethodConfig) -> tuple[int, bool]:
    """Return the tokens of the largest micro-batch (the limit, one longer sequence, or a full accumulation step), and
    whether a step has several. GPUs that share rows count together."""
    run, length = cfg.run, longest_sequence(cfg)
    if length is None:
        return run.max_tokens_per_micro_batch, True
    sequences = run.per_device_train_batch_size * type(cfg).memory.sequences * cfg.parallel.context
    tokens = min(max(run.max_tokens_per_micro_batch, length), sequences * length)
    return tokens, run.gradient_accumulation_steps > 1 or tokens < sequences * length


def longest_sequence(cfg: MethodConfig) -> int | None:
    """Return the longest possible sequence in tokens, or None without a limit. Unlimited prompts count as 0."""
    if getattr(cfg, "mode", None) == "strided":
        return None  # a row contains many continuations
    if hasattr(cfg, "rollout"):
        return (cfg.max_prompt_length or 0) + cfg.max_completion_length
    return cfg.response.max_length if hasattr(cfg, "response") else getattr(cfg, "max_length", None)


def engine_memory_of(
    cfg: MethodConfig, s: Sizes, work: Work, device: str | None = None, room: float | None = None
) -> EngineMemory | None:
    """Return the memory of this run's in-process engine; None if it has none. `room`: None: of this machine's GPU."""
    from trainer.config.groups import servers_asked

    device, room = device or device_here(), memory_here() if room is None else room
    rollout = rollout_size_of(cfg, device)
    if rollout is None or cfg.rollout.engine == "vllm":
        return None
    if cfg.rollout.engine == "auto":
        group = rollout.group(cfg.num_generations)
        if servers_asked(cfg) or (device == "cuda" and not fits_in_process(s, work, group, room)):
            return None
    if device == "cpu":
        return engine_memory(s, work, rollout, device)
    most = math.inf if cfg.rollout.cache_gib is None else cfg.rollout.cache_gib * GIB
    return engine_memory(s, work, rollout, device, min(most, room_for_cache(s, work, rollout, room)))


def rollout_size_of(cfg: MethodConfig, device: str) -> RolloutSize | None:
    """Return the size of a rollout on one device, or None without an engine. Unlimited prompts count as 0."""
    if not hasattr(cfg, "rollout") or longest_sequence(cfg) is None:
        return None
    num = -(-cfg.run.sequences_per_step // world_size()) * cfg.minibatches_per_rollout
    num += -(-cfg.queued_groups // world_size()) * cfg.num_generations
    rows = min(cfg.rollout.max_batch_size or ROWS[device], num)
    return RolloutSize(rows, -(-num // cfg.num_generations), cfg.max_prompt_length or 0, cfg.max_completion_length)


def device_here() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def memory_here() -> float:
    """Return the bytes available for tensors on this GPU."""
    import torch

    return torch.cuda.mem_get_info()[1] - RESERVE * GIB if torch.cuda.is_available() else math.inf


def free_here() -> float:
    """Return the bytes on this GPU that other processes do not use, less the reserve."""
    import torch

    if not torch.cuda.is_available():
        return math.inf
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - RESERVE * GIB


# out of memory ---------------------------------------------------------------------------------------------------


class Advice(NamedTuple):
    """A flag and the bytes it would save."""

    flag: str
    saves: float
    remark: str


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and the errors that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether this error or one of its causes is torch's out-of-memory error."""
    torch = sys.modules.get("torch")  # before torch is imported, nothing is allocated
    return torch is not None and any(isinstance(cause, torch.OutOfMemoryError) for cause in causes(error))


def out_of_memory(error: BaseException, cfg: MethodConfig) -> str:
    """Build the error message, one flag per line. Never fails: without an estimate it only names the flags."""
    lines = [f"out of memory: {allocation_error(error)}"]
    try:
        s = sizes_for(cfg)
        work = work_of(cfg, s)
        parts = peak_parts(s, work)
        if engine := engine_memory_of(cfg, s, work):
            parts |= {"to sample: copy of the weights": engine.copy, "cache": engine.cache}
        sizes = ", ".join(f"{name} {size / GIB:.3g}" for name, size in parts.items() if size)
        lines.append(f"  estimated memory of this run in GiB: {sizes}")
        options = advice(s, work, cfg)
        width = max(len(option.flag) for option in options)
        lines += [f"  {x.flag:<{width}}  saves about {x.saves / GIB:.3g} GiB{x.remark}" for x in options]
    except Exception as failure:  # the estimate must not hide the first line
        lines.append(f"  no estimate of the savings ({type(failure).__name__}); try")
        lines.append("  --max-tokens-per-micro-batch 4096 or less, --gradient-checkpointing, --lora.r 16")
    lines.append("  saved checkpoints are complete: continue from the last one with --resume and these flags")
    return "\n".join(lines)


def allocation_error(error: BaseException) -> str:
    """Return the numbers of torch's message, without its advice about environment variables."""
    for cause in causes(error):
        if match := re.search(r"Tried to allocate [^.]*(?:\.\d[^.]*)*\.", str(cause)):
            text = re.split(r" If reserved but unallocated| See documentation", str(cause)[match.start() :])[0]
            return " ".join(text.split()).replace("Tried", "tried", 1).rstrip(".")
    return " ".join(str(cause).split()) or type(cause).__name__


def advice(s: Sizes, work: Work, cfg: MethodConfig) -> list[Advice]:
    """Return the flags that would save memory in this run, largest saving first."""
    import torch

    def saves(**changed: Any) -> float:
        return peak(s, work) - peak(s, replace(work, **changed))

    length, half = longest_sequence(cfg), work.tokens // 2
    if length is None or half >= length:
        # a second micro-batch keeps the gradients of the first, so half as many tokens may save nothing
        while (less := saves(tokens=half, accumulates=True)) <= 0 and half // 2 >= (length or 1):
            half //= 2
        options = [Advice(f"--max-tokens-per-micro-batch {half}", less, f", {work.tokens} tokens now")]
    else:  # a micro-batch is one sequence
        name = "completion-length" if hasattr(cfg, "rollout") else "length"
        remark = f", one sequence is {length} tokens"
        options = [Advice(f"--max-{name} {length // 2}", saves(tokens=half), remark)]
    rank, remark = (RANK, ": only adapters are trained") if work.full else (max(1, work.lora_r // 2), "")
    is_wide = work.full and work.weight_bytes == 4 and work.compute == 2
    is_alone = work.shards == work.context == 1
    in_full = work.lora_r > 0 and not work.in_4bit and is_alone and work.head != "none"
    second = hasattr(cfg, "reference") and (work.has_reference or work.other_bytes)
    recomputes_all = num_recomputed(s, work) == s.layers
    can_offload = recomputes_all and not work.offloading and device_here() == "cuda"
    host = offloaded_bytes(s, replace(work, offloading=True)) / GIB
    for is_possible, flag, changed, remark_on_flag in (
        (not recomputes_all, "--gradient-checkpointing", EVERY_BLOCK, ", a third slower"),
        (can_offload, "--activation-offloading", {"offloading": True}, f", uses {host:.3g} GiB of main memory"),
        (work.optim == "adamw", "--optim adamw_8bit", {"optim": "adamw_8bit"}, " of moments (needs torchao)"),
        (is_wide, "--trained-dtype bfloat16", {"weight_bytes": 2}, ", in a new run: weights, gradients and moments"),
        (True, f"--lora.r {rank}", {"lora_r": rank}, f", in a new run{remark}"),
        (in_full, "--load-in-4bit", {"in_4bit": True}, ", in a new run: the frozen base in 4 bits"),
        (second, "--ref precomputed", {"has_reference": False, "other_bytes": 0.0}, ": no second model while training"),
    ):
        if is_possible:
            options.append(Advice(flag, saves(**changed), remark_on_flag))
    if engine := engine_memory_of(cfg, s, work):
        size = max(1, rollout_size_of(cfg, device_here()).rows // 2)
        fewer = engine_memory_of(replace(cfg, rollout=replace(cfg.rollout, max_batch_size=size)), s, work)
        less = sum(engine) - sum(fewer)
        options.append(Advice(f"--rollout.max-batch-size {size}", less, " while sampling"))
        if engine.copy:
            bound, remark = engine.cache / 2 / GIB, " while sampling: fewer concurrent rows"
            options.append(Advice(f"--rollout.cache-gib {bound:.2g}", engine.cache / 2, remark))
    if torch.cuda.is_available() and hasattr(cfg, "vllm") and cfg.rollout.engine == "vllm" and not cfg.vllm.url:
        total, share = torch.cuda.mem_get_info()[1], cfg.vllm.gpu_memory_utilization or SHARE
        lower = round(max(0.1, share - 0.1), 2)
        remark = f" for a server on this GPU ({total / GIB:.3g} GiB)"
        options.append(Advice(f"--vllm.gpu-memory-utilization {lower}", (share - lower) * total, remark))
    return sorted((option for option in options if option.saves > 0), key=lambda option: -option.saves)


# the command -----------------------------------------------------------------------------------------------------


class Card(NamedTuple):
    """A GPU: memory as torch reports it and dense peak rates from the data sheet."""

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
ALIASES = {"a100": "a100-80", "a100-80gb": "a100-80", "a100-40gb": "a100-40", "rtx4090": "4090"}

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
class PlanConfig:
    """Estimate the memory of a run per GPU, what fits, and a rough speed. Trains nothing and loads no weights.

    All other flags are those of the run: python -m trainer --method NAME --help lists them. Without --method the plan
    is for sft, without --data for 512 sequences per GPU and step, and without a limit for prompts of 768 tokens.
    """

    shape: Literal[tuple(KNOWN)] | None = None
    """Known size to use instead of a model, without the hub."""
    gpus: int = field(default_factory=world_size)
    """Number of GPUs that train; torchrun sets it."""
    gpu: Literal[("here", *CARDS, *ALIASES)] | None = None
    """GPU to plan for. None: this machine's GPU, or h200 if it has none."""
    gpu_memory: float | None = None
    """Memory of one GPU in GiB. None: from --gpu."""
    mfu: float = 0.35
    """Fraction of the GPU's peak FLOP/s to assume. A 1.7B step with checkpointing reached 0.38 on an H200."""

    def __post_init__(self) -> None:
        check_numbers(self, {"1 or more": "gpus", "above 0": "gpu_memory", "above 0 and at most 1": "mfu"})


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, or 2 after a one-line error."""
    return run_command(lambda: plan(sys.argv[1:] if argv is None else argv))


def plan(argv: Sequence[str]) -> None:
    with planned_run(argv) as (own, cfg):
        model = cfg.model
        lm = meta_model(model.model, model.revision, trust_remote_code=model.trust_remote_code)
        lines = report(own, cfg, sizes_of(lm, model.trained_parameters))
    names = {name.rpartition(".")[2] for name, _ in lm.named_modules()}
    if not {"gate_proj", "up_proj", "down_proj", "q_proj", "o_proj"} <= names:
        lines.append(f"{type(lm).__name__} is not built like a Llama; its activations are estimated as if it were.")
    if is_main():
        print("\n".join(lines))


@contextlib.contextmanager
def planned_run(argv: Sequence[str]) -> Iterator[tuple[PlanConfig, MethodConfig]]:
    """Yield the planner's own settings and the run's, with WORLD_SIZE set as torchrun would set it."""
    prog, table = "python -m trainer.plan", flag_table(PlanConfig)
    argv = [word for word in argv if word != DRY_RUN]
    if any(word in HELP for word in argv):
        print_help(PlanConfig, prog)
    if any(word.partition("=")[0] == "--resume" for word in argv):
        raise UserError("--resume: a plan resumes nothing; pass the run's config.yaml with --config")
    own = build_config(PlanConfig, read_argv(argv, table, []), table, prog)  # parse() reports unknown flags
    if own.shape and (model := peek(argv, "model")):
        raise UserError(f"model={model}, shape={own.shape}: pass only one of --model and --shape")
    argv += [f"--model={own.shape}"] if own.shape else []
    if peek(argv, "config") is None:
        argv += [] if peek(argv, "method") else ["--method=sft"]
        is_complete = peek(argv, "model") is None or any(peek(argv, key) for key in ROWS_FROM)
        if not is_complete and issubclass(load_method(str(peek(argv, "method"))).Config, MethodConfig):
            full = full_batches(peek(argv, "num_generations"))
            argv += [f"--{key}={value}" for key, value in full.items() if peek(argv, key) is None]
    before = {name: value for name, value in os.environ.items() if name == "WORLD_SIZE"}
    os.environ["WORLD_SIZE"] = str(own.gpus)
    try:
        _, cfg, name = parse(argv, skipped=CONFIG | table)
        if not isinstance(cfg, MethodConfig):
            raise UserError(f"method={name}: cannot be planned, because its Config is not a MethodConfig")
        check_loading(cfg)
        if own.shape:
            shape = PythonObject(own.shape, build(known_config(own.shape)))
            cfg = replace(cfg, model=replace(cfg.model, model=shape))
        if hasattr(cfg, "rollout") and longest_sequence(cfg) is not None and cfg.max_prompt_length is None:
            cfg = replace(cfg, max_prompt_length=PROMPT)
        yield own, cfg
    finally:
        del os.environ["WORLD_SIZE"]
        os.environ |= before


def full_batches(num_generations: str | None) -> dict[str, Any]:
    """Return the settings of a plan without --data: no rows are read, and a step fills the engine with whole groups."""
    group = max(1, int(num_generations)) if num_generations and num_generations.isdecimal() else 1
    return {"data": "task:addition", "per_device_train_batch_size": -(-ROWS["cuda"] // group) * group}


def check_loading(cfg: MethodConfig) -> None:
    """Raise for settings that the run would reject when it loads its model."""
    from trainer.policy.heads import check_scorer  # imports torch
    from trainer.policy.load import check_adapters

    check_4bit(cfg.model, cfg.lora, cfg.parallel)
    check_fp8(cfg.model, cfg.lora, cfg.parallel)
    check = check_scorer if type(cfg).memory.head == "none" else check_adapters
    check(cfg.model, cfg.lora)


def known_config(name: str) -> Any:
    from transformers import AutoConfig

    kind, *values = KNOWN[name]
    return AutoConfig.for_model(kind, **dict(zip(FIELDS, values, strict=True)))


def pick_card(cfg: PlanConfig) -> tuple[str, Card]:
    import torch

    if cfg.gpu == "here" and not torch.cuda.is_available():
        raise UserError(f"gpu=here: this machine has no CUDA device; pass one of {', '.join(CARDS)}")
    if cfg.gpu in (None, "here") and torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        like = next((x for name, x in CARDS.items() if name.partition("-")[0].upper() in device.name), CARDS["h200"])
        card = like._replace(gib=device.total_memory / GIB, triton_head=device.major in TRITON_HEAD)
        name = device.name
    else:
        name = ALIASES.get(cfg.gpu, cfg.gpu) or "h200"
        card = CARDS[name]
    return name, card if cfg.gpu_memory is None else card._replace(gib=cfg.gpu_memory)


class Column(NamedTuple):
    """A way to train the model, and the engine that then samples."""

    name: str
    work: Work
    parts: dict[str, float]  # bytes at the peak of a step
    room: float  # GiB for the trainer's tensors
    engine: Literal["local", "vllm", "none"] = "none"
    sampling: float = 0.0  # GiB in total while sampling
    can_sample: bool = True
    memory: EngineMemory | None = None  # of the local engine, in bytes

    @property
    def peak(self) -> float:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.can_sample and self.peak <= self.room * GIB


def columns(cfg: MethodConfig, s: Sizes, card: Card) -> list[Column]:
    """Return the columns: replicate and, with several GPUs, fsdp, each without and with checkpointing."""
    parallel, gpus, shards = cfg.parallel, world_size(), cfg.parallel.shard or world_size()
    base = replace(unsharded_work(cfg, s, "cuda"), triton=card.triton_head)
    modes = {}
    if gpus == 1 or not parallel.must_shard:
        modes["replicate"] = base
    if gpus > 1 and parallel.mode != "replicate" and not (base.in_4bit or base.fp8):
        modes["fsdp"] = replace(base, shards=shards, has_copies=shards < gpus and not parallel.reduce_once)
    works = {}
    for name, work in modes.items():
        works[name] = replace(work, checkpointing=False, offloading=False)
        works[f"{name} + gc"] = replace(work, checkpointing=True)
    return [column_of(name, cfg, s, work, card) for name, work in works.items()]


def column_of(name: str, cfg: MethodConfig, s: Sizes, work: Work, card: Card) -> Column:
    """Choose the engine as in training."""
    parts, room, rollout = peak_parts(s, work), card.gib - RESERVE, rollout_size_of(cfg, "cuda")
    if rollout is None:
        return Column(name, work, parts, room)
    memory = engine_memory_of(cfg, s, work, "cuda", room * GIB)
    if memory is None:
        share = colocated_share(cfg)
        gib = persistent_without_gradients(s, work) / GIB + share * card.gib
        return Column(name, work, parts, room - ASLEEP * (share > 0), "vllm", gib, gib <= room)
    least = sampling_bytes(s, work, engine_memory(s, work, rollout.group(cfg.num_generations), "cuda"))
    gib = sampling_bytes(s, work, memory) / GIB
    return Column(name, work, parts, room, "local", gib, least <= room * GIB, memory)


def colocated_share(cfg: MethodConfig) -> float:
    """Return the fraction of the trainer's GPU that a vLLM server uses while it samples; 0: servers elsewhere."""
    vllm, is_alone = cfg.vllm, world_size() == 1 and not cfg.vllm.url and not cfg.vllm.devices
    colocates = is_alone if vllm.colocate is None else vllm.colocate
    return (vllm.gpu_memory_utilization or SHARE) * colocates


def report(own: PlanConfig, cfg: MethodConfig, s: Sizes) -> list[str]:
    """Return the lines to print: two lines about the run, the table, and notes on it."""
    card_name, card = pick_card(own)
    table = columns(cfg, s, card)
    work = table[0].work
    room = " or ".join(sorted({f"{x.room:.1f}" for x in table}))
    trained = f", {s.adapter(cfg.lora.r):,} in adapters" if cfg.lora.r else ""
    trained = f", {sum(s.trained):,} trained" if cfg.model.trained_parameters else trained
    sharing = f" split over {work.context} GPUs" if work.context > 1 else ""
    stored = f", weights in {cfg.model.trained_dtype}" if work.weight_bytes != 4 else ""
    stored = ", base in 4 bits" if work.in_4bit else stored
    dtype = next(name for name, size in BYTES.items() if size == work.compute)
    lines = [
        f"{cfg.model.model}: {s.params:,} parameters{trained}; {cfg.run.method}, {dtype}, {work.optim}{stored}",
        f"{own.gpus} x {card_name}, {card.gib:.1f} GiB each, {room} for the trainer's tensors; "
        f"{work.tokens} tokens per micro-batch{sharing}; gc = gradient checkpointing",
        "",
    ]

    def row(name: str, cells: Iterable[Any], form: str = "") -> None:
        lines.append(f"{name:<36}" + "".join(f"{format(cell, form):>16}" for cell in cells))

    row("GiB on each GPU", [x.name for x in table])
    for part in table[0].parts:
        if any(x.parts[part] for x in table):
            row("temporary buffers" if part == "buffers" else part, [x.parts[part] / GIB for x in table], ".2f")
    row("peak", [x.peak / GIB for x in table], ".2f")
    engines = [x.engine for x in table]
    if "none" not in engines:
        row("engine", engines)
        names = {"local": "local cache", "vllm": "vLLM's share" if colocated_share(cfg) else "servers elsewhere"}
        where = f", {names[engines[0]]}" if len(set(engines)) == 1 else ""
        row(f"while sampling{where}", [x.sampling for x in table], ".2f")
    row("fits", ["yes" if x.fits else "no" for x in table])
    best = [
        # a smaller limit splits a step that was one micro-batch
        largest_micro_batch(s, x.work if x.fits else replace(x.work, accumulates=True), x.room) if x.can_sample else 0
        for x in table
    ]
    row("largest max-tokens-per-micro-batch", [f"{tokens:,}" if tokens else "none" for tokens in best])
    flops = own.gpus * own.mfu * (card.bf16 if dtype == "bfloat16" else card.fp32) * 1e12
    row("tokens/s, all GPUs, rough", [flops / flops_per_token(s, x.work) for x in table], ",.0f")
    speed = f"Speed: {own.mfu:.2f} of the data sheet's peak, for training only, without sampling or waiting."
    reserve = f"{RESERVE:g} GiB are reserved for CUDA and the allocator. Formulas: trainer/plan.py."
    return [*lines, "", *explain(cfg, s, table), *explain_engine(cfg, s, table), f"{speed} {reserve}"]


def explain(cfg: MethodConfig, s: Sizes, table: list[Column]) -> Iterator[str]:
    """Explain the peak, the head, and gradient checkpointing."""
    first = table[0].work
    yield f"Peak of a step: {'; '.join(f'{x.name}: {fullest_point(s, x.work).name}' for x in table)}."
    if first.head != "none":
        yield (
            f"The log-prob head takes {head_bytes(s, first) / GIB:.2f} GiB if all tokens train; "
            f"stored logits would take {logits_bytes(s, first.local_trained_tokens) / GIB:.2f} GiB."
        )
    host = [f"{x.name} {offloaded_bytes(s, x.work) / GIB:.2f}" for x in table if x.work.offloading]
    if host:
        yield f"Offloaded activations take pinned main memory, in GiB per GPU: {', '.join(host)}."
    recomputes = cfg.model.gradient_checkpointing is True or cfg.model.activation_offloading
    verdict = ", ".join(
        f"{x.name.removesuffix(' + gc')} {'fits' if x.fits else 'does not fit'}"
        for x in table
        if x.work.checkpointing == recomputes
    )
    yield f"{'With' if recomputes else 'Without'} gradient checkpointing: {verdict}."
    by_memory = ", ".join(
        f"{x.name} {num_recomputed(s, recompute_by_memory(s, x.work, USABLE * x.room * GIB))}"
        for x in table
        if not x.work.checkpointing
    )
    yield f"Blocks that gradient_checkpointing=auto recomputes, of {s.layers}: {by_memory}."


def explain_engine(cfg: MethodConfig, s: Sizes, table: list[Column]) -> Iterator[str]:
    """Explain the local engine's memory in the first column that has it, and whether it is freed during training."""
    local = [x for x in table if x.memory is not None and x.can_sample]
    if local:
        first, size = local[0], local[0].memory
        rows = rows_that_fit(s, first.work, rollout_size_of(cfg, "cuda"), size.cache)
        yield (
            f"Engine of {first.name}: {sum(size) / GIB:.2f} GiB (copy of the weights {size.copy / GIB:.2f}, "
            f"cache for {rows} concurrent rows {size.cache / GIB:.2f}, logits {size.logits / GIB:.2f})."
        )
    for verb, is_kept in (("kept", True), ("freed", False)):
        if names := [x.name for x in local if (x.peak + sum(x.memory) <= x.room * GIB) == is_kept]:
            yield f"The engine's memory is {verb} during training: {', '.join(names)}."


if __name__ == "__main__":
    sys.exit(main())
