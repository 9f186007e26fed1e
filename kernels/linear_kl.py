"""Divergence between the token distributions of two models, from hidden states, without storing (N, V) logits.

    y_nv = scale * (sum_d h_nd w_vd + b_v)
    z_nv = softcap * tanh(y_nv / softcap) / temperature        (no softcap: y / temperature)

for student and teacher, each with its own head; q and p are the softmaxes of the student's and the teacher's z. The
divergence of a token is the generalised Jensen-Shannon divergence of GKD (arXiv:2306.13649), as in losses/distill.py:

    m = beta p + (1 - beta) q
    D = beta KL(p || m) + (1 - beta) KL(q || m)                dD/dz_v = (1 - beta) q_v (log(q_v / m_v) - KL(q || m))
    D = KL(p || q)  at beta = 0                                dD/dz_v = q_v - p_v
    D = KL(q || p)  at beta = 1                                dD/dz_v = q_v (log(q_v / p_v) - KL(q || p))

where z is the student's. The teacher gets no gradient.

    out = linear_kl_loss(hidden, Head(**head_of(lm)), teacher_hidden, Head(**head_of(teacher)), beta=0.5)
    out.loss.backward()                          # loss = sum_n token_weight_n D_n
    out.divergence                               # (N,) each D_n, without gradient

For each chunk of tokens, two products give both logits, one kernel turns the student's logits into d loss / d y in
place, and two more products add to d hidden and d weight. All of this happens in the forward pass, and the backward
pass only scales: 4 products, 3 if the student's head is frozen, 2 without gradients.

Numerics: products in the input dtype with fp32 results, everything on logits in fp32 (fp64 for fp64 inputs), d y
rounded to the input dtype for its two products, dw accumulated in fp32. Ratios are computed from

    u = log p - log q,   log(q / m) = -log(1 - beta + beta e^u)

with the larger of p and q factored out, so nothing overflows, and u = 0 gives a divergence and a gradient of exactly 0.
A logit of -inf (a bias that masks an id) is a probability of 0. D is infinite only if it is infinite by definition.
Memory: the logits of one chunk twice in fp32, plus dw in fp32.
Implementations: `triton` on CUDA (linear_kl_triton.py), `torch` anywhere. Gather a DTensor head first.
Shapes: N = packed tokens, D = student width, E = teacher width, V = vocabulary, n = tokens per chunk.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.linear_logprob import Impl, current_device, eager, scale_gradient

BLOCK_ELEMENTS = 1 << 25  # logits per chunk and model with impl=torch: 128 MiB in fp32
CHUNK = 2048  # tokens per chunk with impl=triton: 1.16 GiB of fp32 logits per model if V = 151,936


class Head(NamedTuple):
    """Output layer, with the fields that head_of in trainer/policy/logps.py returns."""

    weight: Tensor  # (V, D)
    bias: Tensor | None = None  # (V,)
    scale: float = 1.0
    softcap: float | None = None

    def first(self, vocab: int) -> Head:
        """Return the head of the first `vocab` ids. Models with the same tokenizer may pad their heads differently."""
        return self._replace(weight=self.weight[:vocab], bias=None if self.bias is None else self.bias[:vocab])


class Divergence(NamedTuple):
    loss: Tensor  # () sum of token_weight * divergence, with gradient
    divergence: Tensor  # (N,) fp32 in nats, without gradient


@eager
def linear_kl_loss(
    hidden: Tensor,  # (N, D) student
    head: Head,
    teacher_hidden: Tensor,  # (N, E)
    teacher_head: Head,
    *,
    beta: float,
    temperature: float = 1.0,
    token_weight: Tensor | None = None,  # (N,) no gradient; None: 1. Tokens with weight 0 add nothing to the gradients
    impl: Impl = "auto",
) -> Divergence:
    """Sum weight times divergence over tokens, with gradients to the student's hidden states, weight and bias.

    Row v of both heads must be the same id; if one head has more than V rows, pass head.first(V). backward() may be
    called once.
    """
    use_triton = _check(hidden, head, teacher_hidden, teacher_head, beta, temperature, token_weight, impl)
    weight = None if token_weight is None else token_weight.detach()
    problem = _Problem(teacher_hidden.detach(), teacher_head, beta, temperature, weight, use_triton)
    leaves = (hidden, head.weight, head.bias)
    with torch.autocast(hidden.device.type, enabled=False), current_device(hidden):
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in leaves):
            return Divergence(*_LinearKL.apply(*leaves, head.scale, head.softcap, problem))
        result = _Pass(hidden.detach(), head, problem, needs=(False, False, False))
        return Divergence(result.loss, result.divergence)


class _Problem(NamedTuple):
    """Arguments of a call, except the student."""

    teacher_hidden: Tensor  # (N, E)
    teacher_head: Head
    beta: float
    temperature: float
    token_weight: Tensor | None  # (N,)
    use_triton: bool


class _LinearKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, scale, softcap, problem):
        result = _Pass(hidden, Head(weight, bias, scale, softcap), problem, needs=ctx.needs_input_grad[:3])
        ctx.gradients = (result.grad_hidden, result.grad_weight, result.grad_bias)
        ctx.mark_non_differentiable(result.divergence)
        return result.loss, result.divergence

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, _):
        if ctx.gradients is None:
            raise RuntimeError("linear_kl_loss: backward() has already run; call linear_kl_loss again")
        gradients, ctx.gradients = ctx.gradients, None  # scaled in place, so they can be used only once
        return *(scale_gradient(x, grad_loss) for x in gradients), None, None, None


class _Pass:
    """One pass over the tokens; its attributes are the results."""

    def __init__(self, hidden: Tensor, head: Head, problem: _Problem, *, needs: tuple[bool, ...]) -> None:
        self.problem, self.student, self.needs = problem, _Side(hidden, head), needs
        self.teacher = _Side(problem.teacher_hidden, problem.teacher_head)
        self.num_tokens, self.vocab, device = hidden.shape[0], head.weight.shape[0], hidden.device
        self.dtype = torch.promote_types(self.student.dtype, self.teacher.dtype)  # logits and divergences
        self.divergence = torch.zeros(self.num_tokens, dtype=self.dtype, device=device)
        weight = problem.token_weight
        weight = torch.ones_like(self.divergence) if weight is None else weight.to(device, self.dtype).contiguous()
        self.token_weight = weight
        self.grad_hidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=device) if needs[0] else None
        self.grad_weight = self.grad_bias = None
        self._run()
        if needs[1]:
            self.grad_weight = _as(self.grad_weight, head.weight)
        if needs[2]:
            self.grad_bias = _as(self.grad_bias, head.bias)
        # Select, do not multiply: a token with weight 0 may have an infinite divergence.
        self.loss = torch.where(weight == 0, 0.0, self.divergence * weight).sum()

    def _run(self) -> None:
        chunk = CHUNK if self.problem.use_triton else max(1, BLOCK_ELEMENTS // self.vocab)
        num_chunks = -(-self.num_tokens // chunk)
        if num_chunks:  # split evenly, in multiples of 32 if there are many tokens
            even = -(-self.num_tokens // num_chunks)
            chunk = min(chunk, even if even < 256 else -(-even // 32) * 32)
        # Buffer rows start at multiples of 64 bytes, because an odd stride would slow down the products.
        size = min(chunk, self.num_tokens), -(-self.vocab // 16) * 16
        y, teacher_y = (
            torch.empty(size, dtype=self.dtype, device=self.divergence.device)[:, : self.vocab] for _ in range(2)
        )
        for start in range(0, self.num_tokens, chunk):
            part = slice(start, min(start + chunk, self.num_tokens))
            count = part.stop - start
            dy = self._chunk(part, y[:count], teacher_y[:count])
            if dy is not None:
                self._add_gradients(part, dy, is_only=num_chunks == 1)

    def _chunk(self, part: slice, y: Tensor, teacher_y: Tensor) -> Tensor | None:
        """Compute the divergences of a chunk, and d loss / d y in the dtype of the student's products."""
        self.student.product(part, y)
        self.teacher.product(part, teacher_y)
        step = _step
        if self.problem.use_triton:
            from kernels.linear_kl_triton import step
        return step(
            y, self.student.head, teacher_y, self.teacher.head, self.problem.beta, self.problem.temperature,
            self.divergence[part], self.token_weight[part], self.student.hidden.dtype, any(self.needs),
        )  # fmt: skip

    def _add_gradients(self, part: slice, dy: Tensor, *, is_only: bool) -> None:
        hidden, dtype = self.student.hidden[part], self.student.dtype
        if self.needs[0]:
            torch.mm(dy, self.student.weight, out=self.grad_hidden[part])
        if self.needs[1] and is_only and self.student.head.weight.dtype == dy.dtype:
            self.grad_weight = dy.T @ hidden  # rounded once; no fp32 sum over chunks
        elif self.needs[1]:
            self.grad_weight = _add_product(self.grad_weight, dy.T, hidden, dtype)
        if self.needs[2]:
            chunk_grad = dy.sum(dim=0, dtype=dtype)
            self.grad_bias = chunk_grad if self.grad_bias is None else self.grad_bias.add_(chunk_grad)


