"""Estimate of the memory of one training step, from the sizes of a model; nothing is loaded.

    s = sizes_for(cfg)
    work = work_of(cfg, s)                     # at the largest micro-batch that the settings allow
    num_bytes = planned_peak(cfg, tokens)      # peak of a step of so many tokens
    text = out_of_memory(error, cfg)           # which flags to lower, and what each would save

`python -m trainer.plan` prints the estimate. Sections: what is counted, bytes, a run from its Config, out of memory.

L layers, D width, H query heads, G key-value heads, K head size, I width inside the gated MLP, V vocabulary, N tokens
of one micro-batch (packed, so all are real), P parameters. h = bytes of a trained weight, w = of a number in the
residual stream, c = of one in the matrix products: full fine-tuning holds float32 weights and multiplies in bfloat16
under autocast (h 4, w 4, c 2); --trained-dtype bfloat16 has 2, 2, 2, and --dtype float32 has 4, 4, 4. The frozen base
of a LoRA run, and blocks that FSDP gathers in bfloat16, have w 2, c 2.

Kept from start to end:

    weights      h P trained; with LoRA c P frozen, and 4 per adapter weight;  adapters have r (in + out) per matrix
    gradients    h per trained weight (4 of an adapter), kept over the micro-batches of a step
    optimizer    2 h per trained weight, two moments of AdamW; adamw_8bit has 2 x 1 and a float32 scale for each 256,
                 but for tensors of less than 4096 numbers and those that 256 does not divide
    reference    c P, a frozen copy, where the method has one; with LoRA the base is its own reference

A step of a single micro-batch starts without gradients, which grow as activations are freed (`accumulates` False).
Replicas sum gradients a bucket at a time, after the activations are freed, and AdamW's step needs no extra memory: on a
GPU it is one kernel for all weights, or one for each.

What autograd saves of one block, per token, when its weights train (`saved_by_block`):

    two norms      2 (4 D + w D + 4)     input in float32, normalised input, one root each
    their outputs  5 c D if w != c       autocast casts once for each of q, k, v, gate, up;
                   2 c D if w == c       all readers share one
    q, k norms     (4 + c) (H + G) K + 4 (H + G)     Qwen3 has them, Llama has not
    attention      c (2 H + 2 G) K + 4 H      q, k, v, output (which o_proj reads), log-sum-exp; no T x T scores
    MLP            4 c I                      gate, silu(gate), up, their product

With LoRA norms keep 4 D + 4 each, every adapted matrix keeps its own cast of its input (in float32 matrices with the
same input share it) and r numbers more, and the MLP keeps 3 c I besides. After the blocks: the last norm, the rotary
table (2 w K) and the ids (8). Once per weight, not per token: the bfloat16 casts of trained float32 matrices that
autocast makes, 2 bytes each (`casts`).

Gradient checkpointing keeps w D per block and token, plus the above for one block at a time; but autocast's cache holds
the casts of all blocks until the forward ends. The backward of a block adds, at its peak in the MLP, gradients of
product, silu and up in place of the product (2 c I; with LoRA 4 I more, since an adapter casts its input to float32),
the gradient of the residual stream (w D), and the new gradient of one matrix before it is accumulated. The gradient of
a head that is tied to the embedding is held until the embedding's arrives, through the backward of all blocks.

The head (kernels/linear_logprob.py; R trained tokens, at most N) stores no logits but one chunk of exponentials, E:

    one pass      c V D (cast, if w != c) + 2 min(R, 4096) V (E) + dW + 2 R D (dX) + a part of E @ W in float32
    any loss      the same cast + 2 R columns (E, 2^28 numbers) + 4 D columns + 4 R D + 2 R D + dW
    frozen        E, dX and the part alone
    torch path    blocks of 2^25 float32 numbers, + dX + dW: four at a time, or three and the summand of dW; one more
                  where a loss has a gradient by entropy
    logits        12 R V: what storing them costs at its peak (logits, float32 copy, log-softmax, gradient)

With --parallel.context a GPU has its part of all this, except keys and values, which are of the whole row.
FSDP over n GPUs divides all that is kept by n. In flight are a block in use, the next one prefetched and its gather
buffer (3 c each), its unsharded gradient (c) and in float32 for the reduction (4), and embeddings and head, which stay
gathered from forward to backward (c). FSDP casts, so autocast does not.

Not counted: what --compile saves (compiled blocks keep fewer activations), dense masks of sdpa, reward models.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from data.hub import check_hub
from rollout.servers.model_folder import read_adapter, resolve_model
from trainer.config.errors import load_error
from trainer.parallel.ranks import world_size

CHUNK, PART, SLICE = 4096, 512, 1 << 28  # of kernels/linear_logprob_triton.py, which needs triton to import
TORCH_BLOCK = 1 << 25  # BLOCK_ELEMENTS of kernels/linear_logprob.py
SCALED, SMALLEST = 256, 4096  # torchao's 8-bit moments: numbers of a scale, and of the smallest tensor that has them
GIB = 2**30
RANK = 16  # of adapters suggested to a run that trains all weights
Head = Literal["one pass", "any loss", "none"]


# what is counted -------------------------------------------------------------------------------------------------


class Method(NamedTuple):
    """What a method needs memory for."""

    head: Head
    reference: Literal["always", "with beta", "never"] = "never"
    samples: bool = False
    sequences: int = 1  # of one row


METHODS = {
    "sft": Method("one pass"),
    **dict.fromkeys(("dpo", "ipo"), Method("any loss", "always", sequences=2)),
    "kto": Method("any loss", "always"),
    **dict.fromkeys(("cpo", "simpo", "orpo"), Method("any loss", sequences=2)),
    "rm": Method("none", sequences=2),
    "prm": Method("none"),
    **dict.fromkeys(("grpo", "gdpo", "rloo"), Method("one pass", "with beta", samples=True)),
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


class Precision(NamedTuple):
    """Bytes of a number."""

    stream: int  # w: residual stream
    compute: int  # c: matrix products


@dataclass(frozen=True)
class Work:
    """What is trained, how, and on how many tokens at a time."""

    tokens: int
    lora_r: int = 0
    held: int = 4  # bytes of a weight when all are trained
    compute: int = 2  # bytes of the matrix products
    checkpointing: bool = False
    head: Head = "one pass"
    has_reference: bool = False
    others: float = 0.0  # bytes of other frozen models
    optim: str = "adamw"
    shards: int = 1  # GPUs that FSDP shards over; 1: replicas
    triton: bool = True
    trained_tokens: int | None = None  # None: all of them
    accumulates: bool = True  # gradients of earlier micro-batches exist
    context: int = 1  # GPUs that share the micro-batch

    @property
    def own(self) -> int:
        """Tokens that one GPU computes."""
        return -(-self.tokens // self.context)

    @property
    def precision(self) -> Precision:
        return Precision(self.held if self.lora_r == 0 and self.shards == 1 else self.compute, self.compute)

    @property
    def rows(self) -> int:
        return self.own if self.trained_tokens is None else -(-self.trained_tokens // self.context)


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


def saved_by_block(s: Sizes, p: Precision, lora_r: int = 0) -> int:
    """Bytes per token that autograd saves of one block."""
    w, c = p
    keys = (s.heads + s.kv_heads) * s.head_dim
    attention = 2 * c * keys + 4 * s.heads
    if lora_r:
        norms = 2 * (4 * s.width + 4)
        inputs = 2 * s.width + s.inner if c == 4 else 5 * s.width + s.heads * s.head_dim + s.inner
        between = c * (inputs + 7 * lora_r)
        qk_norms = (4 * keys + 4 * (s.heads + s.kv_heads)) * s.qk_norm
        return norms + between + qk_norms + attention + 3 * c * s.inner
    norms = 2 * ((4 + w) * s.width + 4)
    between = (5 if w != c else 2) * c * s.width
    qk_norms = ((4 + c) * keys + 4 * (s.heads + s.kv_heads)) * s.qk_norm
    return norms + between + qk_norms + attention + 4 * c * s.inner


def saved_outside(s: Sizes, p: Precision, lora_r: int = 0) -> int:
    """Bytes per token saved before and after the blocks, without the head."""
    norm = 4 * s.width + 4 + (0 if lora_r else p.stream * s.width)
    return norm + 2 * p.stream * s.head_dim + 8


def casts(s: Sizes, p: Precision, lora_r: int = 0) -> int:
    """Bytes of the low-precision copies that autocast makes of trained float32 matrices, all blocks."""
    if p.compute == 4:
        return 0
    return p.compute * s.adapter(lora_r) if lora_r else p.compute * s.matrices * (p.stream != p.compute)


def saved(s: Sizes, work: Work) -> int:
    """Bytes of activations kept between forward and backward, casts included."""
    p, r = work.precision, work.lora_r
    outside = work.own * saved_outside(s, p, r)
    if work.checkpointing:
        return outside + work.own * s.layers * p.stream * s.width
    first = work.own * (4 * s.width + 4) if r else 0  # embeddings do not train: the first norm saves nothing
    return outside - first + s.layers * saved_by_slice(s, work) + casts(s, p, r)


def saved_by_slice(s: Sizes, work: Work) -> int:
    """What autograd saves of one block on this GPU: of its own tokens, and the keys and values of the others."""
    others = 2 * work.compute * s.kv_heads * s.head_dim * (work.tokens - work.own)
    return work.own * saved_by_block(s, work.precision, work.lora_r) + others


def head_bytes(s: Sizes, work: Work, p: Precision) -> int:
    """Peak of the log-prob head, including its new gradients of hidden states and weight."""
    if work.head == "none":
        return 0
    rows, d, v, (w, c) = work.rows, s.width, s.vocab, p
    trains, cast, dx = work.lora_r == 0, c * s.embedding * (w != c), c * rows * s.width
    if not work.triton or c == 4:
        block = 4 * v * min(rows, max(1, TORCH_BLOCK // v))
        low = 0 if c == 4 else block // 2
        dw = s.embedding * trains
        return cast + dx + 4 * dw + max(4 * block, 3 * block + low + c * dw)
    if work.head == "any loss" and trains:
        columns = min(v, max(256, SLICE // max(1, rows) // 256 * 256))
        return cast + 2 * rows * columns + 4 * d * columns + 4 * rows * d + dx + w * s.embedding
    at_once = trains and w != 4 and rows <= 2 * d
    chunk = rows if at_once else min(rows, CHUNK)
    e = 2 * -(-chunk // 128) * 128 * v
    part = 4 * d * min(chunk, PART * max(1, d // 1024))
    if not trains:
        return e + dx + part
    if w == 4 or at_once:
        return cast + e + dx + part + w * s.embedding
    return max(e + dx + part + 4 * s.embedding, dx + (4 + w) * s.embedding)  # the sum is float32, then rounded


def logits_bytes(s: Sizes, rows: int) -> int:
    """What storing the logits would take at its peak, forward and backward."""
    return 12 * rows * s.vocab


def state_bytes(s: Sizes, work: Work) -> float:
    """Bytes of AdamW's two moments, over all GPUs."""
    held = 4 if work.lora_r else work.held
    tensors = tuple(work.lora_r * end for end in s.ends) if work.lora_r else s.tensors
    if work.optim != "adamw_8bit":
        return 2 * held * sum(tensors)
    parts = [(num, num / work.shards) for num in tensors]
    small = sum(num for num, own in parts if own >= SMALLEST and own % SCALED == 0)
    return 2 * (1 + 4 / SCALED) * small + 2 * held * (sum(tensors) - small)


