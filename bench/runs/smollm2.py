"""GRPO on SmolLM2-135M-Instruct, strop vs. TRL: held-out accuracy over wall-clock time.

    python -m bench.runs.smollm2 run --model MODEL_FOLDER --out rows.jsonl   # two seeds of both, sequentially
    python -m bench.runs.smollm2 plot FIGURE.svg rows.jsonl                  # the figure and a text summary

The task is bench/tagged_arithmetic.py: one-digit sums, differences and products with the answer in tags. A few SFT
steps teach the format; both start from the result, saved in bfloat16. Then both train with the same settings:
rows, reward function, batch, group, temperature, completion length, loss, learning rate (constant), AdamW, no KL term,
weights in float32 and products in bfloat16. strop samples in process, TRL with vLLM in its process (--trl-engine).

Each run is a separate process. Every few steps the same held-out rows are sampled at the same temperature and rewarded
by the same function: strop with the trainer's evaluation, TRL with transformers' generate. `train_s` counts from
the end of the first evaluation, `wall_s` from the start of the process; neither counts later evaluations.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from bench import common, tagged_arithmetic
from bench.common import append, commit, hardware, pyplot, read, require_commit, save_figure, versions
from rollout.rewards.functions import exact_match

SIDES = ("ours", "TRL")
COLOURS = {"ours": "#00798c", "TRL": "#d1495b"}
NAMES = {"ours": "strop", "TRL": "TRL"}  # in the figure
GOAL = 0.8  # the summary reports the time to this accuracy


@dataclass(frozen=True)
class Settings:
    """Settings shared by both sides."""

    steps: int = 60
    """Optimizer steps."""
    prompts: int = 32
    """Prompts per step."""
    group: int = 8
    """Completions per prompt."""
    completion: int = 32
    """Maximum tokens per completion."""
    learning_rate: float = 1e-5
    """Constant learning rate."""
    eval_steps: int = 10
    """Steps between evaluations."""
    eval_rows: int = 488
    """Held-out rows: 61 problems, each several times."""
    eval_temperature: float = 1.0
    """Temperature of held-out completions. 0: greedy."""


@dataclass(frozen=True)
class Job:
    side: str
    seed: int
    settings: Settings
    folder: str  # contains start/ (the model), train.jsonl, eval.jsonl
    trl_engine: str
    begun: float  # time.time() when the process was started
    out: str | None


class Clock:
    """Clock and points of one run; the clock stops during evaluations."""

    def __init__(self, job: Job) -> None:
        self.job, self.tokens = job, 0
        self.started: float | None = None  # end of the first evaluation
        self.evaluating = 0.0  # seconds of evaluations after the first
        self.start_up = 0.0

    def point(self, step: int, evaluate: Callable[[], tuple[float, Any]]) -> Any:
        """Evaluate, write the row, and return the second result of `evaluate`."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        before = time.perf_counter()
        train_s = 0.0 if self.started is None else before - self.started - self.evaluating
        accuracy, more = evaluate()
        now = time.perf_counter()
        if self.started is None:
            self.started, self.start_up = now, time.time() - self.job.begun
        else:
            self.evaluating += now - before
        row = {
            "side": self.job.side, "seed": self.job.seed, "step": step, "train_s": train_s,
            "wall_s": self.start_up + train_s, "accuracy": accuracy, "tokens": self.tokens,
            "engine": self.job.trl_engine if self.job.side == "TRL" else "local", "settings": asdict(self.job.settings),
            "hardware": hardware(), "versions": versions(), "commit": commit(),
        }  # fmt: skip
        line = f"{self.job.side}, seed {self.job.seed}, step {step}: accuracy {accuracy:.3f}"
        print(f"{line} after {train_s:.1f} s of training, {self.start_up + train_s:.1f} s in all", flush=True)
        if self.job.out:
            append(Path(self.job.out), row)
        return more


