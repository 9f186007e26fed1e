"""Render conversations to token ids: chat templates, loss masks and end-of-turn ids.

    set_chat_template(tokenizer, "chatml")
    ids = render_prompt(tokenizer, [{"role": "user", "content": "2+2="}], None)     # ends where the answer begins
    ids, mask = render_conversation(tokenizer, messages, None)                      # trains every assistant turn

Masks are computed from token ids: the ids before a turn must be a prefix of the conversation's ids, otherwise the row
is an error. A completion is never tokenised alone to find its position: many tokenizers prepend a space to a text, or
merge characters across the boundary (see render_completion).

Every renderer first calls clean_messages, so no template sees a null or a list of parts, and rejects tool calls that
the template does not write. `settings` are the template's other inputs: tools, and switches such as enable_thinking
(data/formats/template_settings.py).

Templates are programs that ship with models, so each rendering has a time limit (apply_template).

Only the template writes special tokens. A special token in a row, a tool result or an observation could forge a turn,
so apply_template marks it and encode() splits it into plain text, unless --allow-special-tokens is set.
"""

from __future__ import annotations

import copy
import ctypes
import json
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from os.path import commonprefix
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from data.errors import UserError
from data.limits import thread_clock
from data.types import Messages

TEMPLATES = Path(__file__).parent / "templates"
# Delimiters of the built-in templates. If a tokenizer splits one, its model was not trained with that template.
DELIMITERS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "qwen_25": ("<|im_start|>", "<|im_end|>"),
    "qwen3": ("<|im_start|>", "<|im_end|>"),
    "phi_3": ("<|user|>", "<|assistant|>", "<|end|>"),
    "phi_4": ("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
}
SPECIAL_TOKENS = ("pad_token", "eos_token", "bos_token", "unk_token")
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation", "environment",
         "document")  # fmt: skip
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")  # message keys that may contain thoughts
_PROBE = "strop"  # an answer that no template rewrites
# Written around special tokens of the input; random, so that no input contains it.
_PLAIN = f"\ufdd0{secrets.token_hex(8)}\ufdd0"
SPECIAL_NOTE = "with special tokens in the text, read as plain text (--allow-special-tokens reads them as tokens)"
SECONDS = 10.0  # limit on the CPU time of a rendering; a long conversation takes milliseconds
POLL_SECONDS = 0.25
MAX_KEPT = 2**19  # characters of tokenised pieces to keep per tokenizer, in addition to those of one text
T = TypeVar("T")


# The tokenizer's template and end-of-turn ids.


def set_chat_template(tokenizer: Any, name: str) -> None:
    """Set the chat template: a built-in name, a file, Jinja text, or tokenizer_default for no change."""
    if name == "tokenizer_default":
        return
    if name in DELIMITERS:
        check_delimiters(tokenizer, name, f"chat_template={name}", "tokenizer_default, another template")
        tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
        return
    is_jinja = "{{" in name or "{%" in name
    template, name = (name, "chat_template") if is_jinja else (_read_template(name), name)
    tokenizer.chat_template = template
    _names[template] = name
    try:  # report a broken template now, by name
        _render_text(tokenizer, [{"role": "user", "content": _PROBE}], generation_prompt=True)
    except TemplateTimeout:
        raise
    except ValueError as error:
        raise UserError(f"{name}: {error}") from None


def _read_template(name: str) -> str:
    path = Path(name).expanduser()
    choices = "tokenizer_default, " + ", ".join(DELIMITERS)
    if not path.is_file():
        raise UserError(f"chat_template={name}: neither a file nor a built-in template ({choices})")
    try:
        template = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"chat_template={name}: cannot be read ({error}); pass a UTF-8 text file") from None
    if not template.strip():
        raise UserError(f"chat_template={name}: the file is empty; pass a Jinja template or one of {choices}")
    return template


def check_delimiters(tokenizer: Any, family: str, what: str, instead: str) -> None:
    """Raise if the tokenizer splits a delimiter of the family: its model was not trained with them."""
    for token in DELIMITERS[family]:
        ids = encode(tokenizer, token)
        if len(ids) != 1:
            raise UserError(
                f"{what}: the delimiter {token!r} is {len(ids)} tokens in this tokenizer, not one; use {instead}, or a "
                "tokenizer with this token"
            )


def set_special_tokens(
    tokenizer: Any, special: Mapping[str, Any], eot_tokens: Sequence[str] = (), *, allow_in_text: bool = False
) -> None:
    """Set the pad, eos, bos or unk token, and additional end-of-turn tokens; never adds a token to the vocabulary.

    allow_in_text: encode special tokens in the text of messages as such, not as plain text.
    """
    vocabulary = tokenizer.get_vocab() if special or eot_tokens else {}
    for name, token in special.items():
        if name not in SPECIAL_TOKENS:
            raise UserError(f"special_tokens={name}: not a special token; use {', '.join(SPECIAL_TOKENS)}")
        _check_known(vocabulary, token, f"special_tokens={name}")
        setattr(tokenizer, name, token)
    for token in eot_tokens:
        _check_known(vocabulary, token, "eot_tokens")
        if len(encode(tokenizer, token)) != 1:
            raise UserError(
                f"eot_tokens={token}: does not encode to a single token, so no turn can end with it; remove it"
            )
    if eot_tokens:
        tokenizer.strop_eot_ids = tuple(vocabulary[token] for token in eot_tokens)
    if allow_in_text:
        tokenizer.strop_allow_special = True


