"""Whole training steps, strop vs. TRL: the same model, rows and machine, measured sequentially.

    python -m bench.vs_trl dpo [--shape qwen3-1.7b] [--lora 0] [--out rows.jsonl]
    python -m bench.vs_trl dpo --shape llama-3.1-8b --lora 16
    python -m bench.vs_trl sft [--shape qwen3-1.7b] [--lora 0]
    python -m bench.vs_trl kto [--shape qwen3-1.7b] [--lora 0]
    python -m bench.vs_trl sft --shape qwen3-1.7b --length 16384 --rows 2
    python -m bench.vs_trl sft --shape qwen3-moe-5b        # experts; the shape is in bench/served.py
    python -m bench.vs_trl offline [--only dpo sft]        # all of these: the tables in the docs
    python -m bench.vs_trl grpo [--shape qwen3-0.6b]       # TRL runs vLLM in its own process
    python -m bench.vs_trl grpo --prompts 64 --completion 256 --trl-accumulation 8
    python -m bench.vs_trl grpo --lora 16 --ways TRL "ours, compile, local"
    python -m bench.vs_trl sft --shape qwen3.5-1b --ways TRL "ours, bf16" "ours, bf16, rows"
    python -m bench.vs_trl grpo --shape qwen3.5-1b --no-trl-vllm --ways TRL "ours, local" "ours, rows, local"

TRL is measured with its defaults and with settings that one line turns on: Liger's kernels and torch.compile, each with
and without gradient checkpointing, and padding-free batches if FlashAttention is installed (`TRL, flash`). The fastest
of the measured ways is `best TRL`; every strop row states its ratio to the default and to the best.

In grpo, ways named `local` sample in the trainer's process, other ways on a strop vLLM server. TRL and the local ways
have the GPU to themselves; the server starts after them. Ways named `rows` put one sequence in a row instead of packing
them, as without flash-linear-attention for qwen3.5-1b. Ways named `by memory` leave the number of recomputed blocks to
the trainer, its default.

Weights are random, prompts have 256 tokens, row responses are log-normal (median 200, at most 767), or all rows are
equally long (--length), which leaves TRL nothing to pad. grpo completions have 512 tokens. Each way runs the real loop,
`python -m trainer` or TRL's trainer.train(), including data loading and logging. TRL runs first, while the GPU is cool.
Both train on the same rows in the same order; in grpo each draws its own prompts. The sft loss covers responses only.
With default settings, strop packs the rows of a step into one row and computes the prompt of a pair once, and TRL pads
rows to the longest. (TRL's packing and padding-free batches need
FlashAttention to separate rows, and packing changes the rows of a step.) In kto both also compute log-probs of
mismatched responses for the reference point; these tokens are not counted.

A step lasts from the end of the previous step to its own end. The first 14 of 24 steps are excluded (grpo: 2 of 12),
and the last step if its rows were sampled during the step before. The rate covers all remaining steps and counts real
tokens, prompt and response, once per sequence; ratios compare seconds per token. `speedup over TRL` compares the median
steps: TRL's time divided by the way's time, per token of an average step.

All methods then run untimed steps in which kernels are recorded (bench/runs/kernel_times.py): `gpu_busy` is the
fraction of eight steps (grpo: two) in which at least one kernel runs, and products_ms, attention_ms, ... are
milliseconds per step and kernel group. In grpo, `train_busy` is the same fraction of the time after sampling, and
kernels of servers, which are other processes, are not recorded.

The error is the error of the first step's loss relative to its exact value. The exact value is log 2 in dpo and 1/2 in
kto, because policy and reference are equal; in sft it is the loss of the same rows by transformers in float32, one row
at a time. In grpo the error is the mean distance between the trainer's and the engine's log-probs, over all sampled
tokens of the last step.

TRL gets bfloat16 weights, its leanest setting; strop uses float32 (default) or bfloat16 with stochastic rounding
(--trained-dtype). In grpo, GiB is all memory in use on the GPU, including engines, servers and CUDA contexts, measured
in the same way for both; elsewhere it is the peak of allocated tensors. `planned` is the estimate of trainer/plan.py
for the largest step. Parts of a step (rollout_s, reward_s, train_s, ...) are medians.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import random
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import tyro

from bench.common import ROOT, Row, Timing, emit, make_row, require_commit, torch_code
from bench.served import scratch, shape_config
from data.loader import Loader
from rollout.servers.launch import launch, wait_ready
from rollout.servers.options import VllmConfig
from trainer.config.blocks import RunConfig

TINY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512}  # fmt: skip
# Steps that compile, allocate and load cuBLAS kernels for most lengths: the first use of a kernel makes the host wait.
WARMUP = {"dpo": 14, "sft": 14, "kto": 14, "grpo": 2}
STEPS = 24  # dpo, sft and kto
PROFILED = {"dpo": 10, "sft": 10, "kto": 10, "grpo": 4}  # untimed, at the end, for bench/runs/kernel_times.py
PROMPT, LONGEST = 256, 1024
PORT = 8123  # strop's server
OURS = {
    "ours": "--gradient-checkpointing",
    "ours, no checkpointing": "--gradient-checkpointing false",
    "ours, bf16": "--trained-dtype bfloat16 --gradient-checkpointing",
    "ours, bf16, no checkpointing": "--trained-dtype bfloat16 --gradient-checkpointing false",
    "ours, bf16, compile": "--trained-dtype bfloat16 --gradient-checkpointing --compile",
    "ours, bf16, compile, no checkpointing": "--trained-dtype bfloat16 --gradient-checkpointing false --compile",
    "ours, compile": "--gradient-checkpointing --compile",
    "ours, compile, no checkpointing": "--gradient-checkpointing false --compile",
    "ours, fp8": "--gradient-checkpointing --fp8-base",
    "ours, fp8, compile": "--gradient-checkpointing --fp8-base --compile",
    "ours, 4bit": "--gradient-checkpointing --load-in-4bit",
    "ours, 4bit, compile": "--gradient-checkpointing --load-in-4bit --compile",
}
SHOW_S = 10  # seconds between printed lines of a run
RESULT = "measured: "  # prefix of result lines of the measuring process
CHOSEN = ("model=", "rollout: ")  # prefixes of lines that say how strop packs and samples a model
TRL_OPTIONS = ("liger", "compile", "flash", "no checkpointing")
TRL = {", ".join(("TRL", *names)): names for num in range(5) for names in combinations(TRL_OPTIONS, num)}
BEST = "best TRL"
ERRORS = {"dpo": "first_loss", "sft": "first_loss", "kto": "first_loss", "grpo": "logp_gap"}
EXACT_LOSS = {"dpo": math.log(2), "kto": 0.5}  # first loss, with equal policy and reference
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Measured:
    """Result of one way."""

    seconds: list[float]  # per timed step
    tokens: list[float]  # per timed step
    peak_gib: float
    error: float
    parts: dict[str, float]  # seconds of the parts of the last step, if known
    planned_gib: float | None = None
    kernels: dict[str, float] = field(default_factory=dict)  # from bench/runs/kernel_times.py


@dataclass(frozen=True)
class Case:
    """A method on fixed rows."""

    method: str
    shape: str
    lora: int
    ways: tuple[str, ...]
    per_step: int  # pairs or rows
    steps: int
    length: int | None = None  # tokens of every row; None: log-normal responses
    profiled: int | None = None  # steps; None: PROFILED


@dataclass(frozen=True)
class Options:
    """Flags of dpo, sft and kto."""

    out: Path | None = None
    """File to append the rows to."""
    shape: str = "qwen3-1.7b"
    """A model of trainer.plan or bench.served, or tiny."""
    lora: int = 0
    """LoRA rank; 0 trains all weights."""
    ways: tuple[str, ...] = ()
    """Names of the ways to run; empty: all applicable."""
    rows: int | None = None
    """Rows (dpo: pairs) per step. None: 16, or 8 pairs."""
    steps: int = STEPS
    """Steps per run, the first 14 untimed."""
    length: int | None = None
    """Tokens of every sequence. None: log-normal responses."""
    profiled: int | None = None
    """Untimed steps at the end that record kernels: 3 or more. None: 10."""

    def measure(self, method: str, rows: int) -> None:
        sizes = (self.rows or rows, self.steps, self.length, self.profiled)
        measure_cases([Case(method, self.shape, self.lora, self.ways, *sizes)], self.out)


DEFAULTS = Options()


def dpo(options: tyro.conf.OmitArgPrefixes[Options] = DEFAULTS) -> None:
    """Preference pairs: forward of policy and reference, backward, AdamW."""
    options.measure("dpo", 8)


def sft(options: tyro.conf.OmitArgPrefixes[Options] = DEFAULTS) -> None:
    """Responses to prompts: forward, backward, AdamW."""
    options.measure("sft", 16)


def kto(options: tyro.conf.OmitArgPrefixes[Options] = DEFAULTS) -> None:
    """Labelled responses: forward of policy and reference, including mismatched rows, backward, AdamW."""
    options.measure("kto", 16)


def offline(
    out: Path | None = None,
    only: tuple[str, ...] = (),
    small: str = "qwen3-1.7b",
    large: str = "llama-3.1-8b",
    experts: str = "qwen3-moe-5b",
) -> None:
    """Measure all table rows that need no sampling, with one process for TRL and one for strop.

    Args:
        out: File to append the rows to.
        only: dpo, sft, kto, large (dpo), large-sft, 4k, 16k (sft), experts; empty: all.
        small: Shape of dpo, sft, kto, 4k and 16k, which train all weights.
        large: Shape of large and large-sft, with adapters of rank 16.
        experts: Shape of experts, which trains all weights.
    """
    trl, ours = tuned(), ("ours, bf16, compile", f"ours, bf16, compile{BY_MEMORY}", f"ours, bf16{BY_MEMORY}")
    adapters = ("ours, compile", f"ours, compile{BY_MEMORY}", f"ours, fp8, compile{BY_MEMORY}")
    plain = tuple(way for way in trl if "compile" not in way)  # the loop over experts breaks the graph
    cases = {
        "dpo": Case("dpo", small, 0, (*trl, *ours), 8, STEPS),
        "sft": Case("sft", small, 0, (*trl, *ours), 16, STEPS),
        "kto": Case("kto", small, 0, (*trl, *ours), 16, STEPS),
        "large": Case("dpo", large, 16, (*trl, *adapters, f"ours, 4bit, compile{BY_MEMORY}"), 8, STEPS),
        "large-sft": Case("sft", large, 16, (*trl, *adapters), 16, STEPS),
        "4k": Case("sft", small, 0, (*trl, *ours), 8, STEPS, 4096),
        "16k": Case("sft", small, 0, (*trl, *ours), 2, STEPS, 16384),
        "experts": Case("sft", experts, 0, (*plain, *ours), 16, STEPS),
    }
    for name in only:
        if name not in cases:
            raise ValueError(f"only={name}: must be one of {', '.join(cases)}")
    measure_cases([case for name, case in cases.items() if not only or name in only], out)


def measure_cases(cases: list[Case], out: Path | None) -> None:
    require_commit()
    for case in cases:
        check_steps(case.method, case.steps, case.profiled)
    with scratch() as folder, contextlib.closing(Side()) as trl, contextlib.closing(Side()) as strop:
        config, shape, missing = None, "", []
        for case in cases:
            if case.shape != shape:
                shutil.rmtree(folder / "model", ignore_errors=True)
                longest = max((x.length or LONGEST for x in cases if x.shape == case.shape), default=LONGEST)
                config, shape = make_model(case.shape, folder / "model", longest), case.shape
            failed = measure_case(case, config, folder, trl, strop, out)
            missing += [f"{case.method} {case.shape} {way}" for way in failed]
    exit_if_missing(missing)


def measure_case(case: Case, config: Any, folder: Path, trl: Side, strop: Side, out: Path | None) -> list[str]:
    method, per_step, name = case.method, case.per_step, "pairs" if case.method == "dpo" else "rows"
    extra, longest = case.profiled or PROFILED[method], case.length or LONGEST
    rows = make_rows(method, per_step * (case.steps + extra), case.length)
    ordered = in_our_order(rows)
    write_rows(folder / "rows.jsonl", rows)
    write_rows(folder / "ordered.jsonl", ordered)
    exact = EXACT_LOSS[method] if method in EXACT_LOSS else exact_nll(folder / "model", ordered[:per_step])
    flags = ["--method", method, "--data", str(folder / "rows.jsonl"), "--max-length", str(longest)]
    flags += ["--per-device-train-batch-size", str(per_step)]
    flags += ["--max-tokens-per-micro-batch", str(max(16384, (case.length or 0) * job_rows(method, per_step)))]
    job = {"method": method, "rows": per_step, "sequences": job_rows(method, per_step)}
    job |= {"lora": case.lora, "steps": case.steps, "extra": extra, "exact": exact, "longest": longest}
    size = {name: per_step, "P": PROMPT, "layers": config.num_hidden_layers, "D": config.hidden_size, "lora": case.lora}
    size |= {"length": case.length} if case.length else {}
    return measure(method, folder, case.ways, flags, job, size, out, trl, strop)


def job_rows(method: str, per_step: int) -> int:
    """Return the sequences of a step: a pair has two."""
    return per_step * (2 if method == "dpo" else 1)


def grpo(
    out: Path | None = None,
    shape: str = "qwen3-0.6b",
    lora: int = 0,
    ways: tuple[str, ...] = (),
    prompts: int = 8,
    group: int = 8,
    completion: int = 512,
    steps: int = 12,
    share: float = 0.3,
    trl_accumulation: int = 1,
    trl_vllm: bool = True,
    profiled: int = PROFILED["grpo"],
    more: str = "",
) -> None:
    """Sampling, rewards, one optimizer step, weight sync; a new policy samples each step.

    Args:
        out: File to append the rows to.
        shape: A model of trainer.plan or bench.served, or tiny.
        lora: LoRA rank; 0 trains all weights. Only with local ways.
        ways: Names of the ways to run; empty: TRL and the local ways.
        prompts: Prompts per step.
        group: Completions per prompt.
        completion: Tokens per completion.
        steps: Steps per run, the first 2 untimed.
        share: Fraction of GPU memory for TRL's engine; 0.3 is its default. strop's server has room for the keys and
            values of all completions of a step.
        trl_accumulation: Number of parts in which TRL trains a step's completions, if they do not fit together; it
            always samples them together.
        trl_vllm: Let TRL sample with vLLM on a GPU, instead of transformers.
        profiled: Untimed steps at the end that record kernels: 3 or more.
        more: Additional strop flags, as one string.
    """
    require_commit()
    check_steps("grpo", steps, profiled)
    rows = prompts * group
    if rows % trl_accumulation:
        raise ValueError(f"trl_accumulation={trl_accumulation}: must divide the {rows} completions of a step")
    with scratch() as folder, contextlib.closing(Side()) as trl, contextlib.closing(Side()) as strop:
        extra, longest = profiled, max(LONGEST, PROMPT + completion)
        config = make_model(shape, folder / "model", longest)
        texts = prompts_and_responses(prompts * (steps + extra), 0)
        write_rows(folder / "rows.jsonl", [{"prompt": text} for (text,) in texts])
        flags = ["--method", "grpo", "--data", str(folder / "rows.jsonl"), *shlex.split(more)]
        flags += ["--per-device-train-batch-size", str(rows), "--num-generations", str(group)]
        flags += ["--max-completion-length", str(completion), "--reward-funcs", "bench.vs_trl.reward"]
        flags += ["--max-tokens-per-micro-batch", "65536"]
        job = {"method": "grpo", "rows": rows, "group": group, "completion": completion, "steps": steps}
        job |= {"extra": extra, "longest": longest}
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        pool_bytes = 4 * config.num_hidden_layers * config.num_key_value_heads * head_dim * longest * rows
        job |= {"share": share, "lora": lora, "pool_bytes": pool_bytes, "accumulation": trl_accumulation}
        job |= {"trl_vllm": trl_vllm and torch.cuda.is_available()}
        size = {"prompts": prompts, "G": group, "P": PROMPT, "R": completion} | ({"lora": lora} if lora else {})
        size |= {"layers": config.num_hidden_layers, "D": config.hidden_size}
        exit_if_missing(measure("grpo", folder, ways, flags, job, size, out, trl, strop))


def measure(
    method: str, folder: Path, ways: tuple[str, ...], flags: list[str], job: dict[str, Any], size: dict[str, int],
    out: Path | None, trl: Side, strop: Side,
) -> list[str]:  # fmt: skip
    """Measure the ways in order and emit each row immediately. Return the ways that failed."""
    chosen = list(ways or ways_of(method, job["lora"]))
    for way in chosen:
        if way not in TRL and base_of(way) not in OURS:
            names = ", ".join([*TRL, *OURS])
            suffixes = f"'{BY_MEMORY}', '{EXACT}', '{ROWS}' and '{LOCAL}'"
            raise ValueError(f"ways={way}: must be one of {names}, optionally followed by {suffixes}")
    trl_ways = [way for way in chosen if way in TRL]
    strop_ways = [way for way in chosen if way not in TRL]
    served = [way for way in strop_ways if not way.endswith(LOCAL)] if method == "grpo" else []
    if served and job["lora"]:
        raise ValueError(f"ways={served[0]}: lora={job['lora']} needs a local way; use '{served[0]}{LOCAL}'")
    flags = [*flags, "--model", str(folder / "model"), "--save-steps", "0"]
    flags += ["--max-steps", str(job["steps"] + job["extra"])]
    flags += ["--lora.r", str(job["lora"]), "--lora.alpha", str(2 * job["lora"])] if job["lora"] else []
    job |= {"folder": str(folder), "warmup": WARMUP[method]}
    trl_rows: dict[str, Row] = {}
    strop_rows: list[Row] = []
    missing = list(chosen)

    def run_jobs(side: Side, jobs: dict[str, dict[str, Any]]) -> None:
        for way, measured in side.run(jobs):
            missing.remove(way)
            row = row_of(method, way, measured, trl_rows, size)
            if way in TRL:
                trl_rows[way] = row
            else:
                strop_rows.append(row)
            emit([row], out)

    def strop_jobs(names: list[str], urls: list[str]) -> dict[str, dict[str, Any]]:
        output = ["--output-dir", str(folder / "run"), OVERWRITE]
        return {way: job | {"way": "ours", "flags": [*flags, *flags_of(method, way, urls), *output]} for way in names}

    if trl_ways and strop_ways:
        strop.start()  # imports while the other side does
    # In grpo each side has the GPU to itself, because the other side's engine or server would count as its memory.
    run_jobs(trl, {way: job | {"way": "trl", "options": TRL[way]} for way in trl_ways})
    if method == "grpo":
        trl.close()
    run_jobs(strop, strop_jobs([way for way in strop_ways if way not in served], []))
    if served:
        strop.close()
        with serving(folder, job) as urls:
            run_jobs(strop, strop_jobs(served, urls))
    if trl_rows:
        print(comparison(trl_rows, strop_rows), flush=True)
    return missing


def comparison(trl: dict[str, Row], strop: list[Row]) -> str:
    """Return the ratios of rates to TRL's default and its fastest way, one line per way."""
    best = max(trl.values(), key=lambda row: row.rate)
    lines = [f"\n{best.bench}: {BEST} is {best.provider!r}, {best.rate:,.0f} tokens/s, of {', '.join(trl)}"]
    for row in strop:
        default = f", {1 / row.ratio_to['TRL']:.2f} x TRL's default" if "TRL" in row.ratio_to else ""
        lines.append(f"{row.provider}: {row.rate:,.0f} tokens/s, {1 / row.ratio_to[BEST]:.2f} x {BEST}{default}")
    return "\n".join(lines)


