"""Results on SmolLM2-135M-Instruct with one GPU: all runs of docs/results.md.

    python -m bench.runs.results rows ROWS                                # small files; needs reasoning-gym
    python -m bench.runs.results run --model MODEL --data ROWS --out OUT  # all runs; needs no network
    python -m bench.runs.results_page OUT/results.jsonl docs/results.md   # page and figures; needs matplotlib

RUNS lists the runs. Each run is a separate `python -m trainer` process with its own log; `--jobs` of them share the
GPU, so wall times are longer than alone. A failed run does not stop other runs. Runs that are in
OUT/results.jsonl are not repeated, so the same command completes missing runs.

START is the model after a few SFT steps that show the reply format; sampling tasks start from it, as
in bench/runs/smollm2.py. Held-out rows share no problem with training rows.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from bench import tagged_arithmetic
from bench.common import append, commit, hardware, read, require_commit, versions
from bench.runs.distill import HINT
from bench.runs.smollm2 import environment
from trainer.metrics.metrics import read_jsonl

Flags = dict[str, Any]  # flag without dashes -> value or tuple of values; {model}, {data} and {run:NAME} are paths
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Run:
    """One or more runs that differ only in the seed."""

    name: str
    task: str
    method: str
    flags: Flags
    seeds: tuple[int, ...] = (0,)
    judges: str = ""  # a run whose final model this run only measures, at its first evaluation

    def named(self, seed: int) -> str:
        return f"{self.name}-{seed}"


@dataclass(frozen=True)
class Metric:
    label: str
    higher: bool = True
    chance: float | None = None  # value of random guessing
    fraction: bool = True  # fraction of held-out rows, with noise determined by their number


@dataclass(frozen=True)
class Task:
    title: str
    text: str
    metrics: dict[str, Metric] = field(default_factory=dict)  # held-out


TASKS = {
    "start": Task(
        "SFT start for the sampling tasks",
        "SFT on equal numbers of rows from the first three tasks, for the reply format only; not evaluated here.",
    ),
    "arithmetic": Task(
        "GRPO: one-digit arithmetic in tags",
        "Sums, differences and products of one-digit numbers, answered as `<answer>12</answer>`. The reward is 1 if "
        "the whole reply is correct. Held out: 61 problems, eight samples each at temperature 1.",
        {"eval/exact_match/mean": Metric("accuracy")},
    ),
    "needle": Task(
        "GRPO: find the name (reasoning-gym)",
        '`needle_haystack` from reasoning-gym (Apache-2.0): six to nine statements such as "Anthony adores dancing '
        'salsa", then "Who adores dancing salsa? Reply only with a name." The reward is 1 if the reply is exactly the '
        "name. Held out: 400 problems, one sample each at temperature 1.",
        {"eval/exact_match/mean": Metric("accuracy")},
    ),
    "word_problems": Task(
        "GDPO: format and correctness",
        "One-step word problems, to be answered as `7 + 5 = [12]`; the SFT start saw similar problems with another "
        "answer format. There are two rewards, each normalised within its group: 1 if the whole reply has this format "
        "and is not the example in the prompt, and 1 if its last number is correct. Held out: 300 rows with different "
        "numbers, one sample each at temperature 1.",
        {"eval/regex/mean": Metric("format"), "eval/last_number/mean": Metric("correctness")},
    ),
    "harmless": Task(
        "DPO, KTO and a reward model: harmless answers",
        "Pairs from hh-rlhf's harmless-base (MIT); some of the content is offensive and is not shown here. No held-out "
        "conversation starts like a training conversation. DPO and the reward model are measured by how often the "
        "chosen answer scores higher, KTO by the probability that a desirable answer scores higher than an undesirable "
        "answer. Guessing gives 0.5. Before training, DPO and KTO scores are only rounding differences, no better than "
        "guessing.",
        {
            "eval/reward/accuracy": Metric("pair accuracy", chance=0.5),
            "eval/reward/auc": Metric("AUC", chance=0.5),
        },
    ),
    "solutions": Task(
        "EBFT vs. SFT: GSM8K solutions",
        "Short solutions from GSM8K's training split (MIT), with the same rows in the same order for both methods. CFM "
        "is the distance between features of the completions and of the target solution, computed with the model "
        "before training. Cross-entropy is measured on the target solution. Lower is better for both.",
        {
            "eval/cfm": Metric("CFM", higher=False, fraction=False),
            "eval/nll": Metric("cross-entropy", higher=False, fraction=False),
        },
    ),
    "distillation": Task(
        "On-policy distillation: arithmetic",
        "The student is the initial model of the GRPO arithmetic run, with the same rows, batch size and learning "
        "rate; rewards are only measured. The teacher is the first GRPO run above, or the student itself with the "
        "answer in its prompt, with its initial weights or their moving average (ema). SDPO's teacher sees a correct "
        "completion of the student instead of the answer.",
        {"eval/exact_match/mean": Metric("accuracy")},
    ),
}

START = "start-0"
BRACKETS = r"^\s*(?!2 \+ 1 =)[0-9]+ [-+*x] [0-9]+ = \[-?[0-9]+\]\.?\s*$"
COMMON = {"save-steps": 0, "logging-steps": 10}
SAMPLED = COMMON | {
    "model": f"{{run:{START}}}", "rollout.engine": "local", "rollout.eval-temperature": 1.0, "num-generations": 8,
    "per-device-train-batch-size": 256, "max-tokens-per-micro-batch": 65536, "learning-rate": 1e-5,
    "lr-scheduler-type": "constant", "eval-steps": 10,
}  # fmt: skip
ARITHMETIC = SAMPLED | {
    "data": "{data}/arithmetic_train.jsonl", "eval-data": "{data}/arithmetic_eval.jsonl",
    "reward-funcs": "exact_match", "max-completion-length": 32, "max-steps": 60,
}  # fmt: skip
PAIRS = COMMON | {
    "model": "{model}", "max-length": 640, "max-tokens-per-micro-batch": 32768, "learning-rate": 1e-5,
    "warmup-ratio": 0.1, "eval-steps": 20,
}  # fmt: skip
SOLUTIONS = COMMON | {
    "data": "{data}/solutions_train.jsonl", "eval-data": "{data}/solutions_eval.jsonl", "learning-rate": 1e-5,
    "lr-scheduler-type": "constant", "max-tokens-per-micro-batch": 32768,
}  # fmt: skip
EBFT = SOLUTIONS | {
    "num-generations": 4, "per-device-train-batch-size": 64, "max-completion-length": 128, "ce-coef": 0.1,
    "rollout.engine": "local",
}  # fmt: skip

# By priority: a run starts when a job slot is free and the runs it needs have finished.
# Other objectives for the same task; the ratio of DPPO differs from 1 only after the first step on a rollout.
OBJECTIVES: dict[str, Flags] = {
    "max-rl": {"advantage-estimator": "max_rl"},
    "opo": {"advantage-estimator": "opo"},
    "reinforce-plus-plus": {"advantage-estimator": "reinforce_plus_plus"},
    "dppo-tv": {"loss-type": "dppo_tv", "proximal-policy": "behaviour", "num-iterations": 2},
}
RUNS = (
    Run("start", "start", "sft", COMMON | {
        "model": "{model}", "data": "{data}/start.jsonl", "max-steps": 8, "per-device-train-batch-size": 32,
        "learning-rate": 3e-5, "lr-scheduler-type": "constant",
    }),
    Run("grpo-arithmetic", "arithmetic", "grpo", ARITHMETIC, SEEDS),
    *(Run(f"{name}-arithmetic", "arithmetic", "grpo", ARITHMETIC | flags, SEEDS) for name, flags in OBJECTIVES.items()),
    Run("grpo-needle", "needle", "grpo", SAMPLED | {
        "data": "{data}/needle_train.jsonl", "eval-data": "{data}/needle_eval.jsonl", "reward-funcs": "exact_match",
        "max-completion-length": 16, "max-steps": 80,
    }, SEEDS),
    Run("gdpo-word-problems", "word_problems", "gdpo", SAMPLED | {
        "data": "{data}/word_problems_train.jsonl", "eval-data": "{data}/word_problems_eval.jsonl",
        "reward-funcs": (f"regex:{BRACKETS}", "last_number"), "max-completion-length": 32,
        "max-steps": 80,
    }, SEEDS),
    Run("ebft-solutions", "solutions", "ebft", EBFT | {"model": "{model}", "max-steps": 60, "eval-steps": 15}),
    Run("sft-solutions", "solutions", "sft", SOLUTIONS | {
        "model": "{model}", "per-device-train-batch-size": 16, "max-steps": 60, "eval-steps": 15,
    }),
    Run("sft-solutions-features", "solutions", "ebft", EBFT | {
        "model": "{run:sft-solutions-0}", "feature-model": "{model}", "max-steps": 1, "eval-steps": 0,
    }, judges="sft-solutions"),
    Run("opd-arithmetic", "distillation", "opd", ARITHMETIC | {
        "teacher": "{run:grpo-arithmetic-0}", "reward-coef": 0, "max-steps": 40,
    }),
    Run("opd-self", "distillation", "opd", ARITHMETIC | {
        "teacher": "self", "teacher-prompt": HINT, "reward-coef": 0, "max-steps": 40,
    }),
    Run("opd-self-ema", "distillation", "opd", ARITHMETIC | {
        "teacher": "self", "teacher-prompt": HINT, "teacher-update-rate": 0.05, "reward-coef": 0, "max-steps": 40,
    }, SEEDS),
    Run("sdpo-arithmetic", "distillation", "sdpo", ARITHMETIC | {"max-steps": 40}, SEEDS),
    Run("dpo-harmless", "harmless", "dpo", PAIRS | {
        "data": "{data}/harmless_train.jsonl", "eval-data": "{data}/harmless_eval.jsonl",
        "per-device-train-batch-size": 32, "max-steps": 100,
    }, SEEDS),
    Run("kto-harmless", "harmless", "kto", PAIRS | {
        "data": "{data}/harmless_labelled_train.jsonl", "eval-data": "{data}/harmless_labelled_eval.jsonl",
        "max-eval-rows": 1000, "per-device-train-batch-size": 64, "max-steps": 100,
    }),
    Run("rm-harmless", "harmless", "rm", PAIRS | {
        "data": "{data}/harmless_train.jsonl", "eval-data": "{data}/harmless_eval.jsonl",
        "per-device-train-batch-size": 32, "max-steps": 100,
    }),
)  # fmt: skip


# Rows


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def share_of(key: str) -> int:
    """Return 0 to 99 by the content of a problem, not by its index."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % 100