def kept(s: Sizes, work: Work) -> dict[str, float]:
    """Bytes per GPU kept from start to end."""
    full, c = work.lora_r == 0, work.compute
    parts = {
        "weights": (work.held if full else c) * s.params,
        "adapters": 4 * s.adapter(work.lora_r),
        "gradients": work.held * s.params if full else 4 * s.adapter(work.lora_r),
        "optimizer state": state_bytes(s, work),
        "reference": c * s.params * (work.has_reference and full) + work.others,
    }
    return {name: size / work.shards for name, size in parts.items()}


def in_flight(s: Sizes, work: Work) -> dict[str, float]:
    """Bytes that FSDP holds gathered beyond its shards, in forward and head, and in the backward of a block."""
    if work.shards == 1:
        return {"forward": 0.0, "backward": 0.0}
    c, block = work.compute, s.matrices / s.layers
    gathered = c * s.embedding * (1 if s.tied else 2) + 3 * c * block
    return {"forward": gathered, "backward": gathered + (0 if work.lora_r else (c + 4) * block)}


def moments(s: Sizes, work: Work) -> list[Moment]:
    """Candidates for the peak; the first micro-batch of a step counts the gradients computed so far."""
    p, r, n = work.precision, work.lora_r, work.own
    (w, c), full = p, r == 0
    stays, flight = saved(s, work), in_flight(s, work)
    one_block = saved_by_slice(s, work) + casts(s, p, r) / s.layers
    is_first, is_tied = full and not work.accumulates, full and s.tied and work.head != "none"
    grad = work.held / work.shards  # bytes of a gradient once it is there
    head_grad = grad * s.embedding * (work.head != "none")
    waits, new = (0, head_grad) if is_first else (head_grad * is_tied, 0)  # of the head, before the blocks have theirs
    matrix = s.width * s.inner * ((w + c * (w != c)) if full and work.accumulates else 0)
    wide = 2 * c + (4 if r and c == 2 else 0)  # an adapter takes its input through float32
    worst = n * (wide * s.inner + w * s.width) + matrix + flight["backward"]
    head = c * work.rows * s.width + head_bytes(s, work, p) + flight["forward"]
    forward = n * (4 * c * s.inner + w * s.width) + flight["forward"]
    made = [Moment("log-prob head", stays, head)]
    if work.checkpointing:
        made += [
            Moment("forward, casts of all weights", stays, forward + casts(s, p, r)),
            Moment("backward of a block", stays + one_block, worst + waits, new),
        ]
    else:
        made.append(Moment("backward of a block", stays, worst + waits, new))
    if is_first:  # in the first block, the others have their gradients and it has only that of its last matrix
        last = one_block + n * (w * s.width + 2 * p.stream * s.head_dim + 8)
        others = grad * (s.params - s.matrices / s.layers + s.width * s.inner)
        made.append(Moment("backward of the first block", last, worst, others))
    # The gradient of an embedding is dense, and added to what is there; that of a tied head has waited for it.
    again = w * s.embedding * full if work.accumulates or is_tied else 0
    every = grad * s.params if is_first else 0
    made.append(Moment("embedding's gradient", n * w * s.width, waits + again + flight["forward"], every))
    return made


