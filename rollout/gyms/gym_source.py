"""Episodes that an environment plays with our vLLM servers as the model: their turns, and those that fail.

    source = GymSource(play, loop, flag="nemo_gym", title="NeMo Gym", prefix_mismatch="last", log_once=log_once)
    # play: async (request, number in its group) -> Completion

An environment asks for one turn after the other, each time with a whole prompt. Turns become one sequence:

    turn 1: prompt [10, 20]                            sampled [30, 31]
    turn 2: prompt [10, 20, 30, 31, 100, 101, 102]     sampled [40, 41]
    -> prompt_ids [10, 20], ids [30, 31, 100, 101, 102, 40, 41], mask [T, T, F, F, F, T, T]

This needs each turn's prompt to begin with all tokens before it. Prompts are rendered from text again, so one may not:
a template may drop tool calls or thoughts, and text may be tokenised differently (prefix_mismatch).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

from data.errors import UserError
from data.types import Messages, Prompt
from rollout.engine import Completion, Request
from rollout.servers.loop import Loop, together

GIVE_UP = 100  # failures in a row after which the run stops
PrefixMismatch = Literal["last", "drop", "stop"]


class EpisodeError(Exception):
    """One episode failed; `kind` groups similar failures."""

    def __init__(self, text: str, *, kind: str) -> None:
        super().__init__(text)
        self.kind = kind


class UnusableError(UserError):
    """No episode of this environment can be trained on: the run stops."""


@dataclass(frozen=True)
class Turns:
    """Requests to the model of which each continues the one before, as one sequence; at first a single one."""

    prompt_ids: list[int]
    ids: list[int]
    logps: list[float]  # 0 where the model did not sample the token
    mask: list[bool]
    num_turns: int = 1
    versions: tuple[tuple[int, int], ...] = ()  # (weight version, number of tokens it sampled)


def chains(turns: Sequence[Turns]) -> list[Turns]:
    """Join consecutive turns; a new chain starts where a prompt does not continue the turns before it."""
    made: list[Turns] = []
    for turn in turns:
        seen = made[-1].prompt_ids + made[-1].ids if made else []
        if not made or turn.prompt_ids[: len(seen)] != seen:
            made.append(turn)
            continue
        last, between = made[-1], turn.prompt_ids[len(seen) :]
        made[-1] = Turns(
            last.prompt_ids,
            last.ids + between + turn.ids,
            last.logps + [0.0] * len(between) + turn.logps,
            last.mask + [False] * len(between) + turn.mask,
            last.num_turns + 1,
            last.versions + turn.versions,
        )
    return made


def last_chain(
    turns: Sequence[Turns], *, prompt_ids: list[int], max_tokens: int, short: bool, messages: Messages,
    columns: dict[str, Any],
) -> Completion:  # fmt: skip
    """The last turns that form one sequence, as a Completion of at most max_tokens that ends with a sampled token.

    left_out_turns are not in it, because a later prompt did not continue them; short: the environment was cut off.
    """
    chain = chains(turns)[-1] if turns else None
    columns = columns | {
        "num_turns": len(turns),
        "tool_calls": sum(len(message.get("tool_calls") or ()) for message in messages),
        "left_out_turns": len(turns) - chain.num_turns if chain else 0,
    }
    if chain is None:  # the model's answer is empty, and the environment has scored that
        return empty(prompt_ids, columns, messages)
    length = min(len(chain.ids), max_tokens)
    while not chain.mask[length - 1]:  # context that no sampled token follows
        length -= 1
    return Completion(
        prompt_ids=chain.prompt_ids,
        ids=chain.ids[:length],
        logps=chain.logps[:length],
        finish_reason="length" if len(chain.ids) > max_tokens or short else "stop",
        text=next((m["content"] for m in reversed(messages) if m["role"] == "assistant"), ""),
        versions=join_versions(chain.versions, sum(chain.mask[:length])),
        mask=chain.mask[:length],
        messages=messages,
        columns=columns,
    )


def join_versions(versions: Sequence[tuple[int, int]], num_tokens: int) -> list[tuple[int, int]]:
    """Those of the first num_tokens sampled tokens, neighbours with the same version as one.

    >>> join_versions([(3, 2), (3, 4), (4, 5)], 8)
    [(3, 6), (4, 2)]
    """
    joined: list[tuple[int, int]] = []
    for version, count in versions:
        count = min(count, num_tokens - sum(before for _, before in joined))
        if count and joined and joined[-1][0] == version:
            joined[-1] = (version, joined[-1][1] + count)
        elif count:
            joined.append((version, count))
    return joined


def empty(prompt_ids: list[int], columns: dict[str, Any], messages: Messages) -> Completion:
    """A completion with one masked token in place of none, which is not trained on."""
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


class GymSource:
    """Source of such episodes: one call of play(request, number in its group) for each request.

    A failed episode (EpisodeError, ValueError) becomes a completion without trained tokens and without a reward, logged
    once per kind of failure; GIVE_UP failures in a row stop the run.
    """

    def __init__(
        self,
        play: Callable[[Request, int], Awaitable[Completion]],
        loop: Loop,
        *,
        flag: str,  # of the environment's settings, for error messages: nemo_gym
        title: str,  # of the environment, for the log
        prefix_mismatch: PrefixMismatch,
        log_once: Callable[[str, str], None],  # (kind, text)
        hint: str,  # where to look when episodes fail
    ) -> None:
        self.play, self.loop, self.flag, self.title = play, loop, flag, title
        self.prefix_mismatch, self.log_once, self.hint = prefix_mismatch, log_once, hint
        self._running: set[Future[Any]] = set()
        self._in_a_row = 0

    def start(self, groups: Sequence[Sequence[Request]]) -> list[Future[list[Completion]]]:
        """Start all episodes; one future per group, its completions in the order of the requests."""
        futures = []
        for group in groups:
            episodes = [self._episode(request, number) for number, request in enumerate(group)]
            futures.append(future := self.loop.start(together(episodes)))
            self._running.add(future)
            future.add_done_callback(self._running.discard)
        return futures

    def close(self) -> None:
        """Cancel what runs; the environment is closed by its owner."""
        for future in list(self._running):
            future.cancel()

    async def _episode(self, request: Request, number: int) -> Completion:
        try:
            completion = await self.play(request, number)
        except UnusableError:
            raise
        except (EpisodeError, ValueError) as error:
            kind = error.kind if isinstance(error, EpisodeError) else str(error).partition(":")[0]
            return self._failed(request.prompt, kind, str(error))
        if completion.columns["left_out_turns"]:
            return self._mismatched(request.prompt, completion)
        self._in_a_row = 0
        return completion

    def _mismatched(self, prompt: Prompt, completion: Completion) -> Completion:
        """A turn's prompt does not continue the turns before it: only the turns after the last mismatch are kept."""
        what = "the prompt of a turn is not the turns before it, token by token"
        if self.prefix_mismatch == "stop":
            raise UserError(
                f"{self.flag}.prefix_mismatch=stop: {prompt.source}: {what}; use a chat template that keeps earlier "
                "turns as they were, or set it to last or drop"
            )
        if self.prefix_mismatch == "drop":
            return self._failed(prompt, "prefix", what)
        text = f"{self.title}: {prompt.source}: {what}; of such episodes only the last turns are trained on"
        self.log_once("prefix", f"{text} (rollout/left_out_turns counts the others)")
        return completion

    def _failed(self, prompt: Prompt, kind: str, reason: str) -> Completion:
        self._in_a_row += 1
        if self._in_a_row >= GIVE_UP:
            raise UserError(
                f"{self.flag}: {self._in_a_row} episodes in a row have failed, the last one {prompt.source} ({reason})"
                f"; {self.hint}"
            )
        self.log_once(kind, f"{self.title}: {prompt.source}: {reason}; such episodes are not trained on")
        columns = {"env_reward": None, "env_failed": 1.0, "num_turns": 0, "tool_calls": 0, "left_out_turns": 0}
        return empty(prompt.ids, columns, [])
