"""Attention over a packed batch: dense masks with sdpa or eager, block masks with flex attention on CUDA.

    choose_attention(model, "auto", device)                  # after loading it with load_name(...)
    model(attention_mask=attention_masks(model.config, batch), ...)

Flex attention is registered with transformers under its own name, so models stay unpatched. With any mask but a block
mask that name means transformers' sdpa, so the same model object can still generate with its cache. What flex attention
cannot do is refused, or falls back to sdpa with a log line.

With context parallelism (trainer/parallel/context.py) both have another name, under which a layer first gathers the
keys and values of the whole row. Calls without one of our masks still compute whole rows.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from data.errors import UserError
from data.packing import Batch
from kernels.attention import TILE, Spans, block_mask, dense_mask, flex_attend, with_window
from trainer.parallel.comm import context_size
from trainer.parallel.context import Part, slice_of, whole_row

NAME = "strop"  # our name among transformers' attention implementations
SLICED = {"sdpa": "strop_sliced_sdpa", NAME: "strop_sliced_flex"}  # the same with context parallelism
UNSUPPORTED = ("softcap", "s_aux", "position_bias")  # arguments that some architectures pass to attention


def load_name(choice: str, device: torch.device) -> str:
    """The implementation to load a model with, before choose_attention."""
    if choice == "flex" and device.type != "cuda":
        raise UserError(
            f"attn_implementation=flex: needs a CUDA device, and this run is on {device.type}; leave it at auto"
        )
    return {"auto": "sdpa", "flex": "eager"}.get(choice, choice)


def choose_attention(model: Any, choice: str, device: torch.device) -> None:
    """Switch a loaded transformers model to flex attention if asked for, or (auto) if it can run."""
    _choose_kernel(model, choice, device)
    if context_size() > 1:
        use_slices(model)


def use_slices(model: Any) -> None:
    """Let the model compute slices of rows (context parallelism)."""
    kind, name = model.config._attn_implementation, type(model).__name__
    if kind not in SLICED:
        raise UserError(
            f"parallel.context={context_size()}: {name} runs with {kind} attention, and processes share rows with "
            "flex or sdpa only; leave it out"
        )
    if turns_by_length(model):
        raise UserError(
            f"parallel.context={context_size()}: {name} turns positions by how long the row is, which a slice of it "
            "does not show; leave it out"
        )
    _register()
    model.set_attn_implementation(SLICED[kind])
    assert is_sliced(model.config), (type(model).__name__, model.config._attn_implementation)


def turns_by_length(model: Any) -> bool:
    """Whether rotary frequencies depend on the highest position in the input."""
    found = [module.rope_type for module in model.modules() if hasattr(module, "rope_type")]
    kinds = [kind for each in found for kind in (each.values() if isinstance(each, dict) else [each])]
    return any("dynamic" in kind or kind == "longrope" for kind in kinds)


def is_sliced(config: Any) -> bool:
    return config._attn_implementation in SLICED.values()


def part_of(config: Any, batch: Batch) -> Part:
    """This rank's part of a batch."""
    if context_size() == 1 or not is_sliced(config):
        return Part(batch, batch.input_ids.shape[1])
    return slice_of(batch, multiple=TILE if uses_flex(config) else 2)


def _choose_kernel(model: Any, choice: str, device: torch.device) -> None:
    if model.config._attn_implementation == "sdpa" and caps_scores(model):  # older transformers do not say so
        name = type(model).__name__
        raise UserError(
            f"attn_implementation={choice}: {name} caps its attention scores, which sdpa leaves out; use eager"
        )
    if choice not in ("auto", "flex") or device.type != "cuda":
        return
    obstacle = flex_obstacle(model)
    if obstacle and choice == "flex":
        raise UserError(f"attn_implementation=flex: {obstacle}; use auto or eager")
    if obstacle:
        _log_once(f"attention: sdpa with dense masks instead of flex, because {obstacle}")
    else:
        use_flex(model)


