"""Whole training steps of ours beside TRL's: the same model, the same rows, the same machine, one after the other.

    python -m bench.vs_trl dpo [--shape qwen3-1.7b] [--lora 0] [--out rows.jsonl]
    python -m bench.vs_trl dpo --shape llama-3.1-8b --lora 16
    python -m bench.vs_trl sft [--shape qwen3-1.7b] [--lora 0]
    python -m bench.vs_trl kto [--shape qwen3-1.7b] [--lora 0]
    python -m bench.vs_trl offline                         # these three, and dpo at 8B: the table of the docs
    python -m bench.vs_trl grpo [--shape qwen3-0.6b]       # TRL has vLLM in its own process
    python -m bench.vs_trl grpo --prompts 64 --completion 256 --trl-accumulation 8
    python -m bench.vs_trl grpo --lora 16 --ways TRL "ours, compile, local"

In grpo, ways named `local` sample in the trainer's process, the others on a vLLM server of ours. TRL and the local ways
have the GPU to themselves; the server starts after them.

Weights are random, prompts have 256 tokens, responses of rows are log-normal (median 200, at most 767), completions of
grpo have 512. Each way runs the real loop, `python -m trainer` or TRL's trainer.train(), data loading and logging
included; TRL first, while the GPU is cool. Both train the same rows in the same order, grpo aside, where each draws its
own prompts. In sft the loss is of the responses alone. Ours packs the rows of a step into one and computes the prompt
of a pair once, as by default; TRL pads the rows to the longest, as by default: its packing and padding-free batches
need FlashAttention to keep rows apart, and packing puts other rows into a step. In kto both sides score each prompt
also with another prompt's response, for the reference point; these tokens are not counted.

A step is the time from one step's end to the next one's. The first 14 of 24 are left out (grpo: 2 of 12), and the last
one where its rows were sampled during the step before. The rate is that of all these steps together and counts real
tokens, prompt and response, once for each sequence; ratios are of seconds per token. `speedup over TRL` is by the
median step: TRL's time over the way's own, per token of an average step.

dpo, sft and kto go on for some steps that are not timed, in which kernels are recorded (bench/runs/kernel_times.py):
`gpu_busy` is the part of eight steps in which at least one kernel runs, and products_ms, attention_ms, ... are
milliseconds a step of groups of kernels.

The error is that of the first step's loss, relative to its exact value: log 2 in dpo and 1/2 in kto, where policy and
reference are one; in sft the loss of the same rows by transformers in float32, one at a time. In grpo it is the mean
distance of the trainer's log-probs from the engine's, over all sampled tokens of the last step.

Ways differ by what they hold: TRL is given bfloat16 weights, its leanest setting, ours are float32 as by default or
bfloat16 with random rounding (--trained-dtype). GiB in grpo is all that was in use on the GPU, engines, servers and
CUDA contexts included, looked at in the same way for both; elsewhere it is the most that tensors took. `planned` is
what trainer/plan.py says of the largest step. Parts of a step (rollout_s, reward_s, train_s, ...) are medians.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import tyro

from bench.common import ROOT, Row, Timing, emit, make_row, require_commit
from data.loader import Loader
from trainer.config.blocks import RunConfig
from trainer.plan import KNOWN, known_config

TINY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512}  # fmt: skip
# Steps that compile and allocate, and in which cuBLAS meets most lengths: the first use of one of its kernels makes the
# host wait for the GPU.
WARMUP = {"dpo": 14, "sft": 14, "kto": 14, "grpo": 2}
STEPS = 24  # of dpo, sft and kto
EXTRA_STEPS = 10  # after the timed ones, for bench/runs/kernel_times.py
PROMPT, LONGEST = 256, 1024
PORT = 8123  # of our server
OURS = {
    "ours": ["--gradient-checkpointing"],
    "ours, no checkpointing": [],
    "ours, bf16": ["--trained-dtype", "bfloat16", "--gradient-checkpointing"],
    "ours, bf16, no checkpointing": ["--trained-dtype", "bfloat16"],
    "ours, bf16, compile": ["--trained-dtype", "bfloat16", "--gradient-checkpointing", "--compile"],
    "ours, bf16, compile, no checkpointing": ["--trained-dtype", "bfloat16", "--compile"],
    "ours, compile": ["--gradient-checkpointing", "--compile"],
    "ours, compile, no checkpointing": ["--compile"],
    "ours, 4bit": ["--gradient-checkpointing", "--load-in-4bit"],
    "ours, 4bit, compile": ["--gradient-checkpointing", "--load-in-4bit", "--compile"],
}
SHOW_S = 10  # seconds between the lines of a run that are shown
RESULT = "measured: "  # begins a line of the process that measures
TRL = {"TRL": True, "TRL, no checkpointing": False}
ERRORS = {"dpo": "first_loss", "sft": "first_loss", "kto": "first_loss", "grpo": "logp_gap"}
EXACT = {"dpo": math.log(2), "kto": 0.5}  # first loss, where policy and reference are one
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Measured:
    """Of each timed step: seconds and tokens; GiB at the peak; how far from right."""

    seconds: list[float]
    tokens: list[float]
    peak_gib: float
    error: float
    parts: dict[str, float]  # seconds of the parts of the last step, where they are known
    planned_gib: float | None = None
    kernels: dict[str, float] = field(default_factory=dict)  # of bench/runs/kernel_times.py


@dataclass(frozen=True)
class Case:
    """A method on fixed rows."""

    method: str
    shape: str
    lora: int
    ways: tuple[str, ...]
    per_step: int  # pairs or rows
    steps: int


def dpo(
    out: Path | None = None,
    shape: str = "qwen3-1.7b",
    lora: int = 0,
    ways: tuple[str, ...] = (),
    pairs: int = 8,
    steps: int = STEPS,
) -> None:
    """Preference pairs: forward of policy and reference, backward, AdamW.

    Args:
        out: File to append the rows to.
        shape: One of trainer.plan's, or tiny.
        lora: Rank of adapters; 0 trains all weights.
        ways: Which to run, by name; empty: all that make sense.
        pairs: Pairs of a step.
        steps: Steps of each run, the first 14 untimed.
    """
    measure_cases([Case("dpo", shape, lora, ways, pairs, steps)], out)


def sft(
    out: Path | None = None,
    shape: str = "qwen3-1.7b",
    lora: int = 0,
    ways: tuple[str, ...] = (),
    rows: int = 16,
    steps: int = STEPS,
) -> None:
    """Responses to prompts: forward, backward, AdamW.

    Args:
        out: File to append the rows to.
        shape: One of trainer.plan's, or tiny.
        lora: Rank of adapters; 0 trains all weights.
        ways: Which to run, by name; empty: all that make sense.
        rows: Rows of a step.
        steps: Steps of each run, the first 14 untimed.
    """
    measure_cases([Case("sft", shape, lora, ways, rows, steps)], out)


def kto(
    out: Path | None = None,
    shape: str = "qwen3-1.7b",
    lora: int = 0,
    ways: tuple[str, ...] = (),
    rows: int = 16,
    steps: int = STEPS,
) -> None:
    """Labelled responses: forward of policy and reference, also of mismatched rows, backward, AdamW.

    Args:
        out: File to append the rows to.
        shape: One of trainer.plan's, or tiny.
        lora: Rank of adapters; 0 trains all weights.
        ways: Which to run, by name; empty: all that make sense.
        rows: Rows of a step.
        steps: Steps of each run, the first 14 untimed.
    """
    measure_cases([Case("kto", shape, lora, ways, rows, steps)], out)


def offline(
    out: Path | None = None,
    only: tuple[str, ...] = (),
    small: str = "qwen3-1.7b",
    large: str = "llama-3.1-8b",
) -> None:
    """The rows of "Whole steps beside TRL" that need no sampling, with one process for each side.

    Args:
        out: File to append the rows to.
        only: dpo, sft, kto, large; empty: all of them.
        small: Shape of dpo, sft and kto, which train all weights.
        large: Shape of dpo with adapters of rank 16.
    """
    cases = {
        "dpo": Case("dpo", small, 0, ("TRL", "ours, bf16, compile", "ours, bf16"), 8, STEPS),
        "sft": Case("sft", small, 0, ("TRL", "ours, bf16, compile"), 16, STEPS),
        "kto": Case("kto", small, 0, ("TRL", "ours, bf16, compile"), 16, STEPS),
        "large": Case("dpo", large, 16, ("TRL", "ours, compile", "ours, 4bit, compile"), 8, STEPS),
    }
    for name in only:
        if name not in cases:
            raise ValueError(f"only={name}: unknown; there is {', '.join(cases)}")
    measure_cases([case for name, case in cases.items() if not only or name in only], out)


def measure_cases(cases: list[Case], out: Path | None) -> None:
    require_commit()
    for case in cases:
        check_steps(case.method, case.steps)
    with scratch() as folder, contextlib.closing(Side()) as trl, contextlib.closing(Side()) as own:
        config, made, missing = None, "", []
        for case in cases:
            if case.shape != made:
                shutil.rmtree(folder / "model", ignore_errors=True)
                config, made = make_model(case.shape, folder / "model"), case.shape
            failed = measure_case(case, config, folder, trl, own, out)
            missing += [f"{case.method} {case.shape} {way}" for way in failed]
    refuse_missing(missing)


def measure_case(case: Case, config: Any, folder: Path, trl: Side, own: Side, out: Path | None) -> list[str]:
    method, per_step, name = case.method, case.per_step, "pairs" if case.method == "dpo" else "rows"
    rows = make_rows(method, per_step * (case.steps + EXTRA_STEPS))
    ordered = in_our_order(rows)
    write_rows(folder / "rows.jsonl", rows)
    write_rows(folder / "ordered.jsonl", ordered)
    exact = EXACT[method] if method in EXACT else exact_nll(folder / "model", ordered[:per_step])
    flags = ["--method", method, "--data", str(folder / "rows.jsonl"), "--max-length", str(LONGEST)]
    flags += ["--per-device-train-batch-size", str(per_step), "--max-tokens-per-micro-batch", "16384"]
    job = {"method": method, "rows": per_step, "sequences": per_step * (2 if method == "dpo" else 1)}
    job |= {"lora": case.lora, "steps": case.steps, "extra": EXTRA_STEPS, "exact": exact}
    size = {name: per_step, "P": PROMPT, "layers": config.num_hidden_layers, "D": config.hidden_size, "lora": case.lora}
    return measure(method, folder, case.ways, flags, job, size, out, trl, own)


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
    more: str = "",
) -> None:
    """Sampling, rewards, one update, weights to the engine; a new policy samples each step.

    Args:
        out: File to append the rows to.
        shape: One of trainer.plan's, or tiny.
        lora: Rank of adapters; 0 trains all weights. Only with local ways.
        ways: Which to run, by name; empty: TRL and the local ways.
        prompts: Prompts of a step.
        group: Completions of a prompt.
        completion: Tokens of a completion.
        steps: Steps of each run, the first 2 untimed.
        share: Of the GPU's memory that TRL's engine takes; 0.3 is its default. Ours has room for the keys and values
            of all completions of a step.
        trl_accumulation: Parts that TRL trains a step's completions in, where all at once do not fit; it samples them
            together in any case.
        more: Further flags of ours, as one string.
    """
    require_commit()
    check_steps("grpo", steps)
    rows = prompts * group
    if rows % trl_accumulation:
        raise ValueError(f"trl_accumulation={trl_accumulation}: must divide the {rows} completions of a step")
    with scratch() as folder, contextlib.closing(Side()) as trl, contextlib.closing(Side()) as own:
        config = make_model(shape, folder / "model")
        write_rows(folder / "rows.jsonl", [{"prompt": text} for (text,) in prompts_and_responses(prompts * steps, 0)])
        flags = ["--method", "grpo", "--data", str(folder / "rows.jsonl"), *shlex.split(more)]
        flags += ["--per-device-train-batch-size", str(rows), "--num-generations", str(group)]
        flags += ["--max-completion-length", str(completion), "--reward-funcs", "bench.vs_trl.reward"]
        flags += ["--max-tokens-per-micro-batch", "65536"]
        job = {"method": "grpo", "rows": rows, "group": group, "completion": completion, "steps": steps}
        job |= {"extra": 0}
        pool_bytes = 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * LONGEST * rows
        job |= {"share": share, "lora": lora, "pool_bytes": pool_bytes, "accumulation": trl_accumulation}
        size = {"prompts": prompts, "G": group, "P": PROMPT, "R": completion} | ({"lora": lora} if lora else {})
        size |= {"layers": config.num_hidden_layers, "D": config.hidden_size}
        refuse_missing(measure("grpo", folder, ways, flags, job, size, out, trl, own))


def measure(
    method: str, folder: Path, ways: tuple[str, ...], flags: list[str], job: dict[str, Any], size: dict[str, int],
    out: Path | None, trl: Side, own: Side,
) -> list[str]:  # fmt: skip
    """Every way in turn, and a row as soon as one has ended. Returns the ways that failed."""
    chosen = list(ways or ways_of(method, job["lora"]))
    for way in chosen:
        if way not in TRL and base_of(way) not in OURS:
            raise ValueError(f"ways={way}: not known here; there is {', '.join([*TRL, *OURS])}, and {LOCAL[2:]} added")
    theirs = [way for way in chosen if way in TRL]
    mine = [way for way in chosen if way not in TRL]
    local = [way for way in mine if way.endswith(LOCAL)]
    served = [way for way in mine if way not in local] if method == "grpo" else []
    if served and job["lora"]:
        raise ValueError(
            f"ways={served[0]}: with lora={job['lora']} only local ways are measured; add {LOCAL[2:]} to it"
        )
    flags = [*flags, "--model", str(folder / "model"), "--save-steps", "0"]
    flags += ["--max-steps", str(job["steps"] + job["extra"])]
    flags += ["--lora.r", str(job["lora"]), "--lora.alpha", str(2 * job["lora"])] if job["lora"] else []
    job |= {"folder": str(folder), "warmup": WARMUP[method]}
    rows: dict[str, Row] = {}  # of TRL's ways
    missing = list(chosen)

    def take(side: Side, jobs: dict[str, dict[str, Any]]) -> None:
        for way, made in side.run(jobs):
            missing.remove(way)
            row = row_of(method, way, made, rows, size)
            if way in TRL:
                rows[way] = row
            emit([row], out)

    def ours(names: list[str], urls: list[str]) -> dict[str, dict[str, Any]]:
        output = ["--output-dir", str(folder / "run"), OVERWRITE]
        return {way: job | {"way": "ours", "flags": [*flags, *flags_of(method, way, urls), *output]} for way in names}

    # In grpo each side has the GPU to itself: an engine or server of the other would count as its memory.
    take(trl, {way: job | {"way": "trl", "checkpointing": TRL[way]} for way in theirs})
    if method == "grpo":
        trl.close()
    take(own, ours([way for way in mine if way not in served], []))
    if served:
        own.close()
        with serving(folder, job) as urls:
            wait_for(urls)
            take(own, ours(served, urls))
    return missing


def check_steps(method: str, steps: int) -> None:
    if steps < WARMUP[method] + 2:
        raise ValueError(f"steps={steps}: the first {WARMUP[method]} are not timed; take {WARMUP[method] + 2} or more")


def refuse_missing(missing: list[str]) -> None:
    if missing:
        raise SystemExit(f"not measured: {', '.join(missing)}")


def row_of(method: str, way: str, made: Measured, trl: dict[str, Row], size: dict[str, int]) -> Row:
    timing = Timing([1000 * s for s in made.seconds], made.peak_gib)
    step_tokens = sum(made.tokens) / len(made.tokens)
    extra = {"step_tokens": step_tokens, **made.parts, **made.kernels}
    if made.planned_gib is not None:
        extra |= {"planned_gib": made.planned_gib, "planned_over_peak": made.planned_gib / made.peak_gib}
    for name, other in trl.items():
        extra[f"speedup over {name}"] = other.ms_p50 / other.extra["step_tokens"] * step_tokens / timing.p50
    row = make_row(
        f"vs_trl/{method}", way, timing, shape=size, dtype="bfloat16", work=step_tokens, unit="tokens",
        errors={ERRORS[method]: made.error}, extra=extra,
    )  # fmt: skip
    # Not by the median step: one that samples ahead waits more in one step and less in the next.
    rate = sum(made.tokens) / sum(made.seconds)
    return replace(row, rate=rate, ratio_to={name: other.rate / rate for name, other in trl.items()})


OVERWRITE = "--overwrite-output-dir"
AWAKE, ASYNC, LOCAL = ", server awake", ", async", ", local"


def ways_of(method: str, lora: int) -> list[str]:
    if method == "grpo":
        return [
            "TRL",
            *(f"{way}{LOCAL}" for way in (("ours, compile",) if lora else ("ours, bf16", "ours, bf16, compile"))),
        ]
    if lora:
        ours = ["ours", "ours, no checkpointing", "ours, compile", "ours, 4bit", "ours, 4bit, compile"]
        return ["TRL", "TRL, no checkpointing", *ours]
    ours = [way for way in OURS if "4bit" not in way and ("bf16" in way or "compile" not in way)]
    return ["TRL", "TRL, no checkpointing", *ours]


def base_of(way: str) -> str:
    """Its name in OURS."""
    for suffix in (LOCAL, ASYNC, AWAKE):
        way = way.removesuffix(suffix)
    return way


def flags_of(method: str, way: str, urls: list[str]) -> list[str]:
    flags = list(OURS[base_of(way)])
    flags += [] if "--compile" in flags else ["--compile", "false"]
    if method == "grpo":
        flags += ["--rollout.engine", "local" if way.endswith(LOCAL) else "vllm"]
    if urls:
        flags += ["--vllm.url", *urls]
        flags += ["--vllm.colocate", str(AWAKE not in way)] if torch.cuda.is_available() else []
        flags += ["--async-prefetch"] if way.endswith(ASYNC) else []
    return flags


class Side:
    """A process that runs jobs one after the other: what is imported and compiled once serves the next."""

    command = (sys.executable, "-m", "bench.runs.vs_trl_run")

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None

    def run(self, jobs: dict[str, dict[str, Any]]) -> Iterator[tuple[str, Measured]]:
        """What each way measured, as soon as it has; a way that fails is left out, with the end of its output shown."""
        if not jobs:
            return
        child = self._start()
        left = list(jobs)
        lines: list[str] = []
        started = shown = time.monotonic()
        print(f"running: {', '.join(jobs)}", flush=True)
        try:
            print(json.dumps(jobs), file=child.stdin, flush=True)
            for line in child.stdout:
                if line.startswith(RESULT):
                    way, made = json.loads(line.removeprefix(RESULT))
                    if made is None:
                        break
                    left.remove(way)
                    yield way, Measured(**made)
                    continue
                lines.append(line)
                if time.monotonic() - shown > SHOW_S and line.strip():
                    shown = time.monotonic()
                    print(f"{shown - started:.0f} s: {line.strip()[:110]}", flush=True)
        except BaseException:  # Ctrl-C, or a row could not be written: nobody waits for the other ways
            child.kill()
            self.close()
            raise
        if left:
            print(f"no result of {', '.join(left)}:", "".join(lines[-40:]), sep="\n", flush=True)
            self.close()  # after an error of the device nothing works in that process

    def _start(self) -> subprocess.Popen[str]:
        if self._child is not None and self._child.poll() is not None:  # it has died since
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
    """Start a server of ours that can sleep; it may not answer yet."""
    os.environ.setdefault("STROP_VLLM_TOKEN", secrets.token_hex(8))
    on_gpu = []
    if torch.cuda.is_available():
        on_gpu = ["--vllm.colocate", "True", "--vllm.devices", "0"]
        on_gpu += [f"--vllm.extra-args=--kv-cache-memory-bytes {job['pool_bytes']}"]
    command = [
        sys.executable, "-m", "rollout.serve", "--model", str(folder / "model"), "--vllm.port", str(PORT),
        "--vllm.max-model-len", str(LONGEST), "--vllm.gpu-memory-utilization", str(job["share"]), *on_gpu,
    ]  # fmt: skip
    with (folder / "serve.log").open("w") as log, subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log) as serve:
        try:
            yield [f"http://127.0.0.1:{PORT}"]
        finally:
            serve.terminate()
            if serve.wait() > 0:
                print((folder / "serve.log").read_text()[-3000:], flush=True)


def wait_for(urls: list[str]) -> None:
    """Until the servers answer; they have ten minutes."""
    deadline = time.monotonic() + 600
    for url in urls:
        headers = {"Authorization": f"Bearer {os.environ['STROP_VLLM_TOKEN']}"}
        while not answers(urllib.request.Request(f"{url}/health", headers=headers)):
            if time.monotonic() > deadline:
                raise SystemExit(f"{url}: does not answer")
            time.sleep(0.5)


def answers(request: urllib.request.Request) -> bool:
    try:
        with urllib.request.urlopen(request, timeout=2) as reply:
            return reply.status == 200
    except OSError:
        return False


@contextmanager
def scratch() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="strop-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_model(shape: str, folder: Path) -> Any:
    """Config of a model with random weights in bfloat16 (float32 on a CPU), and a tokenizer of one word a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    if shape != "tiny" and shape not in KNOWN:
        raise ValueError(f"shape={shape}: not known here; there is {', '.join(KNOWN)}, tiny")
    config = AutoConfig.for_model("qwen3", **TINY) if shape == "tiny" else known_config(shape)
    config.max_position_embeddings, config.eos_token_id, config.bos_token_id = 4096, 0, None
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


