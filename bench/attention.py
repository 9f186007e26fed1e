"""Attention over packed rows, shared prompts and strided rows, forward and backward: flex vs. alternatives.

    python -m bench.attention [--out rows.jsonl] [--only packed shared strided masks] [--seconds 3]

Heads of Qwen3-1.7B on a GPU; small heads elsewhere, where only dense masks have a backward. Masks are built beforehand,
because one mask serves all layers; section `masks` times building them. Rates count logical tokens, a prompt
once per completion; `tflops` counts only products of visible pairs. Errors cover the heads that
share the first key head, whose float64 scores fit in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import tyro
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.functional import scaled_dot_product_attention

from bench.common import Row, alternate, emit, make_row, relative_error, require_commit
from data.strided import Document, StridedPlan, make_strided
from kernels import reference
from kernels.attention import (
    TILE,
    SpanMask,
    Spans,
    block_mask,
    dense_mask,
    flash_obstacle,
    flex_attend,
    use_flash,
)

Section = Literal["packed", "shared", "strided", "masks"]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Sizes(NamedTuple):
    heads: int
    key_heads: int
    head: int
    prompt: int
    completions: int
    completion: int
    anchors_every: int
    generated: int
    samples: int


SIZES = {
    "cpu": Sizes(4, 2, 32, prompt=256, completions=4, completion=64, anchors_every=16, generated=8, samples=2),
    "cuda": Sizes(16, 8, 128, prompt=2048, completions=8, completion=512, anchors_every=8, generated=8, samples=4),
}


class Problem(NamedTuple):
    """Inputs of attention over R rows, and the gradient of the output."""

    query: Tensor  # (R, H, T, K)
    key: Tensor  # (R, H_kv, T, K)
    value: Tensor  # (R, H_kv, T, K)
    weight: Tensor  # (R, H, T, K)
    spans: Spans

    @property
    def scale(self) -> float:
        return self.query.shape[-1] ** -0.5

    @property
    def length(self) -> int:
        return self.query.shape[2]

    def dense(self) -> Tensor:  # (R, 1, T, T) bool
        return dense_mask(self.spans, self.length)

    def num_pairs(self) -> int:
        """Number of visible query-key pairs."""
        return sum(int((stop - start).sum()) for start, stop in zip(self.spans[::2], self.spans[1::2], strict=True))

    def at(self, places: Tensor, spans: Spans) -> Problem:  # places (R', T')
        """Rearrange the tokens into rows that may repeat some of them."""
        tensors = (x.detach()[0][:, places].transpose(0, 1) for x in self[:4])  # (R', H, T', K)
        query, key, value, weight = (x.contiguous() for x in tensors)
        return Problem(query.requires_grad_(), key.requires_grad_(), value.requires_grad_(), weight, spans)


def draw_problem(sizes: Sizes, spans: Spans) -> Problem:
    device = spans[0].device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows, length = spans[0].shape
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(rows, n, length, sizes.head) for n in (sizes.heads, sizes.key_heads, sizes.key_heads, sizes.heads)]
    query, key, value, weight = (torch.randn(s, generator=generator, device=device, dtype=dtype) for s in shapes)
    return Problem(query.requires_grad_(), key.requires_grad_(), value.requires_grad_(), weight, spans)


def causal(rows: int, length: int, device: torch.device) -> Spans:
    stop = torch.arange(1, length + 1, device=device).expand(rows, -1)
    zero = torch.zeros_like(stop)
    return zero, zero, zero, stop


def shared_prompt(prompt: int, completions: int, completion: int, device: torch.device) -> Spans:
    place = torch.arange(prompt + completions * completion, device=device).unsqueeze(0)
    is_prompt = place < prompt
    own_start = torch.where(is_prompt, 0, place - (place - prompt) % completion)
    return torch.zeros_like(place), torch.where(is_prompt, 0, prompt), own_start, place + 1


def solve(problem: Problem, attend: Attend) -> dict[str, Tensor]:
    inputs = problem[:3]
    out = attend(*inputs)
    gradients = torch.autograd.grad(out, inputs, problem.weight.to(out.dtype))
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


def flex(problem: Problem) -> Attend:
    return partial(flex_attend, block_mask=block_mask(problem.spans, problem.length), scale=problem.scale)


def flash(problem: Problem) -> Attend:
    attend = flex(problem)

    def run(*inputs: Tensor) -> Tensor:
        use_flash(True)
        try:
            return attend(*inputs)
        finally:
            use_flash(False)

    return run


def with_flash(name: str, problem: Problem, sizes: Sizes) -> dict[str, tuple[Problem, Attend]]:
    if obstacle := flash_obstacle(sizes.head):
        print(f"{name}: {obstacle}", flush=True)
        return {}
    return {name: (problem, flash(problem))}


def dense_sdpa(problem: Problem) -> Attend:
    """Call sdpa with a mask like transformers, with repeated key heads."""
    mask, repeats = problem.dense(), problem.query.shape[1] // problem.key.shape[1]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=problem.scale)

    return attend


def causal_sdpa(problem: Problem) -> Attend:
    return partial(scaled_dot_product_attention, is_causal=True, enable_gqa=True, scale=problem.scale)


def errors_of(problem: Problem, got: dict[str, Tensor]) -> dict[str, float]:
    """Return distances to float64, over the query heads of the first key head."""
    few = {"out": problem.query.shape[1] // problem.key.shape[1], "dk": 1, "dv": 1}
    few["dq"] = few["out"]
    heads = (few["dq"], 1, 1, few["out"])
    parts = [x.detach()[:, :n].double() for x, n in zip(problem[:4], heads, strict=True)]
    small = Problem(*(x.requires_grad_() for x in parts[:3]), parts[3], problem.spans)
    exact = solve(small, partial(reference.attention, mask=problem.dense(), scale=problem.scale))
    return {name: relative_error(got[name][:, : few[name]], true) for name, true in exact.items()}


def measure(
    section: str, entries: dict[str, tuple[Problem, Attend]], shape: dict[str, int], *, tokens: int, seconds: float
) -> list[Row]:
    timings = alternate({name: partial(solve, *entry) for name, entry in entries.items()}, seconds=seconds)
    rows = []
    for name, timing in timings.items():
        problem, attend = entries[name]
        # Forward: scores and output; backward: scores, and the gradients of four operands.
        flops = 7 * 2 * problem.num_pairs() * problem.query.shape[1] * problem.query.shape[3]
        rows.append(make_row(
            f"attention/{section}", name, timing, shape=shape, dtype=problem.query.dtype,
            work=tokens, unit="tokens", errors=errors_of(problem, solve(problem, attend)), against=timings,
            extra={"computed_tokens": problem.spans[0].numel(), "tflops": flops / timing.p50 / 1e9},
        ))  # fmt: skip
    return rows


def packed(sizes: Sizes, device: torch.device, seconds: float) -> list[Row]:
    """Measure causal sequences of uneven lengths in one row, as in DPO, without shared prompts."""
    longest = sizes.prompt // 2
    lengths = [longest // 4 + (7 * i * longest // 16) % longest for i in range(16)]
    lengths[-1] += -sum(lengths) % TILE
    ends = torch.tensor(lengths, device=device).cumsum(0)  # (16,)
    place = torch.arange(sum(lengths), device=device).unsqueeze(0)
    own_start = (ends - torch.tensor(lengths, device=device))[torch.searchsorted(ends, place, right=True)]
    zero = torch.zeros_like(place)
    problem = draw_problem(sizes, (zero, zero, own_start, place + 1))
    entries = {"sdpa, dense mask": (problem, dense_sdpa(problem))}
    if device.type == "cuda":
        entries = {"flex": (problem, flex(problem))} | with_flash("flex, FlashAttention 4", problem, sizes) | entries
        if find_spec("torch.nn.attention.varlen"):
            entries["torch varlen"] = (problem, varlen(problem, lengths))
    shape = {"T": problem.length, "sequences": 16, "H": sizes.heads, "H_kv": sizes.key_heads, "K": sizes.head}
    return measure("packed", entries, shape, tokens=problem.length, seconds=seconds)


def varlen(problem: Problem, lengths: list[int]) -> Attend:
    """Run torch's variable-length attention, whose API depends on the version."""
    from torch.nn.attention.varlen import varlen_attn

    takes = signature(varlen_attn).parameters
    options: dict[str, Any] = {"scale": problem.scale} if "scale" in takes else {}
    options |= {"window_size": (-1, 0)} if "window_size" in takes else {"is_causal": True}
    repeats = 1 if "enable_gqa" in takes else problem.query.shape[1] // problem.key.shape[1]
    options |= {"enable_gqa": True} if "enable_gqa" in takes else {}
    bounds = torch.tensor([0, *lengths], device=problem.query.device).cumsum(0).to(torch.int32)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, H, K)
        key, value = (x.repeat_interleave(repeats, dim=1) if repeats > 1 else x for x in (key, value))
        out = varlen_attn(query, key, value, bounds, bounds, max(lengths), max(lengths), **options)
        return out.transpose(0, 1).unsqueeze(0)

    return attend


