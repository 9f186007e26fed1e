"""Episodes that an environment runs with the run's vLLM servers as the model: join their turns, handle failures.

    source = GymSource(play, loop, flag="nemo_gym", title="NeMo Gym", prefix_mismatch="last", log_once=log_once)
    # play: async (request, index in its group) -> Completion

An environment requests turns sequentially, each with a full prompt. The turns become one sequence:

    turn 1: prompt [10, 20]                            sampled [30, 31]
    turn 2: prompt [10, 20, 30, 31, 100, 101, 102]     sampled [40, 41]
    -> prompt_ids [10, 20], ids [30, 31, 100, 101, 102, 40, 41], mask [T, T, F, F, F, T, T]

This requires each turn's prompt to start with all previous tokens. Prompts are rendered again from text, so this may
fail: a template may drop tool calls or thinking, and text may encode differently (prefix_mismatch).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

from data.errors import UserError
from data.types import Messages, Prompt
from data.user_code import printable
from rollout.engine import Completion, Request, join_versions
from rollout.rewards.calls import MAX_REWARD
from rollout.servers.loop import Loop, together

MAX_FAILURES = 100  # consecutive failures that stop the run
PrefixMismatch = Literal["last", "drop", "stop"]


class EpisodeError(Exception):
    """One episode failed; `kind` groups similar failures."""

    def __init__(self, text: str, *, kind: str) -> None:
        super().__init__(text)
        self.kind = kind


class UnusableError(UserError):
    """No episode of this environment can be trained on, so the run stops."""


def read_reward(value: Any) -> float:
    """Return an environment's reward; raise for NaN, text and numbers that float32 rewards cannot have."""
    if isinstance(value, bool) or not isinstance(value, Real) or not abs(value) <= MAX_REWARD:
        raise UserError(f"reward={shorten(value)}: not a number up to +-{MAX_REWARD:g}")
    return float(value)


