"""Attention over packed rows, with the mask given as a few runs of keys per query.

Packed documents, a prompt shared by many completions, a tree of conversations and the strided layout of energy-based
fine-tuning have the same form. A query sees runs of keys before its own sequence (the shared prompt; may be empty) and
a run within it:

    visible(q, k) = prefix_start[q] <= k < prefix_stop[q]  or  own_start[q] <= k < own_stop[q]

A mask is therefore four integers per query (more in a tree, with two for each run on the path to its root), one kernel
serves all layouts, and a sliding window keeps the form. There are two implementations:
- `dense_mask`: (R, 1, Q, K) booleans for scaled_dot_product_attention, or for `dense_attend`, which also has capped
  scores and sinks. Works on every device, with a backward; O(Q K) memory.
- `block_mask` and `flex_attend`: flex_attention, CUDA only. Difference arrays turn the runs into tile lists in
  O(R (Q + Q K / 128^2)) time; memory stays O(Q). One compiled graph serves every length and every mask with as many
  runs. Its kernels are Triton's, or after `use_flash` those of FlashAttention 4 (the package flash-attn-4).

Both cap scores (softcap * tanh(score / softcap), as Gemma 2 does) and have sinks: a learned logit per head that joins
the softmax as one more key with a value of 0 (gpt-oss).

Shapes: R = packed rows, Q = queries, K = keys; in `flex_attend` and `dense_attend` H = heads and K = head size, as
everywhere else.
"""

from __future__ import annotations

import functools
import importlib.util
import operator
import threading
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

TILE = 128  # flex_attention's default sparse block size, which its kernels are tuned for
FLASH_SIZES = (64, 128)  # head sizes for which FlashAttention 4 has Hopper kernels with 128 x 128 tiles
MAX_GRAPHS = 64  # Dynamo graphs per function


# Keys visible to each query, (R, Q) int64 each: start and stop of the prefix runs, then of the own run. Runs are
# half-open and ascending, never overlap, and are not all empty; empty ones come first. Causal self-attention over a row
# has own_stop = q + 1. Padding attends to padding, because a softmax over no keys is NaN.
Spans = tuple[Tensor, ...]  # (prefix_start, prefix_stop, own_start, own_stop), or more prefix runs


def with_window(spans: Spans, window: int) -> Spans:
    """Return the spans of a sliding-window layer: each query keeps the last `window` visible keys, including itself.

    Position ids continue from the prefix into the own run, so these are exactly the keys less than `window` back.
    """
    if window < 1:
        raise ValueError(f"window={window}: must be at least 1")
    bounds, left = list(spans), torch.full_like(spans[-1], window)  # left: keys within the window, before later runs
    for i in range(len(spans) - 2, -1, -2):
        start, stop = spans[i : i + 2]
        bounds[i] = torch.maximum(start, stop - left)
        left = (left - (stop - start)).clamp(min=0)
    return tuple(bounds)


def dense_mask(spans: Spans, num_keys: int) -> Tensor:  # (R, 1, Q, K) bool, True = visible
    """Return the mask for scaled_dot_product_attention."""
    key = torch.arange(num_keys, device=spans[0].device)
    return _visible(spans, (slice(None), slice(None), None), key).unsqueeze(1)


def _visible(spans: Spans, at: tuple[Any, ...], key: Tensor) -> Tensor:
    """Return whether the queries at this index see these keys."""
    runs = [(start[at] <= key) & (key < stop[at]) for start, stop in zip(spans[::2], spans[1::2], strict=True)]
    return functools.reduce(operator.or_, runs)


