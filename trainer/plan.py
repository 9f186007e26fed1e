"""Memory of a training run on each GPU: one model for the command, and for the advice after an out-of-memory error.

    python -m trainer.plan --model Qwen/Qwen3-1.7B --gpus 1 --method grpo
    python -m trainer.plan --shape llama-3.1-8b --gpus 8 --method dpo --gpu a100-80
    python -m trainer.plan --shape qwen3-8b --gpus 8 --parallel.context 4 --max-tokens-per-micro-batch 131072
    python -m trainer.plan --model builtin:tiny --lora.r 16 --max-tokens-per-micro-batch 16384

    num_bytes = planned_peak(cfg, tokens)      # peak of a training step of so many tokens
    text = out_of_memory(error, cfg)           # which flags to lower, and what each would save

Only a config.json is read, no weights. Sections: what is counted, bytes (a formula for each row of the table), a run
from its Config, out of memory, the command.

L layers, D width, H query heads, G key-value heads, K head size, I width inside the gated MLP, V vocabulary, P
parameters; n tokens of a micro-batch on this GPU (packed, so all are real). h = bytes of a trained weight, w = of a
number in the residual stream, c = of one in the matrix products: full fine-tuning holds float32 weights and multiplies
in bfloat16 under autocast (h 4, w 4, c 2); --trained-dtype bfloat16 has 2, 2, 2, and --dtype float32 has 4, 4, 4. The
frozen base of a LoRA run, and blocks that FSDP gathers in bfloat16, have w 2, c 2. With --load-in-4bit the matrices of
that base take PACKED bytes a weight, and c more for the one in use.

Checked in tests/trainer/test_plan.py: what autograd saves, tensor by tensor, on a CPU; the peak of a step there; the
head's buffers and the peak of a checkpointed bfloat16 step, against rows measured on an H200; AdamW's moments, against
what the optimizers hold. bench/vs_trl.py compares whole DPO steps on a GPU. Not measured, so only estimated: FSDP's
buffers, the in-process engine on a GPU, RESERVE and ASLEEP. Not counted: what --compile saves (compiled blocks keep
fewer activations), what kernels/block.py saves on a GPU without it (norms keep neither float32 nor normalised inputs,
MLPs no silu(gate)), dense masks and scores of sdpa (sequences are packed, with flex attention), reward models.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from data.command.flags import parse_command, run_command
from data.errors import UserError
from data.hub import check_hub
from rollout.servers.model_folder import read_adapter, resolve_model
from trainer.config.checks import check_numbers
from trainer.config.errors import load_error
from trainer.parallel.ranks import world_size

CHUNK, PART, SLICE = 4096, 512, 1 << 28  # of kernels/linear_logprob_triton.py, which needs triton to import
TRITON_HEAD = (9, 10)  # compute capabilities that it runs on: Hopper and Blackwell
TORCH_BLOCK = 1 << 25  # BLOCK_ELEMENTS of kernels/linear_logprob.py
SCALED, SMALLEST = 256, 4096  # torchao's 8-bit moments: numbers of a scale, and of the smallest tensor that has them
PACKED = 0.5 + 2 / 64  # bytes of a weight in kernels/nf4.py: a code, and its part of a bfloat16 scale
GIB = 1 << 30
BYTES = {"float32": 4, "bfloat16": 2}
RESERVE = 2.0  # GiB, assumed: CUDA context, NCCL, cuBLAS workspaces, gaps in the allocator
ASLEEP = 1.5  # GiB, assumed: what a colocated vLLM server keeps while it sleeps
PAGE = 64  # tokens of a page of the in-process engine's cache
ROWS = {"cuda": 512, "cpu": 256}  # that this engine decodes at once by default
LONGEST, STEP = 1 << 20, 256  # largest micro-batch tried, in tokens, and the step between two
RANK = 16  # of adapters suggested to a run that trains all weights
Head = Literal["one pass", "any loss", "none"]


# what is counted -------------------------------------------------------------------------------------------------


class Method(NamedTuple):
    """What a method needs memory for."""

    head: Head
    reference: Literal["always", "with beta", "never"] = "never"
    samples: bool = False
    sequences: int = 1  # of one row
    critic: bool = False

    def head_for(self, context: int) -> Head:
        """The pass that computes the gradient too is not for GPUs that share a row (logps.token_loss)."""
        return "any loss" if context > 1 and self.head == "one pass" else self.head


METHODS = {
    "sft": Method("one pass"),
    **dict.fromkeys(("dpo", "ipo"), Method("any loss", "always", sequences=2)),
    "kto": Method("any loss", "always"),
    **dict.fromkeys(("cpo", "simpo", "orpo"), Method("any loss", sequences=2)),
    "rm": Method("none", sequences=2),
    "prm": Method("none"),
    **dict.fromkeys(("grpo", "gdpo", "rloo", "opd"), Method("one pass", "with beta", samples=True)),
    "online_dpo": Method("any loss", "always", samples=True),
    "ppo": Method("one pass", "with beta", samples=True, critic=True),
    "ebft": Method("one pass", "always", samples=True),  # its frozen feature network
}
ANY = Method("any loss")  # a method outside the repository


@dataclass(frozen=True)
class Sizes:
    """A decoder of RMS norms, grouped attention and a gated MLP."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    tied: bool
    qk_norm: bool
    tensors: tuple[int, ...]  # parameters of each, tied ones once
    matrices: int  # parameters in the linear layers of the blocks
    ends: tuple[int, ...]  # in and out of each of those layers

    @property
    def params(self) -> int:
        return sum(self.tensors)

    @property
    def embedding(self) -> int:
        return self.vocab * self.width

    def adapter(self, r: int) -> int:
        return r * sum(self.ends)


