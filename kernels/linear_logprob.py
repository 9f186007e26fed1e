"""Token log-probs and entropies from hidden states, without storing the (N, V) logits.

    y_nv    = scale * (sum_d h_nd w_vd + b_v)
    z_nv    = softcap * tanh(y_nv / softcap) / temperature        (no softcap: y / temperature)
    logp_n  = z_n,target(n) - lse_n,        lse_n = logsumexp_v z_nv
    H_n     = lse_n - sum_v p_nv z_nv,      p_nv = exp(z_nv - lse_n)

Three ways to call it, which give the same log-probs:

    with torch.no_grad():
        logp, entropy = linear_logprob(hidden, weight, target)           # 1 matrix product
    logp, entropy = linear_logprob(hidden, weight, target)               # any loss: 4 products, 2 if frozen
    loss, extra = linear_logprob_loss(hidden, weight, target, loss_fn)   # token-separable loss: 3 products, 2 if frozen

linear_logprob_loss calls `loss_fn` on the log-probs of a chunk of tokens while the chunk's logits are in memory, so
nothing is computed twice. The gradients are

    dz_nv = (1[v = target(n)] - p_nv) dlogp_n - p_nv (z_nv - lse_n + H_n) dH_n
    dh = dy @ w,   dw = dy.T @ h,   db = sum_n dy

Tokens with dlogp_n = dH_n = 0 are skipped in the products; skip=False computes them and saves a host sync.

If `target` is (N, K), the sums over v run over the K ids of each token only, of which the first is the target and -1 is
padding: the distribution that top-k, top-p or min-p left. Only the head's rows of these ids are multiplied.

Numerics: products in the input dtype, everything after them in fp32 (fp64 for fp64 inputs), dw accumulated in fp32. The
target column is separate: logp = -softplus(logsumexp over other columns - z_target), so that a confident target keeps
its precision.
Memory: one chunk of tokens, plus dw in fp32. Tokens with target = ignore_index cost nothing.
Implementations: `torch` anywhere, `triton` for bfloat16 on CUDA (linear_logprob_triton.py), `rows` on a CPU if the last
bits of a log-prob must not depend on the other tokens, which `triton` ensures too. Gather a DTensor first.
Shapes: N = packed tokens, D = model width, V = vocabulary, n = tokens per chunk.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import set_rows

BLOCK_ELEMENTS = 1 << 25  # logits per chunk with impl=torch: 128 MiB in fp32
EXCLUDED = -1e30  # logit of an excluded column: its exp is 0, and 0 times it is 0
Impl = Literal["auto", "torch", "triton", "rows"]


class TokenLogps(NamedTuple):
    logp: Tensor  # (N,) fp32; 0 where the target is ignored
    entropy: Tensor  # (N,) fp32 in nats; 0 where the target is ignored; None with entropy=False


LossFn = Callable[[TokenLogps, Tensor], tuple[Tensor, Any]]


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep `function` out of the graph of a compiled model: it has chunk loops, host syncs and Triton launches.

    Decorating with torch.compiler.disable would import Dynamo, which takes two seconds.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call


@eager
def linear_logprob(
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    target: Tensor,  # (N,) or (N, K) ids; tokens with ignore_index get logp 0, entropy 0, no gradient
    *,
    bias: Tensor | None = None,  # (V,)
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int | None = -100,
    entropy: bool = True,
    skip: bool = True,
    impl: Impl = "auto",
) -> TokenLogps:
    """Return the log-prob of each target and the entropy of its distribution, with gradients if enabled.

    ignore_index=None means that no token is ignored, and saves a host sync. Targets outside the vocabulary are then not
    checked: their log-prob is NaN (triton), or torch raises an error. skip=False also computes tokens without a
    gradient, which saves a host sync in the backward; their gradients are 0 either way.
    """
    head = _pick(hidden, weight, bias, target, scale, softcap, temperature, impl)
    options = {"scale": scale, "softcap": softcap, "temperature": temperature, "entropy": entropy, "skip": skip}
    kept = _kept_tokens(target, weight.shape[0], ignore_index)
    states, targets = (hidden, target) if kept is None else (hidden[kept], target[kept])
    with torch.autocast(hidden.device.type, enabled=False), current_device(hidden):
        if torch.is_grad_enabled() and _any_requires_grad(hidden, weight, bias):
            logp, entropies = _Logprob.apply(states, weight, bias, targets, head, options)
        else:
            logp, entropies = head(states, weight, bias, targets, **options).logps()[:2]
    if kept is None:
        return TokenLogps(logp, entropies)
    zeros = logp.new_zeros(hidden.shape[0])
    if entropies is not None:
        entropies = zeros.index_copy(0, kept, entropies)
    return TokenLogps(zeros.index_copy(0, kept, logp), entropies)


@eager
def linear_logprob_loss(
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    target: Tensor,  # (N,) or (N, K) ids; tokens with ignore_index are never computed
    loss_fn: LossFn,
    *,
    bias: Tensor | None = None,  # (V,)
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int | None = -100,
    entropy: bool = True,
    skip: bool = True,
    impl: Impl = "auto",
) -> tuple[Tensor, list[Any]]:
    """Sum a loss over chunks of tokens, and compute the gradients in the same pass.

    `loss_fn(tokens, index)` gets the TokenLogps of a chunk and the (n,) indices of its tokens in `hidden`. It returns
    a scalar and any other value; the other values are returned as a list, one per chunk. The loss must be
    token-separable: its values on the chunks must add up to its value on all tokens. Gradients flow to hidden, weight
    and bias, not to tensors that loss_fn closes over. backward() may be called once. `ignore_index` and `skip` as in
    linear_logprob; skip costs a host sync for the first chunk, and for every chunk after one with skipped tokens.
    """
    head = _pick(hidden, weight, bias, target, scale, softcap, temperature, impl)
    options = {"scale": scale, "softcap": softcap, "temperature": temperature, "entropy": entropy, "skip": skip}
    kept = _kept_tokens(target, weight.shape[0], ignore_index)
    states, targets = (hidden, target) if kept is None else (hidden[kept], target[kept])
    extra: list[Any] = []
    with torch.autocast(hidden.device.type, enabled=False), current_device(hidden):
        if torch.is_grad_enabled() and _any_requires_grad(hidden, weight, bias):
            return _LogprobLoss.apply(states, weight, bias, targets, head, options, loss_fn, kept, extra), extra
        logp, entropies = head(states, weight, bias, targets, **options).logps()[:2]
    index = torch.arange(len(logp), device=logp.device) if kept is None else kept
    loss, other = loss_fn(TokenLogps(logp, entropies), index)
    return loss, [other]


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
    """log sum_v p_nv^2 = logsumexp(2 z) - 2 logsumexp(z), the log-prob that two samples agree; without gradient."""
    weight = weight.to(hidden.dtype)
    bias = None if bias is None else bias.to(hidden.dtype)
    block = max(1, BLOCK_ELEMENTS // weight.shape[0])
    parts = []
    for states in hidden.split(block):
        z, _ = _logits(states, weight, bias, scale, softcap, temperature)
        parts.append((2 * z).logsumexp(dim=1) - 2 * z.logsumexp(dim=1))
    return torch.cat(parts) if parts else hidden.new_zeros(0, dtype=torch.promote_types(hidden.dtype, torch.float32))


class _Chunk(NamedTuple):
    """Results of TorchHead for a chunk of tokens, including intermediate results for the backward."""

    logp: Tensor  # (n,)
    entropy: Tensor | None  # (n,)
    z: Tensor  # (n, V) log-probs of all columns, EXCLUDED at the target
    slope: Tensor | None  # (n, V) derivative of the softcap
    target_slope: Tensor  # (n, 1) derivative of the softcap at the target


class _Plan(NamedTuple):
    active: Tensor | None  # (A,) indices within the chunk of tokens with a gradient; None: unknown
    grad_logp: Tensor  # (n,)
    grad_entropy: Tensor | None  # (n,)


class TorchHead:
    """Log-probs and gradients of one call, computed in chunks of tokens.

    stats = head.logps()                           # all tokens; log-prob and entropy are its first two fields
    head.allocate_grads(hidden=True, weight=True, bias=False)
    head.backward(stats, grad_logp, grad_entropy)

    or, if the gradients of a chunk depend only on the chunk's log-probs:

    for start, stop in chunks(head):
        stats = head.forward_chunk(start, stop)
        plan = head.plan(start, stats, grad_logp, grad_entropy)
        head.backward_chunk(start, stats, plan)
    head.finish()

    After either, head.grad_hidden, grad_weight and grad_bias are complete.
    """

    def __init__(
        self,
        hidden: Tensor,  # (N, D)
        weight: Tensor,  # (V, D)
        bias: Tensor | None,  # (V,)
        target: Tensor,  # (N,) int64
        *,
        scale: float,
        softcap: float | None,
        temperature: float,
        entropy: bool,
        skip: bool = True,
    ):
        self.skip = skip
        self.hidden, self.weight, self.target = hidden, weight.to(hidden.dtype), target
        self.weight_dtype = weight.dtype
        self.bias = None if bias is None else bias.to(hidden.dtype)
        self.scale, self.softcap, self.temperature, self.entropy = scale, softcap, temperature, entropy
        self.num_tokens, self.chunk = hidden.shape[0], max(1, BLOCK_ELEMENTS // weight.shape[0])
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        self.grad_hidden = self.grad_weight = self.grad_bias = None

    def logps(self) -> TokenLogps:
        parts = [self.forward_chunk(start, stop)[:2] for start, stop in chunks(self)]
        logp, entropy = zip(*parts, strict=True) if parts else ((), ())
        empty = torch.empty(0, dtype=self.dtype, device=self.hidden.device)
        return TokenLogps(torch.cat([empty, *logp]), torch.cat([empty, *entropy]) if self.entropy else None)

    def allocate_grads(self, *, hidden: bool, weight: bool, bias: bool) -> None:
        self.grad_hidden = torch.zeros_like(self.hidden) if hidden else None
        self.grad_weight = torch.zeros_like(self.weight, dtype=self.dtype) if weight else None
        self.grad_bias = torch.zeros_like(self.bias, dtype=self.dtype) if bias else None

    def forward_chunk(self, start: int, stop: int) -> _Chunk:
        target = self._target_column(slice(start, stop))
        z, slope = self._logits(slice(start, stop))
        target_logit = z.gather(1, target)
        target_slope = torch.ones_like(target_logit) if slope is None else slope.gather(1, target)
        z.scatter_(1, target, EXCLUDED)
        logp = torch.nn.functional.logsigmoid(target_logit - z.logsumexp(dim=1, keepdim=True))
        entropy = None
        if self.entropy:
            log_p = z - (target_logit - logp)
            entropy = -(log_p.exp() * log_p).sum(dim=1) - (logp.exp() * logp).squeeze(1)
        z -= target_logit - logp  # log-probs from here on
        return _Chunk(logp.squeeze(1), entropy, z, slope, target_slope)

    def plan(
        self,
        start: int,
        chunk: _Chunk,
        grad_logp: Tensor,  # (N,) tokens of the chunk
        grad_entropy: Tensor | None,  # (N,)
    ) -> _Plan:
        return _Plan(_active_tokens(grad_logp, grad_entropy) if self.skip else None, grad_logp, grad_entropy)

    def backward_chunk(self, start: int, chunk: _Chunk, plan: _Plan) -> None:
        active, grad_logp, grad_entropy = plan
        at = slice(start, start + len(grad_logp)) if active is None else start + active
        if active is not None and len(active) < len(grad_logp):
            chunk = _Chunk(*(None if x is None else x[active] for x in chunk))
            grad_logp = grad_logp[active]
            grad_entropy = None if grad_entropy is None else grad_entropy[active]
        g, logp = grad_logp.unsqueeze(1), chunk.logp.unsqueeze(1)
        p = chunk.z.exp()
        dz = -p * g
        target_dz = -torch.expm1(logp) * g  # expm1: 1 - p without cancellation
        if grad_entropy is not None:
            h, entropy = grad_entropy.unsqueeze(1), chunk.entropy.unsqueeze(1)
            dz -= p * (chunk.z + entropy) * h
            target_dz -= logp.exp() * (logp + entropy) * h
        if chunk.slope is not None:
            dz *= chunk.slope
        dy = dz.scatter_(1, self._target_column(at), target_dz * chunk.target_slope).mul_(self.scale / self.temperature)
        is_inactive = None
        if active is None:  # tokens without a gradient get exact zeros, even if they contain NaN
            is_inactive = ~_is_active(grad_logp, grad_entropy).unsqueeze(1)
            dy.masked_fill_(is_inactive, 0.0)
        if self.grad_hidden is not None:
            self.grad_hidden[at] = self._times_weight(at, dy)
        if self.grad_weight is not None or self.grad_bias is not None:
            dy = self._by_row(at, dy)
        if self.grad_weight is not None:
            hidden = self.hidden[at] if is_inactive is None else self.hidden[at].masked_fill(is_inactive, 0.0)
            self.grad_weight += _wide_product(dy.to(hidden.dtype).T, hidden)
        if self.grad_bias is not None:
            self.grad_bias += dy.sum(dim=0)

    # What SetHead computes differently.

    def _target_column(self, at: slice | Tensor) -> Tensor:  # (n, 1) column of the logits that is the target's
        return self.target[at].unsqueeze(1)

    def _logits(self, at: slice) -> tuple[Tensor, Tensor | None]:  # (n, V) each
        return _logits(self.hidden[at], self.weight, self.bias, self.scale, self.softcap, self.temperature)

    def _times_weight(self, at: slice | Tensor, dy: Tensor) -> Tensor:  # (n, V) -> (n, D)
        return dy.to(self.weight.dtype) @ self.weight

    def _by_row(self, at: slice | Tensor, dy: Tensor) -> Tensor:  # (n, V), one column per row of grad_weight
        return dy

    def finish(self) -> None:
        if self.grad_weight is not None:
            self.grad_weight = self.grad_weight.to(self.weight_dtype)

    def backward(
        self,
        stats: TokenLogps,
        grad_logp: Tensor,  # (N,)
        grad_entropy: Tensor | None,  # (N,)
    ) -> None:
        for start, stop in chunks(self):
            chunk = self.forward_chunk(start, stop)
            part = None if grad_entropy is None else grad_entropy[start:stop]
            self.backward_chunk(start, chunk, self.plan(start, chunk, grad_logp[start:stop], part))
        self.finish()


class RowHead(TorchHead):
    """TorchHead that computes the log-probs of each token alone: torch chooses the order of sums by shape."""

    def forward_chunk(self, start: int, stop: int) -> _Chunk:
        parts = zip(*(super(RowHead, self).forward_chunk(i, i + 1) for i in range(start, stop)), strict=True)
        return _Chunk(*(None if part[0] is None else torch.cat(part) for part in parts))

    def _logits(self, at: slice) -> tuple[Tensor, Tensor | None]:  # (1, V) each
        states = self.hidden[at].clone()  # aligned in memory, which may matter too
        return _logits(states, self.weight, self.bias, self.scale, self.softcap, self.temperature)


class SetHead(TorchHead):
    """TorchHead whose softmax runs over a set of ids per token: `target` is (N, K), the target first, padded with -1.

    The weight's gradient is a product with one column per id in any set (U of them), not an addition per entry, so it
    does not depend on the order of additions.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, **options: Any):
        super().__init__(hidden, weight, bias, target[:, 0], **options)
        self.sets = target
        # There are several (n, K) tensors at a time; only the reference also stores the rows of all sets.
        self.chunk = self._chunk(target.shape[1] * (4 if hidden.is_cuda else hidden.shape[1]))

    def _chunk(self, columns: int) -> int:
        return max(1, BLOCK_ELEMENTS // max(1, columns))

    def allocate_grads(self, *, hidden: bool, weight: bool, bias: bool) -> None:
        super().allocate_grads(hidden=hidden, weight=False, bias=False)
        if weight or bias:
            used = torch.zeros(len(self.weight), dtype=torch.bool, device=self.sets.device)
            used[set_rows.ids_of(self.sets)] = True
            self.union, self.column = used.nonzero().squeeze(1), used.cumsum(0) - 1  # (U,) ids; (V,) their columns
            self.chunk = min(self.chunk, self._chunk(len(self.union)))
            zeros = self.hidden.new_zeros(len(self.union), self.weight.shape[1], dtype=self.dtype)
            self.grad_weight, self.grad_bias = zeros if weight else None, zeros[:, 0].clone() if bias else None

    def finish(self) -> None:
        for name, like in (("grad_weight", self.weight), ("grad_bias", self.bias)):
            if (part := getattr(self, name)) is not None:  # (U, ...) to (V, ...)
                setattr(self, name, torch.zeros_like(like, dtype=self.dtype).index_copy_(0, self.union, part))
        super().finish()

    def _target_column(self, at: slice | Tensor) -> Tensor:
        return torch.zeros_like(self.target[at], dtype=torch.int64).unsqueeze(1)

    def _logits(self, at: slice) -> tuple[Tensor, Tensor | None]:  # (n, K) each
        y = set_rows.dot_rows(self.hidden[at], self.weight, self.sets[at])
        y = y if self.bias is None else y + self.bias[set_rows.ids_of(self.sets[at])]
        z, slope = _capped(y, self.scale, self.softcap, self.temperature)
        return z.masked_fill_(self.sets[at] < 0, EXCLUDED), slope

    def _times_weight(self, at: slice | Tensor, dy: Tensor) -> Tensor:  # (n, K) -> (n, D)
        return set_rows.sum_rows(dy, self.weight, self.sets[at])

    def _by_row(self, at: slice | Tensor, dy: Tensor) -> Tensor:  # (n, K) -> (n, U); padding adds 0 to the target
        columns = self.column[set_rows.ids_of(self.sets[at])]
        return dy.new_zeros(len(dy), len(self.union)).scatter_add_(1, columns, dy)


def _is_active(grad_logp: Tensor, grad_entropy: Tensor | None) -> Tensor:  # (n,) bool
    return grad_logp != 0 if grad_entropy is None else (grad_logp != 0) | (grad_entropy != 0)


def _active_tokens(grad_logp: Tensor, grad_entropy: Tensor | None) -> Tensor:  # (A,)
    return _is_active(grad_logp, grad_entropy).nonzero().squeeze(1)


def _one_pass(
    make: Callable[[], Any],
    needs: tuple[bool, ...],
    gradients: Callable[[int, int, TokenLogps], tuple[Tensor, Tensor | None]],
) -> Any:
    """Run one pass over all chunks, with d loss / d (logp, entropy) from `gradients(start, stop, tokens)`."""
    head = make()
    _allocate_grads(head, needs)
    for start, stop in chunks(head):
        stats = head.forward_chunk(start, stop)
        plan = head.plan(start, stats, *gradients(start, stop, TokenLogps(*stats[:2])))
        head.backward_chunk(start, stats, plan)
    head.finish()
    return head


def _allocate_grads(head: Any, needs: tuple[bool, ...]) -> None:
    head.allocate_grads(hidden=needs[0], weight=needs[1], bias=needs[2])


def _loss_and_gradients(
    loss_fn: LossFn, tokens: TokenLogps, index: Tensor
) -> tuple[Tensor, Any, Tensor, Tensor | None]:
    """Return a chunk's loss, loss_fn's other value, and the gradients for log-prob and entropy; all detached."""
    leaves = [x.detach().requires_grad_() for x in tokens if x is not None]
    with torch.enable_grad():
        loss, other = loss_fn(TokenLogps(*leaves, *[None] * (2 - len(leaves))), index)
    if not loss.requires_grad:  # independent of log-prob and entropy
        return loss.detach(), other, torch.zeros_like(leaves[0]), None
    grads = [*torch.autograd.grad(loss, leaves, allow_unused=True), None]
    return loss.detach(), other, torch.zeros_like(leaves[0]) if grads[0] is None else grads[0], grads[1]


def chunks(head: Any) -> list[tuple[int, int]]:
    return [(i, min(i + head.chunk, head.num_tokens)) for i in range(0, head.num_tokens, head.chunk)]


class _Logprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, target, head_class, options):
        ctx.set_materialize_grads(False)
        needs = ctx.needs_input_grad
        ctx.head_class, ctx.options, slope = head_class, options, None
        make = functools.partial(head_class, hidden, weight, bias, target, **options)
        if needs[0] and not needs[1] and not needs[2] and len(target):
            # Frozen head: d logp / d hidden is one vector per token. Compute it now; the backward only scales it.
            parts: dict[int, TokenLogps] = {}

            def ones(start: int, stop: int, tokens: TokenLogps) -> tuple[Tensor, None]:
                parts[start] = tokens
                return torch.ones_like(tokens.logp), None

            slope = _one_pass(make, needs, ones).grad_hidden
            logp, entropy = zip(*parts.values(), strict=True)
            stats = TokenLogps(torch.cat(logp), torch.cat(entropy) if options["entropy"] else None)
        else:
            stats = make().logps()
        ctx.stats_class = type(stats)
        ctx.save_for_backward(hidden, weight, bias, target, slope, *stats)
        return stats[:2]

    @staticmethod
    @once_differentiable  # lse and entropy are constants here, so a second derivative would be wrong
    def backward(ctx, grad_logp, grad_entropy):
        saved = ctx.saved_tensors  # with activation checkpointing they can be read only once
        hidden, slope = saved[0], saved[4]
        if grad_logp is None and grad_entropy is None:
            return (None,) * 6
        if slope is not None and grad_entropy is None:
            return (slope * grad_logp.unsqueeze(1)).to(hidden.dtype), None, None, None, None, None
        if grad_logp is None:
            grad_logp = torch.zeros_like(grad_entropy)
        with torch.autocast(hidden.device.type, enabled=False), current_device(hidden):
            return _Logprob.recompute(ctx, saved, grad_logp, grad_entropy)

    @staticmethod
    def recompute(ctx, saved, grad_logp, grad_entropy):
        hidden, weight, bias, target, slope, *stats = saved
        active = _active_tokens(grad_logp, grad_entropy) if ctx.options["skip"] else None
        if is_part := active is not None and len(active) < len(grad_logp):  # skip tokens without a gradient
            grad_logp = grad_logp[active]
            grad_entropy = None if grad_entropy is None else grad_entropy[active]
            stats = [None if x is None else x[active] for x in stats]
        head = ctx.head_class(
            hidden[active] if is_part else hidden, weight, bias, target[active] if is_part else target, **ctx.options
        )
        _allocate_grads(head, ctx.needs_input_grad)
        stats = head.logps() if slope is not None else ctx.stats_class(*stats)
        head.backward(stats, grad_logp, grad_entropy)
        grad_hidden = head.grad_hidden
        if grad_hidden is not None and is_part:
            grad_hidden = torch.zeros_like(hidden).index_copy_(0, active, grad_hidden)
        return grad_hidden, head.grad_weight, _cast_like(head.grad_bias, bias), None, None, None


