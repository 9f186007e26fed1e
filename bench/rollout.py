"""Completion tokens per second of an engine in GRPO's use: prompts, G completions each, with log-probs.

    python -m bench.rollout --engine both [--shape qwen3-0.6b] [--cases 64x8x256x256 8x8x256x512] [--out rows.jsonl]
    python -m bench.rollout --engine local --cases 64x8x256x256 256x8x256x1024 --lengths full lognormal
    python -m bench.rollout --engine local --cases 64x8x256x256 --lora 16
    python -m bench.rollout --engine local --cases 64x8x256x1024 --lengths lognormal --partial 0.5

A case is prompts x group x prompt tokens x completion tokens. With `full` lengths every completion has this length;
with `lognormal` each has its own limit (median 256, sigma 0.8, at most the case's). Weights are random. `both` is
one process: first the local engine alone on the GPU, then a vLLM server, so that ratios come from one run (uneven
lengths only with the local engine: they take minutes on a server). Requests to vLLM have seeds; --unseeded also
measures requests without seeds, alternately.

--lora samples alternately with an adapter, whose B is 0, and without one. --partial measures completions per second of
--rollout.partial: steps that end when as many groups as the case has prompts are complete, with more groups in flight,
vs. steps that sample exactly these groups to their ends.

The error is the gap between the engine's and the trainer's log-probs of the same tokens, over 8 completions. GiB is
all memory in use on the GPU, including the trainer's weights. `start_s` is the time from creating the engine to its
first answer, minus the time of a later answer. A row is written when its case ends.
"""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
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
WARMUP = 2  # steps of partial rollouts, until unfinished groups are as many as they stay
SCORED = 8  # completions whose log-probs are compared

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
    own = [None] * count if lengths == "full" else limits
    requests = [Request(prompt_ids=ids[i // case.group], seed=i, max_tokens=own[i]) for i in range(count)]
    return Work(case, lengths, requests, limits)


def main(
    out: Path | None = None,
    engine: Literal["local", "vllm", "both"] = "both",
    shape: str | None = None,
    cases: tuple[str, ...] = (),
    lengths: tuple[Lengths, ...] = ("full",),
    rounds: int = 3,
    held: Literal["float32", "bfloat16"] | None = None,
    unseeded: bool = False,
    max_batch_size: int | None = None,
    cache_gib: float | None = None,
    lora: int = 0,
    partial: float = 0.0,
    vllm: VllmConfig = VllmConfig(max_in_flight=1024),  # noqa: B008  frozen
) -> None:
    """Print the table; append every row as JSON to `out`.

    Args:
        out: File to append the rows to.
        engine: local, vllm, or both in one run.
        shape: A model of trainer.plan, tiny, or smollm2-135m.
        cases: Each is prompts x group x prompt tokens x completion tokens. None given: 64x8x256x256 on a GPU.
        lengths: Completion lengths, one value for all cases or one per case.
        rounds: Timed calls per case, after a warm-up call.
        held: Dtype of the trainer's weights. Default: float32, or bfloat16 from 7B parameters on.
        unseeded: Also measure vLLM without seeds.
        max_batch_size: Local engine's batch size. None: its default.
        cache_gib: Local engine's cache. None: its default.
        lora: Rank of an adapter for the local engine.
        partial: Groups in flight in addition to those of a step, as a fraction of them.
        vllm: The server.
    """
    require_commit()
    on_cuda = torch.cuda.is_available()
    shape = shape or ("qwen3-0.6b" if on_cuda else "tiny")
    chosen = [Case.of(text) for text in cases or ("64x8x256x256" if on_cuda else "4x8x16x32",)]
    if len(lengths) not in (1, len(chosen)):
        raise ValueError(
            f"lengths={' '.join(lengths)}: {len(lengths)} for {len(chosen)} cases; pass one, or one per case"
        )
    if (lora or partial) and engine != "local":
        raise ValueError(f"engine={engine}: --lora and --partial need the local engine; use --engine local")
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
        others = {f"local, LoRA {lora}": random_policy(shape, None, lora_rank=lora)} if lora else {}
        ways = {
            "local": lambda: run_local(
                bench, works, others, partial, max_batch_size=max_batch_size, cache_gib=cache_gib
            ),
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
            dtype=self.policy.compute_dtype, work=work.tokens, unit="tokens",
            errors={"logp_gap": mean, "logp_gap_max": largest}, against=known, extra=extra,
        )  # fmt: skip


def run_local(
    bench: Bench, works: Sequence[Work], others: dict[str, Policy], extra_groups: float, **options: Any
) -> None:
    """Measure the policy and `others`, which have the same log-probs, alternately; or partial rollouts."""
    given = {name: value for name, value in options.items() if value is not None}
    started: float | None = time.perf_counter()
    with contextlib.ExitStack() as stack:
        engines = {}
        for name, policy in ({"local": bench.policy} | others).items():
            engine = LocalEngine(policy.model, policy.tokenizer, autocast_dtype=policy.autocast_dtype, **given)
            engines[name] = stack.enter_context(contextlib.closing(engine))
            engine.load(version=0)
        engine = engines["local"]
        for work in works:
            sampling = Sampling(max_tokens=max(work.limits), for_training=True)
            if extra_groups:
                measure_partial(bench, work, engine, sampling, extra_groups)
                continue
            calls = {
                name: lambda engine=engine, work=work, sampling=sampling: engine.generate(work.requests, sampling)
                for name, engine in engines.items()
            }
            bench.measure(work, calls, engine.logps, started)
            started = None
        metrics = {name: value for name, value in engine.metrics().items() if isinstance(value, int | float)}
        if metrics:
            print("local:", ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()), flush=True)


def measure_partial(bench: Bench, work: Work, engine: LocalEngine, sampling: Sampling, extra_groups: float) -> None:
    """Time steps with and without additional groups in flight, and write their rows."""
    for name, fraction in (("local", 0.0), (f"local, partial {extra_groups:g}", extra_groups)):
        in_flight: list[list[Request]] = []
        times, ended, tokens = [], [], []
        order, step = random.Random(0), 0
        with watched() as used:
            while step < WARMUP + bench.rounds:
                while len(in_flight) < round((1 + fraction) * work.case.prompts):
                    first = order.randrange(work.case.prompts) * work.case.group
                    limits = order.sample(work.limits, work.case.group)
                    own = work.requests[first : first + work.case.group]
                    in_flight.append([
                        replace(request, seed=order.getrandbits(32), max_tokens=limit)
                        for request, limit in zip(own, limits, strict=True)
                    ])  # fmt: skip
                engine.load(version=step)
                started = time.perf_counter()
                sampled = engine.generate_groups(in_flight, sampling, count=work.case.prompts)
                seconds = time.perf_counter() - started
                pairs = [list(zip(group, done, strict=True)) for group, done in zip(in_flight, sampled, strict=True)]
                finished = [c for group in pairs for _, c in group if c.finish_reason != "unfinished"]
                left = [[replace(r, so_far=c) for r, c in group if c.finish_reason == "unfinished"] for group in pairs]
                in_flight = [group for group in left if group]
                print(f"{name}, step {step}: {len(finished)} completions in {seconds:.2f} s", flush=True)
                if step >= WARMUP:
                    times.append(1000 * seconds)
                    ended.append(len(finished))
                    tokens.append(sum(len(c.ids) for c in finished))
                step += 1
        mean, largest = logp_gap(engine.logps, finished[:SCORED])
        case, config = work.case, bench.policy.model.config
        row = make_row(
            "rollout/partial", name, Timing(times, max(used) or None),
            shape={"prompts": case.prompts, "G": case.group, "P": case.prompt, "R": case.completion,
                   "layers": config.num_hidden_layers, "D": config.hidden_size},
            dtype=bench.policy.compute_dtype, work=sum(ended) / len(ended), unit="completions",
            errors={"logp_gap": mean, "logp_gap_max": largest},
            extra={"tokens_per_second": 1000 * sum(tokens) / sum(times)},
        )  # fmt: skip
        rate = 1000 * sum(ended) / sum(times)  # steps differ in length and in completions
        full = bench.full_rates.setdefault("partial", rate)
        emit([replace(row, rate=rate, ratio_to={"local": full / rate} if fraction else {})], bench.out)


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