@dataclass(frozen=True)
class Work:
    """What is trained, how, and on how many tokens at a time."""

    tokens: int
    lora_r: int = 0
    in_4bit: bool = False  # a frozen base in 4 bits
    held: int = 4  # h: bytes of a weight when all are trained
    compute: int = 2  # c
    checkpointing: bool = False
    offloading: bool = False  # of what checkpointing keeps
    compiled: bool = False  # or may be; on one GPU, checkpointed blocks then keep the output of attention
    head: Head = "one pass"
    has_reference: bool = False
    others: float = 0.0  # bytes of other frozen models
    critic: float = 0.0  # bytes of PPO's critic, which every GPU holds whole
    optim: str = "adamw"
    shards: int = 1  # GPUs that FSDP shards over; 1: replicas
    triton: bool = True
    trained_tokens: int | None = None  # None: all of them
    accumulates: bool = True  # gradients of earlier micro-batches exist
    context: int = 1  # GPUs that share the micro-batch

    @property
    def own(self) -> int:
        """n: tokens that one GPU computes."""
        return -(-self.tokens // self.context)

    @property
    def rows(self) -> int:
        """R: those of them that train."""
        return self.own if self.trained_tokens is None else -(-self.trained_tokens // self.context)

    @property
    def full(self) -> bool:
        return self.lora_r == 0

    @property
    def stream(self) -> int:
        """w; FSDP casts what it gathers, so autocast does not."""
        return self.held if self.full and self.shards == 1 else self.compute


class Asked(NamedTuple):
    """Completions that the in-process engine makes for a step on one GPU."""

    rows: int  # decoded at once
    prompts: int  # distinct ones
    prompt_length: int
    completion_length: int

    @property
    def tokens(self) -> int:
        """In its cache, by whole pages: every prompt once, and the own tokens of each row."""
        return self.prompts * pages(self.prompt_length) + self.rows * pages(self.completion_length + 1)


class EngineMemory(NamedTuple):
    """Bytes that the in-process engine holds while it samples."""

    copy: float  # of the weights in the dtype of matrix products; on a CPU it uses those that are trained
    cache: float  # keys and values
    logits: float  # of one step, float32


class Moment(NamedTuple):
    """A point in the step, and its bytes beyond those kept from start to end."""

    name: str
    activations: float
    passing: float  # short-lived buffers
    gradients: float = 0.0  # computed so far, if none are kept

    @property
    def total(self) -> float:
        return self.activations + self.passing + self.gradients


def sizes_of(model: Any) -> Sizes:
    """Sizes of a transformers causal LM, which may be on the meta device."""
    from torch import nn

    config, head = model.config, model.get_output_embeddings()
    linears = [x for x in model.modules() if isinstance(x, nn.Linear) and x is not head]
    heads = config.num_attention_heads
    return Sizes(
        layers=config.num_hidden_layers, width=config.hidden_size, heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        inner=config.intermediate_size, vocab=head.weight.shape[0], tied=bool(config.tie_word_embeddings),
        qk_norm=any(name.endswith("q_norm") for name, _ in model.named_modules()),
        tensors=tuple(x.numel() for x in model.parameters()), matrices=sum(x.weight.numel() for x in linears),
        ends=tuple(end for x in linears for end in (x.in_features, x.out_features)),
    )  # fmt: skip


# bytes -----------------------------------------------------------------------------------------------------------


def kept(s: Sizes, work: Work) -> dict[str, float]:
    """Bytes per GPU kept from start to end.

    AdamW's step needs no extra memory: on a GPU it is one kernel for all weights, or one for each. With LoRA the base
    is its own reference.
    """
    trained_bytes = work.held if work.full else 4
    tensors = s.tensors if work.full else tuple(work.lora_r * end for end in s.ends)
    trained = sum(tensors)
    if work.optim == "adamw_8bit":  # a byte, and a float32 scale for each 256; small and odd tensors stay as they are
        parts = [(num, num / work.shards) for num in tensors]
        in_8bit = sum(num for num, own in parts if own >= SMALLEST and own % SCALED == 0)
    else:
        in_8bit = 0
    base = work.compute * s.params - (work.compute - PACKED) * s.matrices * work.in_4bit
    whole = {
        "weights": work.held * s.params if work.full else base,
        "adapters": 4 * s.adapter(work.lora_r),
        "gradients": trained_bytes * trained,
        "optimizer state": 2 * (1 + 4 / SCALED) * in_8bit + 2 * trained_bytes * (trained - in_8bit),
        "reference": work.compute * s.params * (work.has_reference and work.full) + work.others,
    }
    return {name: size / work.shards for name, size in whole.items()} | ({"critic": work.critic} if work.critic else {})


def critic_bytes(s: Sizes, work: Work, own: Sizes | None) -> float:
    """Weights, gradients and moments of a critic: a head of two layers on the policy, or a model of its own."""
    if own is None:
        return 16 * (2 * s.width * (s.width + 2) + 1)
    alone = replace(work, shards=1, has_reference=False, others=0.0, critic=0.0)
    return sum(kept(own, alone).values())


def saved_by_block(s: Sizes, work: Work) -> int:
    """Bytes that autograd saves of one block: per own token the terms below, and keys and values of the other GPUs'."""
    w, c, d, inner = work.stream, work.compute, s.width, s.inner
    heads, keys = s.heads + s.kv_heads, (s.heads + s.kv_heads) * s.head_dim
    if work.full:
        terms = {
            "two norms": 2 * ((4 + w) * d + 4),  # input in float32, normalised input, one root each
            "their outputs": (5 if w != c else 2) * c * d,  # autocast casts for each of q, k, v, gate, up
            "q, k norms": ((4 + c) * keys + 4 * heads) * s.qk_norm,
            "MLP": 4 * c * inner,  # gate, silu(gate), up, their product
        }
    else:
        terms = {
            "two norms": 2 * (4 * d + 4),
            # each matrix keeps its own cast of its input; in float32 those with the same input share it
            "inputs of matrices": c * (2 * d + inner if c == 4 else 5 * d + s.heads * s.head_dim + inner),
            "inside the adapters": c * 7 * work.lora_r,
            "q, k norms": (4 * keys + 4 * heads) * s.qk_norm,
            "MLP": 3 * c * inner,
        }
    terms["attention"] = 2 * c * keys + 4 * s.heads  # q, k, v, output, log-sum-exp; no T x T scores
    return work.own * sum(terms.values()) + 2 * c * s.kv_heads * s.head_dim * (work.tokens - work.own)


def casts(s: Sizes, work: Work) -> int:
    """Bytes of the bfloat16 copies that autocast makes of the trained float32 matrices of all blocks."""
    if work.compute == 4:
        return 0
    return work.compute * (s.matrices * (work.stream != work.compute) if work.full else s.adapter(work.lora_r))


def saved(s: Sizes, work: Work) -> int:
    """Bytes of activations kept between forward and backward, casts included; checkpointing keeps w D per block, and
    offloading two of those; compiled blocks keep the output of attention, too."""
    n, w, d = work.own, work.stream, s.width
    norm = 4 * d + 4
    outside = n * (norm + w * d * work.full + 2 * w * s.head_dim + 8)  # last norm, rotary table, ids
    if work.offloading:
        return outside + n * w * d * min(2, s.layers)
    if work.checkpointing:
        attention = s.heads * (work.compute * s.head_dim + 4) * work.compiled  # and its log-sum-exp
        return outside + n * (w * d + attention) * s.layers
    first = 0 if work.full else n * norm  # embeddings do not train: the first norm saves nothing
    return outside - first + s.layers * saved_by_block(s, work) + casts(s, work)


def offloaded(s: Sizes, work: Work) -> int:
    """Bytes of main memory that offloading takes for each GPU: the inputs of all blocks but the last."""
    return work.own * work.stream * s.width * (s.layers - 1) * work.offloading


def head_bytes(s: Sizes, work: Work) -> int:
    """Peak of the log-prob head (kernels/linear_logprob.py), including its new gradients dX and dW.

    It stores no logits, but one chunk of exponentials E; `part` is a part of E @ W in float32.
    """
    if work.head == "none":
        return 0
    rows, d, v, w, c = work.rows, s.width, s.vocab, work.stream, work.compute
    cast, dx = c * s.embedding * (w != c), c * rows * d
    if not work.triton or c == 4:  # blocks of float32: four at a time, or three and the summand of dW
        block = 4 * v * min(rows, max(1, TORCH_BLOCK // v))
        low = 0 if c == 4 else block // 2
        dw = s.embedding * work.full
        return cast + dx + 4 * dw + max(4 * block, 3 * block + low + c * dw)
    if work.head == "any loss" and work.full:  # E of some columns, all rows
        columns = min(v, max(256, SLICE // max(1, rows) // 256 * 256))
        return cast + 2 * rows * columns + 4 * d * columns + 4 * rows * d + dx + w * s.embedding
    at_once = work.full and w != 4 and rows <= 2 * d
    chunk = rows if at_once else min(rows, CHUNK)
    e = 2 * -(-chunk // 128) * 128 * v
    part = 4 * d * min(chunk, PART * max(1, d // 1024))
    if not work.full:
        return e + dx + part
    if w == 4 or at_once:
        return cast + e + dx + part + w * s.embedding
    return max(e + dx + part + 4 * s.embedding, dx + (4 + w) * s.embedding)  # the sum is float32, then rounded


def logits_bytes(s: Sizes, rows: int) -> int:
    """What storing the logits would take at its peak: logits, float32 copy, log-softmax, gradient."""
    return 12 * rows * s.vocab


def in_flight(s: Sizes, work: Work) -> tuple[float, float]:
    """Bytes that FSDP holds gathered beyond its shards: in forward and head, and in the backward of a block.

    A block in use, the next one prefetched and its gather buffer (3 c each); embeddings and head, which stay gathered
    (c); in the backward the block's unsharded gradient (c), and that in float32 for the reduction (4).
    """
    if work.shards == 1:
        return 0.0, 0.0
    c, block = work.compute, s.matrices / s.layers
    gathered = c * s.embedding * (1 if s.tied else 2) + 3 * c * block
    return gathered, gathered + (c + 4) * block * work.full


def moments(s: Sizes, work: Work) -> list[Moment]:
    """Candidates for the peak.

    A step of a single micro-batch starts without gradients, which grow as activations are freed (`is_first`).
    Replicas sum gradients some buckets at a time, of 25 MiB each, which is not counted.
    """
    w, c, n, d = work.stream, work.compute, work.own, s.width
    has_head = work.head != "none"
    is_first, is_tied = work.full and not work.accumulates, work.full and s.tied and has_head
    stays, (gathered, reduced) = saved(s, work), in_flight(s, work)
    block = saved_by_block(s, work) + casts(s, work) / s.layers
    grad = work.held / work.shards  # bytes of a gradient once it is there
    head_grad = grad * s.embedding * has_head  # of a tied head it waits for that of the embedding
    waits, new = (0, head_grad) if is_first else (head_grad * is_tied, 0)
    # In the MLP: gradients of product, silu and up in place of the product (an adapter takes its input through
    # float32), that of the residual stream, and the new gradient of one matrix before it is accumulated.
    wide = 2 * c + (4 if work.lora_r and c == 2 else 0)
    matrix = d * s.inner * (w + c * (w != c)) if work.full and work.accumulates else 0
    unpacked = c * d * s.inner * work.in_4bit  # the dequantised weight of the matrix in use
    worst = n * (wide * s.inner + w * d) + matrix + unpacked + reduced
    left = n * w * d * (work.offloading and s.layers > 1)  # one of two inputs has left before the head
    found = [Moment("log-prob head", stays - left, c * work.rows * d + head_bytes(s, work) + gathered)]
    if work.checkpointing:  # autocast's cache holds the casts of all blocks until the forward ends
        forward = n * (4 * c * s.inner + w * d) + unpacked + gathered
        found.append(Moment("forward, casts of all weights", stays, forward + casts(s, work)))
    found.append(Moment("backward of a block", stays + block * work.checkpointing, worst + waits, new))
    if is_first:  # in the first block, the others have their gradients and it has only that of its last matrix
        last = block + n * (w * d + 2 * w * s.head_dim + 8)
        others = grad * (s.params - s.matrices / s.layers + d * s.inner)
        found.append(Moment("backward of the first block", last, worst, others))
    # The gradient of an embedding is dense, and added to what is there.
    again = w * s.embedding * work.full if work.accumulates or is_tied else 0
    every = grad * s.params if is_first else 0
    found.append(Moment("embedding's gradient", n * w * d, waits + again + gathered, every))
    return found


def busiest(s: Sizes, work: Work) -> Moment:
    """The peak of forward and backward."""
    return max(moments(s, work), key=lambda moment: moment.total)


def at_peak(s: Sizes, work: Work) -> dict[str, float]:
    """Bytes of each kind on one GPU at the peak of forward and backward."""
    parts, fullest = kept(s, work), busiest(s, work)
    if work.full and not work.accumulates:
        parts["gradients"] = fullest.gradients
    return parts | {"activations": fullest.activations, "buffers": fullest.passing}


def peak(s: Sizes, work: Work) -> float:
    """Most bytes that tensors take on one GPU during forward, backward and update."""
    return sum(at_peak(s, work).values())


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


def kept_without_gradients(s: Sizes, work: Work) -> float:
    return sum(size for name, size in kept(s, work).items() if name != "gradients")


def held_by_engine(s: Sizes, work: Work, asked: Asked, device: str, most: float = math.inf) -> EngineMemory:
    """What the in-process engine holds on cuda or cpu; `most` bounds the bytes of its cache."""
    copy = work.compute * s.params if device == "cuda" else 0
    return EngineMemory(copy, min(most, cache_bytes(s, work.compute, asked.tokens)), 4 * asked.rows * s.vocab)


def sampling(s: Sizes, work: Work, held: EngineMemory) -> float:
    """Bytes while this process samples completions: no gradients or activations, and no casts beside a copy."""
    passing = in_flight(s, work)[0] + (0 if held.copy else casts(s, work))
    return kept_without_gradients(s, work) + sum(held) + passing


def cache_bytes(s: Sizes, compute: int, num_tokens: int) -> int:
    """Keys and values of tokens under generation."""
    return 2 * s.layers * s.kv_heads * s.head_dim * compute * num_tokens


def pages(num_tokens: int) -> int:
    """Tokens of whole pages."""
    return -(-num_tokens // PAGE) * PAGE


def room_for_cache(s: Sizes, work: Work, asked: Asked, room: float) -> float:
    """Bytes of `room` that are left for the engine's cache on a GPU."""
    without = held_by_engine(s, work, asked, "cuda", most=0)
    return max(0.0, room - sampling(s, work, without))


def rows_within(s: Sizes, work: Work, asked: Asked, cache: float) -> int:
    """Rows that are decoded at once, of those asked for, in a cache of so many bytes; 0 when there is no room for
    one."""
    for rows in range(asked.rows, 0, -1):
        fewer = asked._replace(rows=rows, prompts=-(-rows * asked.prompts // asked.rows))
        if cache_bytes(s, work.compute, fewer.tokens) <= cache:
            return rows
    return 0


def fits_in_process(s: Sizes, work: Work, group: Asked, room: float) -> bool:
    """As trainer/rl/engine_choice.py decides: what training takes with no tokens at all, a copy of the weights, and the
    cache of one group."""
    held = held_by_engine(s, work, group, "cuda")
    return sum(kept(s, work).values()) + casts(s, work) + held.copy + held.cache <= room


def beside_engine(s: Sizes, work: Work, held: EngineMemory | None, room: float) -> float:
    """Peak bytes of training: what the engine holds stays where it fits beside training, else it is freed."""
    top = peak(s, work)
    if held is None or not held.copy:
        return top
    return top + sum(held) if top + sum(held) <= room else top


def flops_per_token(s: Sizes, work: Work) -> int:
    """2 N forward, 4 N backward (2 N where weights are frozen), 2 N more to recompute, 2 N for a reference.

    N leaves out an embedding that is only looked up. Attention scores are not counted: short sequences add little.
    """
    num = s.params - (0 if s.tied else s.embedding)
    return num * (2 + (4 if work.full else 2) + 2 * work.checkpointing + 2 * work.has_reference)


# a run, from its Config ------------------------------------------------------------------------------------------


def meta_model(model: str, *, trust_remote_code: bool = False) -> Any:
    """The model on the meta device."""
    from transformers import AutoConfig

    path = resolve_model(model)
    if (Path(path) / "adapter_config.json").exists():
        path = resolve_model(read_adapter(path)["base_model_name_or_path"])
    if not Path(path).is_dir():
        check_hub("model", path)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).get_text_config()
    except Exception as error:  # damaged files make transformers raise anything
        raise UserError(f"model={model}: its config.json cannot be read: {load_error(error, path)}") from None
    if any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise UserError(f"model={model}: a mixture of experts, which is not planned for")
    for name in ("num_attention_heads", "intermediate_size", "num_hidden_layers"):
        if not hasattr(config, name):
            raise UserError(f"model={model}: its config has no {name}; only decoder models are planned for")
    return build(config, trust_remote_code=trust_remote_code)


def build(config: Any, *, trust_remote_code: bool = False) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def sizes_for(cfg: Any, model: str | None = None) -> Sizes:
    """Sizes of the trained model, or of another one that the run loads."""
    return sizes_of(meta_model(model or cfg.model.model, trust_remote_code=cfg.model.trust_remote_code))


def planned_peak(cfg: Any, tokens: int, *, trained_tokens: int | None = None) -> float:
    """Peak bytes of tensors on this device in a step of so many tokens here, sampling included."""
    s, parts = sizes_for(cfg), cfg.run.gradient_accumulation_steps
    most = min(math.ceil(tokens / parts), max(cfg.run.max_tokens_per_micro_batch, longest(cfg) or 0))
    trained = None if trained_tokens is None else math.ceil(most * trained_tokens / tokens)
    work = replace(work_of(cfg, s), tokens=most, trained_tokens=trained, accumulates=most < tokens)
    held = engine_of(cfg, s, work)
    return max(beside_engine(s, work, held, room_here()), 0.0 if held is None else sampling(s, work, held))


def work_of(cfg: Any, s: Sizes, device: str | None = None) -> Work:
    """The Work of this run at the largest micro-batch its settings allow, on cuda or cpu; None: this machine's."""
    import torch

    has_gpu, device = torch.cuda.is_available(), device or device_here()
    compute = BYTES[{"cuda": "bfloat16", "cpu": "float32"}[device] if cfg.model.dtype == "auto" else cfg.model.dtype]
    tokens, is_part = micro_batch(cfg)
    work = Work(
        tokens=tokens, lora_r=cfg.lora.r, in_4bit=cfg.model.load_in_4bit, held=BYTES[cfg.model.trained_dtype],
        compute=compute,
        checkpointing=cfg.model.gradient_checkpointing, offloading=cfg.model.activation_offloading,
        head=method_of(cfg).head_for(cfg.parallel.context),
        has_reference=has_reference(cfg), others=compute * sum(sizes_for(cfg, name).params for name in frozen(cfg)),
        optim=cfg.optim.optim, accumulates=is_part, context=cfg.parallel.context,
        compiled=device == "cuda" and cfg.model.compile is not False and world_size() == 1,
        triton=device == "cuda" and (not has_gpu or torch.cuda.get_device_capability()[0] in TRITON_HEAD),
    )  # fmt: skip
    if method_of(cfg).critic:
        value_model = getattr(cfg, "value_model", None)
        work = replace(work, critic=critic_bytes(s, work, value_model and sizes_for(cfg, value_model)))
    return replace(work, shards=shards_of(cfg, s, work, device))


def method_of(cfg: Any) -> Method:
    """The method by the module of its Config, or of a base class."""
    names = (kind.__module__.rpartition(".")[2] for kind in type(cfg).__mro__)
    return next((METHODS[name] for name in names if name in METHODS), ANY)


def shards_of(cfg: Any, s: Sizes, work: Work, device: str) -> int:
    """GPUs that the model is sharded over, by the settings, or as the trainer decides for auto."""
    import torch

    from trainer.policy.sharding import room_for_a_copy

    parallel, world = cfg.parallel, world_size()
    if world == 1 or parallel.mode == "replicate" or work.in_4bit:
        return 1
    if parallel.mode == "auto":
        replica = kept(s, replace(work, optim="adamw", others=0.0, critic=0.0))
        if sum(replica.values()) <= room_for_a_copy(torch.device(device)):
            return 1
    return parallel.shard or world


def has_reference(cfg: Any) -> bool:
    """Whether training uses a reference of the starting point; without LoRA that is a second model."""
    wants, beta = method_of(cfg).reference, cfg.policy_loss.beta if hasattr(cfg, "policy_loss") else 0.0
    if wants == "always" and hasattr(cfg, "features"):
        return cfg.features.feature_model is None or beta > 0
    if wants == "always":
        is_free = getattr(cfg, "reference_free", False)
        return not is_free and cfg.reference.ref != "precomputed" and cfg.reference.ref_model is None
    is_own_teacher = hasattr(cfg, "distill") and cfg.distill.teacher == "self"
    return wants == "with beta" and (beta > 0 or is_own_teacher)


def frozen(cfg: Any) -> Iterator[str]:
    """Frozen models other than --model."""
    if hasattr(cfg, "reference") and cfg.reference.ref_model is not None and cfg.reference.ref != "precomputed":
        yield cfg.reference.ref_model
    if hasattr(cfg, "features") and cfg.features.feature_model is not None:
        yield cfg.features.feature_model
    if hasattr(cfg, "distill") and cfg.distill.teacher not in (None, "self"):
        yield cfg.distill.teacher


def micro_batch(cfg: Any) -> tuple[int, bool]:
    """Tokens of the largest forward (the limit, one longer sequence, or a whole accumulation step), and whether a step
    has several; of this device, or of those that share its rows."""
    run, length = cfg.run, longest(cfg)
    if length is None:
        return run.max_tokens_per_micro_batch, True
    whole = run.per_device_train_batch_size * method_of(cfg).sequences * cfg.parallel.context * length
    tokens = min(max(run.max_tokens_per_micro_batch, length), whole)
    return tokens, run.gradient_accumulation_steps > 1 or tokens < whole


def longest(cfg: Any) -> int | None:
    """Tokens of the longest sequence that the settings allow, without unbounded prompts; None if there is no limit."""
    if getattr(cfg, "mode", None) == "strided":
        return None  # rows of continuations side by side
    if hasattr(cfg, "rollout"):
        return (cfg.max_prompt_length or 0) + cfg.max_completion_length
    return cfg.response.max_length if hasattr(cfg, "response") else getattr(cfg, "max_length", None)


def engine_of(cfg: Any, s: Sizes, work: Work, device: str | None = None) -> EngineMemory | None:
    """What the in-process engine of this run holds; None if it does not sample."""
    from trainer.config.groups import servers_asked

    device, room = device or device_here(), room_here()
    asked = asked_of(cfg, device)
    if asked is None or cfg.rollout.engine == "vllm":
        return None
    if cfg.rollout.engine == "auto":
        group = asked._replace(rows=cfg.num_generations, prompts=1)
        if servers_asked(cfg) or (device == "cuda" and not fits_in_process(s, work, group, room)):
            return None
    if device == "cpu":
        return held_by_engine(s, work, asked, device)
    most = math.inf if cfg.rollout.cache_gib is None else cfg.rollout.cache_gib * GIB
    return held_by_engine(s, work, asked, device, min(most, room_for_cache(s, work, asked, room)))


def asked_of(cfg: Any, device: str) -> Asked | None:
    """Completions of a rollout on one device, without unbounded prompts; None for a method that has none."""
    if not hasattr(cfg, "rollout") or longest(cfg) is None:
        return None
    num = -(-cfg.run.sequences_per_step // world_size()) * cfg.minibatches_per_rollout
    rows = min(cfg.rollout.max_batch_size or ROWS[device], num)
    return Asked(rows, -(-num // cfg.num_generations), cfg.max_prompt_length or 0, cfg.max_completion_length)


def device_here() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def room_here() -> float:
    """Bytes for tensors on this GPU."""
    import torch

    return torch.cuda.mem_get_info()[1] - RESERVE * GIB if torch.cuda.is_available() else math.inf


# out of memory ---------------------------------------------------------------------------------------------------


class Advice(NamedTuple):
    """A flag and what it would save, in bytes."""

    flag: str
    saves: float
    remark: str


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those behind it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether this error, or its cause, is torch's out-of-memory error."""
    torch = sys.modules.get("torch")  # without torch nothing was allocated
    return torch is not None and any(isinstance(cause, torch.OutOfMemoryError) for cause in causes(error))


def out_of_memory(error: BaseException, cfg: Any) -> str:
    """The message, one flag per line. Never fails: without an estimate it only names the flags."""
    lines = [f"out of memory: {asked_for(error)}"]
    try:
        s = sizes_for(cfg)
        work = work_of(cfg, s)
        if engine := engine_of(cfg, s, work):
            engines = {"to sample: copy of the weights": engine.copy, "cache": engine.cache}
            parts = at_peak(s, work) | engines
        else:
            parts = at_peak(s, work)
        held = ", ".join(f"{name} {size / GIB:.3g}" for name, size in parts.items() if size)
        lines.append(f"  this run holds about, in GiB: {held}")
        given = advice(s, work, cfg)
        width = max(len(one.flag) for one in given)
        lines += [f"  {one.flag:<{width}}  saves about {one.saves / GIB:.3g} GiB{one.remark}" for one in given]
    except Exception as failure:  # the estimate must not hide the first line
        lines.append(f"  what would help cannot be estimated here ({type(failure).__name__}); try")
        lines.append("  --max-tokens-per-micro-batch 4096 or less, --gradient-checkpointing, --lora.r 16")
    lines.append("  checkpoints are complete: --resume continues from the last one, with these flags added")
    return "\n".join(lines)


def asked_for(error: BaseException) -> str:
    """The figures of torch's message, without its advice about environment variables."""
    for cause in causes(error):
        if found := re.search(r"Tried to allocate [^.]*(?:\.\d[^.]*)*\.", str(cause)):
            text = re.split(r" If reserved but unallocated| See documentation", str(cause)[found.start() :])[0]
            return " ".join(text.split()).replace("Tried", "tried", 1).rstrip(".")
    return " ".join(str(cause).split()) or type(cause).__name__


def advice(s: Sizes, work: Work, cfg: Any) -> list[Advice]:
    """What can be lowered in this run, the largest saving first."""
    import torch

    def saves(**changed: Any) -> float:
        return peak(s, work) - peak(s, replace(work, **changed))

    length, half = longest(cfg), work.tokens // 2
    if length is None or half >= length:
        # a second micro-batch keeps the gradients of the first, so half as many tokens may save nothing
        while (less := saves(tokens=half, accumulates=True)) <= 0 and half // 2 >= (length or 1):
            half //= 2
        found = [Advice(f"--max-tokens-per-micro-batch {half}", less, f", {work.tokens} tokens now")]
    else:  # one sequence is a micro-batch by itself
        name = "completion-length" if hasattr(cfg, "rollout") else "length"
        remark = f", one sequence is {length} tokens"
        found = [Advice(f"--max-{name} {length // 2}", saves(tokens=half), remark)]
    rank, remark = (RANK, ": only adapters are trained") if work.full else (max(1, work.lora_r // 2), "")
    is_wide = work.full and work.held == 4 and work.compute == 2
    is_alone = work.shards == work.context == 1
    in_full = work.lora_r > 0 and not work.in_4bit and is_alone and work.head != "none"
    second = hasattr(cfg, "reference") and (work.has_reference or work.others)
    can_leave = work.checkpointing and not work.offloading and device_here() == "cuda"
    host = offloaded(s, replace(work, offloading=True)) / GIB
    for is_possible, flag, changed, said in (
        (not work.checkpointing, "--gradient-checkpointing", {"checkpointing": True}, ", a third more time"),
        (can_leave, "--activation-offloading", {"offloading": True}, f", and takes {host:.3g} of main memory"),
        (work.optim == "adamw", "--optim adamw_8bit", {"optim": "adamw_8bit"}, " of moments (needs torchao)"),
        (is_wide, "--trained-dtype bfloat16", {"held": 2}, ", in a new run: weights, gradients and moments"),
        (True, f"--lora.r {rank}", {"lora_r": rank}, f", in a new run{remark}"),
        (in_full, "--load-in-4bit", {"in_4bit": True}, ", in a new run: the frozen base in 4 bits"),
        (second, "--ref precomputed", {"has_reference": False, "others": 0.0}, ": no second model while training"),
    ):
        if is_possible:
            found.append(Advice(flag, saves(**changed), said))
    if engine := engine_of(cfg, s, work):
        size = max(1, asked_of(cfg, device_here()).rows // 2)
        fewer = engine_of(replace(cfg, rollout=replace(cfg.rollout, max_batch_size=size)), s, work)
        less = sum(engine) - sum(fewer)
        found.append(Advice(f"--rollout.max-batch-size {size}", less, " while completions are made"))
        if engine.copy:
            bound, remark = engine.cache / 2 / GIB, " while completions are made: fewer rows at once"
            found.append(Advice(f"--rollout.cache-gib {bound:.2g}", engine.cache / 2, remark))
    if torch.cuda.is_available() and hasattr(cfg, "vllm") and cfg.rollout.engine == "vllm" and not cfg.vllm.url:
        total, share = torch.cuda.mem_get_info()[1], cfg.vllm.gpu_memory_utilization or 0.35
        lower = round(max(0.1, share - 0.1), 2)
        remark = f" for a server on this GPU, of {total / GIB:.3g} GiB"
        found.append(Advice(f"--vllm.gpu-memory-utilization {lower}", (share - lower) * total, remark))
    return sorted((one for one in found if one.saves > 0), key=lambda one: -one.saves)


# the command -----------------------------------------------------------------------------------------------------


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
class Lora:
    r: int = 0
    """Rank of adapters on all linear layers but the head; 0 trains all weights."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    engine: Literal["auto", "local", "vllm"] = "auto"
    """What samples: this process (local), or vLLM servers. auto: this process if it has room, as in training."""
    max_batch_size: int | None = None
    """Rows that the local engine decodes at once. None: 512, or as many as there is room for."""
    cache_gib: float | None = None
    """Most GiB of the local engine's key-value cache. None: what is free, at most what the largest batch needs."""
    max_length: int = 1024
    """Tokens of prompt and completion together, for that cache."""


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
    gpu: Literal[("here", *CARDS, *ALIASES)] | None = None
    """GPU to plan for. None: the one in this machine, or h200 if it has none."""
    gpu_memory: float | None = None
    """Memory of one GPU in GiB. None: that of the card."""
    method: str = "sft"
    """Training method, which decides about reference model, log-prob head and sampling."""
    beta: float = 0.0
    """KL weight of GRPO and its relatives: above 0 a reference model is held."""
    teacher: str | None = None
    """opd: the teacher, in any form that --model takes, or self. None: a server, or one that takes no memory here."""
    num_generations: int = 8
    """Completions per prompt; the local engine holds a prompt once for all of them."""
    max_completion_length: int = 256
    """Most tokens of a completion, for the cache of the local engine."""
    value_model: str | None = None
    """PPO's critic, if it is a model of its own."""
    ref: Literal["auto", "precomputed"] = "auto"
    """How the reference is held. precomputed: its log-probs are on disk, and no copy is in memory."""
    lora: Lora = field(default_factory=Lora)
    load_in_4bit: bool = False
    """Hold the frozen base of a LoRA run in 4 bits."""
    max_tokens_per_micro_batch: int = 8192
    """Most tokens of one forward pass."""
    gradient_checkpointing: bool = False
    """Give the verdict for gradient checkpointing; the table shows both."""
    activation_offloading: bool = False
    """Count the inputs that gradient checkpointing keeps in main memory."""
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
            raise UserError(f"model={self.model}, shape={self.shape}: give one of --model and --shape")
        if self.shape is not None and self.shape not in KNOWN:
            raise UserError(f"shape={self.shape}: not a known size; there is {', '.join(KNOWN)}, or use --model")
        if self.method not in METHODS:
            raise UserError(f"method={self.method}: not a method of ours; there is {', '.join(METHODS)}")
        rules = {
            "1 or more": "gpus max_tokens_per_micro_batch num_generations max_completion_length",
            "above 0": "gpu_memory",
            "above 0 and at most 1": "mfu",
        }
        check_numbers(self, rules)
        check_numbers(self.lora, {"0 or more": "r"}, "lora.")
        check_numbers(self.rollout, {"1 or more": "max_batch_size max_length", "above 0": "cache_gib"}, "rollout.")
        check_numbers(self.vllm, {"above 0 and at most 1": "gpu_memory_utilization"}, "vllm.")
        if self.trained_dtype == "bfloat16" and (self.lora.r or self.dtype == "float32"):
            raise UserError(
                f"trained_dtype=bfloat16: has no effect on adapters, and is less precise than dtype=float32 "
                f"(lora.r={self.lora.r}, dtype={self.dtype}); leave it out"
            )
        if self.activation_offloading and not self.gradient_checkpointing:
            raise UserError(
                "activation_offloading=True: moves what gradient checkpointing saves; add --gradient-checkpointing, or "
                "leave it out"
            )
        if self.load_in_4bit:
            if not self.lora.r:
                raise UserError("load_in_4bit=True: 4-bit weights cannot be trained; train adapters with --lora.r 16")
            if METHODS[self.method].head == "none":
                raise UserError(f"load_in_4bit=True: not for reward models (method={self.method}); leave it out")
            is_sharded = self.parallel.mode == "fsdp" or self.parallel.shard is not None
            if is_sharded or self.parallel.context > 1:
                name = "fsdp" if is_sharded else f"parallel.context={self.parallel.context}"
                raise UserError(f"load_in_4bit=True: not supported with {name}; leave one of them out")
        for name, value in (("shard", self.parallel.shard), ("context", self.parallel.context)):
            if value is not None and (value < 1 or self.gpus % value):
                raise UserError(f"parallel.{name}={value}: must divide the {self.gpus} GPUs")
        if self.parallel.mode == "fsdp" and self.gpus == 1:
            raise UserError("parallel.mode=fsdp: has no effect with one GPU; set --gpus")
        if self.parallel.mode == "replicate" and self.parallel.shard is not None:
            raise UserError(f"parallel.shard={self.parallel.shard}: has no effect with parallel.mode=replicate")
        if self.beta and METHODS[self.method].reference != "with beta":
            raise UserError(f"beta={self.beta}: has no effect on the memory of {self.method}; leave it out")

        if self.teacher is not None and self.method != "opd":
            raise UserError(f"teacher={self.teacher}: has no effect with method={self.method}; it is for opd")
        if self.value_model and not METHODS[self.method].critic:
            raise UserError(f"value_model={self.value_model}: {self.method} has no critic; leave it out")

    @property
    def has_reference(self) -> bool:
        wants, is_own_teacher = METHODS[self.method].reference, self.teacher == "self"
        return self.ref == "auto" and (
            wants == "always" or (wants == "with beta" and (self.beta > 0 or is_own_teacher))
        )

    @property
    def others(self) -> float:
        """Bytes of the teacher."""
        if self.teacher in (None, "self"):
            return 0.0
        model = meta_model(self.teacher, trust_remote_code=self.trust_remote_code)
        return BYTES[self.dtype] * sizes_of(model).params

    @property
    def colocates(self) -> bool:
        """Whether a vLLM server, if there is one, shares a GPU with the trainer."""
        return self.gpus == 1 if self.vllm.colocate is None else self.vllm.colocate

    @property
    def asked(self) -> Asked:
        rows = self.rollout.max_batch_size or ROWS["cuda"]
        prompt_length = max(0, self.rollout.max_length - self.max_completion_length)
        return Asked(rows, -(-rows // self.num_generations), prompt_length, self.max_completion_length)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 after one sentence about what is wrong."""
    return run_command(lambda: plan(parse_command(PlanConfig, argv, "python -m trainer.plan")))


def plan(cfg: PlanConfig) -> None:
    trusts = cfg.trust_remote_code
    model = build(known_config(cfg.shape)) if cfg.shape else meta_model(cfg.model, trust_remote_code=trusts)
    print("\n".join(report(cfg, sizes_of(model), *pick_card(cfg))))
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    if not {"gate_proj", "up_proj", "down_proj", "q_proj", "o_proj"} <= names:
        print(f"{type(model).__name__} is not built like a Llama; its activations are counted as if it were.")


def known_config(name: str) -> Any:
    from transformers import AutoConfig

    kind, *values = KNOWN[name]
    return AutoConfig.for_model(kind, **dict(zip(FIELDS, values, strict=True)))


def pick_card(cfg: PlanConfig) -> tuple[str, Card]:
    import torch

    if cfg.gpu == "here" and not torch.cuda.is_available():
        raise UserError(f"gpu=here: this machine has no CUDA device; name a card: {', '.join(CARDS)}")
    if cfg.gpu in (None, "here") and torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        like = next((x for name, x in CARDS.items() if name.partition("-")[0].upper() in found.name), CARDS["h200"])
        card = like._replace(gib=found.total_memory / GIB, triton_head=found.major in TRITON_HEAD)
        name = found.name
    else:
        name = ALIASES.get(cfg.gpu, cfg.gpu) or "h200"
        card = CARDS[name]
    return name, card if cfg.gpu_memory is None else card._replace(gib=cfg.gpu_memory)


def columns(cfg: PlanConfig, card: Card) -> dict[str, Work]:
    """The settings compared: replicate and, with several GPUs, fsdp, each without and with gradient checkpointing."""
    parallel = cfg.parallel
    base = Work(
        tokens=cfg.max_tokens_per_micro_batch, lora_r=cfg.lora.r, in_4bit=cfg.load_in_4bit,
        held=BYTES[cfg.trained_dtype], compute=BYTES[cfg.dtype], has_reference=cfg.has_reference, optim=cfg.optim,
        triton=card.triton_head, context=parallel.context, head=METHODS[cfg.method].head_for(parallel.context),
        others=cfg.others, compiled=cfg.gpus == 1,
    )  # fmt: skip
    modes = {}
    if cfg.gpus == 1 or (parallel.mode != "fsdp" and parallel.shard is None):
        modes["replicate"] = base
    if cfg.gpus > 1 and parallel.mode != "replicate" and not cfg.load_in_4bit:
        modes["fsdp"] = replace(base, shards=parallel.shard or cfg.gpus)
    return {
        name + suffix: replace(work, checkpointing=bool(suffix), offloading=bool(suffix) and cfg.activation_offloading)
        for name, work in modes.items()
        for suffix in ("", " + gc")
    }


class Sampler(NamedTuple):
    """What samples in one column, and GiB of the GPU with it."""

    engine: Literal["local", "vllm", "none"]
    room: float  # for tensors of the trainer while it trains
    sampling: float = 0.0  # all that is held while completions are made
    can_sample: bool = True
    held: EngineMemory | None = None  # by the local engine


def sampler_of(cfg: PlanConfig, s: Sizes, work: Work, card: Card) -> Sampler:
    """The engine of a column, by the settings or as the trainer decides for auto."""
    room, group = card.gib - RESERVE, cfg.asked._replace(rows=cfg.num_generations, prompts=1)
    if not METHODS[cfg.method].samples:
        return Sampler("none", room)
    is_local = cfg.rollout.engine == "local"
    if cfg.rollout.engine == "auto":
        is_local = fits_in_process(s, work, group, room * GIB)
    if not is_local:
        share = cfg.vllm.gpu_memory_utilization * card.gib if cfg.colocates else 0.0
        gib = kept_without_gradients(s, work) / GIB + share
        return Sampler("vllm", room - (ASLEEP if cfg.colocates else 0.0), gib, gib <= room)
    most = math.inf if cfg.rollout.cache_gib is None else cfg.rollout.cache_gib * GIB
    held = held_by_engine(s, work, cfg.asked, "cuda", min(most, room_for_cache(s, work, cfg.asked, room * GIB)))
    least = sampling(s, work, held_by_engine(s, work, group, "cuda"))
    return Sampler("local", room, sampling(s, work, held) / GIB, least <= room * GIB, held)


def report(cfg: PlanConfig, s: Sizes, card_name: str, card: Card) -> list[str]:
    """Two lines about the run, the table, and sentences about it."""
    works = columns(cfg, card)
    if METHODS[cfg.method].critic:
        own = cfg.value_model and sizes_of(meta_model(cfg.value_model, trust_remote_code=cfg.trust_remote_code))
        works = {name: replace(work, critic=critic_bytes(s, work, own)) for name, work in works.items()}
    samplers = [sampler_of(cfg, s, work, card) for work in works.values()]
    rooms = " or ".join(sorted({f"{sampler.room:.1f}" for sampler in samplers}))
    num_adapter = f", {s.adapter(cfg.lora.r):,} in adapters" if cfg.lora.r else ""
    sharing = f", a slice of it on each of {cfg.parallel.context}" if cfg.parallel.context > 1 else ""
    held = f", weights held in {cfg.trained_dtype}" if cfg.trained_dtype != "float32" else ""
    held = ", base in 4 bits" if cfg.load_in_4bit else held
    out = [
        f"{cfg.shape or cfg.model}: {s.params:,} parameters{num_adapter}; {cfg.method}, {cfg.dtype}, {cfg.optim}{held}",
        f"{cfg.gpus} x {card_name}, {card.gib:.1f} GiB each, {rooms} for tensors of the trainer; "
        f"{cfg.max_tokens_per_micro_batch} tokens in a micro-batch{sharing}; gc = gradient checkpointing",
        "",
    ]

    def row(name: str, cells: Iterable[Any], form: str = "") -> None:
        out.append(f"{name:<36}" + "".join(f"{format(cell, form):>16}" for cell in cells))

    row("GiB on each GPU", works)
    parts = [at_peak(s, work) for work in works.values()]
    for part in parts[0]:
        if any(sizes[part] for sizes in parts):
            name = "passing buffers beside them" if part == "buffers" else part
            row(name, [sizes[part] / GIB for sizes in parts], ".2f")
    peaks = [sum(sizes.values()) / GIB for sizes in parts]
    row("peak", peaks, ".2f")
    if METHODS[cfg.method].samples:
        row("engine", [sampler.engine for sampler in samplers])
        names = {"local": ", local cache", "vllm": ", vLLM's share" if cfg.colocates else ", servers elsewhere"}
        found = {names[sampler.engine] for sampler in samplers}
        row(f"while sampling{found.pop() if len(found) == 1 else ''}", [x.sampling for x in samplers], ".2f")
    fits = [gib <= sampler.room and sampler.can_sample for gib, sampler in zip(peaks, samplers, strict=True)]
    row("fits", ["yes" if ok else "no" for ok in fits])
    best = [
        largest(s, work, sampler.room) if sampler.can_sample else 0
        for work, sampler in zip(works.values(), samplers, strict=True)
    ]
    row("largest max-tokens-per-micro-batch", [f"{tokens:,}" if tokens else "none" for tokens in best])
    flops = cfg.gpus * cfg.mfu * (card.bf16 if cfg.dtype == "bfloat16" else card.fp32) * 1e12
    row("tokens/s, all GPUs, rough", [flops / flops_per_token(s, work) for work in works.values()], ",.0f")
    *facts, rough = explain(cfg, s, works, dict(zip(works, fits, strict=True)))
    return [*out, "", *facts, *explain_engine(cfg, s, works, dict(zip(works, samplers, strict=True))), rough]


def explain_engine(cfg: PlanConfig, s: Sizes, works: dict[str, Work], samplers: dict[str, Sampler]) -> Iterator[str]:
    """What the local engine holds in the first column that has it, and whether that stays during training."""
    ours = {name: sampler for name, sampler in samplers.items() if sampler.held is not None and sampler.can_sample}
    if not ours:
        return
    name, first = next(iter(ours.items()))
    rows = rows_within(s, works[name], cfg.asked, first.held.cache)
    yield (
        f"The engine of {name} holds {sum(first.held) / GIB:.2f} GiB: a copy of the weights "
        f"{first.held.copy / GIB:.2f}, a cache for {rows} rows at once {first.held.cache / GIB:.2f}, logits "
        f"{first.held.logits / GIB:.2f}."
    )
    stay = {name for name, sampler in ours.items() if peak(s, works[name]) + sum(sampler.held) <= sampler.room * GIB}
    for verb, names in (("stays", stay), ("is freed", ours.keys() - stay)):
        if names:
            yield f"That {verb} while training: {', '.join(name for name in ours if name in names)}."


def explain(cfg: PlanConfig, s: Sizes, works: dict[str, Work], fits: dict[str, bool]) -> Iterator[str]:
    first = next(iter(works.values()))
    fullest = "; ".join(f"{name}: {busiest(s, work).name}" for name, work in works.items())
    yield f"A step is fullest at: {fullest}."
    if first.head != "none":
        yield (
            f"The log-prob head takes {head_bytes(s, first) / GIB:.2f} GiB if all tokens train; "
            f"storing their logits would take {logits_bytes(s, first.rows) / GIB:.2f} (avoided)."
        )
    host = {name: offloaded(s, work) / GIB for name, work in works.items() if work.offloading}
    if host:
        sizes = ", ".join(f"{name} {gib:.2f}" for name, gib in host.items())
        yield f"Offloaded activations take page-locked main memory, in GiB for each GPU: {sizes}."
    asked = {name: ok for name, ok in fits.items() if works[name].checkpointing == cfg.gradient_checkpointing}
    verdict = ", ".join(
        f"{name.removesuffix(' + gc')} {'fits' if ok else 'does not fit'}" for name, ok in asked.items()
    )
    yield f"Asked for, {'with' if cfg.gradient_checkpointing else 'without'} gradient checkpointing: {verdict}."
    yield (
        f"Rough: speed is {cfg.mfu:.2f} of the data sheet's peak, training alone, neither sampling nor waiting; "
        f"{RESERVE:g} GiB are set aside for CUDA and the allocator. Memory: trainer/plan.py."
    )


if __name__ == "__main__":
    sys.exit(main())
