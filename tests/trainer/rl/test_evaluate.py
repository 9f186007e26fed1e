"""Held-out completions: how many of each prompt, with which seeds, and what is made of their rewards."""

from __future__ import annotations

import math
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from data.types import Prompt
from rollout.engine import Completion
from rollout.rewards.table import load_rewards
from tests.entry import metrics, repeatable
from trainer.__main__ import main
from trainer.rl.evaluate import best_of, evaluate_rewards

PROMPTS = [Prompt(source=f"rows:{row}", prompt=f"{row}?", ids=[1], columns={"answer": "yes"}) for row in range(3)]
RIGHT = {1, 3, 4, 7}  # seeds that are answered yes


class Engine:
    def load(self, version: int) -> None: ...

    def sleep(self) -> None: ...

    def poll(self, version: int) -> None: ...


class Source:
    def __init__(self) -> None:
        self.asked: list[list[tuple[str, int]]] = []

    def start(self, groups: Any) -> list[Future]:
        futures = []
        for group in groups:
            self.asked.append([(request.prompt.source, request.seed) for request in group])
            futures.append(Future())
            futures[-1].set_result([self.completion(request.seed) for request in group])
        return futures

    def completion(self, seed: int) -> Completion:
        text, ids = "yes" if seed in RIGHT else "no", [5] * (1 + seed)
        logps = [-1.0] * len(ids)
        return Completion(prompt_ids=[1], ids=ids, logps=logps, finish_reason="stop", text=text, versions=[])


def evaluated(*count: int) -> tuple[list[list[tuple[str, int]]], dict[str, float]]:
    source = Source()
    return source.asked, evaluate_rewards(Engine(), source, 0, PROMPTS, load_rewards(["exact_match"], []), None, *count)


def test_one_completion_of_each_prompt_has_the_number_of_its_row_as_seed():
    asked, found = evaluated()
    assert asked == [[("rows:0", 0)], [("rows:1", 1)], [("rows:2", 2)]] and evaluated(1) == (asked, found)
    assert found == {
        "eval/reward/mean": pytest.approx(1 / 3), "eval/exact_match/mean": pytest.approx(1 / 3), "eval/len_mean": 2,
        "eval/rows": 3,
    }  # fmt: skip


def test_several_completions_have_seeds_of_their_own_the_first_those_of_one():
    asked, found = evaluated(3)
    assert [[seed for _, seed in group] for group in asked] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert [{source for source, _ in group} for group in asked] == [{"rows:0"}, {"rows:1"}, {"rows:2"}]
    assert found == {
        "eval/reward/mean": pytest.approx(4 / 9), "eval/exact_match/mean": pytest.approx(4 / 9), "eval/len_mean": 5,
        "eval/rows": 3, "eval/reward/best_of_3": pytest.approx(2 / 3),
    }  # fmt: skip


def test_the_best_is_over_what_has_a_reward():
    assert best_of([0.5, None, -1.0, 2.0, None, None], 2) == pytest.approx((0.5 + 2.0) / 2)
    assert math.isnan(best_of([None, None], 2))


def run(folder: Path, *argv: Any) -> list[dict[str, Any]]:
    base = (
        "--method", "grpo", "--model", "builtin:tiny", "--data", "task:addition:split=train,size=64", "--max-steps", 2,
        "--eval-data", "task:addition:split=eval,size=12", "--reward-funcs", "exact_match", "--num-generations", 4,
        "--max-completion-length", 8, "--rollout.eval-temperature", 1.0,
    )  # fmt: skip
    assert main([*map(str, (*base, *argv)), "--output-dir", str(folder)]) == 0
    return metrics(folder)


def test_a_run_logs_the_best_and_trains_as_before(tmp_path):
    one, four = run(tmp_path / "one"), run(tmp_path / "four", "--num-generations-eval", 4)
    for row in (four[0], four[2]):
        assert 0 <= row["eval/reward/mean"] < row["eval/reward/best_of_4"] <= 1 and row["eval/rows"] == 12
    trained = [
        [{name: x for name, x in row.items() if not name.startswith("eval/")} for row in repeatable(rows)[1:]]
        for rows in (one, four)
    ]
    assert trained[0] == trained[1] and "eval/reward/best_of_1" not in one[0]
