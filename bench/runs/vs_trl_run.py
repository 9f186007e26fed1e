"""One side of bench/vs_trl.py: read jobs as JSON lines, and print a result line for each successful job."""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo

from bench.common import watched
from bench.runs.kernel_times import Watch
from bench.vs_trl import PROMPT, RESULT, Measured, reward
from kernels.tuning import tune_in_parallel
from trainer.metrics.metrics import Timer, read_jsonl


def run_ours(job: dict[str, Any], used: Sequence[float] = ()) -> Measured:
    """Run `python -m trainer` without the final export. `used`: GiB in use on the GPU so far."""
    from trainer.__main__ import INTERRUPTED, main
    from trainer.run.run import Run

    watch, save, lap = Watch(job["steps"], job["extra"], used), Run.maybe_save, Timer.lap

    def lap_and_mark(timer: Timer, name: str) -> None:
        lap(timer, name)
        if name in ("rollout_s", "reward_s"):
            watch.part_ended()

    def maybe_save(run: Run, step: int, *args: Any) -> None:
        save(run, step, *args)
        watch.step_ended(step)

    without_export = patch.multiple(Run, finish=lambda run, policy: None, maybe_save=maybe_save)
    with without_export, patch.object(Timer, "lap", lap_and_mark):
        code = main(job["flags"])
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise SystemExit(code)
    folder = Path(job["flags"][job["flags"].index("--output-dir") + 1])
    records = [record for record in read_jsonl(folder / "metrics.jsonl") if 0 < record["step"] <= job["steps"]]
    seconds = [b["time/wall_s"] - a["time/wall_s"] for a, b in pairwise(records)]
    tokens = [step_tokens(job, a, b) for a, b in pairwise(records)]
    last = records[-1]
    names = ("rollout_s", "reward_s", "train_s", "sync_s", "wait_s")
    # A run that samples ahead samples nothing in its last step, so the last step is excluded.
    timed = slice(job["warmup"] - 1, -1 if "--async-prefetch" in job["flags"] else None)
    parts = {
        name: statistics.median(record[f"time/{name}"] for record in records[1:][timed])
        for name in names
        if f"time/{name}" in last
    }
    made = Measured(seconds[timed], tokens[timed], last["mem/peak_gib"], 0.0, parts, kernels=watch.found)
    if job["method"] == "grpo":
        return replace(made, error=last["policy/behaviour_gap"], peak_gib=watch.peak_gib)
    error = abs(records[0]["loss/total"] / job["exact"] - 1)
    return replace(made, error=error, planned_gib=planned(job, max(tokens)))


def step_tokens(job: dict[str, Any], before: dict[str, float], after: dict[str, float]) -> float:
    if job["method"] == "grpo":  # a shared prompt counts once per completion
        return job["rows"] * (after["rollout/len_mean"] + PROMPT)
    return after["data/tokens_total"] - before["data/tokens_total"]


def planned(job: dict[str, Any], tokens: float) -> float:
    """Return the planner's GiB for the largest step of this run."""
    from trainer.cli import parse
    from trainer.plan import planned_peak

    _, cfg, _ = parse(job["flags"])
    trained, shared = int(tokens) - job["sequences"] * PROMPT, (job["sequences"] - job["rows"]) * PROMPT
    return planned_peak(cfg, int(tokens) - shared, trained_tokens=trained) / 2**30


