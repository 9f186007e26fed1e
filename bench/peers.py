"""A token log-prob problem on hidden states, and its solvers: strop, its peers and plain torch.

A solver takes a Problem and returns its results by name: `logp`, `entropy`, and the gradients `dX` (hidden states) and
`dW` (head). The loss is `surrogate`, a clipped policy gradient, or the negative log-likelihood for peers
without other losses; `exact` computes both in float64. Peers are imported when called: a missing peer raises
ImportError, which bench.common.alternate reports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from kernels import reference
from kernels.linear_logprob import TokenLogps, linear_logprob, linear_logprob_loss

TRL_VOCAB_CHUNK = 32768  # the value TRL's trainers use
FLOOR_ROWS = 4096  # rows per matrix product of the floor: enough to fill any GPU
CHUNK_ROWS = 1024

Made = dict[str, Tensor]
S = TypeVar("S")


def chosen_shapes(
    names: Sequence[str], shapes: Mapping[str, S], on_cuda: Sequence[str], on_cpu: Sequence[str]
) -> list[S]:
    """Return the named shapes; without names, those that suit this machine."""
    if unknown := set(names) - shapes.keys():
        raise ValueError(f"shapes={' '.join(sorted(unknown))}: must be among {', '.join(shapes)}")
    return [shapes[name] for name in names or (on_cuda if torch.cuda.is_available() else on_cpu)]


@dataclass(frozen=True)
class Head:
    """Hidden states and the head, with the gradients that a solver returns."""

    hidden: Tensor  # (N, D)
    weight: Tensor  # (V, D)

    def leaves(self) -> dict[str, Tensor]:
        return {name: x for name, x in (("dX", self.hidden), ("dW", self.weight)) if x.requires_grad}

    def frozen_head(self) -> Self:
        return replace(self, weight=self.weight.detach())


@dataclass(frozen=True)
class Problem(Head):
    """N tokens: `num_sequences` completions of equal length."""

    target: Tensor  # (N,)
    old_logp: Tensor  # (N,)
    advantage: Tensor  # (N,) the same for all tokens of a completion
    num_sequences: int

    @property
    def shape(self) -> dict[str, int]:
        return {"N": self.hidden.shape[0], "D": self.hidden.shape[1], "V": self.weight.shape[0]}

    def half_advantage(self) -> Problem:
        """Set the advantage of every second completion to zero."""
        keep = torch.arange(self.num_sequences, device=self.target.device) % 2 == 0
        per_token = keep.repeat_interleave(len(self.target) // self.num_sequences)
        return replace(self, advantage=torch.where(per_token, self.advantage, 0.0))

    def sample(self, num_rows: int) -> Problem:
        """Select the first tokens of every completion, `num_rows` in total."""
        length = len(self.target) // self.num_sequences
        kept = torch.arange(len(self.target), device=self.target.device).view(-1, length)
        kept = kept[:, : max(1, num_rows // self.num_sequences)].flatten()
        return replace(
            self, hidden=self.hidden.detach()[kept].requires_grad_(), target=self.target[kept],
            old_logp=self.old_logp[kept], advantage=self.advantage[kept],
        )  # fmt: skip


def make_problem(
    num_rows: int, width: int, vocab: int, *, num_sequences: int, device: str, dtype: torch.dtype, peaked: bool
) -> Problem:
    """Draw random hidden states and a head; `peaked` makes targets likely, as after training (entropy below 1 nat).

    Random logits have probabilities near 1 / V, all of them below the gradient filter of some kernels; peaked ones do
    not. Noise of deviation 3 over the vocabulary has a logsumexp of log V + 4.5; the target lies about 6 above.
    """
    generator = torch.Generator(device).manual_seed(0)
    options = {"generator": generator, "device": device}
    weight = torch.randn(vocab, width, **options).mul_(width**-0.5).to(dtype)
    target = torch.randint(vocab, (num_rows,), **options)
    hidden = torch.randn(num_rows, width, **options)
    if peaked:
        boost = torch.tensor(float(vocab)).log().item() + 4.5 + 6.0
        hidden = 3 * hidden + boost * weight[target].float()
    hidden = hidden.to(dtype)
    advantage = torch.randn(num_sequences, **options).repeat_interleave(num_rows // num_sequences)
    # Close to the current policy, so that no ratio is clipped: strop would skip clipped tokens.
    old_logp = plain_logps(hidden, weight, target) + 0.01 * torch.randn(num_rows, **options)
    return Problem(hidden.requires_grad_(), weight.requires_grad_(), target, old_logp, advantage, num_sequences)


@torch.no_grad()
def plain_logps(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:  # (N,)
    parts = []
    for rows, ids in zip(hidden.split(CHUNK_ROWS), target.split(CHUNK_ROWS), strict=True):
        parts.append((rows @ weight.T).float().log_softmax(dim=-1).gather(1, ids.unsqueeze(1)).squeeze(1))
    return torch.cat(parts)


def surrogate(problem: Problem, logp: Tensor, index: Tensor | slice = slice(None)) -> Tensor:
    """The clipped policy-gradient loss of these tokens, as a share of the mean over all tokens of the problem."""
    ratio, advantage = (logp - problem.old_logp[index]).exp(), problem.advantage[index]
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum() / len(problem.target)


def with_gradients(problem: Head, loss: Tensor, **values: Tensor) -> Made:
    leaves = problem.leaves()
    grads = torch.autograd.grad(loss, list(leaves.values()))  # fresh tensors, not accumulated into .grad
    return {name: x.detach() for name, x in values.items()} | dict(zip(leaves, grads, strict=True))


def exact(problem: Problem) -> dict[str, Made]:
    """Compute both losses in float64: {"surrogate": ..., "nll": ...}."""
    wide = replace(
        problem, hidden=problem.hidden.detach().double().requires_grad_(),
        weight=problem.weight.detach().double().requires_grad_(problem.weight.requires_grad),
    )  # fmt: skip
    results = {}
    for name in ("surrogate", "nll"):
        logp, entropy = reference.linear_logprob(wide.hidden, wide.weight, wide.target)
        loss = surrogate(wide, logp) if name == "surrogate" else -logp.sum()
        results[name] = with_gradients(wide, loss, logp=logp, entropy=entropy)
    return results


# Forward only


@torch.no_grad()
def ours_forward(p: Problem, *, entropy: bool = False) -> Made:
    out = linear_logprob(p.hidden, p.weight, p.target, entropy=entropy, ignore_index=None)
    return {"logp": out.logp} | ({"entropy": out.entropy} if entropy else {})


@torch.no_grad()
def trl_forward(p: Problem, *, entropy: bool = False) -> Made:
    logp, spread = trl_logps(p, entropy=entropy)
    return {"logp": logp} | ({"entropy": spread} if entropy else {})


@torch.no_grad()
def cce_forward(p: Problem) -> Made:
    from cut_cross_entropy import linear_cross_entropy

    # Detached, because it prepares a backward whenever inputs require gradients, even under no_grad.
    return {"logp": -linear_cross_entropy(p.hidden.detach(), p.weight.detach(), p.target, reduction="none")}


@torch.no_grad()
def torch_forward(p: Problem) -> Made:
    return {"logp": stored_logps(p.hidden, p.weight, p.target)}


@torch.no_grad()
def compiled_forward(p: Problem) -> Made:
    return {"logp": compiled()(p.hidden, p.weight, p.target)}


# Forward and backward


def ours_one_pass(p: Problem, *, entropy: bool = False) -> Made:
    """Compute loss and gradients in the same pass as the log-probs."""

    def loss_fn(tokens: TokenLogps, index: Tensor) -> tuple[Tensor, Any]:
        return surrogate(p, tokens.logp, index), (index, *(x.detach() for x in tokens if x is not None))

    loss, parts = linear_logprob_loss(p.hidden, p.weight, p.target, loss_fn, entropy=entropy, ignore_index=None)
    order, *columns = (torch.cat(column) for column in zip(*parts, strict=True))
    names = TokenLogps._fields[: len(columns)]  # entropy only if requested
    values = {name: torch.empty_like(x).index_copy(0, order, x) for name, x in zip(names, columns, strict=True)}
    return with_gradients(p, loss, **values)


def ours_general(p: Problem, *, entropy: bool = False) -> Made:
    """Compute log-probs first, then any loss on them."""
    out = linear_logprob(p.hidden, p.weight, p.target, entropy=entropy, ignore_index=None)
    return with_gradients(p, surrogate(p, out.logp), logp=out.logp, **({"entropy": out.entropy} if entropy else {}))


def trl_logps(p: Problem, *, entropy: bool) -> tuple[Tensor, Tensor]:
    from trl.kernels import ChunkedLogProbFunction

    outputs = ("log_probs", "entropy") if entropy else ("log_probs",)
    result = ChunkedLogProbFunction.apply(p.hidden, p.weight, None, p.target, 1.0, TRL_VOCAB_CHUNK, None, 1.0, outputs)
    return result[0], result[1]


def trl(p: Problem, *, entropy: bool = False) -> Made:
    logp, spread = trl_logps(p, entropy=entropy)
    return with_gradients(p, surrogate(p, logp), logp=logp, **({"entropy": spread} if entropy else {}))


def liger_nll(p: Problem) -> Made:
    from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction

    loss, *_ = LigerFusedLinearCrossEntropyFunction.apply(
        p.hidden, p.weight, p.target, None, None, -100, 0.0, 0.0, "sum"
    )
    return with_gradients(p, loss)


def liger_grpo(p: Problem) -> Made:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    head = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="bnpo")  # bnpo averages over all tokens
    rows = (p.num_sequences, -1)
    loss, _ = head(
        p.hidden.view(*rows, p.hidden.shape[1]),
        p.weight,
        p.target.view(rows),
        torch.ones_like(p.target).view(rows),
        p.advantage.view(rows)[:, 0],
        old_per_token_logps=p.old_logp.view(rows),
    )
    return with_gradients(p, loss)


def cce_nll(p: Problem, *, exact_gradient: bool = False) -> Made:
    """The default skips blocks of small probabilities in the backward; exact_gradient disables this filter."""
    from cut_cross_entropy import linear_cross_entropy

    filtered = {"filter_eps": None} if exact_gradient else {}
    return with_gradients(p, linear_cross_entropy(p.hidden, p.weight, p.target, reduction="sum", **filtered))


def stored_logps(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:  # (N,)
    """Run plain torch: logits in the input dtype, then fp32."""
    return (hidden @ weight.T).float().log_softmax(dim=-1).gather(1, target.unsqueeze(1)).squeeze(1)


@cache
def compiled() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return torch.compile(stored_logps, dynamic=False)


def torch_stored(p: Problem) -> Made:
    logp = stored_logps(p.hidden, p.weight, p.target)
    return with_gradients(p, surrogate(p, logp), logp=logp)


def torch_compiled(p: Problem) -> Made:
    logp = compiled()(p.hidden, p.weight, p.target)
    return with_gradients(p, surrogate(p, logp), logp=logp)


def stored_gib(p: Problem) -> float:
    """Return plain torch's peak: logits in their dtype, and log-probs, dlogits and another copy in fp32."""
    return len(p.target) * p.weight.shape[0] * (p.hidden.element_size() + 3 * 4) / (1 << 30)


# Floor


def matrix_products(p: Head, count: int) -> Callable[[], None]:
    """Run the first `count` unavoidable products (logits, dX, dW) in blocks of rows."""
    hidden, weight = p.hidden.detach(), p.weight.detach()
    block = torch.empty(min(FLOOR_ROWS, len(hidden)), len(weight), dtype=hidden.dtype, device=hidden.device)
    grad_hidden = torch.empty_like(hidden)
    grad_weight = torch.empty_like(weight) if count > 2 else None

    def call() -> None:
        for i in range(0, len(hidden), FLOOR_ROWS):
            rows = hidden[i : i + FLOOR_ROWS]
            logits = block[: len(rows)]
            torch.mm(rows, weight.T, out=logits)
            if count > 1:
                torch.mm(logits, weight, out=grad_hidden[i : i + FLOOR_ROWS])
            if count > 2:
                torch.mm(logits.T, rows, out=grad_weight)

    return call


def cube(size: int, dtype: torch.dtype, device: str) -> Callable[[], None]:
    """Run one square product, to measure the machine's current speed."""
    a, b, c = (torch.randn(size, size, device=device, dtype=torch.float32).to(dtype) for _ in range(3))

    def call() -> None:
        torch.mm(a, b, out=c)

    return call