def shared(sizes: Sizes, device: torch.device, seconds: float) -> list[Row]:
    """Measure one prompt and its completions: one copy of the prompt, or one per completion."""
    group, length = sizes.completions, sizes.prompt + sizes.completion
    problem = draw_problem(sizes, shared_prompt(sizes.prompt, group, sizes.completion, device))
    own = sizes.prompt + torch.arange(group * sizes.completion, device=device).view(group, -1)
    places = torch.cat([torch.arange(sizes.prompt, device=device).expand(group, -1), own], dim=1)  # (G, T')
    repeated = problem.at(places.view(1, -1), shared_prompt(0, group, length, device))
    batch = problem.at(places, causal(group, length, device))
    entries = {
        "sdpa, dense mask, shared": (problem, dense_sdpa(problem)),
        "sdpa, causal, one per row": (batch, causal_sdpa(batch)),
    }
    if device.type == "cuda":
        fast = with_flash("flex, FlashAttention 4, shared", problem, sizes)
        ours = {"flex, shared": (problem, flex(problem)), "flex, packed": (repeated, flex(repeated))}
        entries = ours | fast | entries
    else:
        entries["sdpa, dense mask, packed"] = (repeated, dense_sdpa(repeated))
    shape = {"P": sizes.prompt, "G": group, "R": sizes.completion, "H": sizes.heads, "H_kv": sizes.key_heads}
    return measure("shared", entries, shape | {"K": sizes.head}, tokens=group * length, seconds=seconds)