def run_ours(job: Job) -> None:
    """Run `python -m trainer` unchanged, and time its evaluations."""
    from trainer.__main__ import main
    from trainer.rl import rollouts

    clock, evaluate, count = Clock(job), rollouts.evaluate_rewards, rollouts.completion_metrics

    def evaluated(engine: Any, source: Any, version: int, *rest: Any) -> dict[str, float]:
        def once() -> tuple[float, dict[str, float]]:
            metrics = evaluate(engine, source, version, *rest)
            return metrics["eval/exact_match/mean"], metrics

        return clock.point(version, once)

    def counted(completions: Any) -> dict[str, float]:
        clock.tokens += sum(len(completion.ids) for completion in completions)
        return count(completions)

    rollouts.evaluate_rewards, rollouts.completion_metrics = evaluated, counted
    folder, s = Path(job.folder), job.settings
    flags = {
        "method": "grpo", "model": folder / "start", "data": folder / "train.jsonl", "eval-data": folder / "eval.jsonl",
        "max-eval-rows": s.eval_rows, "eval-steps": s.eval_steps, "rollout.eval-temperature": s.eval_temperature,
        "reward-funcs": "exact_match", "num-generations": s.group, "per-device-train-batch-size": s.prompts * s.group,
        "max-completion-length": s.completion, "max-steps": s.steps, "learning-rate": s.learning_rate,
        "lr-scheduler-type": "constant", "seed": job.seed, "rollout.engine": "local", "save-steps": 0,
        "max-tokens-per-micro-batch": 65536, "logging-steps": 10, "output-dir": folder / f"ours-{job.seed}",
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    if code := main([*words, "--overwrite-output-dir"]):
        sys.exit(code)


def run_trl(job: Job) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    clock, folder, s, on_cuda = Clock(job), Path(job.folder), job.settings, torch.cuda.is_available()
    held_out = read(folder / "eval.jsonl")[: s.eval_rows]
    model = AutoModelForCausalLM.from_pretrained(folder / "start", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "start")

    class Evaluation(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            clock.point(0, lambda: (accuracy_of(model, tokenizer, held_out, s), None))

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            if state.global_step % s.eval_steps == 0 or state.global_step == s.steps:
                clock.point(state.global_step, lambda: (accuracy_of(model, tokenizer, held_out, s), None))

    def reward(completions: Any, answer: Any, completion_ids: Any, **_: Any) -> list[float | None]:
        clock.tokens += sum(len(ids) for ids in completion_ids)
        return exact_match(completions, answer)

    options = GRPOConfig(
        output_dir=str(folder / f"trl-{job.seed}"), max_steps=s.steps, per_device_train_batch_size=s.prompts * s.group,
        num_generations=s.group, max_completion_length=s.completion, learning_rate=s.learning_rate,
        lr_scheduler_type="constant", beta=0.0, loss_type="dapo", temperature=1.0, top_p=1.0, top_k=0, seed=job.seed,
        gradient_checkpointing=False, bf16=on_cuda, use_cpu=not on_cuda, logging_steps=10, save_strategy="no",
        report_to="none", disable_tqdm=True, use_vllm=job.trl_engine == "vllm", vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3, vllm_max_model_length=512,
    )  # fmt: skip
    rows = [{"prompt": row["prompt"], "answer": row["answer"]} for row in read(folder / "train.jsonl")]
    trainer = GRPOTrainer(
        model=model, args=options, reward_funcs=[reward], train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer, callbacks=[Evaluation()],
    )  # fmt: skip
    trainer.train()


@torch.no_grad()
def accuracy_of(model: Any, tokenizer: Any, rows: list[dict[str, Any]], settings: Settings) -> float:
    """Return the accuracy of one completion per row, with fixed random numbers."""
    texts = [tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in rows]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    device, was_training = next(model.parameters()).device, model.training
    how: dict[str, Any] = {"do_sample": False}
    if settings.eval_temperature:
        how = {"do_sample": True, "temperature": settings.eval_temperature, "top_k": 0, "top_p": 1.0}
    model.eval()
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"),
    ):
        torch.manual_seed(0)
        made = model.generate(**batch.to(device), max_new_tokens=settings.completion, **how)
    model.train(was_training)
    completions = tokenizer.batch_decode(made[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return statistics.fmean(exact_match(completions, [row["answer"] for row in rows]))


def prepare(model: str, folder: Path, sft_steps: int, sft_learning_rate: float) -> None:
    """Write the rows, and train the initial model of both sides."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tagged_arithmetic.write(folder)
    source = model
    if sft_steps:
        command = [sys.executable, "-m", "trainer", "--method", "sft", "--model", model]
        command += ["--data", str(folder / "sft.jsonl"), "--max-steps", str(sft_steps), "--save-steps", "0"]
        command += ["--per-device-train-batch-size", "32", "--learning-rate", str(sft_learning_rate)]
        command += ["--lr-scheduler-type", "constant", "--output-dir", str(folder / "sft"), "--overwrite-output-dir"]
        subprocess.run(command, cwd=folder, env=environment(), check=True)
        source = str(folder / "sft" / "final")
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(folder / "start")
    AutoTokenizer.from_pretrained(source).save_pretrained(folder / "start")


def environment() -> dict[str, str]:
    return common.environment(HF_HUB_OFFLINE="1", STROP_COMMIT=commit())


def run(
    model: str,
    out: Path | None = None,
    sides: tuple[Literal["ours", "TRL"], ...] = SIDES,
    seeds: tuple[int, ...] = (0, 1),
    sft_steps: int = 5,
    sft_learning_rate: float = 3e-5,
    trl_engine: Literal["vllm", "transformers"] | None = None,
    folder: Path | None = None,
    settings: Settings = Settings(),  # noqa: B008  frozen
) -> None:
    """Prepare, then train every seed of both sides.

    Args:
        model: Folder of SmolLM2-135M-Instruct; another chat model works as well.
        out: File to append the points to.
        sides: Which to run.
        seeds: Of each side.
        sft_steps: Steps that show the format. 0: none.
        sft_learning_rate: Of these steps.
        trl_engine: What TRL samples with; vllm on a GPU.
        folder: For rows, models and runs, kept; what `prepare` made there before is used again.
        settings: Of the runs.
    """
    require_commit()
    engine = trl_engine or ("vllm" if torch.cuda.is_available() else "transformers")
    with tempfile.TemporaryDirectory(prefix="strop-bench-") as scratch:
        work = (folder or Path(scratch)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        if not (work / "start" / "config.json").is_file():
            started = time.monotonic()
            prepare(str(Path(model).resolve()) if Path(model).exists() else model, work, sft_steps, sft_learning_rate)
            print(f"prepared in {time.monotonic() - started:.0f} s", flush=True)
        if out:
            out.parent.mkdir(parents=True, exist_ok=True)
        failed = []
        for seed in seeds:
            for side in sides:
                job = Job(side, seed, settings, str(work), engine, time.time(), str(out.resolve()) if out else None)
                command = [sys.executable, "-m", "bench.runs.smollm2", "one", json.dumps(asdict(job))]
                if subprocess.run(command, cwd=work, env=environment()).returncode:
                    failed.append(f"{side}, seed {seed}")
    if out and out.is_file():
        print(summary(read(out)))
    if failed:
        raise SystemExit(f"failed: {'; '.join(failed)}")


def one(job: tyro.conf.Positional[str]) -> None:
    """Run one job in this process; `run` starts it.

    Args:
        job: A Job as JSON.
    """
    given = json.loads(job)
    made = Job(**{**given, "settings": Settings(**given["settings"])})
    (run_ours if made.side == "ours" else run_trl)(made)


def lines_of(rows: Iterable[dict[str, Any]]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Return the points of each run in order; a repeated run replaces the earlier one."""
    lines: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        key = (row["side"], row["seed"])
        if row["step"] == 0:
            lines[key] = []
        lines[key].append(row)
    return lines


def summary(rows: list[dict[str, Any]]) -> str:
    """Return a line per run."""
    said = []
    for (side, seed), points in sorted(lines_of(rows).items()):
        last = points[-1]
        reached = next((f"{p['train_s']:.0f} s" for p in points if p["accuracy"] >= GOAL), "not reached")
        rate = last["tokens"] / last["train_s"] if last["train_s"] else 0.0
        said.append(
            f"{side}, seed {seed}: {points[0]['accuracy']:.2f} -> {last['accuracy']:.2f} in {last['step']} steps, "
            f"{last['train_s']:.0f} s of training ({rate:,.0f} completion tokens/s) after a start of "
            f"{points[0]['wall_s']:.0f} s; {GOAL} after {reached}"
        )
    return "\n".join(said)


def plot(figure: tyro.conf.Positional[Path], rows: tyro.conf.Positional[Path]) -> None:
    """Draw held-out accuracy over time.

    Args:
        figure: An SVG or PNG file.
        rows: What `run` wrote.
    """
    made = read(rows)
    fig, panels = pyplot().subplots(1, 2, figsize=(8, 3.4), sharey=True)
    titles = {"train_s": "seconds of training", "wall_s": "seconds since the command, start-up included"}
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        for (side, seed), points in sorted(lines_of(made).items()):
            x, y = [point[name] for point in points], [point["accuracy"] for point in points]
            label = NAMES[side] if seed == min(s for other, s in lines_of(made) if other == side) else None
            axes.plot(x, y, marker="o", markersize=3, color=COLOURS[side], label=label)
        axes.set(xlabel=title, ylim=(0, 1))
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("held-out accuracy")
    panels[0].legend(loc="lower right", frameon=False)
    save_figure(fig, figure)
    print(summary(made))


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"run": run, "one": one, "plot": plot})
