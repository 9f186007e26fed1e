"""Records that the loaders return: plain Python, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Messages = list[dict[str, Any]]  # [{"role": "user", "content": "..."}], as chat templates take them


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt to complete.

    >>> Prompt(source="sums.jsonl:3", prompt="2+2=", ids=[50, 43, 50, 61], columns={"answer": "4"})
    """

    source: str  # origin of the row, for messages: "sums.jsonl:3", "task:addition:17"
    prompt: str | Messages  # as passed to rewards; messages if the row is conversational
    ids: list[int]  # as passed to the engine, including the generation prompt
    columns: dict[str, Any] = field(default_factory=dict)  # all other columns of the row, for the rewards
    settings: dict[str, Any] = field(default_factory=dict)  # other inputs of the chat template, such as tools
    weight: float = 1.0  # number of times per epoch

    @property
    def conversational(self) -> bool:
        return not isinstance(self.prompt, str)


@dataclass(frozen=True, kw_only=True)
class TargetPrompt(Prompt):
    """A prompt with its target: the true completion, to which sampled completions are compared.

    columns["ground_truth"] is the target as text. If the conversation continues, columns["remaining_turns"] contains
    the messages after the target's first turn.
    """

    target_ids: list[int]  # follow `ids`; include the end-of-turn token
    target_mask: list[bool] | None = None  # True = written by the assistant; None: all of target_ids


@dataclass(frozen=True, kw_only=True)
class Example:
    """A sequence to imitate: token ids and a loss mask."""

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
    margin: float | None = None  # by how much the chosen response is better, if known (reward models)
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """A prompt with one response, labelled desirable or undesirable."""

    source: str
    prompt_ids: list[int]
    completion_ids: list[int]
    label: bool
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Steps:
    """A solution in steps with a label at the last token of each step."""

    source: str
    ids: list[int]
    labels: list[int]  # 1 = right, 0 = wrong at the last token of a step; -100 elsewhere
    weight: float = 1.0