class _LogprobLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, target, head_class, options, loss_fn, kept, extra):
        parts: dict[int, tuple[Tensor, Any]] = {}  # by chunk start

        def gradients(start: int, stop: int, tokens: TokenLogps) -> tuple[Tensor, Tensor | None]:
            index = torch.arange(start, stop, device=hidden.device) if kept is None else kept[start:stop]
            loss, other, *grads = _loss_and_gradients(loss_fn, tokens, index)
            parts[start] = (loss, other)
            return tuple(grads)

        make = functools.partial(head_class, hidden, weight, bias, target, **options)
        head = _one_pass(make, ctx.needs_input_grad, gradients)
        if not parts:  # no tokens: loss_fn still decides the result
            gradients(0, 0, TokenLogps(*head.logps()[:2]))
        loss = torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
        for part, other in parts.values():
            loss += part
            extra.append(other)
        ctx.gradients = (head.grad_hidden, head.grad_weight, _cast_like(head.grad_bias, bias))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss):
        if ctx.gradients is None:
            raise RuntimeError("linear_logprob_loss: backward() has already run; call linear_logprob_loss again")
        gradients, ctx.gradients = ctx.gradients, None  # scaled in place, so they can be used only once
        return *(scale_gradient(x, grad_loss) for x in gradients), None, None, None, None, None, None


