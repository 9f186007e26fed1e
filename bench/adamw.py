"""One AdamW step on bfloat16 weights and moments: strop's kernel, torch's fused AdamW, and torchao's.

    python -m bench.adamw [--out rows.jsonl] [--shape qwen3-1.7b]

All parameters of the model have random values. strop and torchao round stochastically, torch rounds to nearest. The
error is the relative error of the mean weight change; rounding to nearest loses most of the change. The clipped
providers also compute the global gradient norm. torch's clip_grad_norm_ scales gradients in memory, strop scales them
while the step reads them, as in training. Rates count weights. For each weight a step reads and writes seven 2-byte
values, the norm reads another, and scaling in memory reads and writes two more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import tyro
from torch import Tensor, nn

from bench.common import Row, alternate, emit, make_row, require_commit
from trainer.config.blocks import OptimConfig
from trainer.parallel.comm import pick_device
from trainer.plan import known_config
from trainer.policy.optim import RoundedAdamW, gated_step, values_to_check

RATE = 1e-6
BETAS = (0.9, 0.999)


def parameters_of(shape: str, device: torch.device) -> list[nn.Parameter]:
    """Create random weights, and gradients of one sign, so that all weights move in the same direction."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    from bench.train_step import TINY

    config = Qwen3Config(**TINY) if shape == "tiny" else known_config(shape)
    with torch.device("meta"):
        sizes = [p.shape for p in AutoModelForCausalLM.from_config(config).parameters()]
    torch.manual_seed(0)
    parameters = []
    for size in sizes:
        parameter = nn.Parameter(torch.randn(size, device=device).mul_(0.02).to(torch.bfloat16))
        parameter.grad = torch.rand(size, device=device).add_(0.5).to(torch.bfloat16)
        parameters.append(parameter)
    return parameters


def steps(parameters: list[nn.Parameter]) -> dict[str, Callable[[], object]]:
    """Return each provider's step; each has its own moments."""
    groups = [{"params": parameters, "weight_decay": 0.0}]
    limit = 0.5 * values_to_check(parameters, None)[0].item()

    def ours() -> RoundedAdamW:
        return RoundedAdamW(groups, lr=RATE, betas=BETAS, eps=OptimConfig.adam_epsilon)

    def fused() -> torch.optim.AdamW:
        return torch.optim.AdamW(groups, lr=RATE, betas=BETAS, weight_decay=0.0, fused=parameters[0].is_cuda)

    def clipped(optimizer: torch.optim.Optimizer) -> None:
        nn.utils.clip_grad_norm_(parameters, limit)
        optimizer.step()

    def gated(optimizer: RoundedAdamW) -> None:
        gated_step(optimizer, values_to_check(parameters, None), limit)

    providers: dict[str, Callable[[], object]] = {
        "ours": ours().step,
        "torch, to the nearest": fused().step,
        "ours, clipped": partial(gated, ours()),  # before torch's provider has scaled the gradients
        "torch, clipped": partial(clipped, fused()),
    }
    try:
        from torchao.optim import _AdamW
    except ImportError:
        print("torchao: not installed", flush=True)
        return providers
    torchao = _AdamW(groups, lr=RATE, betas=BETAS, weight_decay=0.0, bf16_stochastic_round=True)
    return providers | {"torchao": torchao.step}


@torch.no_grad()
def change_error(step: Callable[[], object], parameters: list[nn.Parameter]) -> float:
    """Return the relative error of the mean weight change; the exact first step changes each weight by -RATE."""
    before = [p.clone() for p in parameters]
    step()
    change = sum((p.double() - old.double()).sum() for p, old in zip(parameters, before, strict=True))
    for p, old in zip(parameters, before, strict=True):
        p.copy_(old)
    assert isinstance(change, Tensor)
    return abs(change.item() / sum(p.numel() for p in parameters) / -RATE - 1.0)


def measure(shape: str, seconds: float) -> list[Row]:
    parameters = parameters_of(shape, pick_device())
    num = sum(p.numel() for p in parameters)
    providers = steps(parameters)
    errors = {name: change_error(step, parameters) for name, step in providers.items()}
    timings = alternate(providers, seconds=seconds)
    return [
        make_row(
            "adamw", name, timing, shape={"weights": num, "tensors": len(parameters)}, dtype="bfloat16", work=num,
            unit="weights", errors={"mean change": errors[name]},
            against=timings,
        )
        for name, timing in timings.items()
    ]  # fmt: skip


def main(out: Path | None = None, shape: str | None = None, seconds: float = 3.0) -> None:
    """Print the table; append every row as JSON to `out`.

    Args:
        out: File to append the rows to.
        shape: A model of trainer.plan, or tiny. None: qwen3-1.7b on a GPU, tiny elsewhere.
        seconds: Minimum duration of the loop, which has at least 15 rounds (3 on a CPU).
    """
    require_commit()
    emit(measure(shape or ("qwen3-1.7b" if torch.cuda.is_available() else "tiny"), seconds), out)


if __name__ == "__main__":
    tyro.cli(main)
