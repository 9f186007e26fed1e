"""Divergence between student and teacher from hidden states, and its gradients: strop, its peers, plain torch.

    python -m bench.linear_kl [--out rows.jsonl] [--shapes qwen3-1.7b ...] [--only jsd forward ...] [--seconds 3]

Sections: `jsd` is the generalised Jensen-Shannon divergence at beta 1/2, `forward` and `reverse` are the KL divergences
at beta 0 and 1, with a trainable student head; `frozen` is `jsd` with a frozen head. Each runs forward and backward of
the mean over tokens. The floor is the matrix products alone: both logits, d hidden, and d weight unless frozen. Peak
memory is beyond inputs and gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Literal

import torch
import tyro
from torch import Tensor

from bench import peers
from bench.common import GIB, Row, alternate, emit, make_row, relative_error, require_commit
from bench.peers import CHUNK_ROWS, Head, Made, chosen_shapes, with_gradients
from kernels import reference
from kernels.linear_kl import Head as TokenHead
from kernels.linear_kl import linear_kl_loss
from losses.distill import generalized_jsd

# N, student D, teacher E, V
SHAPES = {
    "smollm2-135m": (256, 576, 960, 49152),
    "qwen3-0.6b": (8192, 1024, 2048, 151936),
    "qwen3-1.7b": (8192, 2048, 2048, 151936),
}
ON_CPU, ON_CUDA = ("smollm2-135m",), ("qwen3-0.6b", "qwen3-1.7b")
MAX_GIB = 100  # skip plain torch if it needs more memory
SECTIONS = {"jsd": 0.5, "forward": 0.0, "reverse": 1.0, "frozen": 0.5}  # section -> beta

Section = Literal["jsd", "forward", "reverse", "frozen"]


@dataclass(frozen=True)
class Problem(Head):
    teacher_hidden: Tensor  # (N, E)
    teacher_weight: Tensor  # (V, E)
    beta: float

    @property
    def shape(self) -> dict[str, int]:
        sizes = (*self.hidden.shape, self.teacher_hidden.shape[1], self.weight.shape[0])
        return dict(zip(("N", "D", "E", "V"), sizes, strict=True))

    def sample(self, num_rows: int) -> Problem:
        hidden = self.hidden.detach()[:num_rows].clone().requires_grad_()
        return replace(self, hidden=hidden, teacher_hidden=self.teacher_hidden[:num_rows])


def make_problem(
    num_rows: int, width: int, teacher_width: int, vocab: int, *, device: str, dtype: torch.dtype
) -> Problem:
    """Draw logits of deviation 3; student and teacher agree in part, like two language models."""
    options = {"generator": torch.Generator(device).manual_seed(0), "device": device}
    weight, teacher_weight = (torch.randn(vocab, k, **options) * k**-0.5 for k in (width, teacher_width))
    hidden, teacher_hidden = (3 * torch.randn(num_rows, k, **options) for k in (width, teacher_width))
    common = min(width, teacher_width) * 3 // 4
    scale = (teacher_width / width) ** 0.5
    teacher_hidden[:, :common], teacher_weight[:, :common] = hidden[:, :common] * scale, weight[:, :common] / scale
    tensors = [x.to(dtype) for x in (hidden, weight, teacher_hidden, teacher_weight)]
    return Problem(tensors[0].requires_grad_(), tensors[1].requires_grad_(), *tensors[2:], beta=0.5)


def ours(p: Problem) -> Made:
    weight = torch.full((len(p.hidden),), 1 / len(p.hidden), device=p.hidden.device)
    heads = TokenHead(p.weight), TokenHead(p.teacher_weight)
    out = linear_kl_loss(p.hidden, heads[0], p.teacher_hidden, heads[1], beta=p.beta, token_weight=weight)
    return with_gradients(p, out.loss, divergence=out.divergence)


def trl(p: Problem) -> Made:
    """Call the function of TRL's DistillationTrainer, which also computes the student's entropy."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    divergence, _ = ChunkedDivergenceFunction.apply(
        p.hidden, p.weight, None, p.teacher_hidden, p.teacher_weight, None, p.beta
    )
    return with_gradients(p, divergence.mean(), divergence=divergence)