def busiest(s: Sizes, work: Work) -> Moment:
    """The peak of forward and backward."""
    return max(moments(s, work), key=lambda moment: moment.total)


def at_peak(s: Sizes, work: Work) -> dict[str, float]:
    """Bytes of each kind on one GPU at the peak of forward and backward."""
    parts, fullest = kept(s, work), busiest(s, work)
    if not work.accumulates and work.lora_r == 0:
        parts["gradients"] = fullest.gradients
    return parts | {"activations": fullest.activations, "buffers": fullest.passing}


def peak(s: Sizes, work: Work) -> float:
    """Most bytes that tensors take on one GPU during forward, backward and update."""
    return sum(at_peak(s, work).values())


def sampling(s: Sizes, work: Work, cached_tokens: int) -> float:
    """Bytes while this process samples completions: a key-value cache, no gradients or activations."""
    held = sum(size for name, size in kept(s, work).items() if name != "gradients")
    cache = cache_bytes(s, work.compute, cached_tokens)
    return held + cache + casts(s, work.precision, work.lora_r) + in_flight(s, work)["forward"]


def cache_bytes(s: Sizes, compute: int, num_tokens: int) -> int:
    """Keys and values of tokens under generation."""
    return 2 * s.layers * s.kv_heads * s.head_dim * compute * num_tokens


