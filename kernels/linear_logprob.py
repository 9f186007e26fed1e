"""Token log-probs and entropies straight from hidden states; the (N, V) logits are never stored.

    y_nv    = scale * (sum_d h_nd w_vd + b_v)
    z_nv    = softcap * tanh(y_nv / softcap) / temperature        (no softcap: y / temperature)
    logp_n  = z_n,target(n) - lse_n,        lse_n = logsumexp_v z_nv
    H_n     = lse_n - sum_v p_nv z_nv,      p_nv = exp(z_nv - lse_n)

Three entries over the same maths, which give the same log-probs:

    with torch.no_grad():
        logp, entropy = linear_logprob(hidden, weight, target)                       # one matrix product
    logp, entropy = linear_logprob(hidden, weight, target)                           # any loss: four, two if frozen
    loss, extra = linear_logprob_loss(hidden, weight, target, loss_fn)               # token by token: three, two

The last calls `loss_fn` on the log-probs of a chunk of rows while the chunk is still there, so nothing is computed
twice; the gradients are those of

    dz_nv = (1[v = target(n)] - p_nv) dlogp_n - p_nv (z_nv - lse_n + H_n) dH_n
    dh = dy @ w,   dw = dy.T @ h,   db = sum_n dy,        rows with dlogp_n = dH_n = 0 left out where that is known

Numerics: products in the input dtype, everything after them in fp32 (fp64 for fp64 inputs), dw accumulated in fp32. The
target's column is kept apart: logp = -softplus(logsumexp over the others - z_target), which a confident target needs.
Memory: one chunk of rows, plus dw in fp32. Rows with target = ignore_index cost nothing.
Paths: `torch` anywhere; `triton` for bfloat16 on CUDA (scaled_exp.py). A DTensor head must be gathered first.
Shapes: N = packed tokens, D = model width, V = vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK_ELEMENTS = 1 << 25  # 128 MiB of fp32 logits at a time on the torch path
NOTHING = -1e30  # a logit that takes no part: its exp is 0, and 0 times it is 0
Impl = Literal["auto", "torch", "triton"]


class TokenLogps(NamedTuple):
    logp: Tensor  # (N,) fp32; 0 where the target is ignored
    entropy: Tensor | None  # (N,) fp32 in nats; 0 where the target is ignored; None when not asked for


LossFn = Callable[[TokenLogps, Tensor], tuple[Tensor, Any]]


def _eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """A model around it may be compiled; chunks, syncs and Triton launches are not for its graph.

    torch.compiler.disable at import would load Dynamo, two seconds that most runs never need.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call


@_eager
def linear_logprob(
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    target: Tensor,  # (N,) int64; rows with ignore_index get logp 0, entropy 0, no gradient
    *,
    bias: Tensor | None = None,  # (V,)
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int | None = -100,
    entropy: bool = True,
    impl: Impl = "auto",
) -> TokenLogps:
    """Log-prob of each target, and the entropy of its distribution; differentiable when gradients are enabled.

    ignore_index=None says that every row counts, and spares a wait for the device to find out; a target outside the
    vocabulary is then not refused but gets the log-prob NaN (triton) or an error of torch's own.
    """
    head = _pick(hidden, weight, bias, target, scale, softcap, temperature, impl)
    options = {"scale": scale, "softcap": softcap, "temperature": temperature, "entropy": entropy}
    kept = _kept_rows(target, weight.shape[0], ignore_index)
    rows, words = (hidden, target) if kept is None else (hidden[kept], target[kept])
    with torch.autocast(hidden.device.type, enabled=False), _on(hidden):
        if torch.is_grad_enabled() and _any_requires_grad(hidden, weight, bias):
            logp, found = _Logprob.apply(rows, weight, bias, words, head, options)
        else:
            logp, found = head(rows, weight, bias, words, **options).score()[:2]
    if kept is None:
        return TokenLogps(logp, found)
    zeros = logp.new_zeros(hidden.shape[0])
    return TokenLogps(zeros.index_copy(0, kept, logp), None if found is None else zeros.index_copy(0, kept, found))