def _check_known(vocabulary: Mapping[str, int], token: Any, what: str) -> None:
    if not isinstance(token, str) or token not in vocabulary:
        raise UserError(
            f"{what}: the tokenizer has no token {token!r}, and adding one would need new embedding rows; use an "
            "existing token"
        )


def end_ids(tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that may close an assistant turn: the template's (even after a tool call) and --eot-tokens."""
    ids = [*getattr(tokenizer, "strop_eot_ids", ())]
    if tokenizer.chat_template:
        ids = [*_template_end_ids(tokenizer, str(tokenizer.chat_template), len(tokenizer)), *ids]
    return tuple(dict.fromkeys(token for token in ids if token is not None))


def stop_ids(tokenizer: Any, generation_config_eos: int | Iterable[int] | None = None) -> tuple[int, ...]:
    """Return the ids that end a completion: the model's, the tokenizer's eos, and end_ids."""
    model_eos = [generation_config_eos] if isinstance(generation_config_eos, int) else generation_config_eos or []
    if not all(isinstance(token, int) for token in model_eos):
        raise UserError(f"generation_config.json: eos_token_id={generation_config_eos!r}: must be one or more integers")
    ids = [*model_eos, tokenizer.eos_token_id, *end_ids(tokenizer)]
    return tuple(dict.fromkeys(token for token in ids if token is not None))


def end_of_turn_id(tokenizer: Any) -> int | None:
    """Return the special token that closes an assistant turn in the current template, or None."""
    if not tokenizer.chat_template:
        return None
    return _template_end_ids(tokenizer, str(tokenizer.chat_template), len(tokenizer))[0]


@lru_cache(maxsize=8)
def _template_end_ids(tokenizer: Any, template: str, num_tokens: int) -> tuple[int | None, int | None]:
    """Return the special tokens that close an answer and a turn with a tool call; None if there is no such token."""
    # template and num_tokens are cache keys: both can change on the same tokenizer.
    turns = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _PROBE}]
    after_answer = _render_text(tokenizer, turns, generation_prompt=False).rpartition(_PROBE)[2]
    ids = encode(tokenizer, after_answer.lstrip()) if after_answer.strip() else []
    if not ids or ids[0] not in tokenizer.added_tokens_decoder:
        return None, None
    call = {"type": "function", "function": {"name": _PROBE, "arguments": {_PROBE: _PROBE}}}
    turns[1] = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        after_call = _render_text(tokenizer, turns, generation_prompt=False).rpartition(_PROBE)[2].rstrip()
    except UserError:  # the template has no tool calls
        return ids[0], None
    last = encode(tokenizer, after_call)[-1] if after_call else None
    token = tokenizer.added_tokens_decoder.get(last)
    return ids[0], last if token is not None and token.special else None


