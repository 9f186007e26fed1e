"""Which GPU the trainer has, and whether servers share it."""

from __future__ import annotations

import torch

from rollout.options import VllmConfig


def uuid_of(device: torch.device) -> str | None:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def shares_gpu(cfg: VllmConfig, device: torch.device) -> bool:
    """Whether server and trainer take turns on one GPU."""
    if device.type != "cuda":
        if cfg.colocate:
            raise ValueError("vllm.colocate=True: there is no GPU to share; leave it out")
        return False
    if cfg.colocate is not None:
        return cfg.colocate
    return not cfg.url and not cfg.devices and torch.cuda.device_count() == 1