def dense_attend(
    query: Tensor,  # (R, H, Q, K)
    key: Tensor,  # (R, H_kv, keys, K); H a multiple of H_kv
    value: Tensor,  # (R, H_kv, keys, K)
    mask: Tensor | None,  # (R, 1, Q, keys) bool, True = visible; None: causal, the last query sees all keys
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # (H,)
) -> Tensor:  # (R, H, Q, K)
    """Attend with capped scores and sinks, in float32 or wider, on any device; stores the (Q, keys) scores."""
    wide, groups = torch.promote_types(query.dtype, torch.float32), query.shape[1] // key.shape[1]
    if mask is None:
        size = (query.shape[2], key.shape[2])
        mask = torch.ones(size, dtype=torch.bool, device=query.device).tril(size[1] - size[0])
    with torch.autocast(query.device.type, enabled=False):
        wide_query, *pair = (x.to(wide) for x in (query, key, value))
        wide_key, wide_value = (x.repeat_interleave(groups, dim=1) for x in pair)
        scores = scale * (wide_query @ wide_key.transpose(2, 3))  # (R, H, Q, keys)
        scores = _capped(scores, softcap)
        # Finite, because a padding query may see no keys.
        scores = scores.masked_fill(~mask, torch.finfo(wide).min)
        out = scores.softmax(dim=-1) @ wide_value
        out = out if sinks is None else _with_sinks(out, scores.logsumexp(dim=-1), sinks)
    return out.to(value.dtype)


def _capped(score: Tensor, softcap: float | None) -> Tensor:
    return score if softcap is None else softcap * torch.tanh(score / softcap)


def _with_sinks(
    out: Tensor,  # (R, H, Q, K) attention without sinks
    lse: Tensor,  # (R, H, Q) log-sum-exp of its scores
    sinks: Tensor,  # (H,)
) -> Tensor:  # (R, H, Q, K)
    """Return the attention with sinks: exp(lse) / (exp(lse) + exp(sink)) of the weight stays on the keys."""
    return (out * torch.sigmoid(lse - sinks.to(lse.dtype)[:, None]).unsqueeze(-1)).to(out.dtype)


class SpanMask:
    """flex_attention mask_mod for `spans`. int32 halves the bytes that the kernel loads.

    An object rather than a closure, so that it is compared by identity and `flex_attend` can read its spans.
    """

    def __init__(self, spans: Spans) -> None:
        self.spans = tuple(bound.to(torch.int32).contiguous() for bound in spans)

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:  # all (): row, head, query, key
        return _visible(self.spans, (b, q), k)