def is_harmony(tokenizer: Any) -> bool:
    """Return whether the tokenizer's chat template writes the channels of harmony, gpt-oss's format."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    return "<|channel|>" in template and "<|call|>" in template


# Rendering: prompts, completions, conversations, responses.


def render_prompt(
    tokenizer: Any, prompt: str | Messages, system_prompt: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> list[int]:  # fmt: skip
    """Return the ids for an engine to complete. Plain text gets BOS if the tokenizer adds it, never a system prompt."""
    if not isinstance(prompt, str):
        messages = with_system(_checked_messages(tokenizer, prompt, settings), system_prompt)
        return _ids_of(tokenizer, _render_text(tokenizer, messages, generation_prompt=True, settings=settings))
    ids = render_text(tokenizer, prompt)
    bos = tokenizer.bos_token_id
    return [bos, *ids] if ids and ids[0] != bos and _adds_bos(tokenizer) else ids


def render_text(tokenizer: Any, text: str) -> list[int]:
    """Tokenise a text without special tokens; SentencePiece still prepends a space."""
    ids = encode(tokenizer, text)
    if text and not ids:
        raise UserError(_no_ids(text))
    return ids


def render_completion(tokenizer: Any, prompt: str, completion: str, *, apart: bool = False) -> tuple[list[int], int]:
    """Tokenise a plain-text prompt and its completion as one text; return the ids and the completion's start.

    The completion starts where these ids differ from the prompt's. A token that straddles the boundary belongs to the
    completion, because a model that is given the prompt has to generate it.
    apart: tokenise each alone, so that no token straddles the boundary; SentencePiece then adds a space between them.
    """
    if apart:
        before = render_prompt(tokenizer, prompt)
        return before + render_text(tokenizer, completion), len(before)
    ids = render_prompt(tokenizer, prompt + completion)
    start = common_prefix(render_prompt(tokenizer, prompt), ids)
    if completion and start == len(ids):
        raise UserError(_no_ids(completion))
    return ids, start


class Trained(NamedTuple):
    """The trained parts of a conversation; by default every assistant turn with its end-of-turn token."""

    roles: tuple[str, ...] = ("assistant",)
    eos: Literal["turn", "all", "last", "none"] = "turn"  # end tokens: trained turns, all turns, last trained, none
    inputs: bool = False  # train all roles, and the prompts of plain text

    def trains(self, role: str) -> bool:
        return self.inputs or role in self.roles


ASSISTANT = Trained()


def render_conversation(
    tokenizer: Any, messages: Messages, system_prompt: str | None = None, *, first_trained: int = 0,
    settings: Mapping[str, Any] | None = None, notes: list[str] | None = None, trained: Trained = ASSISTANT,
) -> tuple[list[int], list[bool]]:  # fmt: skip
    """Return the ids of a conversation, and a mask that trains each assistant turn with its end-of-turn token.

    If the template closes a turn only at the end of the conversation, or with another token, the turn is trained up to
    the start of the next one, without an end-of-turn token if the template writes none. The mask never covers another
    role's turn.

    If parts of a message's content have `train` or `weight`, these decide which of its tokens are trained, whatever its
    role; its end-of-turn token is trained as in a trained turn.

    first_trained: index of the first message that may be trained; earlier assistant turns are context.
    notes: remarks about the row are appended to this list.
    trained: the roles to train (only the text of roles other than assistant), and the end-of-turn tokens to train.
    """
    turns = with_system(_checked_messages(tokenizer, messages, settings), system_prompt)
    num_added = len(turns) - len(messages)
    first_trained += num_added
    parts = [None] * num_added + [_flags_of(message.get("content")) for message in messages]
    conversation = _Conversation(tokenizer, turns, settings)
    mask, last_end = [False] * len(conversation.ids), None
    for index, message in enumerate(turns):
        is_trained = index >= first_trained and (parts[index] is not None or trained.trains(message["role"]))
        if not is_trained and trained.eos != "all":
            continue
        start, end, closing = conversation.span_of(index)
        if is_trained:
            mask[start:end] = [True] * (end - start)
            if parts[index] is not None:
                mask[start:end] = conversation.mask_of_parts(index, parts[index])[start:end]
            last_end = closing if closing is not None else last_end
        if closing is not None:
            mask[closing] = trained.eos == "all" or (trained.eos == "turn" and is_trained)
    if trained.eos == "last" and last_end is not None:
        mask[last_end] = True
    if notes is not None:
        notes += dict.fromkeys(conversation.notes)
    return conversation.ids, mask


class _Conversation:
    """A rendered conversation that locates its turns."""

    def __init__(self, tokenizer: Any, messages: Messages, settings: Mapping[str, Any] | None) -> None:
        self.tokenizer, self.messages, self.settings = tokenizer, messages, settings
        self.notes: list[str] = []
        self.text = self.render(messages)
        # gpt-oss's template drops the thoughts before tool calls once an answer follows, but the model saw them when it
        # wrote that answer: append the answer to what it saw.
        before = messages[:-1]
        if messages[-1]["role"] == "assistant" and any("tool_calls" in message for message in before):
            seen, dropped = self.render(before), self.render(_without_thoughts(before))
            if not self.text.startswith(seen) and self.text.startswith(dropped):
                self.text = seen + self.text[len(dropped) :]
        self.ids = _ids_of(tokenizer, self.text)

    def render(self, messages: Messages, *, generation_prompt: bool = False) -> str:
        return _render_text(self.tokenizer, messages, generation_prompt=generation_prompt, settings=self.settings)

    def span_of(self, index: int) -> tuple[int, int, int | None]:
        """Return a message's start and end, and the position of the token that closes it, or None."""
        stops = end_ids(self.tokenizer)
        if self.messages[index]["role"] == "assistant":
            start = self.start_of_turn(index)
            end = self.end_of_turn(index, start)
            return start, end, end - 1 if self.ids[end - 1] in stops else None
        start, end = self.text_span(index)
        limit = len(self.ids) if index + 1 == len(self.messages) else self.start_of_message(index + 1)
        return start, end, next((i for i in range(end, limit) if self.ids[i] in stops), None)

    def start_of_message(self, index: int) -> int:
        is_answer = self.messages[index]["role"] == "assistant"
        return self.start_of_turn(index) if is_answer else self.text_span(index)[0]

    def mask_of_parts(self, index: int, parts: Sequence[tuple[int, bool]]) -> list[bool]:
        """Return a mask of the tokens of the trained parts of a message, given as length and flag.

        A token across the edge of a trained part is in it if it has at least two characters of it, as in axolotl.
        """
        begin, end = self.text_bounds(index)
        skipped = self.messages[index]["content"].find(self.text[begin:end])  # white space that the template strips
        encoded = self.tokenizer(self.text, add_special_tokens=False, return_offsets_mapping=self.tokenizer.is_fast)
        if skipped < 0 or "offset_mapping" not in encoded or encoded["input_ids"] != self.ids:
            raise UserError(
                f"messages[{index}]: the tokens of its parts with train or weight cannot be found (a slow tokenizer, a "
                "special token in the row, or a template that changes the text); use messages without such parts"
            )
        starts = [start for start, _ in encoded["offset_mapping"]] + [len(self.text)]
        mask = [False] * len(self.ids)
        first = begin - skipped
        for length, is_trained in parts:
            last = first + length - 1
            for i in range(len(mask)) if is_trained and length else ():
                left, right = starts[i], starts[i + 1] - 1
                mask[i] |= (left >= first or right > first) and (right <= last or left < last)
            first = last + 1
        return mask

    def text_span(self, index: int) -> tuple[int, int]:
        """Return the start and end of a message's text in the ids."""
        begin, stop = self.text_bounds(index)
        before, until = self.text[:begin], self.text[:stop]
        prefix = encode(self.tokenizer, before)
        if self.ids[: len(prefix)] != prefix:
            raise UserError(
                f"messages[{index}]: the ids before this text are not a prefix of the conversation's ids, so its loss "
                "mask cannot be computed; strip white space at its start"
            )
        end = common_prefix(encode(self.tokenizer, until), self.ids) if len(until) > len(before) else len(prefix)
        return len(prefix), end

    def text_bounds(self, index: int, *, bare: bool = False) -> tuple[int, int]:
        """Return the start and end of a message's text in self.text: the part that changes if only this text changes.

        bare: the text of everything that the message adds, including thoughts.
        """
        message, texts = self.messages[index], []
        message = {"role": message["role"]} if bare else message
        for probe in (f"{_PROBE}x", f"y{_PROBE}"):
            others = [*self.messages[:index], {**message, "content": probe}, *self.messages[index + 1 :]]
            texts.append(self.render(others))
        head, tail = commonprefix(texts), commonprefix([text[::-1] for text in texts])[::-1]
        if not self.text.startswith(head) or not self.text.endswith(tail):
            raise UserError(
                f"messages[{index}]: the chat template renders other messages differently depending on this one, so "
                "its loss mask cannot be computed; do not train this role, or use another --chat-template"
            )
        is_written = f"{_PROBE}x" in texts[0]  # otherwise the template drops this message
        return (len(head), len(self.text) - len(tail)) if is_written else (0, 0)

    def start_of_turn(self, index: int) -> int:
        """Return the start of the trained part of an assistant turn: the end of the generation prompt.

        Some templates append text to the generation prompt that they do not write before a turn, such as an opening
        <think>. The trained part then starts after the common prefix of both, as in a preference pair.
        """
        before = self.messages[:index]
        opening = self.render(before, generation_prompt=True) if before else ""
        # Few templates can render a generation prompt alone, and Gemma's writes a system text after it.
        if not before or (before[-1]["role"] == "system" and before[-1]["content"].strip() not in unmark(opening)):
            opening = self.text[: self.text_bounds(index, bare=True)[0]]
        self.opened = len(opening)
        if self.text.startswith(opening):
            prefix = encode(self.tokenizer, opening)
            if self.ids[: len(prefix)] != prefix:
                raise UserError(
                    f"messages[{index}]: the ids before this assistant turn are not a prefix of the conversation's "
                    "ids, so its loss mask cannot be computed; strip white space at its start"
                )
            return len(prefix)
        if not self.text.startswith(self.render(before)):
            opening = self.render(_without_thoughts(before), generation_prompt=True)
            if not self.text.startswith(opening):
                raise UserError(_rewritten(index))
            self.opened = len(opening)
            return common_prefix(_ids_of(self.tokenizer, opening), self.ids)
        # Compare with a probe answer: the real answer may start with a character of the opened text, such as "<".
        (answer,) = _without_thoughts(self.messages[index : index + 1])
        probe = self.render([*before, {**answer, "content": _PROBE}, *self.messages[index + 1 :]])
        head = commonprefix([opening, probe, self.text])
        self.opened = len(head)
        self.notes.append(_missing_opening(opening[len(head) :]))
        return common_prefix(_ids_of(self.tokenizer, head), self.ids)

    def end_of_turn(self, index: int, start: int) -> int:
        """Return the end of the turn: after its end-of-turn token, and never past the start of the next turn.

        Text that a template writes after that token, such as a newline, is excluded: an engine stops before it.
        """
        stops, is_last = end_ids(self.tokenizer), index + 1 == len(self.messages)
        if stops:
            _check_content(self.tokenizer, self.messages[index], stops, f"messages[{index}]")
            if not is_last and self.closes(index, stops):  # the common case: no need to tokenise again
                return _first_of(stops, self.ids, start) + 1
        alone = self.ids if is_last else _ids_of(self.tokenizer, self.render(self.messages[: index + 1]))
        is_prefix = self.ids[: len(alone)] == alone  # otherwise the template rewrites the turn when others follow
        if not stops and not is_prefix:
            raise UserError(_rewritten(index))
        if not stops:
            return len(alone)
        limit = len(alone) if is_prefix else self.start_of_next(index)
        if not set(stops).isdisjoint(self.ids[start:limit]):
            return _first_of(stops, self.ids, start) + 1
        end = common_prefix(alone, self.ids)
        if not is_last and not is_prefix:  # the template may have dropped the thoughts of this turn
            alone = _ids_of(self.tokenizer, self.render(_without_thoughts(self.messages[: index + 1])))
            end = max(end, common_prefix(alone, self.ids))
        if is_last or end <= start:
            raise UserError(
                f"messages[{index}]: the chat template does not close this assistant turn; use another --chat-template"
            )
        if not is_prefix:
            self.notes.append("with an assistant turn that the chat template does not close before the next one, "
                              "trained without an end-of-turn token")  # fmt: skip
        return end

    def closes(self, index: int, stops: Sequence[int]) -> bool:
        """Return whether a turn that is not the last contains its end-of-turn token."""
        text, added = self.render(self.messages[: index + 1]), _added_tokens(self.tokenizer, len(self.tokenizer))
        is_closed = any(str(added[stop]) in text[self.opened :] for stop in stops if stop in added)
        return is_closed and self.text.startswith(text)

    def start_of_next(self, index: int) -> int:
        """Return an upper bound of the next message's start: ids before it do not change with later texts."""
        later = [
            {**message, "content": _PROBE + message["content"]} if message["content"] else message  # "": a call
            for message in self.messages[index + 1 :]
        ]
        return common_prefix(_ids_of(self.tokenizer, self.render(self.messages[: index + 1] + later)), self.ids)


