"""Elementwise block operations in training, forward and backward: strop's kernels vs. transformers' eager modules.

    python -m bench.block [--out rows.jsonl] [--tokens 7700] [--only norm rotation] [--seconds 2]

Sizes of Qwen3-1.7B in bfloat16 on a GPU; small sizes elsewhere, where the references run. Norm is the norm of the
residual stream, head norm the norm of the queries, gated norm that of a gated delta net; all weights train. The floor
is a memory copy of `moved_gb`, the bytes that a forward and a backward pass must read and write. Errors are against
float64. Rates count tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import tyro
from torch import Tensor

from bench.common import QWEN3_1_7B, Row, alternate, emit, make_row, relative_error, require_commit
from bench.train_step import TINY
from kernels import block
from trainer.parallel.comm import pick_device

EPS = 1e-6


class Problem(NamedTuple):
    shape: dict[str, int]
    inputs: list[Tensor]
    slopes: list[Tensor]  # gradients of the outputs
    moved: int  # reads and writes of each of the `per_pass` elements, both passes together
    per_pass: int
    calls: dict[str, Callable[..., Any]]
    exact: Callable[..., Any]

    @property
    def moved_bytes(self) -> int:
        return self.moved * self.per_pass * self.inputs[0].element_size()


def norm(tokens: int, heads: tuple[int, ...], width: int, device: torch.device, dtype: torch.dtype) -> Problem:
    """Read x, write out; read grad and x, write grad of x."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    x, slope = random((1, tokens, *heads, width), device, dtype, 2)
    module = Qwen3RMSNorm(width, eps=EPS).to(device, dtype)
    calls = {"ours": partial(block.rms_norm, eps=EPS), "transformers": lambda x, weight: module(x)}
    exact = partial(block.rms_norm_reference, eps=EPS)
    shape = {"N": tokens, **({"H": heads[0]} if heads else {}), "D": width}
    return Problem(shape, [x.requires_grad_(), module.weight], [slope], 5, x.numel(), calls, exact)


