"""The protocol every rollout engine speaks; `local.py` is the in-process one, `vllm_engine.py` that of servers.

What an engine takes and gives: plain Python lists, no tensors.

    sampling = Sampling(temperature=1.0, max_tokens=8, stop_ids=(2,))
    request  = Request(prompt_ids=[5, 6, 7], seed=11)
    -> Completion(prompt_ids=[5, 6, 7], ids=[9, 8, 2], logps=[-0.1, -1.2, -0.3], finish_reason="stop", text="98")

`ids` ends with the stop token when finish_reason is "stop" by an id, so that a trainer teaches when to stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to sample; the same for every request of one call."""

    temperature: float = 1.0  # 0 = greedy (evaluation only)
    max_tokens: int = 256
    stop_ids: tuple[int, ...] = ()  # end-of-turn and end-of-text ids; the completion keeps the one that ended it
    stop: tuple[str, ...] = ()  # strings that end a completion; it ends with the token that completed the string
    top_p: float = 1.0  # evaluation only: a training sample's log-probs must be those of the full distribution
    top_k: int = 0  # 0 = all; evaluation only
    for_training: bool = False  # gradients will be taken: anything but the full distribution is refused


@dataclass(frozen=True, kw_only=True)
class Request:
    prompt_ids: list[int]
    seed: int  # the same seed, prompt and weights give the same completion, whatever else is in the batch


@dataclass(frozen=True, kw_only=True)
class Completion:
    prompt_ids: list[int]
    ids: list[int]
    logps: list[float]  # log-prob of each id under the distribution it was sampled from (temperature included)
    finish_reason: Literal["stop", "length"]
    text: str  # decoded ids without special tokens and without the stop string
    versions: list[tuple[int, int]]  # (weight version, number of tokens it made), in order
    mask: list[bool] | None = None  # True = made by the model; what an environment wrote is False and has logp 0
    messages: list[dict[str, Any]] | None = None  # all that followed the prompt, where that is several turns
    columns: dict[str, Any] = field(default_factory=dict)  # of this episode, for rewards: env_reward, num_turns, ...

    @property
    def trained(self) -> int:
        """Tokens the model made."""
        return len(self.ids) if self.mask is None else sum(self.mask)


def check_sampling(sampling: Sampling) -> None:
    """What no engine can do, and what would bias a training sample."""
    if not sampling.temperature >= 0:
        raise ValueError(f"temperature={sampling.temperature}: must be above 0, or 0 for greedy")
    if sampling.max_tokens < 1:
        raise ValueError(f"max_tokens={sampling.max_tokens}: must be 1 or more")
    if not 0 < sampling.top_p <= 1:
        raise ValueError(f"top_p={sampling.top_p}: must be in (0, 1]; 1 keeps every token")
    if sampling.top_k < 0:
        raise ValueError(f"top_k={sampling.top_k}: must be 0 (all) or more")
    if any(not text for text in sampling.stop):
        raise ValueError("stop='': an empty stop string would end every completion; remove it")
    for name, neutral in (("top_p", 1.0), ("top_k", 0)) if sampling.for_training else ():
        if getattr(sampling, name) != neutral:
            raise ValueError(
                f"{name}={getattr(sampling, name)}: a training sample must come from the whole distribution, or its "
                f"log-probs are not the trainer's; set {neutral:g}"
            )


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
