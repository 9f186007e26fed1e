"""SIGTERM: the step finishes, a checkpoint is saved, no process is left, and the resumed run equals an unbroken one.

Tests run the real entry point. `PATCHES` is code that runs first, to stop the run at a known point.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.entry import environment, metrics, processes_with, repeatable
from trainer.__main__ import main
from trainer.run.checkpoint import find_problem, list_checkpoints
from trainer.run.stop import EXIT_CODE

STEPS = 8
GRPO = [
    "--method", "grpo", "--max-steps", STEPS, "--save-steps", 0, "--eval-steps", 3, "--seed", 5,
    "--per-device-train-batch-size", 8, "--eval-data", "task:addition:split=eval,size=10", "--num-iterations", 2,
    "--data", "task:addition:split=train,size=256", "--reward-num-workers", 1,
]  # fmt: skip
SFT = [
    "--method", "sft", "--max-steps", STEPS, "--save-steps", 2, "--per-device-train-batch-size", 8,
    "--data", "task:addition:split=sft,size=64", "--eval-data", "task:addition:split=eval,size=5",
]  # fmt: skip
TERM = "os.kill(os.getpid(), signal.SIGTERM)"
START = (
    "import os, signal, sys, time\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell ignores SIGINT for background jobs
    "from trainer import __main__ as entry\n{patch}\nsys.exit(entry.main())"
)
PATCHES = {
    "loading": "from trainer.methods import sft\nsft.open_policy = lambda *a, **k: (print('here', flush=True), "
    "time.sleep(60))",
    "folder": f"import trainer.run.run as r\nwrite = r.save_config\nr.save_config = lambda *a: ({TERM}, write(*a))",
    "save": "import trainer.run.run as r\nd = r.describe_model\n"
    f"r.describe_model = lambda *a, **k: ({TERM}, d(*a, **k))",
    "hang": "from trainer.methods import sft\nlater = iter([sft.backward] * 3)\n"
    "hang = lambda *a: (print('here', flush=True), time.sleep(60))\n"
    "sft.backward = lambda *a: next(later, hang)(*a)",
    "failure": "from trainer.methods import sft\nlater = iter([sft.backward] * 3)\n"
    f"def fail(*a):\n    {TERM}\n    raise ValueError('no server is left')\n"
    "sft.backward = lambda *a: next(later, fail)(*a)",
}


def start(argv: list, cwd: Path, patch: str = "", **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", START.format(patch=patch), *map(str, argv)]
    return subprocess.Popen(
        command, cwd=cwd, env=environment() | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run_here(*argv: object) -> None:
    """Run in this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in environment(): rounding depends on it
    try:
        assert main([str(word) for word in argv]) == 0
    finally:
        torch.set_num_threads(threads)


def last_line(process: subprocess.Popen[str], timeout: float = 120) -> str:
    """Wait for a run stopped by SIGTERM; return the last line of its stderr."""
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == EXIT_CODE == 143, f"{process.returncode}\n{out[-2000:]}\n{err[-3000:]}"
    assert "Traceback" not in err
    return err.strip().splitlines()[-1]


