"""Log-prob and its backward from hidden states: chunked without stored logits, against plain torch with them.

python -m bench.linear_logprob [--out rows.jsonl]
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import tyro
from torch import Tensor

from bench.common import Row, alternate, emit, make_row
from kernels import reference
from kernels.linear_logprob import linear_logprob

SHAPES = {"cpu": (512, 576, 49152), "cuda": (8192, 2048, 151936)}  # SmolLM2-135M's head; Qwen3-1.7B's


def gradients(function: Callable[..., tuple[Tensor, Tensor]], hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    function(hidden, weight, target)[0].sum().backward()
    return hidden.grad


def measure(device: str) -> list[Row]:
    num_rows, width, vocab = SHAPES[device]
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_rows, width, generator=generator).to(device, dtype)
    weight = (torch.randn(vocab, width, generator=generator) * width**-0.5).to(device, dtype)
    target = torch.randint(vocab, (num_rows,), generator=generator).to(device)
    providers = {"ours (chunked)": linear_logprob, "torch (stored logits)": reference.linear_logprob}
    few = slice(0, 64)  # the float64 product of all rows would take longer than the benchmark
    exact = gradients(reference.linear_logprob, hidden[few].double(), weight.double(), target[few])
    times = alternate({name: lambda f=f: gradients(f, hidden, weight, target) for name, f in providers.items()})
    rows = []
    for name, function in providers.items():
        got = gradients(function, hidden[few], weight, target[few]).double()
        error = ((got - exact).norm() / exact.norm()).item()
        rows.append(make_row(
            "linear_logprob forward + backward", name, times[name], shape={"N": num_rows, "D": width, "V": vocab},
            dtype=str(dtype).removeprefix("torch."), work=num_rows, unit="tokens", error=error,
        ))  # fmt: skip
    return rows


def main(out: Path | None = None) -> None:
    emit(measure("cuda" if torch.cuda.is_available() else "cpu"), out)


if __name__ == "__main__":
    tyro.cli(main)