def liger(p: Problem) -> Made:
    """For beta 1/2 only: for other values it weights the two distributions differently."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    head = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=p.beta)
    labels = torch.zeros(len(p.hidden), dtype=torch.int64, device=p.hidden.device)  # required but unused
    return with_gradients(p, head(p.hidden, p.weight, p.teacher_hidden, p.teacher_weight, labels, None, None))


def stored(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, beta: float) -> Tensor:
    return generalized_jsd(hidden @ weight.T, teacher_hidden @ teacher_weight.T, beta=beta)  # (N,)


def torch_stored(p: Problem) -> Made:
    divergence = stored(p.hidden, p.weight, p.teacher_hidden, p.teacher_weight, p.beta)
    return with_gradients(p, divergence.mean(), divergence=divergence)


@cache
def compiled() -> Callable[..., Tensor]:
    return torch.compile(stored, dynamic=False)


def torch_compiled(p: Problem) -> Made:
    divergence = compiled()(p.hidden, p.weight, p.teacher_hidden, p.teacher_weight, p.beta)
    return with_gradients(p, divergence.mean(), divergence=divergence)


def exact(p: Problem) -> Made:
    """Compute in float64, in chunks of rows."""
    parts, grad_weight, count = [], torch.zeros_like(p.weight, dtype=torch.float64), len(p.hidden)
    teacher_head = TokenHead(p.teacher_weight.double())
    for start in range(0, count, CHUNK_ROWS // 2):
        part = slice(start, start + CHUNK_ROWS // 2)
        hidden, weight = (x.detach().double().requires_grad_() for x in (p.hidden[part], p.weight))
        divergence = reference.linear_kl(
            hidden, TokenHead(weight), p.teacher_hidden[part].double(), teacher_head, beta=p.beta
        )
        grads = torch.autograd.grad(divergence.sum() / count, (hidden, weight))
        grad_weight += grads[1]
        parts.append((divergence.detach(), grads[0]))
    divergence, grad_hidden = (torch.cat(x) for x in zip(*parts, strict=True))
    return {"divergence": divergence, "dX": grad_hidden, "dW": grad_weight}


def stored_gib(p: Problem) -> float:
    """Return plain torch's peak: both logits in their dtype, and about a dozen (N, V) tensors in fp32."""
    return len(p.hidden) * p.weight.shape[0] * (2 * p.hidden.element_size() + 12 * 4) / GIB


def matrix_products(p: Problem) -> Callable[[], None]:
    """Run the unavoidable products: the student's, and the teacher's logits."""
    student = peers.matrix_products(p, 3 if p.weight.requires_grad else 2)
    teacher = peers.matrix_products(Head(p.teacher_hidden, p.teacher_weight), 1)

    def call() -> None:
        student()
        teacher()

    return call


def measure(section: str, p: Problem, seconds: float) -> list[Row]:
    """Time all providers and the floor in one loop, then compute errors on a sample of the rows."""
    p = replace(p, beta=SECTIONS[section])
    p = p.frozen_head() if section == "frozen" else p
    solvers: dict[str, Callable[[Problem], Made]] = {"ours": ours, "trl": trl}
    if p.beta == 0.5 and section != "frozen":
        solvers["liger"] = liger
    if (gib := stored_gib(p)) > MAX_GIB:
        print(f"torch: skipped, needs {gib:.0f} GiB", flush=True)
    else:
        solvers |= {"torch": torch_stored} | ({"torch.compile": torch_compiled} if p.hidden.is_cuda else {})
    calls: dict[str, Callable[[], object]] = {name: partial(solve, p) for name, solve in solvers.items()}
    timings = alternate({**calls, "floor": matrix_products(p)}, seconds=seconds)
    # Few enough rows for a float64 run over the whole vocabulary; enough, on a GPU, for more than one chunk.
    few = p.sample(2560 if p.hidden.is_cuda else 32)
    truth = exact(few)
    errors = {
        name: {key: relative_error(x, truth[key]) for key, x in solvers[name](few).items()}
        for name in solvers
        if name in timings
    }
    return [
        make_row(
            f"linear_kl/{section}", name, timings[name], shape=p.shape, dtype=p.hidden.dtype, work=len(p.hidden),
            unit="tokens", errors=errors[name], floor=timings["floor"],
            against={other: timings.get(other) for other in solvers},
        )
        for name in errors
    ]  # fmt: skip


def main(
    out: Path | None = None, shapes: tuple[str, ...] = (), only: tuple[Section, ...] = (), seconds: float = 3.0
) -> None:
    """Print all tables; append every row as JSON to `out`.

    Args:
        out: File to append the rows to.
        shapes: Names of the shapes to measure; none given means those that suit this machine.
        only: Sections to run; none given means all on a GPU, jsd on a CPU.
        seconds: Minimum duration per section and shape, with at least 15 rounds (3 on a CPU).
    """
    require_commit()
    for shape in chosen_shapes(shapes, SHAPES, ON_CUDA, ON_CPU):
        run_shape(shape, only or (tuple(SECTIONS) if torch.cuda.is_available() else ("jsd",)), seconds, out)


def run_shape(shape: tuple[int, int, int, int], sections: tuple[str, ...], seconds: float, out: Path | None) -> None:
    on_cuda = torch.cuda.is_available()
    torch._dynamo.reset()  # Dynamo compiles at most 8 shapes of a function and then silently runs it eagerly
    problem = make_problem(
        *shape, device="cuda" if on_cuda else "cpu", dtype=torch.bfloat16 if on_cuda else torch.float32
    )
    for section in sections:
        emit(measure(section, problem, seconds), out)


if __name__ == "__main__":
    tyro.cli(main)
