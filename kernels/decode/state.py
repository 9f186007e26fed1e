"""Update the state of decode rows before the forward pass and after sampling, with one kernel each.

- `locate`: find the position and the cache slot of each row's token.
- `advance`: write the sampled tokens, find the rows that end, and set the next token of the other rows.

In plain torch these are about twenty operations, each 2 to 3 microseconds of a captured step. Grids depend only on
shapes and everything else is read on the device, so a step can be captured in a CUDA graph. The kernels run on CUDA,
the `*_reference` functions elsewhere.

Shapes: B = decode rows, S = stop ids, N = output lines, one per decode step, M = width of a line, at least B.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch may lack Triton; the references run there
    triton = None

LOCATE_ROWS = 128  # rows per program of _locate
ADVANCE_ROWS = 1024  # rows per iteration of the single program of _advance


def locate(
    table: Tensor,  # (B, pages) int32 pages of the prefix, then the row's own pages
    prefix_len: Tensor,  # (B,) int32
    own_len: Tensor,  # (B,) int32 including the token to run: at least 1
    *,
    page: int,
) -> tuple[Tensor, Tensor]:  # (B,) int32 positions, (B,) int64 slots
    """Return the position and the cache slot of each row's last own token."""
    fits = table.is_cuda and triton is not None
    return (locate_kernel if fits else locate_reference)(table, prefix_len, own_len, page=page)


def advance(
    ids: Tensor,  # (B,) int64 sampled ids
    logps: Tensor,  # (B,) float32
    stop_ids: Tensor,  # (S,) int64, -1 = none
    tick: Tensor,  # (1,) int64 output line to write, below N
    out_ids: Tensor,  # (N, M) int64
    out_logps: Tensor,  # (N, M) float32
    *,
    token: Tensor,  # (B,) int64 next token to run
    own_len: Tensor,  # (B,) int32
    drawn: Tensor,  # (B,) int32 tokens sampled so far
    left: Tensor,  # (B,) int32 tokens that may still be sampled; 0 = the row has ended
) -> None:
    """Write ids and log-probs to output line `tick`, increment `tick` and update the rows, all in place.

    Rows that had already ended get id -1. A row ends with a stop id or when `left` reaches 0. Then only `left` changes,
    and the row runs its last token again.
    """
    run = advance_kernel if ids.is_cuda and triton is not None else advance_reference
    state = {"token": token, "own_len": own_len, "drawn": drawn, "left": left}
    run(ids, logps, stop_ids, tick, out_ids, out_logps, **state)


# Plain torch


def locate_reference(
    table: Tensor,  # (B, pages) int32
    prefix_len: Tensor,  # (B,) int32
    own_len: Tensor,  # (B,) int32
    *,
    page: int,
) -> tuple[Tensor, Tensor]:  # (B,) int32, (B,) int64
    own = own_len - 1
    page_at = (prefix_len + page - 1) // page + own // page
    slot = table.gather(1, page_at[:, None].long())[:, 0].long() * page + own % page
    return prefix_len + own, slot


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
    continues = left > 0
    token.copy_(torch.where(continues, ids, token))
    own_len.add_(continues)
    drawn.add_(continues)


# Kernels, on CUDA or under TRITON_INTERPRET=1


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
    slot = torch.empty(num_rows, dtype=torch.int64, device=table.device)
    if num_rows:
        _locate[triton.cdiv(num_rows, LOCATE_ROWS),](
            table, prefix_len, own_len, position, slot, num_rows, table.stride(0), PAGE=page, BLOCK=LOCATE_ROWS,
            num_warps=4,
        )  # fmt: skip
    return position, slot


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
        """Process all rows in one program, so that `tick` has one reader and one writer."""
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
            # Several warps may load the same value: all must have read it, and `line`, before one writes.
            tl.debug_barrier()
            tl.store(out_ids + line * ids_row + row, tl.where(before > 0, new, -1), mask=inside)
            tl.store(out_logps + line * logps_row + row, logp, mask=inside)
            tl.store(left + row, after, mask=inside)
            tl.store(token + row, new, mask=goes_on)
            tl.store(own_len + row, length + 1, mask=goes_on)
            tl.store(drawn + row, number + 1, mask=goes_on)
        tl.store(tick, line + 1)
