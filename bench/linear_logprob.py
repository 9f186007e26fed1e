"""Token log-probs from hidden states and their gradients: strop, its peers and plain torch, timed alternately.

    python -m bench.linear_logprob [--out rows.jsonl] [--shapes qwen3-1.7b ...] [--only forward loss ...] [--seconds 3]

Sections: `forward` only; `loss` is forward and backward of a clipped policy gradient with a trained head (of
the negative log-likelihood for peers without other losses); `frozen` has a frozen head; `half` gives every
second completion advantage zero; `peaked` repeats `loss` with likely targets, for which kernels that skip small
probabilities cannot skip. The floor is the matrix products alone: one, two (frozen head) or three.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import tyro

from bench import peers
from bench.common import Row, Timing, alternate, emit, make_row, relative_error, require_commit
from bench.peers import Made, Problem, chosen_shapes, exact, make_problem

# N, D, V
SHAPES = {
    "smollm2-135m": (512, 576, 49152),
    "qwen3-1.7b": (8192, 2048, 151936),
    "llama3-8b": (8192, 4096, 128256),
    "qwen2.5-1.5b": (32768, 1536, 151936),
}
ON_CPU, ON_CUDA = ("smollm2-135m",), ("qwen3-1.7b", "llama3-8b", "qwen2.5-1.5b")
COMPLETION = 1024  # tokens
CUBE = 8192
MAX_GIB = 60  # skip plain torch if its stored logits need more

Section = Literal["forward", "loss", "frozen", "half", "peaked"]


class Entry(NamedTuple):
    """A solver, and the loss whose float64 gradient it should match."""

    solve: Callable[[Problem], Made]
    problem: Problem
    loss: Literal["surrogate", "nll"] = "surrogate"


def forward(p: Problem, seconds: float) -> list[Row]:
    entries = {
        "ours": Entry(peers.ours_forward, p),
        "ours, entropy": Entry(partial(peers.ours_forward, entropy=True), p),
        "trl": Entry(peers.trl_forward, p),
        "trl, entropy": Entry(partial(peers.trl_forward, entropy=True), p),
    }
    if p.hidden.is_cuda:
        entries |= {"cce": Entry(peers.cce_forward, p), "torch.compile": Entry(peers.compiled_forward, p)}
    entries |= plain_torch(p, peers.torch_forward)
    return measure("forward", entries, products=1, against=("ours", "trl", "trl, entropy"), seconds=seconds)


def loss(p: Problem, seconds: float) -> list[Row]:
    entries = {
        "ours": Entry(peers.ours_one_pass, p),
        "ours, general entry": Entry(peers.ours_general, p),
        "trl": Entry(peers.trl, p),
    }
    if p.hidden.is_cuda:
        entries |= {
            "ours, entropy": Entry(partial(peers.ours_one_pass, entropy=True), p),
            "trl, entropy": Entry(partial(peers.trl, entropy=True), p),
            "liger, grpo": Entry(peers.liger_grpo, p),
            **cross_entropies(p),
            "torch.compile": Entry(peers.torch_compiled, p),
        }
    entries |= plain_torch(p, peers.torch_stored)
    return measure("loss", entries, products=3, against=("ours", "trl", "trl, entropy", "liger"), seconds=seconds)


def frozen(p: Problem, seconds: float) -> list[Row]:
    fixed = p.frozen_head()
    entries = {
        "ours": Entry(peers.ours_one_pass, fixed),
        "ours, general entry": Entry(peers.ours_general, fixed),
        "trl": Entry(peers.trl, fixed),
        "trl, trainable head": Entry(peers.trl, p),
    }
    return measure("frozen", entries, products=2, against=("trl", "trl, trainable head"), seconds=seconds)


def half(p: Problem, seconds: float) -> list[Row]:
    entries = {
        "ours": Entry(peers.ours_one_pass, p),
        "ours, half the advantages zero": Entry(peers.ours_one_pass, p.half_advantage()),
        "ours, forward only": Entry(peers.ours_forward, p),
        "trl, half the advantages zero": Entry(peers.trl, p.half_advantage()),
    }

    def split(timings: dict[str, Timing]) -> dict[str, float]:
        """Return the backward time with half the advantages zero, relative to the full backward."""
        full, some, scored = (timings[name].p50 for name in list(entries)[:3])
        return {"gradients_half_over_full": (some - scored) / (full - scored)}

    against = ("ours", "trl, half the advantages zero")
    return measure("half", entries, products=3, against=against, seconds=seconds, extra=split)


def peaked(p: Problem, seconds: float) -> list[Row]:
    entries = {"ours": Entry(peers.ours_one_pass, p), "trl": Entry(peers.trl, p)}
    if p.hidden.is_cuda:
        entries |= cross_entropies(p)
    spread = exact_entropy(p)
    return measure(
        "peaked", entries, products=3, against=("trl",), seconds=seconds, extra=lambda _: {"entropy_nats": spread}
    )


SECTIONS: dict[str, Callable[[Problem, float], list[Row]]] = {
    "forward": forward, "loss": loss, "frozen": frozen, "half": half, "peaked": peaked,
}  # fmt: skip


def cross_entropies(p: Problem) -> dict[str, Entry]:
    return {
        "liger": Entry(peers.liger_nll, p, "nll"),
        "cce": Entry(peers.cce_nll, p, "nll"),
        "cce, exact": Entry(partial(peers.cce_nll, exact_gradient=True), p, "nll"),
    }


def plain_torch(p: Problem, solve: Callable[[Problem], Made]) -> dict[str, Entry]:
    gib = peers.stored_gib(p)
    if gib > MAX_GIB:
        print(f"torch: skipped, its stored logits need {gib:.0f} GiB", flush=True)
        return {}
    return {"torch": Entry(solve, p)}


def exact_entropy(p: Problem) -> float:
    return exact(sample(p.frozen_head()))["nll"]["entropy"].mean().item()


def sample(p: Problem) -> Problem:
    """Select few enough rows for float64 over the whole vocabulary, but on a GPU enough for several chunks."""
    return p.sample(5120 if p.hidden.is_cuda else 32)


def measure(
    section: str,
    entries: dict[str, Entry],
    *,
    products: int,
    against: tuple[str, ...],
    seconds: float,
    extra: Callable[[dict[str, Timing]], dict[str, float]] | None = None,
) -> list[Row]:
    """Time all entries and the floor in one loop, then compute errors on a sample of the rows."""
    p = entries["ours"].problem
    calls = {name: partial(entry.solve, entry.problem) for name, entry in entries.items()}
    calls["floor"] = peers.matrix_products(p, products)
    if p.hidden.is_cuda:
        calls["cube"] = peers.cube(CUBE, p.hidden.dtype, "cuda")
    timings = alternate(calls, seconds=seconds)
    del calls
    more = extra(timings) if extra else {}
    if "cube" in timings:
        more["tflops_8192"] = 2 * CUBE**3 / timings["cube"].p50 / 1e9
    errors = errors_of({name: entry for name, entry in entries.items() if name in timings})
    if products == 3:  # reference for all gradients, even if plain torch is too large to be timed
        yardstick = errors_of({"torch": Entry(peers.torch_stored, p)})["torch"]
        more |= {f"torch_{key}": error for key, error in yardstick.items()}
    return [
        make_row(
            f"linear_logprob/{section}", name, timings[name], shape=entries[name].problem.shape,
            dtype=p.hidden.dtype, work=len(p.target), unit="tokens", errors=errors[name], floor=timings["floor"],
            against={other: timings.get(other) for other in against}, extra=more,
        )
        for name in errors
    ]  # fmt: skip


def errors_of(entries: dict[str, Entry]) -> dict[str, dict[str, float]]:
    """Return the relative distance to float64 of all results of each entry, on the same sample of rows."""
    errors: dict[str, dict[str, float]] = {}
    for problem in {id(entry.problem): entry.problem for entry in entries.values()}.values():
        few = sample(problem)
        truth = exact(few)
        for name, entry in entries.items():
            if entry.problem is problem:
                results = entry.solve(few)
                errors[name] = {key: relative_error(x, truth[entry.loss][key]) for key, x in results.items()}
    return {name: errors[name] for name in entries}


def main(
    out: Path | None = None, shapes: tuple[str, ...] = (), only: tuple[Section, ...] = (), seconds: float = 3.0
) -> None:
    """Print all tables; append every row as JSON to `out`.

    Args:
        out: File to append the rows to.
        shapes: Names of the shapes to measure; none given means those that suit this machine.
        only: Sections to run; none given means all on a GPU, forward and loss on a CPU.
        seconds: Minimum duration per section and shape, with at least 15 rounds (3 on a CPU).
    """
    require_commit()
    sections = only or (tuple(SECTIONS) if torch.cuda.is_available() else ("forward", "loss"))
    for shape in chosen_shapes(shapes, SHAPES, ON_CUDA, ON_CPU):
        run_shape(shape, sections, seconds, out)


def run_shape(shape: tuple[int, int, int], sections: tuple[str, ...], seconds: float, out: Path | None) -> None:
    on_cuda = torch.cuda.is_available()
    torch._dynamo.reset()  # Dynamo compiles at most 8 shapes of a function and then silently runs it eagerly
    for is_peaked in (False, True):
        chosen = [name for name in sections if (name == "peaked") == is_peaked]
        if not chosen:
            continue
        problem = make_problem(
            *shape, num_sequences=max(2, shape[0] // COMPLETION), device="cuda" if on_cuda else "cpu",
            dtype=torch.bfloat16 if on_cuda else torch.float32, peaked=is_peaked,
        )  # fmt: skip
        for section in chosen:
            emit(SECTIONS[section](problem, seconds), out)


if __name__ == "__main__":
    tyro.cli(main)