def wait_for_line(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    assert any(text in line for line in process.stdout), f"the process ended without a line {text!r}"


def steps_saved(folder: Path) -> list[int]:
    checkpoints = list_checkpoints(folder / "checkpoints")
    assert not [problem for _, path in checkpoints if (problem := find_problem(path))]
    return [step for step, _ in checkpoints]


@pytest.mark.slow
def test_sigterm_saves_and_the_resumed_run_equals_an_unbroken_one(tmp_path):
    marker = f"STROP_TEST_RUN={tmp_path}"
    run_here(*GRPO, "--output-dir", tmp_path / "whole")
    process = start([*GRPO, "--output-dir", tmp_path / "run"], tmp_path, **dict([marker.split("=", 1)]))
    wait_for_line(process, f"step 3/{STEPS}")
    assert len(processes_with(marker)) > 1, "a reward worker is running"
    process.send_signal(signal.SIGTERM)
    line = last_line(process)
    (step,) = steps_saved(tmp_path / "run")  # although save_steps is 0
    assert step % 2 == 0 and 4 <= step < STEPS, "after all steps on one rollout"
    assert line == f"stopped by SIGTERM after step {step}, saved; continue with --resume {tmp_path / 'run'}"
    assert not processes_with(marker)
    assert not (tmp_path / "run" / "final").exists()
    run_here("--resume", tmp_path / "run")
    assert repeatable(metrics(tmp_path / "run")) == repeatable(metrics(tmp_path / "whole"))
    for name in ("samples.jsonl", "final/model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.slow
def test_sigterm_while_loading_ends_immediately_and_leaves_no_folder(tmp_path):
    process = start([*SFT, "--output-dir", tmp_path / "run"], tmp_path, PATCHES["loading"])
    wait_for_line(process, "here")
    process.send_signal(signal.SIGTERM)
    assert "while loading; there was nothing to save" in last_line(process, timeout=20)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_sigterm_while_creating_the_folder_leaves_a_resumable_folder(tmp_path):
    process = start([*SFT, "--output-dir", tmp_path / "run"], tmp_path, PATCHES["folder"])
    assert "before the first step" in last_line(process)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".lock", "config.yaml", "run_id"}


@pytest.mark.slow
def test_sigterm_during_a_save_lets_it_finish(tmp_path):
    process = start([*SFT, "--output-dir", tmp_path / "run"], tmp_path, PATCHES["save"])
    assert "after step 2, saved" in last_line(process)
    assert steps_saved(tmp_path / "run") == [2]


@pytest.mark.slow
def test_hanging_step_is_aborted_after_the_grace_period(tmp_path):
    argv = [*SFT, "--output-dir", tmp_path / "run", "--stop-grace-s", 0.5]
    process = start(argv, tmp_path, PATCHES["hang"])
    wait_for_line(process, "here")
    start_time = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert "stop_grace_s=0.5" in last_line(process)
    assert 0.5 <= time.monotonic() - start_time < 10
    assert steps_saved(tmp_path / "run") == [2]  # step 3 was finished, step 4 was running


@pytest.mark.slow
def test_step_that_fails_after_sigterm_counts_as_a_stop(tmp_path):
    """Stopping a job also stops its servers, so the trainer's last step may fail."""
    process = start([*SFT, "--output-dir", tmp_path / "run"], tmp_path, PATCHES["failure"])
    line = last_line(process)
    assert "stopped by SIGTERM" in line and "(no server is left)" in line
    assert steps_saved(tmp_path / "run") == [2]


@pytest.mark.slow
def test_ctrl_c_prints_how_to_continue(tmp_path):
    process = start([*SFT, "--output-dir", tmp_path / "run"], tmp_path, PATCHES["hang"])
    wait_for_line(process, "here")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    said = f"interrupted after step 3; continue from step 2 with: python -m trainer --resume {tmp_path / 'run'}"
    assert process.returncode == 130 and err.strip().endswith(said)


FORK = """
import os, signal, time
from trainer.run import stop
with stop.end_on_sigterm():
    stop.work_begins()
    child = os.fork()
    if child == 0:
        time.sleep(60)
    time.sleep(0.2)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    time.sleep(0.2)
    assert not stop.STOP.signalled
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.STOP.signalled
"""


def test_signal_to_a_fork_does_not_stop_the_parent():
    done = subprocess.run([sys.executable, "-c", FORK], env=environment(), cwd=Path(__file__).parents[1], timeout=60)
    assert done.returncode == 0


@pytest.mark.vllm
@pytest.mark.slow  # starts a server
def test_sigterm_ends_the_servers(tmp_path):
    marker = f"STROP_TEST_RUN={tmp_path}"
    argv = [*GRPO[:-2], "--rollout.engine", "vllm", "--output-dir", tmp_path / "run"]
    process = start(argv, tmp_path, **dict([marker.split("=", 1)]))
    wait_for_line(process, f"step 3/{STEPS}")
    process.send_signal(signal.SIGTERM)
    assert "saved" in last_line(process)
    assert not processes_with(marker)