def flops_per_token(s: Sizes, work: Work) -> int:
    """2 N forward, 4 N backward (2 N where weights are frozen), 2 N more to recompute, 2 N for a reference.

    N leaves out an embedding that is only looked up. Attention scores are not counted: short sequences add little.
    """
    num = s.params - (0 if s.tied else s.embedding)
    return num * (2 + (2 if work.lora_r else 4) + 2 * work.checkpointing + 2 * work.has_reference)


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
        raise ValueError(f"model={model}: its config.json cannot be read: {load_error(error, path)}") from None
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if getattr(config, name, None):
            raise ValueError(f"model={model}: a mixture of experts, which is not planned for")
    lacking = [x for x in ("num_attention_heads", "intermediate_size", "num_hidden_layers") if not hasattr(config, x)]
    if lacking:
        raise ValueError(f"model={model}: its config has no {lacking[0]}; only decoder models are planned for")
    return build(config, trust_remote_code=trust_remote_code)


def build(config: Any, *, trust_remote_code: bool = False) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def sizes_for(cfg: Any) -> Sizes:
    return sizes_of(meta_model(cfg.model.model, trust_remote_code=cfg.model.trust_remote_code))


def planned_peak(cfg: Any, tokens: int, *, trained_tokens: int | None = None) -> float:
    """Peak bytes of tensors on this device in a step of so many tokens here, sampling included."""
    s, parts = sizes_for(cfg), cfg.run.gradient_accumulation_steps
    most = min(math.ceil(tokens / parts), max(cfg.run.max_tokens_per_micro_batch, longest(cfg) or 0))
    trained = None if trained_tokens is None else math.ceil(most * trained_tokens / tokens)
    work = replace(work_of(cfg, s), tokens=most, trained_tokens=trained, accumulates=most < tokens)
    cached = cached_tokens(cfg)
    return max(peak(s, work), sampling(s, work, cached) if cached else 0.0)