@_eager
def linear_logprob_loss(
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    target: Tensor,  # (N,) int64; rows with ignore_index are never computed
    loss_fn: LossFn,
    *,
    bias: Tensor | None = None,  # (V,)
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int | None = -100,
    entropy: bool = True,
    impl: Impl = "auto",
) -> tuple[Tensor, list[Any]]:
    """Sum of a loss over chunks of rows, with its gradients made in the same pass.

    `loss_fn(tokens, rows)` gets the TokenLogps of some rows and their (n,) numbers in `hidden`, and returns a scalar
    and anything else, which is handed back in a list, one for each chunk. It must be token-separable: the sum of what
    it gives for parts must be what it would give for the whole. It may be asked for a chunk again, so it must not keep
    count. Gradients reach hidden, weight and bias, not what loss_fn closes over. The backward of the loss runs once.
    """
    head = _pick(hidden, weight, bias, target, scale, softcap, temperature, impl)
    options = {"scale": scale, "softcap": softcap, "temperature": temperature, "entropy": entropy}
    kept = _kept_rows(target, weight.shape[0], ignore_index)
    rows, words = (hidden, target) if kept is None else (hidden[kept], target[kept])
    extra: list[Any] = []
    with torch.autocast(hidden.device.type, enabled=False), _on(hidden):
        if torch.is_grad_enabled() and _any_requires_grad(hidden, weight, bias):
            return _LogprobLoss.apply(rows, weight, bias, words, head, options, loss_fn, kept, extra), extra
        logp, found = head(rows, weight, bias, words, **options).score()[:2]
    numbers = torch.arange(len(logp), device=logp.device) if kept is None else kept
    loss, more = loss_fn(TokenLogps(logp, found), numbers)
    return loss, [more]


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
    return torch.cat(parts) if parts else hidden.new_zeros(0, dtype=torch.promote_types(hidden.dtype, torch.float32))


class _Kept(NamedTuple):
    """A chunk of the torch path: log-prob, entropy, and the logits they came from."""

    logp: Tensor  # (n,)
    entropy: Tensor | None  # (n,)
    z: Tensor  # (n, V), NOTHING at the target
    slope: Tensor | None  # (n, V) of the softcap
    own: Tensor  # (n, 1) slope at the target


class _Plan(NamedTuple):
    rows: Tensor  # (A,) rows of the chunk that have a gradient
    grad_logp: Tensor  # (n,)
    grad_entropy: Tensor | None  # (n,)


