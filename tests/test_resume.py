"""kill -9 anywhere, --resume, and the metrics are those of a run that was never broken."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.entry import environment, metrics, repeatable, run_python
from trainer.__main__ import main

STEPS = 6
GRPO = [
    "--method", "grpo", "--max-steps", STEPS, "--save-steps", 2, "--eval-steps", 3, "--seed", 5,
    "--per-device-train-batch-size", 16, "--data", "task:addition:split=train,size=256",
    "--eval-data", "task:addition:split=eval,size=8",
]  # fmt: skip
VARIANTS = {
    "full": GRPO,
    "lora, two iterations, kl": [
        *GRPO,
        "--lora.r",
        4,
        "--lora.dropout",
        0.1,
        "--num-iterations",
        2,
        "--beta",
        0.1,
        "--top-p",
        0.95,
    ],
    "replay, re-rolls, resamples, gdpo": [
        "--method",
        "gdpo",
        *GRPO[2:],
        "--replay-buffer-size",
        8,
        "--reroll-start-fraction",
        0.0,
        "--dynamic-sampling",
        "--top-k",
        20,
    ],
    "sft": ["--method", "sft", "--max-steps", STEPS, "--save-steps", 3, "--per-device-train-batch-size", 16],
}
EBFT = {
    "structured": [
        "--method", "ebft", *GRPO[2:-4], "--lora.r", 4, "--replay-buffer-size", 8, "--ce-coef", 0.1, "--use-whitening",
        "--data", "task:addition:split=train,size=64", "--eval-data", "task:addition:split=eval,size=4",
    ],
    "strided": [
        "--method", "ebft", "--mode", "strided", *GRPO[2:-4], "--per-device-train-batch-size", 2, "--stride", 8,
        "--data", "task:steps:split=sft,size=16,difficulty=5",
        "--eval-data", "task:steps:split=eval,size=4,difficulty=5",
    ],
}  # fmt: skip
VARIANTS |= {f"ebft, {mode}": argv for mode, argv in EBFT.items()}
# Those of ebft are below, without the starts of processes; the loop of sft is that of the offline methods' own tests.
SLOW = [*(f"ebft, {mode}" for mode in EBFT), "full", "sft", "replay, re-rolls, resamples, gdpo"]


def start_and_kill(argv: list, folder: Path, at_step: int, threads: int = 1, timeout: float = 240) -> None:
    """Kill the process without warning once metrics.jsonl shows the step."""
    command = [sys.executable, "-m", "trainer", *map(str, argv), "--output-dir", str(folder)]
    process = subprocess.Popen(command, cwd=folder.parent, env=environment(threads), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + timeout
    log = folder / "metrics.jsonl"
    while process.poll() is None and time.monotonic() < deadline:
        if log.exists() and f'"step": {at_step},' in log.read_text():
            break
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"


KILL_ITSELF = """
import os, signal, sys, threading, time
from pathlib import Path

def kill(log=Path({log!r})):
    while not log.exists() or '"step": {at_step},' not in log.read_text():
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGKILL)

