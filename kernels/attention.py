"""Attention over packed rows: who sees whom, as two runs of keys per query.

Packed documents, a prompt shared by many completions and the strided layout of energy-based fine-tuning have one form:
a query sees a run of keys before its own sequence (the shared prompt; may be empty) and a run of its own,

    visible(q, k) = prefix_start[q] <= k < prefix_stop[q]  or  own_start[q] <= k < own_stop[q]

so a mask is four integers per query. Two ways to run it:
- `dense_mask`: (R, 1, Q, K) booleans for scaled_dot_product_attention. Right on every device, with a backward
  everywhere; O(Q K) memory.
- `block_mask` and `flex_attend`: flex_attention, CUDA only. Tile lists come from the runs by difference arrays in
  O(R (Q + Q K / 128^2)); memory stays O(Q). One compiled graph serves every length and every mask.

Two runs rather than a mask function of each layout: one kernel for all, and a sliding window keeps the form.

Shapes: R = packed rows, T = positions of a row, Q = queries, K = keys, A = anchors; in `flex_attend` H = heads and
K = head size, as everywhere else.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

TILE = 128  # flex_attention's default sparse block, and what its kernels are tuned for


class Spans(NamedTuple):
    """The keys each query sees: two half-open runs of the key row that never overlap, not both empty.

    Self-attention over a row has own_stop = q + 1. Padding sees padding: a softmax over nothing would be NaN.
    """

    prefix_start: Tensor  # (R, Q) int64
    prefix_stop: Tensor  # (R, Q) int64; equal to prefix_start where there is no prefix
    own_start: Tensor  # (R, Q) int64
    own_stop: Tensor  # (R, Q) int64


def with_window(spans: Spans, window: int) -> Spans:
    """Spans of a sliding-window layer: each query keeps the last `window` keys it sees, itself included.

    Position ids run on from the prefix into the own run, so those are exactly the keys less than `window` back.
    """
    if window < 1:
        raise ValueError(f"window={window}: a query sees at least itself; use a window of 1 or more")
    own_start = torch.maximum(spans.own_start, spans.own_stop - window)
    left = (window - (spans.own_stop - spans.own_start)).clamp(min=0)  # how many keys of the prefix still fit
    prefix_start = torch.maximum(spans.prefix_start, spans.prefix_stop - left)
    return spans._replace(prefix_start=prefix_start, own_start=own_start)


def dense_mask(spans: Spans, num_keys: int) -> Tensor:  # (R, 1, Q, K) bool, True = may look
    """The mask as scaled_dot_product_attention takes it."""
    key = torch.arange(num_keys, device=spans.own_start.device)
    start, stop = spans.prefix_start.unsqueeze(-1), spans.prefix_stop.unsqueeze(-1)  # (R, Q, 1)
    prefix = (start <= key) & (key < stop)  # (R, Q, K)
    own = (spans.own_start.unsqueeze(-1) <= key) & (key < spans.own_stop.unsqueeze(-1))
    return (prefix | own).unsqueeze(1)


class SpanMask:
    """`spans` as a flex_attention mask_mod. int32 halves what the kernel loads.

    A plain object, not a closure: compared by identity and taken apart by `flex_attend`.
    """

    def __init__(self, spans: Spans) -> None:
        self.spans = Spans(*(bound.to(torch.int32).contiguous() for bound in spans))

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:  # all (): row, head, query, key
        return _visible(self.spans, b, q, k)


def _visible(spans: Spans, b: Tensor, q: Tensor, k: Tensor) -> Tensor:
    prefix = (spans.prefix_start[b, q] <= k) & (k < spans.prefix_stop[b, q])
    return prefix | ((spans.own_start[b, q] <= k) & (k < spans.own_stop[b, q]))


def block_mask(spans: Spans, num_keys: int) -> BlockMask:  # of shape (R, 1, Q, K)
    """The mask as `flex_attend` takes it, with exact lists of full and partial 128 x 128 tiles; no host sync.

    Build it once per micro-batch, outside inference mode, and share it between layers and passes.
    """
    assert not torch.is_inference_mode_enabled(), "a mask built in inference mode cannot be saved for backward"
    # Runs that meet are one: a tile across the seam is full though neither run covers it.
    meet = spans.prefix_stop == spans.own_start
    first_stop = torch.where(meet, spans.own_stop, spans.prefix_stop)
    second_start = torch.where(meet, spans.own_stop, spans.own_start)
    runs = ((spans.prefix_start, first_stop), (second_start, spans.own_stop))

    rows, num_queries = spans.own_start.shape
    tiles = (rows, -(-num_queries // TILE), -(-num_keys // TILE))
    seen = torch.zeros(tiles, dtype=torch.int32, device=spans.own_start.device)  # queries of the tile that see some key
    covered = torch.zeros_like(seen)  # queries of the tile that see all of its 128 keys
    for start, stop in runs:
        # A run sees into tiles from that of its first key to that of its last, and covers those between its ends.
        seen += _count(start // TILE, torch.where(start < stop, (stop + TILE - 1) // TILE, 0), tiles)
        covered += _count((start + TILE - 1) // TILE, stop // TILE, tiles)
    full = covered == TILE
    partial = (seen > 0) & ~full
    return BlockMask.from_kv_blocks(
        *_tile_list(partial), *_tile_list(full),
        BLOCK_SIZE=TILE, mask_mod=SpanMask(spans), seq_lengths=(num_queries, num_keys),
    )  # fmt: skip


def _count(first: Tensor, stop: Tensor, tiles: tuple[int, int, int]) -> Tensor:  # (R, Q/128, K/128) int32
    """For each tile, how many of its queries have it in their run of key tiles [first, stop)."""
    rows, tall, wide = tiles
    device = first.device
    row = torch.arange(rows, device=device).unsqueeze(1) * tall
    tile_row = (row + torch.arange(first.shape[1], device=device) // TILE) * (wide + 1)  # (R, Q) where it begins, flat
    some = (first < stop).to(torch.int32).flatten()
    steps = torch.zeros(rows * tall * (wide + 1), dtype=torch.int32, device=device)
    steps.scatter_add_(0, (tile_row + first.clamp(max=wide)).flatten(), some)
    steps.scatter_add_(0, (tile_row + stop.clamp(max=wide)).flatten(), -some)
    return steps.view(rows, tall, wide + 1).cumsum(dim=-1, dtype=torch.int32)[..., :wide]


def _tile_list(chosen: Tensor) -> tuple[Tensor, Tensor]:  # (R, 1, Q/128), (R, 1, Q/128, K/128) int32
    """How many tiles are chosen in each row of tiles, and which: those come first, in order."""
    chosen = chosen.unsqueeze(1).to(torch.int32)
    order = chosen.argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(dim=-1, dtype=torch.int32), order.to(torch.int32)


_LISTS = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
)  # fmt: skip


def flex_attend(
    query: Tensor,  # (R, H, Q, K)
    key: Tensor,  # (R, H_kv, keys, K); H a multiple of H_kv
    value: Tensor,  # (R, H_kv, keys, K)
    block_mask: BlockMask,  # of shape (R, 1, Q, keys), made by `block_mask`
    *,
    scale: float,
) -> Tensor:  # (R, H, Q, K)
    """softmax(scale * query @ key.T where visible) @ value, forward and backward, without the (Q, keys) scores.

    Compiled at the first call; lengths and masks do not recompile, head sizes, dtypes and grad modes do. If
    compilation is off or gives up, this raises: flex_attention uncompiled would quietly run dense.
    """
    if query.device.type != "cuda":
        raise ValueError(f"query.device={query.device}: flex_attend runs on CUDA; elsewhere use dense_mask with sdpa")
    rows, _, num_queries, _ = query.shape
    num_keys = key.shape[2]
    if num_queries % TILE or num_keys % TILE:
        raise ValueError(f"lengths={num_queries, num_keys}: not multiples of {TILE}; pad queries and keys")
    if tuple(block_mask.shape) != (rows, 1, num_queries, num_keys):
        shape = tuple(block_mask.shape)
        raise ValueError(f"block_mask.shape={shape}: made for other rows than {(rows, 1, num_queries, num_keys)}")
    lists = [getattr(block_mask, name) for name in _LISTS]
    arguments = (query, key, value, block_mask.mask_mod.spans, lists, scale)
    if torch.compiler.is_compiling():  # inside a compiled model: part of its graph
        return _attend(*arguments)
    with _one_graph_for_all_lengths():
        return _compiled()(*arguments)


@contextmanager
def _one_graph_for_all_lengths() -> Iterator[None]:
    """Dynamo's settings while it may be compiling.

    Sizes that are equal by chance (8 heads, 8 tiles) stay apart, or else the next length would be a new graph; the
    scale is a constant. What is left (head size, dtype, grad mode, one row or several, which inputs need gradients) may
    well be more than the 8 graphs that Dynamo allows before it gives up.
    """
    import torch._dynamo as dynamo  # here, since it takes two seconds that a run without flex attention can save
    import torch.fx.experimental._config as symbolic_shapes

    with dynamo.config.patch(recompile_limit=64, specialize_float=True), symbolic_shapes.patch(use_duck_shape=False):
        yield


@functools.cache
def _compiled() -> Any:
    return torch.compile(_attend, dynamic=True, fullgraph=True)


def _attend(query: Tensor, key: Tensor, value: Tensor, spans: Spans, lists: list[Tensor], scale: float) -> Tensor:
    """The mask comes in as plain tensors and is put together here: a BlockMask would be guarded on, mask by mask."""
    if not torch.compiler.is_dynamo_compiling():
        raise RuntimeError("flex_attend: torch.compile is off or gave up; turn it on, or use dense_mask with sdpa")

    # Symbolic lengths that are multiples of the tile for all to see save the kernels their bounds checks.
    torch._check(query.shape[2] == TILE * lists[1].shape[2])
    torch._check(key.shape[2] == TILE * lists[1].shape[3])

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return _visible(spans, b, q, k)

    mask = BlockMask(
        seq_lengths=(query.shape[2], key.shape[2]),
        **dict(zip(_LISTS, lists, strict=True)),
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=mask_mod,
    )
    return flex_attention(query, key, value, block_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1])


@dataclass(frozen=True)
class StridedLayout:
    """One document's prompt and everything generated from its anchors, in one row; see `strided_layout`."""

    spans: Spans  # each (1, T)
    position_ids: Tensor  # (1, T) int64
    context_end: Tensor  # (A,) int64 prompt tokens that anchor a sees
    predictor: Tensor  # (A * samples * generated,) int64 place whose state predicts each generated token, in order
    prompt_length: int
    generated: int

    def places(self, step: int) -> Tensor:  # (A * samples,) int64
        """Where the tokens of generation step `step` (from 0) lie in the row, anchors first, then samples."""
        if not 0 <= step < self.generated:
            raise ValueError(f"step={step}: outside the {self.generated} steps of this layout; count from 0")
        first, count = self.prompt_length, len(self.predictor)
        return torch.arange(first + step, first + count, self.generated, device=self.predictor.device)

    def step_spans(self, step: int) -> Spans:  # each (1, A * samples)
        """What the queries of one generation step see, over keys cached at their places in the whole row.

        Rows of the training mask: keys not yet written are of later steps or other samples, which nobody here sees.
        """
        places = self.places(step)
        return Spans(*(bound[:, places] for bound in self.spans))


