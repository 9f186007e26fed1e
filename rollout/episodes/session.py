"""One episode of the endpoint: the turns that its clients request, with exactly the ids that were sampled.

    session = Session(model, sampling, seed=7)
    turn = await session.chat([{"role": "user", "content": "2+2="}])
    turn.message -> {"role": "assistant", "content": "4"}
    turn = await session.chat([..., turn.message, {"role": "user", "content": "+1?"}])
    session.completion([], {}) -> Completion(ids=[both turns and the ids between them], mask=..., branches=())

Clients send the whole conversation with every request, as text. If it starts with the messages of an earlier turn, the
prompt is that turn's ids and the new messages, so sampled text is never tokenised again. If a client has rewritten a
message, the longest unchanged part is continued, and a branch begins. All branches are trained, each sampled token in
one of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from data.chat import clean_messages, encode, render_prompt
from data.errors import UserError
from data.types import Messages
from rollout.engine import Completion, Request, Sampling
from rollout.episodes.tool_calls import Parsed, find_format, parse_turn
from rollout.episodes.turns import Continuation, Transcript, turn_seed

ID_LENGTH = 9  # of a tool call, as some templates require


class UnusableError(UserError):
    """No episode of this environment can be trained on, so the run stops."""


class OutOfTokens(UserError):
    """The conversation has no room for another token."""


class Turn(NamedTuple):
    completion: Completion
    messages: Messages  # of the request, and the reply; empty if the request was text or ids
    text: str  # of the request and the reply, if the request was text
    settings: Mapping[str, Any]  # of the chat template, with the tools

    @property
    def message(self) -> dict[str, Any]:
        return self.messages[-1]

    @property
    def ids(self) -> list[int]:
        return self.completion.prompt_ids + self.completion.ids


class ChatModel:
    """Shared by all sessions of a run: the engine, and the conversion between messages and ids."""

    def __init__(
        self, ask: Callable[[Request, Sampling], Awaitable[Completion]], tokenizer: Any, *, context: int | None,
        vocab_size: int, tool_format: str = "auto",
    ) -> None:  # fmt: skip
        self.ask, self.tokenizer, self.context, self.vocab_size = ask, tokenizer, context, vocab_size
        self._continuations: dict[str, Continuation] = {}
        self._parse: Callable[[str], Parsed] | None = None
        if tool_format != "auto" or getattr(tokenizer, "response_template", None) is None:
            try:
                self._parse = find_format(tool_format, tokenizer)
            except UserError:  # the chat template has no tool calls
                self._parse = lambda text: Parsed(text, [])

    def between(self, messages: Messages, last_id: int, settings: Mapping[str, Any]) -> list[int]:
        """Return the ids of new messages after a turn."""
        role = "tool" if messages[0]["role"] == "tool" else "user"
        if role not in self._continuations:
            self._continuations[role] = Continuation(self.tokenizer, role, may_rewrite=True)
        return self._continuations[role].ids(messages, last_id, settings)

    def message(self, completion: Completion, tools: Sequence[Any] | None) -> dict[str, Any]:
        """Return a turn as a message, with its tool calls if the client has tools; malformed calls stay text."""
        plain = {"role": "assistant", "content": completion.text}
        if not tools or completion.finish_reason == "length" or not completion.ids:
            return plain
        if self._parse is None:  # the tokenizer defines how
            ids = completion.ids[:-1] if completion.ids[-1] in self.tokenizer.all_special_ids else completion.ids
            try:
                parsed = self.tokenizer.parse_response(ids, prefix=completion.prompt_ids, tools=list(tools))
                content, found = parsed.get("content") or "", parsed.get("tool_calls") or ()
                functions = [call.get("function", call) for call in found]
                functions = [{"name": one["name"], "arguments": json.dumps(one["arguments"])} for one in functions]
            except Exception:  # the model wrote something else
                return plain
        else:
            content, found = parse_turn(completion, self._parse, self.tokenizer)
            if any(call.error or call.positional for call in found):
                return plain
            functions = [{"name": call.name, "arguments": json.dumps(call.arguments)} for call in found]
        if not functions:
            return plain
        calls = []
        for index, function in enumerate(functions):
            text = f"{index}/{completion.prompt_ids}/{completion.ids}"
            name = hashlib.blake2b(text.encode()).hexdigest()[:ID_LENGTH]
            calls.append({"id": name, "type": "function", "function": function})
        return plain | {"content": content, "tool_calls": calls}


class Session:
    def __init__(
        self, model: ChatModel, sampling: Sampling, *, seed: int, settings: Mapping[str, Any] | None = None
    ) -> None:
        """sampling.max_tokens limits all tokens after the first prompt of a branch. settings: of the chat template."""
        self.model, self.sampling, self.seed, self.settings = model, sampling, seed, dict(settings or {})
        self.turns: list[Turn] = []
        self.chains: list[list[Turn]] = []  # branches; a turn continues all turns before it in its chain
        self.stored: dict[str, Messages] = {}  # conversations that a client may continue by id
        self.truncated = False  # the last turn was truncated, or there was no room for another
        self.error: Exception | None = None  # of the engine, not of a client
        self.rejected = ""  # reason for the last rejected request
        self.is_full = False  # a request was rejected because there was no room for an answer
        self.on_full: Callable[[], object] = lambda: None  # called then
        self._asked = 0

    async def chat(
        self, messages: Messages, *, settings: Mapping[str, Any] | None = None, max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Turn:  # fmt: skip
        """Sample the next turn of a conversation. settings: of the chat template, for this request."""
        messages, settings = clean_messages(messages), self.settings | dict(settings or {})
        completion = await self._sample(self.prompt_ids(messages, settings), max_tokens, stop)
        reply = self.model.message(completion, settings.get("tools"))
        return self._add(Turn(completion, [*messages, reply], "", settings))

    async def complete(
        self, prompt: str | list[int], *, max_tokens: int | None = None, stop: Sequence[str] = (),
        stop_ids: Sequence[int] = (),
    ) -> Turn:  # fmt: skip
        """Sample a continuation of a text, or of ids."""
        ids = self._text_ids(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids or min(ids) < 0 or max(ids) >= self.model.vocab_size:
            raise UserError(f"prompt: empty, or an id outside the vocabulary of {self.model.vocab_size}")
        completion = await self._sample(ids, max_tokens, stop, stop_ids)
        return self._add(Turn(completion, [], prompt + completion.text if isinstance(prompt, str) else "", {}))

    def prompt_ids(self, messages: Messages, settings: Mapping[str, Any]) -> list[int]:
        """Return the ids of the longest earlier turn that the messages continue, and those of the new messages."""
        keys = [key_of(message) for message in messages]
        best: Turn | None = None
        for turn in self.turns:
            size = len(turn.messages)
            longer = size and (best is None or size >= len(best.messages))
            if longer and size < len(keys) and turn.settings == settings:
                best = turn if [key_of(message) for message in turn.messages] == keys[:size] else best
        if best is not None:
            with contextlib.suppress(UserError):  # a template without an end of turns: the client's text is a branch
                return best.ids + self.model.between(messages[len(best.messages) :], best.ids[-1], settings)
        return render_prompt(self.model.tokenizer, messages, settings=settings)

    def completion(self, prompt_ids: list[int], columns: dict[str, Any]) -> Completion:
        """Return the episode: the branch of the last turn, with the others as its `branches`.

        prompt_ids: of the completion if no turn was sampled.
        """
        if not self.turns:
            return masked_completion(prompt_ids, columns | self._counts(), [])
        last = next(chain for chain in self.chains if chain[-1] is self.turns[-1])
        finish = "length" if self.truncated else "stop"
        branches = tuple(joined(chain, finish) for chain in self.chains if chain is not last)
        return replace(joined(last, finish), columns=columns | self._counts(), branches=branches)

    def _counts(self) -> dict[str, Any]:
        calls = sum(len(turn.message.get("tool_calls") or ()) for turn in self.turns if turn.messages)
        return {"num_turns": len(self.turns), "tool_calls": calls, "branches": max(0, len(self.chains) - 1)}

    def _add(self, turn: Turn) -> Turn:
        self.turns.append(turn)
        prompt = turn.completion.prompt_ids
        continued = [chain for chain in self.chains if prompt[: len(chain[-1].ids)] == chain[-1].ids]
        if continued:
            max(continued, key=lambda chain: len(chain[-1].ids)).append(turn)
        else:
            self.chains.append([turn])
        return turn

    async def _sample(
        self, ids: list[int], max_tokens: int | None, stop: Sequence[str], stop_ids: Sequence[int] = ()
    ) -> Completion:
        firsts = [chain[0] for chain in self.chains if ids[: len(chain[0].ids)] == chain[0].ids]
        starts = [len(first.completion.prompt_ids) for first in firsts]
        left = self.sampling.max_tokens - (len(ids) - min(starts, default=len(ids)))
        if self.model.context is not None:
            left = min(left, self.model.context - len(ids))
        if left < 1:
            context = "" if self.model.context is None else f", context length {self.model.context}"
            self.truncated = self.is_full = True
            self.on_full()
            raise OutOfTokens(
                f"a prompt of {len(ids)} tokens leaves no tokens for an answer (max_completion_length="
                f"{self.sampling.max_tokens}{context})"
            )
        limit = left if max_tokens is None else max(1, min(left, max_tokens))
        stops = dict.fromkeys((*self.sampling.stop, *stop)), dict.fromkeys((*self.sampling.stop_ids, *stop_ids))
        sampling = replace(self.sampling, stop=tuple(stops[0]), stop_ids=tuple(stops[1]))
        number, self._asked = self._asked, self._asked + 1
        request = Request(
            prompt_ids=ids, seed=turn_seed(self.seed, number), max_tokens=limit, conversation=self
        )  # fmt: skip
        try:
            completion = await self.model.ask(request, sampling)
        except ValueError as error:
            self.error = error
            raise
        self.truncated = completion.finish_reason == "length"
        return completion

    def _text_ids(self, text: str) -> list[int]:
        """Return the ids of the longest earlier turn that the text continues, and those of the new text."""
        known = [turn for turn in self.turns if turn.text and text.startswith(turn.text)]
        if not known:
            return render_prompt(self.model.tokenizer, text)
        best = max(known, key=lambda turn: len(turn.text))
        new = encode(self.model.tokenizer, text[len(best.text) :])
        ended = best.completion.finish_reason == "stop" and best.ids[-1] in self.sampling.stop_ids
        return [*(best.ids[:-1] if ended else best.ids), *new]


def key_of(message: Mapping[str, Any]) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    """Return what a client must not change: role, text and calls. Clients drop or add other fields."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function.get("arguments")
        try:
            arguments = json.dumps(json.loads(arguments) if isinstance(arguments, str) else arguments, sort_keys=True)
        except ValueError:
            arguments = str(arguments)
        calls.append((function.get("name"), arguments))
    return message["role"], message["content"].strip(), tuple(calls)


def joined(chain: Sequence[Turn], finish: Literal["stop", "length"]) -> Completion:
    """Return the turns of a branch as one completion."""
    transcript = Transcript(chain[0].completion.prompt_ids)
    for turn in chain:
        transcript.insert(turn.completion.prompt_ids[len(transcript.ids) :])
        transcript.add(turn.completion)
    last = chain[-1]
    start = len(chain[0].messages) - 1 if chain[0].messages else 0
    return transcript.completion(finish, text=last.completion.text, messages=last.messages[start:] or None)


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
