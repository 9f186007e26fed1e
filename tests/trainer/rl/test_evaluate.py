"""Evaluation on held-out prompts: completions per prompt, seeds and metrics."""

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
RIGHT = {1, 3, 4, 7}  # seeds whose completion is yes


class Engine:
    def load(self, version: int) -> None: ...

    def sleep(self) -> None: ...

    def poll(self, version: int) -> None: ...


class Source:
    def __init__(self) -> None:
        self.requests: list[list[tuple[str, int]]] = []

    def start(self, groups: Any) -> list[Future]:
        futures = []
        for group in groups:
            self.requests.append([(request.prompt.source, request.seed) for request in group])
            futures.append(Future())
            futures[-1].set_result([self.completion(request.seed) for request in group])
        return futures

    def completion(self, seed: int) -> Completion:
        text, ids = "yes" if seed in RIGHT else "no", [5] * (1 + seed)
        logps = [-1.0] * len(ids)
        return Completion(prompt_ids=[1], ids=ids, logps=logps, finish_reason="stop", text=text, versions=[])


def evaluated(*count: int) -> tuple[list[list[tuple[str, int]]], dict[str, float]]:
    source = Source()
    logged = evaluate_rewards(Engine(), source, 0, PROMPTS, load_rewards(["exact_match"], []), None, *count)
    return source.requests, logged


def test_the_seed_of_a_single_completion_is_its_row_number():
    requests, logged = evaluated()
    assert requests == [[("rows:0", 0)], [("rows:1", 1)], [("rows:2", 2)]] and evaluated(1) == (requests, logged)
    assert logged == {
        "eval/reward/mean": pytest.approx(1 / 3), "eval/exact_match/mean": pytest.approx(1 / 3), "eval/len_mean": 2,
        "eval/rows": 3,
    }  # fmt: skip


def test_several_completions_have_different_seeds():
    requests, logged = evaluated(3)
    assert [[seed for _, seed in group] for group in requests] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert [{source for source, _ in group} for group in requests] == [{"rows:0"}, {"rows:1"}, {"rows:2"}]
    assert logged == {
        "eval/reward/mean": pytest.approx(4 / 9), "eval/exact_match/mean": pytest.approx(4 / 9), "eval/len_mean": 5,
        "eval/rows": 3, "eval/reward/best_of_3": pytest.approx(2 / 3),
    }  # fmt: skip


def test_best_of_ignores_completions_without_a_reward():
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


def test_num_generations_eval_adds_best_of_and_does_not_change_training(tmp_path):
    one, four = run(tmp_path / "one"), run(tmp_path / "four", "--num-generations-eval", 4)
    for row in (four[0], four[2]):
        assert 0 <= row["eval/reward/mean"] < row["eval/reward/best_of_4"] <= 1 and row["eval/rows"] == 12
    trained = [
        [{name: x for name, x in row.items() if not name.startswith("eval/")} for row in repeatable(rows)[1:]]
        for rows in (one, four)
    ]
    assert trained[0] == trained[1] and "eval/reward/best_of_1" not in one[0]
