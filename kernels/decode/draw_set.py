"""Sample one token per decode row from the ids that top-k, top-p and min-p keep, and record these ids.

    ids, logps, sets = draw_set(logits, seed, number, temperature, most=50, top_k=50, top_p=0.9)

top_k keeps the top_k most likely ids, top_p the smallest set of these with top_p of their probability, and min_p the
ids with at least min_p times the highest probability. Ids as likely as the least likely kept id are kept too, so that a
set does not depend on the order of equal logits, unless they are more than top_k. Log-probs are over the set.

Only the `most` most likely ids are ranked, and only their logits are copied. Without top_k, a set of `most` ids may
therefore be incomplete, and must be rejected. u is that of draw.py, and the CDF runs over the kept ids in increasing
order, so a row samples the same id in any batch. There is no host sync, so a step can be captured in a CUDA graph.

A set is a row of int32 numbers: ~id of the sampled token, which is negative and so marks the start of a set after sets
are joined, then the other ids, with GAP in any place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.decode.draw import sum_chunks, triton, uniform

GAP = 2**31 - 1  # no id


def draw_set(
    logits: Tensor,  # (B, V) any float dtype
    seed: Tensor,  # (B,) int64
    number: Tensor,  # (B,) int32 token index within the completion
    temperature: Tensor,  # (B,) float32 above 0
    *,
    most: int,  # ids per set
    scale: float = 1.0,
    softcap: float | None = None,
    top_k: int = 0,  # 0 = all, otherwise `most`
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # (B,) int64 ids, (B,) float32 log-probs, (B, 1 + min(most, V)) int32 sets
    vocab, wide = logits.shape[1], torch.promote_types(logits.dtype, torch.float32)

    def scaled(x: Tensor) -> Tensor:
        z = x.to(wide) * scale
        z = z if softcap is None else softcap * torch.tanh(z / softcap)
        return z / temperature[:, None]

    values, ids = logits.topk(min(vocab, most), dim=1)  # the most likely first: `scaled` is increasing
    z = scaled(values)
    weight = (z - z[:, :1]).double().exp()
    keep = weight >= min_p
    if top_p < 1:
        if top_k:
            total = weight.sum(dim=1)
        elif logits.is_cuda and logits.dtype != torch.float64 and triton is not None:
            tops, sums, *_ = sum_chunks(logits, temperature, scale, softcap)
            total = (sums * (tops - z[:, :1]).double().exp()).sum(dim=1)
        else:
            total = (scaled(logits) - z[:, :1]).double().exp().sum(dim=1)
        keep &= weight.cumsum(dim=1) - weight < top_p * total[:, None]
    keep = z >= z.where(keep, torch.inf).amin(dim=1, keepdim=True)
    ordered, order = ids.where(keep, GAP).sort(dim=1)
    weight = weight.where(keep, 0.0).gather(1, order)
    cdf = weight.cumsum(dim=1)
    total = cdf[:, -1:]
    column = (cdf <= uniform(seed, number)[:, None] * total).sum(dim=1, keepdim=True)
    column = torch.minimum(column, keep.sum(dim=1, keepdim=True) - 1).clamp(min=0)  # below 0 only if a logit is NaN
    sampled = ordered.gather(1, column).clamp(max=vocab - 1)
    logps = (weight.gather(1, column) / total).log()
    sets = torch.cat([~sampled, ordered.scatter(1, column, GAP)], dim=1)
    return sampled[:, 0], logps[:, 0].to(wide), sets.int()
