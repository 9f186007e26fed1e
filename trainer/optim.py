"""AdamW, its schedule, and the one place that turns losses into an update."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from losses.types import LossOut
from trainer.bad_steps import BadSteps, not_finite
from trainer.config.blocks import OptimConfig
from trainer.metrics.metrics import MetricSums
from trainer.sharding import clip_gradients, sum_gradients
from trainer.small_state import small_adamw


def build_optimizer(model: nn.Module, cfg: OptimConfig, total_steps: int) -> tuple[Optimizer, LambdaLR]:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    if cfg.optim == "adamw_8bit" or any(p.dtype == torch.bfloat16 for p in trained):
        optimizer = small_adamw(groups, cfg)
    else:
        # One kernel for all weights on a GPU: torch's other way makes a temporary as large as all of them.
        fused = all(p.device.type == "cuda" for p in trained)
        betas = (cfg.adam_beta1, cfg.adam_beta2)
        optimizer = AdamW(groups, lr=cfg.learning_rate, betas=betas, eps=cfg.adam_epsilon, fused=fused)
    return optimizer, LambdaLR(optimizer, lr_factor(cfg.lr_scheduler_type, cfg.warmup_ratio, total_steps))


def lr_factor(kind: str, warmup_ratio: float, total_steps: int) -> Callable[[int], float]:
    """Multiplier of the peak rate for the update after `step` updates: up linearly, then constant, line or cosine."""
    warmup = round(warmup_ratio * total_steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if kind == "constant":
            return 1.0
        done = (step - warmup) / max(1, total_steps - warmup)
        return max(0.0, 1.0 - done) if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))

    return factor


def total_loss(out: LossOut, denominators: dict[str, Tensor]) -> Tensor:
    """Each term divided once, by its count over the whole optimizer step and all ranks."""
    assert out.terms.keys() <= denominators.keys(), f"terms {sorted(out.terms)} vs {sorted(denominators)}"
    parts = [term.weight * term.sum / denominators[name].clamp(min=1) for name, term in out.terms.items()]
    return torch.stack(parts).sum()


def term_metrics(out: LossOut) -> dict[str, tuple[Tensor, Tensor]]:
    """Metrics of the terms themselves: loss/<name> per counted unit, unweighted."""
    return {f"loss/{name}": (term.sum.detach(), term.count) for name, term in out.terms.items()}


def clip_and_step(
    model: nn.Module,
    optimizer: Optimizer,
    schedule: LambdaLR,
    max_grad_norm: float,
    where: str,
    sums: MetricSums | None = None,
    bad_steps: BadSteps | None = None,
) -> float:
    """Clip, check, step. What is not finite never touches the weights: it stops the run, or `bad_steps` lets it go on.

    `sums` are those of the step; its loss is looked at too.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    limit = max_grad_norm if max_grad_norm > 0 else math.inf
    sum_gradients(model)
    grad_norm = clip_gradients(trained, limit)
    bad_steps = bad_steps or BadSteps()
    if problem := not_finite(grad_norm, sums):
        bad_steps.skip(problem, where)
    else:
        optimizer.step()
        bad_steps.end()
    optimizer.zero_grad(set_to_none=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)  # the first step skipped
        schedule.step()
    return grad_norm
