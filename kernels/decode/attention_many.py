"""Decode attention with many rows: programs of equal work, each with one softmax for all rows of a tile.

A tile's work is a list of blocks of keys: those of the prefix, then those of each row's own tokens. A program runs
through it with the queries of all rows, and masks the scores of rows that do not see a block. Products have at least 16
lines anyway, reading the keys takes longer than masked lines, and prefix and own tokens need not be merged.

Every program has an equal part of all lists together. Tiles of equal length are whole parts or cut into equal parts;
others are cut anywhere, so that uneven rows keep the whole GPU busy. Where a tile's list is cut, the programs write
maximum, sum and accumulator of each softmax, and the last one to finish merges them, always in the same order.
`plan_step` makes the lists on the device, once per step for all layers.

Shapes: M = blocks per tile, P = parts.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.decode.paged import TILE_ROWS, Rows, Share, counters, divide_heads, scales

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch may lack Triton
    triton = None

STAGES = 3
H200 = (132, 227 << 10)  # multiprocessors, bytes of shared memory per program
RESERVED = 1 << 11  # bytes of shared memory per program, for reductions and by CUDA
LEAST_SHARED = 160 << 10  # of a GPU; consumer GPUs have 100 KB


class Plan(NamedTuple):
    """The order of work in a step. Tiles that are used are numbered in order, and so are the blocks of all tiles."""

    blocks: Tensor  # (B, M) int64 the blocks of each tile: slot, member, number of tokens and position; see _plan
    used_tiles: Tensor  # (B,) int32
    first: Tensor  # (B + 1,) int32 number of the first block of each used tile, then that of all blocks
    starts: Tensor  # (P + 1,) int32 used tile in which each part begins, then the number of used tiles
    total: Tensor  # (1,) int32 number of blocks
    block: int  # tokens per block


class Layout(NamedTuple):
    parts: int  # of the blocks
    block: int  # tokens


def _layout(keys: Tensor, num_rows: int, num_heads: int, page: int) -> Layout:
    """Choose parts so that full tiles of equal length need not be merged, and blocks as large as memory allows."""
    multiprocessors, shared = gpu_of(keys.device)
    size, tiles, share = keys.element_size(), -(-num_rows // TILE_ROWS), divide_heads(num_heads, *keys.shape[::2])
    token_bytes, most = 2 * STAGES * share.width * size, 8 // _warps(share, size)  # most: by registers
    resident = max(1, min(most, shared // (64 * token_bytes)))  # programs per multiprocessor, with blocks of 64
    parts = tiles * max(1, multiprocessors * resident // (tiles * share.programs))
    together = min(most, -(-parts * share.programs // multiprocessors))  # programs per multiprocessor that there are
    queries = share.lines * share.width * size if share.lines >= 64 else 0  # in shared memory for wgmma
    room = (shared // together - queries - RESERVED) // token_bytes
    return Layout(parts, max(16, min(64, page & -page, 1 << max(1, room).bit_length() - 1)))


@functools.cache
def gpu_of(device: torch.device) -> tuple[int, int]:
    """Return its multiprocessors and the bytes of shared memory per program; an H200's for a CPU."""
    if device.type != "cuda":
        return H200
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, getattr(found, "shared_memory_per_block_optin", 0)  # AMD's have no such name


