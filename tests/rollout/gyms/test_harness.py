"""--harness: programs with the policy as their model, their results, failures, time limits and ends."""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rollout.engine import Completion, Request, Sampling, run_groups
from rollout.episodes.endpoint import Endpoint
from rollout.episodes.options import ToolConfig
from rollout.gyms.harness import Harness
from tests.entry import processes_with
from tests.rollout.scripted_engine import ScriptedEngine, user_prompt

AGENT = """
import json, os, sys, time, urllib.request
row = json.load(open(sys.argv[1]))
if row["does"] == "fails": sys.exit("no such tool")
if row["does"] == "hangs":
    os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "60")
    time.sleep(60)
messages = row["prompt"]
for turn in range(2):
    body = json.dumps({"messages": messages}).encode()
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as reply:
        message = json.load(reply)["choices"][0]["message"]
    messages += [message, {"role": "user", "content": "sure?"}]
open("answer.txt", "w").write(message["content"])
print(sys.argv[2], message["content"])
"""


@pytest.fixture
def play(tmp_path, monkeypatch):
    """play(["ends", "fails"], timeout=60) -> one completion for each row."""
    monkeypatch.setenv("STROP_TEST_HARNESS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("agent.py").write_text(AGENT)
    engine = ScriptedEngine(lambda text, seed: f"{text.count('assistant')}!")
    endpoint = Endpoint(engine, engine.tokenizer)
    endpoint.open()
    lines: list[str] = []

    def run(does: list[str], **settings: Any) -> list[Completion]:
        command = f"{sys.executable} -S -I agent.py {{row}} {{base_url}}/x"
        harness = Harness(ToolConfig(harness=command, **settings), log=lines.append)
        harness.open(tmp_path / "programs")
        try:
            source = harness.source(endpoint, Sampling(max_tokens=90, stop_ids=(2,)))
            prompts = [user_prompt("hi", f"rows.jsonl:{i + 1}", does=does[i]) for i in range(len(does))]
            groups = run_groups(source, [[Request.of(prompt, i)] for i, prompt in enumerate(prompts)])
            return [completion for (completion,) in groups]
        finally:
            run.folders = sorted(path.name for path in (tmp_path / "programs").iterdir())
            harness.close()

    run.lines = lines
    yield run
    endpoint.close()
    deadline = time.monotonic() + 20
    while left := [pid for pid in processes_with(f"STROP_TEST_HARNESS={tmp_path}") if pid != os.getpid()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_programs_play_rows_and_rewards_get_their_results(play):
    one, two = play(["ends", "ends"])
    assert one.columns["stdout"].startswith("http://127.0.0.1:") and one.columns["stdout"].endswith("/v1/x 2!\n")
    assert one.columns["num_turns"] == 2 and one.columns["branches"] == 0 and one.columns["env_failed"] == 0.0
    assert one.text == "2!" and one.trained == 6 and len(one.messages) == 3
    assert play.folders == ["1", "2"] and Path(one.columns["folder"]).name == "work"
    assert one.columns["folder"] != two.columns["folder"]


def test_a_folder_is_deleted_with_the_last_reference(tmp_path):
    from rollout.gyms import harness

    parent = tmp_path / "1"
    folder = harness.new_folder(parent)
    (Path(folder) / "answer.txt").write_text("4")
    columns = {"folder": folder}
    del folder
    gc.collect()
    assert (Path(columns["folder"]) / "answer.txt").is_file()
    del columns
    gc.collect()
    assert not parent.exists()


def test_a_program_that_fails_or_hangs_has_no_reward_and_leaves_no_process(play):
    good, failed, late = play(["ends", "fails", "hangs"], harness_timeout=3.0)
    for completion in (failed, late):
        assert completion.columns["env_failed"] == 1.0 and completion.columns["env_reward"] is None
        assert completion.trained == 0
    assert good.trained == 6
    assert sum("rows.jsonl:2: exit status 1 (no such tool)" in line for line in play.lines) == 1
    assert sum("rows.jsonl:3: the program exceeded harness_timeout=3 s" in line for line in play.lines) == 1


def test_a_run_in_which_every_program_fails_ends(play):
    with pytest.raises(ValueError, match=r"harness: all 3 episodes failed, .* \(exit status 1 \(no such tool\)\); run"):
        play(["fails"] * 3)


def test_bad_commands_are_rejected():
    for command, message in [
        ("", "harness='': empty"),
        ("no_such_program {row}", "no_such_program is not a program"),
        ('python "x', "check the quotes"),
    ]:
        with pytest.raises(ValueError, match=message):
            Harness(ToolConfig(harness=command))
    for settings, message in [
        ({"harness_timeout": 5.0}, "harness_timeout=5.0: has no effect"),
        ({"harness": "x", "harness_timeout": 0.0}, "harness_timeout=0.0"),
        ({"harness": "x", "harness_max_concurrent": 0}, "harness_max_concurrent=0"),
        ({"harness": "x", "max_turns": 3}, "max_turns=3: has no effect"),
    ]:
        with pytest.raises(ValueError, match=message):
            ToolConfig(**settings)
    assert ToolConfig(harness="x", tool_format="hermes").tool_format == "hermes"
