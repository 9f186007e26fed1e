"""Completion tokens per second of an engine in GRPO's use: prompts, G completions each, with log-probs.

    python -m bench.rollout --engine both [--shape qwen3-0.6b] [--cases 64x8x256x256 8x8x256x512] [--out rows.jsonl]
    python -m bench.rollout --engine local --cases 64x8x256x256 256x8x256x1024 --lengths full lognormal

A case is prompts x group x prompt tokens x completion tokens. With `full` lengths every completion has this length;
with `lognormal` each has its own limit (median 256, sigma 0.8, at most the case's). Weights are random. `both` is
one process: first the local engine alone on the GPU, then a vLLM server, so that ratios come from one run (uneven
lengths only with the local engine: they take minutes on a server). Requests to vLLM have seeds; --unseeded also
measures requests without seeds, alternately.

The error is the gap between the engine's and the trainer's log-probs of the same tokens, over 8 completions. GiB is
all memory in use on the GPU, including the trainer's weights. `start_s` is the time from creating the engine to its
first answer, minus the time of a later answer. A row is written when its case ends.
"""

from __future__ import annotations

import gc
import inspect
import random
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import tyro

from bench.common import Row, Timing, emit, make_row, require_commit, watched
from bench.served import random_policy, scratch, server_of
from rollout.engine import Completion, Request, Sampling
from rollout.engines.local import LocalEngine
from rollout.servers.options import SyncConfig, VllmConfig
from trainer.policy.logps import Policy

MEDIAN, SIGMA = 256, 0.8  # log-normal limits
SCORED = 8  # completions whose log-probs are compared
HAS_LIMITS = "max_tokens" in {field.name for field in fields(Request)}  # whether requests have their own limits

Lengths = Literal["full", "lognormal"]
Generate = Callable[[], list[Completion]]


class Case(NamedTuple):
    prompts: int
    group: int
    prompt: int  # tokens
    completion: int  # tokens

    @classmethod
    def of(cls, text: str) -> Case:
        numbers = text.split("x")
        if len(numbers) != 4 or not all(number.isdecimal() and int(number) for number in numbers):
            raise ValueError(f"cases={text}: must be four numbers, prompts x group x prompt tokens x completion tokens")
        return cls(*map(int, numbers))


@dataclass(frozen=True)
class Work:
    """One case with its requests and their token limits."""

    case: Case
    lengths: Lengths
    requests: list[Request]
    limits: list[int]

    @property
    def tokens(self) -> int:
        return sum(self.limits)


