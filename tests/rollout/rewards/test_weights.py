from __future__ import annotations

import pytest
import tyro
import yaml

from data.command.flags import build, flag_table, read_argv, read_tree
from data.types import Prompt
from rollout.engine import Completion
from rollout.rewards.options import RewardConfig
from rollout.rewards.table import load_rewards, open_rewards
from rollout.rewards.weights import parse_weight, parse_weights


def test_a_number_is_a_constant_weight():
    for given in [0.5, "0.5", " 5e-1", 1, "1", "-2"]:
        assert [parse_weight(given).at(step) for step in (0, 1, 10**6)] == [float(given)] * 3


def test_weights_are_interpolated_linearly_between_points():
    weight = parse_weight("0:1.0,100:0.2")
    assert [weight.at(step) for step in (0, 25, 50, 100, 5000)] == pytest.approx([1.0, 0.8, 0.6, 0.2, 0.2])
    assert repr(weight) == "0:1,100:0.2"
    late = parse_weight("10:0, 20:-4, 30:1")
    assert [late.at(step) for step in (0, 9, 10, 15, 20, 25, 31)] == pytest.approx([0, 0, 0, -2, -4, -1.5, 1])
    assert [parse_weight("0:0,50:0,51:1").at(step) for step in (0, 49, 50, 51, 52)] == [0, 0, 0, 1, 1]


def test_bad_weights_are_rejected():
    for value, message in [
        ("high", "'high'"), ("", "''"), ("nan", "finite"), (float("inf"), "finite"), ("0:1,100:inf", "finite"),
        ("0:1", "two points"), ("100:1,0:2", "two points"), ("0:1,0:2", "two points"),
        ("0:1,0.5", "'0.5'"), ("0:1,-5:2", "'-5:2'"), ("0:1,5:x", "'x'"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=f"^reward_weights={value}: .*{message}"):
            parse_weight(value)


def test_each_function_has_one_weight():
    assert [weight.at(0) for weight in parse_weights((), 3)] == [1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match=r"reward_weights=\[1.0, 0:1,5:2\]: 2 weights for 1 "):
        parse_weights(["1", "0:1,5:2"], 1)


def test_totals_use_the_weights_of_the_step():
    rewards = load_rewards(["exact_match", "length"], ["0:1.0,100:0.2", "0.5"])
    prompt = Prompt(source="x:1", prompt="?", ids=[1], columns={"answer": "a"})
    completion = Completion(prompt_ids=[1], ids=[1, 2], logps=[0.0, 0.0], finish_reason="stop", text="a", versions=[])
    assert rewards.score([prompt], [completion]).totals == [2.0]
    table = rewards.score([prompt], [completion], step=50)
    assert table.totals == pytest.approx([1.6]) and table.weights == pytest.approx([0.6, 0.5])
    assert table.values == [[1.0, 2.0]], "scores are not weighted"
    assert rewards.submit([prompt], [completion], step=100).result().totals == pytest.approx([1.2])
    assert rewards.weights_at(0) == [1.0, 0.5] and rewards.weights_at(200) == [0.2, 0.5]


def test_yaml_and_flags_give_the_same_weights():
    tree = yaml.safe_load("reward_funcs: [exact_match, length, env]\nreward_weights: [1, 0.25, '0:1.0,100:0.2']\n")
    table = flag_table(RewardConfig)
    from_yaml = build(RewardConfig, read_tree(tree, table, "x.yaml"), table, "x")
    flags = ["--reward-funcs", "exact_match", "length", "env", "--reward-weights", "1", "0.25", "0:1.0,100:0.2"]
    assert from_yaml == tyro.cli(RewardConfig, args=flags)
    negative = build(RewardConfig, read_argv(["--reward-weights", "-0.5"], table), table, "x")
    assert open_rewards(negative).weights_at(0) == [-0.5]
    rewards = open_rewards(from_yaml)
    assert rewards.names == ["exact_match", "length", "env"]
    assert rewards.weights_at(100) == pytest.approx([1.0, 0.25, 0.2])


def test_reward_config_rejects():
    for settings, message in [
        ({"reward_weights": ("1", "2")}, "2 weights for 1 "),
        ({"reward_weights": ("x",)}, "reward_weights=x"),
        ({"reward_num_workers": -1}, "reward_num_workers=-1"),
        ({"reward_none_limit": -1}, "reward_none_limit=-1"),
        ({"reward_num_workers": 1, "reward_timeout": 0.0}, "reward_timeout=0.0"),
        ({"reward_num_workers": 1, "reward_timeout": float("inf")}, "reward_timeout=inf"),
        ({"reward_num_workers": 1, "reward_memory_gb": -1.0}, "reward_memory_gb=-1.0"),
        ({"reward_timeout": 5.0}, "reward_timeout=5.0: .*--reward-num-workers"),
        ({"reward_memory_gb": 1.0}, "reward_memory_gb=1.0: .*--reward-num-workers"),
    ]:
        with pytest.raises(ValueError, match=message):
            RewardConfig(**settings)