class TorchHead:
    """The rows of one call against one head, a chunk at a time:

    stats = head.score()                           # of all rows; log-prob and entropy come first
    head.want(hidden=True, weight=True, bias=False)
    head.backward(stats, grad_logp, grad_entropy)

    or, when the gradients depend on the log-probs of the chunk alone:

    for start, stop in chunks(head):
        stats = head.open(start, stop)
        plan = head.plan(start, stats, grad_logp, grad_entropy)  # None: stats have changed, take the gradients anew
        head.close(start, stats, plan)
    head.finish()                                  # False: start all over, with head.careful = True

    After either head.grad_hidden, grad_weight and grad_bias are complete.
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
    ):
        self.hidden, self.weight, self.target = hidden, weight.to(hidden.dtype), target
        self.weight_dtype = weight.dtype
        self.bias = None if bias is None else bias.to(hidden.dtype)
        self.scale, self.softcap, self.temperature, self.entropy = scale, softcap, temperature, entropy
        self.num_rows, self.chunk = hidden.shape[0], max(1, BLOCK_ELEMENTS // weight.shape[0])
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        self.grad_hidden = self.grad_weight = self.grad_bias = None

    def score(self) -> TokenLogps:
        found = [self.open(start, stop)[:2] for start, stop in chunks(self)]
        logp, entropy = zip(*found, strict=True) if found else ((), ())
        empty = torch.empty(0, dtype=self.dtype, device=self.hidden.device)
        return TokenLogps(torch.cat([empty, *logp]), torch.cat([empty, *entropy]) if self.entropy else None)

    def want(self, *, hidden: bool, weight: bool, bias: bool) -> None:
        self.grad_hidden = torch.zeros_like(self.hidden) if hidden else None
        self.grad_weight = torch.zeros_like(self.weight, dtype=self.dtype) if weight else None
        self.grad_bias = torch.zeros_like(self.bias, dtype=self.dtype) if bias else None

    def open(self, start: int, stop: int) -> _Kept:
        target = self.target[start:stop].unsqueeze(1)
        z, slope = _logits(self.hidden[start:stop], self.weight, self.bias, self.scale, self.softcap, self.temperature)
        goal = z.gather(1, target)
        own = torch.ones_like(goal) if slope is None else slope.gather(1, target)
        z.scatter_(1, target, NOTHING)
        logp = torch.nn.functional.logsigmoid(goal - z.logsumexp(dim=1, keepdim=True))
        entropy = None
        if self.entropy:
            log_p = z - (goal - logp)
            entropy = -(log_p.exp() * log_p).sum(dim=1) - (logp.exp() * logp).squeeze(1)
        z -= goal - logp  # log-probs from here on
        return _Kept(logp.squeeze(1), entropy, z, slope, own)

    def plan(
        self,
        start: int,
        kept: _Kept,
        grad_logp: Tensor,  # (N,) of these rows
        grad_entropy: Tensor | None,  # (N,)
    ) -> _Plan:
        return _Plan(_rows_with_gradient(grad_logp, grad_entropy), grad_logp, grad_entropy)

    def close(self, start: int, kept: _Kept, plan: _Plan) -> None:
        rows, grad_logp, grad_entropy = plan
        if len(rows) < len(grad_logp):
            kept = _Kept(*(None if x is None else x[rows] for x in kept))
            grad_logp = grad_logp[rows]
            grad_entropy = None if grad_entropy is None else grad_entropy[rows]
        at = start + rows
        g, logp = grad_logp.unsqueeze(1), kept.logp.unsqueeze(1)
        p = kept.z.exp()
        dz = -p * g
        goal = -torch.expm1(logp) * g  # 1 - p with its digits
        if grad_entropy is not None:
            h, entropy = grad_entropy.unsqueeze(1), kept.entropy.unsqueeze(1)
            dz -= p * (kept.z + entropy) * h
            goal -= logp.exp() * (logp + entropy) * h
        if kept.slope is not None:
            dz *= kept.slope
        dy = dz.scatter_(1, self.target[at].unsqueeze(1), goal * kept.own).mul_(self.scale / self.temperature)
        low = dy.to(self.hidden.dtype)
        if self.grad_hidden is not None:
            self.grad_hidden[at] = low @ self.weight
        if self.grad_weight is not None:
            self.grad_weight += low.T @ self.hidden[at]
        if self.grad_bias is not None:
            self.grad_bias += dy.sum(dim=0)

    def finish(self) -> bool:
        if self.grad_weight is not None:
            self.grad_weight = self.grad_weight.to(self.weight_dtype)
        return True

    def backward(
        self,
        stats: TokenLogps,
        grad_logp: Tensor,  # (N,) of these rows
        grad_entropy: Tensor | None,  # (N,)
    ) -> None:
        for start, stop in chunks(self):
            kept = self.open(start, stop)
            e = None if grad_entropy is None else grad_entropy[start:stop]
            self.close(start, kept, self.plan(start, kept, grad_logp[start:stop], e))
        self.finish()


def _rows_with_gradient(grad_logp: Tensor, grad_entropy: Tensor | None) -> Tensor:  # (A,)
    active = grad_logp != 0 if grad_entropy is None else (grad_logp != 0) | (grad_entropy != 0)
    return active.nonzero().squeeze(1)


def _one_pass(
    make: Callable[[], Any],
    needs: tuple[bool, ...],
    gradients: Callable[[int, int, TokenLogps], tuple[Tensor, Tensor | None]],
) -> Any:
    """A head with the gradients of its rows, which `gradients(start, stop, tokens)` gives chunk by chunk."""
    for careful in (False, True):
        head = make()
        head.careful = careful
        _want(head, needs)
        for start, stop in chunks(head):
            stats, plan = head.open(start, stop), None
            while plan is None:  # twice at most
                plan = head.plan(start, stats, *gradients(start, stop, TokenLogps(*stats[:2])))
            head.close(start, stats, plan)
        if head.finish():
            return head
    raise AssertionError("a careful head cannot overflow")


def _want(head: Any, needs: tuple[bool, ...]) -> None:
    head.want(hidden=needs[0], weight=needs[1], bias=needs[2])


def _loss_and_gradients(loss_fn: LossFn, tokens: TokenLogps, rows: Tensor) -> tuple[Tensor, Any, Tensor, Tensor | None]:
    """Loss of a chunk, what came with it, and its gradients by log-prob and entropy; its graph ends here."""
    leaves = [x.detach().requires_grad_() for x in tokens if x is not None]
    with torch.enable_grad():
        loss, more = loss_fn(TokenLogps(*leaves, *[None] * (2 - len(leaves))), rows)
    if not loss.requires_grad:  # it made nothing of them
        return loss.detach(), more, torch.zeros_like(leaves[0]), None
    found = [*torch.autograd.grad(loss, leaves, allow_unused=True), None]
    return loss.detach(), more, torch.zeros_like(leaves[0]) if found[0] is None else found[0], found[1]


def chunks(head: Any) -> list[tuple[int, int]]:
    return [(i, min(i + head.chunk, head.num_rows)) for i in range(0, head.num_rows, head.chunk)]


class _Logprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, target, head_class, options):
        ctx.set_materialize_grads(False)
        needs = ctx.needs_input_grad
        ctx.head_class, ctx.options, slope = head_class, options, None
        make = functools.partial(head_class, hidden, weight, bias, target, **options)
        if needs[0] and not needs[1] and not needs[2] and len(target):
            # A frozen head: d logp / d hidden is one vector per row, made here and scaled by whatever comes back.
            parts: dict[int, TokenLogps] = {}

            def ones(start: int, stop: int, tokens: TokenLogps) -> tuple[Tensor, None]:
                parts[start] = tokens
                return torch.ones_like(tokens.logp), None

            slope = _one_pass(make, needs, ones).grad_hidden
            logp, entropy = zip(*parts.values(), strict=True)
            stats = TokenLogps(torch.cat(logp), torch.cat(entropy) if options["entropy"] else None)
        else:
            stats = make().score()
        ctx.stats_class = type(stats)
        ctx.save_for_backward(hidden, weight, bias, target, slope, *stats)
        return stats[:2]

    @staticmethod
    @once_differentiable  # lse and entropy are constants here: a second derivative would be wrong, not merely slow
    def backward(ctx, grad_logp, grad_entropy):
        saved = ctx.saved_tensors  # once: checkpointing allows no more
        hidden, slope = saved[0], saved[4]
        if grad_logp is None and grad_entropy is None:
            return (None,) * 6
        if slope is not None and grad_entropy is None:
            return (slope * grad_logp.unsqueeze(1)).to(hidden.dtype), None, None, None, None, None
        if grad_logp is None:
            grad_logp = torch.zeros_like(grad_entropy)
        with torch.autocast(hidden.device.type, enabled=False), _on(hidden):
            return _Logprob.recompute(ctx, saved, grad_logp, grad_entropy)

    @staticmethod
    def recompute(ctx, saved, grad_logp, grad_entropy):
        hidden, weight, bias, target, slope, *stats = saved
        rows = _rows_with_gradient(grad_logp, grad_entropy)
        if is_part := len(rows) < len(grad_logp):  # rows without a gradient are not recomputed
            grad_logp = grad_logp[rows]
            grad_entropy = None if grad_entropy is None else grad_entropy[rows]
            stats = [None if x is None else x[rows] for x in stats]
        head = ctx.head_class(
            hidden[rows] if is_part else hidden, weight, bias, target[rows] if is_part else target, **ctx.options
        )
        _want(head, ctx.needs_input_grad)
        stats = head.score() if slope is not None else ctx.stats_class(*stats)
        head.backward(stats, grad_logp, grad_entropy)
        grad_hidden = head.grad_hidden
        if grad_hidden is not None and is_part:
            grad_hidden = torch.zeros_like(hidden).index_copy_(0, rows, grad_hidden)
        return grad_hidden, head.grad_weight, _as(head.grad_bias, bias), None, None, None


class _LogprobLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, target, head_class, options, loss_fn, kept, extra):
        parts: dict[int, tuple[Tensor, Any]] = {}  # a chunk may be asked for again

        def gradients(start: int, stop: int, tokens: TokenLogps) -> tuple[Tensor, Tensor | None]:
            rows = torch.arange(start, stop, device=hidden.device) if kept is None else kept[start:stop]
            loss, more, *found = _loss_and_gradients(loss_fn, tokens, rows)
            parts[start] = (loss, more)
            return tuple(found)

        make = functools.partial(head_class, hidden, weight, bias, target, **options)
        head = _one_pass(make, ctx.needs_input_grad, gradients)
        if not parts:  # no rows: the callable still says what comes of none
            gradients(0, 0, TokenLogps(*head.score()[:2]))
        loss = torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
        for part, more in parts.values():
            loss += part
            extra.append(more)
        ctx.gradients = (head.grad_hidden, head.grad_weight, _as(head.grad_bias, bias))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss):
        if ctx.gradients is None:
            raise RuntimeError("linear_logprob_loss: its gradients were handed out; call it again for another backward")
        gradients, ctx.gradients = ctx.gradients, None  # scaled in place: a second use would scale them twice
        return *(_times(x, grad_loss) for x in gradients), None, None, None, None, None, None


def _on(x: Tensor) -> Any:
    """Triton launches on the current device, which need not be that of the tensors."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def _times(gradient: Tensor | None, factor: Tensor) -> Tensor | None:
    if gradient is None:
        return None
    if gradient.is_cuda and gradient.dtype != torch.float64:
        from kernels.linear_logprob_triton import scale_unless_one

        return scale_unless_one(gradient, factor)
    return gradient.mul_(factor)