def make_work(case: Case, lengths: Lengths, vocab_size: int) -> Work:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (case.prompts, case.prompt), generator=generator).tolist()
    count, rng = case.prompts * case.group, random.Random(0)
    limits = [case.completion] * count
    if lengths == "lognormal":
        limits = [max(1, min(case.completion, round(MEDIAN * rng.lognormvariate(0, SIGMA)))) for _ in limits]
    limit_options = [{"max_tokens": limit} if HAS_LIMITS and lengths != "full" else {} for limit in limits]
    requests = [Request(prompt_ids=ids[i // case.group], seed=i, **limit_options[i]) for i in range(count)]
    return Work(case, lengths, requests, limits)


def main(
    out: Path | None = None,
    engine: Literal["local", "vllm", "both"] = "both",
    shape: str | None = None,
    cases: tuple[str, ...] = (),
    lengths: tuple[Lengths, ...] = ("full",),
    prompts: int | None = None,
    group: int = 8,
    prompt: int | None = None,
    completion: int | None = None,
    rounds: int = 3,
    held: Literal["float32", "bfloat16"] | None = None,
    unseeded: bool = False,
    max_batch_size: int | None = None,
    cache_gib: float | None = None,
    vllm: VllmConfig = VllmConfig(max_in_flight=1024),  # noqa: B008  frozen
) -> None:
    """Print the table; append every row as JSON to `out`.

    Args:
        out: File to append the rows to.
        engine: local, vllm, or both in one run.
        shape: A model of trainer.plan, tiny, or smollm2-135m.
        cases: Each is prompts x group x prompt tokens x completion tokens; they replace the four flags below.
        lengths: Completion lengths, one value for all cases or one per case.
        prompts: Prompts of a single case.
        group: Completions of a prompt.
        prompt: Tokens of a prompt.
        completion: Tokens of a completion.
        rounds: Timed calls per case, after a warm-up call.
        held: Dtype of the trainer's weights. Default: float32, or bfloat16 from 7B parameters on.
        unseeded: Also measure vLLM without seeds.
        max_batch_size: Local engine's batch size. None: its default.
        cache_gib: Local engine's cache. None: its default.
        vllm: The server.
    """
    require_commit()
    on_cuda = torch.cuda.is_available()
    shape = shape or ("qwen3-0.6b" if on_cuda else "tiny")
    size = (prompts or (64 if on_cuda else 4), group, prompt or (256 if on_cuda else 16))
    only = "x".join(map(str, (*size, completion or (256 if on_cuda else 32))))
    chosen = [Case.of(text) for text in cases or (only,)]
    if len(lengths) not in (1, len(chosen)):
        raise ValueError(
            f"lengths={' '.join(lengths)}: {len(lengths)} for {len(chosen)} cases; pass one, or one per case"
        )
    if engine != "vllm" and "lognormal" in lengths and not HAS_LIMITS:
        raise ValueError("lengths=lognormal: this version's Request has no max_tokens; use --lengths full")
    held = held or ("bfloat16" if shape.rpartition("-")[2] in ("7b", "8b", "14b", "32b") else "float32")
    with scratch() as folder:
        started = time.perf_counter()
        with_server = engine != "local"
        policy = random_policy(shape, folder if with_server else None, held=getattr(torch, held))
        print(f"{shape} in {held}: created in {time.perf_counter() - started:.1f} s", flush=True)
        vocab_size = policy.model.config.vocab_size
        each = lengths * len(chosen) if len(lengths) == 1 else lengths
        works = [make_work(case, kind, vocab_size) for case, kind in zip(chosen, each, strict=True)]
        bench = Bench(policy, rounds, out)
        ways = {
            "local": lambda: run_local(bench, works, max_batch_size=max_batch_size, cache_gib=cache_gib),
            "vllm": lambda: run_vllm(
                bench, [w for w in works if engine == "vllm" or w.lengths == "full"], folder, vllm, unseeded=unseeded
            ),
        }
        failed = []
        for name in ways if engine == "both" else [engine]:
            try:
                ways[name]()
            except Exception:  # keep the other engine's rows
                traceback.print_exc()
                failed.append(name)
            release()
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


class Bench:
    """Time providers case by case and write their rows, with ratios to every engine that ran the case before."""

    def __init__(self, policy: Policy, rounds: int, out: Path | None) -> None:
        self.policy, self.rounds, self.out = policy, rounds, out
        self.done: dict[tuple[Case, Lengths], dict[str, Timing]] = {}
        self.full_rates: dict[str, float] = {}  # provider -> rate of the first case with full lengths

    def measure(
        self, work: Work, providers: dict[str, Generate], score: Callable[..., list[list[float]]], started: float | None
    ) -> None:
        """Time providers alternately; `started` is when the engine's creation began, if this is its first case."""
        times: dict[str, list[float]] = {name: [] for name in providers}
        completions: dict[str, list[Completion]] = {}
        first_answer = 0.0
        with watched() as used:
            for number in range(self.rounds + 1):
                for name, generate in providers.items():
                    started_at = time.perf_counter()
                    completions[name] = generate()
                    seconds = time.perf_counter() - started_at
                    first_answer = first_answer or time.perf_counter()
                    if number:  # the first round warms up
                        times[name].append(1000 * seconds)
                    speed = f"{work.tokens / seconds:,.0f} tokens/s" + ("" if number else " (warming up)")
                    print(
                        f"{name}, {'x'.join(map(str, work.case))} {work.lengths}: {seconds:.2f} s, {speed}", flush=True
                    )
        timings = {name: Timing(taken, max(used) or None) for name, taken in times.items()}
        known = self.done.setdefault((work.case, work.lengths), {})
        for name, timing in timings.items():
            extra = {"ms_a_token": timing.p50 / max(work.limits)}
            if started is not None:
                extra["start_s"] = max(0.0, first_answer - started - timings[next(iter(timings))].p50 / 1000)
            rate = 1000 * work.tokens / timing.p50
            if work.lengths == "full":
                self.full_rates.setdefault(name, rate)
            elif name in self.full_rates:
                extra["over_full_rate"] = rate / self.full_rates[name]
            emit([self.row(work, name, timing, known | timings, completions[name], score, extra)], self.out)
        known |= timings

    def row(
        self, work: Work, name: str, timing: Timing, known: dict[str, Timing], completions: list[Completion],
        score: Callable[..., list[list[float]]], extra: dict[str, float],
    ) -> Row:  # fmt: skip
        lengths = [len(completion.ids) for completion in completions]
        assert lengths == work.limits, f"{sum(lengths)} tokens, not {work.tokens}"
        mean, largest = logp_gap(score, completions[:: max(1, len(completions) // SCORED)][:SCORED])
        case, config = work.case, self.policy.model.config
        size = {"prompts": case.prompts, "G": case.group, "P": case.prompt, "R": case.completion}
        return make_row(
            "rollout" if work.lengths == "full" else f"rollout/{work.lengths}", name, timing,
            shape=size | {"layers": config.num_hidden_layers, "D": config.hidden_size},
            dtype=str(self.policy.compute_dtype).removeprefix("torch."), work=work.tokens, unit="tokens",
            errors={"logp_gap": mean, "logp_gap_max": largest}, against=known, extra=extra,
        )  # fmt: skip


def run_local(bench: Bench, works: Sequence[Work], **options: Any) -> None:
    taken = inspect.signature(LocalEngine).parameters
    given = {name: value for name, value in options.items() if value is not None}
    if unknown := given.keys() - taken.keys():
        raise ValueError(f"{', '.join(unknown)}: the local engine has no such option; remove it")
    started: float | None = time.perf_counter()
    policy = bench.policy
    engine = LocalEngine(policy.model, policy.tokenizer, autocast_dtype=policy.autocast_dtype, **given)
    engine.load(version=0)
    try:
        for work in works:
            sampling = Sampling(max_tokens=max(work.limits), for_training=True)
            call = {"local": lambda work=work, sampling=sampling: engine.generate(work.requests, sampling)}
            bench.measure(work, call, engine.logps, started)
            started = None
        metrics = {name: value for name, value in engine.metrics().items() if isinstance(value, int | float)}
        if metrics:
            print("local:", ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()), flush=True)
    finally:
        engine.close()


def run_vllm(bench: Bench, works: Sequence[Work], folder: Path, vllm: VllmConfig, *, unseeded: bool) -> None:
    if not works:
        return
    started: float | None = time.perf_counter()
    longest = max(work.case.prompt + work.case.completion for work in works)
    with server_of(bench.policy, folder, vllm=vllm, sync=SyncConfig(), max_model_len=max(2048, longest)) as engine:
        engine.load(version=0)

        def generate(work: Work, *, seeded: bool) -> list[Completion]:
            engine.pool.seeded = seeded
            groups: dict[int, list[int]] = {}
            for i, limit in enumerate(work.limits):
                groups.setdefault(limit, []).append(i)
            if len(groups) == 1:
                return engine.generate(work.requests, Sampling(max_tokens=work.limits[0], for_training=True))
            plain = [Request(prompt_ids=request.prompt_ids, seed=request.seed) for request in work.requests]
            futures = {
                limit: engine.submit([plain[i] for i in rows], Sampling(max_tokens=limit, for_training=True))
                for limit, rows in groups.items()
            }  # all in flight together
            wait(futures.values())
            results = {
                i: c for limit, rows in groups.items() for i, c in zip(rows, futures[limit].result(), strict=True)
            }
            return [results[i] for i in range(len(work.requests))]

        for work in works:
            calls = {
                f"vllm, {name}": lambda work=work, seeded=name == "seeded": generate(work, seeded=seeded)
                for name in ("seeded", *(["unseeded"] if unseeded else []))
            }
            bench.measure(work, calls, engine.local.logps, started)
            started = None


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def logp_gap(score: Callable[..., list[list[float]]], completions: Sequence[Completion]) -> tuple[float, float]:
    """Return the mean and largest absolute difference to the trainer's log-probs."""
    own = score([(c.prompt_ids, c.ids) for c in completions], 1.0)
    gaps = [abs(a - b) for c, row in zip(completions, own, strict=True) for a, b in zip(c.logps, row, strict=True)]
    return sum(gaps) / len(gaps), max(gaps)


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except ValueError as error:
        sys.exit(f"error: {error}")
