"""Token log-probs and entropies straight from hidden states; the (N, V) logits are never stored.

    y_nv    = scale * (sum_d h_nd w_vd + b_v)
    z_nv    = softcap * tanh(y_nv / softcap) / temperature        (no softcap: y / temperature)
    logp_n  = z_n,target(n) - lse_n,        lse_n = logsumexp_v z_nv
    H_n     = lse_n - sum_v p_nv z_nv,      p_nv = exp(z_nv - lse_n)

Forward keeps lse and H, so backward recomputes z a block of rows at a time:

    dz_nv = (1[v = target(n)] - p_nv) dlogp_n - p_nv (z_nv - lse_n + H_n) dH_n
    dh = dy @ w,   dw = dy.T @ h,   db = sum_n dy

Numerics: products in the input dtype, everything after them in fp32 (fp64 for fp64 inputs), dw accumulated in fp32.
Memory: one block of rows of logits at a time, BLOCK_ELEMENTS numbers. Rows with target = ignore_index cost nothing.
Shapes: N = packed tokens, D = model width, V = vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK_ELEMENTS = 1 << 25  # 128 MiB of fp32 logits at a time


class TokenLogps(NamedTuple):
    logp: Tensor  # (N,) fp32; 0 where the target is ignored
    entropy: Tensor  # (N,) fp32 in nats; 0 where the target is ignored


def linear_logprob(
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    target: Tensor,  # (N,) int64; ignore_index gives logp 0, entropy 0 and no gradient
    *,
    bias: Tensor | None = None,  # (V,)
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
) -> TokenLogps:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}: expected (N, D) and (V, D)")
    if target.shape != hidden.shape[:1]:
        raise ValueError(f"target {tuple(target.shape)}: expected ({hidden.shape[0]},), one id per hidden state")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)}: expected ({weight.shape[0]},), one number per vocabulary entry")
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: must be above 0")
    weight = weight.to(hidden.dtype)
    bias = None if bias is None else bias.to(hidden.dtype)
    keep = target != ignore_index
    if bool(keep.all()):
        return TokenLogps(*_LinearLogprob.apply(hidden, weight, bias, target, scale, softcap, temperature))
    kept = keep.nonzero().squeeze(1)
    logp, entropy = _LinearLogprob.apply(hidden[kept], weight, bias, target[kept], scale, softcap, temperature)
    zeros = logp.new_zeros(hidden.shape[0])
    return TokenLogps(zeros.index_copy(0, kept, logp), zeros.index_copy(0, kept, entropy))


@torch.no_grad()
def linear_log_collision(
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    *,
    bias: Tensor | None = None,  # (V,)
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> Tensor:  # (N,) fp32
    """log sum_v p_nv^2, the log-probability that two draws agree: logsumexp(2 z) - 2 logsumexp(z). No gradient."""
    weight = weight.to(hidden.dtype)
    bias = None if bias is None else bias.to(hidden.dtype)
    block = max(1, BLOCK_ELEMENTS // weight.shape[0])
    parts = []
    for rows in hidden.split(block):
        z, _ = _logits(rows, weight, bias, scale, softcap, temperature)
        parts.append((2 * z).logsumexp(dim=1) - 2 * z.logsumexp(dim=1))
    return torch.cat(parts) if parts else hidden.new_zeros(0)


def _logits(
    hidden: Tensor,  # (R, D)
    weight: Tensor,  # (V, D)
    bias: Tensor | None,  # (V,)
    scale: float,
    softcap: float | None,
    temperature: float,
) -> tuple[Tensor, Tensor | None]:  # (R, V) z, and d(softcap output)/d(its input) when there is a softcap
    y = hidden @ weight.T
    if bias is not None:
        y = y + bias
    y = y.to(torch.promote_types(y.dtype, torch.float32)) * scale
    if softcap is None:
        return y / temperature, None
    t = torch.tanh(y / softcap)
    return softcap * t / temperature, 1 - t.square()


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, target, scale, softcap, temperature):
        num_rows, vocab = hidden.shape[0], weight.shape[0]
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logp, entropy, lse = (torch.empty(num_rows, dtype=dtype, device=hidden.device) for _ in range(3))
        block = max(1, BLOCK_ELEMENTS // vocab)
        for i in range(0, num_rows, block):
            rows = slice(i, i + block)
            z, _ = _logits(hidden[rows], weight, bias, scale, softcap, temperature)
            lse[rows] = z.logsumexp(dim=1)
            logp[rows] = z.gather(1, target[rows].unsqueeze(1)).squeeze(1) - lse[rows]
            entropy[rows] = lse[rows] - ((z - lse[rows].unsqueeze(1)).exp() * z).sum(dim=1)
        ctx.save_for_backward(hidden, weight, bias, target, lse, entropy)
        ctx.options = (scale, softcap, temperature, block)
        return logp, entropy

    @staticmethod
    @once_differentiable  # lse and entropy are constants here: a second derivative would be wrong, not merely slow
    def backward(ctx, grad_logp, grad_entropy):
        hidden, weight, bias, target, lse, entropy = ctx.saved_tensors
        scale, softcap, temperature, block = ctx.options
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = (
            torch.zeros(weight.shape, dtype=lse.dtype, device=weight.device) if ctx.needs_input_grad[1] else None
        )
        grad_bias = (
            torch.zeros(weight.shape[0], dtype=lse.dtype, device=weight.device) if ctx.needs_input_grad[2] else None
        )
        for i in range(0, hidden.shape[0], block):
            rows = slice(i, i + block)
            z, slope = _logits(hidden[rows], weight, bias, scale, softcap, temperature)
            log_p = z - lse[rows].unsqueeze(1)
            p = log_p.exp()
            dz = -p * grad_logp[rows].unsqueeze(1)
            dz.scatter_add_(1, target[rows].unsqueeze(1), grad_logp[rows].unsqueeze(1))
            dz -= p * (log_p + entropy[rows].unsqueeze(1)) * grad_entropy[rows].unsqueeze(1)
            dy = dz * (scale / temperature)
            if slope is not None:
                dy *= slope
            dy_low = dy.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = dy_low @ weight
            if grad_weight is not None:
                grad_weight += dy_low.T @ hidden[rows]
            if grad_bias is not None:
                grad_bias += dy.sum(dim=0)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None