def check_steps(method: str, steps: int, profiled: int | None) -> None:
    if steps < WARMUP[method] + 2:
        raise ValueError(f"steps={steps}: the first {WARMUP[method]} are not timed; use {WARMUP[method] + 2} or more")
    if profiled is not None and profiled < 3:
        raise ValueError(f"profiled={profiled}: the first and the last do not count; use 3 or more")


def exit_if_missing(missing: list[str]) -> None:
    if missing:
        raise SystemExit(f"not measured: {', '.join(missing)}")


def row_of(method: str, way: str, measured: Measured, trl: dict[str, Row], size: dict[str, int]) -> Row:
    timing = Timing([1000 * s for s in measured.seconds], measured.peak_gib)
    step_tokens = sum(measured.tokens) / len(measured.tokens)
    extra = {"step_tokens": step_tokens, **measured.parts, **measured.kernels}
    if measured.planned_gib is not None:
        extra |= {"planned_gib": measured.planned_gib, "planned_over_peak": measured.planned_gib / measured.peak_gib}
    others = dict(trl)
    if trl and way not in TRL:
        others[BEST] = max(trl.values(), key=lambda row: row.rate)
    for name, other in others.items():
        extra[f"speedup over {name}"] = other.ms_p50 / other.extra["step_tokens"] * step_tokens / timing.p50
    row = make_row(
        f"vs_trl/{method}", way, timing, shape=size, dtype="bfloat16", work=step_tokens, unit="tokens",
        errors={ERRORS[method]: measured.error}, extra=extra,
    )  # fmt: skip
    # Not the median step: a way that samples ahead waits more in one step and less in the next.
    rate = sum(measured.tokens) / sum(measured.seconds)
    return replace(row, rate=rate, ratio_to={name: other.rate / rate for name, other in others.items()})


