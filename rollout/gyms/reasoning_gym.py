"""The reward `reasoning_gym`: reasoning-gym's verifier for the row's task (extra `rewards`).

    --data reasoning_gym:chain_sum:size=1000,max_terms=2 --reward-funcs reasoning_gym
    --data rows.jsonl --data-format question_answer --reward-funcs reasoning_gym    # {question, answer, metadata} lines

The answer is the content of the last <answer>...</answer> in the completion, or the whole text if there is none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from data.errors import UserError
from data.reasoning_gym import known_tasks, score_answer
from rollout.rewards.functions import Scores, text_of

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def score(
    completions: Sequence[Any],
    metadata: Sequence[Any],
    answer: Sequence[Any] | None = None,
    reasoning_gym: Sequence[Any] | None = None,
) -> Scores:
    """Return one score per completion; None for rows from other data."""
    count = len(completions)
    answers, origins = answer or [None] * count, reasoning_gym or [None] * count
    scores: Scores = []
    for completion, row, gold, origin in zip(completions, metadata, answers, origins, strict=True):
        if not isinstance(row, dict) or not (origin or row.get("source_dataset")):
            scores.append(None)
            continue
        # Rows from a file do not contain their task's settings, so the defaults are used.
        task, options = (origin["task"], origin["options"]) if origin else (row["source_dataset"], {})
        if task not in known_tasks():
            raise UserError(f"metadata.source_dataset={task}: no such task in reasoning-gym; remove the row")
        entry = {"answer": gold, "metadata": row}
        scores.append(score_answer(task, options, final_answer(text_of(completion)), entry))
    return scores


def final_answer(text: str) -> str:
    """
    >>> final_answer("<think>2 and 2</think> <answer> 4 </answer>"), final_answer(" 4")
    ('4', '4')
    """
    answers = ANSWER.findall(text)
    return (answers[-1] if answers else text).strip()
