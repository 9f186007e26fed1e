"""Run a model over the paged KV cache of the in-process engine. Two implementations share one interface.

    forward = BlockForward(lm, dtype)            # Llama-like blocks, on a copy of the weights with fused matmuls
    forward = TransformersForward(lm, dtype)     # any other model: its transformers forward with paged attention
    forward.refresh()                            # copy the trainer's current weights
    logits = forward.decode(token, position, slot, rows, cache)      # one token per row -> (B, V)
    hidden = forward.prefill(batch, cache)                           # many tokens per row

Each layer caches keys and values (H_kv, S, K). A slot is an index into S. Page 0 is scratch: padding writes to it. Both
implementations first write the new keys and values into their slots and then attend through the cache.

Layers with a state (linear attention, Mamba, short convolutions) keep one of a fixed size per sequence. Entry r of the
state tensors belongs to decode row r, which updates it in place; entry `rows` stays zero, the state before any token;
later entries are states after prompts, which the scheduler copies to the rows that share a prompt. Padding would change
a state, so all rows of a prefill have the same number of tokens.

Shapes: B = decode rows, T = tokens per row, N = tokens per pass, H = heads, K = head size, S = cache slots.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.attention import TILE, block_mask, dense_attend, flex_attend
from kernels.decode import linear as few_rows
from kernels.decode.attention import Rows, decode_attention, plan_step, supports
from kernels.decode.block import add_rms_norm, rotate_append, silu_mul
from kernels.decode.linear import Adapters
from kernels.decode.lora import add_adapters
from kernels.nf4 import Linear4bit
from rollout.routes import RouteShape, recording, stack
from rollout.state_layers import STATEFUL, carried_state

NAME = "strop_paged"  # key in transformers' attention registry
MASK = 2**26  # booleans of a dense mask; more queries are split
JOINT_TOKENS = 8192  # per float32 product in prefill: 1 GB for the gate and up layers of an 8B model
ATTENTION = {"full_attention", "sliding_attention", "hybrid"}  # hybrid: attention and a state


class Shape(NamedTuple):
    """Dimensions of a model's KV cache."""

    layers: tuple[int, ...]  # indices of the layers with attention
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        return 2 * len(self.layers) * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class StateShape(NamedTuple):
    """One state of one layer, for one sequence."""

    size: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize


class Cache:
    """Keys and values of all attention layers, where page 0 is scratch; and states of all sequences."""

    def __init__(
        self, shape: Shape, num_pages: int, page: int, *, states: Sequence[StateShape] = (), rows: int = 0,
        num_prefixes: int = 0,
    ) -> None:  # fmt: skip
        self.shape, self.num_pages, self.page = shape, num_pages, page
        self.zero = rows  # index of the zero state
        size = (shape.num_kv_heads, num_pages * page, shape.head_dim)
        # Zeros, because masked slots are read with weight 0, and 0 times NaN is NaN.
        options = {"dtype": shape.dtype, "device": shape.device}
        self.keys = {layer: torch.zeros(size, **options) for layer in shape.layers}
        self.values = {layer: torch.zeros(size, **options) for layer in shape.layers}
        num_states = rows + 1 + num_prefixes
        self.states = [torch.zeros(num_states, *x.size, dtype=x.dtype, device=shape.device) for x in states]


class PrefillBatch(NamedTuple):
    """New tokens of several rows, padded on the right with slot 0."""

    ids: Tensor  # (R, T) int64
    position: Tensor  # (R, T) int32
    slot: Tensor  # (R, T) int64
    index: Tensor  # (R, L) int64 slots of all tokens of a row, cached and new; padded with 0; L = T + longest cached
    fresh: bool  # no tokens were cached before, so L = T and the mask is causal
    source: Tensor | None = None  # (R,) int64 states to start from; None: zero states, and the new ones are dropped
    target: Tensor | None = None  # (R,) int64 states to write


class Forward(Protocol):
    shape: Shape
    states: Sequence[StateShape]  # empty for models with attention only
    in_place: bool  # uses the trainer's weights directly
    scale: float  # logit scale, applied before softcap
    softcap: float | None
    route_shape: RouteShape | None  # None: routes are not recorded
    routes: Tensor | None  # (N, L, k) experts chosen in the last pass

    def cover(self, length: int) -> bool:
        """Prepare for sequences of this length; return False if any tensor was reallocated."""

    def refresh(self) -> bool:
        """Copy the trainer's current weights; return False if addresses changed, which invalidates CUDA graphs."""

    def decode(
        self,
        token: Tensor,  # (B,) int64
        position: Tensor,  # (B,) int32
        slot: Tensor,  # (B,) int64
        rows: Rows,
        cache: Cache,
    ) -> Tensor:  # (B, V)
        """Run one token per row and return the next token's logits."""

    def prefill(self, batch: PrefillBatch, cache: Cache) -> Tensor:  # (R, T, D) or (R * T, D)
        """Write the keys and values of these tokens to the cache; return their last hidden states."""

    def logits(
        self,
        hidden: Tensor,  # (..., D)
    ) -> Tensor:  # (..., V)
        """Apply the head."""


