"""Attention over a packed batch: dense masks with sdpa or eager, block masks with flex attention on CUDA.

    choose_attention(model, "auto", device)                  # after loading it with load_name(...)
    model(attention_mask=attention_masks(model.config, batch), ...)

Flex attention is registered with transformers under a separate name, so models stay unpatched. For any mask other than
a block mask that name runs transformers' sdpa, so the same model object can still generate with its cache. If flex
attention cannot run a model, `flex` is an error and `auto` falls back to sdpa with a log line.

With context parallelism (trainer/parallel/context.py) flex and sdpa have separate names, under which a layer first
gathers the keys and values of the whole row. Calls with a mask from transformers still compute whole rows.

Other layers carry state from token to token (linear attention, Mamba, convolutions):

    carried_state(config, model_class)                       # "linear_attention", "conv", ...; None: no such layers
    separate_convolutions(model)                             # once, after loading it
    model(**boundaries(batch, masks), ...)                   # one row of packed sequences

transformers passes the boundaries of sequences to these layers: `cu_seq_lens_q` to flash-linear-attention, `seq_idx` to
mamba-ssm and causal-conv1d. Without these packages it raises an error or, before 5.20, ignores the boundaries, which
check_logps() detects. Convolutions need no package, because their state spans only a few tokens.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from data.errors import UserError
from data.packing import Batch, to_device
from kernels.attention import TILE, Spans, block_mask, dense_mask, flex_attend, with_window
from trainer.parallel.comm import context_size
from trainer.parallel.context import BatchSlice, gather_row, slice_batch

NAME = "strop"  # flex attention's name among transformers' attention implementations
SLICED = {"sdpa": "strop_sliced_sdpa", NAME: "strop_sliced_flex"}  # names with context parallelism
UNSUPPORTED = ("softcap", "s_aux", "position_bias")  # arguments that some architectures pass to attention
STATEFUL = {"conv", "hybrid", "hybrid_sliding", "linear_attention", "mamba"}  # layer_types of recurrent models
CONVOLUTION = "causal_conv1d_fn"  # global function that transformers' layers call


def load_name(choice: str, device: torch.device, *, has_sdpa: bool = True) -> str:
    """Return the implementation to load a model with, before choose_attention."""
    if choice == "flex" and device.type != "cuda":
        raise UserError(f"attn_implementation=flex: needs a CUDA device but this run is on {device.type}; use auto")
    return {"auto": "sdpa" if has_sdpa else "eager", "flex": "eager"}.get(choice, choice)


def choose_attention(model: Any, choice: str, device: torch.device) -> None:
    """Switch a loaded transformers model to flex attention if `choice` is flex, or auto and flex can run the model."""
    _choose_kernel(model, choice, device)
    if context_size() > 1:
        use_sliced_attention(model)


def use_sliced_attention(model: Any) -> None:
    """Make the model compute slices of rows (context parallelism)."""
    kind, name = model.config._attn_implementation, type(model).__name__
    if kind not in SLICED:
        raise UserError(
            f"parallel.context={context_size()}: {name} uses {kind} attention, and context parallelism supports flex "
            "and sdpa; remove --parallel.context"
        )
    if rope_depends_on_length(model):
        raise UserError(
            f"parallel.context={context_size()}: the rotary frequencies of {name} depend on the row length, which a "
            "slice of the row does not contain; remove --parallel.context"
        )
    _register()
    model.set_attn_implementation(SLICED[kind])
    assert is_sliced(model.config), (name, model.config._attn_implementation)


def rope_depends_on_length(model: Any) -> bool:
    """Return whether rotary frequencies depend on the highest position in the input."""
    rope_types = [module.rope_type for module in model.modules() if hasattr(module, "rope_type")]
    kinds = [kind for each in rope_types for kind in (each.values() if isinstance(each, dict) else [each])]
    return any("dynamic" in kind or kind == "longrope" for kind in kinds)


def is_sliced(config: Any) -> bool:
    return config._attn_implementation in SLICED.values()


def rank_slice(config: Any, batch: Batch) -> BatchSlice:
    """Return this rank's slice of a micro-batch: all of it without context parallelism."""
    if context_size() == 1 or not is_sliced(config):
        return BatchSlice(batch, batch.input_ids.shape[1])
    return slice_batch(batch, multiple=TILE if uses_flex(config) else 2)


