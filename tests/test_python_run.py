"""Test runs from Python: train(Config(...)) with reward functions, and their resume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from data.command.flags import config_to_tree
from data.user_code import import_name
from rollout.rewards.loading import find_reward
from rollout.rewards.options import RewardConfig
from rollout.rewards.table import load_rewards
from tests.entry import ROOT, metrics, run, run_python

SCRIPT = """
import sys
from mine import polite
from rollout.rewards.options import RewardConfig
from trainer.config.blocks import ModelConfig, PromptConfig, RunConfig
from trainer.methods.grpo import Config, train


def short(completions, **columns):
    return [-float(len(text)) for text in completions]


def config(max_steps, resume=None):
    functions = (polite, short) if "short" in sys.argv else (polite,)
    return Config(
        model=ModelConfig(model="builtin:tiny"),
        data=PromptConfig(data=("task:addition:size=8",)),
        reward=RewardConfig(reward_funcs=("exact_match", *functions)),
        run=RunConfig(max_steps=max_steps, save_steps=1, output_dir="runs/{method}", resume=resume),
        max_completion_length=4,
    )


train(config(1))
train(config(2, resume="runs/grpo"))
"""


def write_script(folder: Path) -> None:
    (folder / "mine.py").write_text("def polite(completions, **columns):\n    return [0.25] * len(completions)\n")
    (folder / "script.py").write_text(SCRIPT)


@pytest.mark.slow
def test_a_run_from_python_is_resumed_there_and_by_the_command(tmp_path):
    write_script(tmp_path)
    # a real process with a minimal environment
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOME": str(tmp_path), "PATH": os.defpath}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    saved = yaml.safe_load((tmp_path / "runs/grpo/config.yaml").read_text())
    assert saved["method"] == "grpo" and saved["reward_funcs"] == ["exact_match", "mine.polite"]
    done = run("--resume", "runs/grpo", "--max-steps", 3, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = metrics(tmp_path / "runs" / "grpo")
    assert [row["step"] for row in rows] == [1, 2, 3] and {row["reward/polite/mean"] for row in rows} == {0.25}


def test_resume_names_a_function_that_cannot_be_imported(tmp_path):
    write_script(tmp_path)
    done = run_python("script.py", "short", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    saved = yaml.safe_load((tmp_path / "runs/grpo/config.yaml").read_text())
    assert saved["reward_funcs"] == ["exact_match", "mine.polite", "python:__main__.short"]
    rows = [json.loads(line) for line in (tmp_path / "runs/grpo/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2] and all(row["reward/short/mean"] < 0 for row in rows)
    done = run("--resume", "runs/grpo", "--max-steps", 3, cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    sentence = "error: reward_funcs=python:__main__.short: a Python object that cannot be imported; resume"
    assert done.stderr.splitlines()[-1].startswith(sentence)


def constant(completions):
    return [1.0] * len(completions)


class Judge:
    def __call__(self, completions):
        return [2.0] * len(completions)


def test_names_of_callables():
    inner = lambda completions: [0.0]  # noqa: E731
    here = test_names_of_callables.__module__
    assert import_name(constant) == f"{here}.constant" and import_name(Judge) == f"{here}.Judge"
    assert import_name(Judge()) == f"python:{here}.Judge"
    assert import_name(inner) == f"python:{here}.test_names_of_callables.<locals>.<lambda>"
    assert [find_reward(given)[0] for given in (constant, Judge, Judge())] == ["constant", "Judge", "Judge"]
    assert find_reward(Judge)[1](["a"]) == [2.0]
    rewards = load_rewards([constant, constant, "exact_match", Judge()])
    assert rewards.names == ["constant", "constant_2", "exact_match", "Judge"]
    assert config_to_tree(RewardConfig(reward_funcs=(constant, "length")))["reward_funcs"] == [
        f"{here}.constant", "length"]  # fmt: skip


def test_a_worker_needs_a_name():
    with pytest.raises(ValueError, match="reward_funcs=python:.*Judge: .*--reward-num-workers 0"):
        load_rewards([Judge()], num_workers=1)
