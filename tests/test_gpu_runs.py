"""Every method on a GPU through the real entry point: two steps of the tiny model vs. the same run on the CPU.

    pytest -m gpu tests/test_gpu_runs.py                 # on a machine with a CUDA device
    STROP_RUNS_ON=cpu pytest tests/test_gpu_runs.py      # the same commands on any machine: check the flags

Each run is made once, sequentially in this process, and shared by tests. A second process without a GPU makes the CPU
twins at the same time; without a GPU a run is its own twin. Sampling methods use the in-process engine. Other tests
cover tools, rollout functions, and memory and parity over 300 steps.
"""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters as dynamo_counters

from rollout.model_folder import BUILTIN
from rollout.rewards.models import OutcomeReward, ProcessReward
from tests.entry import environment, metrics
from trainer.__main__ import main
from trainer.config.blocks import LoraConfig, ModelConfig
from trainer.metrics.metrics import Timer
from trainer.parallel.comm import pick_device
from trainer.policy.load import load_policy
from trainer.run.checkpoint import find_problem

ON_CPU = os.environ.get("STROP_RUNS_ON") == "cpu"
pytestmark = [] if ON_CPU else pytest.mark.gpu

COMMON = ("--max-steps", "2", "--eval-steps", "1", "--save-steps", "1")


def rows_of(task: str, split: str, batch: int, options: str = "") -> tuple[str, ...]:
    data, held_out = (f"task:{task}:split={name},size={size}{options}" for name, size in ((split, 64), ("eval", 8)))
    return ("--data", data, "--eval-data", held_out, "--per-device-train-batch-size", str(batch))


PAIRS = rows_of("addition", "train", 8)
LOCAL = ("--rollout.engine", "local")
GROUPS = (*rows_of("addition", "train", 32), *LOCAL)
METHODS = {
    "sft": ("--method", "sft", *rows_of("addition", "sft", 8)),
    **{name: ("--method", name, *PAIRS) for name in ("dpo", "ipo", "kto", "orpo", "simpo", "cpo", "rm")},
    "prm": ("--method", "prm", *rows_of("steps", "train", 8)),
    **{name: ("--method", name, *GROUPS) for name in ("grpo", "gdpo", "rloo", "opd", "sdpo", "online_dpo", "ppo")},
    "ebft-structured": ("--method", "ebft", "--mode", "structured", *GROUPS),
    "ebft-strided": ("--method", "ebft", "--mode", "strided", *rows_of("steps", "sft", 4, ",difficulty=5")),
}
FAMILIES = ("sft", "grpo", "ebft-structured")  # offline, groups, features
# Sampling methods draw other tokens in bfloat16.
SAMPLES = {"grpo", "gdpo", "rloo", "opd", "sdpo", "online_dpo", "ppo", "ebft-structured", "ebft-strided"}
REFERENCED = {"dpo", "ipo", "kto"}

EXACT = ("--dtype", "float32")
VARIANTS = {
    "full": EXACT,
    "lora": ("--lora.r", "4"),  # the device's default dtype: bfloat16 on a GPU
    "checkpointing": (*EXACT, "--gradient-checkpointing"),
    "bfloat16": ("--dtype", "bfloat16", "--trained-dtype", "bfloat16"),
    "compile": (*EXACT, "--compile"),
    "compile-checkpointing": (*EXACT, "--compile", "--gradient-checkpointing"),  # recomputed within the graph
    "copy": (*EXACT, "--ref", "copy"),
    "precomputed": (*EXACT, "--ref", "precomputed"),
    "4bit": ("--lora.r", "4", "--load-in-4bit"),
    "4bit-exact": (*EXACT, "--lora.r", "4", "--load-in-4bit"),
    "4bit-compile": (*EXACT, "--lora.r", "4", "--load-in-4bit", "--compile"),
    "adapter_off": ("--lora.r", "4", "--ref", "adapter_off"),
    "precomputed-lora": ("--lora.r", "4", "--ref", "precomputed"),
}
TWINS = ("full", "lora")  # also run on the CPU
GAPS = {"full": 1e-3, "bfloat16": 0.1, "lora": 0.1}  # maximum policy/behaviour_gap between engine and trainer