class _Side:
    """Hidden states and head of one model; `product` computes the logits without scale and bias."""

    def __init__(self, hidden: Tensor, head: Head) -> None:
        self.hidden, self.head = hidden, head
        self.weight = head.weight.detach().to(hidden.dtype)
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)

    def product(self, part: slice, out: Tensor) -> None:
        a, b = self.hidden[part], self.weight.T
        if a.dtype == out.dtype:
            torch.mm(a, b, out=out)
        elif a.is_cuda and (a.dtype, out.dtype) == (torch.bfloat16, torch.float32):
            torch.mm(a, b, out_dtype=out.dtype, out=out)
        else:
            out.copy_(a.to(out.dtype) @ b.to(out.dtype))


def _as(gradient: Tensor | None, like: Tensor) -> Tensor:
    """Cast to the dtype of `like`; zeros if there were no tokens."""
    return torch.zeros_like(like) if gradient is None else gradient.to(like.dtype)


def _add_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:  # (M, K) @ (K, N)
    if a.dtype == dtype:
        return a @ b if total is None else total.addmm_(a, b)
    if not a.is_cuda:
        return _add_product(total, a.to(dtype), b.to(dtype), dtype)
    if total is None:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.addmm(total, a, b, out_dtype=dtype, out=total)


def _step(
    y: Tensor,  # (n, V) fp32 or wider
    head: Head,
    teacher_y: Tensor,  # (n, V)
    teacher_head: Head,
    beta: float,
    temperature: float,
    divergence: Tensor,  # (n,) output
    token_weight: Tensor,  # (n,)
    dtype: torch.dtype,
    with_gradient: bool,
) -> Tensor | None:  # (n, V) d loss / d y in `dtype`
    """Plain torch version of linear_kl_triton.step."""
    log_q, slope = _log_probs(y, head, temperature)
    log_p, _ = _log_probs(teacher_y, teacher_head, temperature)
    q, p = log_q.exp(), log_p.exp()  # tested below by == 0, not by > 0, so that NaN stays NaN
    u = torch.where((log_q == -math.inf) & (log_p == -math.inf), 0.0, log_p - log_q)
    if beta == 0:
        divergence.copy_(torch.where(p == 0, 0.0, p * u).sum(dim=1))
        dz = q - p
    elif beta == 1:
        divergence.copy_(torch.where(q == 0, 0.0, -q * u).sum(dim=1))
        dz = torch.where(q == 0, 0.0, q * (-u - divergence.unsqueeze(1)))
    else:
        share = torch.where(u > 0, u.new_full((), 1 - beta), u.new_full((), beta))  # weight of the smaller in m
        smaller = torch.log1p(share * torch.expm1(-u.abs()))
        q_over_m, p_over_m = -(smaller + u.clamp(min=0)), u.clamp(max=0) - smaller  # logs
        kl_q = torch.where(q == 0, 0.0, q * q_over_m).sum(dim=1)
        kl_p = torch.where(p == 0, 0.0, p * p_over_m).sum(dim=1)
        divergence.copy_(beta * kl_p + (1 - beta) * kl_q)
        dz = torch.where(q == 0, 0.0, (1 - beta) * q * (q_over_m - kl_q.unsqueeze(1)))
    if not with_gradient:
        return None
    factor = (token_weight * (head.scale / temperature)).unsqueeze(1)
    dy = dz * factor if slope is None else dz * factor * slope
    return torch.where(factor == 0, 0.0, dy).to(dtype)


