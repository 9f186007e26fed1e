"""Decode attention with few rows: several programs per row, so that they use the whole GPU.

A program attends over a part of a tile's prefix for all its rows together, or over a part of a row's own tokens, and
writes maximum, sum and accumulator of each softmax. Then these parts and the sinks are merged, always in the same
order: programs count the parts of each row that they have written, and the last one merges. If there are many parts, so
that a single long row uses the whole GPU, the program of the last own part waits for those of the prefix, because it
merges faster than a program with a tile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.decode.launch import launch_options
from kernels.decode.paged import TILE_ROWS, Rows, counters, divide_heads, scales

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch may lack Triton
    triton = None

BLOCK_BYTES = 1 << 12  # keys or values per iteration and warp
PROGRAMS = 1024  # (row, key head) pairs times parts
MAX_SPLITS = 32
LEAST_TOKENS = 64  # per part of a row's tokens
WAITING_SPLITS = 4  # with at least this many parts, own tokens wait for the prefix
MERGED = 1 << 12  # accumulator numbers that a program merges at a time


def attend_few(
    query: Tensor,  # (B, H, K)
    keys: Tensor,  # (H_kv, S, K)
    values: Tensor,  # (H_kv, S, K)
    rows: Rows,
    *,
    page: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,  # (H,)
) -> Tensor:  # (B, H, K)
    (num_rows, num_heads, head_dim), pages = query.shape, rows.table.shape[1]
    group, heads, programs, lines, width = divide_heads(num_heads, keys.shape[0], head_dim)
    splits, own_heads = _splits(num_rows * programs, pages * page), triton.next_power_of_2(heads)
    out = torch.empty_like(query)
    top, total = torch.empty(2, 2 * splits, num_rows, num_heads, dtype=torch.float32, device=query.device)
    acc = torch.empty(2 * splits, num_rows, num_heads, head_dim, dtype=torch.float32, device=query.device)
    block, warps = _tuning(lines, width, page, keys.element_size())
    waits = splits >= WAITING_SPLITS
    merged = max(1, min(2 * splits, MERGED // (own_heads * width))) if waits else 1
    _attend_rows[programs, 2 * num_rows, splits](
        query, keys, values, rows.table, rows.prefix_len, rows.own_len, rows.tiles, top, total, acc,
        counters(query.device, num_rows * programs), out if sinks is None else sinks, out, num_rows, pages,
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), *scales(scale, softcap),
        1 << 30 if window is None else window, -(-LEAST_TOKENS // block),
        GROUP=group, HEADS=heads, TILE=TILE_ROWS, LINES=lines, OWN_LINES=max(16, own_heads), OWN_HEADS=own_heads,
        SPLITS=splits, WAITS=waits, MERGED=merged, K=head_dim, WIDTH=width, PAGE=page, BLOCK=block,
        SOFTCAP=softcap is not None, SINKS=sinks is not None,
        UPCAST=not query.is_cuda,  # Triton's interpreter would multiply bfloat16 bit patterns as integers
        num_warps=warps, num_stages=3, **launch_options(query),
    )  # fmt: skip
    return out


def _splits(programs: int, tokens: int) -> int:
    """Return the number of parallel parts of a row's tokens, so that few rows use the whole GPU.

    Fixed for a captured step. A power of two, because the kernel is compiled for it.
    """
    limit = min(MAX_SPLITS, tokens // LEAST_TOKENS, PROGRAMS // programs)
    return 1 << max(0, limit.bit_length() - 1)


def _tuning(lines: int, width: int, page: int, size: int) -> tuple[int, int]:
    """Return tokens per iteration and warps; size: bytes per number in the cache.

    One warp has 16 lines; those of float32 products, without tensor cores, need more registers.
    """
    warps = max(2, min(8, max(lines // 16, lines * width // 2048) * (1 if size == 2 else 4)))
    most = min(64 if lines * width <= 4096 else 32, page & -page)
    return min(most, max(16, BLOCK_BYTES * min(warps, 4) // (width * size))), warps


if triton is not None:
    from kernels.decode.paged import HIDDEN, LN2, NOTHING, _attend_block

    PREFIX = tl.constexpr(1 << 16)  # what a part of the prefix adds to a counter that is waited for

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
            # One block ahead; otherwise the loads of keys would wait for it.
            next_page = tl.load(pages_of_row + (start + BLOCK) // PAGE, mask=block + 1 < end, other=0)
            token = start + tl.arange(0, BLOCK)
            bias = tl.where((token[None, :] >= first[:, None]) & (token < length)[None, :], 0.0, HIDDEN)
            top, total, acc = _attend_block(
                queries, keys, values, page.to(tl.int64) * PAGE + start % PAGE, (token >= low) & (token < length),
                bias, top, total, acc, key_place, value_place, scale2, softcap2, K, WIDTH, BLOCK, SOFTCAP, UPCAST,
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

    @triton.jit(do_not_specialize=["num_rows", "pages", "window", "least"])
    def _attend_rows(
        query, keys, values, table, prefix_len, own_len, tiles, top_out, total_out, acc_out, counters, sinks, out,
        num_rows, pages, key_head, key_place, value_head, value_place, scale2, softcap2, window, least,
        GROUP: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, LINES: tl.constexpr, OWN_LINES: tl.constexpr,
        OWN_HEADS: tl.constexpr, SPLITS: tl.constexpr, WAITS: tl.constexpr, MERGED: tl.constexpr, K: tl.constexpr,
        WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
        UPCAST: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        """Attend to one part of a tile's prefix, if the tile is used, or to one part of a row's own tokens.

        A program has HEADS of the GROUP query heads that share a key head. Programs with a tile take longer; they start
        first, because tiles have small indices.
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
        if tl.program_id(1) < num_rows:
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
        else:
            own_row = (tl.program_id(1) - num_rows).to(tl.int64)
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