LOOKUP = ("--method", "grpo", *LOCAL, "--per-device-train-batch-size", "32", "--max-completion-length", "48",
          "--data", "task:lookup:split=train,size=64", "--eval-data", "task:lookup:split=eval,size=8")  # fmt: skip
TOOLS = ("--tools", "lookup", "--tool-format", "pythonic", "--max-turns", "3", "--reward-funcs", "exact_match",
         "length")  # fmt: skip
FUNCTION = """
from rollout.episodes.turns import Transcript, turn_seed


async def two_turns(client, prompt, seed):
    transcript = Transcript(prompt.ids)
    for turn in range(2):
        if turn:
            transcript.insert([20, 21, 22])
        transcript.add(made := await client.generate(transcript.ids, turn_seed(seed, turn), max_tokens=5 + seed % 9))
    return transcript.completion("stop", text=made.text, columns={"env_reward": seed % 3, "num_turns": 2})
"""

# Metrics that are not compared. While the policy equals its reference, pairs are won by rounding only.
CLOCKS = ("time/", "perf/", "mem/", "health/")
BY_ROUNDING = ("reward/accuracy", "eval/reward/accuracy", "eval/reward/auc")

CPU_RUNS = """
import json, sys
from trainer.__main__ import main
for argv in json.load(sys.stdin):
    if code := main(argv):
        sys.exit(code)
"""


class Runs:
    """Run folders by method and variant, made on first use; the CPU twins start immediately."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.codes = folder, {}
        twins = [] if ON_CPU else [self.command(method, variant, "cpu") for variant in TWINS for method in METHODS]
        (folder / "commands.json").write_text(json.dumps(twins))
        with (folder / "commands.json").open() as commands, (folder / "cpu.log").open("w") as log:
            self.twins = subprocess.Popen(
                [sys.executable, "-c", CPU_RUNS], stdin=commands, stdout=log, stderr=log, cwd=folder,
                env=environment(threads=2) | {"CUDA_VISIBLE_DEVICES": ""},
            )  # fmt: skip

    def command(self, method: str, variant: str, device: str) -> list[str]:
        cache = ("--ref-cache", str(self.folder / "cache" / variant)) if variant.startswith("precomputed") else ()
        run = ("--output-dir", str(self.folder / device / f"{method}-{variant}"))
        return [*METHODS[method], *COMMON, *VARIANTS[variant], *cache, *run]

    def here(self, method: str, variant: str) -> Path:
        """Run on this process's device; a failed run is not retried."""
        command = self.command(method, variant, "here")
        if (method, variant) not in self.codes:
            self.codes[method, variant] = "failed"
            self.codes[method, variant] = main(command)
        assert self.codes[method, variant] == 0, f"{self.codes[method, variant]}: {' '.join(command)}"
        return Path(command[-1])

    def on_cpu(self, method: str, variant: str) -> list[dict[str, Any]]:
        """Return the metrics of the CPU twin."""
        if ON_CPU:
            return metrics(self.here(method, variant))
        run = Path(self.command(method, variant, "cpu")[-1])
        while not (run / "report.html").exists():  # the last file of a run
            ended = self.twins.poll() is not None
            assert not ended or (run / "report.html").exists(), (self.folder / "cpu.log").read_text()[-3000:]
            time.sleep(0.1)
        return metrics(run)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Iterator[Runs]:
    runs = Runs(tmp_path_factory.mktemp("runs"))
    yield runs
    runs.twins.kill()
    runs.twins.wait()


def compared(row: dict[str, Any], skip: tuple[str, ...]) -> dict[str, float]:
    return {name: value for name, value in row.items() if not name.startswith((*CLOCKS, *skip))}


