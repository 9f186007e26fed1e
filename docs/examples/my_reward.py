"""Two rewards: one of the text alone, and one that reads a column of the data.

python -m rollout.rewards --check my_reward.closeness --data task:addition --model builtin:tiny
python -m trainer --method grpo --reward-funcs my_reward.closeness my_reward.digits_only --reward-weights 1.0 0.2
"""

from __future__ import annotations

from rollout.rewards.functions import text_of


def digits_only(completions, **columns) -> list[float]:
    return [float(text_of(completion).strip().isdigit()) for completion in completions]


def closeness(completions, answer, **columns) -> list[float | None]:
    """1 for the right number, 0.5 for one that is 1 off, and so on; None, no reward at all, where the row has none."""
    return [
        None if right is None else _close(text_of(completion).strip(), int(right))
        for completion, right in zip(completions, answer, strict=True)
    ]


def _close(text: str, right: int) -> float:
    return 1 / (1 + abs(int(text) - right)) if text.isdecimal() and len(text) < 10 else 0.0
