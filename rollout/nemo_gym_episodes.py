"""What an agent of NeMo Gym answers to /run, as one Completion. Plain functions, no connection.

    turn 1: prompt [10, 20]                            made [30, 31]
    turn 2: prompt [10, 20, 30, 31, 100, 101, 102]     made [40, 41]
    -> prompt_ids [10, 20], ids [30, 31, 100, 101, 102, 40, 41], mask [T, T, F, F, F, T, T]

That holds only if each turn's prompt begins with all that came before, token by token. The gym renders every prompt
anew from text, so it need not: a template may leave out tool calls or thoughts, and text may become other tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from data.rows.nemo_gym import item_messages
from rollout.engine import Completion

LOGP_SLACK = 1e-3  # logit minus logsumexp may round to just above 0


@dataclass(frozen=True)
class Turn:
    """One request to the model: what it was given, and what it made."""

    prompt_ids: list[int]
    ids: list[int]
    logps: list[float]


@dataclass(frozen=True)
class Chain:
    """Turns that continue each other, as one sequence."""

    prompt_ids: list[int]
    ids: list[int]
    logps: list[float]
    mask: list[bool]
    num_turns: int


class NoTokenIds(ValueError):
    """The model server does not tell which tokens it made: no episode can be trained on."""


def read_reward(reply: dict[str, Any]) -> float:
    reward = reply.get("reward")
    if isinstance(reward, bool) or not isinstance(reward, (int, float)) or not math.isfinite(reward):
        raise ValueError(f"reward={reward!r}: is not a finite number")
    return float(reward)


def read_turns(items: Sequence[Any]) -> list[Turn]:
    """The model's turns among the items of a response. A turn's ids are at its last item."""
    turns, said = [], False
    for number, item in enumerate(items):
        if not isinstance(item, dict):
            raise ValueError(f"output[{number}]: is a {type(item).__name__}, not an object")
        if item.get("generation_token_ids") is None:
            said = said or item.get("type") == "function_call" or _says(item)
            continue
        turns.append(_turn(item, number))
    turns = [turn for turn in turns if turn.ids]
    if said and not turns:
        raise NoTokenIds(
            "nemo_gym.multi_turn=True: the episodes come without token ids; set return_token_id_information: true in "
            "the gym's model server"
        )
    return turns


def chains(turns: Sequence[Turn]) -> list[Chain]:
    """The turns in order, cut where a prompt is not what came before it."""
    made: list[Chain] = []
    for turn in turns:
        last = made[-1] if made else None
        seen = last.prompt_ids + last.ids if last else []
        if last is None or turn.prompt_ids[: len(seen)] != seen:
            made.append(Chain(turn.prompt_ids, list(turn.ids), list(turn.logps), [True] * len(turn.ids), 1))
            continue
        between = turn.prompt_ids[len(seen) :]
        made[-1] = Chain(
            last.prompt_ids,
            last.ids + between + turn.ids,
            last.logps + [0.0] * len(between) + turn.logps,
            last.mask + [False] * len(between) + [True] * len(turn.ids),
            last.num_turns + 1,
        )
    return made


def read_episode(
    reply: dict[str, Any], *, prompt_ids: list[int], max_tokens: int, version: int, vocab_size: int | None = None
) -> tuple[Completion, int]:
    """The Completion of an episode, and how many turns are not in it: those before a prompt that did not fit."""
    response = reply.get("response")
    if not isinstance(response, dict) or not isinstance(response.get("output"), list):
        raise ValueError("response: has no output")
    items = response["output"]
    reward = read_reward(reply)
    turns = read_turns(items)
    messages = item_messages(items, "output")
    columns: dict[str, Any] = {
        "env_reward": reward,
        "env_failed": 0.0,
        "num_turns": len(turns),
        "tool_calls": sum(item.get("type") == "function_call" for item in items),
        "left_out_turns": 0,
    }
    if isinstance(reply.get("reward_components"), dict):
        columns["reward_components"] = reply["reward_components"]
    if not turns:  # the model said nothing, and the environment has judged that
        return empty(prompt_ids, columns, messages), 0
    for number, turn in enumerate(turns):
        _check_ids(turn, number, vocab_size)
    parts = chains(turns)
    chain = parts[-1]
    columns["left_out_turns"] = len(turns) - chain.num_turns
    cut = len(chain.ids) > max_tokens
    ids, logps, mask = chain.ids[:max_tokens], chain.logps[:max_tokens], chain.mask[:max_tokens]
    while not mask[-1]:  # nothing follows that it would be context for
        ids, logps, mask = ids[:-1], logps[:-1], mask[:-1]
    short = bool(response.get("incomplete_details")) or response.get("status") == "incomplete"
    completion = Completion(
        prompt_ids=chain.prompt_ids,
        ids=ids,
        logps=logps,
        finish_reason="length" if cut or short else "stop",
        text=next((m["content"] for m in reversed(messages) if m["role"] == "assistant"), ""),
        versions=[(version, sum(mask))],
        mask=mask,
        messages=messages,
        columns=columns,
    )
    return completion, columns["left_out_turns"]


def failed(prompt_ids: list[int]) -> Completion:
    """An episode that did not come to its end: nothing to train on, and no reward."""
    columns = {"env_reward": None, "env_failed": 1.0, "num_turns": 0, "tool_calls": 0, "left_out_turns": 0}
    return empty(prompt_ids, columns, [])


def empty(prompt_ids: list[int], columns: dict[str, Any], messages: list[dict[str, Any]]) -> Completion:
    """One token that stands for none: whatever it is, it is not trained."""
    return Completion(
        prompt_ids=list(prompt_ids),
        ids=[prompt_ids[-1]],
        logps=[0.0],
        finish_reason="length",
        text="",
        versions=[],
        mask=[False],
        messages=messages or [{"role": "assistant", "content": ""}],
        columns=columns,
    )


def response_of(messages: Sequence[dict[str, Any]], model: str) -> dict[str, Any]:
    """A response as /verify takes it, of the messages that followed a prompt."""
    output: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        if message["role"] == "tool":
            call_id = message.get("tool_call_id") or ""
            output.append({"type": "function_call_output", "call_id": call_id, "output": str(message["content"])})
            continue
        calls = message.get("tool_calls") or []
        if message.get("content") or not calls:
            text = {"type": "output_text", "text": message.get("content") or "", "annotations": []}
            head = {"id": f"msg_{number}", "type": "message", "role": "assistant", "status": "completed"}
            output.append({**head, "content": [text]})
        for call in calls:
            function = call.get("function", call)
            name, arguments, call_id = function["name"], function["arguments"], call.get("id") or f"call_{number}"
            output.append({"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments})
    return {
        "id": "resp",
        "created_at": 0.0,
        "model": model,
        "object": "response",
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }


def _turn(item: dict[str, Any], number: int) -> Turn:
    ids, prompt_ids = (_integers(item.get(key)) for key in ("generation_token_ids", "prompt_token_ids"))
    logps = item.get("generation_log_probs")
    if ids is None or not prompt_ids or not isinstance(logps, list) or len(logps) != len(ids):
        raise ValueError(f"output[{number}]: its token ids and log-probs do not belong together")
    if not all(isinstance(logp, (int, float)) and -math.inf < logp <= LOGP_SLACK for logp in logps):
        raise ValueError(f"output[{number}]: holds what is no log-prob")
    return Turn(prompt_ids, ids, [min(float(logp), 0.0) for logp in logps])


def _integers(values: Any) -> list[int] | None:
    """Some versions send ids as text."""
    try:
        return [int(value) for value in values]
    except (TypeError, ValueError):
        return None


def _check_ids(turn: Turn, number: int, vocab_size: int | None) -> None:
    ids = turn.prompt_ids + turn.ids
    if min(ids) < 0 or (vocab_size is not None and max(ids) >= vocab_size):
        raise ValueError(f"turn {number}: an id outside the vocabulary of {vocab_size}; is it another model's?")


def _says(item: dict[str, Any]) -> bool:
    content = item.get("content")
    parts = content if isinstance(content, list) else []
    texts = [content] if isinstance(content, str) else [p.get("text") for p in parts if isinstance(p, dict)]
    return item.get("type") == "message" and any(isinstance(text, str) and text.strip() for text in texts)
