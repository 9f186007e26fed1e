"""Attention over a packed batch: dense masks with sdpa or eager, block masks with flex attention on CUDA.

    choose_attention(model, "auto", device)                  # after loading it with load_name(...)
    model(attention_mask=attention_masks(model.config, batch), ...)

Flex attention is registered with transformers under a separate name, so models stay unpatched. For any mask other than
a block mask that name runs transformers' sdpa, or `dense_attend` for capped scores and sinks, so the same model object
can still generate with its cache. `flash` is flex attention with FlashAttention 4 instead of Triton's kernels. If flex
attention cannot run a model, `flex` and `flash` are errors and `auto` falls back to sdpa (or eager, if the model has no
sdpa) with a log line.

With context parallelism (trainer/parallel/context.py) flex and sdpa have separate names, under which a layer first
gathers the keys and values of the whole row. Calls with a mask from transformers still compute whole rows.
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
from kernels.attention import (
    TILE,
    Spans,
    block_mask,
    dense_attend,
    dense_mask,
    flash_obstacle,
    flex_attend,
    use_flash,
    with_window,
)
from kernels.exact import exact_attention
from trainer.parallel.comm import context_size
from trainer.parallel.context import BatchSlice, gather_row, slice_batch
from trainer.parallel.watch import log

NAME = "strop"  # flex attention's name among transformers' attention implementations
EXACT = "strop_exact"  # the name with --exact-sampling
INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # in a file of transformers whose attention layers look up the implementation
SLICED = {"sdpa": "strop_sliced_sdpa", NAME: "strop_sliced_flex"}  # names with context parallelism
_log_once = functools.cache(log)  # the reference is loaded like the policy and would repeat the line


def load_name(choice: str, device: torch.device, *, has_sdpa: bool = True) -> str:
    """Return the implementation to load a model with, before choose_attention."""
    if choice in ("flex", "flash") and device.type != "cuda":
        raise UserError(f"attn_implementation={choice}: needs a CUDA device but this run is on {device.type}; use auto")
    return {"auto": "sdpa" if has_sdpa else "eager", "flex": "eager", "flash": "eager"}.get(choice, choice)


def choose_attention(model: Any, choice: str, device: torch.device) -> None:
    """Switch a loaded model to flex attention if `choice` is flex or flash, or auto and flex can run the model."""
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
    if model.config._attn_implementation == "sdpa" and caps_scores(model):  # older transformers load it
        name = type(model).__name__
        if choice == "sdpa":
            raise UserError(f"attn_implementation=sdpa: {name} caps attention scores, which sdpa ignores; use eager")
        model.set_attn_implementation("eager")
    dense = model.config._attn_implementation
    if choice in ("auto", "flex", "flash") and device.type == "cuda":
        obstacle = flex_obstacle(model) or (flash_obstacle(_head_dim(model)) if choice == "flash" else None)
        if obstacle and choice != "auto":
            raise UserError(f"attn_implementation={choice}: {obstacle}; use auto or eager")
        if obstacle:
            _log_once(f"attention: using {dense} with dense masks instead of flex: {obstacle}")
        else:
            use_flex(model)
            use_flash(choice == "flash")
            if choice == "flash":
                _log_once("attention: FlashAttention 4; Triton's kernels for float32, sinks and trees of episodes")
    elif choice == "auto" and dense == "eager":
        _log_once(f"attention: using eager: {type(model).__name__} does not support sdpa")


def flex_obstacle(model: Any) -> str | None:
    """Return why flex attention cannot run this model, or None."""
    config, name = model.config.get_text_config(), type(model).__name__
    # Recurrent models do not declare it, although the attention layers of most use the interface.
    is_declared = model._supports_attention_backend and model._supports_flex_attn
    if not is_declared and not (model._is_stateful and hasattr(sys.modules[type(model).__module__], INTERFACE)):
        return f"{name} does not support flex attention through transformers' interface"
    # The last two are for latent attention, whose queries and keys are wider than head_dim.
    sizes = (_head_dim(model), getattr(config, "qk_head_dim", None), getattr(config, "v_head_dim", None))
    small = [size for size in sizes if size and size < 16]
    return f"head size {small[0]} is less than 16" if small else None


def _head_dim(model: Any) -> int:
    config = model.config.get_text_config()
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def caps_scores(model: Any) -> bool:
    return bool(getattr(model.config.get_text_config(), "attn_logit_softcapping", None))


def use_flex(model: Any) -> None:
    _register()
    model.set_attn_implementation(NAME)
    assert uses_flex(model.config), (type(model).__name__, model.config._attn_implementation)


def uses_flex(config: Any) -> bool:
    """Return whether the masks are block masks."""
    return config._attn_implementation in (NAME, SLICED[NAME], EXACT)


def use_exact(model: Any) -> None:
    """Make training attend as the in-process engine does, bit for bit (kernels/exact.py)."""
    _register()
    model.set_attn_implementation(EXACT)


def is_exact(config: Any) -> bool:
    return config._attn_implementation == EXACT


def row_multiple(config: Any) -> int:
    """Return the multiple that row lengths are padded to: flex attention computes full tiles."""
    return TILE if uses_flex(config) else 1


def attention_masks(config: Any, batch: Batch, num_keys: int | None = None) -> Any:
    """Return transformers' attention_mask for a micro-batch. `num_keys`: keys of the whole row, for a slice.

    Block masks are kept with the batch, so that all passes of a step share them: policy, reference and old log-probs.
    Dense masks are rebuilt, because they are large.
    """
    built = vars(batch).setdefault("block_masks", {}) if uses_flex(config) else {}
    return span_masks(config, batch.spans, num_keys or batch.input_ids.shape[1], built)


def span_masks(config: Any, spans: Spans, num_keys: int, built: dict[Any, Any] | None = None) -> Any:
    """Return transformers' attention_mask: one mask, or one per layer type if some layers have a sliding window.

    `built`: masks of these spans by keys and window, which are reused and added to.
    """
    text, built = config.get_text_config(), {} if built is None else built

    def mask(window: int | None) -> Tensor | BlockMask:
        if (num_keys, window) not in built:
            visible = spans if window is None else with_window(spans, window)
            built[num_keys, window] = build_mask(config, visible, num_keys)
        return built[num_keys, window]

    window = getattr(text, "sliding_window", None)
    if window is None or not getattr(text, "use_sliding_window", True):
        return mask(None)
    if not getattr(text, "layer_types", None):
        return mask(window)
    return {"full_attention": mask(None), "sliding_attention": mask(window)}


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
    """Compute attention for transformers: flex for block masks, transformers' sdpa or dense_attend for other masks."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = {"softcap": kwargs.get("softcap"), "sinks": kwargs.get("s_aux")}
    if isinstance(attention_mask, BlockMask):
        unsupported = ["dropout"] * (dropout > 0) + ["position_bias"] * (kwargs.get("position_bias") is not None)
        if unsupported:
            raise UserError(f"{type(module).__name__}: flex attention does not support {unsupported[0]}")
        # Under autocast, norms and rotations may leave query and key in float32; sdpa would round them the same way.
        query, key = query.to(value.dtype), key.to(value.dtype)
        out = flex_attend(query, key, value, attention_mask, scale=scale, **options)
    elif options == {"softcap": None, "sinks": None}:
        sdpa = _transformers_sdpa()
        return sdpa(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    else:
        out = dense_attend(query, key, value, attention_mask, scale=scale, **options)
    return out.transpose(1, 2).contiguous(), None


def attend_exact(
    module: torch.nn.Module,
    query: Tensor,  # (R, H, T, K)
    key: Tensor,  # (R, H_kv, T, K)
    value: Tensor,  # (R, H_kv, T, K)
    attention_mask: Tensor | BlockMask | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # (R, T, H, K)
    """Compute attention in a fixed order, for block masks; log-probs of the engine's checks have other masks."""
    if not isinstance(attention_mask, BlockMask):
        return attend(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = exact_attention(query.to(value.dtype), key.to(value.dtype), value, attention_mask, scale=scale)
    return out.transpose(1, 2).contiguous(), None


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


@functools.cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    for name, function in {NAME: attend, EXACT: attend_exact, **dict.fromkeys(SLICED.values(), attend_slice)}.items():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, AttentionMaskInterface()["sdpa"])  # for calls with other masks


@functools.cache
def _transformers_sdpa() -> Any:
    from transformers import AttentionInterface

    return AttentionInterface()["sdpa"]
