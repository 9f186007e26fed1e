"""Attention of one decode step over a paged cache: one query per decode row, over a shared prefix and own tokens.

The rows of a group share their prompt. The cache contains it once, and it is read once per TILE_ROWS rows: at 512 rows
in groups of 8, reading it for each row would be most of the memory traffic. There are two kernels:
- `_prefix`, one program per tile of rows and key head: attends over the prefix for all rows of the tile together, and
  writes maximum, sum and accumulator of the softmax for each row. With few rows the prefix is split over programs.
- `_own`, one program per row and key head: attends over the row's own tokens, merges the results of `_prefix` and the
  sinks, and writes the output.

Any head size up to 256 works: the kernels pad it to a power of two in registers. Capped scores and sinks are as in
kernels/attention.py.

Grids depend only on shapes and lengths are read on the device, so a step can be captured in a CUDA graph.
`decode_attention` runs the kernels on CUDA and `decode_attention_reference` elsewhere.

Shapes: B = decode rows, H = query heads, H_kv = key heads, K = head size, S = cache slots.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch may lack Triton; the reference runs there
    triton = None

TILE_ROWS = 8
BLOCK_BYTES = 1 << 14  # keys or values per iteration; with two of each in flight, 64 KiB of shared memory
MAX_HEADS = 8  # query heads per program of _prefix: 64 accumulator rows
PROGRAMS = 256  # two per multiprocessor of a large GPU; with fewer, the prefix is split
MAX_SPLITS = 16


class Rows(NamedTuple):
    """Tokens that each decode row attends to; tensors on the device, so that a captured step reads new values."""

    table: Tensor  # (B, pages) int32: pages of the prefix, then the row's own pages
    prefix_len: Tensor  # (B,) int32 tokens of the prefix; may be 0
    own_len: Tensor  # (B,) int32 own tokens, including the current one; 0 with an empty prefix is padding (output 0)
    tiles: Tensor  # (B, TILE_ROWS) int32 indices of rows that share a prefix, -1 = none; each row with one is in a tile


def supports(head_dim: int) -> bool:
    """Return whether the kernels support this head size."""
    return head_dim <= 256


def decode_attention(
    query: Tensor,  # (B, H, K)
    keys: Tensor,  # (H_kv, S, K)
    values: Tensor,  # (H_kv, S, K)
    rows: Rows,
    *,
    page: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # (H,)
    seen: Visible | None = None,  # from `visible_tokens`, to share it between layers; used by the reference only
) -> Tensor:  # (B, H, K)
    """softmax(scale * query @ keys.T) @ values over the tokens visible to each row.

    Prefix token n of row b is in slot table[b, n // page] * page + n % page. Own tokens start on a new page, after the
    ceil(prefix_len / page) pages of the prefix. With a window, a row at position prefix_len + own_len - 1 sees only
    keys less than `window` positions back, including itself.
    """
    fits = query.is_cuda and keys.dtype in (torch.bfloat16, torch.float16, torch.float32) and supports(query.shape[2])
    options = {"page": page, "scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    if fits and triton is not None:
        return decode_attention_kernel(query, keys, values, rows, **options)
    return decode_attention_reference(query, keys, values, rows, **options, seen=seen)


class Visible(NamedTuple):
    """Cache slots of the tokens that each row attends to, padded to the longest row."""

    slot: Tensor  # (B, T) int64
    visible: Tensor  # (B, T) bool


def visible_tokens(rows: Rows, *, page: int, window: int | None = None) -> Visible:
    """Compute the visible tokens for the reference; the same for all layers with this window."""
    prefix_len, own_len = rows.prefix_len.long()[:, None], rows.own_len.long()[:, None]  # (B, 1)
    prefix_pages = -(-prefix_len // page)
    table = rows.table
    if not table.is_cuda:  # only the pages in use; on a GPU this would be a host sync
        table = table[:, : max(1, int((prefix_pages - (-own_len // page)).max()))]
    index = torch.arange(table.shape[1] * page, device=table.device)  # (T,) in the row's pages
    own = index - prefix_pages * page  # (B, T) index of the own token; negative in the prefix
    position = torch.where(own < 0, index, prefix_len + own)
    visible = torch.where(own < 0, index < prefix_len, own < own_len)  # (B, T)
    if window is not None:
        visible = visible & (position >= prefix_len + own_len - window)
    slot = table.long().repeat_interleave(page, dim=1) * page + index % page
    # An invisible slot may contain NaN, which a weight of 0 does not remove: read the row's last token instead.
    last = slot.gather(1, (prefix_pages * page + own_len - 1).clamp(min=0)).clamp(min=0)
    return Visible(torch.where(visible, slot, last), visible)


def decode_attention_reference(
    query: Tensor,  # (B, H, K)
    keys: Tensor,  # (H_kv, S, K)
    values: Tensor,  # (H_kv, S, K)
    rows: Rows,
    *,
    page: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # (H,)
    seen: Visible | None = None,
) -> Tensor:  # (B, H, K)
    """Plain torch version in float32 or wider; gathers the keys and values of every row."""
    num_rows, num_heads, head_dim = query.shape
    if num_rows == 0:
        return torch.empty_like(query)
    wide = torch.promote_types(query.dtype, torch.float32)
    slot, visible = seen or visible_tokens(rows, page=page, window=window)
    key, value = (x.index_select(1, slot.flatten()).to(wide) for x in (keys, values))
    shape = (keys.shape[0], num_rows, slot.shape[1], head_dim)
    grouped = query.to(wide).reshape(num_rows, keys.shape[0], -1, head_dim).transpose(0, 1)  # (H_kv, B, H / H_kv, K)
    scores = grouped @ key.view(shape).transpose(2, 3) * scale  # (H_kv, B, H / H_kv, T)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible.unsqueeze(1), -torch.inf)
    if sinks is not None:  # one more column, without a value
        column = sinks.to(wide).view(keys.shape[0], 1, -1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(dim=-1)[..., : slot.shape[1]]
    out = (weights @ value.view(shape)).transpose(0, 1).reshape(num_rows, num_heads, head_dim)
    return out.masked_fill(~visible.any(dim=1)[:, None, None], 0.0).to(query.dtype)


def decode_attention_kernel(
    query: Tensor,  # (B, H, K)
    keys: Tensor,  # (H_kv, S, K)
    values: Tensor,  # (H_kv, S, K)
    rows: Rows,
    *,
    page: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # (H,)
) -> Tensor:  # (B, H, K)
    """The Triton kernels, on CUDA or under TRITON_INTERPRET=1."""
    (num_rows, num_heads, head_dim), key_heads = query.shape, keys.shape[0]
    pages = rows.table.shape[1]
    assert supports(head_dim) and page % 16 == 0, f"head_dim={head_dim}, page={page}"
    assert rows.tiles.shape == (num_rows, TILE_ROWS) and num_heads % key_heads == 0
    assert keys.stride(2) == values.stride(2) == 1 and all(x.is_contiguous() for x in rows)
    query = query.contiguous()
    out = torch.empty_like(query)
    if num_rows == 0:
        return out
    group = num_heads // key_heads
    heads = min(group, MAX_HEADS)
    programs = key_heads * -(-group // heads)
    splits = _splits(-(-num_rows // TILE_ROWS) * programs, pages)
    width = max(16, triton.next_power_of_2(head_dim))
    block = min(64, page & -page, max(16, BLOCK_BYTES // (width * keys.element_size())))
    top, total = torch.empty(2, splits, num_rows, num_heads, dtype=torch.float32, device=query.device)
    acc = torch.empty(splits, num_rows, num_heads, head_dim, dtype=torch.float32, device=query.device)
    inputs = (query, keys, values, rows.table, rows.prefix_len, rows.own_len, top, total, acc)
    sizes = (num_rows, pages, keys.stride(0), keys.stride(1), values.stride(0), values.stride(1))
    # Scores are softcap2 * tanh(scale2 * query @ keys), or without a cap scale2 * query @ keys, in units of log2.
    scale2, softcap2 = (scale / math.log(2.0), 1.0) if softcap is None else (scale / softcap, softcap / math.log(2.0))
    numbers = (scale2, softcap2, 1 << 30 if window is None else window)
    shape = {
        "GROUP": group, "SPLITS": splits, "K": head_dim, "WIDTH": width, "PAGE": page, "BLOCK": block,
        "SOFTCAP": softcap is not None, "num_stages": 3,
        "UPCAST": not query.is_cuda,  # Triton's interpreter would multiply bfloat16 bit patterns as integers
    }  # fmt: skip
    lines = max(16, triton.next_power_of_2(TILE_ROWS * heads))
    _prefix[num_rows, programs, splits](
        *inputs, rows.tiles, *sizes, *numbers, **shape, HEADS=heads, TILE=TILE_ROWS, LINES=lines,
        num_warps=4 if lines * width <= 4096 else 8,
    )  # fmt: skip
    lines = max(16, triton.next_power_of_2(group))
    _own[num_rows, key_heads](
        *inputs, query if sinks is None else sinks, out, *sizes, *numbers, **shape, SINKS=sinks is not None,
        LINES=lines, num_warps=4,
    )  # fmt: skip
    return out


def _splits(programs: int, pages: int) -> int:
    """Return the number of parallel parts of the prefix, so that few rows with a long prompt use the whole GPU.

    A power of two, because the kernels are compiled for each value.
    """
    limit = min(MAX_SPLITS, pages, PROGRAMS // programs)
    return 1 << max(0, limit.bit_length() - 1)


if triton is not None:
    NOTHING = tl.constexpr(-1e30)  # the maximum over no keys: finite, so that the difference of two is 0
    LN2 = tl.constexpr(math.log(2.0))

    @triton.jit
    def _attend(
        query, keys, values, page, start, first, low, length, top, total, acc, key_place, value_place, scale2,
        softcap2, K: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, SOFTCAP: tl.constexpr,
        UPCAST: tl.constexpr,
    ):  # fmt: skip
        """Attend to one block of keys within one page; exponents are in units of log2.

        The caller loads the page index one block ahead; otherwise the loads of keys would wait for it.
        Tokens from `first` (LINES,) on are visible to each line; tokens from `low` on are visible to some line.
        """
        token = start + tl.arange(0, BLOCK)
        place = page.to(tl.int64) * PAGE + start % PAGE + tl.arange(0, BLOCK)
        column = tl.arange(0, WIDTH)[None, :]
        seen = ((token >= low) & (token < length))[:, None]  # other slots may contain NaN
        if K < WIDTH:
            seen = seen & (column < K)
        visible = (token[None, :] >= first[:, None]) & (token < length)[None, :]
        key = tl.load(keys + place[:, None] * key_place + column, mask=seen, other=0.0)
        value = tl.load(values + place[:, None] * value_place + column, mask=seen, other=0.0)
        if UPCAST:
            query, key, value = query.to(tl.float32), key.to(tl.float32), value.to(tl.float32)
        scores = tl.dot(query, key.T, input_precision="ieee") * scale2
        if SOFTCAP:
            shrunk = tl.exp2(tl.abs(scores) * (-2.0 / LN2))
            bound = (1.0 - shrunk) / (1.0 + shrunk) * softcap2
            scores = tl.where(scores < 0, -bound, bound)
        scores = tl.where(visible, scores, NOTHING)
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.where(visible, tl.exp2(scores - new_top[:, None]), 0.0)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
        return new_top, total, acc

    @triton.jit
    def _merged(top, total, acc, other_top, other_total, other_acc):
        """Merge the partial softmaxes over two sets of keys."""
        new_top = tl.maximum(top, other_top)
        shrink, other_shrink = tl.exp2(top - new_top), tl.exp2(other_top - new_top)
        acc = acc * shrink[:, None] + other_acc * other_shrink[:, None]
        return new_top, total * shrink + other_total * other_shrink, acc

    @triton.jit(do_not_specialize=["num_rows", "pages", "window"])
    def _prefix(
        query, keys, values, table, prefix_len, own_len, top_out, total_out, acc_out, tiles,
        num_rows, pages, key_head, key_place, value_head, value_place, scale2, softcap2, window,
        GROUP: tl.constexpr, SPLITS: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
        BLOCK: tl.constexpr, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr,
        LINES: tl.constexpr,
    ):  # fmt: skip
        """A program's lines are (row of the tile, query head), with HEADS of the GROUP heads that share a key head."""
        tile = tl.program_id(0) * TILE
        leader = tl.max(tl.load(tiles + tile + tl.arange(0, TILE)), 0)
        if leader < 0:
            return
        length = tl.load(prefix_len + leader)
        if length == 0:
            return
        PARTS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
        kv_head = tl.program_id(1) // PARTS
        split = tl.program_id(2)
        line = tl.arange(0, LINES)
        row = tl.load(tiles + tile + line // HEADS, mask=line < TILE * HEADS, other=-1)
        head = tl.program_id(1) % PARTS * HEADS + line % HEADS
        used = (row >= 0) & (head < GROUP)
        row = tl.where(used, row, leader)
        at = row.to(tl.int64) * (tl.num_programs(1) // PARTS * GROUP) + kv_head * GROUP + head  # index into (B, H)
        column = tl.arange(0, WIDTH)[None, :]
        written = used[:, None]
        if K < WIDTH:
            written = written & (column < K)
        queries = tl.load(query + at[:, None] * K + column, mask=written, other=0.0).to(keys.dtype.element_ty)
        first = tl.maximum(length + tl.load(own_len + row) - window, 0)  # (LINES,) first visible token
        blocks = tl.cdiv(length, BLOCK)
        low = tl.min(first, 0)
        skipped = tl.minimum(low // BLOCK, blocks)
        each = tl.cdiv(blocks - skipped, SPLITS)
        begin = skipped + split * each
        top = tl.full((LINES,), NOTHING, tl.float32)
        total = tl.zeros((LINES,), tl.float32)
        acc = tl.zeros((LINES, WIDTH), tl.float32)
        pages_of_row = table + leader.to(tl.int64) * pages
        keys += kv_head.to(tl.int64) * key_head
        values += kv_head.to(tl.int64) * value_head
        end = tl.minimum(begin + each, blocks)
        page = tl.load(pages_of_row + begin * BLOCK // PAGE, mask=begin < end, other=0)
        for block in range(begin, end):
            start = block * BLOCK
            next_page = tl.load(pages_of_row + (start + BLOCK) // PAGE, mask=block + 1 < end, other=0)
            top, total, acc = _attend(
                queries, keys, values, page, start, first, low, length, top, total, acc, key_place,
                value_place, scale2, softcap2, K, WIDTH, PAGE, BLOCK, SOFTCAP, UPCAST,
            )  # fmt: skip
            page = next_page
        at += split.to(tl.int64) * num_rows * (tl.num_programs(1) // PARTS * GROUP)
        tl.store(top_out + at, top, mask=used)
        tl.store(total_out + at, total, mask=used)
        tl.store(acc_out + at[:, None] * K + column, acc, mask=written)

    @triton.jit(do_not_specialize=["num_rows", "pages", "window"])
    def _own(
        query, keys, values, table, prefix_len, own_len, top_in, total_in, acc_in, sinks, out,
        num_rows, pages, key_head, key_place, value_head, value_place, scale2, softcap2, window,
        GROUP: tl.constexpr, SPLITS: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
        BLOCK: tl.constexpr, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, SINKS: tl.constexpr, LINES: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0)
        kv_head = tl.program_id(1)
        before = tl.load(prefix_len + row)
        length = tl.load(own_len + row)
        line = tl.arange(0, LINES)
        used = line < GROUP
        num_heads = tl.num_programs(1) * GROUP
        at = row.to(tl.int64) * num_heads + kv_head * GROUP + line  # index into (B, H)
        column = tl.arange(0, WIDTH)[None, :]
        written = used[:, None]
        if K < WIDTH:
            written = written & (column < K)
        queries = tl.load(query + at[:, None] * K + column, mask=written, other=0.0).to(keys.dtype.element_ty)
        top = tl.full((LINES,), NOTHING, tl.float32)
        total = tl.zeros((LINES,), tl.float32)
        acc = tl.zeros((LINES, WIDTH), tl.float32)
        has_prefix = line < tl.where(before > 0, GROUP, 0)  # otherwise _prefix wrote nothing
        prefix_top = tl.load(top_in + at, mask=has_prefix, other=NOTHING)
        prefix_total = tl.load(total_in + at, mask=has_prefix, other=0.0)
        prefix_acc = tl.load(acc_in + at[:, None] * K + column, mask=written & has_prefix[:, None], other=0.0)
        for split in tl.static_range(1, SPLITS):
            part = at + tl.full((), split, tl.int64) * num_rows * num_heads
            prefix_top, prefix_total, prefix_acc = _merged(
                prefix_top, prefix_total, prefix_acc, tl.load(top_in + part, mask=has_prefix, other=NOTHING),
                tl.load(total_in + part, mask=has_prefix, other=0.0),
                tl.load(acc_in + part[:, None] * K + column, mask=written & has_prefix[:, None], other=0.0),
            )  # fmt: skip
        low = tl.maximum(length - window, 0)
        first = low + 0 * line
        pages_of_row = table + row.to(tl.int64) * pages + tl.cdiv(before, PAGE)
        keys += kv_head.to(tl.int64) * key_head
        values += kv_head.to(tl.int64) * value_head
        begin, end = low // BLOCK, tl.cdiv(length, BLOCK)
        page = tl.load(pages_of_row + begin * BLOCK // PAGE, mask=begin < end, other=0)
        for block in range(begin, end):
            start = block * BLOCK
            next_page = tl.load(pages_of_row + (start + BLOCK) // PAGE, mask=block + 1 < end, other=0)
            top, total, acc = _attend(
                queries, keys, values, page, start, first, low, length, top, total, acc, key_place,
                value_place, scale2, softcap2, K, WIDTH, PAGE, BLOCK, SOFTCAP, UPCAST,
            )  # fmt: skip
            page = next_page
        top, total, acc = _merged(top, total, acc, prefix_top, prefix_total, prefix_acc)
        if SINKS:  # one more key, without a value
            sink = tl.load(sinks + kv_head * GROUP + line, mask=used, other=0.0).to(tl.float32) / LN2
            one, zeros = tl.full((LINES,), 1.0, tl.float32), tl.zeros((LINES, WIDTH), tl.float32)
            top, total, acc = _merged(top, total, acc, sink, one, zeros)
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # padding has no tokens
        tl.store(out + at[:, None] * K + column, acc.to(out.dtype.element_ty), mask=written)
