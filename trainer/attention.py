"""How a model attends over a packed batch: dense masks anywhere, tile lists for flex attention on CUDA.

    choose_attention(model, "auto", device)                  # after loading it as load_name(...) says
    model(attention_mask=attention_masks(model.config, batch), ...)

Flex attention is registered with transformers under a name of its own, so models stay unpatched. Given anything but
tile lists that name is transformers' sdpa: the same model object still generates with its cache, as before.

Whatever flex attention cannot do is refused here or falls back to sdpa in the open, never silently.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from data.packing import Batch
from kernels.attention import TILE, Spans, block_mask, dense_mask, flex_attend, with_window

NAME = "strop"  # among transformers' attention implementations
UNSUPPORTED = ("softcap", "s_aux", "position_bias")  # what some architectures ask of their attention function


def load_name(choice: str, device: torch.device) -> str:
    """The implementation to load a model with, before choose_attention: one whose absence says what is wrong."""
    if choice == "flex" and device.type != "cuda":
        raise ValueError(
            f"attn_implementation=flex: needs a CUDA device, and this run is on {device.type}; leave it at auto"
        )
    return {"auto": "sdpa", "flex": "eager"}.get(choice, choice)


def choose_attention(model: Any, choice: str, device: torch.device) -> None:
    """Switch a loaded transformers model to flex attention where asked for, or (auto) where it can run."""
    if model.config._attn_implementation == "sdpa" and caps_scores(model):  # older transformers do not say so
        name = type(model).__name__
        raise ValueError(
            f"attn_implementation={choice}: {name} caps its attention scores, which sdpa leaves out; use eager"
        )
    if choice not in ("auto", "flex") or device.type != "cuda":
        return
    obstacle = flex_obstacle(model)
    if obstacle and choice == "flex":
        raise ValueError(f"attn_implementation=flex: {obstacle}; use auto or eager")
    if obstacle:
        _say_once(f"attention: sdpa with dense masks instead of flex, because {obstacle}")
    else:
        use_flex(model)


def flex_obstacle(model: Any) -> str | None:
    """Why flex attention cannot run this model; None when it can."""
    config, name = model.config.get_text_config(), type(model).__name__
    if not (model._supports_attention_backend and model._supports_flex_attn):
        return f"{name} does not take flex attention through transformers' interface"
    if caps_scores(model):
        return f"{name} caps its attention scores"
    if any(hasattr(module, "sinks") for module in model.modules()):
        return f"{name} has attention sinks"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # The last two are those of latent attention, where head_dim is only a part of what is multiplied.
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
    return config._attn_implementation == NAME


def row_multiple(config: Any) -> int:
    """Rows of a batch are filled up to a multiple of this: the kernels of flex attention work on whole tiles."""
    return TILE if uses_flex(config) else 1


def attention_masks(config: Any, batch: Batch) -> Any:
    """What transformers takes as attention_mask for a batch that is its own keys."""
    spans = Spans(batch.prefix_start, batch.prefix_stop, batch.own_start, batch.own_stop)
    return span_masks(config, spans, batch.own_start.shape[1])


def span_masks(config: Any, spans: Spans, num_keys: int) -> Any:
    """What transformers takes as attention_mask: one mask, or one per kind of layer where windows slide."""
    full = as_implementation_takes(config, spans, num_keys)
    window = getattr(config, "sliding_window", None)
    if window is None or not getattr(config, "use_sliding_window", True):
        return full
    sliding = as_implementation_takes(config, with_window(spans, window), num_keys)
    layer_types = getattr(config, "layer_types", None)
    return {"full_attention": full, "sliding_attention": sliding} if layer_types else sliding


def as_implementation_takes(config: Any, spans: Spans, num_keys: int) -> Tensor | BlockMask:
    """Eager attention adds the mask to its scores, where True would be a mere 1.0; sdpa takes booleans."""
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
    """An attention function of transformers: flex over tile lists, transformers' sdpa over anything else."""
    if not isinstance(attention_mask, BlockMask):
        sdpa = _transformers_sdpa()
        return sdpa(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    asked = [name for name in UNSUPPORTED if kwargs.get(name) is not None] + ["dropout"] * (dropout > 0)
    if asked:
        raise ValueError(f"{type(module).__name__}: flex attention here has no {asked[0]}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Under autocast norms and rotations may leave query and key in float32; sdpa would round them likewise.
    query, key = query.to(value.dtype), key.to(value.dtype)
    return _flex(query, key, value, attention_mask, scale).transpose(1, 2).contiguous(), None


@torch.compiler.disable(recursive=False)
def _flex(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float) -> Tensor:
    """Out of the graph of a compiled block, which would be compiled again for every mask; a graph of its own."""
    return flex_attend(query, key, value, mask, scale=scale)


@functools.cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, AttentionMaskInterface()["sdpa"])  # of calls that bring no mask of ours


@functools.cache
def _transformers_sdpa() -> Any:
    from transformers import AttentionInterface

    return AttentionInterface()["sdpa"]


@functools.cache
def _say_once(text: str) -> None:
    """A reference is loaded like the policy, and would say the same again."""
    print(text, file=sys.stderr, flush=True)
