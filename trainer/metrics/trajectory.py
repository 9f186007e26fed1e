"""Describe an episode for samples.jsonl: its branches, each a list of turns, with what was trained.

    branches_of(completion, tokenizer) -> [
        {"turns": [{"role": "prompt", "tokens": 36, "trained": False, "text": "<|im_start|>user\n..."},
                   {"role": "assistant", "tokens": 9, "trained": True, "text": "<tool_call>...", "calls": ["lookup"]},
                   {"role": "tool", "tokens": 12, "trained": False, "text": "..."},
                   {"role": "assistant", "tokens": 3, "trained": True, "text": "37<|im_end|>"}]},
        {"fork": [0, 2], "turns": [...]}]  # instead of turns 2, 3, ... of branch 0

A branch without "fork" shares at most the start of its prompt with earlier branches. Texts are decoded from the ids,
with special tokens. Each trained token is in exactly one turn.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import Any

import numpy as np

from rollout.engine import Completion

MAX_TEXT = 4000  # characters of a turn


def branches_of(
    completion: Completion, tokenizer: Any, advantage: Sequence[float] | None = None
) -> list[dict[str, Any]]:
    """Return the branches of an episode. advantage: one number per id; trained turns get their mean."""
    parts = [completion, *completion.branches]
    arrays = [np.array(part.prompt_ids + part.ids) for part in parts]
    shared = [[_common_prefix(one, other) for other in arrays] for one in arrays]
    sizes = [len(part.prompt_ids) for part in parts]
    # A branch whose prompt contains sampled turns of others comes after them, because they are trained there.
    depths = [
        sum(size < min(own, same) for size, same in zip(sizes, row, strict=True))
        for own, row in zip(sizes, shared, strict=True)
    ]
    order = sorted(range(len(parts)), key=depths.__getitem__)
    branches: list[dict[str, Any]] = []
    starts: list[int] = []  # index of the first token that each branch shows
    for number, index in enumerate(order):
        start, fork = 0, None
        if number:
            same, parent = max((min(shared[index][one], sizes[index]), -i) for i, one in enumerate(order[:number]))
            start, fork = _fork(branches, starts, -parent, same)
        turns = _turns(parts[index], start, tokenizer, None if index else advantage)
        branches.append({**({} if fork is None else {"fork": fork}), "turns": list(turns)})
        starts.append(start)
    return branches


def _common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if len(differ) else size


def _fork(
    branches: Sequence[dict[str, Any]], starts: Sequence[int], parent: int, same: int
) -> tuple[int, list[int] | None]:
    """Return the turn in which a branch that shares `same` tokens with its parent differs, and where it starts."""
    ends = list(accumulate((turn["tokens"] for turn in branches[parent]["turns"]), initial=starts[parent]))
    turn = sum(end <= same for end in ends[1:])
    return (ends[turn], [parent, turn]) if turn else (starts[parent], branches[parent].get("fork"))


def _turns(part: Completion, start: int, tokenizer: Any, advantage: Sequence[float] | None) -> Iterator[dict[str, Any]]:
    """Yield runs of sampled and of other ids; roles and tool calls are known if each reply has a message."""
    ids, first = part.prompt_ids + part.ids, len(part.prompt_ids)
    mask = [False] * first + (part.mask or [True] * len(part.ids))
    runs = [(trained, list(places)) for trained, places in groupby(range(start, len(ids)), mask.__getitem__)]
    count = sum(trained for trained, _ in runs)
    messages = part.messages or []
    replies = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    replies = [*replies, len(messages)] if len(replies) == count else []
    rewards = part.columns.get("turn_rewards")
    rewards = rewards if isinstance(rewards, list) and len(rewards) == count else []
    number = -1
    for trained, places in runs:
        number += trained
        reply = messages[replies[number]] if replies and number >= 0 else {}
        after = messages[replies[number] + 1 : replies[number + 1]] if reply else []
        roles = ", ".join(dict.fromkeys(str(message.get("role")) for message in after))
        role = "assistant" if trained else roles or ("prompt" if number < 0 else "context")
        text = tokenizer.decode(ids[places[0] : places[-1] + 1], clean_up_tokenization_spaces=False)
        turn = {"role": role, "tokens": len(places), "trained": trained, "text": shorten(text)}
        if trained and reply.get("tool_calls"):
            turn["calls"] = [call.get("function", call).get("name") for call in reply["tool_calls"]]
        if trained and rewards:
            turn["reward"] = rewards[number]
        if trained and advantage is not None:
            turn["advantage"] = statistics.fmean(advantage[place - first] for place in places)
        yield turn


def shorten(text: str, limit: int = MAX_TEXT) -> str:
    """Cut the middle of a long text."""
    extra = len(text) - limit
    return text if extra <= 0 else f"{text[: limit // 2]}\n[{extra} more characters]\n{text[-limit // 2 :]}"
