"""One frozen linear layer, forward and backward: bfloat16, with an adapter, FP8, NF4 by strop's kernel and plain torch.

    python -m bench.nf4 [--out rows.jsonl] [--shape llama-3.1-8b] [--tokens 8192]

The layer is the up projection of the model's MLP, with random weights. The error compares the output with the
product with the same weight in float32; for NF4 it is mostly the code error. Rates count tokens; GiB is the peak
of a pass, without the layer and its input. bitsandbytes is measured if installed. `FP8, compile` is the layer as it
runs within a compiled block, where inductor fuses the quantisation of the input. B of the adapters is 0; peft's order
rounds before and after it adds the adapter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import tyro
from torch import Tensor, nn

from bench.common import Row, alternate, emit, make_row, relative_error, require_commit
from kernels import nf4
from kernels.fp8 import Linear8
from kernels.lora import lora_linear
from kernels.nf4 import Linear4bit, dequantize_reference
from trainer.parallel.comm import pick_device
from trainer.plan import known_config


class PlainLinear4bit(Linear4bit):
    """Plain torch version; autograd saves the dequantised weight."""

    def forward(self, x: Tensor) -> Tensor:  # (..., O)
        packed = nf4.Packed(self.codes, self.absmax)
        return nn.functional.linear(x, dequantize_reference(packed, self.shape, self.dtype))


def adapted(linear: nn.Linear, rank: int = 16) -> dict[str, Callable[[Tensor], Tensor]]:
    a = torch.randn(rank, linear.in_features, device=linear.weight.device).requires_grad_()
    b = torch.zeros(linear.out_features, rank, device=linear.weight.device).requires_grad_()

    def peft(x: Tensor) -> Tensor:
        return linear(x) + nn.functional.linear(nn.functional.linear(x, a.bfloat16()), b.bfloat16()) * 2.0

    return {"ours, LoRA": lambda x: lora_linear(x, linear, a, b, 2.0), "peft's order, LoRA": peft}


def layers_of(linear: nn.Linear) -> dict[str, Callable[[Tensor], Tensor]]:
    layers: dict[str, Callable[[Tensor], Tensor]] = {
        "bfloat16": linear,
        **adapted(linear),
        "ours, NF4": Linear4bit.of(linear),
        "plain torch, NF4": PlainLinear4bit.of(linear),
        "ours, FP8": Linear8.of(copy.deepcopy(linear)),
    }
    if linear.weight.is_cuda:
        layers["ours, FP8, compile"] = torch.compile(layers["ours, FP8"])
    try:
        from bitsandbytes.nn import Linear4bit as Theirs
        from bitsandbytes.nn import Params4bit
    except ImportError:
        print("bitsandbytes: not installed", flush=True)
        return layers
    layer = Theirs(linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
    layer.weight = Params4bit(linear.weight.detach().cpu(), requires_grad=False, quant_type="nf4")
    return layers | {"bitsandbytes, NF4": layer.to(linear.weight.device)}


def step(layer: Callable[[Tensor], Tensor], x: Tensor) -> None:
    x.grad = None
    layer(x).sum().backward()


def measure(shape: str, tokens: int, seconds: float) -> list[Row]:
    sizes = (64, 160) if shape == "tiny" else (known_config(shape).hidden_size, known_config(shape).intermediate_size)
    torch.manual_seed(0)
    linear = nn.Linear(*sizes, bias=False, device=pick_device(), dtype=torch.bfloat16).requires_grad_(False)
    nn.init.normal_(linear.weight, std=0.02)
    x = torch.randn(tokens, sizes[0], device=linear.weight.device, dtype=torch.bfloat16, requires_grad=True)
    exact = x.detach().float() @ linear.weight.float().T
    layers = layers_of(linear)
    errors = {name: relative_error(layer(x).detach(), exact) for name, layer in layers.items()}
    timings = alternate({name: partial(step, layer, x) for name, layer in layers.items()}, seconds=seconds)
    return [
        make_row(
            "nf4", name, timing, shape={"N": tokens, "D": sizes[0], "O": sizes[1]}, dtype="bfloat16", work=tokens,
            unit="tokens", errors={"output": errors[name]}, against=timings,
        )
        for name, timing in timings.items()
    ]  # fmt: skip


def main(out: Path | None = None, shape: str | None = None, tokens: int | None = None, seconds: float = 3.0) -> None:
    """Print the table; append every row as JSON to `out`.

    Args:
        out: File to append the rows to.
        shape: A model of trainer.plan, or tiny. None: llama-3.1-8b on a GPU, tiny elsewhere.
        tokens: Rows of the input. None: 8192 on a GPU, 64 elsewhere.
        seconds: Minimum duration of the loop, which has at least 15 rounds (3 on a CPU).
    """
    require_commit()
    on_gpu = torch.cuda.is_available()
    emit(measure(shape or ("llama-3.1-8b" if on_gpu else "tiny"), tokens or (8192 if on_gpu else 64), seconds), out)


if __name__ == "__main__":
    tyro.cli(main)
