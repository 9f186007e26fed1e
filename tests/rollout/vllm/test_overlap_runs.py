"""Whole runs whose rollouts run ahead of training: killed in the middle, they lose and repeat no prompt."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from rollout.servers.command import TOKEN
from tests.entry import metrics
from tests.rollout.vllm.test_runs import log_of, start, wait_for_step

STEPS = 6
DEPTH = 2
FLAGS = ("--async-prefetch", "--prefetch-depth", DEPTH, "--replay-buffer-size", 8, "--reroll-start-fraction", 0.0,
         "--dynamic-sampling", "--streaming-partial-batch", "--per-device-train-batch-size", 32)  # fmt: skip
PROMPTS = 32 // 8


def planner_of(run: Path, step: int) -> dict[str, Any]:
    return json.loads((run / "checkpoints" / f"step-{step:08d}" / "state.json").read_text())["run"]["planner"]


def accounted(state: dict[str, Any]) -> None:
    """Every group that was planned is consumed or pending; numbers of the latter are all different."""
    waiting = [*state["pending"], *state["resampled"]]
    assert state["planned"] == state["consumed"] + len(waiting)
    assert len({number for number, _, _ in waiting}) == len(waiting)
    assert all(number < state["planned"] for number, _, _ in waiting)


def test_killed_in_the_middle_and_resumed_all_prompts_are_accounted_for(tied_server, tmp_path):
    run, env = tmp_path / "async", {TOKEN: tied_server.token}
    url = ("--vllm.url", tied_server.url, "--sync.backend", "process_group", *FLAGS)
    process = start(run, *url, **env)
    try:
        wait_for_step(run, 4, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
    finally:
        process.kill()
    saved = planner_of(run, 2)
    accounted(saved)
    assert saved["batches"] == 2 and len(saved["pending"]) == DEPTH * PROMPTS  # sampled ahead, not trained on yet
    again = start(run, *url, "--resume", run, **env)
    assert again.wait(timeout=240) == 0, log_of(run)[-3000:]
    rows = [row for row in metrics(run) if row["step"] > 0]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert max(row["rollout/staleness_max"] for row in rows) <= DEPTH
    assert sum(row.get("rollout/rerolled_groups", 0) for row in rows) > 0
    last = planner_of(run, STEPS)
    accounted(last)
    assert last["batches"] == STEPS and last["pending"] == [] and last["resampled"] == []
    # Rows were drawn for every group that was planned, but those that came again.
    rerolled = sum(row.get("rollout/rerolled_groups", 0) for row in rows)
    drawn = last["loader"]["position"] + last["loader"]["epoch"] * last["loader"]["num_rows"]
    assert drawn == last["planned"] - rerolled
    assert rows[-1]["data/prompts_total"] == last["consumed"]