def prompts_and_responses(count: int, responses: int) -> list[tuple[str, ...]]:
    """Texts of so many prompts, each with so many responses."""
    rng = random.Random(0)

    def response() -> str:
        return " " + words(rng, min(LONGEST - PROMPT - 1, max(8, round(rng.lognormvariate(5.3, 0.6)))))

    return [(words(rng, PROMPT), *(response() for _ in range(responses))) for _ in range(count)]


def make_rows(method: str, count: int) -> Rows:
    texts = prompts_and_responses(count, 2 if method == "dpo" else 1)
    if method == "dpo":
        return [{"prompt": prompt, "chosen": first, "rejected": second} for prompt, first, second in texts]
    rows: Rows = [{"prompt": prompt, "completion": response} for prompt, response in texts]
    return rows if method == "sft" else [row | {"label": i % 2 == 0} for i, row in enumerate(rows)]


def write_rows(path: Path, rows: Rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@dataclass(frozen=True)
class Place:
    row: int


def in_our_order(rows: Rows) -> Rows:
    """As the trainer takes them in its first epoch."""
    loader = Loader([Place(i) for i in range(len(rows))], batch_size=len(rows), seed=RunConfig().seed)
    return [rows[place.row] for place in loader.next()]


@torch.no_grad()
def exact_nll(model: Path, rows: Rows) -> float:
    """Mean negative log-likelihood of the tokens of all responses and of their ends, in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device).eval()
    total, count = 0.0, 0
    for row in rows:
        ids = [*tokenizer(row["prompt"] + row["completion"])["input_ids"], tokenizer.eos_token_id]
        logits = lm(torch.tensor([ids], device=device)).logits[0, PROMPT - 1 : -1]  # (R, V)
        target = torch.tensor(ids[PROMPT:], device=device)
        total += torch.nn.functional.cross_entropy(logits, target, reduction="sum").item()
        count += len(target)
    del lm
    torch.cuda.empty_cache()
    return total / count


def reward(completions: list[Any], **_: Any) -> list[float]:
    """Something that differs within a group and costs nothing."""
    return [float(len(str(completion)) % 7) for completion in completions]


if __name__ == "__main__":
    try:
        tyro.extras.subcommand_cli_from_dict({"dpo": dpo, "sft": sft, "kto": kto, "offline": offline, "grpo": grpo})
    except ValueError as error:
        sys.exit(f"error: {error}")
