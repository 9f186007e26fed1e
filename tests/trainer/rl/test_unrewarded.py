"""Runs whose completions get no reward: the warning, the limit, and batches that do not count."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollout.rewards.table import load_rewards
from tests.trainer.rl.test_groups import groups_of, settings
from trainer.__main__ import main
from trainer.config.groups import AdvantageConfig
from trainer.metrics.metrics import Counters
from trainer.rl.groups import MissingRewards

REWARDS = """
def never(completions): return [None] * len(completions)
def fails(completions, kind): raise KeyError("no_such_key")
def sometimes(completions, kind): return [1.0 if k == "train" else None for k in kind]
steps = []
def not_first(completions):
    steps.append(1)
    return [None if len(steps) == 1 else float(len(c) % 3) for c in completions]
"""
RUN = (
    "--model builtin:tiny --data rows.jsonl --max-steps 6 --num-generations 2 --per-device-train-batch-size 4 "
    "--max-completion-length 3 --output-dir run --save-steps 3"
)


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """run("--method grpo ...") -> exit code, steps in metrics.jsonl, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(REWARDS)
    for name in ("train", "held_out"):
        row = {"prompt": "1+2=", "answer": "3", "kind": name}
        Path("rows.jsonl" if name == "train" else "held.jsonl").write_text(f"{json.dumps(row)}\n" * 8)

    def start(line: str):
        code = main(f"{line} {RUN}".split())
        lines = Path("run/metrics.jsonl").read_text().splitlines()
        return code, [json.loads(line)["step"] for line in lines], *capfd.readouterr()

    return start


def test_a_run_without_rewards_warns_stops_and_stops_again_when_resumed(run):
    """The checkpoint of step 3 contains the count of three batches."""
    funcs = "--reward-funcs mine.never mine.fails --reward-on-error none"
    code, steps, out, err = run(f"--method grpo {funcs} --reward-none-limit 5")
    assert code == 2 and steps == [1, 2, 3, 4]
    (warning,) = re.findall(r"^warning: step 1: none of 4 completions.*", out, flags=re.MULTILINE)
    (error,) = re.findall(r"^error: reward_funcs=mine.never mine.fails: step 5: none of 4.*", err, flags=re.MULTILINE)
    for message in (warning, error):
        assert "never returned None for all 4 rows; fails failed on all 4 rows" in message
        assert "reward_funcs=mine.fails: raised KeyError: 'no_such_key' on rows.jsonl:" in message
    assert "after 5 consecutive batches" in warning and "5 consecutive batches" in error
    assert "python -m rollout.rewards --check" in error and "--reward-none-limit 0" in error
    assert out.count("warning: step") == 1 and out.index(warning) < out.index("step 1/6")
    assert main(["--resume", "run"]) == 2
    assert [json.loads(line)["step"] for line in Path("run/metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4]


def test_one_batch_without_rewards_or_one_of_two_functions_without_values_does_not_stop_a_run(run):
    code, steps, out, err = run("--method gdpo --reward-funcs mine.not_first mine.never --reward-none-limit 3")
    assert code == 0 and steps == [1, 2, 3, 4, 5, 6], err
    assert out.count("none of 4 completions got a reward (not_first returned None for all 4 rows; never ret") == 1
    warnings = re.findall(r"^warning: reward (\w+) .* 3 consecutive batches \((.*)\)", out, flags=re.MULTILINE)
    assert warnings == [("never", "never returned None for all 4 rows")]


def test_held_out_rows_without_rewards(run):
    code, steps, out, err = run(
        "--method grpo --reward-funcs mine.sometimes --eval-data held.jsonl --eval-steps 2 --reward-none-limit 3"
    )
    assert code == 2 and steps == [0, 1, 2, 3]  # evaluations at 0 and 2 are logged, the one at 4 is not
    (warning,) = re.findall(r"^warning: evaluation at step 0: none of 8 held-out.*", out, flags=re.MULTILINE)
    assert "(sometimes returned None for all 8 rows)" in warning and "3 consecutive evaluations" in warning
    assert "reward_funcs=mine.sometimes: evaluation at step 4: none of 8 held-out completions" in err


def test_a_penalty_does_not_count_as_a_reward_and_failed_environments_are_counted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(REWARDS)
    groups = groups_of(settings(AdvantageConfig(overlong_margin=5), streaming_partial_batch=True), [])
    groups.rewards, groups.names = load_rewards(["mine.never"]), ["never", "overlong"]
    notes: list[str] = []
    groups.missing_rewards = MissingRewards(["mine.never"], Counters(), notes.append, limit=2, num_batches=9)
    groups.next(0, 0)
    (warning,) = notes
    assert "step 1: none of 6 completions" in warning and "(never returned None for all 6 rows)" in warning
    groups.producer.done()
    with pytest.raises(ValueError, match="step 2: none of 6 completions .* 2 consecutive batches"):
        groups.next(1, 1)

    groups = groups_of(settings(), [])
    source, counters, notes = groups.producer.source, Counters(), []
    complete = source.completion
    source.completion = lambda word: SimpleNamespace(**{**vars(complete(word)), "columns": {"env_failed": True}})
    groups.missing_rewards = MissingRewards(["exact_match"], counters, notes.append, limit=0, num_batches=9)
    groups.next(0, 0)
    assert len(notes) == 1 and notes[0].endswith("(6 environments failed)") and counters.unrewarded_in_a_row == 1


def test_the_error_names_functions_given_from_python_and_the_default(tmp_path, monkeypatch):
    """A run shorter than the limit also fails."""
    from rollout.rewards.options import RewardConfig
    from trainer.config.blocks import ModelConfig, PromptConfig, RunConfig
    from trainer.methods.grpo import Config, train

    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "1+2=", "answer": null}\n' * 8)

    def silent(completions):
        return [None] * len(completions)

    for given, name in (([silent], "reward_funcs=python:"), ((), "reward_funcs=exact_match: step 2: none of 4")):
        cfg = Config(
            model=ModelConfig(model="builtin:tiny"), data=PromptConfig(data=("rows.jsonl",)),
            reward=RewardConfig(reward_funcs=given), num_generations=2, max_completion_length=2,
            run=RunConfig(max_steps=2, per_device_train_batch_size=4, output_dir=f"run{len(given)}"),
        )  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(name)):
            train(cfg)
        assert not Path(f"run{len(given)}/final").exists()


def test_a_single_function_instead_of_a_tuple_is_rejected():
    from rollout.rewards.options import RewardConfig

    with pytest.raises(ValueError, match=r"reward_funcs=.*list"):
        RewardConfig(reward_funcs=len)
