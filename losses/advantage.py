"""Advantages from groups of completions of the same prompt (GRPO, Shao et al. 2024, arXiv:2402.03300).

    A_pg = (r_pg - mean_g r_p) / (std_g r_p + 1e-4)

The mean and the sample standard deviation (ddof = 1) leave out completions without a reward (NaN); those get
advantage 0, as does a group in which fewer than two completions have one.

Shapes: P prompts, G completions per prompt.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

EPSILON = 1e-4  # keeps a group of nearly equal rewards from blowing noise up to unit size


def group_advantage(
    reward: Tensor,  # (P, G) total reward; NaN = this completion has none
    *,
    scale: Literal["group", "batch", "none"] = "group",
) -> Tensor:  # (P, G)
    centred = reward - reward.nanmean(dim=1, keepdim=True)  # (P, G)
    if scale == "group":
        centred = centred / (nan_std(reward, dim=1).unsqueeze(1) + EPSILON)
    elif scale == "batch":
        centred = centred / (nan_std(reward.flatten(), dim=0) + EPSILON)
    else:
        # One scorable completion is its own mean: no signal, as in the other scales.
        lonely = (~reward.isnan()).sum(dim=1, keepdim=True) < 2
        centred = torch.where(lonely, 0.0, centred)
    return centred.nan_to_num(nan=0.0)


def nan_std(
    x: Tensor,  # (..., G) values; NaN = absent
    *,
    dim: int,
) -> Tensor:
    """Sample standard deviation (ddof = 1) over the values that are there; NaN where fewer than two are."""
    count = (~x.isnan()).sum(dim=dim)
    centred = x - x.nanmean(dim=dim, keepdim=True)
    variance = centred.square().nansum(dim=dim) / (count - 1)
    return torch.where(count > 1, variance.sqrt(), torch.nan)


def zero_std_frac(
    reward: Tensor,  # (P, G) total reward; NaN = this completion has none
) -> Tensor:  # ()
    """Fraction of groups that teach nothing: all rewards equal, or fewer than two of them."""
    std = nan_std(reward, dim=1)
    return (std.isnan() | (std < 1e-8)).to(reward.dtype).mean()