def current_device(
    x: Tensor,  # (...)
) -> Any:
    """Make the device of x current: Triton launches on the current device, not on the device of its arguments."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def scale_gradient(
    gradient: Tensor | None,  # (...) contiguous
    factor: Tensor,  # ()
) -> Tensor | None:
    """gradient *= factor."""
    if gradient is None:
        return None
    if gradient.is_cuda and gradient.dtype != torch.float64:
        from kernels.linear_logprob_triton import scale_unless_one

        return scale_unless_one(gradient, factor)
    return gradient.mul_(factor)


def _cast_like(gradient: Tensor | None, like: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.to(like.dtype)


def _logits(
    hidden: Tensor,  # (n, D)
    weight: Tensor,  # (V, D)
    bias: Tensor | None,  # (V,)
    scale: float,
    softcap: float | None,
    temperature: float,
) -> tuple[Tensor, Tensor | None]:  # (n, V) z, and the softcap's derivative if there is one
    y = hidden @ weight.T
    return _capped(y if bias is None else y + bias, scale, softcap, temperature)


def _capped(y: Tensor, scale: float, softcap: float | None, temperature: float) -> tuple[Tensor, Tensor | None]:
    """z from the head's output y, and the softcap's derivative if there is one."""
    y = y.to(torch.promote_types(y.dtype, torch.float32)) * scale
    if softcap is None:
        return y / temperature, None
    t = torch.tanh(y / softcap)
    return softcap * t / temperature, 1 - t.square()


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, in float32 where a GPU can: rounding each chunk to bfloat16 would lose small gradients."""
    is_low = a.is_cuda and a.dtype in (torch.bfloat16, torch.float16)
    return torch.mm(a, b, out_dtype=torch.float32) if is_low else a @ b