def _log_probs(y: Tensor, head: Head, temperature: float) -> tuple[Tensor, Tensor | None]:
    """Return (n, V) log-probs, and the derivative of the softcap if there is one."""
    y = (y if head.bias is None else y + head.bias.detach().to(y.dtype)) * head.scale
    if head.softcap is None:
        return (y / temperature).log_softmax(dim=1), None
    t = torch.tanh(y / head.softcap)
    return (head.softcap * t / temperature).log_softmax(dim=1), 1 - t.square()


def _check(
    hidden: Tensor, head: Head, teacher_hidden: Tensor, teacher_head: Head, beta: float, temperature: float,
    token_weight: Tensor | None, impl: str,
) -> bool:  # fmt: skip
    """Check all arguments, then return whether to use the Triton kernel."""
    for name, states, side in (("", hidden, head), ("teacher_", teacher_hidden, teacher_head)):
        weight = side.weight
        if states.ndim != 2 or weight.ndim != 2 or states.shape[1] != weight.shape[1]:
            shapes = f"{name}hidden {tuple(states.shape)}, {name}head.weight {tuple(weight.shape)}"
            raise ValueError(f"{shapes}: expected (N, D) and (V, D)")
        if side.bias is not None and side.bias.shape != weight.shape[:1]:
            raise ValueError(f"{name}head.bias {tuple(side.bias.shape)}: expected ({weight.shape[0]},), one per id")
        if any(hasattr(x, "full_tensor") for x in (states, weight, side.bias)):
            raise ValueError(f"{name}head is a DTensor; gather it once with .full_tensor() and pass the result")
        if states.dtype == torch.float16:
            raise ValueError(f"{name}hidden is float16, where small probabilities are 0; use bfloat16")
        for key, value in (("scale", side.scale), ("softcap", side.softcap)):
            if value is not None and not value > 0:
                raise ValueError(f"{name}head.{key}={value}: must be above 0")
    if len(hidden) != len(teacher_hidden):
        counts = f"{len(teacher_hidden)} tokens, but the student has {len(hidden)}"
        raise ValueError(f"teacher_hidden: {counts}; pass the same tokens to both")
    vocab, teacher_vocab = head.weight.shape[0], teacher_head.weight.shape[0]
    if vocab != teacher_vocab:
        counts = f"{teacher_vocab} ids, but the student has {vocab}"
        raise ValueError(f"teacher_head.weight: {counts}; if only padding differs, pass head.first(V)")
    if not 0 <= beta <= 1:
        raise ValueError(f"beta={beta}: must be between 0 (forward KL) and 1 (reverse KL)")
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: must be above 0")
    if token_weight is not None and token_weight.shape != hidden.shape[:1]:
        raise ValueError(f"token_weight {tuple(token_weight.shape)}: expected ({len(hidden)},), one per token")
    if impl not in ("auto", "torch", "triton"):
        raise ValueError(f"impl={impl}: must be auto, torch or triton")
    if impl == "torch" or (impl == "auto" and not hidden.is_cuda):
        return False
    from kernels import linear_kl_triton

    reason = linear_kl_triton.obstacle(hidden, teacher_hidden)
    if reason is not None and impl == "triton":
        raise ValueError(f"impl=triton: {reason}; use impl=torch")
    return reason is None
