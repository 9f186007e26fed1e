"""What a decode step does to the state of its rows, around the forward and the draw; one kernel each.

- `locate`: position of each row's token, and its place in the cache.
- `advance`: write what was drawn, find the rows that end, and make the drawn token the next one of the others.

In plain torch they are some twenty operations, each 2 to 3 microseconds of a captured step. Grids depend on shapes
alone and all else is read on the device, so a step can be captured in a CUDA graph. On CUDA the kernels run, elsewhere
the `*_reference` functions.

Shapes: B = rows, S = stop ids, N = lines of the output, one for each step, M = rows it has room for, at least B.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch may come without Triton; the references run there
    triton = None

LOCATE_ROWS = 128  # rows of one program of _locate
ADVANCE_ROWS = 1024  # rows that the only program of _advance takes at once


def locate(
    table: Tensor,  # (B, pages) int32 pages of the prefix, then the row's own
    prefix_len: Tensor,  # (B,) int32
    own_len: Tensor,  # (B,) int32 the token to run included: at least 1
    *,
    page: int,
) -> tuple[Tensor, Tensor]:  # (B,) int32 positions, (B,) int64 places
    """Position in its row and place in the cache of the last own token of each row."""
    fits = table.is_cuda and triton is not None
    return (locate_kernel if fits else locate_reference)(table, prefix_len, own_len, page=page)


def advance(
    ids: Tensor,  # (B,) int64 drawn
    logps: Tensor,  # (B,) float32
    stop_ids: Tensor,  # (S,) int64, -1 = none
    tick: Tensor,  # (1,) int64 line of the output to write, which must be there
    out_ids: Tensor,  # (N, M) int64
    out_logps: Tensor,  # (N, M) float32
    *,
    token: Tensor,  # (B,) int64 the token to run next
    own_len: Tensor,  # (B,) int32
    drawn: Tensor,  # (B,) int32 tokens drawn so far
    left: Tensor,  # (B,) int32 tokens that may still be drawn; 0 = the row has ended
) -> None:
    """Write ids and log-probs to line `tick` of the output, add 1 to it, and update the rows; all in place.

    The id of a row that had ended is written as -1. A row ends with a stop id or when `left` comes to 0: then only
    `left` changes, and the row runs its last token again.
    """
    run = advance_kernel if ids.is_cuda and triton is not None else advance_reference
    state = {"token": token, "own_len": own_len, "drawn": drawn, "left": left}
    run(ids, logps, stop_ids, tick, out_ids, out_logps, **state)


# ---- plain torch ----


def locate_reference(
    table: Tensor,  # (B, pages) int32
    prefix_len: Tensor,  # (B,) int32
    own_len: Tensor,  # (B,) int32
    *,
    page: int,
) -> tuple[Tensor, Tensor]:  # (B,) int32, (B,) int64
    own = own_len - 1
    page_at = (prefix_len + page - 1) // page + own // page
    place = table.gather(1, page_at[:, None].long())[:, 0].long() * page + own % page
    return prefix_len + own, place


def advance_reference(
    ids: Tensor,  # (B,) int64
    logps: Tensor,  # (B,) float32
    stop_ids: Tensor,  # (S,) int64
    tick: Tensor,  # (1,) int64
    out_ids: Tensor,  # (N, M) int64
    out_logps: Tensor,  # (N, M) float32
    *,
    token: Tensor,  # (B,) int64
    own_len: Tensor,  # (B,) int32
    drawn: Tensor,  # (B,) int32
    left: Tensor,  # (B,) int32
) -> None:
    live = left > 0
    out_ids[:, : len(ids)].index_copy_(0, tick, torch.where(live, ids, -1)[None])
    out_logps[:, : len(ids)].index_copy_(0, tick, logps[None])
    tick += 1
    stopped = (ids[:, None] == stop_ids).any(dim=1)
    left.copy_(torch.where(stopped, 0, left - 1).clamp(min=0))
    goes_on = left > 0
    token.copy_(torch.where(goes_on, ids, token))
    own_len.add_(goes_on)
    drawn.add_(goes_on)


# ---- kernels, on CUDA or under TRITON_INTERPRET=1 ----


def locate_kernel(
    table: Tensor,  # (B, pages) int32
    prefix_len: Tensor,  # (B,) int32
    own_len: Tensor,  # (B,) int32
    *,
    page: int,
) -> tuple[Tensor, Tensor]:  # (B,) int32, (B,) int64
    num_rows = len(table)
    assert table.stride(1) == 1 and prefix_len.is_contiguous() and own_len.is_contiguous()
    position = torch.empty(num_rows, dtype=torch.int32, device=table.device)
    place = torch.empty(num_rows, dtype=torch.int64, device=table.device)
    if num_rows:
        _locate[triton.cdiv(num_rows, LOCATE_ROWS),](
            table, prefix_len, own_len, position, place, num_rows, table.stride(0), PAGE=page, BLOCK=LOCATE_ROWS,
            num_warps=4,
        )  # fmt: skip
    return position, place


def advance_kernel(
    ids: Tensor,  # (B,) int64
    logps: Tensor,  # (B,) float32
    stop_ids: Tensor,  # (S,) int64
    tick: Tensor,  # (1,) int64
    out_ids: Tensor,  # (N, M) int64
    out_logps: Tensor,  # (N, M) float32
    *,
    token: Tensor,  # (B,) int64
    own_len: Tensor,  # (B,) int32
    drawn: Tensor,  # (B,) int32
    left: Tensor,  # (B,) int32
) -> None:
    assert all(x.is_contiguous() for x in (ids, logps, stop_ids, token, own_len, drawn, left))
    assert out_ids.stride(1) == out_logps.stride(1) == 1 and min(out_ids.shape[1], out_logps.shape[1]) >= len(ids)
    _advance[1,](
        ids, logps, stop_ids, tick, out_ids, out_logps, token, own_len, drawn, left, len(ids), out_ids.stride(0),
        out_logps.stride(0), NUM_STOP=len(stop_ids), BLOCK=ADVANCE_ROWS, num_warps=8,
    )  # fmt: skip


if triton is not None:

    @triton.jit(do_not_specialize=["num_rows"])
    def _locate(
        table, prefix_len, own_len, position, place, num_rows, table_row, PAGE: tl.constexpr, BLOCK: tl.constexpr
    ):
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = row < num_rows
        before = tl.load(prefix_len + row, mask=inside, other=0)
        own = tl.load(own_len + row, mask=inside, other=1) - 1
        at = row.to(tl.int64) * table_row + (before + PAGE - 1) // PAGE + own // PAGE
        page = tl.load(table + at, mask=inside, other=0)
        tl.store(position + row, before + own, mask=inside)
        tl.store(place + row, page.to(tl.int64) * PAGE + own % PAGE, mask=inside)

    @triton.jit(do_not_specialize=["num_rows"])
    def _advance(
        ids, logps, stop_ids, tick, out_ids, out_logps, token, own_len, drawn, left, num_rows, ids_row, logps_row,
        NUM_STOP: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """One program for all rows, so that `tick` has one reader and one writer."""
        line = tl.load(tick)
        for first in range(0, num_rows, BLOCK):
            row = first + tl.arange(0, BLOCK)
            inside = row < num_rows
            new = tl.load(ids + row, mask=inside, other=0)
            logp = tl.load(logps + row, mask=inside, other=0.0)
            before = tl.load(left + row, mask=inside, other=0)
            length = tl.load(own_len + row, mask=inside, other=0)
            number = tl.load(drawn + row, mask=inside, other=0)
            stopped = row < 0
            for n in range(NUM_STOP):
                stopped = stopped | (new == tl.load(stop_ids + n))
            after = tl.where(stopped, 0, tl.maximum(before - 1, 0))
            goes_on = inside & (after > 0)
            # Several warps may hold the same value: all must have read it, and `line`, before one writes.
            tl.debug_barrier()
            tl.store(out_ids + line * ids_row + row, tl.where(before > 0, new, -1), mask=inside)
            tl.store(out_logps + line * logps_row + row, logp, mask=inside)
            tl.store(left + row, after, mask=inside)
            tl.store(token + row, new, mask=goes_on)
            tl.store(own_len + row, length + 1, mask=goes_on)
            tl.store(drawn + row, number + 1, mask=goes_on)
        tl.store(tick, line + 1)