def block_mask(spans: Spans, num_keys: int) -> BlockMask:  # shape (R, 1, Q, K)
    """Build the mask for `flex_attend`, with exact lists of full and partial 128 x 128 tiles; no host sync.

    Build it outside inference mode, and share it between layers.
    """
    assert not torch.is_inference_mode_enabled(), "a mask built in inference mode cannot be saved for backward"
    starts, stops = list(spans[::2]), list(spans[1::2])
    for i in range(len(starts) - 1, 0, -1):
        # Merge adjacent runs: a tile across the boundary is full although neither run covers it.
        meet = stops[i - 1] == starts[i]
        stops[i - 1] = torch.where(meet, stops[i], stops[i - 1])
        starts[i] = torch.where(meet, stops[i], starts[i])
    start, stop = torch.stack(starts), torch.stack(stops)  # (runs, R, Q)

    num_queries = start.shape[2]
    tiles = (-(-num_queries // TILE), -(-num_keys // TILE))
    # A run sees the tiles from its first key to its last, and covers the tiles entirely within it.
    seen_from, seen_to = start // TILE, torch.where(start < stop, (stop + TILE - 1) // TILE, 0)
    covered_from, covered_to = (start + TILE - 1) // TILE, stop // TILE
    # For each tile, the number of queries that see any of its keys, and the number that see all 128 keys.
    counts = _count(torch.stack([seen_from, covered_from]), torch.stack([seen_to, covered_to]), tiles)
    seen, covered = counts.sum(dim=1)  # sum over the runs
    full = covered == TILE
    partial = (seen > 0) & ~full
    chosen = torch.stack([partial, full]).unsqueeze(2)  # (2, R, 1, Q/128, K/128)
    lists = [*_tile_lists(chosen), *_tile_lists(chosen.transpose(-1, -2).contiguous())]
    return BlockMask(
        seq_lengths=(num_queries, num_keys), **dict(zip(_LISTS, lists, strict=True)), BLOCK_SIZE=(TILE, TILE),
        mask_mod=SpanMask(spans),
    )  # fmt: skip


def _count(
    first: Tensor,  # (..., R, Q)
    stop: Tensor,  # (..., R, Q)
    tiles: tuple[int, int],  # Q/128, K/128
) -> Tensor:  # (..., R, Q/128, K/128) int32
    """Count, for each tile, the queries whose run [first, stop) of key tiles contains this key tile."""
    height, width = tiles
    device = first.device
    row = torch.arange(first.shape[:-1].numel(), device=device).view(*first.shape[:-1], 1) * height
    row_start = (row + torch.arange(first.shape[-1], device=device) // TILE) * (width + 1)  # flat index
    is_nonempty = (first < stop).to(torch.int32).flatten()
    steps = torch.zeros(*first.shape[:-1], height, width + 1, dtype=torch.int32, device=device)
    steps.view(-1).scatter_add_(0, (row_start + first.clamp(max=width)).flatten(), is_nonempty)
    steps.view(-1).scatter_add_(0, (row_start + stop.clamp(max=width)).flatten(), -is_nonempty)
    return steps.cumsum(dim=-1, dtype=torch.int32)[..., :width]


def _tile_lists(
    chosen: Tensor,  # (2, R, 1, A, B) bool, contiguous
) -> list[Tensor]:  # (R, 1, A), (R, 1, A, B), (R, 1, A), (R, 1, A, B) int32
    """Return the number of chosen tiles per tile row and the tile indices, chosen tiles first, for both masks.

    The tensors do not share memory, because the compiler copies an input that is not 16-byte aligned.
    """
    chosen = chosen.to(torch.int32)
    order = chosen.argsort(dim=-1, descending=True, stable=True)
    lists = []
    for i in range(2):
        lists += [chosen[i].sum(dim=-1, dtype=torch.int32), order[i].to(torch.int32)]
    return lists


_LISTS = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
)  # fmt: skip


def flex_attend(
    query: Tensor,  # (R, H, Q, K)
    key: Tensor,  # (R, H_kv, keys, K); H a multiple of H_kv
    value: Tensor,  # (R, H_kv, keys, K)
    block_mask: BlockMask,  # shape (R, 1, Q, keys), from `block_mask`
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # (H,)
) -> Tensor:  # (R, H, Q, K)
    """softmax(scale * query @ key.T where visible) @ value, forward and backward, without the (Q, keys) scores.

    Compiled at the first call. New head sizes, dtypes, grad modes and numbers of runs recompile; new lengths and masks
    do not. Raises if compilation is off or fails, because uncompiled flex_attention silently runs dense.
    """
    spans = block_mask.mask_mod.spans
    options = (spans, [getattr(block_mask, name) for name in _LISTS], scale, softcap)
    flash = _flash_is_on and len(spans) == 4 and can_flash(query, value, sinks)  # untested for trees
    if torch.compiler.is_compiling():  # inside the graph of a block, which must not read the mask's lengths
        return _attend(query, key, value, *options, sinks, flash)
    if query.device.type != "cuda":
        raise ValueError(f"query.device={query.device}: flex_attend needs CUDA; use dense_mask with sdpa")
    rows, _, num_queries, _ = query.shape
    num_keys = key.shape[2]
    if num_queries % TILE or num_keys % TILE:
        raise ValueError(f"lengths={num_queries, num_keys}: must be multiples of {TILE}; pad queries and keys")
    if tuple(block_mask.shape) != (rows, 1, num_queries, num_keys):
        shape = tuple(block_mask.shape)
        raise ValueError(f"block_mask.shape={shape}: expected {(rows, 1, num_queries, num_keys)}")
    # The compiled kernel depends on which inputs require gradients, and its rounding changes. All inputs require one
    # here, so a no-grad pass gives the same bits as a training pass with the same weights.
    inputs = [query, key, value] if sinks is None else [query, key, value, sinks]
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    inputs = [x if x.requires_grad else x.detach().requires_grad_() for x in inputs]
    share_graphs()
    with torch.enable_grad():
        out = _compiled()(*inputs[:3], *options, None if sinks is None else inputs[3], flash)
    return out if differentiable else out.detach()


# FlashAttention 4 ------------------------------------------------------------------------------------------------

_flash_is_on = False


def use_flash(on: bool) -> None:
    """Choose FlashAttention 4 for the calls of flex_attend that it can compute, in this process."""
    global _flash_is_on
    _flash_is_on = on


def can_flash(
    query: Tensor,  # (R, H, Q, K)
    value: Tensor,  # (R, H_kv, keys, K)
    sinks: Tensor | None,  # (H,)
) -> bool:
    """Return whether FlashAttention 4 has kernels for these inputs. Sinks need the gradient of the log-sum-exp."""
    is_low = query.dtype in (torch.bfloat16, torch.float16)
    return is_low and sinks is None and query.shape[3] == value.shape[3] and query.shape[3] in FLASH_SIZES


def flash_obstacle(head_dim: int) -> str | None:
    """Return why FlashAttention 4 cannot be used for these heads, or None."""
    if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("flash_attn.cute") is None:
        return "flash-attn-4 is not installed"
    if torch.are_deterministic_algorithms_enabled():  # on Hopper its backward adds up dq in no fixed order
        return "its backward pass is not deterministic"
    if head_dim not in FLASH_SIZES:
        return f"head size {head_dim} is not {' or '.join(map(str, FLASH_SIZES))}"
    return "it needs a Hopper GPU or later" if torch.cuda.get_device_capability()[0] < 9 else None


@functools.cache
def _compiled() -> Any:
    return torch.compile(_attend, dynamic=True, fullgraph=True)


_settings = threading.local()


def share_graphs() -> None:
    """Set Dynamo's config once per thread; setting and resetting it would take half as long as a call.

    Since torch 2.12 each thread has its own config, and autograd recomputes checkpointed blocks in another thread.

    Without duck shapes, sizes that are equal by chance (8 heads, 8 tiles) are not tied together, so a new length needs
    no new graph. The scale is a constant. The remaining variants (head size, dtype, grad mode, one row or several,
    which inputs require gradients) may exceed Dynamo's default limit of 8 graphs. Checkpointed blocks may enter a
    function mode and leave it again (rollout/routes.py), which their recomputation need not repeat.
    """
    if getattr(_settings, "is_set", False):
        return
    import torch._dynamo as dynamo  # lazy: it takes two seconds to import
    import torch.fx.experimental._config as symbolic_shapes

    dynamo.config.recompile_limit, dynamo.config.specialize_float = MAX_GRAPHS, True
    if hasattr(dynamo.config, "skip_fwd_side_effects_in_bwd_under_checkpoint"):
        dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    symbolic_shapes.use_duck_shape = False
    _settings.is_set = True


def _attend(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, lists: list[Tensor], scale: float,
    softcap: float | None = None, sinks: Tensor | None = None, flash: bool = False,
) -> Tensor:  # fmt: skip
    """Run flex_attention. The mask is plain tensors, because Dynamo would recompile for every BlockMask."""
    if not torch.compiler.is_dynamo_compiling():
        raise RuntimeError("flex_attend: torch.compile is off or failed; enable it, or use dense_mask with sdpa")

    # The symbolic lengths are multiples of the tile, so the kernels need no bounds checks.
    torch._check(query.shape[2] == TILE * lists[1].shape[2])
    torch._check(key.shape[2] == TILE * lists[1].shape[3])

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return _visible(spans, (b, q), k)

    mask = BlockMask(
        seq_lengths=(query.shape[2], key.shape[2]),
        **dict(zip(_LISTS, lists, strict=True)),
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=mask_mod,
    )

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return _capped(score, softcap)

    out = flex_attention(
        query, key, value, None if softcap is None else score_mod, mask, scale, query.shape[1] != key.shape[1],
        kernel_options={"BACKEND": "FLASH"} if flash else None,
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )  # fmt: skip
    return out if sinks is None else _with_sinks(out[0], out[1].lse, sinks)
