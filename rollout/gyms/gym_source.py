"""Episodes of an environment or program whose model is the policy: failures, and rewrites of history.

    source = GymSource(play, endpoint, flag="nemo_gym", title="NeMo Gym", log_once=log_once, hint="...")

play(endpoint, request, index in its group) returns a Completion, usually of a session (episodes/session.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from numbers import Real
from typing import Any

from data.errors import UserError
from data.types import Prompt
from data.user_code import printable
from rollout.engine import Completion, Request
from rollout.episodes.endpoint import Endpoint
from rollout.episodes.session import Session, UnusableError, masked_completion
from rollout.gyms.options import PrefixMismatch
from rollout.rewards.calls import MAX_REWARD
from rollout.servers.loop import Loop, together

MAX_FAILURES = 100  # consecutive failures that stop the run
# Columns of the completions of an environment that rewards them; reward_components is optional.
COLUMNS = ("env_reward", "env_failed", "num_turns", "tool_calls", "branches", "reward_components")


class EpisodeError(Exception):
    """One episode failed; `kind` groups similar failures. columns: for rewards, which are called but not used."""

    def __init__(self, text: str, *, kind: str, columns: dict[str, Any] | None = None) -> None:
        super().__init__(text)
        self.kind, self.columns = kind, columns or {}


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


def once_per_kind(log: Callable[[str], None]) -> Callable[[str, str], None]:
    """Return log_once(kind, text), which logs the first text of each kind."""
    reported: set[str] = set()

    def log_once(kind: str, text: str) -> None:
        if kind not in reported:
            reported.add(kind)
            log(text)

    return log_once


def log_too_long(log_once: Callable[[str, str], None], title: str, prompt: Prompt, session: Session) -> None:
    """Log that a row's first request does not fit into the context: its episode is empty, but has not failed."""
    if session.is_full and not session.turns:
        text = f"{session.rejected}; the episode counts as truncated and is not trained on"
        log_once("too long", f"{title}: {prompt.source}: {text}")


class GymSource:
    """Source of episodes: one call of play() per request.

    A failed episode (EpisodeError, ValueError) becomes a completion without trained tokens and without a reward. Each
    kind of failure is logged once. MAX_FAILURES consecutive failures stop the run; unless all_may_fail, so do the
    failures of all episodes of the first batch.
    """

    def __init__(
        self,
        play: Callable[[Endpoint, Request, int], Awaitable[Completion]],
        endpoint: Endpoint | None,  # None on ranks that never start an episode
        *,
        loop: Loop | None = None,  # runs the episodes; None: the endpoint's
        flag: str,  # prefix of the environment's flags, for error messages: nemo_gym
        title: str,  # name of the environment, for the log
        log_once: Callable[[str, str], None],  # (kind, text)
        hint: str,  # what to check if episodes fail
        prefix_mismatch: PrefixMismatch = "branch",
        all_may_fail: bool = True,
    ) -> None:
        self.play, self.endpoint, self.flag, self.title = play, endpoint, flag, title
        self.loop = loop or (endpoint and endpoint.loop)
        self.prefix_mismatch, self.log_once, self.hint = prefix_mismatch, log_once, hint
        self._running: set[Future[Any]] = set()
        self._num_failures = self._num_first = 0
        self._limit = MAX_FAILURES if all_may_fail else 0  # 0: until the first success, the number of episodes

    def start(self, groups: Sequence[Sequence[Request]]) -> list[Future[list[Completion]]]:
        """Start all episodes; return one future per group, with completions in request order."""
        assert self.loop is not None and self.endpoint is not None
        self._num_first = sum(map(len, groups))
        futures = []
        for group in groups:
            episodes = [self._episode(request, index) for index, request in enumerate(group)]
            futures.append(future := self.loop.start(together(episodes)))
            self._running.add(future)
            future.add_done_callback(self._running.discard)
            future.add_done_callback(lambda _: self.endpoint.wake())
        return futures

    def advance(self) -> bool:
        """Sample in process what the episodes have requested; False: the engine samples in the background."""
        return self.endpoint is not None and self.endpoint.advance()

    def close(self) -> None:
        """Cancel running episodes. The owner of the environment closes it."""
        for future in list(self._running):
            future.cancel()

    async def _episode(self, request: Request, index: int) -> Completion:
        assert request.prompt is not None and self.endpoint is not None
        try:
            completion = await self.play(self.endpoint, request, index)
            if completion.branches and self.prefix_mismatch in ("drop", "stop"):
                what = f"{len(completion.branches)} turns do not continue the messages of the previous turns"
                if self.prefix_mismatch == "drop":
                    raise EpisodeError(what, kind="prefix")
                raise UnusableError(
                    f"{self.flag}.prefix_mismatch=stop: {request.prompt.source}: {what}; use an agent that does not "
                    "change earlier turns, or set prefix_mismatch to branch, last or drop"
                )
        except UnusableError:
            raise
        except (EpisodeError, ValueError) as error:
            kind = error.kind if isinstance(error, EpisodeError) else str(error).partition(":")[0]
            return self._failed(request.prompt, kind, str(error), getattr(error, "columns", {}))
        if self.prefix_mismatch == "last":
            completion = replace(completion, branches=())
        self._num_failures, self._limit = 0, MAX_FAILURES
        return completion

    def _failed(self, prompt: Prompt, kind: str, reason: str, columns: dict[str, Any]) -> Completion:
        self._num_failures += 1
        limit = self._limit or min(self._num_first, MAX_FAILURES)
        if self._num_failures >= limit:
            number = f"all {limit}" if not self._limit else f"{limit} consecutive"
            raise UnusableError(
                f"{self.flag}: {number} episodes failed, the last one {prompt.source} ({reason}); {self.hint}"
            )
        self.log_once(kind, f"{self.title}: {prompt.source}: {reason}; failed episodes are not trained on")
        counts = {"env_reward": None, "env_failed": 1.0, "num_turns": 0, "tool_calls": 0, "branches": 0}
        return masked_completion(prompt.ids, counts | columns, [])