def _choose_kernel(model: Any, choice: str, device: torch.device) -> None:
    if model.config._attn_implementation == "sdpa" and caps_scores(model):  # older transformers do not raise
        name = type(model).__name__
        raise UserError(f"attn_implementation={choice}: {name} caps attention scores, which sdpa ignores; use eager")
    if choice == "auto" and model.config._attn_implementation == "eager":
        _log_once(f"attention: using eager: {type(model).__name__} does not support sdpa")
        return
    if choice not in ("auto", "flex") or device.type != "cuda":
        return
    obstacle = flex_obstacle(model)
    if obstacle and choice == "flex":
        raise UserError(f"attn_implementation=flex: {obstacle}; use auto or eager")
    if obstacle:
        _log_once(f"attention: using sdpa with dense masks instead of flex: {obstacle}")
    else:
        use_flex(model)


def flex_obstacle(model: Any) -> str | None:
    """Return why flex attention cannot run this model, or None."""
    config, name = model.config.get_text_config(), type(model).__name__
    if not (model._supports_attention_backend and model._supports_flex_attn):
        return f"{name} does not support flex attention through transformers' interface"
    if caps_scores(model):
        return f"{name} caps attention scores"
    if any(hasattr(module, "sinks") for module in model.modules()):
        return f"{name} has attention sinks"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # The last two are for latent attention, whose queries and keys are wider than head_dim.
    sizes = (head_dim, getattr(config, "qk_head_dim", None), getattr(config, "v_head_dim", None))
    wrong = [size for size in sizes if size and (size < 16 or size & (size - 1))]
    return f"head size {wrong[0]} is not a power of two of at least 16" if wrong else None


def caps_scores(model: Any) -> bool:
    return bool(getattr(model.config.get_text_config(), "attn_logit_softcapping", None))


def use_flex(model: Any) -> None:
    _register()
    model.set_attn_implementation(NAME)
    assert uses_flex(model.config), (type(model).__name__, model.config._attn_implementation)


def uses_flex(config: Any) -> bool:
    return config._attn_implementation in (NAME, SLICED[NAME])


def row_multiple(config: Any) -> int:
    """Return the multiple that row lengths are padded to: flex attention computes full tiles."""
    return TILE if uses_flex(config) else 1


def attention_masks(config: Any, batch: Batch, num_keys: int | None = None) -> Any:
    """Return transformers' attention_mask for a micro-batch. `num_keys`: keys of the whole row, for a slice."""
    spans = Spans(batch.prefix_start, batch.prefix_stop, batch.own_start, batch.own_stop)
    return span_masks(config, spans, num_keys or batch.own_start.shape[1])


def span_masks(config: Any, spans: Spans, num_keys: int) -> Any:
    """Return transformers' attention_mask: one mask, or one per layer type if some layers have a sliding window."""
    full, text = build_mask(config, spans, num_keys), config.get_text_config()
    window = getattr(text, "sliding_window", None)
    if window is None or not getattr(text, "use_sliding_window", True):
        return full
    sliding = build_mask(config, with_window(spans, window), num_keys)
    layer_types = getattr(text, "layer_types", None)
    return {"full_attention": full, "sliding_attention": sliding} if layer_types else sliding


def build_mask(config: Any, spans: Spans, num_keys: int) -> Tensor | BlockMask:
    """Build a block mask for flex, a bool mask for sdpa, or a float mask for eager, which adds it to the scores."""
    if uses_flex(config):
        return block_mask(spans, num_keys)
    mask = dense_mask(spans, num_keys)
    if config._attn_implementation != "eager":
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, torch.finfo(torch.float32).min)


