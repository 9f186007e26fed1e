"""Attention of one decode step over a paged cache: one query per decode row, over a shared prefix and own tokens.

The rows of a group share their prompt. The cache contains it once, and it is read once per TILE_ROWS rows: at 512 rows
in groups of 8, reading it for each row would be most of the memory traffic. A program attends over a part of a tile's
prefix for all its rows together and over a part of a row's own tokens, and writes maximum, sum and accumulator of each
softmax. Then these parts and the sinks are merged, always in the same order:
- Many rows have one part each, and `_merge_rows` merges.
- Fewer rows have several parts, and tiles have programs of their own. Programs count the parts of each row that they
  have written, and the last one merges.
- A few rows have many parts, so that a single long row uses the whole GPU. The program of the last own part waits for
  those of the prefix, because it merges faster than a program with a tile.

Any head size up to 256 works: the kernels pad it to a power of two in registers. Capped scores and sinks are as in
kernels/attention.py.

Grids depend only on shapes and lengths are read on the device, so a step can be captured in a CUDA graph.
`decode_attention` runs the kernels on CUDA and `decode_attention_reference` elsewhere.

Shapes: B = decode rows, H = query heads, H_kv = key heads, K = head size, S = cache slots.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.decode.launch import launch_options

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch may lack Triton; the reference runs there
    triton = None

TILE_ROWS = 8
BLOCK_BYTES = 1 << 12  # keys or values per iteration and warp
MAX_HEADS = 8  # query heads per program: 64 accumulator rows for a tile
PROGRAMS = 1024  # at least as many as (row, key head) pairs times parts; with more pairs, _merge_rows merges
MAX_SPLITS = 32
LEAST_TOKENS = 64  # per part of a row's tokens
WAITING_SPLITS = 4  # with at least this many parts, own tokens wait for the prefix
MERGED = 1 << 12  # accumulator numbers that a program merges at a time


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
    """The Triton kernel, on CUDA or under TRITON_INTERPRET=1."""
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
    splits = _splits(num_rows * programs, pages * page)
    width, own_heads = max(16, triton.next_power_of_2(head_dim)), triton.next_power_of_2(heads)
    top, total = torch.empty(2, 2 * splits, num_rows, num_heads, dtype=torch.float32, device=query.device)
    acc = torch.empty(2 * splits, num_rows, num_heads, head_dim, dtype=torch.float32, device=query.device)
    # Scores are softcap2 * tanh(scale2 * query @ keys), or without a cap scale2 * query @ keys, in units of log2.
    scale2, softcap2 = (scale / math.log(2.0), 1.0) if softcap is None else (scale / softcap, softcap / math.log(2.0))
    window = 1 << 30 if window is None else window
    lines = max(16, triton.next_power_of_2(TILE_ROWS * heads))
    block, warps = _tuning(lines, width, page, keys.element_size(), num_rows * programs)
    least = -(-LEAST_TOKENS // block)
    merges, waits = num_rows * programs <= PROGRAMS, splits >= WAITING_SPLITS
    merged = max(1, min(2 * splits, MERGED // (own_heads * width))) if waits else 1
    _attend_rows[programs, 2 * num_rows if merges else num_rows, splits](
        query, keys, values, rows.table, rows.prefix_len, rows.own_len, rows.tiles, top, total, acc,
        _counters(query.device), out if sinks is None else sinks, out, num_rows, pages,
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), scale2, softcap2, window, least,
        GROUP=group, HEADS=heads, TILE=TILE_ROWS, LINES=lines, OWN_LINES=max(16, own_heads), OWN_HEADS=own_heads,
        SPLITS=splits, MERGES=merges, WAITS=waits, MERGED=merged, K=head_dim, WIDTH=width, PAGE=page, BLOCK=block,
        SOFTCAP=softcap is not None, SINKS=sinks is not None,
        UPCAST=not query.is_cuda,  # Triton's interpreter would multiply bfloat16 bit patterns as integers
        num_warps=warps, num_stages=3, **launch_options(query),
    )  # fmt: skip
    if not merges:
        heads = min(triton.next_power_of_2(num_heads), max(1, MERGED // width))
        _merge_rows[triton.cdiv(num_heads, heads), num_rows](
            top, total, acc, rows.prefix_len, out if sinks is None else sinks, out, num_rows, num_heads, SPLITS=splits,
            HEADS=heads, SINKS=sinks is not None, K=head_dim, WIDTH=width, num_warps=4,
        )  # fmt: skip
    return out


@functools.cache
def _counters(device: torch.device) -> Tensor:  # (PROGRAMS,) int32
    """Return zeros, which every call leaves as zeros: one per row and key head. Calls on a device must not overlap."""
    return torch.zeros(PROGRAMS, dtype=torch.int32, device=device)


def _splits(programs: int, tokens: int) -> int:
    """Return the number of parallel parts of a row's tokens, so that few rows use the whole GPU.

    Fixed for a captured step. A power of two, because the kernel is compiled for it.
    """
    limit = min(MAX_SPLITS, tokens // LEAST_TOKENS, PROGRAMS // programs)
    return 1 << max(0, limit.bit_length() - 1)


def _tuning(lines: int, width: int, page: int, size: int, programs: int) -> tuple[int, int]:
    """Return tokens per iteration and warps; size: bytes per number in the cache.

    Small programs, of which many run on a multiprocessor: short rows are bound by latency. One warp has 16 lines; those
    of float32 products, without tensor cores, need more registers. If there are few programs, they take larger steps.
    """
    warps = min(8, max(lines // 16, lines * width // 2048) * (1 if size == 2 else 4))
    if programs <= PROGRAMS:
        warps = max(2, warps)
    most = min(64 if lines * width <= 4096 else 32, page & -page)
    return min(most, max(16, BLOCK_BYTES * min(warps, 4) // (width * size))), warps


if triton is not None:
    PREFIX = tl.constexpr(1 << 16)  # what a part of the prefix adds to a counter that is waited for
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
        place = page.to(tl.int64) * PAGE + start % PAGE  # of the first token; the others are at constant distances
        line, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, WIDTH)[None, :]
        seen = ((token >= low) & (token < length))[:, None]  # other slots may contain NaN
        if K < WIDTH:
            seen = seen & (column < K)
        visible = (token[None, :] >= first[:, None]) & (token < length)[None, :]
        key = tl.load(keys + place * key_place + (line * key_place + column), mask=seen, other=0.0)
        value = tl.load(values + place * value_place + (line * value_place + column), mask=seen, other=0.0)
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
    def _split(begin, end, least):
        """Return the blocks of this program's part of blocks begin to end, at least `least` of them."""
        each = tl.maximum(tl.cdiv(end - begin, tl.num_programs(2)), least)
        begin = begin + tl.program_id(2) * each
        return begin, tl.minimum(begin + each, end)

    @triton.jit
    def _attend_part(
        query, keys, values, pages_of_row, at, used, first, length, begin, end, part, part_size, top_out, total_out,
        acc_out, key_place, value_place, scale2, softcap2, K: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
        BLOCK: tl.constexpr, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr,
    ):  # fmt: skip
        """Attend from lines `at` to blocks begin to end; write maximum, sum and accumulator of the softmax."""
        LINES: tl.constexpr = at.shape[0]
        column = tl.arange(0, WIDTH)[None, :]
        inside = used[:, None]
        if K < WIDTH:
            inside = inside & (column < K)
        queries = tl.load(query + at[:, None] * K + column, mask=inside, other=0.0).to(keys.dtype.element_ty)
        low = tl.min(first, 0)
        top = tl.full((LINES,), NOTHING, tl.float32)
        total = tl.zeros((LINES,), tl.float32)
        acc = tl.zeros((LINES, WIDTH), tl.float32)
        page = tl.load(pages_of_row + begin * BLOCK // PAGE, mask=begin < end, other=0)
        for block in range(begin, end):
            start = block * BLOCK
            next_page = tl.load(pages_of_row + (start + BLOCK) // PAGE, mask=block + 1 < end, other=0)
            top, total, acc = _attend(
                queries, keys, values, page, start, first, low, length, top, total, acc, key_place,
                value_place, scale2, softcap2, K, WIDTH, PAGE, BLOCK, SOFTCAP, UPCAST,
            )  # fmt: skip
            page = next_page
        at += part * part_size
        tl.store(top_out + at, top, mask=used)
        tl.store(total_out + at, total, mask=used)
        tl.store(acc_out + at[:, None] * K + column, acc, mask=inside)

    @triton.jit
    def _merge(
        at, used, num_parts, top_in, total_in, acc_in, sinks, head, out, part_size, SPLITS: tl.constexpr,
        MERGED: tl.constexpr, SINKS: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
    ):  # fmt: skip
        """Merge the partial softmaxes of lines `at`: parts of their own tokens, parts of the prefix, and the sinks.

        Other programs may have written them during this kernel: .cg reads them from L2, not an older copy from L1.
        """
        part = tl.arange(0, 2 * SPLITS)[:, None]
        places = part.to(tl.int64) * part_size + at[None, :]
        written = used[None, :] & (part < num_parts)
        top = tl.max(tl.load(top_in + places, mask=written, other=NOTHING, cache_modifier=".cg"), 0)
        total = tl.zeros((at.shape[0],), tl.float32)
        acc = tl.zeros((at.shape[0], WIDTH), tl.float32)
        if SINKS:  # one more key, without a value
            sink = tl.load(sinks + head, mask=used, other=0.0).to(tl.float32) / LN2
            top = tl.maximum(top, sink)
            total = tl.exp2(sink - top)
        for begin in tl.static_range(0, 2 * SPLITS, MERGED):
            part = begin + tl.arange(0, MERGED)[:, None]
            places = part.to(tl.int64) * part_size + at[None, :]
            written = used[None, :] & (part < num_parts)
            weight = tl.load(top_in + places, mask=written, other=NOTHING, cache_modifier=".cg")
            weight = tl.exp2(weight - top[None, :])
            total += tl.sum(weight * tl.load(total_in + places, mask=written, other=0.0, cache_modifier=".cg"), 0)
            column = tl.arange(0, WIDTH)[None, None, :]
            inside = written[:, :, None] & (column < K)
            accs = tl.load(acc_in + places[:, :, None] * K + column, mask=inside, other=0.0, cache_modifier=".cg")
            acc += tl.sum(weight[:, :, None] * accs, 0)
        column = tl.arange(0, WIDTH)[None, :]
        acc /= tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + at[:, None] * K + column, acc.to(out.dtype.element_ty), mask=used[:, None] & (column < K))

    @triton.jit(do_not_specialize=["num_rows", "num_heads"])
    def _merge_rows(
        top_in, total_in, acc_in, prefix_len, sinks, out, num_rows, num_heads, SPLITS: tl.constexpr,
        HEADS: tl.constexpr, SINKS: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(1).to(tl.int64)
        head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
        num_parts = tl.where(tl.load(prefix_len + row) > 0, 2 * SPLITS, SPLITS)
        _merge(
            row * num_heads + head, head < num_heads, num_parts, top_in, total_in, acc_in, sinks, head, out,
            num_rows.to(tl.int64) * num_heads, SPLITS, 1, SINKS, K, WIDTH,
        )  # fmt: skip

    @triton.jit(do_not_specialize=["num_rows", "pages", "window", "least"])
    def _attend_rows(
        query, keys, values, table, prefix_len, own_len, tiles, top_out, total_out, acc_out, counters, sinks, out,
        num_rows, pages, key_head, key_place, value_head, value_place, scale2, softcap2, window, least,
        GROUP: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, LINES: tl.constexpr, OWN_LINES: tl.constexpr,
        OWN_HEADS: tl.constexpr, SPLITS: tl.constexpr, MERGES: tl.constexpr, WAITS: tl.constexpr,
        MERGED: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
        SOFTCAP: tl.constexpr, SINKS: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        """Attend to one part of a tile's prefix, if the tile is used, and to one part of a row's own tokens.

        A program has HEADS of the GROUP query heads that share a key head. With MERGES, it has either a tile or a row.
        Programs with a tile take longer; they start first, because tiles have small indices.
        """
        SHARES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
        kv_head = tl.program_id(0) // SHARES
        share = tl.program_id(0) % SHARES * HEADS
        key_heads = tl.num_programs(0) // SHARES
        num_heads = key_heads * GROUP
        split = tl.program_id(2)
        part_size = num_rows.to(tl.int64) * num_heads
        keys += kv_head.to(tl.int64) * key_head
        values += kv_head.to(tl.int64) * value_head
        counters += tl.program_id(0)
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
        if not MERGES or tl.program_id(1) < num_rows:
            tile = tiles + tl.program_id(1) * TILE
            tile_row = tl.load(tile + tl.arange(0, TILE))
            leader = tl.max(tile_row, 0)
            length = tl.load(prefix_len + leader, mask=leader >= 0, other=0)
            if length > 0:
                begin, end = _split(0, tl.cdiv(length, BLOCK), least)
                line = tl.arange(0, LINES)
                row = tl.load(tile + line // HEADS, mask=line < TILE * HEADS, other=-1)
                used = (row >= 0) & (share + line % HEADS < GROUP)
                row = tl.where(used, row, leader).to(tl.int64)
                head = kv_head * GROUP + share + line % HEADS
                at = row * num_heads + head
                first = tl.maximum(length + tl.load(own_len + row) - window, 0)  # (LINES,) first visible token
                begin = tl.minimum(tl.maximum(begin, tl.min(first, 0) // BLOCK), end)
                if PDL:
                    tl.extra.cuda.gdc_wait()
                _attend_part(
                    query, keys, values, table + leader.to(tl.int64) * pages, at, used, first, length, begin, end,
                    SPLITS + split, part_size, top_out, total_out, acc_out, key_place, value_place, scale2, softcap2, K,
                    WIDTH, PAGE, BLOCK, SOFTCAP, UPCAST,
                )  # fmt: skip
                if MERGES:
                    tl.debug_barrier()  # all threads have written
                    is_row = tile_row >= 0
                    counter = counters + tl.where(is_row, tile_row, 0) * tl.num_programs(0)
                    count = tl.atomic_add(counter, PREFIX if WAITS else 1, mask=is_row, sem="acq_rel")
                    is_last = is_row & (count == 2 * SPLITS - 1)
                    if not WAITS and tl.max(is_last.to(tl.int32), 0) > 0:
                        tl.store(counter, 0, mask=is_last)
                        chosen = (tl.arange(0, TILE)[None, :] == (line // HEADS)[:, None]) & is_last[None, :]
                        _merge(
                            at, used & (tl.max(chosen.to(tl.int32), 1) > 0), 2 * SPLITS, top_out, total_out, acc_out,
                            sinks, head, out, part_size, SPLITS, 1, SINKS, K, WIDTH,
                        )  # fmt: skip
        if not MERGES or tl.program_id(1) >= num_rows:
            own_row = (tl.program_id(1) - (num_rows if MERGES else 0)).to(tl.int64)
            own_length = tl.load(own_len + own_row)  # written by an ordinary launch, like the other lengths
            prefix = tl.load(prefix_len + own_row)
            low = tl.maximum(own_length - window, 0)
            own_begin, own_end = _split(low // BLOCK, tl.cdiv(own_length, BLOCK), least)
            own_line = tl.arange(0, OWN_LINES)
            own_head = kv_head * GROUP + share
            if PDL:
                tl.extra.cuda.gdc_wait()
            _attend_part(
                query, keys, values, table + own_row * pages + tl.cdiv(prefix, PAGE),
                own_row * num_heads + own_head + own_line, (own_line < HEADS) & (share + own_line < GROUP),
                low + 0 * own_line, own_length, own_begin, own_end, split, part_size, top_out, total_out, acc_out,
                key_place, value_place, scale2, softcap2, K, WIDTH, PAGE, BLOCK, SOFTCAP, UPCAST,
            )  # fmt: skip
            if MERGES:
                tl.debug_barrier()
                own_counter = counters + own_row * tl.num_programs(0)
                num_parts = tl.where(prefix > 0, 2 * SPLITS, SPLITS)
                count = tl.atomic_add(own_counter, 1, sem="acq_rel")
                if (count % PREFIX if WAITS else count) == (SPLITS if WAITS else num_parts) - 1:
                    if WAITS:  # all own parts are counted; GPUs start the last one after all programs with tiles
                        while count // PREFIX < num_parts - SPLITS:
                            count = tl.atomic_add(own_counter, 0, sem="acquire")
                    tl.store(own_counter, 0)
                    merged = tl.arange(0, OWN_HEADS)  # without the lines that only fill a product
                    _merge(
                        own_row * num_heads + own_head + merged, (merged < HEADS) & (share + merged < GROUP), num_parts,
                        top_out, total_out, acc_out, sinks, own_head + merged, out, part_size, SPLITS, MERGED, SINKS,
                        K, WIDTH,
                    )  # fmt: skip