def strided(sizes: Sizes, device: torch.device, seconds: float) -> list[Row]:
    problem = draw_problem(sizes, strided_spans(sizes, device))
    entries = {"sdpa, dense mask": (problem, dense_sdpa(problem))}
    if device.type == "cuda":
        entries = {"flex": (problem, flex(problem))} | with_flash("flex, FlashAttention 4", problem, sizes) | entries
    shape = {"T": problem.length, "P": sizes.prompt, "stride": sizes.anchors_every, "generated": sizes.generated}
    shape |= {"samples": sizes.samples, "H": sizes.heads, "H_kv": sizes.key_heads, "K": sizes.head}
    return measure("strided", entries, shape, tokens=problem.length, seconds=seconds)


def strided_spans(sizes: Sizes, device: torch.device) -> Spans:
    every = sizes.anchors_every
    plan = StridedPlan(
        stride=every, context_length=every, generate_max_len=sizes.generated, n_samples_per_prompt=sizes.samples
    )
    (batch,) = make_strided([Document(list(range(sizes.prompt)))], plan, max_tokens=1, multiple=TILE)
    batch = batch.to(device)
    return batch.spans


def masks(sizes: Sizes, device: torch.device, seconds: float) -> list[Row]:
    """Measure building tile lists from spans vs. torch's create_block_mask, which evaluates every pair."""
    spans = strided_spans(sizes, device)
    length = spans[0].shape[1]
    see = SpanMask(spans)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return see(b, h, q, k)

    def by_torch() -> BlockMask:
        return create_block_mask(mask_mod, B=1, H=None, Q_LEN=length, KV_LEN=length, device=device.type)

    entries = {"block_mask": partial(block_mask, spans, length), "torch create_block_mask": by_torch}
    tiles = dense_mask(spans, length).view(1, 1, length // TILE, TILE, length // TILE, TILE)
    full = tiles.all(dim=5).all(dim=3)
    partial_tiles = tiles.any(dim=5).any(dim=3) & ~full
    timings = alternate(entries, seconds=seconds)
    rows = []
    for name, timing in timings.items():
        mask = entries[name]()
        counts = ((mask.kv_num_blocks, partial_tiles.sum(dim=-1)), (mask.full_kv_num_blocks, full.sum(dim=-1)))
        rows.append(make_row(
            "attention/masks", name, timing, shape={"T": length}, dtype="int32", work=length, unit="tokens",
            errors={"tiles": max(relative_error(got, exact) for got, exact in counts)},
            against=timings,
        ))  # fmt: skip
    return rows


SECTIONS: dict[Section, Callable[[Sizes, torch.device, float], list[Row]]] = {
    "packed": packed, "shared": shared, "strided": strided, "masks": masks,
}  # fmt: skip


def main(out: Path | None = None, only: tuple[Section, ...] = tuple(SECTIONS), seconds: float = 3.0) -> None:
    """Print a table per section; append every row as JSON to `out`."""
    require_commit()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for section in only:
        emit(SECTIONS[section](SIZES[device.type], device, seconds), out)


if __name__ == "__main__":
    tyro.cli(main)
