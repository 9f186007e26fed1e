"""Complete runs with `--rollout.engine vllm`: dying servers, killed trainers and async rollouts."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rollout.servers.command import TOKEN
from tests.entry import environment, metrics, processes_with
from tests.rollout.vllm.conftest import command_of, wait_for
from tests.rollout.vllm.test_engine import own_weights
from trainer.__main__ import main

GRPO = ("--method", "grpo", "--rollout.engine", "vllm", "--eval-steps", 0)


def words(argv: Any) -> list[str]:
    return [str(word) for word in argv]


def start(run_dir: Path, *argv: Any, **env: str) -> subprocess.Popen[bytes]:
    """Start a trainer in a separate process, which can be killed."""
    command = [sys.executable, "-m", "trainer", *words(argv), "--output-dir", str(run_dir)]
    with (run_dir.parent / f"{run_dir.name}.log").open("wb") as log:
        return subprocess.Popen(command, env=environment() | env, stdout=log, stderr=log, cwd=run_dir.parent)


def log_of(run_dir: Path) -> str:
    return (run_dir.parent / f"{run_dir.name}.log").read_text()


def api_servers(run_dir: Path) -> list[int]:
    """Return the API servers of a run, without their guards and engines."""
    pids = []
    for pid in processes_with(f"STROP_TEST_RUN={run_dir}"):
        command = command_of(pid)
        if b"vllm.entrypoints.openai.api_server" in command and b"-m" in command[:3]:
            pids.append(pid)
    return pids


COUNTING = """
import os
from rollout.rewards.functions import exact_match

def recorded_exact_match(prompts, completions, answer):
    with open(os.environ["STROP_TEST_PROMPTS"], "a") as file:
        file.writelines(f"{prompt!r}\\n" for prompt in prompts)
    return exact_match(completions, answer)
"""


def test_run_survives_the_death_of_one_of_two_servers(vllm_python, tmp_path, monkeypatch, capfd):
    steps, eval_rows, run, seen = 3, 16, tmp_path / "two", tmp_path / "prompts"
    (tmp_path / "counting.py").write_text(COUNTING)
    monkeypatch.setenv("STROP_TEST_RUN", str(run))  # only visible in /proc for children, not for this process
    monkeypatch.setenv("STROP_TEST_PROMPTS", str(seen))
    victims: list[int] = []

    def kill_one() -> None:
        file = run / "metrics.jsonl"
        wait_for(lambda: file.exists() and any(row["step"] >= 1 for row in metrics(run)), 600)
        victims.extend(api_servers(run))
        os.killpg(os.getpgid(victims[0]), signal.SIGKILL)

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    argv = (*GRPO, "--vllm.replicas", 2, "--max-steps", steps, "--max-eval-rows", eval_rows, "--output-dir", run,
            "--reward-funcs", f"{tmp_path}/counting.py:recorded_exact_match")  # fmt: skip
    assert main(words(argv)) == 0
    killer.join()
    assert len(victims) == 2
    rows = [row for row in metrics(run) if row["step"] > 0]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert rows[-1]["rollout/server_out"] >= 1
    assert max(row["policy/behaviour_gap"] for row in rows) < 1e-4
    out, err = capfd.readouterr()
    assert re.search(r"server [01] \(http://127\.0\.0\.1:\d+\): (doubted|out): ", out + err)
    # Every prompt of every step returned as one group: none was lost or counted twice.
    counts = Counter(seen.read_text().splitlines())
    assert sum(counts.values()) == 2 * eval_rows + steps * 16 * 8
    assert set(counts.values()) == {2, 8}
    assert not processes_with(f"STROP_TEST_RUN={run}")


def test_ctrl_c_while_the_server_starts_leaves_no_process(vllm_python, tmp_path):
    run = tmp_path / "interrupted"
    process = start(run, *GRPO, "--max-steps", 1, STROP_TEST_RUN=str(run))
    try:
        wait_for(lambda: api_servers(run) or process.poll() is not None, 400)
        process.send_signal(signal.SIGINT)
        sent = time.monotonic()
        assert process.wait(timeout=60) == 130, log_of(run)[-2000:]
        assert time.monotonic() - sent < 12  # two seconds on an idle machine; TERM would take 15
        assert not processes_with(f"STROP_TEST_RUN={run}")
    finally:
        process.kill()


STEPS, DEPTH, PROMPTS = 6, 2, 4
ASYNC = ("--async-prefetch", "--prefetch-depth", DEPTH, "--replay-buffer-size", 8, "--reroll-start-fraction", 0.0,
         "--dynamic-sampling", "--streaming-partial-batch", "--per-device-train-batch-size", 8 * PROMPTS,
         "--max-steps", STEPS, "--save-steps", 2, "--max-eval-rows", 8)  # fmt: skip
# Blocks inside a push after the first checkpoint until it is killed.
HOLD = """
import os, sys, time
if os.environ.get("STROP_TEST_HOLD") and "trainer" in " ".join(sys.orig_argv):
    from pathlib import Path
    from rollout.sync import process_group as pg
    held, checkpoints = map(Path, os.environ["STROP_TEST_HOLD"].split(":"))
    real = pg.fill
    def fill(bucket, *rest):
        real(bucket, *rest)
        if (checkpoints / "step-00000002" / "state.json").is_file():
            held.touch(); time.sleep(600)
    pg.fill = fill
