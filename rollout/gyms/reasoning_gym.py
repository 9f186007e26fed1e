"""The reward `reasoning_gym`: reasoning-gym's verifier for the task of the row (extra `rewards`).

    --data reasoning_gym:chain_sum:size=1000,max_terms=2 --reward-funcs reasoning_gym
    --data rows.jsonl --data-format question_answer --reward-funcs reasoning_gym    # {question, answer, metadata} lines

The answer is the content of the last <answer>...</answer> of the completion, or its whole text if there is none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from data.errors import UserError
from data.reasoning_gym import check_installed, known_tasks, score_answer
from rollout.rewards.functions import Scores, text_of

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def load() -> Callable[..., Scores]:
    """The reward; ValueError if reasoning-gym is not installed."""
    check_installed("reward_funcs=reasoning_gym")
    return score


def score(
    completions: Sequence[Any],
    metadata: Sequence[Any],
    answer: Sequence[Any] | None = None,
    reasoning_gym: Sequence[Any] | None = None,
) -> Scores:
    """One score per completion; None if the row is not reasoning-gym's."""
    count = len(completions)
    answers, origins = answer or [None] * count, reasoning_gym or [None] * count
    scores: Scores = []
    for completion, facts, gold, origin in zip(completions, metadata, answers, origins, strict=True):
        if not isinstance(facts, dict) or not (origin or facts.get("source_dataset")):
            scores.append(None)
            continue
        # Rows from a file do not contain the settings of their task: its defaults are used.
        task, options = (origin["task"], origin["options"]) if origin else (facts["source_dataset"], {})
        if task not in known_tasks():
            raise UserError(f"metadata.source_dataset={task}: no such task of reasoning-gym; leave the row out")
        entry = {"answer": gold, "metadata": facts}
        scores.append(score_answer(task, options, final_answer(text_of(completion)), entry))
    return scores


def final_answer(text: str) -> str:
    """
    >>> final_answer("<think>2 and 2</think> <answer> 4 </answer>"), final_answer(" 4")
    ('4', '4')
    """
    found = ANSWER.findall(text)
    return (found[-1] if found else text).strip()
