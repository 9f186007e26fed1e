"""Whole runs of `python -m trainer --method grpo --rollout.engine vllm`, and what is left behind by each way to end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rollout.servers.command import TOKEN
from tests.entry import environment, metrics, processes_with

STEPS = 6
EVAL_ROWS = 64
QUICK = ("--max-steps", STEPS, "--eval-steps", 0, "--save-steps", 2, "--max-eval-rows", EVAL_ROWS)


def start(run_dir: Path, *argv: Any, **env: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "trainer", "--method", "grpo", "--rollout.engine", "vllm", *QUICK, *argv]
    if "--resume" not in argv:
        command += ["--output-dir", run_dir]
    log = (run_dir.parent / f"{run_dir.name}.log").open("ab")
    return subprocess.Popen(
        [str(word) for word in command], env=environment() | env, stdout=log, stderr=log, cwd=run_dir.parent
    )


def log_of(run_dir: Path) -> str:
    return (run_dir.parent / f"{run_dir.name}.log").read_text()


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen, timeout: float = 240.0) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and process.poll() is None:
        if (run_dir / "metrics.jsonl").exists() and any(row["step"] >= step for row in metrics(run_dir)):
            return
        time.sleep(0.1)
    raise AssertionError(f"step {step} was not reached\n{log_of(run_dir)[-3000:]}")


def servers_of(run_dir: Path) -> list[int]:
    """Processes that a run started or that are itself."""
    return processes_with(f"STROP_TEST_RUN={run_dir}")


def wait_gone(run_dir: Path, timeout: float = 30.0) -> list[int]:
    deadline = time.monotonic() + timeout
    while (left := servers_of(run_dir)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def api_servers(run_dir: Path) -> list[int]:
    """The servers of a run, without their guards and engines."""
    found = []
    for pid in servers_of(run_dir):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"vllm.entrypoints.openai.api_server" in command and b"-m" in command[:3]:
            found.append(pid)
    return found


COUNTING = """
import os
from rollout.rewards.functions import exact_match

def right_and_written_down(prompts, completions, answer):
    with open(os.environ["STROP_TEST_PROMPTS"], "a") as file:
        file.writelines(f"{prompt!r}\\n" for prompt in prompts)
    return exact_match(completions, answer)
"""


def test_one_of_two_servers_dies_in_the_middle_and_the_run_ends_as_if_nothing_had_happened(vllm_python, tmp_path):
    run, seen = tmp_path / "two", tmp_path / "prompts"
    (tmp_path / "counting.py").write_text(COUNTING)
    reward = ("--reward-funcs", f"{tmp_path}/counting.py:right_and_written_down")
    process = start(run, "--vllm.replicas", 2, *reward, STROP_TEST_RUN=str(run), STROP_TEST_PROMPTS=str(seen))
    try:
        wait_for_step(run, 2, process)
        victims = api_servers(run)
        assert len(victims) == 2
        os.killpg(os.getpgid(victims[0]), signal.SIGKILL)
        assert process.wait(timeout=300) == 0, log_of(run)[-3000:]
    finally:
        process.kill()
    rows = [row for row in metrics(run) if row["step"] > 0]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[-1]["rollout/server_out"] >= 1
    assert max(row["policy/behaviour_gap"] for row in rows) < 1e-4
    assert re.search(r"server [01] \(http://127\.0\.0\.1:\d+\): (doubted|out): ", log_of(run))
    # Every prompt of every step came back as one group, none was lost and none counted twice.
    counts = Counter(seen.read_text().splitlines())
    held_out, groups = 2 * EVAL_ROWS, STEPS * 16 * 8
    assert sum(counts.values()) == held_out + groups
    assert set(counts.values()) == {2, 8}
    assert wait_gone(run) == []


def test_ctrl_c_while_the_server_starts_leaves_nothing_behind(vllm_python, tmp_path):
    run = tmp_path / "interrupted"
    process = start(run, STROP_TEST_RUN=str(run))
    try:
        deadline = time.monotonic() + 120
        while not api_servers(run):
            assert process.poll() is None and time.monotonic() < deadline, log_of(run)[-3000:]
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        asked = time.monotonic()
        assert process.wait(timeout=60) == 130, log_of(run)[-2000:]
        assert time.monotonic() - asked < 6  # two seconds on a machine that does nothing else
        assert wait_gone(run) == []
    finally:
        process.kill()


def assert_refused(run: Path, holder: Path, pid: int, *argv: Any, **env: str) -> None:
    """A second trainer on a server that another run holds: one sentence, and nothing is left of it."""
    assert start(run, *argv, **env).wait(timeout=120) == 2
    said = rf"error: vllm\.url=http://\S+: {holder} \(host \S+, pid {pid}, user \S+\) has been training on it since "
    assert re.search(said, log_of(run).replace("\n", " ")) and "Traceback" not in log_of(run), log_of(run)
    assert not run.exists()


def test_a_trainer_killed_in_the_middle_of_a_transfer_is_resumed_on_the_same_server(tied_server, tmp_path):
    run = tmp_path / "killed"
    hold = tmp_path / "sitecustomize.py"  # waits inside the third push until it is killed
    hold.write_text(
        "import os, sys, time\n"
        "if os.environ.get('STROP_TEST_HOLD') and 'trainer' in ' '.join(sys.orig_argv):\n"
        "    from rollout.sync import process_group as pg\n"
        "    real, calls = pg.fill, [0]\n"
        "    def fill(*a):\n"
        "        calls[0] += 1\n"
        "        if calls[0] > 8:\n"
        "            open(os.environ['STROP_TEST_HOLD'], 'w').close(); time.sleep(600)\n"
        "        return real(*a)\n"
        "    pg.fill = fill\n"
    )
    env = {TOKEN: tied_server.token, "STROP_TEST_HOLD": str(tmp_path / "held")}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    url = ("--vllm.url", tied_server.url, "--sync.backend", "process_group", "--sync.bucket-mb", 1)
    process = start(run, *url, **env)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "held").exists():
            assert process.poll() is None and time.monotonic() < deadline, log_of(run)[-3000:]
            time.sleep(0.1)
        assert_refused(tmp_path / "second", run, process.pid, *url, **env)
        process.kill()
        process.wait()
    finally:
        process.kill()
    del env["STROP_TEST_HOLD"]
    assert_refused(tmp_path / "third", run, process.pid, *url, **env)  # its run may come back
    again = start(run, *url, "--resume", run, **env)
    assert again.wait(timeout=240) == 0, log_of(run)[-3000:]
    assert [row["step"] for row in metrics(run)][-1] == STEPS
    assert max(row["policy/behaviour_gap"] for row in metrics(run) if row["step"]) < 1e-4
