"""A judge: what it gets, the verdicts it may return, what happens when it fails, and its column in the table."""

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
    """Returns what the test has put into `returns`, by prompt; an exception is raised."""
    seen.append({"prompts": prompts, "completions": completions, **columns})
    found = [returns[int(prompt[0])] for prompt in prompts]
    for verdict in found:
        if isinstance(verdict, Exception):
            raise verdict
    return found


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


@pytest.mark.parametrize(
    ("verdict", "size", "sentence"),
    [
        (2, 2, "returned 2 for rows:1, which is no verdict on 2 completions; return 0 or 1, their places from best to"),
        (
            0,
            3,
            "returned 0 for rows:1, which is no verdict on 3 completions; return their places from best to worst",
        ),
        ([0], 3, r"returned \[0\] for rows:1"),
        ([0, 0], 2, r"returned \[0, 0\] for rows:1"),
        ([0, 3], 3, r"returned \[0, 3\] for rows:1"),
        (True, 2, "returned True for rows:1"),
        ("first", 2, "returned 'first' for rows:1"),
        (
            KeyError("x"),
            2,
            r"raised KeyError: 'x' on rows:1 \(.*_judge.py, line .*\); .*; completions\[i\] are strings",
        ),
    ],
)
def test_a_verdict_that_is_none_stops_and_names_the_prompt(verdict, size, sentence):
    with pytest.raises(ValueError, match=f"judge={__name__}.scripted: {sentence}"):
        scores(None, verdict, None, size=size)


def test_whole_returns_that_do_not_fit():
    for name, sentence in (("few", r"returned 1 verdicts for 3 prompts \(rows rows:0 to rows:2\)"),
                           ("number", r"returned int \(rows rows:0 to rows:2\); return a list")):  # fmt: skip
        with pytest.raises(ValueError, match=sentence):
            judge(name, 2).score(*rows(2))


def test_with_on_error_none_a_prompt_is_left_out():
    told: list[str] = []
    found = scores([0, 1], ValueError("no"), [5, 6], size=2, on_error="none", log=told.append)
    assert found == [[1, 0], [None, None], [None, None]]
    assert len(told) == 1 and "raised ValueError: no on rows:1" in told[0] and "4 of the 6 rows" in told[0]


def test_it_gets_one_entry_for_each_prompt():
    seen.clear()
    returns[:] = [None, None]
    prompts, completions = rows(2, 2, num_turns=[1, 2])
    judge("scripted", 2).score(prompts, completions)
    assert seen == [{
        "prompts": ["0?", "1?"], "completions": [["yes", "no"]] * 2,
        "completion_ids": [[[5, 0], [5, 1]], [[5, 2], [5, 3]]],
        "answer": ["yes", "no"], "id": [0, 1], "num_turns": [[1, 2]] * 2,
    }]  # fmt: skip


def test_it_may_be_a_coroutine():
    table = judge("later", 2).score(*rows(2))
    assert [value for (value,) in table.values] == [1, 0, 0, 1, TIE, TIE]


def test_a_column_that_no_row_has_is_refused_before_anything_is_sampled():
    with pytest.raises(ValueError, match=f"judge={__name__}.asks: asks for 'gold', which no row of data has"):
        judge("asks", 2).check_columns(PROMPTS, "data")


def test_beside_reward_functions_it_is_the_last_column_and_has_no_weight():
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
