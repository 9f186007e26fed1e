"""Decode rows over a paged cache and their exact attention, for the tests of kernels/decode/attention.py."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.decode.attention import TILE_ROWS, Rows


class Problem(NamedTuple):
    query: Tensor  # (B, H, K)
    keys: Tensor  # (H_kv, S, K)
    values: Tensor  # (H_kv, S, K)
    rows: Rows
    page: int
    softcap: float | None = None
    sinks: Tensor | None = None  # (H,)

    @property
    def options(self) -> dict[str, Any]:
        return {"page": self.page, "scale": self.query.shape[2] ** -0.5, "softcap": self.softcap, "sinks": self.sinks}

    def to(self, device: str) -> Problem:
        tensors = (x.to(device) for x in self[:3])
        sinks = None if self.sinks is None else self.sinks.to(device)
        return Problem(*tensors, Rows(*(x.to(device) for x in self.rows)), self.page, self.softcap, sinks)


def make_problem(
    groups: list[tuple[int, list[int]]],  # prefix tokens, own tokens of each row
    *,
    heads: tuple[int, int, int] = (4, 2, 16),  # H, H_kv, K
    page: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    holes: bool = False,  # -1 between the rows of a tile
    softcap: float | None = None,
    sinks: bool = False,
) -> Problem:
    """Build a problem with pages and rows in random order. Slots that no row sees contain NaN."""
    draw = torch.Generator().manual_seed(seed)
    num_rows = sum(len(own) for _, own in groups)
    needed = [(-(-prefix // page), [-(-length // page) for length in own]) for prefix, own in groups]
    total = sum(shared + sum(own) for shared, own in needed) + 2
    width = max(shared + max(own) for shared, own in needed) + 1
    free = torch.randperm(total, generator=draw).tolist()
    free_rows = torch.randperm(num_rows, generator=draw).tolist()
    table = torch.randint(total, (num_rows, width), generator=draw, dtype=torch.int32)  # unused entries: any page
    prefix_len, own_len = (torch.zeros(num_rows, dtype=torch.int32) for _ in range(2))
    written = torch.zeros(total * page, dtype=torch.bool)
    tiles: list[list[int]] = []
    for (prefix, own), (shared, own_pages) in zip(groups, needed, strict=True):
        shared_pages = [free.pop() for _ in range(shared)]
        members = []
        for length, pages in zip(own, own_pages, strict=True):
            row = free_rows.pop()
            members.append(row)
            row_pages = [free.pop() for _ in range(pages)]
            table[row, : shared + pages] = torch.tensor(shared_pages + row_pages, dtype=torch.int32)
            prefix_len[row], own_len[row] = prefix, length
            for pages_of, tokens in ((shared_pages, prefix), (row_pages, length)):
                for n in range(tokens):
                    written[pages_of[n // page] * page + n % page] = True
        each = TILE_ROWS // 2 if holes else TILE_ROWS
        for start in range(0, len(members), each):
            part = members[start : start + each]
            if holes:
                part = [x for member in part for x in (-1, member)]
            tiles.append(part + [-1] * (TILE_ROWS - len(part)))
    assert len(tiles) <= num_rows
    tiles = [[-1] * TILE_ROWS] * (num_rows - len(tiles)) + tiles  # unused tiles first
    num_heads, key_heads, head_dim = heads
    query = torch.randn(num_rows, num_heads, head_dim, generator=draw).to(dtype)
    keys, values = (torch.randn(key_heads, total * page, head_dim, generator=draw).to(dtype) for _ in range(2))
    keys[:, ~written], values[:, ~written] = math.nan, math.nan
    rows = Rows(table, prefix_len, own_len, torch.tensor(tiles, dtype=torch.int32))
    # One sink above all scores, one far below.
    logits = torch.linspace(-20.0, 6.0, num_heads).to(dtype) if sinks else None
    return Problem(query, keys, values, rows, page, softcap, logits)


def naive(problem: Problem, window: int | None = None) -> Tensor:  # (B, H, K) float64
    """Attend row by row and head by head, in float64."""
    query, keys, values, rows, page = problem[:5]
    num_heads, key_heads = query.shape[1], keys.shape[0]
    out = torch.zeros(query.shape, dtype=torch.float64)
    for b in range(query.shape[0]):
        pages, prefix, own = rows.table[b].tolist(), int(rows.prefix_len[b]), int(rows.own_len[b])
        slots = [pages[n // page] * page + n % page for n in range(prefix)]
        prefix_pages = math.ceil(prefix / page)
        slots += [pages[prefix_pages + n // page] * page + n % page for n in range(own)]
        slots = slots[-window:] if window is not None else slots
        for head in range(num_heads):
            key_head = head // (num_heads // key_heads)
            score = keys[key_head, slots].double() @ query[b, head].double() * problem.options["scale"]
            if problem.softcap is not None:
                score = problem.softcap * torch.tanh(score / problem.softcap)
            weight = score.exp()
            total = weight.sum() + (0 if problem.sinks is None else problem.sinks[head].double().exp())
            out[b, head] = weight @ values[key_head, slots].double() / total
    return out


def error(got: Tensor, exact: Tensor) -> float:
    return ((got.double() - exact.double()).norm() / exact.double().norm()).item()