def alike(got: dict[str, Any], want: dict[str, Any], *, limit: float, skip: tuple[str, ...] = ()) -> None:
    """Check that both have the same metrics, equal within the relative or absolute `limit`."""
    got_metrics, want_metrics = compared(got, skip), compared(want, skip)
    assert got_metrics.keys() == want_metrics.keys()
    assert got_metrics == pytest.approx(want_metrics, rel=limit, abs=limit), f"step {got['step']}"


def check_run(run: Path, method: str) -> list[dict[str, Any]]:
    """Check the metrics and files of a finished run of two steps; return the metrics."""
    rows = metrics(run)
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert all(value is not None and math.isfinite(value) for value in row.values()), row
        assert {name for name in row if name.startswith("eval/")} >= {"eval/rows"}, row.keys()
    for row in rows[1:]:
        assert "loss/total" in row and row["optim/grad_norm"] > 0 and row["data/tokens_total"] > 0
    for step in (2,) if method == "ppo" else (1, 2):  # ppo saves between rollouts, and its rollout has two steps
        assert find_problem(run / "checkpoints" / f"step-{step:08d}") is None
    assert (run / "config.yaml").is_file() and "<html" in (run / "report.html").read_text()
    if method in SAMPLES:
        samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
        assert {row["step"] for row in samples} == ({1} if method == "ppo" else {1, 2})
    return rows


def check_final(run: Path, method: str) -> None:
    """Check that the exported model differs from the initial one, is finite, and loads."""
    (file,) = (run / "final").glob("*model.safetensors")
    trained = load_file(file)
    assert all(tensor.isfinite().all() for tensor in trained.values())
    if file.name.startswith("adapter"):
        assert any(tensor.any() for name, tensor in trained.items() if "lora_B" in name), "B starts at 0"
    else:
        start = load_file(Path(BUILTIN["builtin:tiny"]) / "model.safetensors")
        assert any(not torch.equal(trained[name].float(), start[name]) for name in trained.keys() & start.keys())
    if method in ("rm", "prm"):
        reward = (OutcomeReward if method == "rm" else ProcessReward)(str(run))
        (score,) = reward(["25"], ["12+13="])
        assert math.isfinite(score)
    else:  # load_policy compares its log-probs with transformers'
        load_policy(ModelConfig(model=str(run)), LoraConfig(), pick_device(), with_reference=False)