def work_of(cfg: Any, s: Sizes, device: str | None = None) -> Work:
    """The Work of this run at the largest micro-batch its settings allow, on cuda or cpu; None: this machine's."""
    device = device or device_type()
    tokens, steps = micro_batch_tokens(cfg), cfg.run.gradient_accumulation_steps
    head, context = method_of(cfg).head, cfg.parallel.context
    work = Work(
        tokens=tokens, lora_r=cfg.lora.r, held=2 if cfg.model.trained_dtype == "bfloat16" else 4,
        compute=compute_bytes(cfg, device), checkpointing=cfg.model.gradient_checkpointing, context=context,
        head="any loss" if context > 1 and head == "one pass" else head,  # as logps.token_loss
        has_reference=has_reference(cfg), others=other_models(cfg, compute_bytes(cfg, device)), optim=cfg.optim.optim,
        triton=has_triton_head(device), accumulates=steps > 1 or tokens < step_tokens(cfg),
    )  # fmt: skip
    return replace(work, shards=shards_of(cfg, s, work, device))


def method_of(cfg: Any) -> Method:
    """The method by the module of its Config, or of a base class."""
    names = (kind.__module__.rpartition(".")[2] for kind in type(cfg).__mro__)
    return next((METHODS[name] for name in names if name in METHODS), ANY)


def device_type() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def compute_bytes(cfg: Any, device: str) -> int:
    """Bytes of a number in a matrix product."""
    if cfg.model.dtype == "auto":
        return 4 if device == "cpu" else 2
    return 4 if cfg.model.dtype == "float32" else 2


def has_triton_head(device: str) -> bool:
    """Whether kernels/linear_logprob_triton.py runs there: Hopper and Blackwell, assumed if no GPU is present."""
    import torch

    return device == "cuda" and (not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] in (9, 10))


def shards_of(cfg: Any, s: Sizes, work: Work, device: str) -> int:
    """GPUs that the model is sharded over, by the settings, or as the trainer decides for auto."""
    import torch

    from trainer.policy.sharding import room_for_a_copy

    parallel, world = cfg.parallel, world_size()
    if world == 1 or parallel.mode == "replicate":
        return 1
    if parallel.mode == "auto":
        replica = kept(s, replace(work, optim="adamw", others=0.0))
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
    return wants == "with beta" and beta > 0


