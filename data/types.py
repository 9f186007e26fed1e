"""Records that the loaders return: plain Python, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Messages = list[dict[str, Any]]  # [{"role": "user", "content": "..."}], as chat templates take them


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt to complete.

    >>> Prompt(source="sums.jsonl:3", prompt="2+2=", ids=[50, 43, 50, 61], columns={"answer": "4"})
    """

    source: str  # where the row came from, for messages: "sums.jsonl:3", "task:addition:17"
    prompt: str | Messages  # as rewards get it; a list of messages if the row is conversational
    ids: list[int]  # what the engine gets, generation prompt included
    columns: dict[str, Any] = field(default_factory=dict)  # every other column of the row, for the rewards
    settings: dict[str, Any] = field(default_factory=dict)  # what the chat template gets besides the messages
    weight: float = 1.0  # how often the row appears in one epoch

    @property
    def conversational(self) -> bool:
        return not isinstance(self.prompt, str)


@dataclass(frozen=True, kw_only=True)
class TargetPrompt(Prompt):
    """A prompt with its target, the true completion that completions are compared with.

    columns["ground_truth"] is the target as text; columns["remaining_turns"] are the messages after its first turn, if
    the conversation goes on.
    """

    target_ids: list[int]  # follow `ids`; include the end-of-turn token
    target_mask: list[bool] | None = None  # True = written by the assistant; None: all of target_ids


@dataclass(frozen=True, kw_only=True)
class Example:
    """One sequence to imitate: token ids, and which of them are trained."""

    source: str
    ids: list[int]
    mask: list[bool]  # True = trained token, same length as ids
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A prompt with a preferred and a dispreferred response."""

    source: str
    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]
    margin: float | None = None  # how much better the chosen response is, if the data has it (reward models)
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """A prompt with one response that is desirable or not."""

    source: str
    prompt_ids: list[int]
    completion_ids: list[int]
    label: bool
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Steps:
    """A solution in steps, each labelled at its last token."""

    source: str
    ids: list[int]
    labels: list[int]  # 1 = right, 0 = wrong at the last token of a step; -100 elsewhere
    weight: float = 1.0
