"""AdamW with small state, by torchao: moments in 8 bit, and weights in bfloat16 whose updates are rounded at random.

An update of 1e-6 is less than half a step of bfloat16 for most weights: rounded to the nearest it is lost every time.
Rounded up or down with the odds of its distance to both, it is there on average.

In a checkpoint 8-bit moments are float32 numbers, so that any number of ranks can read them; beside them, where they
are not in shards, the scales of their blocks, with which the same codes are found again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.config import OptimConfig
from trainer.shards import is_dtensor

SCALE = "_scale"


def small_adamw(groups: list[dict[str, Any]], cfg: OptimConfig) -> Optimizer:
    try:
        from torchao.optim import AdamW8bit, _AdamW
    except ImportError:
        raise ValueError(
            f"optim={cfg.optim}: 8-bit moments and bfloat16 weights need torchao, which is not installed; "
            "pip install torchao"
        ) from None
    kind = AdamW8bit if cfg.optim == "adamw_8bit" else _AdamW
    betas = (cfg.adam_beta1, cfg.adam_beta2)
    return kind(groups, lr=cfg.learning_rate, betas=betas, eps=cfg.adam_epsilon, bf16_stochastic_round=True)


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
    if not hasattr(optimizer, "_new_buffer"):  # not torchao's
        return {key: value for key, value in saved.items() if not key.endswith(SCALE)}
    held = {}
    for key, value in saved.items():
        if key.endswith(SCALE):
            continue
        if key == "step":
            held[key] = value
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
