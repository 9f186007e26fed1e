"""Programmatic dependent launch, for decode steps of few rows.

Such a step is a chain of kernels of a few microseconds, between which the GPU would wait for the next launch. On Hopper
GPUs a kernel can be launched as soon as all programs of the kernel before it have begun. Until `gdc_wait` it may only
read what neither the last ordinary launch nor a kernel after it writes; then it waits for the end of the kernel before
it. Every kernel launched this way must wait, because the next one relies on it: when a kernel has ended, all earlier
ones have.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, cuda, device, version

MAX_ROWS = 128  # with more rows a kernel takes long, and starts later if the next one already occupies the GPU


def launch_options(
    out: Tensor,  # (B, ...)
) -> dict[str, Any]:
    """Return the options of a kernel that has a constant PDL."""
    return {"PDL": True, "launch_pdl": True} if len(out) <= MAX_ROWS and is_supported(out) else {"PDL": False}


def is_supported(
    tensor: Tensor,  # (...)
) -> bool:
    """Return whether its device is a Hopper or a data-centre Blackwell, which also have room for linear.py's tiles."""
    return tensor.is_cuda and _is_supported(tensor.device)


@functools.cache
def _is_supported(on: device) -> bool:
    return version.hip is None and cuda.get_device_capability(on)[0] in (9, 10)