"""


def planner_of(run: Path, step: int) -> dict[str, Any]:
    return json.loads((run / "checkpoints" / f"step-{step:08d}" / "state.json").read_text())["run"]["planner"]


def check_accounted(state: dict[str, Any]) -> None:
    """Check that every planned group is consumed or pending, and that pending groups have distinct numbers."""
    waiting = [*state["pending"], *state["resampled"]]
    assert state["planned"] == state["consumed"] + len(waiting)
    assert len({number for number, _, _ in waiting}) == len(waiting)
    assert all(number < state["planned"] for number, _, _ in waiting)


def test_async_run_killed_during_a_sync_resumes_without_losing_prompts(tied_server, tmp_path, monkeypatch, capfd):
    """While the run lives, and for a minute after, no other run gets the server."""
    run = tmp_path / "killed"
    (tmp_path / "sitecustomize.py").write_text(HOLD)
    held = tmp_path / "held"
    monkeypatch.setenv(TOKEN, tied_server.token)
    url = ("--vllm.url", tied_server.url, "--sync.backend", "process_group", "--sync.bucket-mb", 1)
    process = start(
        run, *GRPO, *url, *ASYNC, STROP_TEST_HOLD=f"{held}:{run / 'checkpoints'}",
        PYTHONPATH=os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]]),
    )  # fmt: skip
    try:
        wait_for(lambda: held.exists() or process.poll() is not None, 240)
        assert process.poll() is None, log_of(run)[-3000:]
    finally:
        process.kill()
        process.wait()
    capfd.readouterr()
    assert main(words((*GRPO, *url, "--output-dir", tmp_path / "second"))) == 2
    error = rf"error: vllm\.url=http://\S+: {run} \(host \S+, pid {process.pid}, user \S+\) has been training"
    assert re.search(error, " ".join("".join(capfd.readouterr()).split())) and not (tmp_path / "second").exists()

    saved = planner_of(run, 2)
    check_accounted(saved)
    assert saved["batches"] == 2 and len(saved["pending"]) == DEPTH * PROMPTS  # sampled ahead, not trained on yet
    assert main(words((*GRPO, *url, *ASYNC, "--resume", run))) == 0
    rows = [row for row in metrics(run) if row["step"] > 0]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert max(row["rollout/staleness_max"] for row in rows) <= DEPTH
    last = planner_of(run, STEPS)
    check_accounted(last)
    assert last["batches"] == STEPS and last["pending"] == [] and last["resampled"] == []
    # A row was drawn for every planned group, except for rerolled groups.
    rerolled = sum(row.get("rollout/rerolled_groups", 0) for row in rows)
    drawn = last["loader"]["position"] + last["loader"]["epoch"] * last["loader"]["num_rows"]
    assert rerolled > 0 and drawn == last["planned"] - rerolled
    assert rows[-1]["data/prompts_total"] == last["consumed"]


def test_async_ebft(tied_server, tmp_path, monkeypatch):
    """Turns end after 64 tokens, the minimum, because the target sums are short."""
    run, steps = tmp_path / "ebft", 3
    monkeypatch.setenv(TOKEN, tied_server.token)
    assert main(words((
        "--method", "ebft", "--rollout.engine", "vllm", "--vllm.url", tied_server.url, "--eval-steps", 0,
        "--max-steps", steps, "--async-prefetch", "--prefetch-depth", DEPTH, "--ce-coef", 0.03,
        "--per-device-train-batch-size", 16, "--max-completion-length", 96, "--output-dir", run,
        "--data", "task:addition:split=train,size=256", "--eval-data", "task:addition:split=eval,size=8",
    ))) == 0  # fmt: skip
    first, *rows = metrics(run)
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert all(0 < row["reward/cfm"] < 4 and 0 < row["rollout/len_max"] <= 64 for row in rows)
    staleness = [row["rollout/staleness_max"] for row in rows]
    assert staleness[0] == 0 and 0 < max(staleness) <= DEPTH
    assert rows[0]["policy/behaviour_gap"] < 1e-3  # later rollouts are off-policy
    assert all(row["loss/ce"] > 0 for row in rows)
    assert first["eval/cfm"] > 0 and rows[-1]["eval/cfm"] > 0 and rows[-1]["eval/rows"] == first["eval/rows"] == 8


@pytest.mark.parametrize("lora", [(), ("--lora.r", 8)], ids=["full", "lora"])
@pytest.mark.parametrize("method", ["online_dpo", "ppo"])
def test_online_dpo_and_ppo_sample_from_a_server(method, lora, tied_server, tmp_path, monkeypatch):
    """The second step samples from the weights, or the adapter, trained by the first step."""
    own_weights(tied_server, monkeypatch)
    assert main(words((
        "--method", method, "--model", "builtin:tiny", "--data", "task:addition:split=train,size=64", *lora,
        "--rollout.engine", "vllm", "--vllm.url", tied_server.url, "--reward-funcs", "exact_match", "--max-steps", 2,
        "--minibatches-per-rollout", 1, "--max-completion-length", 8, "--learning-rate", 1e-3, "--num-generations", 4,
        "--per-device-train-batch-size", 16, "--output-dir", tmp_path / "run",
    ))) == 0  # fmt: skip
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(math.isfinite(value) for row in rows for value in row.values() if isinstance(value, float))
    assert all(row["optim/grad_norm"] > 0 for row in rows)
    if method == "ppo":
        assert all(row["policy/behaviour_gap"] < 1e-3 for row in rows)