def attend(
    module: torch.nn.Module,
    query: Tensor,  # (R, H, Q, K)
    key: Tensor,  # (R, H_kv, keys, K)
    value: Tensor,  # (R, H_kv, keys, K)
    attention_mask: Tensor | BlockMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # (R, Q, H, K)
    """Compute attention for transformers: flex for block masks, transformers' sdpa for other masks."""
    if not isinstance(attention_mask, BlockMask):
        sdpa = _transformers_sdpa()
        return sdpa(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    unsupported = [name for name in UNSUPPORTED if kwargs.get(name) is not None] + ["dropout"] * (dropout > 0)
    if unsupported:
        raise UserError(f"{type(module).__name__}: flex attention does not support {unsupported[0]}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Under autocast, norms and rotations may leave query and key in float32; sdpa would round them the same way.
    query, key = query.to(value.dtype), key.to(value.dtype)
    return flex_attend(query, key, value, attention_mask, scale=scale).transpose(1, 2).contiguous(), None


def attend_slice(
    module: torch.nn.Module,
    query: Tensor,  # (R, H, S, K)
    key: Tensor,  # (R, H_kv, S, K)
    value: Tensor,  # (R, H_kv, S, K)
    attention_mask: Tensor | BlockMask | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # (R, S, H, K)
    """Compute attention for a slice of the row. Only masks built for slices are wider than `key`."""
    if attention_mask is not None and attention_mask.shape[-1] != key.shape[2]:
        assert attention_mask.shape[-1] == key.shape[2] * context_size(), (attention_mask.shape, key.shape)
        key, value = gather_row(key, value)
    return attend(module, query, key, value, attention_mask, **kwargs)


# layers that carry state --------------------------------------------------------------------------------------------


def carried_state(config: Any, model_class: Any) -> str | None:
    """Return the kind of layers that carry state from one token to the next, or None."""
    layer_types = getattr(config.get_text_config(), "layer_types", None)
    kinds = sorted(STATEFUL.intersection(layer_types or ()))
    if kinds or layer_types is not None:
        return kinds[0] if kinds else None
    return "recurrent" if getattr(model_class, "_is_stateful", False) else None


def boundaries(batch: Batch, masks: Any) -> dict[str, Any]:
    """Return the model's arguments for one row of packed sequences. `masks`: for its attention layers."""
    assert len(batch.used) == 1 and batch.num_computed == batch.num_tokens, "one row without shared prompts"
    length, device = batch.input_ids.shape[1], batch.input_ids.device
    ends = list(itertools.accumulate(batch.lengths, initial=0))
    if ends[-1] < length:
        ends.append(length)  # padding is a sequence of its own
    if not isinstance(masks, dict):
        masks = {"full_attention": masks, "sliding_attention": masks}
    is_start = batch.own_start == torch.arange(length, device=device)
    return {
        "attention_mask": {**masks, **dict.fromkeys(STATEFUL)},
        "position_ids": batch.position_ids,
        "cu_seq_lens_q": to_device(torch.tensor(ends), device),  # (sequences + 1,)
        "seq_idx": is_start.cumsum(dim=1, dtype=torch.int32) - 1,  # (1, T)
    }


def separate_convolutions(lm: nn.Module) -> None:
    """Make the model's convolutions stop at boundaries, in the transformers file that defines its layers."""
    if find_spec("causal_conv1d") is not None:  # its kernel does
        return
    for name in {type(module).__module__ for module in lm.modules()}:
        code = vars(sys.modules[name])
        if CONVOLUTION in code and not hasattr(code[CONVOLUTION], "joined"):
            code[CONVOLUTION] = separated(code[CONVOLUTION])


def separated(convolution: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the convolution with an argument seq_idx, as in causal-conv1d. Other calls stay as they are."""

    @functools.wraps(convolution)
    def convolve(
        x: Tensor,  # (1, C, T)
        weight: Tensor,  # (C, K)
        *args: Any,
        seq_idx: Tensor | None = None,  # (1, T) int32, from 0
        cu_seq_lens_q: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:  # (1, C, T)
        if seq_idx is None:
            return convolution(x, weight, *args, **kwargs)
        num_gaps = int(seq_idx[0, -1]) if cu_seq_lens_q is None else len(cu_seq_lens_q) - 2
        gap = weight.shape[-1] - 1  # zeros between sequences, so that no output covers two of them
        place = torch.arange(x.shape[-1], device=x.device) + gap * seq_idx[0]
        apart = x.new_zeros(*x.shape[:-1], x.shape[-1] + gap * num_gaps).index_copy(2, place, x)
        return convolution(apart, weight, *args, **kwargs)[:, :, place]

    convolve.joined = convolution  # type: ignore[attr-defined]
    return convolve


@functools.cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    for name, function in {NAME: attend, **dict.fromkeys(SLICED.values(), attend_slice)}.items():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, AttentionMaskInterface()["sdpa"])  # for calls with other masks


@functools.cache
def _transformers_sdpa() -> Any:
    from transformers import AttentionInterface

    return AttentionInterface()["sdpa"]


@functools.cache
def _log_once(text: str) -> None:
    """Log once per process: the reference is loaded like the policy and would repeat the line."""
    print(text, file=sys.stderr, flush=True)