def _without_thoughts(messages: Messages) -> Messages:
    """Remove thoughts, and the text of turns with tool calls, which gpt-oss's template writes as a thought."""
    bare = [{key: value for key, value in message.items() if key not in THOUGHT_KEYS} for message in messages]
    return [{**message, "content": ""} if "tool_calls" in message else message for message in bare]


def _first_of(stops: Sequence[int], ids: Sequence[int], start: int = 0) -> int:
    """Return the position of the first stop id at or after `start`."""
    return next(i for i in range(start, len(ids)) if ids[i] in stops)


def _rewritten(index: int) -> str:
    return (
        f"messages[{index}]: the chat template changes the text before this assistant turn when the turn follows, "
        "so its loss mask cannot be computed; use a template that only appends turns"
    )


def render_responses(
    tokenizer: Any, prompt: Messages, responses: Sequence[Messages], system_prompt: str | None = None,
    settings: Mapping[str, Any] | None = None, notes: list[str] | None = None,
) -> tuple[list[int], list[list[int]]]:  # fmt: skip
    """Return the ids of a prompt, and of the prompt with each response, closed by its end-of-turn token.

    The prompt is the generation prompt up to where a response diverges from it: a template may end it differently
    before a response (with an empty thinking block, for example). The text before the assistant's turn must be the
    same. If a token spans the end of the prompt and the start of a response, the prompt's ids are not a prefix of the
    ids with the response.
    notes: remarks about the row are appended to this list.
    """
    prompt = clean_messages(prompt)
    if prompt[-1]["role"] == "assistant":
        raise UserError("the prompt ends with an assistant turn; end it before the response")
    _check_ids(tokenizer, prompt)
    context = with_system(prompt, system_prompt)
    before, opening = (
        _render_text(tokenizer, context, generation_prompt=flag, settings=settings) for flag in (False, True)
    )
    responses = [clean_messages(response) for response in responses]
    texts = []
    for response in responses:
        _check_ids(tokenizer, response)
        _check_calls(tokenizer, prompt + response, settings)
        text = _render_text(tokenizer, context + response, generation_prompt=False, settings=settings)
        if not text.startswith(before):
            raise UserError(
                "chat_template: renders the prompt differently when a response follows, so the start of the response "
                "cannot be found; use a template that only appends turns"
            )
        texts.append(text)
    if not all(text.startswith(opening) for text in texts):
        probe = [*context, {"role": "assistant", "content": _PROBE}]
        probe_text = _render_text(tokenizer, probe, generation_prompt=False, settings=settings)
        shared = commonprefix([opening, probe_text, *texts])
        if notes is not None:
            notes.append(_missing_opening(opening[len(shared) :]))
        opening = shared
    prompt_ids, stops = _ids_of(tokenizer, opening), end_ids(tokenizer)
    sequences = [_ids_of(tokenizer, text) for text in texts]
    if not stops:
        return prompt_ids, sequences
    for index, (response, ids) in enumerate(zip(responses, sequences, strict=True)):
        _check_content(tokenizer, response[-1], stops, "the response")
        if set(stops).isdisjoint(ids[common_prefix(prompt_ids, ids) :]):
            raise UserError("the chat template does not close the response's turn; use another --chat-template")
        sequences[index] = ids[: len(ids) - _first_of(stops, ids[::-1])]
    return prompt_ids, sequences