@pytest.mark.parametrize("method", METHODS)
def test_float32_matches_the_cpu(runs, method):
    rows, twin = check_run(runs.here(method, "full"), method), runs.on_cpu(method, "full")
    by_rounding = BY_ROUNDING if method in REFERENCED else ()
    alike(rows[0], twin[0], limit=3e-3, skip=by_rounding)
    alike(rows[1], twin[1], limit=3e-3, skip=(*by_rounding, "eval/"))  # eval/ uses the weights after the step
    if method not in SAMPLES:  # AdamW's first step has the same size for any gradient, even 1e-9
        assert rows[2]["loss/total"] == pytest.approx(twin[2]["loss/total"], rel=2e-2, abs=2e-2)
    check_final(runs.here(method, "full"), method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("variant", ["lora", "bfloat16"])
def test_low_precision_is_close_to_the_cpu(runs, variant, method):
    rows = check_run(runs.here(method, variant), method)
    about_the_same(rows[1], runs.on_cpu(method, "full" if variant == "bfloat16" else variant)[1], method)
    check_final(runs.here(method, variant), method)


def about_the_same(row: dict[str, Any], twin: dict[str, Any], method: str) -> None:
    """Compare the first step in bfloat16 with float32; sampling methods draw other tokens."""
    if method in SAMPLES:
        assert method == "online_dpo" or row["policy/behaviour_gap"] < 0.1  # online_dpo does not use engine log-probs
        assert row["policy/entropy"] == pytest.approx(twin["policy/entropy"], rel=0.3)
        return
    for name in ("loss/total", "policy/entropy"):
        if name in twin:  # a scorer has no entropy
            assert row[name] == pytest.approx(twin[name], rel=0.05, abs=0.05), name
    # With bfloat16 weights the residual stream is bfloat16 too: gradients of a new head (prm) are a third smaller.
    assert 0.5 < row["optim/grad_norm"] / twin["optim/grad_norm"] < 2


@pytest.mark.parametrize("method", METHODS)
def test_gradient_checkpointing_gives_the_same_metrics(runs, method):
    rows, plain = check_run(runs.here(method, "checkpointing"), method), metrics(runs.here(method, "full"))
    by_rounding = BY_ROUNDING if method in REFERENCED else ()
    alike(rows[1], plain[1], limit=1e-3, skip=(*by_rounding, "eval/"))


@pytest.mark.parametrize("method", sorted(REFERENCED))
@pytest.mark.parametrize("variant", ["copy", "precomputed", "adapter_off", "precomputed-lora"])
def test_every_reference_gives_the_same_first_step(runs, variant, method):
    """Other tests use auto: a copy, or the base with LoRA."""
    rows, is_lora = check_run(runs.here(method, variant), method), "lora" in VARIANTS[variant][0]
    if is_lora:
        about_the_same(rows[1], runs.on_cpu(method, "lora")[1], method)
    else:
        alike(rows[1], runs.on_cpu(method, "full")[1], limit=3e-3, skip=(*BY_ROUNDING, "eval/"))
    if variant.startswith("precomputed"):
        caches = {path.suffix for path in (runs.folder / "cache" / variant).iterdir()}
        assert caches == {".safetensors"}


@pytest.mark.parametrize("variant", ["compile", "compile-checkpointing"])
@pytest.mark.parametrize("method", FAMILIES)
def test_compiled_blocks_give_the_same_metrics(runs, method, variant):
    torch._dynamo.reset()  # dynamo stops after 64 graphs of a function, including those of other tests
    rows, plain = check_run(runs.here(method, variant), method), metrics(runs.here(method, "full"))
    torch._dynamo.reset()
    alike(rows[1], plain[1], limit=3e-3, skip=("eval/",))


@pytest.mark.parametrize("method", ["sft", "dpo", "grpo"])
def test_4_bit_base(runs, method):
    """The engine samples from the dequantised weights; compiled blocks give the same metrics."""
    low, exact = (check_run(runs.here(method, variant), method) for variant in ("4bit", "4bit-exact"))
    about_the_same(low[1], exact[1], method)
    check_final(runs.here(method, "4bit"), method)
    if method in SAMPLES:
        assert all(row["policy/behaviour_gap"] < GAPS["full"] for row in exact[1:])
    torch._dynamo.reset()
    compiled = check_run(runs.here(method, "4bit-compile"), method)
    torch._dynamo.reset()
    by_rounding = BY_ROUNDING if method in REFERENCED else ()
    alike(compiled[1], exact[1], limit=3e-3, skip=(*by_rounding, "eval/"))


@pytest.mark.parametrize("method", FAMILIES)
def test_resume_after_the_first_step_repeats_the_second(runs, method, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(runs.here(method, "full"), run)
    before = metrics(run)
    assert main(["--resume", str(run / "checkpoints" / "step-00000001")]) == 0
    after = check_run(run, method)
    assert after[:2] == before[:2]
    alike(after[2], before[2], limit=1e-3, skip=("eval/",))
    check_final(run, method)


@pytest.fixture(scope="module")
def caller(tmp_path_factory) -> Path:
    """A model that calls its tool in about 7 of 10 rows."""
    run = tmp_path_factory.mktemp("caller") / "run"
    recipe = Path(__file__).parents[1] / "trainer" / "recipes" / "sft_tools.yaml"
    data = "task:lookup:split=sft,size=12800,sloppy=0.3"
    assert main(["--config", str(recipe), "--data", data, "--logging-steps", "100", "--output-dir", str(run)]) == 0
    return run


@pytest.mark.parametrize("variant", GAPS)
def test_tools_between_turns(caller, variant, tmp_path):
    words = [*LOOKUP, *TOOLS, *COMMON, *VARIANTS[variant], "--model", str(caller)]
    assert main([*words, "--output-dir", str(tmp_path / "run")]) == 0
    rows = check_run(tmp_path / "run", "grpo")
    for row in rows[1:]:
        assert row["rollout/tool_calls"] > 0.3 and row["rollout/num_turns"] > 1.2
        assert row["policy/behaviour_gap"] < GAPS[variant]


@pytest.mark.parametrize("variant", GAPS)
def test_rollout_function_with_two_turns(variant, tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTION)
    words = [*LOOKUP, "--model", "builtin:tiny", "--rollout-func", f"{tmp_path}/mine.py:two_turns"]
    words += ["--reward-funcs", "env", *COMMON, *VARIANTS[variant], "--output-dir", str(tmp_path / "run")]
    assert main(words) == 0
    for row in check_run(tmp_path / "run", "grpo")[1:]:
        assert row["rollout/num_turns"] == 2 and row["policy/behaviour_gap"] < GAPS[variant]


@pytest.fixture
def steps(monkeypatch) -> list[tuple[int, int]]:
    """Record, after each step, the allocated GPU memory in bytes and the number of dynamo graphs so far."""
    records: list[tuple[int, int]] = []
    plain = Timer.later

    def record(self: Timer, num_tokens: int) -> Callable[[], dict[str, float]]:
        gc.collect()
        allocated = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        records.append((allocated, dynamo_counters["stats"]["unique_graphs"]))
        return plain(self, num_tokens)

    monkeypatch.setattr(Timer, "later", record)
    return records


@pytest.mark.slow
@pytest.mark.parametrize("variant", GAPS)
def test_300_steps_leak_no_memory_and_stay_on_policy(steps, variant, tmp_path):
    """Prompts and completions of various lengths; engine and trainer log-probs are compared in each step."""
    count = 30 if ON_CPU else 300
    words = ["--method", "grpo", *LOCAL, "--data", "task:addition:split=train,size=512", "--temperature", "1.3"]
    words += ["--max-completion-length", "40", "--per-device-train-batch-size", "64", "--max-steps", str(count)]
    # The cache grows at the first evaluation with a resident engine, because its prompts share no prefix.
    words += ["--eval-steps", "25", "--eval-data", "task:addition:split=eval,size=64", "--save-steps", "0"]
    assert main([*words, "--logging-steps", "50", *VARIANTS[variant], "--output-dir", str(tmp_path / "run")]) == 0
    rows = [row for row in metrics(tmp_path / "run") if row["step"] > 0]
    assert len(rows) == len(steps) == count
    assert len({row["rollout/len_max"] for row in rows}) > 2, "lengths must change"
    trained = [row for row in rows if "policy/behaviour_gap" in row]  # missing in a step without signal
    assert len(trained) > 0.8 * count
    too_large = {row["step"]: gap for row in trained if not (gap := row["policy/behaviour_gap"]) < GAPS[variant]}
    assert not too_large, too_large
    memory = [allocated for allocated, _ in steps]
    assert max(memory[count // 6 :]) <= max(memory[: count // 6]) + (4 << 20), [x >> 20 for x in memory]
    assert rows[-1]["mem/peak_gib"] <= rows[count // 6]["mem/peak_gib"] * 1.05 + 0.1


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["bfloat16", "lora"])
def test_nothing_is_compiled_after_the_second_step(steps, variant, tmp_path):
    torch._dynamo.reset()
    words = [*METHODS["grpo"], *VARIANTS[variant], "--compile", "--max-steps", "8", "--save-steps", "0"]
    # So many completions that no micro-batch fits into one tile of 128 tokens, which would be a separate graph.
    words += ["--max-completion-length", "24", "--temperature", "1.3", "--per-device-train-batch-size", "128"]
    assert main([*words, "--output-dir", str(tmp_path / "run")]) == 0
    torch._dynamo.reset()
    graphs = [count for _, count in steps]
    assert len(graphs) == 8 and graphs[0] > 0, graphs
    assert graphs[-1] == graphs[1], f"graphs after each step: {graphs}"
