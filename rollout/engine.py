"""The protocol every rollout engine speaks; `local.py` is the in-process one, `vllm_engine.py` that of servers."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from rollout.types import Completion, Request, Sampling


class Engine(Protocol):
    """Token ids in, token ids and log-probs out."""

    version: int
    """Version of the weights that will make the next token: the optimizer step they came from."""

    concurrent: bool
    """Whether submit returns at once and the completions come while the caller does something else."""

    asleep: bool
    """Whether load must come before the next request, also where the weights have not changed."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """One completion per request, in order."""

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> Future[list[Completion]]:
        """The same without waiting; what runs in process has finished when this returns."""

    def tend(self, version: int | None = None) -> None:
        """What the thread that owns the weights does now and then while it waits for what it has started.

        `version` is that of the trainer's weights by now, where it may be newer than what was loaded last.
        """

    def score(self, sequences: Sequence[tuple[list[int], list[int]]], temperature: float) -> list[list[float]]:
        """Log-probs of given completions: [(prompt ids, completion ids)] -> one list per pair."""

    def load(self, version: int) -> None:
        """Take the trainer's current weights and call them `version`; awake afterwards, ready to generate."""

    def pause(self) -> None:
        """Stop making tokens; requests wait."""

    def resume(self) -> None:
        """Go on making tokens."""

    def sleep(self) -> None:
        """Give memory back to the trainer."""

    def wake(self) -> None:
        """Take it again."""

    def health(self) -> dict[str, Any]:
        """{"ok": bool, ...}: whether a request would be answered, and what to show people."""

    def metrics(self) -> dict[str, float]:
        """What to log of the engine itself, since the last call."""

    def close(self) -> None:
        """End whatever the engine started; may be called twice."""
