"""--harness: programs with the policy as their model, their results, failures, time limits and ends."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rollout.engine import Completion, Request, Sampling, run_groups
from rollout.episodes.endpoint import Endpoint
from rollout.episodes.options import ToolConfig
from rollout.gyms.harness import Harness
from tests.entry import environment, metrics, processes_with, run_ok
from tests.rollout.scripted_engine import ScriptedEngine, user_prompt

AGENT = """
import json, os, sys, time, urllib.request
row = json.load(open(sys.argv[1]))
if row["does"] == "fails": sys.exit("no such tool")
if row["does"] == "nothing": sys.exit()
if row["does"] == "hangs":
    os.spawnlp(os.P_NOWAIT, "setsid", "setsid", "sleep", "60")  # leaves the process group
    time.sleep(60)
messages = [{"role": "usr", "content": "hi"}] if row["does"] == "misspells" else row["prompt"]
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

    def run(does: list[str], max_tokens: int = 90, text: str = "hi", **settings: Any) -> list[Completion]:
        command = f"{sys.executable} -S -I agent.py {{row}} {{base_url}}/x {'{prompt}' * (text != 'hi')}"
        harness = Harness(ToolConfig(harness=command, **settings), log=lines.append)
        harness.open(tmp_path / "programs")
        try:
            source = harness.source(endpoint, Sampling(max_tokens=max_tokens, stop_ids=(2,)))
            prompts = [user_prompt(text, f"rows.jsonl:{i + 1}", does=does[i]) for i in range(len(does))]
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


def test_a_program_that_fails_has_no_reward(play):
    good, failed = play(["ends", "fails"])
    assert failed.columns["env_failed"] == 1.0 and failed.columns["env_reward"] is None and failed.trained == 0
    assert failed.columns["stdout"] == "" and failed.columns["folder"].endswith("/work")  # rewards are called anyway
    assert good.trained == 6
    assert sum("rows.jsonl:2: exit status 1 (no such tool)" in line for line in play.lines) == 1


def test_a_program_that_hangs_ends_with_all_its_processes(play):
    with pytest.raises(ValueError, match=r"all 1 episodes failed, .* \(the program exceeded harness_timeout=1 s\)"):
        play(["hangs"], harness_timeout=1.0)


def test_a_program_without_tokens_left_is_rewarded_as_truncated(play):
    (completion,) = play(["ends"], max_tokens=12)
    assert completion.columns["num_turns"] == 1 and completion.columns["env_failed"] == 0.0
    assert completion.finish_reason == "length" and completion.trained == 3


def test_a_first_request_beyond_the_context_is_logged_once(play):
    completions = play(["ends", "ends"], text="y" * 600)
    assert all(c.finish_reason == "length" and c.trained == 0 and c.columns["num_turns"] == 0 for c in completions)
    (line,) = play.lines
    assert re.match(r"harness: rows.jsonl:[12]: a prompt of 6\d\d tokens", line) and "context length 512)" in line


def test_a_failure_names_the_request_that_the_endpoint_rejected(play):
    with pytest.raises(ValueError, match=r"HTTP Error 400: Bad Request\); a request was rejected: .*'usr'"):
        play(["misspells"])


def test_a_run_in_which_every_program_fails_ends(play):
    found = r"harness: all 3 episodes failed, .* \(exit status 1 \(no such tool\)\); run .* 'harness:'"
    with pytest.raises(ValueError, match=found):
        play(["fails"] * 3)


def test_a_program_that_never_asks_the_policy_has_failed(play):
    good, failed = play(["ends", "nothing"])
    assert (good.columns["env_failed"], failed.columns["env_failed"]) == (0.0, 1.0)
    assert sum("without an answer from the policy; make it use OPENAI_BASE_URL" in line for line in play.lines) == 1


@pytest.mark.parametrize("text", ["a\0b", "y" * 200_000])
def test_a_prompt_that_no_command_can_contain_fails_only_its_row(play, text):
    with pytest.raises(ValueError, match=r"all 1 episodes failed, .*; pass it {row} instead of {prompt}\)"):
        play(["ends"], text=text)


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


@pytest.mark.slow
def test_programs_end_with_a_killed_run(tmp_path):
    (tmp_path / "agent.py").write_text("import time; open('started', 'w').close(); time.sleep(600)\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": [{"role": "user", "content": "hi"}]}\n')
    (tmp_path / "reward.py").write_text("def none(completions, **columns): return [0.0] * len(completions)\n")
    argv = ("-m", "trainer", "--method", "grpo", "--model", "builtin:tiny", "--data", "rows.jsonl", "--num-generations",
            "2", "--per-device-train-batch-size", "2", "--learning-rate", "1e-4", "--max-steps", "2", "--harness",
            f"{sys.executable} agent.py", "--reward-funcs", "reward.py:none", "--output-dir", "run")  # fmt: skip
    env = environment() | {"STROP_TEST_HARNESS": str(tmp_path)}
    run = subprocess.Popen([sys.executable, *argv], cwd=tmp_path, env=env, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while len(list(tmp_path.glob("run/harness/*/work/started"))) < 2:
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    run.kill()
    run.wait()
    while left := processes_with(f"STROP_TEST_HARNESS={tmp_path}"):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


@pytest.mark.slow
def test_a_killed_and_resumed_run_trains_every_group_once(tmp_path):
    """The same rows, rewards and samples as an unbroken run."""
    (tmp_path / "agent.py").write_text(AGENT)
    rows = [{"prompt": [{"role": "user", "content": f"{i}+{i}="}], "does": "ends"} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text("def size(stdout, **columns): return [len(text) % 7 for text in stdout]\n")
    argv = ("--method", "grpo", "--model", "builtin:tiny", "--data", "rows.jsonl", "--num-generations", 2,
            "--per-device-train-batch-size", 4, "--learning-rate", 1e-3, "--max-steps", 4, "--save-steps", 1,
            "--harness", f"{sys.executable} -S -I agent.py {{row}} x", "--max-completion-length", 60,
            "--reward-funcs", "reward.py:size")  # fmt: skip
    run_ok(*argv, "--output-dir", "whole", cwd=tmp_path)
    words = [sys.executable, "-m", "trainer", *map(str, argv), "--output-dir", "broken"]
    run = subprocess.Popen(words, cwd=tmp_path, env=environment(), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while not list(tmp_path.glob("broken/harness/9/work")):  # in the third rollout
        assert run.poll() is None
        time.sleep(0.02)
    run.kill()
    run.wait()
    run_ok("--resume", "--output-dir", "broken", cwd=tmp_path)
    # Not the loss: requests arrive in another order, and batches of another shape round differently.
    names = ("step", "reward/mean", "rollout/num_turns", "data/prompts_total", "data/tokens_total")
    whole, broken = ([[row[name] for name in names] for row in metrics(tmp_path / run)] for run in ("whole", "broken"))
    assert len(whole) == 4 and whole == broken
    whole, broken = ((tmp_path / run / "samples.jsonl").read_text().splitlines() for run in ("whole", "broken"))
    names = ("step", "source", "completion", "messages", "rewards", "branches")
    assert [[json.loads(line)[name] for name in names] for line in whole] == [
        [json.loads(line)[name] for name in names] for line in broken
    ]