threading.Thread(target=kill, daemon=True).start()
from trainer import __main__ as entry
sys.exit(entry.main())
"""


def run_and_kill(argv: list, folder: Path, at_step: int) -> None:
    """As start_and_kill, in a copy of a loaded process: one of its threads kills it, wherever the others are."""
    script = folder.parent / "kill_itself.py"
    script.write_text(KILL_ITSELF.format(log=str(folder / "metrics.jsonl"), at_step=at_step))
    done = run_python(str(script), *map(str, argv), "--output-dir", str(folder), cwd=folder.parent)
    assert done.returncode == -signal.SIGKILL, f"the run ended before it could be killed: {done.stderr[-2000:]}"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As in the processes that are killed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def in_this_process(argv: list, folder: Path) -> None:
    assert main([*map(str, argv), "--output-dir", str(folder)]) == 0


def copy_as_if_killed(whole: Path, broken: Path, *, saved: int, logged: int) -> None:
    """The run as it was when it had a checkpoint of step `saved` and had logged step `logged`."""
    shutil.copytree(whole, broken, ignore=shutil.ignore_patterns("final", "report.html", f"step-*[!{saved}]"))
    for log in broken.glob("*.jsonl"):
        rows = log.read_text().splitlines(keepends=True)
        log.write_text("".join(row for row in rows if json.loads(row)["step"] <= logged))
    assert [path.name for path in (broken / "checkpoints").iterdir()] == [f"step-{saved:08d}"]


def check_equal(broken: Path, whole: Path) -> None:
    assert [row["step"] for row in metrics(broken)] == list(range(STEPS + 1))
    assert repeatable(metrics(broken)) == repeatable(metrics(whole))
    samples = [folder / "samples.jsonl" for folder in (broken, whole)]
    assert samples[0].exists() == samples[1].exists()
    assert not samples[0].exists() or samples[0].read_text() == samples[1].read_text()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in VARIANTS]
)
def test_killed_and_resumed_equals_unbroken(name, tmp_path, capfd):
    argv = VARIANTS[name]
    in_this_process(argv, tmp_path / "whole")
    run_and_kill(argv, tmp_path / "broken", at_step=random.Random(name).randrange(1, STEPS))
    in_this_process(["--resume"], tmp_path / "broken")
    check_equal(tmp_path / "broken", tmp_path / "whole")
    if name not in SLOW:
        check_damaged_falls_back(tmp_path / "broken", tmp_path / "whole", capfd)


def check_damaged_falls_back(run: Path, whole: Path, capfd: pytest.CaptureFixture) -> None:
    """The newest checkpoint is damaged: the run says so, resumes from the one before, and has the same numbers."""
    weights = run / "checkpoints" / f"step-{STEPS:08d}" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    in_this_process(["--resume"], run)
    said = capfd.readouterr().err
    assert f"step-{STEPS:08d} is damaged (adapter_model.safetensors" in said
    assert f"step {STEPS - 2}, where this run resumes" in said
    check_equal(run, whole)


# A checkpoint after the fourth step is one between rollouts, of whatever number of steps.
FLAGS = {
    "moving reference": [
        "--beta", 0.1, "--sync-ref-model", "--ref-model-sync-steps", 3, "--minibatches-per-rollout", 2,
    ],
    "moving reference, kl in reward, a part": [
        "--method", "rloo", "--sync-ref-model", "--ref-model-sync-steps", 3, "--ref-model-mixup-alpha", 0.5,
        "--trained-parameters", "model.layers.[12]", "model.norm",
    ],
    "entropy target": ["--entropy-target", 0.4, "--entropy-coef-step", 0.05, "--minibatches-per-rollout", 2],
    "mini-batches": [
        "--minibatches-per-rollout", 2, "--num-iterations", 2, "--scale-rewards", "batch", "--entropy-target", 0.4,
        "--entropy-coef-step", 0.05,
    ],
    "partial rollouts": [
        "--rollout.partial", 0.5, "--num-generations", 4, "--dynamic-sampling", "--temperature", 1.5,
    ],
}  # fmt: skip
COVERED = ("moving reference", "entropy target")  # by "moving reference, kl in reward, a part" and "mini-batches"


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] if x in COVERED else []) for x in FLAGS])
def test_flags_of_sampling_go_on_from_a_checkpoint_as_if_unbroken(name, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    in_this_process([*GRPO, *FLAGS[name]], whole)
    copy_as_if_killed(whole, broken, saved=4, logged=5)
    in_this_process(["--resume"], broken)
    check_equal(broken, whole)


@pytest.mark.slow
@pytest.mark.parametrize("mode", EBFT)
def test_ebft_goes_on_from_a_checkpoint_as_if_unbroken(mode, tmp_path):
    """In this process: the run as it was when it had written five steps, and a checkpoint of the fourth alone."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    in_this_process(EBFT[mode], whole)
    copy_as_if_killed(whole, broken, saved=4, logged=5)
    in_this_process(["--resume"], broken)
    check_equal(broken, whole)
