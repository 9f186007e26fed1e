"""Custom rewards of recipes, written as a user would write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout.rewards.functions import find_last_number, text_of

FARTHEST = 100  # what an answer without a number gets, and one that is farther off


def distance(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    """Minus how far the last number of the text is from the answer, in units: a reward of another size than 0 and 1."""
    scores: list[float | None] = []
    for completion, gold in zip(completions, answer, strict=True):
        said = find_last_number(text_of(completion))
        scores.append(-float(FARTHEST if said is None else min(abs(said - int(gold)), FARTHEST)))
    return scores


def same_answer(row):
    """For SDPO on sums: a sum with the same answer that needs no carry, 32+10= for 17+25=; above 99 the question."""
    solution = int(row["solution"])
    return [{"role": "user", "content": f"{solution - 10}+10="}] if 20 <= solution < 100 else row["prompt"]