OVERWRITE = "--overwrite-output-dir"
AWAKE, ASYNC, LOCAL, ROWS, BY_MEMORY = ", server awake", ", async", ", local", ", rows", ", by memory"
EXACT = ", exact"  # before LOCAL


def tuned() -> tuple[str, ...]:
    """Return the settings of TRL that are one line each: the default, Liger, Liger and compile, and FlashAttention if
    installed, with and without gradient checkpointing."""
    names = ["TRL", "TRL, liger", "TRL, liger, compile"]
    if importlib.util.find_spec("flash_attn"):
        names += ["TRL, liger, flash", "TRL, liger, compile, flash"]
    return tuple(f"{name}{suffix}" for name in names for suffix in ("", ", no checkpointing"))


def ways_of(method: str, lora: int) -> list[str]:
    if method == "grpo":
        return [
            "TRL",
            "TRL, liger",
            *(f"{way}{LOCAL}" for way in (("ours, compile",) if lora else ("ours, bf16", "ours, bf16, compile"))),
        ]
    if lora:
        ours = ["ours", "ours, no checkpointing", "ours, compile", "ours, fp8, compile", "ours, 4bit, compile"]
        return [*tuned(), *ours]
    ours = [way for way in OURS if "4bit" not in way and "fp8" not in way and ("bf16" in way or "compile" not in way)]
    return [*tuned(), *ours]