def run_trl(job: dict[str, Any], used: Sequence[float] = ()) -> Measured:
    import trl
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    folder = Path(job["folder"])
    on_cuda = torch.cuda.is_available()
    ends: list[float] = []
    counts: list[float] = []
    shown: list[dict[str, float]] = []
    peaks = [0.0]
    watch = Watch(job["steps"], job["extra"], used)
    offline = job["method"] != "grpo"

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if len(ends) < job["steps"]:
                if on_cuda:
                    torch.cuda.synchronize()
                    peaks.append(torch.cuda.max_memory_allocated() / 2**30)
                ends.append(time.perf_counter())
            watch.step_ended(state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
            if "num_tokens" in logs and len(counts) < job["steps"]:
                counts.append(logs["num_tokens"])
                shown.append(dict(logs))

    options = {
        "output_dir": str(folder / "trl"), "max_steps": job["steps"] + job["extra"],
        "per_device_train_batch_size": job["rows"] // job.get("accumulation", 1),
        "gradient_accumulation_steps": job.get("accumulation", 1),
        "gradient_checkpointing": "no checkpointing" not in job["options"], "logging_steps": 1, "save_strategy": "no",
        "use_liger_kernel": "liger" in job["options"], "torch_compile": "compile" in job["options"],
        "report_to": "none", "disable_tqdm": True, "bf16": on_cuda, "use_cpu": not on_cuda,
        "include_num_input_tokens_seen": "no",
    }  # fmt: skip
    dtype = torch.bfloat16 if on_cuda else torch.float32
    attention = {"attn_implementation": "flash_attention_2"} if "flash" in job["options"] else {}
    if attention and offline:
        options["padding_free"] = True
    model = AutoModelForCausalLM.from_pretrained(str(folder / "model"), dtype=dtype, **attention)
    file = str(folder / ("ordered.jsonl" if offline else "rows.jsonl"))
    rows = load_dataset("json", data_files=file, split="train", cache_dir=str(folder / "cache"))
    shared = {"model": model, "train_dataset": rows, "callbacks": [Clock()]}
    shared["processing_class"] = AutoTokenizer.from_pretrained(folder / "model")
    if job["lora"]:
        from peft import LoraConfig

        shared["peft_config"] = LoraConfig(
            r=job["lora"], lora_alpha=2 * job["lora"], target_modules="all-linear", task_type="CAUSAL_LM"
        )
    if offline:
        options |= {"max_length": job["longest"], "train_sampling_strategy": "sequential"}
    if job["method"] == "sft":
        options["completion_only_loss"] = True
    if job["method"] == "grpo":
        shared["reward_funcs"] = [reward]
        options |= {
            "num_generations": job["group"], "max_completion_length": job["completion"], "use_vllm": job["trl_vllm"],
            "vllm_mode": "colocate", "vllm_gpu_memory_utilization": job["share"],
            "vllm_max_model_length": job["longest"],
        }  # fmt: skip
    name = job["method"].upper()
    config, trainer = getattr(trl, f"{name}Config"), getattr(trl, f"{name}Trainer")
    trainer(args=config(**options), **shared).train()
    seconds = [b - a for a, b in pairwise(ends)]
    tokens = [b - a for a, b in pairwise(counts)]
    assert len(tokens) == len(seconds), f"{len(counts)} counts of tokens for {len(ends)} steps"
    timed = slice(job["warmup"] - 1, None)
    if job["method"] == "grpo":
        error = shown[-1].get("sampling/sampling_logp_difference/mean", 0.0)  # absent without vLLM
    else:
        error = abs(shown[0]["loss"] / job["exact"] - 1)
    peak_gib = max(peaks) if offline else watch.peak_gib
    return Measured(seconds[timed], tokens[timed], peak_gib, error, {}, kernels=watch.found)


def main() -> None:
    """Read named jobs from each line of stdin; print their results and then a line of nulls."""
    tune_in_parallel()  # untimed, for TRL too
    for line in sys.stdin:
        for way, job in json.loads(line).items():
            made = measured(job)
            if torch.cuda.is_available():  # frees memory for the next way and the other side
                gc.collect()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            if made is not None:
                tell(way, asdict(made))
        tell(None, None)


def tell(way: str | None, made: dict[str, Any] | None) -> None:
    """Print on a separate line, even after a progress bar."""
    print(f"\n{RESULT}{json.dumps([way, made])}", flush=True)


def measured(job: dict[str, Any]) -> Measured | None:
    torch._dynamo.reset()  # Dynamo limits the graphs per function, including graphs of other ways
    try:
        with watched() as used:
            return run_ours(job, used) if job["way"] == "ours" else run_trl(job, used)
    except (Exception, SystemExit):  # e.g. out of memory; the next way may fit
        traceback.print_exc(file=sys.stdout)
        return None


if __name__ == "__main__":
    main()