def _as(gradient: Tensor | None, like: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.to(like.dtype)


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


def _any_requires_grad(*tensors: Tensor | None) -> bool:
    return any(x is not None and x.requires_grad for x in tensors)


def _kept_rows(target: Tensor, vocab: int, ignore_index: int | None) -> Tensor | None:  # (n,) None = all
    """Rows whose target counts. To know, the host must wait for the device; ignore_index=None spares it that."""
    if ignore_index is None:
        return None
    keep = target != ignore_index
    wrong = keep & ((target < 0) | (target >= vocab))
    num_kept, num_wrong = torch.stack([keep.sum(), wrong.sum()]).tolist()
    if num_wrong:
        row = int(wrong.nonzero()[0])
        raise ValueError(f"target[{row}]={int(target[row])}: not an entry of a vocabulary of {vocab}")
    return None if num_kept == len(target) else keep.nonzero().squeeze(1)


def _pick(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, scale: float, softcap: float | None,
    temperature: float, impl: str,
) -> type:  # fmt: skip
    """The class that does the work, after everything about the call has been checked."""
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}: expected (N, D) and (V, D)")
    if target.shape != hidden.shape[:1]:
        raise ValueError(f"target {tuple(target.shape)}: expected ({hidden.shape[0]},), one id per hidden state")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)}: expected ({weight.shape[0]},), one number per vocabulary entry")
    if any(hasattr(x, "full_tensor") for x in (hidden, weight, bias)):
        raise ValueError("weight: a DTensor; gather the head once with .full_tensor() and pass that")
    for name, value in (("temperature", temperature), ("scale", scale), ("softcap", softcap)):
        if value is not None and not value > 0:
            raise ValueError(f"{name}={value}: must be above 0")
    if impl not in ("auto", "torch", "triton"):
        raise ValueError(f"impl={impl}: there is auto, torch and triton")
    if impl == "torch" or (impl == "auto" and not (hidden.is_cuda and hidden.dtype == torch.bfloat16)):
        return TorchHead
    from kernels import linear_logprob_triton

    reason = linear_logprob_triton.obstacle(hidden)
    if reason is not None and impl == "triton":
        raise ValueError(f"impl=triton: {reason}; use impl=torch")
    return TorchHead if reason is not None else linear_logprob_triton.TritonHead
