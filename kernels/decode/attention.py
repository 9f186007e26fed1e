"""Attention of one decode step over a paged cache: one query per decode row, over a shared prefix and own tokens.

The rows of a group share their prompt. The cache contains it once, and it is read once per TILE_ROWS rows: at 512 rows
in groups of 8, reading it for each row would be most of the memory traffic. attention_few.py and attention_many.py are
the kernels for few and many rows.

Any head size up to 256 works: the kernels pad it to a power of two in registers. Capped scores and sinks are as in
kernels/attention.py.

Grids depend only on shapes and lengths are read on the device, so a step can be captured in a CUDA graph.
`decode_attention` runs a kernel on CUDA and `decode_attention_reference` elsewhere.

Shapes: B = decode rows, H = query heads, H_kv = key heads, K = head size, S = cache slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.decode.attention_few import attend_few
from kernels.decode.attention_many import LEAST_SHARED, Plan, attend_many, gpu_of, plan_many
from kernels.decode.launch import launch_options
from kernels.decode.paged import TILE_ROWS, Rows

try:
    import triton
except ImportError:  # CPU builds of torch may lack Triton; the reference runs there
    triton = None

# Most pairs of a row and a key head for which attention_few.py is faster, as measured on an H200.
MOST_FEW = 1024
MOST_FEW_WIDE = 511  # with 4 query heads of 128 per key head


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
    plan: Plan | Visible | None = None,  # from `plan_step`, to share it between layers
) -> Tensor:  # (B, H, K)
    """softmax(scale * query @ keys.T) @ values over the tokens visible to each row.

    Prefix token n of row b is in slot table[b, n // page] * page + n % page. Own tokens start on a new page, after the
    ceil(prefix_len / page) pages of the prefix. With a window, a row at position prefix_len + own_len - 1 sees only
    keys less than `window` positions back, including itself.
    """
    options = {"page": page, "scale": scale, "window": window, "softcap": softcap, "sinks": sinks, "plan": plan}
    run = decode_attention_kernel if has_kernel(keys) else decode_attention_reference
    return run(query, keys, values, rows, **options)


def has_kernel(
    keys: Tensor,  # (H_kv, S, K)
) -> bool:
    is_float = keys.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return keys.is_cuda and is_float and supports(keys.shape[2]) and triton is not None


def plan_step(
    keys: Tensor,  # (H_kv, S, K) of any layer
    rows: Rows,
    *,
    num_heads: int,
    page: int,
    window: int | None = None,
) -> Plan | Visible | None:
    """Find what all layers of a step with this window share.

    Another kernel must be launched in the ordinary way before attention with this plan (see launch.py).
    """
    if not has_kernel(keys):
        return plan_reference(keys, rows, page=page, window=window)
    if has_few(keys, rows, num_heads):
        return None
    return plan_many(keys, rows, num_heads=num_heads, page=page, window=window)


def has_few(
    keys: Tensor,  # (H_kv, S, K)
    rows: Rows,
    num_heads: int,
) -> bool:
    key_heads, _, head_dim = keys.shape
    is_wide = (num_heads // key_heads, head_dim) == (4, 128)
    most = MOST_FEW_WIDE if is_wide else MOST_FEW
    return len(rows.table) * key_heads <= most or gpu_of(keys.device)[1] < LEAST_SHARED


class Visible(NamedTuple):
    """Cache slots of the tokens that each row attends to, padded to the longest row."""

    slot: Tensor  # (B, T) int64
    visible: Tensor  # (B, T) bool


def plan_reference(
    keys: Tensor,  # (H_kv, S, K)
    rows: Rows,
    *,
    page: int,
    window: int | None,
) -> Visible:
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
    plan: Visible | None = None,
) -> Tensor:  # (B, H, K)
    """Plain torch version in float32 or wider; gathers the keys and values of every row."""
    num_rows, num_heads, head_dim = query.shape
    if num_rows == 0:
        return torch.empty_like(query)
    wide = torch.promote_types(query.dtype, torch.float32)
    slot, visible = plan or plan_reference(keys, rows, page=page, window=window)
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
    return out.to(query.dtype)


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
    plan: Plan | None = None,
) -> Tensor:  # (B, H, K)
    """The Triton kernels, on CUDA or under TRITON_INTERPRET=1."""
    (num_rows, num_heads, head_dim), key_heads = query.shape, keys.shape[0]
    assert supports(head_dim) and page % 16 == 0, f"head_dim={head_dim}, page={page}"
    assert rows.tiles.shape == (num_rows, TILE_ROWS) and num_heads % key_heads == 0
    assert keys.stride(2) == values.stride(2) == 1 and all(x.is_contiguous() for x in rows)
    query = query.contiguous()
    if num_rows == 0:
        return torch.empty_like(query)
    options = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    if has_few(keys, rows, num_heads):
        return attend_few(query, keys, values, rows, page=page, **options)
    # What an earlier kernel has just written must not be read ahead of it (see launch.py).
    launch = {"PDL": False} if plan is None else launch_options(query)
    plan = plan or plan_many(keys, rows, num_heads=num_heads, page=page, window=window)
    return attend_many(query, keys, values, rows, plan, launch, **options)