def gated_norm(tokens: int, heads: int, width: int, device: torch.device, dtype: torch.dtype) -> Problem:
    """Read x and gate, write out; read grad, x and gate, write two gradients."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

    x, gate, slope = random((tokens * heads, width), device, dtype, 3)
    module = Qwen3_5RMSNormGated(width, eps=EPS).to(device, dtype)
    calls = {"ours": partial(block.gated_rms_norm, eps=EPS), "transformers": lambda x, gate, weight: module(x, gate)}
    exact = partial(block.gated_rms_norm_reference, eps=EPS)
    inputs = [x.requires_grad_(), gate.requires_grad_(), module.weight]
    return Problem({"N": tokens, "H": heads, "D": width}, inputs, [slope], 8, x.numel(), calls, exact)


def rotation(tokens: int, sizes: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Problem:
    """Read and write queries and keys, and their gradients."""
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    heads, key_heads, size = sizes["num_attention_heads"], sizes["num_key_value_heads"], sizes["head_dim"]
    query, query_slope = (x.transpose(1, 2) for x in random((1, tokens, heads, size), device, dtype, 2))
    key, key_slope = (x.transpose(1, 2) for x in random((1, tokens, key_heads, size), device, dtype, 2))
    (angle,) = random((1, tokens, size), device, torch.float32, 1)
    inputs = [query.requires_grad_(), key.requires_grad_(), angle.cos().to(dtype), angle.sin().to(dtype)]
    calls = {"ours": block.rotate, "transformers": apply_rotary_pos_emb}
    shape = {"N": tokens, "H": heads, "H_kv": key_heads, "K": size}
    return Problem(
        shape, inputs, [query_slope, key_slope], 4, query.numel() + key.numel(), calls, block.rotate_reference
    )  # fmt: skip


def activation(tokens: int, inner: int, device: torch.device, dtype: torch.dtype) -> Problem:
    """Read gate and up, write out; read grad, gate and up, write two gradients."""
    from transformers.activations import ACT2FN

    gate, up, slope = random((1, tokens, inner), device, dtype, 3)
    act = ACT2FN["silu"]
    calls = {"ours": block.silu_mul, "transformers": lambda gate, up: act(gate) * up}
    inputs = [gate.requires_grad_(), up.requires_grad_()]
    return Problem({"N": tokens, "I": inner}, inputs, [slope], 8, gate.numel(), calls, block.silu_mul_reference)


def random(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, count: int) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(count)]


def step(call: Callable[..., Any], inputs: list[Tensor], slopes: list[Tensor]) -> dict[str, Tensor]:
    """Return outputs and gradients by name."""
    result = call(*inputs)
    outputs = result if isinstance(result, tuple) else (result,)
    gradients = torch.autograd.grad(outputs, [x for x in inputs if x.requires_grad], slopes)
    named = {f"out{i}": x.detach() for i, x in enumerate(outputs)}
    return named | {f"d{i}": x for i, x in enumerate(gradients)}


def measure(name: str, problem: Problem, seconds: float) -> list[Row]:
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in problem.inputs]
    exact = step(problem.exact, wide, [x.double() for x in problem.slopes])
    calls: dict[str, Callable[[], Any]] = {
        provider: partial(step, call, problem.inputs, problem.slopes) for provider, call in problem.calls.items()
    }
    errors = {
        provider: {key: relative_error(x, exact[key]) for key, x in call().items()} for provider, call in calls.items()
    }
    del wide, exact
    source = torch.zeros(problem.moved_bytes // 2, dtype=torch.int8, device=problem.inputs[0].device)
    timings = alternate({**calls, "copy": partial(torch.empty_like(source).copy_, source)}, seconds=seconds)
    gigabytes = problem.moved_bytes / 1e9
    return [
        make_row(
            f"block/{name}", provider, timings[provider], shape=problem.shape, floor=timings["copy"],
            dtype=problem.inputs[0].dtype, work=problem.shape["N"], unit="tokens", errors=errors[provider],
            against={other: timings[other] for other in calls},
            extra={"moved_gb": gigabytes, "gb_per_s": 1000 * gigabytes / timings[provider].p50},
        )
        for provider in calls
    ]  # fmt: skip


def problems(tokens: int, sizes: dict[str, Any], device: torch.device) -> dict[str, Callable[[], Problem]]:
    options = (device, torch.bfloat16)
    return {
        "norm": partial(norm, tokens, (), sizes["hidden_size"], *options),
        "head norm": partial(norm, tokens, (sizes["num_attention_heads"],), sizes["head_dim"], *options),
        "gated norm": partial(gated_norm, tokens, sizes["num_attention_heads"], sizes["head_dim"], *options),
        "rotation": partial(rotation, tokens, sizes, *options),
        "activation": partial(activation, tokens, sizes["intermediate_size"], *options),
    }


def main(
    out: Path | None = None, tokens: int | None = None, only: tuple[str, ...] | None = None, seconds: float = 2.0
) -> None:
    """Print a table for each operation; append every row as JSON to `out`.

    Args:
        out: File to append the rows to.
        tokens: Tokens per micro-batch. None: 7700 on a GPU, 64 elsewhere.
        only: Operations to measure: norm, "head norm", "gated norm", rotation, activation. None: all.
        seconds: Minimum duration of each loop, which has at least 15 rounds (3 on a CPU).
    """
    require_commit()
    on_gpu = torch.cuda.is_available()
    cases = problems(tokens or (7700 if on_gpu else 64), QWEN3_1_7B if on_gpu else TINY, pick_device())
    unknown = set(only or ()) - set(cases)
    if unknown:
        raise ValueError(f"only={min(unknown)}: must be one of {', '.join(cases)}")
    for name in only or cases:
        emit(measure(name, cases[name](), seconds), out)


if __name__ == "__main__":
    tyro.cli(main)
