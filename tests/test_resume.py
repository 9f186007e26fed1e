"""kill -9 anywhere, --resume, and the metrics are those of a run that was never broken."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.entry import environment, metrics, repeatable, run_ok
from trainer.__main__ import main

STEPS = 8
GRPO = [
    "--method", "grpo", "--max-steps", STEPS, "--save-steps", 2, "--eval-steps", 3, "--seed", 5,
    "--per-device-train-batch-size", 16, "--eval-data", "task:addition:split=eval,size=20",
]  # fmt: skip
VARIANTS = {
    "full": GRPO,
    "lora, two iterations, kl": [*GRPO, "--lora.r", 4, "--lora.dropout", 0.1, "--num-iterations", 2, "--beta", 0.1],
    "replay, re-rolls, resamples, gdpo": [
        "--method",
        "gdpo",
        *GRPO[2:],
        "--replay-buffer-size",
        8,
        "--reroll-start-fraction",
        0.0,
        "--dynamic-sampling",
    ],
    "sft": ["--method", "sft", "--max-steps", STEPS, "--save-steps", 3, "--per-device-train-batch-size", 16],
}
EBFT = {
    "structured": [
        "--method", "ebft", *GRPO[2:-2], "--lora.r", 4, "--replay-buffer-size", 8, "--ce-coef", 0.1, "--use-whitening",
        "--data", "task:addition:split=train,size=64", "--eval-data", "task:addition:split=eval,size=4",
    ],
    "strided": [
        "--method", "ebft", "--mode", "strided", *GRPO[2:-2], "--per-device-train-batch-size", 2, "--stride", 8,
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


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in VARIANTS]
)
def test_killed_and_resumed_equals_unbroken(name, tmp_path):
    argv = VARIANTS[name]
    run_ok(*argv, "--output-dir", tmp_path / "whole", cwd=tmp_path)
    start_and_kill(argv, tmp_path / "broken", at_step=random.Random(name).randrange(1, STEPS))
    run_ok("--resume", "--output-dir", tmp_path / "broken", cwd=tmp_path)
    whole, broken = metrics(tmp_path / "whole"), metrics(tmp_path / "broken")
    assert [row["step"] for row in broken] == list(range(STEPS + 1))
    assert repeatable(broken) == repeatable(whole)
    assert (tmp_path / "broken" / "samples.jsonl").exists() == (tmp_path / "whole" / "samples.jsonl").exists()
    if argv is not VARIANTS["sft"]:
        assert (tmp_path / "broken" / "samples.jsonl").read_text() == (tmp_path / "whole" / "samples.jsonl").read_text()


@pytest.mark.parametrize("mode", EBFT)
def test_ebft_goes_on_from_a_checkpoint_as_if_unbroken(mode, tmp_path, monkeypatch):
    """In this process: the run as it was when it had written five steps, and a checkpoint of the fourth alone."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert main([str(word) for word in [*EBFT[mode], "--output-dir", "whole"]]) == 0
        shutil.copytree("whole", "broken", ignore=shutil.ignore_patterns("final", "report.html", "step-*[!4]"))
        for name in ("metrics.jsonl", "samples.jsonl"):
            rows = Path("whole", name).read_text().splitlines(keepends=True)
            Path("broken", name).write_text("".join(row for row in rows if json.loads(row)["step"] <= 5))
        assert [path.name for path in Path("broken/checkpoints").iterdir()] == ["step-00000004"]
        assert main(["--resume", "--output-dir", "broken"]) == 0
    finally:
        torch.set_num_threads(threads)
    assert [row["step"] for row in metrics(tmp_path / "broken")] == list(range(STEPS + 1))
    assert repeatable(metrics(tmp_path / "broken")) == repeatable(metrics(tmp_path / "whole"))
    assert Path("broken/samples.jsonl").read_text() == Path("whole/samples.jsonl").read_text()


def test_corrupt_checkpoint_falls_back_and_says_so(tmp_path):
    run_ok(*GRPO, "--output-dir", tmp_path / "run", cwd=tmp_path)
    before = repeatable(metrics(tmp_path / "run"))
    weights = tmp_path / "run" / "checkpoints" / f"step-{STEPS:08d}" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    done = run_ok("--resume", tmp_path / "run", cwd=tmp_path)
    assert f"step-{STEPS:08d} is damaged (model.safetensors" in done.stderr
    assert f"step {STEPS - 2}, where this run resumes" in done.stderr
    assert repeatable(metrics(tmp_path / "run")) == before