def shape_of(lm: Any, dtype: torch.dtype) -> Shape:
    config = lm.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None) or 1  # None: no attention
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return Shape(
        tuple(layer for layer, kind in enumerate(kinds) if kind in ATTENTION),
        getattr(config, "num_key_value_heads", None) or heads,
        # Latent attention: keys are wider than values, and head_dim is the size of their rotated part.
        getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype,
        device_of(lm),
    )


def device_of(lm: nn.Module) -> torch.device:
    """Return the device that computes: shards may be in main memory (--parallel.cpu-offload)."""
    parameter = next(lm.parameters())
    if is_sharded(parameter) and parameter.device_mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return parameter.device


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def unchanged(tensor: Tensor) -> Tensor:
    return tensor


def windows_of(lm: Any) -> list[int | None]:
    """Return the sliding window of each layer, as in training (trainer/policy/attention.py)."""
    config = lm.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if window is None or not getattr(config, "use_sliding_window", True):
        return [None] * config.num_hidden_layers
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in types]


def logit_options(config: Any) -> tuple[float, float | None]:
    """Return the logit scale and cap of some architectures; xLSTM has another name for the cap."""
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    caps = (getattr(config, name, None) for name in ("final_logit_softcapping", "output_logit_soft_cap"))
    return scale, next(filter(None, caps), None)


def plan_layers(windows: Sequence[int | None], num_heads: int, rows: Rows, cache: Cache) -> dict[int | None, Any]:
    """Plan attention for each window, before the step's first layer (see kernels/decode/launch.py)."""
    keys = {windows[layer]: keys for layer, keys in cache.keys.items()}
    return {w: plan_step(keys[w], rows, num_heads=num_heads, page=cache.page, window=w) for w in keys}