def _warps(share: Share, size: int) -> int:
    """Products of float32, without tensor cores, need more registers."""
    return min(8, max(1, share.lines * share.width // 1024) * (1 if size == 2 else 4))


def plan_many(
    keys: Tensor,  # (H_kv, S, K)
    rows: Rows,
    *,
    num_heads: int,
    page: int,
    window: int | None,
) -> Plan:
    (num_rows, pages), device = rows.table.shape, keys.device
    assert pages * page < 1 << 21, f"{pages} pages of {page} tokens: positions have 21 bits"
    parts, block = _layout(keys, num_rows, num_heads, page)
    blocks = torch.empty(num_rows, TILE_ROWS * pages * (page // block), dtype=torch.int64, device=device)
    sizes = ((num_rows,), (num_rows + 1,), (parts + 1,), (1,))
    plan = Plan(blocks, *(torch.empty(size, dtype=torch.int32, device=device) for size in sizes), block)
    _plan[num_rows + 1, TILE_ROWS + 1](
        *rows, *plan[:-1], num_rows, pages, blocks.shape[1], parts, 1 << 30 if window is None else window,
        TILE=TILE_ROWS, PAGE=page, BLOCK=block, ROWS=triton.next_power_of_2(num_rows), num_warps=8,
    )  # fmt: skip
    return plan


def attend_many(
    query: Tensor,  # (B, H, K)
    keys: Tensor,  # (H_kv, S, K)
    values: Tensor,  # (H_kv, S, K)
    rows: Rows,
    plan: Plan,
    launch: dict[str, Any],
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,  # (H,)
) -> Tensor:  # (B, H, K)
    (_, num_heads, head_dim), parts = query.shape, len(plan.starts) - 1
    share = divide_heads(num_heads, keys.shape[0], head_dim)
    group, heads, programs, lines, width = share
    partial = 2 * parts * programs * lines  # a program shares a tile with the one before it and the one after it
    top, total = torch.empty(2, partial, dtype=torch.float32, device=query.device)
    acc, out = torch.empty(partial, width, dtype=torch.float32, device=query.device), torch.empty_like(query)
    _attend_tiles[programs, parts](
        query, keys, values, rows.prefix_len, rows.own_len, rows.tiles, *plan[:-1], top, total, acc,
        counters(query.device, parts * programs), out if sinks is None else sinks, out,
        plan.blocks.shape[1], keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        *scales(scale, softcap), 0 if window is None else window, GROUP=group, HEADS=heads, TILE=TILE_ROWS, LINES=lines,
        K=head_dim, WIDTH=width, BLOCK=plan.block, WINDOW=window is not None, SOFTCAP=softcap is not None,
        SINKS=sinks is not None,
        UPCAST=not query.is_cuda,  # Triton's interpreter would multiply bfloat16 bit patterns as integers
        STAGES=STAGES, num_warps=_warps(share, keys.element_size()), **launch,
    )  # fmt: skip
    return out


if triton is not None:
    from kernels.decode.paged import HIDDEN, LN2, NOTHING, _attend_block

    LISTED = tl.constexpr(64)  # blocks per iteration of _plan
    # First bits of what is listed of a block: slot (0), member of the tile (TILE: all), number of tokens, position.
    SLOTS, MEMBER, TOKENS, POSITION = tl.constexpr(2**31 - 1), tl.constexpr(31), tl.constexpr(35), tl.constexpr(42)

    @triton.jit
    def _count_blocks(row, prefix_len, own_len, window, BLOCK: tl.constexpr):
        """Return lengths, first visible blocks and numbers of visible blocks, of rows (N, TILE) and prefixes (N,)."""
        used, leader = row >= 0, tl.max(row, 1)
        own = tl.load(own_len + row, mask=used, other=0)
        prefix = tl.load(prefix_len + leader, mask=leader >= 0, other=0)
        own_first = tl.maximum(own - window, 0) // BLOCK
        oldest = tl.min(tl.where(used, tl.maximum(prefix[:, None] + own - window, 0), 1 << 30), 1)
        prefix_end = tl.cdiv(prefix, BLOCK)
        prefix_first = tl.minimum(oldest // BLOCK, prefix_end)
        return own, own_first, tl.cdiv(own, BLOCK) - own_first, prefix, prefix_first, prefix_end - prefix_first

    @triton.jit
    def _pick(values, chosen):
        """Return the value (1, TILE) at `chosen`, or 0 if nothing is."""
        return tl.sum(tl.sum(tl.where(chosen, values, 0), 1), 0)

    @triton.jit(do_not_specialize=["num_rows", "pages", "most", "num_parts", "window"])
    def _plan(
        table, prefix_len, own_len, tiles, blocks, used_tiles, first, starts, total_out, num_rows, pages, most,
        num_parts, window, TILE: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    ):  # fmt: skip
        """List the blocks of a tile's prefix, or of one of its rows. One more program numbers tiles and blocks."""
        tile, member = tl.program_id(0), tl.program_id(1) - 1  # -1: the prefix
        index = tl.arange(0, TILE)[None, :]
        if tile < num_rows:
            row = tl.load(tiles + tile * TILE + index)
            chosen = (index == member) | (member < 0)
            source = tl.max(tl.max(tl.where(chosen, row, -1), 1), 0)
            if source >= 0:
                own, own_first, own_count, prefix, begin, count = _count_blocks(row, prefix_len, own_len, window, BLOCK)
                prefix, begin, count = tl.sum(prefix, 0), tl.sum(begin, 0), tl.sum(count, 0)
                length, place, position, page_at = prefix, 0, 0, 0
                if member >= 0:
                    place = count + _pick(own_count, index < member)
                    length, begin, count = _pick(own, chosen), _pick(own_first, chosen), _pick(own_count, chosen)
                    position, page_at = prefix, tl.cdiv(prefix, PAGE)
                sees = tl.where(member < 0, TILE, member).to(tl.int64)
                for done in range(0, count, LISTED):
                    number = done + tl.arange(0, LISTED)
                    inside = number < count
                    token = (begin + number) * BLOCK
                    at = table + source.to(tl.int64) * pages + page_at + token // PAGE
                    entry = tl.load(at, mask=inside, other=0).to(tl.int64) * PAGE + token % PAGE
                    entry += (sees << MEMBER) + (tl.minimum(length - token, BLOCK).to(tl.int64) << TOKENS)
                    entry += (position + token).to(tl.int64) << POSITION
                    tl.store(blocks + tile.to(tl.int64) * most + place + number, entry, mask=inside)
        elif member < 0:
            tile_index = tl.arange(0, ROWS)
            inside = (tile_index < num_rows)[:, None]
            row = tl.load(tiles + tile_index[:, None] * TILE + index, mask=inside, other=-1)
            own, own_first, own_count, prefix, begin, count = _count_blocks(row, prefix_len, own_len, window, BLOCK)
            count += tl.sum(own_count, 1)
            used = tl.max(row, 1) >= 0
            number, num_used = tl.cumsum(used.to(tl.int32), 0) - 1, tl.sum(used.to(tl.int32), 0)
            end, total = tl.cumsum(count, 0), tl.sum(count, 0)
            tl.store(used_tiles + number, tile_index, mask=used)
            tl.store(first + number, end - count, mask=used)
            tl.store(first + num_used, total)
            tl.store(total_out, total)
            # Parts that begin in each tile: _first_block(part) is in [end - count, end).
            busy = tl.minimum(num_parts, total)
            begins, ends = _first_part(end - count, busy, total), _first_part(end, busy, total)
            for later in range(tl.max(ends - begins, 0)):
                tl.store(starts + begins + later, number, mask=begins + later < ends)
            tl.store(starts + busy, num_used)

    @triton.jit
    def _first_block(part, busy, total):
        """Return the first block of one of `busy` parts, which have equally many blocks, or one more."""
        return (part.to(tl.int64) * total // busy).to(tl.int32)

    @triton.jit
    def _first_part(block, busy, total):
        """Return the first part that begins at this block or later."""
        return tl.cdiv(block.to(tl.int64) * busy, total).to(tl.int32)

    @triton.jit
    def _merge(first, last, tops, totals, accs, LINES: tl.constexpr, WIDTH: tl.constexpr):
        """Merge what programs `first` to `last` have written of a tile.

        They may have done so during this kernel: .cg reads from L2, not an older copy from L1.
        """
        line, column = tl.arange(0, LINES), tl.arange(0, WIDTH)[None, :]
        top = tl.full((LINES,), NOTHING, tl.float32)
        total = tl.zeros((LINES,), tl.float32)
        acc = tl.zeros((LINES, WIDTH), tl.float32)
        ends = 1  # the first program ends with this tile; the others begin with it
        for part in range(first, last + 1):
            place = ((2 * part + ends) * tl.num_programs(0) + tl.program_id(0)) * LINES + line
            its_top = tl.load(tops + place, cache_modifier=".cg")
            its_total = tl.load(totals + place, cache_modifier=".cg")
            its_acc = tl.load(accs + place[:, None] * WIDTH + column, cache_modifier=".cg")
            new_top = tl.maximum(top, its_top)
            shrink, weight = tl.exp2(top - new_top), tl.exp2(its_top - new_top)
            total = total * shrink + its_total * weight
            acc = acc * shrink[:, None] + its_acc * weight[:, None]
            top, ends = new_top, 0
        return top, total, acc

    @triton.jit
    def _store_output(top, total, acc, sinks, head, used, out, at, inside, SINKS: tl.constexpr):
        """Divide by the sum of weights; a sink is one more key, without a value."""
        if SINKS:
            sink = tl.load(sinks + head, mask=used, other=0.0).to(tl.float32) / LN2
            new_top = tl.maximum(top, sink)
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.exp2(sink - new_top)
            acc *= shrink[:, None]
        acc /= tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)

    @triton.jit(do_not_specialize=["most", "window"])
    def _attend_tiles(
        query, keys, values, prefix_len, own_len, tiles, blocks, used_tiles, first, starts, total_blocks, tops, totals,
        accs, counters, sinks, out, most, key_head, key_place, value_head, value_place, scale2, softcap2, window,
        GROUP: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, LINES: tl.constexpr, K: tl.constexpr,
        WIDTH: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
        UPCAST: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        """Attend to an equal part of all blocks, tile by tile, with HEADS of the GROUP queries of a key head."""
        SHARES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
        kv_head = tl.program_id(0) // SHARES
        share = tl.program_id(0) % SHARES * HEADS
        num_heads = tl.num_programs(0) // SHARES * GROUP
        keys += kv_head.to(tl.int64) * key_head
        values += kv_head.to(tl.int64) * value_head
        line, column, token = tl.arange(0, LINES), tl.arange(0, WIDTH)[None, :], tl.arange(0, BLOCK)
        member, head = line // HEADS, kv_head * GROUP + share + line % HEADS
        total_blocks = tl.load(total_blocks)
        busy = tl.minimum(tl.num_programs(1), total_blocks)
        part = tl.program_id(1)
        from_tile, to_tile, part_begin, part_end = 0, 0, 0, 0
        if part < busy:
            part_begin, part_end = _first_block(part, busy, total_blocks), _first_block(part + 1, busy, total_blocks)
            from_tile, to_tile = tl.load(starts + part), tl.load(starts + part + 1)
            to_tile += (tl.load(first + to_tile) < part_end).to(tl.int32)  # the next part begins within this tile
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        for number in range(from_tile, to_tile):
            tile = tl.load(used_tiles + number).to(tl.int64)
            tile_begin, tile_end = tl.load(first + number), tl.load(first + number + 1)
            begin, end = tl.maximum(part_begin, tile_begin), tl.minimum(part_end, tile_end)
            row = tl.load(tiles + tile * TILE + member, mask=line < TILE * HEADS, other=-1)
            used = (row >= 0) & (share + line % HEADS < GROUP)
            row = tl.where(used, row, 0).to(tl.int64)
            oldest = line * 0
            if WINDOW:  # first visible position
                oldest = tl.load(prefix_len + row) + tl.load(own_len + row) - window
            at = (row * num_heads + head)[:, None] * K + column
            inside = used[:, None] & (column < K)
            queries = tl.load(query + at, mask=inside, other=0.0).to(keys.dtype.element_ty)
            top = tl.full((LINES,), NOTHING, tl.float32)
            total = tl.zeros((LINES,), tl.float32)
            acc = tl.zeros((LINES, WIDTH), tl.float32)
            listed = blocks + tile * most - tile_begin
            entry = tl.load(listed + begin, mask=begin < end, other=0)
            for block in tl.range(begin, end, num_stages=STAGES):
                # One block ahead; otherwise the loads of keys would wait for it.
                next_entry = tl.load(listed + block + 1, mask=block + 1 < end, other=0)
                sees, seen = ((entry >> MEMBER) & 15).to(tl.int32), token < ((entry >> TOKENS) & 127).to(tl.int32)
                bias = tl.where((sees == TILE) | (sees == member), 0.0, HIDDEN)[:, None]
                bias += tl.where(seen, 0.0, HIDDEN)[None, :]
                if WINDOW:
                    position = (entry >> POSITION).to(tl.int32) + token
                    bias = tl.where(position[None, :] >= oldest[:, None], bias, HIDDEN)
                top, total, acc = _attend_block(
                    queries, keys, values, entry & SLOTS, seen, bias, top, total, acc, key_place,
                    value_place, scale2, softcap2, K, WIDTH, BLOCK, SOFTCAP, UPCAST,
                )  # fmt: skip
                entry = next_entry
            if (begin == tile_begin) & (end == tile_end):
                _store_output(top, total, acc, sinks, head, used, out, at, inside, SINKS)
            else:
                place = (2 * part + (begin == tile_begin).to(tl.int32)) * tl.num_programs(0) + tl.program_id(0)
                place = place * LINES + line
                tl.store(tops + place, top)
                tl.store(totals + place, total)
                tl.store(accs + place[:, None] * WIDTH + column, acc)
                # The parts that contain the tile's first and last block.
                first_part = _first_part(tile_begin + 1, busy, total_blocks) - 1
                last_part = _first_part(tile_end, busy, total_blocks) - 1
                tl.debug_barrier()  # all threads have written
                counter = counters + first_part * tl.num_programs(0) + tl.program_id(0)
                if tl.atomic_add(counter, 1, sem="acq_rel") == last_part - first_part:
                    tl.store(counter, 0)
                    top, total, acc = _merge(first_part, last_part, tops, totals, accs, LINES, WIDTH)
                    _store_output(top, total, acc, sinks, head, used, out, at, inside, SINKS)
