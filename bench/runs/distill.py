"""The teacher's prompt of self-distillation in bench/runs/results.py: the question, and the answer."""

from __future__ import annotations

from typing import Any

HINT = "bench.runs.distill.hint"


def hint(row: dict[str, Any]) -> list[dict[str, str]]:
    """Add the answer to the question, for the teacher only."""
    question = row["prompt"][-1]["content"]
    return [{"role": "user", "content": f"{question} The right reply is {row['answer']}"}]