def base_of(way: str) -> str:
    """Return the way's name in OURS."""
    for suffix in (LOCAL, ASYNC, AWAKE, ROWS, EXACT, BY_MEMORY):
        way = way.removesuffix(suffix)
    return way


def flags_of(method: str, way: str, urls: list[str]) -> list[str]:
    flags = OURS[base_of(way)].split()
    if BY_MEMORY in way:
        flags.remove("--gradient-checkpointing")
    flags += [] if "--compile" in flags else ["--compile", "false"]
    flags += ["--no-packing"] if ROWS in way else []
    flags += ["--exact-sampling"] if EXACT in way else []
    if method == "grpo":
        flags += ["--rollout.engine", "local" if way.endswith(LOCAL) else "vllm"]
    if urls:
        flags += ["--vllm.url", *urls]
        flags += ["--vllm.colocate", str(AWAKE not in way)] if torch.cuda.is_available() else []
        flags += ["--async-prefetch"] if way.endswith(ASYNC) else []
    return flags


class Side:
    """A process that runs jobs sequentially, so that later jobs reuse imports and compiled code."""

    command = (sys.executable, "-m", "bench.runs.vs_trl_run")

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None

    def run(self, jobs: dict[str, dict[str, Any]]) -> Iterator[tuple[str, Measured]]:
        """Yield the result of each way when it is available; skip ways that fail and print the end of their output."""
        if not jobs:
            return
        child = self.start()
        pending = list(jobs)
        lines: list[str] = []
        started = shown = time.monotonic()
        print(f"running: {', '.join(jobs)}", flush=True)
        try:
            print(json.dumps(jobs), file=child.stdin, flush=True)
            for line in child.stdout:
                if line.startswith(RESULT):
                    way, result = json.loads(line.removeprefix(RESULT))
                    if result is None:
                        break
                    pending.remove(way)
                    yield way, Measured(**result)
                    continue
                lines.append(line)
                if line.startswith(CHOSEN):
                    print(line.rstrip(), flush=True)
                if time.monotonic() - shown > SHOW_S and line.strip():
                    shown = time.monotonic()
                    print(f"{shown - started:.0f} s: {line.strip()[:110]}", flush=True)
        except BaseException:  # Ctrl-C, or a row could not be written: stop the remaining ways
            child.kill()
            self.close()
            raise
        if pending:
            print(f"no result of {', '.join(pending)}:", "".join(lines[-40:]), sep="\n", flush=True)
            self.close()  # after a device error the process is unusable

    def start(self) -> subprocess.Popen[str]:
        if self._child is not None and self._child.poll() is not None:  # it has died
            self.close()
        if self._child is None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            self._child = subprocess.Popen(self.command, cwd=ROOT, text=True, **pipes)
        return self._child

    def close(self) -> None:
        if self._child is not None:
            self._child.communicate()
            self._child = None


