"""An episode for a prompt with a target completion, which sets the length limits and the number of turns.

    episode = TargetEpisode(tokenizer, gt_length_multiplier=1.5)     # a turn may be 1.5 times as long as the target's
    source = EpisodeSource(engine, sampling, episode)

With one turn, the completion is the engine's completion of the prompt. If the conversation continues
(columns["remaining_turns"]), the user's next message from the data follows the model's answer, masked out of training,
and the model answers again:

    -> Completion(ids=answer + user + answer, mask=True.. + False.. + True.., text=the last answer,
                  messages=[{"role": "assistant", ...}, {"role": "user", ...}, {"role": "assistant", ...}],
                  columns={"num_turns": 2})

max_tokens limits all tokens after the prompt, including the user's turns. A truncated answer ends the episode.
"""

from __future__ import annotations

from functools import cached_property
from itertools import groupby
from typing import Any

from data.errors import UserError
from data.types import Messages, Prompt, TargetPrompt
from rollout.engine import Completion
from rollout.episodes.episode import Client
from rollout.episodes.turns import Continuation, Transcript, turn_seed

MIN_TURN_TOKENS = 64  # minimum token limit of a turn: a short target must not truncate every completion


class TargetEpisode:
    """An Episode (episode.py). gt_length_multiplier None: no limit per turn."""

    def __init__(self, tokenizer: Any, *, gt_length_multiplier: float | None = None) -> None:
        if gt_length_multiplier is not None and not gt_length_multiplier > 0:
            raise UserError(f"gt_length_multiplier={gt_length_multiplier}: must be above 0")
        self.gt_length_multiplier, self.tokenizer = gt_length_multiplier, tokenizer

    @cached_property
    def continuation(self) -> Continuation:
        """Created on first use, because single turns work with any chat template."""
        return Continuation(self.tokenizer, "user")

    async def __call__(self, client: Client, prompt: Prompt, seed: int) -> Completion:
        assert isinstance(prompt, TargetPrompt), f"{prompt.source}: a {type(prompt).__name__} has no target"
        lengths = turn_lengths(prompt)
        limit = client.sampling.max_tokens
        turn = await client.generate(prompt.ids, turn_seed(seed, 0), max_tokens=self._limit(lengths[0], limit))
        later = later_turns(prompt.columns.get("remaining_turns", []))
        if not later:
            return turn
        transcript = Transcript(prompt.ids)
        transcript.add(turn)
        messages: Messages = [{"role": "assistant", "content": turn.text}]
        finish_reason, num_turns = turn.finish_reason, 1
        # A truncated target has fewer turns than the data; additional turns would have no target.
        for users, length in zip(later, lengths[1:], strict=False):
            if finish_reason == "length":
                break
            between = self.continuation.ids(users, transcript.last_id, prompt.settings)
            left = limit - len(transcript) - len(between)
            if left < 1:
                finish_reason = "length"
                break  # the model would have no tokens left, so the user's turn is not added
            transcript.insert(between)
            turn = await client.generate(
                transcript.ids, turn_seed(seed, num_turns), max_tokens=self._limit(length, left)
            )
            transcript.add(turn)
            messages += [*users, {"role": "assistant", "content": turn.text}]
            finish_reason, num_turns = turn.finish_reason, num_turns + 1
        return transcript.completion(finish_reason, text=turn.text, messages=messages, columns={"num_turns": num_turns})

    def _limit(self, length: int, left: int) -> int:
        """Return the token limit of a turn whose target has `length` tokens, with `left` tokens left in the episode."""
        if self.gt_length_multiplier is None:
            return left
        return min(left, max(MIN_TURN_TOKENS, int(self.gt_length_multiplier * length)))


def turn_lengths(prompt: TargetPrompt) -> list[int]:
    """Return the number of tokens in each model turn of the target."""
    if prompt.target_mask is None:
        return [len(prompt.target_ids)]
    return [len(list(run)) for is_model, run in groupby(prompt.target_mask) if is_model]


def later_turns(messages: Messages) -> list[Messages]:
    """Return the user's messages before each assistant message."""
    turns: list[Messages] = []
    users: Messages = []
    for message in messages:
        if message["role"] == "assistant":
            turns.append(users)
            users = []
        else:
            users.append(message)
    return turns