def _missing_opening(text: str) -> str:
    return f"whose answer does not start with {text!r}, which the chat template adds to the generation prompt"


def with_system(messages: Messages, system_prompt: str | None) -> Messages:
    """Prepend system_prompt, unless the conversation starts with a system message."""
    if system_prompt is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    differ = (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


# Messages: clean them for templates, and detect parts that a template drops.


def _checked_messages(tokenizer: Any, messages: Any, settings: Mapping[str, Any] | None) -> Messages:
    """Clean the messages; raise if the tokenizer or the template would drop text or tool calls."""
    messages = clean_messages(messages)
    _check_ids(tokenizer, messages)
    _check_calls(tokenizer, messages, settings)
    return messages


def clean_messages(messages: Any) -> Messages:
    """Convert messages to a form that every template accepts; raise for messages that none can render.

    Every content becomes text: text parts are joined, and null in a message with tool_calls becomes "". Keys with a
    null value are removed, because templates test whether a key is present. All other keys are kept; parts of
    thoughts are joined.
    """
    if not isinstance(messages, list) or not messages:
        raise UserError(f"messages={messages!r}: must be a list of at least one message")
    cleaned = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        if not isinstance(message, dict) or "role" not in message or ("content" not in message and not calls):
            raise UserError(f"{where}={message!r}: a message needs the keys 'role' and 'content'; add them")
        if message["role"] not in ROLES:  # most templates would write any role
            raise UserError(
                f"{where}: role={message['role']!r} is unknown; use system, user or assistant (all: {', '.join(ROLES)})"
            )
        fields = {key: value for key, value in message.items() if value is not None and key != "tool_calls"}
        fields["content"] = "" if calls and message.get("content") is None else _text_of(message["content"], where)
        for key in THOUGHT_KEYS:
            if isinstance(fields.get(key), list):
                if _flags_of(fields[key]) is not None:
                    raise UserError(f"{where}: {key} has parts with train or weight; only those of content are read")
                fields[key] = _text_of(fields[key], where)
        if calls:
            fields["tool_calls"] = _calls_of(calls, where)
        cleaned.append(fields)
    return cleaned


def _text_of(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UserError(f"{where}: content is {content!r}, not text; fix the row")
    for part in content:
        kind = part.get("type") or "text" if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(_part_text(part), str):
            raise UserError(f"{where}: content has a part of type {kind!r}; only text is supported")
    return "".join(map(_part_text, content))


def _part_text(part: dict[str, Any]) -> Any:
    return next((part[key] for key in ("text", "content", "value") if part.get(key)), part.get("text"))


def _flags_of(content: Any) -> list[tuple[int, bool]] | None:
    """Return the length of each part and whether it is trained, or None if no part has `train` or `weight`."""
    if not isinstance(content, list):
        return None
    flags = [next((part[key] for key in ("train", "weight") if part.get(key) is not None), None) for part in content]
    if all(flag is None for flag in flags):
        return None
    return [(len(_part_text(part)), flag is None or bool(flag)) for part, flag in zip(content, flags, strict=True)]


def _calls_of(calls: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(calls, str):  # tables store calls as JSON if rows differ in shape
        try:
            calls = json.loads(calls)
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: tool_calls are not valid JSON ({error.msg}); fix the row") from None
    if not isinstance(calls, list) or not all(isinstance(_function(call).get("name"), str) for call in calls):
        raise UserError(f"{where}: tool_calls are not a list of calls with a function name; fix the row")
    return calls


def _function(call: Any) -> dict[str, Any]:
    """Return the part of a call that contains the name and the arguments."""
    inner = call.get("function", call) if isinstance(call, dict) else None
    return inner if isinstance(inner, dict) else {}


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """Parse the arguments of calls that are JSON text."""

    def parsed(call: dict[str, Any]) -> dict[str, Any]:
        try:
            function = {**_function(call), "arguments": json.loads(_function(call)["arguments"])}
        except (KeyError, TypeError, ValueError):
            return call
        return {**call, "function": function} if "function" in call else function

    return {**message, "tool_calls": [parsed(call) for call in message["tool_calls"]]}


def _check_calls(tokenizer: Any, messages: Messages, settings: Mapping[str, Any] | None) -> None:
    """Raise if the template does not write a tool call: the model would see, or learn, an empty turn."""
    marks: dict[str, int] = {}  # probe name of a call -> index of its message

    def mark_call(call: dict[str, Any], index: int) -> dict[str, Any]:
        mark = f"{_PROBE}_call_{len(marks)}_"
        marks[mark] = index
        function = {**_function(call), "name": mark}
        return {**call, "function": function} if "function" in call else function

    changed = [
        {**message, "tool_calls": [mark_call(call, index) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for index, message in enumerate(messages)
    ]
    text = _render_text(tokenizer, changed, generation_prompt=False, settings=settings) if marks else ""
    for mark, index in marks.items():
        if mark not in text:
            raise UserError(
                f"messages[{index}]: the chat template does not write its tool_calls; use another --chat-template, or "
                "put the calls into the content"
            )


def list_unwritten(
    tokenizer: Any, messages: Messages, settings: Mapping[str, Any] | None, *, first_trained: int = 0
) -> list[str]:
    """Return notes on parts of a row that the template drops, or that may be trained by accident.

    These are tools, thoughts in trained turns, and nulls in the arguments of trained tool calls: a null may come from
    the user or from a table that fills absent keys. Also return a note on special tokens in the text.
    """
    messages = clean_messages(messages)
    settings = settings or {}
    inputs = [messages, settings]
    notes = [SPECIAL_NOTE] if mark_special(tokenizer, inputs) != inputs else []
    if settings.get("tools"):
        bare = {name: value for name, value in settings.items() if name != "tools"}
        texts = [_render_text(tokenizer, messages, generation_prompt=False, settings=s) for s in (settings, bare)]
        if texts[0] == texts[1]:
            notes.append("with tools that the chat template does not write")
    marks: dict[str, str] = {}  # probe inserted into a thought -> note if the template does not write it
    changed = list(messages)
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or index < first_trained:
            continue
        if any(_has_null(_function(call).get("arguments")) for call in message.get("tool_calls", ())):
            notes.append("with null in the arguments of a tool call, which is trained")
        for key in THOUGHT_KEYS:
            if isinstance(message.get(key), str) and message[key].strip():
                mark = f"{_PROBE}_{key}_{index}_"
                marks[mark] = f"with {key} that the chat template does not write"
                changed[index] = {**changed[index], key: mark}
        if "</think>" in message["content"]:
            mark = f"{_PROBE}_thought_{index}_"
            marks[mark] = "with thoughts before </think> that the chat template removes from a trained turn"
            content = message["content"].replace("</think>", f"{mark}</think>", 1)
            changed[index] = {**changed[index], "content": content}
    text = _Conversation(tokenizer, changed, settings).text if marks else ""
    return list(dict.fromkeys([*notes, *(note for mark, note in marks.items() if mark not in text)]))


def _has_null(value: Any) -> bool:
    if isinstance(value, dict):
        return any(item is None or _has_null(item) for item in value.values())
    return isinstance(value, list) and any(_has_null(item) for item in value)


def _check_ids(tokenizer: Any, messages: Messages) -> None:
    """Raise if the tokenizer returns no ids for the last text; the template's tokens would hide that."""
    last = messages[-1]["content"]
    if last.strip() and not (encode(tokenizer, last[:40]) or encode(tokenizer, last)):
        raise UserError(_no_ids(last))


def _check_content(tokenizer: Any, message: dict[str, Any], stops: Sequence[int], where: str) -> None:
    content = message["content"]
    for stop in stops:
        added = _added_tokens(tokenizer, len(tokenizer)).get(stop)
        can_occur = added is None or added.normalized or str(added) in content
        if can_occur and stop in encode(tokenizer, content):
            token = tokenizer.convert_ids_to_tokens(stop)
            raise UserError(f"{where}: the assistant's text contains the end-of-turn token {token!r}; remove it")


# Text to ids.


def _ids_of(tokenizer: Any, text: str) -> list[int]:
    ids = encode(tokenizer, text)  # the template writes BOS, so the tokenizer must not add another
    if not ids:
        raise UserError(_no_ids(text) if text else "chat_template: renders this conversation to empty text")
    return ids


def _render_text(
    tokenizer: Any, messages: Messages, *, generation_prompt: bool, settings: Mapping[str, Any] | None = None
) -> str:
    """Render messages that clean_messages returned."""
    if not tokenizer.chat_template:
        raise UserError(
            "chat_template=tokenizer_default: the rows are conversations but this tokenizer has no chat template; "
            f"pass --chat-template with one of {', '.join(DELIMITERS)}, or a FILE.jinja"
        )

    if is_harmony(tokenizer):  # its template writes arguments with tojson, which would quote JSON text once more
        messages = [_with_objects(message) if "tool_calls" in message else message for message in messages]

    def render(messages: Messages) -> str:
        try:
            return apply_template(tokenizer, messages, add_generation_prompt=generation_prompt, **(settings or {}))
        except TemplateTimeout:
            raise
        except Exception as error:  # templates are programs: Jinja errors, TypeErrors, their own raise_exception()
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(
                f"chat_template: failed on this conversation ({reason}); fix the row or pass another --chat-template"
            ) from None

    text = render(messages)
    # Some templates, such as DeepSeek's, write the calls of a turn only if its content is null.
    if re.search(r"content\W+is\s+(not\s+)?none", str(tokenizer.chat_template)):
        nulls = [{**m, "content": None} if m.get("tool_calls") and not m["content"] else m for m in messages]
        if nulls != messages and (other := render(nulls)).count("None") == text.count("None"):
            return other
    return text


def encode(tokenizer: Any, text: str) -> list[int]:
    """Tokenise without BOS or EOS; special tokens between two marks (apply_template) become plain text."""
    ids: list[int] = []
    parts: list[str | None] = [text]
    if _PLAIN in text:  # text, marked token, text, ...; None for one mark, if the template split its input there
        tokens = _special_tokens(tokenizer, len(tokenizer)).pattern
        parts = re.split(f"{_PLAIN}({tokens}){_PLAIN}|{_PLAIN}", text)
    try:
        for i, part in enumerate(parts):
            if not part:
                continue
            if i % 2 == 0:
                ids += _encode_pieces(tokenizer, part)
                continue
            copied = _copy(tokenizer, len(tokenizer))
            ids += copied(part, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            if tokenizer.convert_tokens_to_ids(part) in ids[-1:]:
                raise UserError(
                    f"the text contains {part!r}, which the tokenizer cannot write as plain text; remove it"
                )
        return ids
    except TypeError:
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise UserError("the text contains half a character (a lone surrogate such as \\ud83d); fix it") from None
        raise


def _encode_pieces(tokenizer: Any, text: str) -> list[int]:
    """Tokenise the pieces between added tokens, each only once: renderings of one conversation share most of them."""
    pattern, cuts, known, backend = _pieces(tokenizer, len(tokenizer))
    starts = [match.start() for match in pattern.finditer(text) if match[0] in cuts]
    pieces = [text[start:stop] for start, stop in pairwise([0, *starts, len(text)]) if start < stop]
    found = {piece: known.get(piece) for piece in pieces}
    if new := [piece for piece, ids in found.items() if ids is None]:
        if (backend is not None and backend.truncation is None and backend.padding is None
                and backend.encode_special_tokens == tokenizer.split_special_tokens):  # fmt: skip
            new_ids = [encoding.ids for encoding in backend.encode_batch_fast(new, add_special_tokens=False)]
        else:  # not verbose: the loaders report texts that are too long
            new_ids = tokenizer(new, add_special_tokens=False, verbose=False)["input_ids"]
        found |= zip(new, new_ids, strict=True)
        if sum(map(len, known)) > MAX_KEPT:
            known.clear()
        known.update(found)
    return [token for piece in pieces for token in found[piece]]


@lru_cache(maxsize=8)
def _copy(tokenizer: Any, num_tokens: int) -> Any:
    """Return a copy for splitting special tokens: that option changes the tokenizer, which other threads may use."""
    return copy.deepcopy(tokenizer)


@lru_cache(maxsize=8)
def _added_tokens(tokenizer: Any, num_tokens: int) -> dict[int, Any]:
    return tokenizer.added_tokens_decoder  # builds a new dict at every access


@lru_cache(maxsize=8)
def _pieces(tokenizer: Any, num_tokens: int) -> tuple[re.Pattern[str], set[str], dict[str, list[int]], Any]:
    """Return a pattern of added tokens, those at which a text can be cut, an empty dict of pieces to ids, and the
    tokenizer's Rust object if calling that gives the same ids: it need not compute the offsets of tokens.

    A fast tokenizer first finds added tokens, the longest at each position, and then tokenises the text between them
    piece by piece. A piece includes the token before it, because some tokenizers treat the start of a text differently.
    """
    tokens = list(tokenizer.added_tokens_decoder.values()) if tokenizer.is_fast else []
    texts = sorted((str(token) for token in tokens if not token.normalized), key=len, reverse=True)
    cuts = {str(token) for token in tokens if not (token.normalized or token.lstrip or token.single_word)}
    kind = type(tokenizer)
    is_plain = all(
        getattr(getattr(kind, name, None), "__module__", "").startswith("transformers.tokenization_utils")
        for name in ("__call__", "_encode_plus")
    )
    backend = tokenizer.backend_tokenizer if tokenizer.is_fast and is_plain else None
    return re.compile("|".join(map(re.escape, texts)) or "(?!)"), cuts, {}, backend


def _adds_bos(tokenizer: Any) -> bool:
    """Return whether the tokenizer prepends BOS to plain text; tested, because its flags can be wrong."""
    bos = tokenizer.bos_token_id
    return bos is not None and list(tokenizer(_PROBE)["input_ids"])[:1] == [bos] != encode(tokenizer, _PROBE)[:1]


def _no_ids(text: str) -> str:
    shown = text if len(text) <= 40 else text[:40] + "..."
    return (
        f"tokenizer: returns no ids for the non-empty text {shown!r}; its files do not match (such as a model_type "
        "whose tokenizer class ignores tokenizer.json), so use the model's original tokenizer"
    )


# Special tokens in the input of a template.


def mark_special(tokenizer: Any, value: T) -> T:
    """Return the value with marks around the special tokens in its strings, which encode() then splits."""
    if getattr(tokenizer, "strop_allow_special", False):
        return value
    pattern = _special_tokens(tokenizer, len(tokenizer))

    def mark(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda match: f"{_PLAIN}{match[0]}{_PLAIN}", value)
        if isinstance(value, dict):
            return {mark(key): mark(item) for key, item in value.items()}
        return type(value)(map(mark, value)) if isinstance(value, (list, tuple)) else value

    return mark(value)


def unmark(text: str) -> str:
    return text.replace(_PLAIN, "")


@lru_cache(maxsize=8)
def _special_tokens(tokenizer: Any, num_tokens: int) -> re.Pattern[str]:
    # num_tokens is a cache key, as in _template_end_ids
    delimiters = {token for family in DELIMITERS.values() for token in family}  # some models add them as normal tokens
    tokens = [str(token) for token in tokenizer.added_tokens_decoder.values()
              if token.special or str(token) in delimiters]  # fmt: skip
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")  # (?!) never matches


# CPU time limit of templates; wall time would count the wait for a core on a busy machine. Jinja's sandbox limits a
# single range() but not nested loops. A signal would only reach the main thread, but tool episodes render in other
# threads; a process per rendering would cost more than the rendering. So one thread watches all renderings of this
# process and raises an exception in the thread of a late one. Python delivers it between two operations of the
# template: a single endless operation (9**9**9**9) cannot be interrupted.

# Each rendering: CPU seconds used, limit, thread id, set once the exception is raised there.
_running: dict[object, tuple[Callable[[], float], float, int, threading.Event]] = {}
_watchdog: threading.Thread | None = None
_names: dict[str, str] = {}  # template -> the name that the user passed


class RenderTimeout(BaseException):
    """Raised inside a template that takes too long; not an Exception, so that no handler catches it."""


class TemplateTimeout(UserError):
    """A chat template did not finish in time."""


def apply_template(tokenizer: Any, messages: Any, **settings: Any) -> str:
    """Call tokenizer.apply_chat_template; raise TemplateTimeout with the template's name after SECONDS of CPU time.

    Special tokens in messages and settings are marked, so pass the text to encode().
    """
    messages, settings = mark_special(tokenizer, messages), mark_special(tokenizer, settings)
    try:
        return within(SECONDS, lambda: tokenizer.apply_chat_template(messages, tokenize=False, **settings))
    except TimeoutError:
        name = _names.get(str(tokenizer.chat_template), f"tokenizer_default (of {tokenizer.name_or_path})")
        raise TemplateTimeout(
            f"chat_template={name}: did not finish within {SECONDS:g} s of CPU time; use another template"
        ) from None


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return call(), or raise TimeoutError after this many seconds of CPU time; works in any thread."""
    _start_watchdog()
    key, sent, arrived = object(), threading.Event(), False
    try:
        _running[key] = (thread_clock(), seconds, threading.get_ident(), sent)
        try:
            return call()
        except RenderTimeout:
            arrived = True
            raise
        finally:
            # Removing the entry here means call() finished in time; otherwise the exception is on its way.
            if _running.pop(key, None) is None and not arrived:
                while not sent.is_set():
                    time.sleep(0.01)
                for _ in range(2):  # it arrives here at the latest, unless call() caught it
                    time.sleep(0.01)
                raise RenderTimeout
    except RenderTimeout:
        raise TimeoutError(f"did not finish within {seconds:g} s of CPU time") from None


def _start_watchdog() -> None:
    global _watchdog
    if _watchdog is None or not _watchdog.is_alive():  # not started, or lost in a fork
        _watchdog = threading.Thread(target=_watch, name="template-time", daemon=True)
        _watchdog.start()


def _watch() -> None:
    while True:
        time.sleep(POLL_SECONDS)
        for key, (used, seconds, thread, sent) in list(_running.items()):
            if used() > seconds and _running.pop(key, None) is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(RenderTimeout))
                sent.set()
