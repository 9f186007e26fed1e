"""Runs in which completions get no reward: the warning, the limit, and the batches that must not count."""

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
    """run("--method grpo ...") -> exit code, steps in metrics.jsonl, everything printed."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(REWARDS)
    for name in ("train", "held_out"):
        row = {"prompt": "1+2=", "answer": "3", "kind": name}
        Path("rows.jsonl" if name == "train" else "held.jsonl").write_text(f"{json.dumps(row)}\n" * 8)

    def start(line: str):
        code = main(f"{line} {RUN}".split())
        lines = Path("run/metrics.jsonl").read_text().splitlines()
        said = capfd.readouterr()
        return code, [json.loads(one)["step"] for one in lines], said.out, said.err

    return start


def test_a_run_without_any_reward_warns_at_once_stops_and_stops_again_when_resumed(run):
    """The count is in the checkpoint: that of step 3 knows of three such batches."""
    funcs = "--reward-funcs mine.never mine.fails --reward-on-error none"
    code, steps, out, err = run(f"--method grpo {funcs} --reward-none-limit 5")
    assert code == 2 and steps == [1, 2, 3, 4]
    why = "never returned None for all 4 rows; fails failed on all 4 rows, the last: reward_funcs=mine.fails: raised "
    first = f"warning: step 1: none of 4 completions got a reward ({why}KeyError: 'no_such_key' on rows.jsonl:"
    assert out.count("warning: step") == 1 and out.count("; the run stops after 5 such batches in a row") == 1
    assert out.index(first) < out.index("step 1/6"), "before the first step is done"
    (sentence,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert sentence.startswith(
        "error: reward_funcs=mine.never mine.fails: step 5: none of 4 completions got a reward, number 5 of such "
        f"batches in a row ({why}KeyError: 'no_such_key' on rows.jsonl:"
    )
    assert sentence.endswith(
        "; check them with python -m rollout.rewards --check, or set --reward-none-limit 0 to go on without rewards"
    )
    assert main(["--resume", "run"]) == 2
    assert [json.loads(one)["step"] for one in Path("run/metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4]


def test_one_step_without_rewards_or_one_silent_function_of_two_stops_nothing(run):
    code, steps, out, err = run("--method gdpo --reward-funcs mine.not_first mine.never --reward-none-limit 3")
    assert code == 0 and steps == [1, 2, 3, 4, 5, 6], err
    assert out.count("none of 4 completions got a reward (not_first returned None for all 4 rows; never ret") == 1
    told = re.findall(r"warning: the reward (\w+) gave no score in 3 batches in a row \((.*)\)", out)
    assert told == [("never", "never returned None for all 4 rows")]


def test_held_out_rows_without_any_reward(run):
    code, steps, out, err = run(
        "--method grpo --reward-funcs mine.sometimes --eval-data held.jsonl --eval-steps 2 --reward-none-limit 3"
    )
    assert code == 2 and steps == [0, 1, 2, 3]  # evaluations at 0 and 2 are logged, the one at 4 is not
    assert out.count("warning: evaluation at step 0: none of 8 held-out completions got a reward") == 1
    assert "(sometimes returned None for all 8 rows); the run stops after 3 such evaluations in a row" in out
    assert "reward_funcs=mine.sometimes: evaluation at step 4: none of 8 held-out completions got a reward" in err


def test_a_penalty_is_no_reward_and_failed_environments_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(REWARDS)
    cfg = settings(AdvantageConfig(overlong_margin=5), streaming_partial_batch=True)
    groups = groups_of(cfg, [])
    groups.rewards, groups.names = load_rewards(["mine.never"]), ["never", "overlong"]
    said: list[str] = []
    groups.missing_rewards = MissingRewards(["mine.never"], Counters(), said.append, limit=2, num_batches=9)
    groups.next(0, 0)
    assert said == [
        "warning: step 1: none of 6 completions got a reward (never returned None for all 6 rows); the run stops after "
        "2 such batches in a row"
    ]
    groups.producer.done()
    with pytest.raises(ValueError, match="step 2: none of 6 completions got a reward, number 2 of such batches"):
        groups.next(1, 1)

    groups = groups_of(settings(), [])
    source, counters, told = groups.producer.source, Counters(), []
    whole = source.completion
    source.completion = lambda word: SimpleNamespace(**{**vars(whole(word)), "columns": {"env_failed": True}})
    groups.missing_rewards = MissingRewards(["exact_match"], counters, told.append, limit=0, num_batches=9)
    groups.next(0, 0)
    assert told == ["warning: step 1: none of 6 completions got a reward (6 environments failed)"]
    assert counters.unrewarded_in_a_row == 1


def test_a_function_given_from_python_and_the_default_are_named(tmp_path, monkeypatch):
    """The sentence names the functions that ran. A run shorter than the limit does not pass for finished either."""
    from rollout.rewards.options import RewardConfig
    from trainer.config.blocks import ModelConfig, PromptConfig, RunConfig
    from trainer.methods.grpo import Config, train

    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "1+2=", "answer": null}\n' * 8)

    def silent(completions):
        return [None] * len(completions)

    for given, named in (([silent], "reward_funcs=python:"), ((), "reward_funcs=exact_match: step 2: none of 4")):
        cfg = Config(
            model=ModelConfig(model="builtin:tiny"), data=PromptConfig(data=("rows.jsonl",)),
            reward=RewardConfig(reward_funcs=given), num_generations=2, max_completion_length=2,
            run=RunConfig(max_steps=2, per_device_train_batch_size=4, output_dir=f"run{len(given)}"),
        )  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(named)):
            train(cfg)
        assert not Path(f"run{len(given)}/final").exists()


def test_one_function_in_the_place_of_a_tuple_is_refused():
    from rollout.rewards.options import RewardConfig

    with pytest.raises(ValueError, match=r"reward_funcs=.*must be a tuple; write \(my_function,\)"):
        RewardConfig(reward_funcs=len)
