"""A judge: its arguments, its verdicts, its failures, and its column in the reward table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from data.types import Prompt
from rollout.engine import Completion
from rollout.rewards.judge import TIE, Judge, JudgedRewards, open_judged
from rollout.rewards.options import RewardConfig

PROMPTS = [
    Prompt(source=f"rows:{row}", prompt=f"{row}?", ids=[1], columns={"answer": word, "id": row})
    for row, word in enumerate(("yes", "no", "maybe"))
]
seen: list[dict[str, Any]] = []
returns: list[Any] = []


def scripted(prompts, completions, **columns):
    """Return the entries of `returns`, by prompt; raise an entry that is an exception."""
    seen.append({"prompts": prompts, "completions": completions, **columns})
    verdicts = [returns[int(prompt[0])] for prompt in prompts]
    for verdict in verdicts:
        if isinstance(verdict, Exception):
            raise verdict
    return verdicts


def few(completions):
    return [None]


def number(completions):
    return 3


async def later(completions, answer):
    return [group.index(wanted) if wanted in group else None for group, wanted in zip(completions, answer, strict=True)]


def asks(completions, gold):
    return [None for _ in completions]


def rows(size: int, num_prompts: int = 3, **columns: list[Any]) -> tuple[list[Prompt], list[Completion]]:
    prompts = [prompt for prompt in PROMPTS[:num_prompts] for _ in range(size)]
    words = ["yes", "no", "what", "so"]
    completions = [
        Completion(
            prompt_ids=[1], ids=[5, n], logps=[0, 0], finish_reason="stop", text=words[n % size], versions=[],
            columns={name: values[n % size] for name, values in columns.items()},
        )
        for n in range(size * num_prompts)
    ]  # fmt: skip
    return prompts, completions


def judge(name: str, size: int, **options: Any) -> Judge:
    return Judge(f"{__name__}.{name}", size, **options)


def scores(*verdicts: Any, size: int, **options: Any) -> list[list[float | None]]:
    returns[:] = verdicts
    table = judge("scripted", size, **options).score(*rows(size, len(verdicts)))
    flat = [value for (value,) in table.values]
    return [flat[i : i + size] for i in range(0, len(flat), size)]


def test_verdicts():
    assert scores(0, 1, None, size=2) == [[1, 0], [0, 1], [TIE, TIE]]
    assert scores(-1, [1, 0], (0, 1), size=2) == [[TIE, TIE], [0, 1], [1, 0]]
    assert scores([2, 0, 1], np.array([0, 1, 2]), [1, 2], size=3) == [[0.5, 0, 1], [1, 0.5, 0], [None, 1, 0]]
    assert scores(np.int64(1), np.array(0), size=2) == [[0, 1], [1, 0]]


def test_a_bad_verdict_stops_the_run_and_names_the_prompt():
    for verdict, size, message in [
        (2, 2, "returned 2 for rows:1, .* 2 completions; return 0 or 1, "),
        (0, 3, "returned 0 for rows:1, .* 3 completions; return their"),
        ([0], 3, r"returned \[0\] for rows:1"),
        ([0, 0], 2, r"returned \[0, 0\] for rows:1"),
        ([0, 3], 3, r"returned \[0, 3\] for rows:1"),
        (True, 2, "returned True for rows:1"),
        ("first", 2, "returned 'first' for rows:1"),
        (KeyError("x"), 2, r"raised KeyError: 'x' on rows:1 \(.*_judge.py, line .*completions\[i\] are strings"),
    ]:
        with pytest.raises(ValueError, match=f"judge={__name__}.scripted: {message}"):
            scores(None, verdict, None, size=size)
    for name, message in [("few", "returned 1 verdicts for 3 prompts"), ("number", "returned int")]:
        with pytest.raises(ValueError, match=rf"{message} \(rows rows:0, rows:1, rows:2\)"):
            judge(name, 2).score(*rows(2))


def test_with_on_error_none_a_failed_prompt_gets_no_verdict():
    lines: list[str] = []
    verdicts = scores([0, 1], ValueError("no"), [5, 6], size=2, on_error="none", log=lines.append)
    assert verdicts == [[1, 0], [None, None], [None, None]]
    assert len(lines) == 1 and "raised ValueError: no on rows:1" in lines[0] and "4 of 6 rows" in lines[0]


def test_arguments_have_one_entry_per_prompt():
    seen.clear()
    returns[:] = [None, None]
    prompts, completions = rows(2, 2, num_turns=[1, 2])
    judge("scripted", 2).score(prompts, completions)
    assert seen == [{
        "prompts": ["0?", "1?"], "completions": [["yes", "no"]] * 2,
        "completion_ids": [[[5, 0], [5, 1]], [[5, 2], [5, 3]]],
        "answer": ["yes", "no"], "id": [0, 1], "num_turns": [[1, 2]] * 2,
    }]  # fmt: skip


def test_a_judge_may_be_a_coroutine():
    table = judge("later", 2).score(*rows(2))
    assert [value for (value,) in table.values] == [1, 0, 0, 1, TIE, TIE]


def test_a_column_that_no_row_has_is_reported_before_sampling():
    with pytest.raises(ValueError, match=f"judge={__name__}.asks: requires 'gold'"):
        judge("asks", 2).check_columns(PROMPTS, "data")


def test_with_reward_functions_the_judge_is_the_last_column_with_weight_0():
    cfg = RewardConfig(reward_funcs=("exact_match",), reward_weights=("2",))
    rewards = open_judged(cfg, f"{__name__}.later", 2)
    assert isinstance(rewards, JudgedRewards) and rewards.names == ["exact_match", "judge"]
    future = rewards.submit(*rows(2), step=0)
    assert future.done()
    table = future.result()
    assert table.values == [[1, 1], [0, 0], [0, 0], [1, 1], [0, TIE], [0, TIE]] and table.weights == [2, 0]
    assert table.totals == [2, 0, 0, 2, 0, 0] and future.result().values == table.values
    assert rewards.score(*rows(2)).names == ["exact_match"]  # an evaluation
    alone = open_judged(RewardConfig(reward_on_error="none"), f"{__name__}.later", 2)
    assert isinstance(alone, Judge) and alone.names == ["judge"] and alone.metrics() == {"reward/failed_rows": 0}
    rewards.close()