def shorten(value: Any) -> str:
    """Return the start of a value from an environment, printable and in one line."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply; an integer with too many digits
        text = f"a {type(value).__name__}"
    return printable(text if len(text) <= 80 else f"{text[:80]}...")


@dataclass(frozen=True)
class TurnChain:
    """One turn, or several turns joined to one sequence."""

    prompt_ids: list[int]
    ids: list[int]
    logps: list[float]  # 0 for tokens that the model did not sample
    mask: list[bool]
    num_turns: int = 1
    versions: tuple[tuple[int, int], ...] = ()  # (weight version, number of tokens sampled by it)


def join_turns(turns: Sequence[TurnChain]) -> list[TurnChain]:
    """Join consecutive turns; start a new chain if a prompt does not continue the previous turns."""
    joined_turns: list[TurnChain] = []
    for turn in turns:
        seen = joined_turns[-1].prompt_ids + joined_turns[-1].ids if joined_turns else []
        if not joined_turns or turn.prompt_ids[: len(seen)] != seen:
            joined_turns.append(turn)
            continue
        last, between = joined_turns[-1], turn.prompt_ids[len(seen) :]
        joined_turns[-1] = TurnChain(
            last.prompt_ids,
            last.ids + between + turn.ids,
            last.logps + [0.0] * len(between) + turn.logps,
            last.mask + [False] * len(between) + turn.mask,
            last.num_turns + 1,
            last.versions + turn.versions,
        )
    return joined_turns


def last_chain(
    turns: Sequence[TurnChain], *, prompt_ids: list[int], max_tokens: int, truncated: bool, messages: Messages,
    columns: dict[str, Any],
) -> Completion:  # fmt: skip
    """Return the last chain as a Completion of at most max_tokens that ends with a sampled token.

    left_out_turns counts the turns of earlier chains. `truncated`: the environment ran out of tokens.
    """
    chain = join_turns(turns)[-1] if turns else None
    columns = columns | {
        "num_turns": len(turns),
        "tool_calls": sum(len(message.get("tool_calls") or ()) for message in messages),
        "left_out_turns": len(turns) - chain.num_turns if chain else 0,
    }
    if chain is None:  # the environment scored an empty answer
        return masked_completion(prompt_ids, columns, messages)
    length = min(len(chain.ids), max_tokens)
    while not chain.mask[length - 1]:  # drop context that no sampled token follows
        length -= 1
    return Completion(
        prompt_ids=chain.prompt_ids,
        ids=chain.ids[:length],
        logps=chain.logps[:length],
        finish_reason="length" if len(chain.ids) > max_tokens or truncated else "stop",
        text=next((m["content"] for m in reversed(messages) if m["role"] == "assistant"), ""),
        versions=join_versions(chain.versions, sum(chain.mask[:length])),
        mask=chain.mask[:length],
        messages=messages,
        columns=columns,
    )


def masked_completion(prompt_ids: list[int], columns: dict[str, Any], messages: Messages) -> Completion:
    """Return a completion of one masked token, because a completion cannot be empty."""
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
    """Source of episodes: one call of play(request, index in its group) per request.

    A failed episode (EpisodeError, ValueError) becomes a completion without trained tokens and without a reward. Each
    kind of failure is logged once. MAX_FAILURES consecutive failures stop the run.
    """

    def __init__(
        self,
        play: Callable[[Request, int], Awaitable[Completion]],
        loop: Loop,
        *,
        flag: str,  # prefix of the environment's flags, for error messages: nemo_gym
        title: str,  # name of the environment, for the log
        prefix_mismatch: PrefixMismatch,
        log_once: Callable[[str, str], None],  # (kind, text)
        hint: str,  # what to check if episodes fail
    ) -> None:
        self.play, self.loop, self.flag, self.title = play, loop, flag, title
        self.prefix_mismatch, self.log_once, self.hint = prefix_mismatch, log_once, hint
        self._running: set[Future[Any]] = set()
        self._num_failures = 0

    def start(self, groups: Sequence[Sequence[Request]]) -> list[Future[list[Completion]]]:
        """Start all episodes; return one future per group, with completions in request order."""
        futures = []
        for group in groups:
            episodes = [self._episode(request, index) for index, request in enumerate(group)]
            futures.append(future := self.loop.start(together(episodes)))
            self._running.add(future)
            future.add_done_callback(self._running.discard)
        return futures

    def close(self) -> None:
        """Cancel running episodes. The owner of the environment closes it."""
        for future in list(self._running):
            future.cancel()

    async def _episode(self, request: Request, index: int) -> Completion:
        try:
            completion = await self.play(request, index)
        except UnusableError:
            raise
        except (EpisodeError, ValueError) as error:
            kind = error.kind if isinstance(error, EpisodeError) else str(error).partition(":")[0]
            return self._failed(request.prompt, kind, str(error))
        if completion.columns["left_out_turns"]:
            return self._mismatched(request.prompt, completion)
        self._num_failures = 0
        return completion

    def _mismatched(self, prompt: Prompt, completion: Completion) -> Completion:
        """Apply prefix_mismatch to an episode with a turn whose prompt does not continue the previous turns."""
        what = "the prompt of a turn does not start with the tokens of the previous turns"
        if self.prefix_mismatch == "stop":
            raise UserError(
                f"{self.flag}.prefix_mismatch=stop: {prompt.source}: {what}; use a chat template that does not change "
                "earlier turns, or set prefix_mismatch to last or drop"
            )
        if self.prefix_mismatch == "drop":
            return self._failed(prompt, "prefix", what)
        text = f"{self.title}: {prompt.source}: {what}; only the turns since then are trained on"
        self.log_once("prefix", f"{text} (rollout/left_out_turns counts the dropped turns)")
        return completion

    def _failed(self, prompt: Prompt, kind: str, reason: str) -> Completion:
        self._num_failures += 1
        if self._num_failures >= MAX_FAILURES:
            raise UserError(
                f"{self.flag}: {self._num_failures} consecutive episodes failed, the last one {prompt.source} "
                f"({reason}); {self.hint}"
            )
        self.log_once(kind, f"{self.title}: {prompt.source}: {reason}; failed episodes are not trained on")
        columns = {"env_reward": None, "env_failed": 1.0, "num_turns": 0, "tool_calls": 0, "left_out_turns": 0}
        return masked_completion(prompt.ids, columns, [])
