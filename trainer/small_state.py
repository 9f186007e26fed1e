"""AdamW with small state: weights and moments in bfloat16 (kernels/adamw.py), or moments in 8 bit, by torchao.

In a checkpoint 8-bit moments are float32 numbers, so that any number of ranks can read them; beside them, where they
are not in shards, the scales of their blocks, with which the same codes are found again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kernels.adamw import Held, Rates, step_
from trainer.config.blocks import OptimConfig
from trainer.parallel.dtensor import is_dtensor

SCALE = "_scale"


def small_adamw(groups: list[dict[str, Any]], cfg: OptimConfig) -> Optimizer:
    betas = (cfg.adam_beta1, cfg.adam_beta2)
    if cfg.optim == "adamw":
        return RoundedAdamW(groups, lr=cfg.learning_rate, betas=betas, eps=cfg.adam_epsilon)
    try:
        from torchao.optim import AdamW8bit
    except ImportError:
        raise ValueError(
            f"optim={cfg.optim}: 8-bit moments need torchao, which is not installed; pip install -e '.[small]'"
        ) from None
    return AdamW8bit(groups, lr=cfg.learning_rate, betas=betas, eps=cfg.adam_epsilon, bf16_stochastic_round=True)


class RoundedAdamW(Optimizer):
    """Weights and moments in bfloat16, rounded at random; parameters in float32 beside them are not rounded."""

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        number = 0  # of the parameter: each has random bits of its own
        for group in self.param_groups:
            for parameter in group["params"]:
                number += 1
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["step"] += 1
                t = int(state["step"])
                rates = Rates(group["lr"], *group["betas"], group["eps"], group["weight_decay"], t)
                tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
                held = Held(*(_own(tensor) for tensor in tensors))
                step_(held, rates, seed=(t << 16 ^ number) % 2**31)


def as_saved(slots: dict[str, Tensor]) -> dict[str, Tensor]:
    """Optimizer state of one parameter, in tensors of plain numbers."""
    saved: dict[str, Tensor] = {}
    for key, slot in slots.items():
        own = _own(slot)
        if not _is_small(own):
            saved[key] = slot
        elif is_dtensor(slot):
            saved[key] = _in_shards(own.dequantize(), slot)
        else:
            saved |= {key: own.dequantize(), key + SCALE: own.scale}
    return saved


@torch.no_grad()
def as_held(optimizer: Optimizer, parameter: nn.Parameter, saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state as this optimizer keeps it, from what as_saved gave, in shards or not as the parameter is."""
    held = {}
    for key, value in saved.items():
        if key.endswith(SCALE):
            continue
        if key == "step":
            held[key] = value
            continue
        if not hasattr(optimizer, "_new_buffer"):  # torchao's have it
            held[key] = value.to(parameter.dtype)
            continue
        held[key] = optimizer._new_buffer(parameter, key == "exp_avg")
        own, scale = _own(held[key]), saved.get(key + SCALE)
        if _is_small(own) and scale is not None and scale.shape == own.scale.shape:
            from torchao.optim.quant_utils import quantize_8bit_with_qmap

            blocks = _own(value).view(len(scale), -1) / scale.to(own.device).unsqueeze(1)
            own.codes.copy_(quantize_8bit_with_qmap(blocks, own.qmap).view(own.shape))
            own.scale.copy_(scale)
        else:
            own.copy_(_own(value))
    return held


def _own(tensor: Tensor) -> Any:
    return tensor.to_local() if is_dtensor(tensor) else tensor


def _is_small(tensor: Tensor) -> bool:
    return hasattr(tensor, "codes")


def _in_shards(own: Tensor, like: Any) -> Tensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        own, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
