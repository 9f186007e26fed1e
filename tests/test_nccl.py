"""Several ranks over NCCL vs. one process: gradients, runs, checkpoints, failures.

    pytest -m gpu tests/test_nccl.py       # one GPU is enough: each rank is a node of its own (tests/entry.py)

Differences go to STROP_NCCL_TABLE, a file of JSON lines, if that variable is set.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.entry import environment, metrics, rank_environments, run_ranks
from tests.ranks import compiled, slices
from tests.test_gpu_runs import BY_ROUNDING, CLOCKS, EXACT, LOCAL, METHODS, REFERENCED
from tests.test_ranks import ALL, FOUR, SHARDED, SHARED, checked
from trainer.__main__ import main
from trainer.parallel.watch import HUNG

pytestmark = pytest.mark.gpu

ONCE_EACH = ("sft-untied", "dpo-lora", "kto", "grpo", "ebft-strided")
GRADIENTS = {
    "fsdp": (2, [f"fsdp:{name}" for name in ALL]),
    "replicate": (2, [f"replicate:{name}" for name in ALL]),
    "copies, once, offload": (2, [f"{mode}:{name}" for mode in ("copies", "once", "offload") for name in ONCE_EACH]),
    "context": (2, [f"{mode}/2:{name}" for mode in ("replicate", "fsdp") for name in (*SHARED, *slices.CASES)]),
    "pairs of four": (4, [f"pairs:{name}" for name in SHARDED]),
    "compiled": (2, [*(f"fsdp:{name}" for name in compiled.CASES), "copies:compiled-recomputed", "offload:compiled"]),
    "context of four": (4, [f"fsdp/2:{name}" for name in FOUR]),
}


def record(kind: str, name: str, **values: Any) -> None:
    if table := os.environ.get("STROP_NCCL_TABLE"):
        with open(table, "a") as file:
            print(json.dumps({"kind": kind, "name": name, **values}), file=file)


def nodes(*words: Any, cwd: Path, num_ranks: int = 2, **options: Any) -> Any:
    return run_ranks(*map(str, words), cwd=cwd, num_ranks=num_ranks, nodes=True, **options)


@pytest.mark.parametrize("kind", GRADIENTS)
def test_gradients_match_one_process(kind, tmp_path):
    """float64, as over gloo (tests/test_ranks.py)."""
    num_ranks, words = GRADIENTS[kind]
    started = time.monotonic()
    done = checked(
        tuple(words), nodes("-m", "tests.ranks.main", *words, cwd=tmp_path, num_ranks=num_ranks, timeout=500)
    )
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [result["case"] for result in results] == words
    worst = max(results, key=lambda result: result["gradient"])
    record("gradients", kind, ranks=num_ranks, cases=len(words), worst=worst["case"], gradient=worst["gradient"],
           seconds=time.monotonic() - started)  # fmt: skip
    for result in results:
        assert result["gradient"] < 1e-11 and result["norm"] < 1e-11, result
        assert result["clipped"] == pytest.approx(1e-3, rel=1e-4) and result["unlike"] == {}, result


# Runs through the entry point, in float32.
STEPS = ("--max-steps", "3", "--eval-steps", "3", "--save-steps", "0", *EXACT)
LORA = ("--lora.r", "4")
COMPILED, CHECKPOINTED = ("--parallel.mode", "fsdp", "--compile"), ("--gradient-checkpointing",)
RUNS: dict[str, tuple[int, str, tuple[str, ...], tuple[str, ...]]] = {  # ranks, method, flags, flags of several ranks
    **{f"{method}, fsdp": (2, method, (), ("--parallel.mode", "fsdp")) for method in METHODS},
    **{f"{method}, replicate": (2, method, (), ("--parallel.mode", "replicate")) for method in ("dpo", "grpo", "ppo")},
    "grpo, pairs of four": (4, "grpo", (), ("--parallel.shard", "2")),
    "sft, pairs of four": (4, "sft", (), ("--parallel.shard", "2")),
    "sft, context": (2, "sft", (), ("--parallel.mode", "replicate", "--parallel.context", "2")),
    "grpo, context x fsdp": (4, "grpo", (), ("--parallel.mode", "fsdp", "--parallel.context", "2")),
    "sft, offload": (2, "sft", (), ("--parallel.mode", "fsdp", "--parallel.cpu-offload")),
    "grpo, offload": (2, "grpo", (), ("--parallel.mode", "fsdp", "--parallel.cpu-offload")),
    "dpo, once": (2, "dpo", (), ("--parallel.mode", "fsdp", "--parallel.reduce-once")),
    "grpo, lora, fsdp": (2, "grpo", LORA, ("--parallel.mode", "fsdp")),
    "dpo, lora, replicate": (2, "dpo", LORA, ("--parallel.mode", "replicate")),
    "dpo, 4 bits": (2, "dpo", (*LORA, "--load-in-4bit"), ()),
    "grpo, 4 bits": (2, "grpo", (*LORA, "--load-in-4bit"), ()),
    "sft, compiled, replicate": (2, "sft", ("--compile",), ("--parallel.mode", "replicate")),
    # Against one process without --compile and without checkpointing.
    "sft, compiled, fsdp": (2, "sft", (), COMPILED),
    "sft, compiled, checkpointed, fsdp": (2, "sft", (), (*COMPILED, *CHECKPOINTED)),
    "sft, compiled, checkpointed, offload": (2, "sft", (), (*COMPILED, *CHECKPOINTED, "--parallel.cpu-offload")),
    "sft, lora, compiled, fsdp": (2, "sft", LORA, COMPILED),
    "dpo, lora, compiled, checkpointed, fsdp": (2, "dpo", LORA, (*COMPILED, *CHECKPOINTED)),
    "grpo, compiled, checkpointed, fsdp": (2, "grpo", (), (*COMPILED, *CHECKPOINTED)),
    "dpo, 4 bits, compiled, checkpointed": (2, "dpo", (*LORA, "--load-in-4bit"), ("--compile", *CHECKPOINTED)),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Iterator[Any]:
    """Metrics of one process, by method and flags."""
    folder, found = tmp_path_factory.mktemp("alone"), {}

    def run(method: str, flags: tuple[str, ...]) -> list[dict[str, Any]]:
        if (method, flags) not in found:
            out = folder / str(len(found))
            assert main([*METHODS[method], *STEPS, *flags, "--output-dir", str(out)]) == 0
            found[method, flags] = metrics(out)
        return found[method, flags]

    yield run
    torch._dynamo.reset()


def with_batch(words: tuple[str, ...], num_ranks: int) -> list[str]:
    """The same step over several ranks: each has its part of the batch."""
    words = list(words)
    at = words.index("--per-device-train-batch-size") + 1
    words[at] = str(int(words[at]) // num_ranks)
    return words


def differences(found: list[dict[str, Any]], expected: list[dict[str, Any]], skip: tuple[str, ...]) -> dict[str, float]:
    """Largest relative difference of each metric; inf if only one of the runs has it."""
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    worst: dict[str, float] = {}
    for a, b in zip(found, expected, strict=True):
        for name in (a.keys() | b.keys()) - {"step"}:
            if not name.startswith((*CLOCKS, *skip)):
                apart = abs(a[name] - b[name]) / max(abs(b[name]), 1e-2) if name in a and name in b else float("inf")
                worst[name] = max(worst.get(name, 0.0), apart)
    return worst


@pytest.mark.parametrize("name", RUNS)
def test_runs_match_one_process(name, alone, tmp_path):
    num_ranks, method, flags, parallel = RUNS[name]
    expected = alone(method, flags)
    started = time.monotonic()
    words = [*with_batch(METHODS[method], num_ranks), *STEPS, *flags, *parallel, "--output-dir", "run"]
    checked((name,), nodes("-m", "trainer", *words, cwd=tmp_path, num_ranks=num_ranks))
    skip = ("rollout/time", *(BY_ROUNDING if method in REFERENCED else ()))
    worst = differences(metrics(tmp_path / "run"), expected, skip)
    top = sorted(worst.items(), key=lambda item: -item[1])[:3]
    record("run", name, ranks=num_ranks, loss=worst.get("loss/total"), norm=worst.get("optim/grad_norm"), top=top,
           seconds=time.monotonic() - started)  # fmt: skip
    assert worst["loss/total"] < 1e-3 and worst["optim/grad_norm"] < 1e-3, top


def test_two_ranks_save_and_one_and_four_load(alone, tmp_path):
    flags = (*METHODS["sft"], "--max-steps", "4", "--save-steps", "2", *EXACT)
    assert main([*flags, "--output-dir", str(tmp_path / "whole")]) == 0
    sharded = ("--parallel.mode", "fsdp")
    words = [*with_batch(flags, 2), *sharded, "--output-dir", "two"]
    checked(("two",), nodes("-m", "trainer", *words, cwd=tmp_path))
    for num_ranks in (1, 4):
        out = tmp_path / f"by-{num_ranks}"
        shutil.copytree(tmp_path / "two", out)
        words = ["--resume", str(out / "checkpoints" / "step-00000002"), "--per-device-train-batch-size",
                 str(8 // num_ranks)]  # fmt: skip
        words += ["--parallel.mode", "fsdp" if num_ranks > 1 else "auto"]
        checked((num_ranks,), nodes("-m", "trainer", *words, cwd=tmp_path, num_ranks=num_ranks))
        worst = differences(metrics(out), metrics(tmp_path / "whole"), ())
        record("checkpoint", f"2 ranks to {num_ranks}", loss=worst["loss/total"], norm=worst["optim/grad_norm"])
        assert worst["loss/total"] < 1e-4 and worst["optim/grad_norm"] < 1e-3, worst


ROLLOUT = (
    "--method", "grpo", "--data", "task:addition:split=train,size=256", *LOCAL, "--parallel.mode", "fsdp",
    "--per-device-train-batch-size", "32", "--max-prompt-length", "64", "--max-completion-length", "128",
    "--max-steps", "2", "--save-steps", "0", "--gradient-checkpointing", "--output-dir", "run",
)  # fmt: skip


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("flags", [(), ("--lora.r", "16")], ids=["full", "lora"])
def test_sampling_from_shards_takes_the_planned_memory(flags, num_ranks, tmp_path):
    """One rank of several (tests/ranks/fake.py), which has the command for one of eight of a 32B model."""
    command = [sys.executable, "-m", "tests.ranks.fake", str(num_ranks), "--model", "qwen3-0.6b", *ROLLOUT, *flags]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    record("memory", " ".join(flags) or "full", ranks=num_ranks, **result)
    assert result["planned_sampling"] == pytest.approx(result["sampling"], rel=0.05), result


FAULTS = """
import os, signal, sys, time
from types import SimpleNamespace
import torch
from trainer.__main__ import train
from trainer.parallel.comm import all_sum, rank
def fault(cfg):
    x = torch.ones(1 << 20, device="cuda")
    for n in range(3):
        all_sum(x, "warm-up").sum().item()
    if rank() == 1:
        time.sleep(1)  # until the other rank has received the last sum
        if sys.argv[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    float(all_sum(x, "count of tokens").sum())
limits = SimpleNamespace(parallel=SimpleNamespace(timeout_s=5.0, context=1))
sys.exit(train(SimpleNamespace(train=fault), limits, tell=lambda: True))
"""


@pytest.mark.parametrize("fault", ["kill", "hang"])
def test_the_other_rank_of_a_lost_or_hung_rank_exits_with_a_message(fault, tmp_path):
    (tmp_path / "fault.py").write_text(FAULTS)
    started = time.monotonic()
    command = [sys.executable, "fault.py", fault]
    first, second = (
        subprocess.Popen(command, cwd=tmp_path, env=env | {"TMPDIR": str(tmp_path)}, stderr=subprocess.PIPE, text=True)
        for env in rank_environments(2, nodes=True)
    )
    try:
        _, said = first.communicate(timeout=60)
    finally:
        second.kill()
        second.communicate()
    seconds = time.monotonic() - started
    record("fault", fault, seconds=seconds, code=first.returncode, said=said[-1500:])
    assert first.returncode != 0 and "count of tokens" in said, said
    if fault == "hang":
        assert first.returncode == HUNG
        (trace,) = tmp_path.glob("strop-nccl-*-rank-0.json")
        assert json.loads(trace.read_text())["entries"]