@contextmanager
def serving(folder: Path, job: dict[str, Any]) -> Iterator[list[str]]:
    """Start a strop server that can sleep."""
    on_gpu = torch.cuda.is_available()
    pool = {"devices": (0,), "extra_args": f"--kv-cache-memory-bytes {job['pool_bytes']}"} if on_gpu else {}
    cfg = VllmConfig(port=PORT, max_model_len=job["longest"], gpu_memory_utilization=job["share"], **pool)
    device = "cuda" if on_gpu else "cpu"
    with launch(cfg, model=str(folder / "model"), log_dir=folder, device=device, colocate=on_gpu) as server:
        wait_ready([server], timeout=600)
        yield [server.url]


def make_model(shape: str, folder: Path, longest: int) -> Any:
    """Save a model with random bfloat16 weights (float32 on a CPU) and a word-level tokenizer; return its config."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    config = AutoConfig.for_model("qwen3", **TINY) if shape == "tiny" else shape_config(shape)
    config.max_position_embeddings, config.eos_token_id, config.bos_token_id = max(4096, longest), 0, None
    on_cuda = torch.cuda.is_available()
    torch.manual_seed(0)
    with torch.device("cuda" if on_cuda else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if on_cuda else torch.float32)
    model.generation_config.eos_token_id, model.generation_config.bos_token_id = 0, None
    model.save_pretrained(folder)
    del model
    words = ["<end>", *(f"w{i}" for i in range(1, config.vocab_size))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>").save_pretrained(folder)
    torch.cuda.empty_cache()
    return config


def words(rng: random.Random, count: int) -> str:
    return " ".join(f"w{rng.randint(1, 500)}" for _ in range(count))


def prompts_and_responses(count: int, responses: int, length: int | None = None) -> list[tuple[str, ...]]:
    """Return the texts of `count` prompts, each with this many responses; `length`: tokens of prompt, response, end."""
    rng = random.Random(0)

    def response() -> str:
        if length is not None:
            return " " + words(rng, length - PROMPT - 1)
        return " " + words(rng, min(LONGEST - PROMPT - 1, max(8, round(rng.lognormvariate(5.3, 0.6)))))

    return [(words(rng, PROMPT), *(response() for _ in range(responses))) for _ in range(count)]


def make_rows(method: str, count: int, length: int | None = None) -> Rows:
    texts = prompts_and_responses(count, 2 if method == "dpo" else 1, length)
    if method == "dpo":
        return [{"prompt": prompt, "chosen": first, "rejected": second} for prompt, first, second in texts]
    rows: Rows = [{"prompt": prompt, "completion": response} for prompt, response in texts]
    return rows if method == "sft" else [row | {"label": i % 2 == 0} for i, row in enumerate(rows)]


def write_rows(path: Path, rows: Rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@dataclass(frozen=True)
class RowIndex:
    row: int


def in_our_order(rows: Rows) -> Rows:
    """Return the rows in the trainer's order of the first epoch."""
    loader = Loader([RowIndex(i) for i in range(len(rows))], batch_size=len(rows), seed=RunConfig().seed)
    return [rows[index.row] for index in loader.next()]


@torch.no_grad()
def exact_nll(model: Path, rows: Rows) -> float:
    """Return the mean negative log-likelihood of all response tokens, including their ends, in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device).eval()
    total, count = 0.0, 0
    for row in rows:
        ids = [*tokenizer(row["prompt"] + row["completion"])["input_ids"], tokenizer.eos_token_id]
        with torch_code(lm):
            logits = lm(torch.tensor([ids], device=device)).logits[0, PROMPT - 1 : -1]  # (R, V)
        target = torch.tensor(ids[PROMPT:], device=device)
        total += torch.nn.functional.cross_entropy(logits, target, reduction="sum").item()
        count += len(target)
    del lm
    torch.cuda.empty_cache()
    return total / count


def reward(completions: list[Any], **_: Any) -> list[float]:
    """A cheap reward that differs within a group."""
    return [float(len(str(completion)) % 7) for completion in completions]


if __name__ == "__main__":
    try:
        tyro.extras.subcommand_cli_from_dict({"dpo": dpo, "sft": sft, "kto": kto, "offline": offline, "grpo": grpo})
    except ValueError as error:
        sys.exit(f"error: {error}")
