"""Sample one token from logits: a seeded uniform number, an inverse CDF, and the token's log-prob.

Probabilities are summed as integers, in units of 2**-60. An integer sum is exact in any order, so a draw depends on
nothing but its row; torch's float cumsum on a GPU depends on the order in which blocks finish.
"""

from __future__ import annotations

import torch

from rollout.engine import Sampling

GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # int64 constants of splitmix64; torch multiplies modulo 2**64
MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
MIX_2 = 0x94D049BB133111EB - 2**64
UNIT = 2.0**60  # probability 1: below int64's limit, finer than float64 near 1
SLAB = 2**24  # logits processed at once: keeps the float64 copies near 128 MB


def signed_64(seed: int) -> int:
    """Any Python integer, wrapped into int64."""
    return ((seed + 2**63) % 2**64) - 2**63


def uniform(
    seeds: torch.Tensor,  # (B,) int64
    position: int,  # number of the token within its completion
) -> torch.Tensor:  # (B,) float64 in [0, 1)
    """A hash of (seed, position): no generator state, so a row draws the same number in any batch."""
    bits = _mix(_mix(seeds) + signed_64(GOLDEN * (position + 1)))
    return _shift_right(bits, 11).double() * 2.0**-53


def sample(
    logits: torch.Tensor,  # (B, V)
    uniforms: torch.Tensor,  # (B,) float64
    sampling: Sampling,
) -> tuple[torch.Tensor, torch.Tensor]:  # (B,) int64 ids, (B,) float32 log-probs
    """Draw ids; their log-probs are those of the full distribution, before top-k and top-p."""
    rows = max(1, SLAB // logits.shape[1])
    if logits.shape[0] <= rows:
        return _sample(logits, uniforms, sampling)
    parts = [_sample(x, u, sampling) for x, u in zip(logits.split(rows), uniforms.split(rows), strict=True)]
    return torch.cat([ids for ids, _ in parts]), torch.cat([logp for _, logp in parts])


def _sample(logits: torch.Tensor, uniforms: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    logps = torch.log_softmax(logits.float() / (sampling.temperature or 1.0), dim=-1)  # (B, V)
    if sampling.temperature == 0:
        ids = logps.argmax(dim=-1, keepdim=True)
    else:
        weights = (logps.double().exp() * UNIT).long()
        if sampling.top_k > 0 or sampling.top_p < 1:
            weights = _keep_top(weights, sampling.top_k, sampling.top_p)
        cdf = weights.cumsum(dim=-1)
        target = (uniforms[:, None] * cdf[:, -1:]).long()
        # right=True takes the first id whose CDF is above the target, so an id of probability 0 is never drawn.
        ids = torch.searchsorted(cdf, target, right=True).clamp(max=cdf.shape[1] - 1)
    return ids[:, 0], logps.gather(1, ids)[:, 0]


def _keep_top(weights: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Zero all but the top_k ids, then all but the smallest set of those with top_p of the remaining mass."""
    ranked, order = weights.sort(dim=-1, descending=True, stable=True)
    if top_k > 0:
        ranked[:, top_k:] = 0
    if top_p < 1:
        before = ranked.cumsum(dim=-1) - ranked
        ranked[before >= top_p * ranked.sum(dim=-1, keepdim=True).double()] = 0
    return torch.zeros_like(weights).scatter(1, order, ranked)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64."""
    x = (x ^ _shift_right(x, 30)) * MIX_1
    x = (x ^ _shift_right(x, 27)) * MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch's >> on int64 copies the sign bit in."""
    return (x >> bits) & (2 ** (64 - bits) - 1)