def other_models(cfg: Any, compute: int) -> float:
    """Bytes of frozen models other than --model."""
    reference, features = getattr(cfg, "reference", None), getattr(cfg, "features", None)
    trusts, total = cfg.model.trust_remote_code, 0.0
    if reference is not None and reference.ref_model is not None and reference.ref != "precomputed":
        total += compute * sizes_of(meta_model(reference.ref_model, trust_remote_code=trusts)).params
    if features is not None and features.feature_model is not None:
        total += compute * sizes_of(meta_model(features.feature_model, trust_remote_code=trusts)).params
    return total


def micro_batch_tokens(cfg: Any) -> int:
    """Tokens of the largest forward: the limit, one longer sequence, or a whole accumulation step."""
    limit, length = cfg.run.max_tokens_per_micro_batch, longest(cfg)
    if length is None:
        return limit
    return min(max(limit, length), sequences(cfg) * length)


def step_tokens(cfg: Any) -> float:
    """Most tokens of one accumulation step on this device, or on those that share its rows."""
    length = longest(cfg)
    return math.inf if length is None else sequences(cfg) * length


def sequences(cfg: Any) -> int:
    """Sequences of one accumulation step on this device, or on those that share its rows."""
    return cfg.run.per_device_train_batch_size * method_of(cfg).sequences * cfg.parallel.context


def longest(cfg: Any) -> int | None:
    """Tokens of the longest sequence that the settings allow, without unbounded prompts; None if there is no limit."""
    if getattr(cfg, "mode", None) == "strided":
        return None  # rows of continuations side by side
    if hasattr(cfg, "rollout"):
        return (cfg.max_prompt_length or 0) + cfg.max_completion_length
    return cfg.response.max_length if hasattr(cfg, "response") else getattr(cfg, "max_length", None)


def cached_tokens(cfg: Any) -> int:
    """Most tokens that the local engine holds at a time; 0 if it does not sample."""
    if not hasattr(cfg, "rollout") or cfg.rollout.engine != "local":
        return 0
    return completions(cfg) * (longest(cfg) or 0)


def completions(cfg: Any) -> int:
    """Completions that the local engine samples at a time."""
    return min(cfg.rollout.max_batch_size, cfg.run.sequences_per_step)


# out of memory ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Advice:
    """A flag and what it would save, in bytes."""

    flag: str
    saves: float
    remark: str = ""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether this error, or its cause, is torch's out-of-memory error."""
    torch = sys.modules.get("torch")  # without torch nothing was allocated
    while torch is not None and error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def out_of_memory(error: BaseException, cfg: Any) -> str:
    """The message, one flag per line. Never fails: without an estimate it only names the flags."""
    lines = [f"out of memory: {asked_for(error)}"]
    try:
        sizes = sizes_for(cfg)
        work = work_of(cfg, sizes)
        parts = at_peak(sizes, work) | {"cache": cache_bytes(sizes, work.compute, cached_tokens(cfg))}
        held = ", ".join(f"{name} {size / GIB:.3g}" for name, size in parts.items() if size)
        lines.append(f"  this run holds about, in GiB: {held}")
        given = advice(sizes, work, cfg)
        width = max(len(one.flag) for one in given)
        lines += [f"  {one.flag:<{width}}  saves about {one.saves / GIB:.3g} GiB{one.remark}" for one in given]
    except Exception as failure:  # the estimate must not hide the first line
        lines.append(f"  what would help cannot be estimated here ({type(failure).__name__}); try")
        lines.append("  --max-tokens-per-micro-batch 4096 or less, --gradient-checkpointing, --lora.r 16")
    lines.append("  checkpoints are complete: --resume continues from the last one, with these flags added")
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
    """What can be lowered in this run, the largest saving first."""

    def saves(**changed: Any) -> float:
        return peak(sizes, work) - peak(sizes, replace(work, **changed))

    found = []
    length, half = longest(cfg), work.tokens // 2
    if length is None or half >= length:
        less = saves(tokens=half, accumulates=True)
        while less <= 0 and half // 2 >= (length or 1):  # a second micro-batch keeps the gradients of the first
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