PEOPLE = ("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry")
THINGS = ("apples", "books", "coins", "marbles", "pencils", "shells", "stamps", "tickets")
BRACKETED = "Write the calculation, and then the result in square brackets, as in 2 + 1 = [3]."
STORIES = {
    "+": "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
    "-": "{name} has {a} {things} and gives {b} of them away. How many {things} does {name} have left?",
    "*": "{name} has {a} boxes with {b} {things} in each. How many {things} does {name} have?",
}


def word_problems(part: str) -> list[dict[str, Any]]:
    """Return the split of the same problem in bench/tagged_arithmetic.py, because all tasks share START."""
    made = []
    for op, story in STORIES.items():
        most = 9 if op == "*" else 15
        for a in range(2, most + 1):
            for b in range(2, most + 1):
                key = f"{a}{op}{b}" if op == "-" else f"{min(a, b)}{op}{max(a, b)}"
                if (op == "-" and b >= a) or share_of(key) not in tagged_arithmetic.PARTS[part]:
                    continue
                result = {"+": a + b, "-": a - b, "*": a * b}[op]
                for copy in range(6):
                    pick = share_of(f"{copy} {op} {a} {b}")
                    name, things = PEOPLE[(pick + copy) % len(PEOPLE)], THINGS[(pick // 8 + copy) % len(THINGS)]
                    question = story.format(name=name, a=a, b=b, things=things)
                    form, solution = BRACKETED, ""
                    if part == "sft":
                        form = "Reply as <think>calculation</think><answer>number</answer>."
                        solution = f"<think>{a} {op} {b} = {result}</think><answer>{result}</answer>"
                    row = {"prompt": user(f"{question} {form}"), "answer": str(result), "numbers": f"{a} {op} {b}"}
                    made.append(row | ({"completion": solution} if solution else {}))
    return made


def needles(count: int) -> list[dict[str, Any]]:
    from reasoning_gym import create_dataset

    made = create_dataset("needle_haystack", size=count, seed=0, min_num_statements=6, max_num_statements=9)
    return [
        {"prompt": user(row["question"]), "completion": str(row["answer"]), "answer": str(row["answer"])}
        for row in made
    ]


def conversation(text: str) -> list[dict[str, str]]:
    """Parse hh-rlhf's text, which ends in "Assistant:", into messages."""
    parts = re.split(r"\n\n(Human|Assistant):", text)[1:-2]
    names = {"Human": "user", "Assistant": "assistant"}
    return [{"role": names[who], "content": said.strip()} for who, said in zip(parts[::2], parts[1::2], strict=True)]


def pairs(rows: Iterable[dict[str, str]]) -> Iterator[dict[str, Any]]:
    """Keep pairs with alternating turns, non-empty answers and moderate length."""
    for row in rows:
        prompt, chosen, rejected = conversation(row["prompt"]), row["chosen"].strip(), row["rejected"].strip()
        roles = [message["role"] for message in prompt]
        alternate = roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
        filled = chosen and rejected and chosen != rejected and all(message["content"] for message in prompt)
        if alternate and filled and len(row["prompt"]) + max(len(chosen), len(rejected)) <= 1600:
            yield {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def labelled(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert each pair to two KTO rows."""
    return [
        {"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}
        for row in rows
        for name in ("chosen", "rejected")
    ]


def solutions(rows: Iterable[dict[str, str]]) -> list[dict[str, Any]]:
    """Keep short solutions, without calculator annotations."""
    made = []
    for row in rows:
        solution = re.sub(r"<<.*?>>", "", row["answer"])
        if len(solution) <= 220 and len(row["question"]) <= 400:
            made.append({"prompt": user(row["question"]), "completion": solution})
    return made


def apart(
    rows: Iterable[dict[str, Any]], taken: Iterable[dict[str, Any]] = (), key: Callable[[Any], str] | None = None
) -> list[dict[str, Any]]:
    """Keep the first row of each key that is not in the taken keys; a key is the lowercased first user message."""
    key = key or (lambda row: " ".join(row["prompt"][0]["content"].lower().split()))
    seen, kept = {key(row) for row in taken}, []
    for row in rows:
        if key(row) not in seen:
            seen.add(key(row))
            kept.append(row)
    return kept


def read_asset(assets: Path, name: str) -> list[dict[str, Any]]:
    with gzip.open(assets / "data" / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def rows(out: tyro.conf.Positional[Path], assets: Path | None = None) -> None:
    """Write the rows of all runs.

    Args:
        out: A folder.
        assets: Folder with data/hh_harmless_*.jsonl.gz and data/gsm8k_train.jsonl.gz; None: STROP_ASSETS.
    """
    assets = assets or Path(os.environ.get("STROP_ASSETS") or "assets")
    found = apart(needles(3400))
    needle = {"eval": found[:400], "sft": found[400:600], "train": found[600:]}
    held_out = apart(pairs(read_asset(assets, "hh_harmless_test")))
    trained = apart(pairs(read_asset(assets, "hh_harmless_train1800")), held_out)
    worked = apart(solutions(read_asset(assets, "gsm8k_train")))
    parts = ("sft", "train", "eval")
    arithmetic = {part: tagged_arithmetic.rows(part) for part in parts}
    stories = {part: apart(word_problems(part)) for part in parts}
    shown = [arithmetic["sft"], needle["sft"], stories["sft"]]  # in equal parts
    files = {
        "start": [row for rows in zip(*(part[: min(map(len, shown))] for part in shown), strict=True) for row in rows],
        "arithmetic_train": arithmetic["train"], "arithmetic_eval": arithmetic["eval"],
        "needle_train": needle["train"], "needle_eval": needle["eval"],
        "word_problems_train": stories["train"], "word_problems_eval": in_turn(stories["eval"])[:300],
        "harmless_train": trained, "harmless_eval": held_out,
        "harmless_labelled_train": labelled(trained), "harmless_labelled_eval": labelled(held_out),
        "solutions_train": worked[100:1700], "solutions_eval": worked[:100],
    }  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    for name, made in files.items():
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
        print(f"{name}: {len(made)} rows")


def in_turn(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Shuffle with a fixed seed, so that the first rows are of every kind."""
    return sorted(rows, key=lambda row: hashlib.sha256(json.dumps(row).encode()).hexdigest())


# Runs

NEEDED = re.compile(r"\{run:([\w-]+)\}")
RESULTS = "results.jsonl"
# One step of a few short completions, as a smoke test; 500 is the trainer's limit of held-out rows.
QUICK = {"max-steps": 1, "num-generations": 2, "per-device-train-batch-size": 4, "max-eval-rows": 4, "eval-steps": 0}
MAX_EVAL_ROWS = 500
TRAINER = (sys.executable, "-m", "trainer")
POLL_S = 0.2

Jobs = dict[str, tuple[Run, int]]  # name of the run folder -> run, seed


@dataclass(frozen=True)
class Places:
    """Paths of a command's files."""

    model: str
    data: str
    runs: str

    def fill(self, text: str) -> str:
        text = text.replace("{model}", self.model).replace("{data}", self.data)
        return NEEDED.sub(lambda found: f"{self.runs}/{found[1]}", text)


SHOWN = Places(model="SmolLM2-135M-Instruct", data="rows", runs="runs")  # in commands on the page


def flags_of(run: Run, quick: bool) -> Flags:
    if not quick:
        return run.flags
    return run.flags | {name: value for name, value in QUICK.items() if name in run.flags or name == "max-eval-rows"}


def words_of(name: str, run: Run, seed: int, places: Places, quick: bool = False) -> list[str]:
    """Return the arguments of `python -m trainer`."""
    words = ["--method", run.method]
    for flag, value in flags_of(run, quick).items():
        words += [f"--{flag}", *(places.fill(str(x)) for x in (value if isinstance(value, tuple) else (value,)))]
    return [*words, "--seed", str(seed), "--output-dir", f"{places.runs}/{name}"]


def needs(run: Run) -> set[str]:
    return set(NEEDED.findall(" ".join(map(str, run.flags.values()))))


def all_jobs() -> Jobs:
    return {run.named(seed): (run, seed) for run in RUNS for seed in run.seeds}


def chosen_jobs(only: tuple[str, ...], done: set[str]) -> Jobs:
    """Select the named runs (with or without the seed) and the runs they need, in list order."""
    jobs = all_jobs()
    wanted = {name for name, (run, _) in jobs.items() if not only or name in only or run.name in only}
    known = {*jobs, *(run.name for run in RUNS)}
    if unknown := sorted(set(only) - known):
        raise SystemExit(f"only={unknown[0]}: must be one of {', '.join(run.name for run in RUNS)}")
    while missing := {need for name in wanted for need in needs(jobs[name][0])} - wanted:
        wanted |= missing
    return {name: job for name, job in jobs.items() if name in wanted and name not in done}


def held_out_rows(run: Run, places: Places, quick: bool) -> int | None:
    flags = flags_of(run, quick)
    if "eval-data" not in flags:
        return None
    return min(len(read(Path(places.fill(flags["eval-data"])))), flags.get("max-eval-rows", MAX_EVAL_ROWS))


def result_of(name: str, run: Run, seed: int, places: Places, quick: bool) -> dict[str, Any]:
    """Return a finished run's held-out metrics at every evaluation."""
    records = list(read_jsonl(Path(places.runs) / name / "metrics.jsonl"))
    points = [
        {"step": record["step"], **{key: value for key, value in record.items() if key.startswith("eval/")}}
        for record in records
        if any(key.startswith("eval/") for key in record)
    ]
    return {
        "points": points, "steps": max(record["step"] for record in records),
        "train_s": sum(record.get("time/step_s", 0.0) for record in records),
        "held_out": held_out_rows(run, places, quick),
    }  # fmt: skip


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def run(
    model: Path,
    data: Path,
    out: Path,
    only: tuple[str, ...] = (),
    jobs: int = 4,
    stop_after: float | None = None,
    quick: bool = False,
) -> None:
    """Run everything that is not in OUT/results.jsonl.

    Args:
        model: Folder of SmolLM2-135M-Instruct.
        data: Folder that `rows` wrote.
        out: Folder for runs, logs and results.jsonl.
        only: Names of runs, with or without the seed; what they need is run too. None given: all.
        jobs: Runs that share the GPU.
        stop_after: Seconds after which no further run is started. None: no limit.
        quick: One step of a few rows each, to see that all of it works; the page refuses such results.
    """
    require_commit()
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    results = out / RESULTS
    places = Places(model=str(model.resolve()), data=str(data.resolve()), runs=str(out / "runs"))
    kept = {need for run, _ in all_jobs().values() for need in needs(run)}
    done = {row["name"] for row in read(results) if "failed" not in row} if results.is_file() else set()
    done -= {name for name in kept if not (out / "runs" / name / "final").is_dir()}  # other runs need their weights
    waiting, failed = chosen_jobs(only, done), []
    started = time.monotonic()
    running: dict[str, tuple[subprocess.Popen, float]] = {}

    def add(name: str, wall_s: float, **more: Any) -> None:
        run, seed = all_jobs()[name]
        row = {
            "name": name, "run": run.name, "task": run.task, "method": run.method, "seed": seed, "wall_s": wall_s,
            "command": shlex.join(["python", "-m", "trainer", *words_of(name, run, seed, SHOWN, quick)]),
            "judges": run.judges, "jobs": jobs, "quick": quick, "commit": commit(), "hardware": hardware(),
            "versions": versions(), **more,
        }  # fmt: skip
        append(results, row)
        if "failed" in more:
            failed.append(name)
        else:
            done.add(name)
        end = more.get("failed") or describe(run, more["points"])
        print(f"[{time.monotonic() - started:4.0f} s] {name}: {wall_s:.0f} s, {end}", flush=True)

    try:
        while waiting or running:
            for name in [name for name, (run, _) in waiting.items() if needs(run) & set(failed)]:
                run, _ = waiting.pop(name)
                add(name, 0.0, failed=f"needs {', '.join(sorted(needs(run) & set(failed)))}, which failed")
            late = stop_after is not None and time.monotonic() - started > stop_after
            if late and waiting:
                print(f"not started after {stop_after:.0f} s: {', '.join(waiting)}; run the command again", flush=True)
                waiting = {}
            for name in [name for name, (run, _) in waiting.items() if needs(run) <= done]:
                if len(running) == jobs:
                    break
                run, seed = waiting.pop(name)
                command = [*TRAINER, *words_of(name, run, seed, places, quick)]
                with (out / f"{name}.log").open("w") as log:
                    child = subprocess.Popen(
                        [*command, "--overwrite-output-dir"], cwd=out, env=environment(), stdout=log, stderr=log
                    )
                running[name] = child, time.monotonic()
            for name in [name for name, (child, _) in running.items() if child.poll() is not None]:
                child, began = running.pop(name)
                run, seed = all_jobs()[name]
                wall_s = time.monotonic() - began
                if child.returncode:
                    add(name, wall_s, failed=f"exit status {child.returncode}: {last_line(out / f'{name}.log')}")
                    continue
                add(name, wall_s, **result_of(name, run, seed, places, quick))
                if name not in kept:  # unused weights
                    shutil.rmtree(out / "runs" / name / "final", ignore_errors=True)
            time.sleep(POLL_S)
    finally:
        for child, _ in running.values():
            child.terminate()
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def describe(run: Run, points: list[dict[str, Any]]) -> str:
    """Format the first and last value of each metric."""
    said = []
    for name, metric in TASKS[run.task].metrics.items():
        values = [point[name] for point in points if name in point]
        if values:
            said.append(f"{metric.label} {' -> '.join(f'{value:.3f}' for value in (values[0], values[-1]))}")
    return ", ".join(said) or "done"


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"rows": rows, "run": run})