def attend_prefill(
    query: Tensor,  # (R, H, T, K)
    keys: Tensor,  # (H_kv, S, K)
    values: Tensor,  # (H_kv, S, K)
    batch: PrefillBatch,
    *,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # (H,)
) -> Tensor:  # (R, T, H, K)
    """Attend from new tokens to all earlier tokens, gathered from the cache."""
    rows, length = batch.index.shape
    flat = batch.index.flatten()
    key, value = (x.index_select(1, flat).unflatten(1, (rows, length)).transpose(0, 1) for x in (keys, values))
    query = query.to(key.dtype)
    special = softcap is not None or sinks is not None  # scaled_dot_product_attention has neither
    if special and query.is_cuda:
        return _flex_prefill(query, key, value, batch.position, window, scale=scale, softcap=softcap, sinks=sinks)
    if batch.fresh and (window is None or window >= length) and not special:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2)
    if not special and _has_flash(query):
        return _flash_prefill(query, key, value, batch.position, window, scale=scale)
    if query.is_cuda and not special:
        # With a mask and fewer key heads torch would materialize all scores in float32.
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    key_position, outs = torch.arange(length, device=query.device), []
    size = max(1, MASK // (rows * length))  # queries per mask
    for part, position in zip(query.split(size, dim=2), batch.position.split(size, dim=1), strict=True):
        mask = key_position <= position[:, :, None]  # (R, queries, L)
        if window is not None:
            mask = mask & (key_position > position[:, :, None] - window)
        mask = mask.unsqueeze(1)
        if special:
            outs.append(dense_attend(part, key, value, mask, scale=scale, softcap=softcap, sinks=sinks))
        else:
            outs.append(F.scaled_dot_product_attention(part, key, value, attn_mask=mask, scale=scale, enable_gqa=True))
    return torch.cat(outs, dim=2).transpose(1, 2)


def _has_flash(query: Tensor) -> bool:
    is_half = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    return is_half and query.shape[3] % 8 == 0 and torch.cuda.get_device_capability(query.device) >= (8, 0)


def _flash_prefill(
    query: Tensor, key: Tensor, value: Tensor, position: Tensor, window: int | None, *, scale: float
) -> Tensor:  # (R, T, H, K)
    """Attend without a mask: flash attention aligns the last of T queries with the last of the keys that it uses.

    A row uses `start + T` keys. Padding queries thus see padding keys, which are on the scratch page.
    """
    (rows, _, num_queries, _), num_keys = query.shape, key.shape[2]
    count = torch.arange(rows + 1, dtype=torch.int32, device=query.device)
    used = position[:, 0].int() + num_queries
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # (tokens, heads, K)
    out = torch.ops.aten._flash_attention_forward(
        query, key, value, count * num_queries, count * num_keys, num_queries, num_keys, 0.0, True, False,
        scale=scale, window_size_left=-1 if window is None else window - 1, window_size_right=0, seqused_k=used,
    )[0]  # fmt: skip
    return out.unflatten(0, (rows, num_queries))


def _flex_prefill(
    query: Tensor, key: Tensor, value: Tensor, position: Tensor, window: int | None, **options: Any
) -> Tensor:  # (R, T, H, K)
    """Run flex attention over whole tiles: a padding query sees the first key, and no query sees a padding key."""
    num_queries = query.shape[2]
    query, key, value = (F.pad(x, (0, 0, 0, -x.shape[2] % TILE)) for x in (query, key, value))
    stop = F.pad(position.long(), (0, -num_queries % TILE)) + 1  # (R, queries)
    zero = torch.zeros_like(stop)
    start = zero if window is None else (stop - window).clamp(min=0)
    mask = block_mask((zero, zero, start, stop), key.shape[2])
    return flex_attend(query, key, value, mask, **options)[:, :, :num_queries].transpose(1, 2)


# Copies of the trainer's weights.


class FusedLinear(NamedTuple):
    """Linear layers of the same input, with their LoRA adapters (kernels/decode/lora.py).

    Adapters are not merged into the weights: in bfloat16, most of a small adapter would be rounded away.
    """

    weight: Tensor  # (O + R', D) the weights, and A of the adapters
    bias: Tensor | None  # (O,)
    adapters: Adapters | None

    def __call__(self, x: Tensor, *, gated: bool = False) -> Tensor:  # (N, D) -> (N, O); gated: (N, O / 2)
        if self.adapters is None:
            out = F.linear(x, self.weight, self.bias)
            return silu_mul(out) if gated else out
        if len(x) > JOINT_TOKENS:
            return torch.cat([self(part, gated=gated) for part in x.split(JOINT_TOKENS)])
        up, scale = self.adapters.up, self.adapters.scale
        return add_adapters(float32_product(x, self.weight), self.bias, up, scale, gated=gated)

    def parts(self, x: Tensor) -> Tensor:  # (N, D) -> (N, O), or (P, N, O) parts that the next kernel sums
        if few_rows.fits(x, self.weight, self.adapters):
            return few_rows.linear(x, self.weight, self.bias, self.adapters)
        return self(x)

    def gated(self, x: Tensor) -> Tensor:  # (N, D) -> (N, O / 2)
        if few_rows.fits(x, self.weight, self.adapters):
            return few_rows.gated_linear(x, self.weight, self.adapters)
        return self(x, gated=True)


def float32_product(
    x: Tensor,  # (N, D)
    weight: Tensor,  # (O, D)
) -> Tensor:  # (N, O) float32, or the dtype of x if it is wider
    if x.dtype != torch.bfloat16:
        return F.linear(x, weight)
    return torch.mm(x, weight.T, out_dtype=torch.float32) if x.is_cuda else F.linear(x.float(), weight.float())


class AdaptedLinear(nn.Module):
    """Replaces a linear layer that has an adapter, in a copy of a transformers model."""

    def __init__(self, linear: FusedLinear) -> None:
        super().__init__()
        self.linear, self.bias, self.out_features = linear, linear.bias, len(linear.adapters.up)
        self.weight = linear.weight[: self.out_features]  # not a parameter: Copies fills it

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class Copies:
    """Copies of the trainer's current weights at fixed addresses."""

    def __init__(self, dtype: torch.dtype, device: torch.device, gather: Callable[[Tensor], Tensor]) -> None:
        self.dtype, self.device, self.gather = dtype, device, gather
        self.parts: list[tuple[Tensor, nn.Module, str]] = []  # (target, module, parameter name)
        self.scales: list[tuple[Tensor, Any, str]] = []  # (target, module with adapters, adapter name)

    def allocate(self, module: nn.Module, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate a tensor for the module's weight."""
        weight = torch.empty(base_of(module).weight.shape, dtype=dtype or self.dtype, device=self.device)
        self.parts.append((weight, module, "weight"))
        return weight

    def linear(self, *modules: Any) -> FusedLinear:
        """Allocate one linear layer for several of the same input."""
        layers, adapters = [base_of(module) for module in modules], [adapter_of(module) for module in modules]
        ranks = [0 if name is None else module.r[name] for module, name in zip(modules, adapters, strict=True)]
        width, rank, zeros = sum(x.out_features for x in layers), sum(ranks), partial(torch.zeros, device=self.device)
        num_low = -(-rank // 64) * 64  # 128 bytes in bfloat16: rows of the product stay aligned
        weight = zeros(width + num_low, layers[0].in_features, dtype=self.dtype)
        bias = zeros(width, dtype=self.dtype) if any(x.bias is not None for x in layers) else None
        up, scale = zeros(width, -(-rank // 16) * 16, dtype=self.dtype), zeros(width, dtype=torch.float32)
        first = zeros(width, dtype=torch.int32)
        row, column = 0, 0
        for module, layer, name, r in zip(modules, layers, adapters, ranks, strict=True):
            own, low = slice(row, row + layer.out_features), width + column
            self.parts.append((weight[own], module, "weight"))
            if layer.bias is not None:
                self.parts.append((bias[own], module, "bias"))
            if name is not None:
                self.parts.append((weight[low : low + r], module.lora_A[name], "weight"))
                self.parts.append((up[own, column : column + r], module.lora_B[name], "weight"))
                self.scales.append((scale[own], module, name))
                first[own] = column
            row, column = own.stop, column + r
        tile = math.gcd(*(x.out_features for x in layers))
        return FusedLinear(weight, bias, Adapters(up, scale, first, max(ranks), tile) if rank else None)

    @torch.no_grad()
    def refresh(self) -> None:
        for target, module, name in self.parts:
            target.copy_(current(module, name, target.dtype, self.gather))
        for target, module, adapter in self.scales:
            target.fill_(0.0 if module.disable_adapters else module.scaling[adapter])


# Models that support transformers' AttentionInterface.


class TransformersForward:
    """The model's transformers forward with paged attention, on the trainer's weights or (copied) a copy in `dtype`.

    If the trained weights are float32 or there are adapters, a copy avoids rounding every weight for every token.
    """

    def __init__(
        self, lm: Any, dtype: torch.dtype, *, autocast_dtype: torch.dtype | None = None, copied: bool = False,
        gather: Callable[[Tensor], Tensor] = unchanged,  # returns the full tensor of a shard, on all ranks
        records_routes: bool = False,
    ) -> None:  # fmt: skip
        self.route_shape, self.routes = RouteShape(lm) if records_routes else None, None
        self.shape, self.windows = shape_of(lm, dtype), windows_of(lm)
        self._copies = Copies(dtype, self.shape.device, gather) if copied else None
        self.lm, self.in_place = lm if self._copies is None else empty_copy(lm, self._copies), not copied
        config = lm.config.get_text_config()
        self.scale, self.softcap = logit_options(config)
        self.num_heads = getattr(config, "num_attention_heads", None) or 1  # None: no attention
        self.autocast_dtype = None if copied else autocast_dtype
        if copied and widen in lm.get_input_embeddings()._forward_hooks.values():  # only with Llama blocks
            self.lm.get_input_embeddings().register_forward_hook(widen)
            for module in (x for name, x in self.lm.named_modules() if name.endswith("norm")):
                module.register_forward_hook(lambda module, args, out: out.to(dtype))  # the linear layers' input
        self._addresses: list[int] = []
        self._mixers = [module for module in self.lm.modules() if has_time_step_limit(module)]
        self._past: Any = None  # transformers cache that passes the states to the model; None: no states
        self._states: list[tuple[dict[int, Tensor], int]] = []  # entries of _past to replace by a pass's states
        _register()

    def cover(self, length: int) -> bool:
        return True  # the model computes its rotary embeddings itself

    def refresh(self) -> bool:
        if self._copies is None:
            before, self._addresses = self._addresses, [parameter.data_ptr() for parameter in self.lm.parameters()]
            return before == self._addresses
        self._copies.refresh()
        return True

    def decode(
        self,
        token: Tensor,  # (B,) int64
        position: Tensor,  # (B,) int32
        slot: Tensor,  # (B,) int64
        rows: Rows,
        cache: Cache,
    ) -> Tensor:  # (B, V)
        plans = plan_layers(self.windows, self.num_heads, rows, cache)

        def attend(layer: int, query: Tensor, **options: Any) -> Tensor:  # (B, 1, H, K)
            window = self.windows[layer]
            out = decode_attention(
                query[:, :, 0], cache.keys[layer], cache.values[layer], rows,
                page=cache.page, window=window, plan=plans[window], **options,
            )  # fmt: skip
            return out.unsqueeze(1)

        states = [state[: len(token)] for state in cache.states]
        return self.logits(self._run(token[:, None], position[:, None], slot, cache, attend, states)[:, 0])

    def logits(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None):
            return self.lm.get_output_embeddings()(hidden)

    def prefill(self, batch: PrefillBatch, cache: Cache) -> Tensor:
        def attend(layer: int, query: Tensor, **options: Any) -> Tensor:  # (R, T, H, K)
            keys, values, window = cache.keys[layer], cache.values[layer], self.windows[layer]
            return attend_prefill(query, keys, values, batch, window=window, **options)

        rows = batch.source if batch.source is not None else torch.full_like(batch.slot[:, 0], cache.zero)
        states = [state.index_select(0, rows) for state in cache.states]
        hidden = self._run(batch.ids, batch.position, batch.slot.flatten(), cache, attend, states)
        if batch.target is not None:
            for state, new in zip(cache.states, states, strict=True):
                state.index_copy_(0, batch.target, new)
        return hidden

    def _run(
        self, ids: Tensor, position: Tensor, slot: Tensor, cache: Cache, attend: Callable[..., Tensor],
        states: Sequence[Tensor],
    ) -> Tensor:  # (R, T, D)  # fmt: skip
        """Run the model; it updates the states in place."""
        layers: list[int] = []

        def append_and_attend(layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
            layers.append(layer)
            width = value.shape[-1]
            if width < key.shape[-1]:
                value = F.pad(value, (0, key.shape[-1] - width))
            for cached, new in ((cache.keys[layer], key), (cache.values[layer], value)):  # new: (R, H_kv, T, K)
                cached.index_copy_(1, slot, new.transpose(0, 1).flatten(1, 2).to(cached.dtype))
            return attend(layer, query.to(cache.keys[layer].dtype), **options)[..., :width]

        for (entries, index), state in zip(self._states, states, strict=True):
            entries[index] = state
        hidden = self._call(ids, position, append_and_attend)
        if layers != [*self.shape.layers]:
            raise ValueError(f"layers {layers} called its attention, not layers {[*self.shape.layers]}")
        return hidden

    def _call(self, ids: Tensor, position: Tensor, attend: Callable[..., Tensor]) -> Tensor:  # (R, T, D)
        options = {"use_cache": False} if self._past is None else {"use_cache": True, self._cache_name: self._past}
        with (
            self._paged_attention(attend),
            limited_time_steps(self._mixers),
            torch.autocast(ids.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None),
        ):
            model, passed = self.lm.base_model, {"input_ids": ids, "position_ids": position.long(), **options}
            if self.route_shape is None:
                return model(**passed).last_hidden_state
            with recording(self.lm) as chosen:
                hidden = model(**passed).last_hidden_state
            self.routes = stack(chosen, self.route_shape.num_experts)
            return hidden

    @functools.cached_property
    def states(self) -> Sequence[StateShape]:
        """Run one token in evaluation mode, so that transformers allocates states. Later passes replace them."""
        if carried_state(self.lm.config, type(self.lm)) is None:
            return ()
        from transformers import DynamicCache

        is_mamba = "cache_params" in inspect.signature(self.lm.base_model.forward).parameters  # without attention
        self._cache_name = "cache_params" if is_mamba else "past_key_values"
        self._past = DynamicCache(config=self.lm.config.get_text_config())
        self._past.update = lambda key, value, *_, **__: (key, value)  # attention appends to the paged cache itself
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=self.shape.device)

        def run(num_tokens: int) -> None:
            ids = tokens[:, :num_tokens]
            with torch.no_grad():
                self._call(ids, ids, lambda layer, query, *_, **__: torch.zeros_like(query.transpose(1, 2)))

        run(1)
        shapes = []
        for layer in self._past.layers:
            for name in ("conv_states", "recurrent_states"):
                for index, state in getattr(layer, name, {}).items():
                    if state is not None:
                        # Recurrent states add up many tokens. Some models would round them to bfloat16 at each.
                        least = torch.float32 if name == "recurrent_states" else state.dtype
                        shapes.append(StateShape(tuple(state.shape[1:]), torch.promote_types(state.dtype, least)))
                        self._states.append((getattr(layer, name), index))
        if not shapes:
            raise ValueError("its layers put no states into a transformers cache")
        ends = []
        for start in (0.0, 1e30):  # large, so that a fast decay does not hide the state
            for (entries, index), shape in zip(self._states, shapes, strict=True):
                entries[index] = torch.zeros(1, *shape.size, dtype=shape.dtype, device=tokens.device)
            recurrent = [pair for layer in self._past.layers for pair in recurrent_of(layer)]
            for entries, index in recurrent:
                entries[index].fill_(start)
            run(2)
            ends.append([entries[index] for entries, index in recurrent])
        if any(torch.equal(a, b) for a, b in zip(*ends, strict=True)):  # Mamba-1 in transformers 5.22
            raise ValueError("its layers ignore the state before several tokens")
        return shapes

    @contextmanager
    def _paged_attention(self, attend: Callable[..., Tensor]) -> Iterator[None]:
        """Context manager: make the model call `attend` in every attention layer."""
        global _attend
        config = self.lm.config
        before, config._attn_implementation, _attend = config._attn_implementation, NAME, attend
        try:
            yield
        finally:
            config._attn_implementation, _attend = before, None


_attend: Callable[..., Tensor] | None = None  # set during a pass


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Context manager: disable torch.compile. With a cache, each layer and each new shape would recompile."""
    compiled = [m for m in model.modules() if hasattr(vars(m).get("forward"), "_torchdynamo_orig_callable")]
    forwards = [vars(module).pop("forward") for module in compiled]
    try:
        yield
    finally:
        for module, forward in zip(compiled, forwards, strict=True):
            module.forward = forward


def recurrent_of(layer: Any) -> list[tuple[dict[int, Tensor], int]]:
    """Return a transformers cache layer's recurrent states, as (dict, key) pairs."""
    entries = getattr(layer, "recurrent_states", {})
    return [(entries, index) for index, state in entries.items() if state is not None]


def has_time_step_limit(module: nn.Module) -> bool:
    return tuple(getattr(module, "time_step_limit", None) or (0.0, math.inf)) != (0.0, math.inf)


@contextmanager
def limited_time_steps(mixers: Sequence[nn.Module]) -> Iterator[None]:
    """Context manager: apply the limit of Mamba-2's time step in decode steps too.

    transformers (5.17 to 5.22) applies it to many tokens, as in training, but not to a single token with a state.
    """
    if not mixers:
        yield
        return
    module, (low, high) = sys.modules[type(mixers[0]).__module__], mixers[0].time_step_limit
    update = module.mamba2_selective_state_update

    def limited(state: Tensor, x: Tensor, dt: Tensor, *args: Any, dt_bias: Tensor, **options: Any) -> Tensor:
        dt = F.softplus(dt + dt_bias.to(dt.dtype)).clamp(low, high)
        return update(state, x, dt, *args, **options | {"dt_softplus": False})

    module.mamba2_selective_state_update = limited
    try:
        yield
    finally:
        module.mamba2_selective_state_update = update


def empty_copy(lm: Any, copies: Copies) -> Any:
    """Return an uninitialized model of the same class; `copies` fills it."""
    with torch.device("meta"):
        copy = type(lm)(lm.config).to(copies.dtype)
    for name, parameter in copy.named_parameters():
        if name.rpartition(".")[2] in ("A_log", "D", "dt_bias"):  # decay rates of states are computed in float32
            parameter.data = parameter.data.to(lm.get_parameter(name).dtype)
    copy.to_empty(device=copies.device)
    for name, buffer in copy.named_buffers():
        path, _, leaf = name.rpartition(".")
        source = getattr(base_of(lm.get_submodule(path)), leaf)
        copy.get_submodule(path)._buffers[leaf] = source.clone()  # keeps its dtype: rotary frequencies are float32
        assert source.shape == buffer.shape, f"{name}: {source.shape}, {buffer.shape}"
    copy.tie_weights()
    for name, module in lm.named_modules():
        if adapter_of(module) is not None:
            copy.set_submodule(name, AdaptedLinear(copies.linear(module)))
    copies.parts += parts_of(copy, lm)
    return copy.eval().requires_grad_(False)


def widen(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    """Forward hook of the embeddings, in trainer and copies, that keeps the residual stream in float32."""
    return out.float()


def parts_of(copy: nn.Module, source: nn.Module) -> list[tuple[Tensor, nn.Module, str]]:
    """Return a copied module's parameters with the trainer's modules and names."""
    names = [(parameter, *name.rpartition(".")[::2]) for name, parameter in copy.named_parameters()]
    return [(parameter, source.get_submodule(path), leaf) for parameter, path, leaf in names]


def _attend_module(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention function in the form that transformers registers."""
    assert _attend is not None, f"{NAME} attention called outside the in-process engine"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _attend(module.layer_idx, query, key, value, scale=scale, softcap=softcap, sinks=s_aux), None


@functools.cache
def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attend_module)  # without a mask function, so transformers builds no masks


# Llama-like models: fewer, larger kernels.


BLOCK_MODELS = ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "seed_oss", "cwm")  # config.model_type


class Block(NamedTuple):
    """Weights of one block in the compute dtype; norms are float32."""

    norm_1: Tensor  # (D,)
    qkv: FusedLinear  # D -> (H + 2 H_kv) K
    q_norm: Tensor | None  # (K,)
    k_norm: Tensor | None  # (K,)
    out: FusedLinear  # H K -> D
    norm_2: Tensor  # (D,)
    gate_up: FusedLinear | None  # D -> 2 I
    down: FusedLinear | None  # I -> D
    experts: nn.Module | None  # the model's own module, instead of gate_up and down


class BlockForward:
    """Forward of Llama, Qwen2, Qwen3, Mistral and models of the same structure (block_obstacle defines it).

    Runs on a persistent copy of the weights: q, k and v are one matmul, gate and up another, each with the adapters of
    its layers. The residual stream is float32, as in training under autocast.
    """

    in_place, states = False, ()

    def __init__(
        self, lm: Any, dtype: torch.dtype, *, gather: Callable[[Tensor], Tensor] = unchanged,
        records_routes: bool = False,
    ) -> None:  # fmt: skip
        assert block_obstacle(lm) is None, block_obstacle(lm)
        self.route_shape, self.routes = RouteShape(lm) if records_routes else None, None
        self.lm, self.shape, self.windows = lm, shape_of(lm, dtype), windows_of(lm)
        config = lm.config.get_text_config()
        self.scale, self.softcap = logit_options(config)
        self.num_heads, self.eps = config.num_attention_heads, config.rms_norm_eps
        self.attention_scale = lm.base_model.layers[0].self_attn.scaling
        self.cos = self.sin = torch.empty(0)  # (positions, K) float32; cover() extends them
        self._copies, base = Copies(dtype, self.shape.device, gather), lm.base_model
        self.embedding = self._copies.allocate(base.embed_tokens)
        head = lm.get_output_embeddings().weight
        tied = head is base.embed_tokens.weight
        tied |= is_sharded(head) and config.tie_word_embeddings  # FSDP may have gathered the embeddings
        self.head = self.embedding if tied else self._copies.allocate(lm.get_output_embeddings())
        self.norm = self._copies.allocate(base.norm, torch.float32)
        self.blocks = [self._block(layer) for layer in base.layers]
        self.experts = nn.ModuleList(block.experts for block in self.blocks if block.experts is not None)

    def cover(self, length: int) -> bool:
        if length <= len(self.cos):
            return True
        device = self.shape.device
        position = torch.arange(1 << (length - 1).bit_length(), device=device)[None]
        cos, sin = self.lm.base_model.rotary_emb(torch.zeros(1, dtype=torch.float32, device=device), position)
        self.cos, self.sin = cos[0].contiguous(), sin[0].contiguous()
        return False

    def _block(self, layer: Any) -> Block:
        attention, mlp, linear = layer.self_attn, layer.mlp, self._copies.linear
        norm = partial(self._copies.allocate, dtype=torch.float32)
        has_norms, is_routed = hasattr(attention, "q_norm"), hasattr(mlp, "experts")
        return Block(
            norm_1=norm(layer.input_layernorm),
            qkv=linear(attention.q_proj, attention.k_proj, attention.v_proj),
            q_norm=norm(attention.q_norm) if has_norms else None,
            k_norm=norm(attention.k_norm) if has_norms else None,
            out=linear(attention.o_proj),
            norm_2=norm(layer.post_attention_layernorm),
            gate_up=None if is_routed else linear(mlp.gate_proj, mlp.up_proj),
            down=None if is_routed else linear(mlp.down_proj),
            experts=self._copy_module(mlp) if is_routed else None,
        )

    def _copy_module(self, module: nn.Module) -> nn.Module:
        """Return an uninitialized copy without adapters; refresh() fills it."""
        with torch.device("meta"):
            copy = type(module)(self.lm.config.get_text_config()).to(self.shape.dtype)
        copy.to_empty(device=self.shape.device).eval().requires_grad_(False)
        self._copies.parts += parts_of(copy, module)
        return copy

    def refresh(self) -> bool:
        self._copies.refresh()
        return True

    def decode(
        self,
        token: Tensor,  # (B,) int64
        position: Tensor,  # (B,) int32
        slot: Tensor,  # (B,) int64
        rows: Rows,
        cache: Cache,
    ) -> Tensor:  # (B, V)
        plans = plan_layers(self.windows, self.num_heads, rows, cache)

        def attend(layer: int, query: Tensor) -> Tensor:  # (B, H, K)
            window = self.windows[layer]
            return decode_attention(
                query, cache.keys[layer], cache.values[layer], rows,
                page=cache.page, scale=self.attention_scale, window=window, plan=plans[window],
            )  # fmt: skip

        return self.logits(self._run(token, position, slot, cache, attend))

    def logits(self, hidden: Tensor) -> Tensor:
        return float32_product(hidden, self.head)  # rounding logits to bfloat16 would change the distribution

    def prefill(self, batch: PrefillBatch, cache: Cache) -> Tensor:
        shape = batch.ids.shape

        def attend(layer: int, query: Tensor) -> Tensor:  # (R * T, H, K)
            query = query.unflatten(0, shape).transpose(1, 2)
            keys, values, window = cache.keys[layer], cache.values[layer], self.windows[layer]
            out = attend_prefill(query, keys, values, batch, scale=self.attention_scale, window=window)
            return out.flatten(0, 1)

        return self._run(batch.ids.flatten(), batch.position.flatten(), batch.slot.flatten(), cache, attend)

    def _run(
        self, ids: Tensor, position: Tensor, slot: Tensor, cache: Cache, attend: Callable[[int, Tensor], Tensor]
    ) -> Tensor:  # (N, D)
        if self.route_shape is None:
            return self._run_blocks(ids, position, slot, cache, attend)
        with recording(self.experts) as chosen:
            hidden = self._run_blocks(ids, position, slot, cache, attend)
        self.routes = stack(chosen, self.route_shape.num_experts)
        return hidden

    def _run_blocks(
        self, ids: Tensor, position: Tensor, slot: Tensor, cache: Cache, attend: Callable[[int, Tensor], Tensor]
    ) -> Tensor:  # (N, D)
        stream, delta, dtype = F.embedding(ids, self.embedding).float(), None, self.shape.dtype
        for layer, block in enumerate(self.blocks):
            normed = add_rms_norm(stream, delta, block.norm_1, self.eps, dtype)
            query = rotate_append(
                block.qkv.parts(normed), self.cos, self.sin, position, slot,
                cache.keys[layer], cache.values[layer],
                num_heads=self.num_heads, q_weight=block.q_norm, k_weight=block.k_norm, eps=self.eps,
            )  # fmt: skip
            delta = block.out.parts(attend(layer, query).flatten(1))
            normed = add_rms_norm(stream, delta, block.norm_2, self.eps, dtype)
            if block.experts is not None:
                delta = block.experts(normed[None])[0]
            else:
                delta = block.down.parts(block.gate_up.gated(normed))
        return add_rms_norm(stream, delta, self.norm, self.eps, dtype)


def paged_obstacle(lm: Any, *, needs_kernels: bool) -> str | None:
    """Return why this model cannot use the paged cache, or None if it can. Log-probs are also compared."""
    config, state = lm.config.get_text_config(), carried_state(lm.config, type(lm))
    if state is not None and state not in STATEFUL:
        return f"it has {state} layers"
    # transformers sets the flag for few models with states. All passes check that attention uses the interface.
    if not getattr(lm, "_supports_attention_backend", False) and state is None:
        return "its attention does not go through transformers' interface"
    kinds = set(getattr(config, "layer_types", None) or ()) - ATTENTION - STATEFUL - {"moe", "mlp"}
    if kinds:
        return f"it has layers of type {sorted(kinds)[0]}"
    head_dim = shape_of(lm, torch.float32).head_dim
    if needs_kernels and not supports(head_dim):
        return f"the kernel does not support heads of size {head_dim}"
    return None


def base_of(module: nn.Module) -> Any:
    """Return the layer without its peft adapters, which wrap experts once per adapted parameter."""
    return base_of(module.base_layer) if hasattr(module, "base_layer") else module


def current(module: Any, name: str, dtype: torch.dtype, gather: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the trainer's current parameter. A 4-bit weight is dequantised; a shard is gathered in `dtype`.

    Adapters of experts are added to it unless disabled: peft adds them to the weight for every pass, in its dtype, so
    the trainer rounds them as well. peft wraps experts once per adapted parameter.
    """
    changes = []
    while hasattr(module, "base_layer"):
        if getattr(module, "parameter_name", None) == name and not module.disable_adapters:
            changes += [module.get_delta_weight(x).detach() for x in module.active_adapters if x in module.lora_A]
        module = module.base_layer
    parameter = getattr(module, name).detach()
    parameter = gather(parameter.to(dtype) if is_sharded(parameter) and not changes else parameter)
    for change in changes:
        parameter = parameter.float() + gather(change).float()
    return parameter


def block_obstacle(lm: Any) -> str | None:
    """Return why BlockForward cannot run this model, or None. Log-probs are also compared, on short prompts only."""
    base, config = lm.base_model, lm.config.get_text_config()
    if config.model_type not in BLOCK_MODELS:  # other types combine the same modules differently
        return f"model type {config.model_type} is not known to have Llama blocks"
    if {name for name, _ in base.named_children()} != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return "its modules are not an embedding, blocks, a norm and rotary embeddings"
    if getattr(config, "hidden_act", None) != "silu" or not hasattr(config, "rms_norm_eps"):
        return "its activation is not SiLU or its norm is not RMSNorm"
    rope_type = getattr(base.rotary_emb, "rope_type", None)
    if not isinstance(rope_type, str) or "dynamic" in rope_type or rope_type == "longrope":
        return "its rotary embeddings depend on the sequence length"
    head = lm.get_output_embeddings()
    if (
        getattr(head, "bias", None) is not None
        or hasattr(head, "base_layer")
        or hasattr(base.embed_tokens, "base_layer")
    ):
        return "its head has a bias or an adapter"
    head_dim = shape_of(lm, torch.float32).head_dim
    for layer in base.layers:
        if {name for name, _ in layer.named_children()} != {
            "self_attn", "mlp", "input_layernorm", "post_attention_layernorm",
        }:  # fmt: skip
            return "its blocks contain other modules"
        attention, mlp = layer.self_attn, layer.mlp
        names = {name for name, _ in attention.named_children()}
        if not {"q_proj", "k_proj", "v_proj", "o_proj"} <= names <= {
            "q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm",
        }:  # fmt: skip
            return "its attention contains other modules"
        children = {name: child for name, child in mlp.named_children() if name != "act_fn"}
        if children.keys() not in ({"gate_proj", "up_proj", "down_proj"}, {"gate", "experts"}):
            return "its MLPs have other layers"
        dense = [] if "experts" in children else [*children.values()]
        if any(base_of(x).bias is not None for x in dense):
            return "its MLPs have biases"
        if "q_norm" in names and attention.q_norm.weight.shape != (head_dim,):
            return "its query norm spans all heads"
        linear = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj, *dense)
        if not all(type(base_of(module)) in LINEAR for module in linear) or adapters_obstacle(layer) is not None:
            return "it has other linear layers or adapters"
    return None


LINEAR = (nn.Linear, Linear4bit)


def adapter_of(module: Any) -> str | None:
    """Return the name of a linear layer's active adapter, or None. Only without adapters_obstacle()."""
    if not hasattr(module, "lora_A") or hasattr(module, "parameter_name"):  # the latter are experts: see current()
        return None
    return next((name for name in module.active_adapters if name in module.lora_A), None)


def adapters_obstacle(lm: nn.Module) -> str | None:
    """Return why a copy cannot compute the adapters, or None if it can."""
    for name, module in lm.named_modules():
        active = module.active_adapters if hasattr(module, "base_layer") else ()
        if not all(is_plain_lora(module, adapter) for adapter in active):
            return f"the adapter of {name} is not plain LoRA"
        if adapter_of(module) is not None:
            if type(module.base_layer) not in LINEAR or sum(adapter in module.lora_A for adapter in active) > 1:
                return f"{name} is not linear or has several active adapters"
    return None


def is_plain_lora(module: Any, adapter: str) -> bool:
    """True if the adapter adds scaling * B A (no bias, DoRA or embedding), or does not apply to this module."""
    if adapter not in getattr(module, "lora_A", {}):
        return adapter not in getattr(module, "lora_embedding_A", {})
    has_variant = adapter in getattr(module, "lora_variant", {})
    return not has_variant and getattr(module.lora_B[adapter], "bias", None) is None
