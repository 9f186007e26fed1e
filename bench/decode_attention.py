"""One decode step: attention over a paged cache with shared prompts, linear layers, and sampling of the next token.

    python -m bench.decode_attention [--out rows.jsonl] [--only attention linear draw] [--seconds 3]

Heads and vocabulary of Qwen3-0.6B in bfloat16 on a GPU; small sizes in float32 elsewhere, where the references run. The
peer of attention is sdpa over the keys and values of each row, gathered beforehand: a cache with the prompt once per
row. What layers share is planned beforehand, as in a step. `read_gb` is the data that a call must read, a prompt once
per tile; `gb_per_s` divides it by the time. The peer of linear layers is F.linear, followed by silu_mul if they are
gated. A call runs equal layers whose weights do not fit into the L2 cache, as one CUDA graph. The kernel leaves the sum
of its parts to the next kernel of a step, so the error is that of the sum. It needs a Hopper GPU; elsewhere only the
peer runs. The peer of draw is log_softmax and multinomial. Rates count rows, with one token each; for linear layers,
they count rows times layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import tyro
from torch import Tensor
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import scaled_dot_product_attention

from bench.common import QWEN3_0_6B, Row, alternate, emit, make_row, relative_error, require_commit
from kernels.decode.attention import TILE_ROWS, Rows, decode_attention, decode_attention_reference, plan_step
from kernels.decode.block import silu_mul, silu_mul_reference
from kernels.decode.draw import draw
from kernels.decode.linear import fits, gated_linear, linear

Section = Literal["attention", "linear", "draw"]
PAGE = 64
WEIGHT_BYTES = 120 << 20  # of all layers: twice the L2 cache of an H200


class Sizes(NamedTuple):
    heads: tuple[int, int, int]  # H, H_kv, K
    steps: tuple[tuple[int, int, int, int], ...]  # rows, rows per group, prompt tokens, own tokens per row
    linears: tuple[tuple[int, int, int, bool], ...]  # rows, in features, out features, gated
    draws: tuple[int, ...]  # rows
    vocab: int
    dtype: torch.dtype


SIZES = {
    "cpu": Sizes(
        (4, 2, 32), ((16, 8, 128, 64),), ((16, 128, 192, False), (16, 128, 256, True)), (16,), 1000, torch.float32
    ),
    "cuda": Sizes(
        (QWEN3_0_6B["num_attention_heads"], QWEN3_0_6B["num_key_value_heads"], QWEN3_0_6B["head_dim"]),
        ((64, 8, 256, 256), (512, 8, 256, 128), (512, 8, 256, 256), (512, 8, 256, 1024), (1, 1, 256, 2**14)),
        ((64, 1024, 4096, False), (64, 2048, 1024, False), (64, 1024, 6144, True), (64, 3072, 1024, False)), (64, 512),
        QWEN3_0_6B["vocab_size"], torch.bfloat16,
    ),
}  # fmt: skip


def lay_out(num_rows: int, group: int, prefix: int, own: int, device: torch.device) -> tuple[Rows, int]:
    """Build rows of whole groups with pages in random order; return them and the number of pages."""
    prefix_pages, own_pages, groups = -(-prefix // PAGE), -(-own // PAGE), num_rows // group
    total = groups * prefix_pages + num_rows * own_pages
    page = torch.randperm(total, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    shared, own_page_ids = page.split([groups * prefix_pages, num_rows * own_pages])
    shared = shared.view(groups, prefix_pages).repeat_interleave(group, dim=0)
    table = torch.cat([shared, own_page_ids.view(num_rows, own_pages)], dim=1)
    tiles, size = torch.full((num_rows, TILE_ROWS), -1, dtype=torch.int32), min(group, TILE_ROWS)
    tiles[: num_rows // size, :size] = torch.arange(num_rows, dtype=torch.int32).view(-1, size)
    lengths = (torch.full((num_rows,), n, dtype=torch.int32) for n in (prefix, own))
    return Rows(*(x.to(device).contiguous() for x in (table, *lengths, tiles))), total


def attention(sizes: Sizes, device: torch.device, seconds: float) -> list[Row]:
    results = []
    num_heads, key_heads, head_dim = sizes.heads
    for num_rows, group, prefix, own in sizes.steps:
        rows, pages = lay_out(num_rows, group, prefix, own, device)
        generator = torch.Generator(device).manual_seed(0)
        shapes = ((num_rows, num_heads, head_dim), *[(key_heads, pages * PAGE, head_dim)] * 2)
        query, keys, values = (
            torch.randn(s, generator=generator, device=device, dtype=sizes.dtype) for s in shapes
        )  # fmt: skip
        options = {"page": PAGE, "scale": head_dim**-0.5}
        exact = decode_attention_reference(query.double(), keys.double(), values.double(), rows, **options)
        gathered = [gather(x, rows, prefix, own) for x in (keys, values)]
        plan = plan_step(keys, rows, num_heads=num_heads, page=PAGE)
        calls: dict[str, Callable[[], Tensor]] = {
            "ours": partial(decode_attention, query, keys, values, rows, plan=plan, **options),
            "sdpa, gathered before": partial(sdpa, query, *gathered, head_dim**-0.5),
        }
        size = 2 * key_heads * head_dim * query.element_size()  # bytes per token, keys and values
        read = size * (num_rows // min(group, TILE_ROWS) * prefix + num_rows * own)
        timings = alternate(calls, seconds=seconds)
        results += [
            make_row(
                "decode_attention", name, timing,
                shape={"B": num_rows, "G": group, "P": prefix, "own": own, "H": num_heads, "H_kv": key_heads,
                       "K": head_dim},
                dtype=sizes.dtype, work=num_rows, unit="rows", errors={"out": relative_error(calls[name](), exact)},
                against=timings,
                extra={"read_gb": read / 1e9, "gb_per_s": read / 1e6 / timing.p50},
            )
            for name, timing in timings.items()
        ]  # fmt: skip
    return results


def gather(cache: Tensor, rows: Rows, prefix: int, own: int) -> Tensor:  # (B, H_kv, P + own, K)
    """Gather the prefix and own tokens of each row."""
    steps = torch.arange(PAGE, device=cache.device)
    slot = (rows.table.long()[:, :, None] * PAGE + steps).flatten(1)  # (B, slots)
    own_start = -(-prefix // PAGE) * PAGE
    slot = torch.cat([slot[:, :prefix], slot[:, own_start : own_start + own]], dim=1)
    return cache[:, slot].transpose(0, 1).contiguous()


def sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:  # (B, H, K)
    return scaled_dot_product_attention(query.unsqueeze(2), key, value, scale=scale, enable_gqa=True).squeeze(2)


def linears(sizes: Sizes, device: torch.device, seconds: float) -> list[Row]:
    results = []
    for num_rows, width, outs, gated in sizes.linears:
        generator = torch.Generator(device).manual_seed(0)
        x = torch.randn(num_rows, width, generator=generator, device=device).to(sizes.dtype)
        weight = torch.randn(outs, width, generator=generator, device=device).mul_(width**-0.5).to(sizes.dtype)
        size = weight.numel() * weight.element_size()
        weights = [weight.clone() for _ in range(-(-WEIGHT_BYTES // size) if x.is_cuda else 2)]
        peer = "F.linear, silu_mul" if gated else "F.linear"
        layers: dict[str, Callable[[Tensor, Tensor], Tensor]] = {peer: torch_gated if gated else torch_linear}
        if fits(x, weight, None):
            layers = {"ours": gated_linear if gated else linear} | layers
        else:
            print(f"ours: needs a Hopper GPU and 16 bits, not {device} and {sizes.dtype}", flush=True)
        exact = torch_linear(x.double(), weight.double())
        exact = silu_mul_reference(exact) if gated else exact
        timings = alternate({name: repeated(layer, x, weights) for name, layer in layers.items()}, seconds=seconds)
        for name, timing in timings.items():
            out = layers[name](x, weight)
            results.append(make_row(
                "decode_gated_linear" if gated else "decode_linear", name, timing,
                shape={"B": num_rows, "D": width, "O": outs, "layers": len(weights)}, dtype=sizes.dtype,
                work=num_rows * len(weights), unit="rows",
                errors={"out": relative_error(out.sum(0) if out.dim() == 3 else out, exact)}, against=timings,
                extra={"us_per_layer": 1000 * timing.p50 / len(weights),
                       "gb_per_s": len(weights) * size / 1e6 / timing.p50},
            ))  # fmt: skip
    return results


def repeated(layer: Callable[[Tensor, Tensor], Tensor], x: Tensor, weights: list[Tensor]) -> Callable[[], object]:
    """Apply the layer to x with each of the weights: one launch would take longer than a layer."""

    def run() -> None:
        for weight in weights:
            layer(x, weight)

    if not x.is_cuda:
        return run
    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def torch_gated(x: Tensor, weight: Tensor) -> Tensor:
    return silu_mul(torch_linear(x, weight))


def draws(sizes: Sizes, device: torch.device, seconds: float) -> list[Row]:
    results = []
    for num_rows in sizes.draws:
        generator = torch.Generator(device).manual_seed(0)
        logits = torch.randn(num_rows, sizes.vocab, generator=generator, device=device).mul_(3).to(sizes.dtype)
        seeds = torch.arange(num_rows, device=device)
        number = torch.zeros(num_rows, dtype=torch.int32, device=device)
        temperature = torch.ones(num_rows, device=device)
        calls: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
            "ours": partial(draw, logits, seeds, number, temperature),
            "log_softmax, multinomial": partial(multinomial, logits),
        }
        exact = torch.log_softmax(logits.double(), dim=-1)
        timings = alternate(calls, seconds=seconds)
        for name, timing in timings.items():
            ids, logps = calls[name]()
            results.append(make_row(
                "draw", name, timing, shape={"B": num_rows, "V": sizes.vocab}, dtype=sizes.dtype, work=num_rows,
                unit="rows", errors={"logp": relative_error(logps, exact.gather(1, ids[:, None])[:, 0])},
                against=timings,
                extra={"gb_per_s": logits.numel() * logits.element_size() / 1e6 / timing.p50},
            ))  # fmt: skip
    return results


def multinomial(logits: Tensor) -> tuple[Tensor, Tensor]:
    logps = torch.log_softmax(logits.float(), dim=-1)
    ids = torch.multinomial(logps.exp(), 1)
    return ids[:, 0], logps.gather(1, ids)[:, 0]


SECTIONS: dict[Section, Callable[[Sizes, torch.device, float], list[Row]]] = {
    "attention": attention, "linear": linears, "draw": draws,
}  # fmt: skip


def main(out: Path | None = None, only: tuple[Section, ...] = tuple(SECTIONS), seconds: float = 3.0) -> None:
    """Print a table per section; append every row as JSON to `out`."""
    require_commit()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for section in only:
        emit(SECTIONS[section](SIZES[device.type], device, seconds), out)


if __name__ == "__main__":
    tyro.cli(main)