def strided_layout(
    prompt_length: int,
    *,
    stride: int,
    context: int,
    generated: int,
    samples: int,
    multiple: int = 1,
    device: torch.device | str | None = None,
) -> StridedLayout:
    """Energy-based fine-tuning: continue the prompt from an anchor every `stride` tokens, `samples` times each.

    Anchor a sees the first c(a) = a * stride + context prompt tokens and generates `generated` more, so that the prompt
    has the true continuation of each: a runs while c(a) <= prompt_length - generated. Token s of sample i lies at
    prompt_length + (a * samples + i) * generated + s with position id c(a) + s, and sees prompt[:c(a)], the earlier
    tokens of its own sample, and itself. Anchor-major, since neighbours then see almost the same keys: whole tiles stay
    empty or full. The row is padded to a `multiple` (`TILE` for `flex_attend`). Expand for several rows of one shape.
    """
    sizes = {"stride": stride, "context": context, "generated": generated, "samples": samples, "multiple": multiple}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}={size}: too small; use 1 or more")
    if prompt_length < context + generated:
        raise ValueError(
            f"prompt_length={prompt_length}: shorter than context + generated = {context + generated}, "
            "so there is no anchor; use longer prompts or a smaller context"
        )
    num_anchors = (prompt_length - generated - context) // stride + 1
    context_end = torch.arange(num_anchors, device=device) * stride + context  # (A,)
    count = num_anchors * samples * generated
    used = prompt_length + count
    place = torch.arange(used + -used % multiple, device=device)  # (T,)
    # Prompt and padding are sequences without a prefix; a sample's prefix is the prompt up to its anchor.
    own_start = torch.where(place < used, 0, used)
    prefix_stop = own_start.clone()
    prefix_start = own_start.clone()
    begin = prompt_length + torch.arange(num_anchors * samples, device=device) * generated  # (A * samples,)
    region = slice(prompt_length, used)
    own_start[region] = begin.repeat_interleave(generated)
    prefix_stop[region] = context_end.repeat_interleave(samples * generated)
    # Positions run on from the prefix into the own run.
    position_ids = prefix_stop - prefix_start + place - own_start
    predictor = place[region] - 1
    predictor[::generated] = context_end.repeat_interleave(samples) - 1
    spans = Spans(*(bound.unsqueeze(0) for bound in (prefix_start, prefix_stop, own_start, place + 1)))
    return StridedLayout(spans, position_ids.unsqueeze(0), context_end, predictor, prompt_length, generated)