def _any_requires_grad(*tensors: Tensor | None) -> bool:
    return any(x is not None and x.requires_grad for x in tensors)


def _kept_tokens(target: Tensor, vocab: int, ignore_index: int | None) -> Tensor | None:  # (n,) None = all
    """Return the indices of tokens whose target is not ignored. Costs a host sync, unless ignore_index is None."""
    if ignore_index is None:
        return None
    if target.ndim == 2:
        raise ValueError(f"ignore_index={ignore_index}: with a set of ids per token no token can be ignored; pass None")
    keep = target != ignore_index
    wrong = keep & ((target < 0) | (target >= vocab))
    num_kept, num_wrong = torch.stack([keep.sum(), wrong.sum()]).tolist()
    if num_wrong:
        token = int(wrong.nonzero()[0])
        raise ValueError(f"target[{token}]={int(target[token])}: outside the vocabulary of {vocab}")
    return None if num_kept == len(target) else keep.nonzero().squeeze(1)


def _pick(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, scale: float, softcap: float | None,
    temperature: float, impl: str,
) -> type:  # fmt: skip
    """Check all arguments, then return TorchHead, RowHead, TritonHead or SetHead."""
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}: expected (N, D) and (V, D)")
    if target.shape[:1] != hidden.shape[:1] or target.ndim > 2:
        raise ValueError(f"target {tuple(target.shape)}: expected ({hidden.shape[0]},), one id per hidden state")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)}: expected ({weight.shape[0]},), one per id")
    if any(hasattr(x, "full_tensor") for x in (hidden, weight, bias)):
        raise ValueError("weight is a DTensor; gather it once with .full_tensor() and pass the result")
    for name, value in (("temperature", temperature), ("scale", scale), ("softcap", softcap)):
        if value is not None and not value > 0:
            raise ValueError(f"{name}={value}: must be above 0")
    if impl not in ("auto", "torch", "triton", "rows"):
        raise ValueError(f"impl={impl}: must be auto, torch, triton or rows")
    if target.ndim == 2:
        return SetHead
    if impl == "rows":
        return RowHead
    if impl == "torch" or (impl == "auto" and not (hidden.is_cuda and hidden.dtype == torch.bfloat16)):
        return TorchHead
    from kernels import linear_logprob_triton

    reason = linear_logprob_triton.obstacle(hidden)
    if reason is not None and impl == "triton":
        raise ValueError(f"impl=triton: {reason}; use impl=torch")
    return TorchHead if reason is not None else linear_logprob_triton.TritonHead