def flex_obstacle(model: Any) -> str | None:
    """Why flex attention cannot run this model; None if it can."""
    config, name = model.config.get_text_config(), type(model).__name__
    if not (model._supports_attention_backend and model._supports_flex_attn):
        return f"{name} does not take flex attention through transformers' interface"
    if caps_scores(model):
        return f"{name} caps its attention scores"
    if any(hasattr(module, "sinks") for module in model.modules()):
        return f"{name} has attention sinks"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # The last two are for latent attention, where head_dim is only a part of the query and key size.
    sizes = (head_dim, getattr(config, "qk_head_dim", None), getattr(config, "v_head_dim", None))
    wrong = [size for size in sizes if size and (size < 16 or size & (size - 1))]
    return f"heads of size {wrong[0]} are not a power of two from 16 up" if wrong else None


def caps_scores(model: Any) -> bool:
    return bool(getattr(model.config.get_text_config(), "attn_logit_softcapping", None))


def use_flex(model: Any) -> None:
    _register()
    model.set_attn_implementation(NAME)
    assert uses_flex(model.config), (type(model).__name__, model.config._attn_implementation)


def uses_flex(config: Any) -> bool:
    return config._attn_implementation in (NAME, SLICED[NAME])


def row_multiple(config: Any) -> int:
    """Rows of a batch are padded to a multiple of this: flex attention works on whole tiles."""
    return TILE if uses_flex(config) else 1


def attention_masks(config: Any, batch: Batch, num_keys: int | None = None) -> Any:
    """attention_mask of transformers for a batch; num_keys: keys of the whole row, for a slice of it."""
    spans = Spans(batch.prefix_start, batch.prefix_stop, batch.own_start, batch.own_stop)
    return span_masks(config, spans, num_keys or batch.own_start.shape[1])


def span_masks(config: Any, spans: Spans, num_keys: int) -> Any:
    """attention_mask of transformers: one mask, or one per layer type if some layers have a sliding window."""
    full, text = as_implementation_takes(config, spans, num_keys), config.get_text_config()
    window = getattr(text, "sliding_window", None)
    if window is None or not getattr(text, "use_sliding_window", True):
        return full
    sliding = as_implementation_takes(config, with_window(spans, window), num_keys)
    layer_types = getattr(text, "layer_types", None)
    return {"full_attention": full, "sliding_attention": sliding} if layer_types else sliding


def as_implementation_takes(config: Any, spans: Spans, num_keys: int) -> Tensor | BlockMask:
    """A block mask for flex, booleans for sdpa, and floats for eager, which adds the mask to its scores."""
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
    """An attention function of transformers: flex for block masks, transformers' sdpa for other masks."""
    if not isinstance(attention_mask, BlockMask):
        sdpa = _transformers_sdpa()
        return sdpa(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    asked = {name: kwargs.get(name) for name in UNSUPPORTED}
    return _flex(type(module).__name__, query, key, value, attention_mask, dropout, scaling, asked), None


def _flex(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    dropout: float,
    scaling: float | None,
    asked: dict[str, Any],
) -> Tensor:  # (R, Q, H, K)
    refused = [what for what, value in asked.items() if value is not None] + ["dropout"] * (dropout > 0)
    if refused:
        raise UserError(f"{name}: flex attention here has no {refused[0]}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Under autocast norms and rotations may leave query and key in float32; sdpa would round them the same way.
    query, key = query.to(value.dtype), key.to(value.dtype)
    return flex_attend(query, key, value, mask, scale=scale).transpose(1, 2).contiguous()


def attend_slice(
    module: torch.nn.Module,
    query: Tensor,  # (R, H, S, K)
    key: Tensor,  # (R, H_kv, S, K)
    value: Tensor,  # (R, H_kv, S, K)
    attention_mask: Tensor | BlockMask | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # (R, S, H, K)
    """The same for a slice of the row; only our masks of slices are wider than the keys given."""
    if attention_mask is not None and attention_mask.shape[-1] != key.shape[2]:
        assert attention_mask.shape[-1] == key.shape[2] * context_size(), (attention_mask.shape, key.shape)
        key, value = whole_row(key, value)
    return attend(module, query, key, value, attention_mask, **kwargs)


@functools.cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    for name, function in {NAME: attend, **dict.fromkeys(SLICED.values(), attend_slice)}.items():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, AttentionMaskInterface()["sdpa"])  # for calls without one of our masks


@functools.cache
def _transformers_sdpa() -> Any:
    from transformers import AttentionInterface

    return AttentionInterface()["sdpa"]


@functools.cache
def _log_once(text: str) -> None:
    """Once per process: a reference is loaded like the policy and would repeat the line."""
    print(text, file=sys.stderr, flush=True)
