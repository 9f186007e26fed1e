"""Several turns as one token sequence: Transcript collects the ids, Continuation renders the text between turns.

    transcript = Transcript(prompt.ids)
    turn = await client.generate(transcript.ids, turn_seed(seed, 0))
    transcript.add(turn)                                            # a model turn: trained
    transcript.insert(continuation.ids([{"role": "tool", "content": "37"}], transcript.last_id))    # not trained
    ...
    return transcript.completion("stop", text=turn.text, messages=messages, columns={"num_turns": 2})

Sampled turns keep their ids; only new text is encoded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from data.chat import TemplateTimeout, apply_template, clean_messages, encode, end_ids, end_of_turn_id
from data.errors import UserError
from data.types import Messages
from rollout import sets
from rollout.engine import Completion
from rollout.routes import join

MARK = "strop"  # text of a placeholder turn, and a tool name, that no template rewrites
CALL_ID = "strop0000"  # nine characters, which some templates require


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a turn: the episode's seed for the first, a derived seed for each later turn."""
    if turn == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{turn}".encode(), digest_size=8).digest(), "big")


class Transcript:
    """One episode so far."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.prompt_ids = list(prompt_ids)
        self.completion_ids: list[int] = []  # all tokens after the prompt
        self.logps: list[float] = []
        self.mask: list[bool] = []
        self.versions: list[tuple[int, int]] = []
        self.routes: list[tuple[int, np.ndarray]] = []  # of each turn, from the start of the prompt
        self.sets: list[np.ndarray] = []  # of each turn, if recorded

    def __len__(self) -> int:
        """Return the number of tokens after the prompt, trained or not."""
        return len(self.completion_ids)

    @property
    def ids(self) -> list[int]:
        """Prompt of the next turn."""
        return self.prompt_ids + self.completion_ids

    @property
    def last_id(self) -> int:
        return self.ids[-1]

    def add(self, turn: Completion) -> None:
        """Append a model turn, which must have been sampled from exactly these ids."""
        assert turn.prompt_ids == self.ids, f"the turn was sampled after {turn.prompt_ids}, not {self.ids}"
        self.completion_ids += turn.ids
        self.logps += turn.logps
        self.routes += [] if turn.routes is None else [(0, turn.routes)]
        self.sets += [] if turn.sets is None else [turn.sets]
        self.mask += turn.mask if turn.mask is not None else [True] * len(turn.ids)
        for version, count in turn.versions:
            if self.versions and self.versions[-1][0] == version:
                version, count = version, self.versions.pop()[1] + count
            self.versions.append((version, count))

    def insert(self, ids: Sequence[int]) -> None:
        """Append tokens that the model reads but did not sample and is not trained on."""
        self.completion_ids += ids
        self.logps += [0.0] * len(ids)
        self.mask += [False] * len(ids)

    def completion(
        self,
        finish_reason: Literal["stop", "length"],
        *,
        text: str,
        messages: Messages | None = None,
        columns: dict[str, Any] | None = None,
    ) -> Completion:
        """Return the episode as one completion; `versions` counts only sampled tokens."""
        return Completion(
            prompt_ids=list(self.prompt_ids),
            ids=list(self.completion_ids),
            logps=list(self.logps),
            finish_reason=finish_reason,
            text=text,
            versions=list(self.versions),
            mask=None if all(self.mask) else list(self.mask),
            messages=messages,
            columns=columns or {},
            routes=join(self.routes, len(self.ids)),
            sets=sets.join(self.sets, sum(self.mask)),
        )


class Continuation:
    """Renders the ids that the chat template puts between the end of a turn and the start of the next one.

    Messages are rendered after a placeholder turn, and the text after its end-of-turn token is used. Tokenizers split
    at special tokens first, so these ids do not depend on the real turn. The constructor rejects a template that
    rewrites earlier turns: the model would be trained on a conversation that it never sees at inference.
    """

    def __init__(self, tokenizer: Any, role: Literal["tool", "user"] = "tool", *, may_rewrite: bool = False) -> None:
        """may_rewrite: accept a template that shows earlier turns differently; sampled turns keep their ids."""
        self.tokenizer, self.role, self.may_rewrite = tokenizer, role, may_rewrite
        self.end_id = end_of_turn_id(tokenizer)
        if self.end_id is None:
            raise UserError(
                "chat_template: assistant turns do not end with a special token, so a next turn cannot be appended "
                "exactly; use a template where they do (chatml, llama3, gemma)"
            )
        self.opening = self._check()

    def ids(self, messages: Messages, last_id: int, settings: Mapping[str, Any] | None = None) -> list[int]:
        """Return the ids of these messages after a turn that ended with last_id, up to the model's next turn.

        settings: Prompt.settings; its tools are ignored because the prompt already contains them.
        """
        settings = {name: value for name, value in (settings or {}).items() if name != "tools"}
        ids = encode(self.tokenizer, self._after(self.opening_for(messages), clean_messages(messages), settings))
        assert ids[0] in end_ids(self.tokenizer), f"{ids[0]} does not end a turn"
        # A turn may also end with a stop string, or with another end token, which is kept.
        ended = last_id in (*end_ids(self.tokenizer), *self.tokenizer.all_special_ids)
        return ids[1:] if ended else ids

    def opening_for(self, messages: Messages) -> Messages:
        """Return the placeholder turn with the tool's name: some templates write it with the result."""
        user, turn = self.opening
        name = messages[0].get("name")
        if "tool_calls" not in turn or not name:
            return self.opening
        (call,) = turn["tool_calls"]
        return [user, {**turn, "tool_calls": [{**call, "function": {**call["function"], "name": name}}]}]

    def _check(self) -> Messages:
        """Return the placeholder turn: with a tool call if the template supports calls, otherwise plain text."""
        call = {"id": CALL_ID, "type": "function", "function": {"name": MARK, "arguments": {MARK: MARK}}}
        plain = {"role": "assistant", "content": MARK}
        turns = [{**plain, "tool_calls": [call]}, plain] if self.role == "tool" else [plain]
        reasons = []
        for turn in turns:
            try:
                opening = [{"role": "user", "content": "2+2="}, turn]
                self._check_prefix(opening)
                return opening
            except ValueError as error:
                reasons.append(str(error))
        raise UserError(
            f"chat_template: {reasons[-1]}; use a template that appends {self.role} turns one by one, such as chatml"
        )

    def _check_prefix(self, opening: Messages) -> None:
        results = [self._message(text) for text in ("first result", "second result")]
        if self.may_rewrite:
            self._after(opening, results[:1])
            return
        # Without the generation prompt: some templates open a thinking block with it that later turns drop.
        shown = [opening[:1], [*opening, results[0]], [*opening, results[0], opening[1], results[1]]]
        start, once, twice = (self._render(messages, generation_prompt=False) for messages in shown)
        if "first result" not in once or "second result" not in twice:
            raise UserError(f"does not show a message of the role {self.role!r}")
        if not once.startswith(start) or not twice.startswith(once):
            raise UserError("renders earlier turns differently when turns follow them")
        if once[len(start) :] != twice[len(once) :].replace("second result", "first result"):
            raise UserError("renders the same messages differently in a later turn")
        self._after(opening, results[:1])

    def _after(self, opening: Messages, messages: Messages, settings: Mapping[str, Any] | None = None) -> str:
        """Return the end-of-turn token of the placeholder turn and the text after it."""
        text = self._render([*opening, *messages], generation_prompt=True, settings=settings)
        _, shown, text = text.partition(MARK)
        tokens = self.tokenizer.convert_ids_to_tokens(end_ids(self.tokenizer))
        starts = [text.find(token) for token in tokens if token in text]
        if not shown or not starts:
            raise UserError("does not show, or does not close, the assistant turn before these messages")
        return text[min(starts) :]

    def _message(self, content: str) -> dict[str, Any]:
        if self.role == "tool":
            return {"role": "tool", "name": MARK, "tool_call_id": CALL_ID, "content": content}
        return {"role": self.role, "content": content}

    def _render(self, messages: Messages, *, generation_prompt: bool, settings: Mapping[str, Any] | None = None) -> str:
        try:
            return apply_template(self.tokenizer, messages, add_generation_prompt=generation_prompt, **(settings or {}))
        except TemplateTimeout:
            raise
        except Exception as error:  # templates are programs: Jinja errors, TypeErrors, raise_exception()
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"cannot render a turn of the role {self.role!r} ({reason})") from None
