"""Conversations to token ids: chat templates, loss masks, and the ids that end a turn.

    set_chat_template(tokenizer, "chatml")
    ids = render_prompt(tokenizer, [{"role": "user", "content": "2+2="}], None)     # ends where the answer begins
    ids, mask = render_conversation(tokenizer, messages, None)                      # every assistant turn trained

Masks are placed by token ids: the ids a model gets before a turn must be a prefix of the ids of the whole conversation,
otherwise the row is refused. A completion is never tokenised on its own to find its position: many tokenizers open a
text with a space, or merge characters across the boundary (see render_completion).

Every renderer passes its messages through clean_messages first, so no template gets a null or a list of parts, and
refuses tool calls that the template does not write. `settings` is what a template gets besides the messages: tools, and
its own switches such as enable_thinking (data/formats/template_settings.py).

Templates are programs that come with models, so each rendering has a time limit (apply_template).
"""

from __future__ import annotations

import ctypes
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from os.path import commonprefix
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from data.errors import UserError
from data.types import Messages

TEMPLATES = Path(__file__).parent / "templates"
# The delimiters of each built-in template. A model whose tokenizer splits one was not trained with that template.
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
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")  # keys of a message that may hold its thoughts
_PROBE = "strop"  # an answer that no template rewrites
SECONDS = 10.0  # a long conversation takes milliseconds
LOOK_SECONDS = 0.25
T = TypeVar("T")


# The tokenizer's template, and the ids that end a turn.


def set_chat_template(tokenizer: Any, name: str) -> None:
    """Give the tokenizer a built-in template, one from a file, one written out, or its own (tokenizer_default)."""
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
        raise UserError(f"chat_template={name}: cannot be read ({error}); give a UTF-8 text file") from None
    if not template.strip():
        raise UserError(f"chat_template={name}: the file is empty; give a Jinja template or one of {choices}")
    return template


def check_delimiters(tokenizer: Any, family: str, what: str, instead: str) -> None:
    """Refuse a family of delimiters that this tokenizer splits: its model was not trained with them."""
    for token in DELIMITERS[family]:
        ids = _encode(tokenizer, token)
        if len(ids) != 1:
            raise UserError(
                f"{what}: its delimiter {token!r} is {len(ids)} tokens in this tokenizer, not one; use {instead}, or a "
                "tokenizer that has it"
            )


def set_special_tokens(tokenizer: Any, special: Mapping[str, Any], eot_tokens: Sequence[str] = ()) -> None:
    """Set the tokenizer's pad, eos, bos or unk token, and further tokens that end a turn; none is ever added."""
    vocabulary = tokenizer.get_vocab() if special or eot_tokens else {}
    for name, token in special.items():
        if name not in SPECIAL_TOKENS:
            raise UserError(f"special_tokens={name}: is not a special token; use {', '.join(SPECIAL_TOKENS)}")
        _check_known(vocabulary, token, f"special_tokens={name}")
        setattr(tokenizer, name, token)
    for token in eot_tokens:
        _check_known(vocabulary, token, "eot_tokens")
        if len(_encode(tokenizer, token)) != 1:
            raise UserError(f"eot_tokens={token}: text is not split off at it, so no turn could end with it; drop it")
    if eot_tokens:
        tokenizer.strop_eot_ids = tuple(vocabulary[token] for token in eot_tokens)


def _check_known(vocabulary: Mapping[str, int], token: Any, what: str) -> None:
    if not isinstance(token, str) or token not in vocabulary:
        raise UserError(
            f"{what}: the tokenizer has no token {token!r}, and a new one would need new rows in the embeddings; name "
            "one that it has"
        )


def end_ids(tokenizer: Any) -> tuple[int, ...]:
    """Ids that may close an assistant turn: the template's own token, and those of --eot-tokens."""
    found = (end_of_turn_id(tokenizer), *getattr(tokenizer, "strop_eot_ids", ()))
    return tuple(dict.fromkeys(token for token in found if token is not None))


def stop_ids(tokenizer: Any, generation_config_eos: int | Iterable[int] | None = None) -> tuple[int, ...]:
    """Ids that end a completion: the model's own, the tokenizer's eos, and the end-of-turn token of the template."""
    own = [generation_config_eos] if isinstance(generation_config_eos, int) else list(generation_config_eos or [])
    found = [*own, tokenizer.eos_token_id, *end_ids(tokenizer)]
    return tuple(dict.fromkeys(token for token in found if token is not None))


def end_of_turn_id(tokenizer: Any) -> int | None:
    """The special token that closes an assistant turn in the current template; None if there is none."""
    if not tokenizer.chat_template:
        return None
    return _end_of_turn_id(tokenizer, str(tokenizer.chat_template), len(tokenizer))


@lru_cache(maxsize=8)
def _end_of_turn_id(tokenizer: Any, template: str, num_tokens: int) -> int | None:
    # template and num_tokens are cache keys: either may change on the same tokenizer.
    turns = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _PROBE}]
    after_answer = _render_text(tokenizer, turns, generation_prompt=False).rpartition(_PROBE)[2]
    ids = _encode(tokenizer, after_answer.lstrip()) if after_answer.strip() else []
    return ids[0] if ids and ids[0] in tokenizer.added_tokens_decoder else None


# Rendering: prompts, completions, conversations, responses.


def render_prompt(
    tokenizer: Any, prompt: str | Messages, system_prompt: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> list[int]:  # fmt: skip
    """Ids for an engine to complete. Plain text gets BOS if the tokenizer adds one, and never a system prompt."""
    if not isinstance(prompt, str):
        whole = with_system(_cleaned(tokenizer, prompt, settings), system_prompt)
        return _ids_of(tokenizer, _render_text(tokenizer, whole, generation_prompt=True, settings=settings))
    ids = render_text(tokenizer, prompt)
    bos = tokenizer.bos_token_id
    return [bos, *ids] if ids and ids[0] != bos and _adds_bos(tokenizer) else ids


def render_text(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text on its own, without special tokens; SentencePiece still opens it with a space."""
    ids = _encode(tokenizer, text)
    if text and not ids:
        raise UserError(_no_ids(text))
    return ids


def render_completion(tokenizer: Any, prompt: str, completion: str) -> tuple[list[int], int]:
    """Ids of a plain-text prompt with its completion, tokenised as one text, and where the completion begins.

    The prompt is the common prefix of these ids and its own. A token that straddles the boundary belongs to the
    completion: a model that gets the prompt without it has to produce it.
    """
    ids = render_prompt(tokenizer, prompt + completion)
    start = common_prefix(render_prompt(tokenizer, prompt), ids)
    if completion and start == len(ids):
        raise UserError(_no_ids(completion))
    return ids, start


class Trained(NamedTuple):
    """Which parts of a conversation are trained; by default every assistant turn with its end-of-turn token."""

    roles: tuple[str, ...] = ("assistant",)
    eos: Literal["turn", "all", "last", "none"] = "turn"  # end tokens: of trained turns, all, the last trained, none
    inputs: bool = False  # all roles, and the prompts of plain text

    def trains(self, role: str) -> bool:
        return self.inputs or role in self.roles


ASSISTANT = Trained()


def render_conversation(
    tokenizer: Any, messages: Messages, system_prompt: str | None = None, *, first_trained: int = 0,
    settings: Mapping[str, Any] | None = None, notes: list[str] | None = None, trained: Trained = ASSISTANT,
) -> tuple[list[int], list[bool]]:  # fmt: skip
    """Ids of a whole conversation, and a mask that trains each assistant turn with its end-of-turn token.

    A turn that the template closes only when it is last, or closes with another token, is trained up to the start of
    the next turn, without an end-of-turn token if the template writes none. The mask never covers another role's turn.

    first_trained: index of the first message that may be trained; earlier assistant turns are context.
    notes: remarks about the row are appended to it.
    trained: other roles to train, of which the text alone is; and which end-of-turn tokens.
    """
    messages = _cleaned(tokenizer, messages, settings)
    whole = with_system(messages, system_prompt)
    first_trained += len(whole) - len(messages)
    conversation = _Conversation(tokenizer, whole, settings)
    mask, last_end = [False] * len(conversation.ids), None
    for number, message in enumerate(whole):
        is_trained = trained.trains(message["role"]) and number >= first_trained
        if not is_trained and trained.eos != "all":
            continue
        start, end, closing = conversation.span_of(number)
        if is_trained:
            mask[start:end] = [True] * (end - start)
            last_end = closing if closing is not None else last_end
        if closing is not None:
            mask[closing] = trained.eos == "all" or (trained.eos == "turn" and is_trained)
    if trained.eos == "last" and last_end is not None:
        mask[last_end] = True
    if notes is not None:
        notes += dict.fromkeys(conversation.notes)
    return conversation.ids, mask


class _Conversation:
    """A rendered conversation, and the positions of its assistant turns."""

    def __init__(self, tokenizer: Any, messages: Messages, settings: Mapping[str, Any] | None) -> None:
        self.tokenizer, self.messages, self.settings = tokenizer, messages, settings
        self.notes: list[str] = []
        self.text = self.render(messages)
        self.ids = _ids_of(tokenizer, self.text)

    def render(self, messages: Messages, *, generation_prompt: bool = False) -> str:
        return _render_text(self.tokenizer, messages, generation_prompt=generation_prompt, settings=self.settings)

    def span_of(self, number: int) -> tuple[int, int, int | None]:
        """Where a message begins and ends, and the place of the token that closes it, if there is one."""
        stops = end_ids(self.tokenizer)
        if self.messages[number]["role"] == "assistant":
            if number == 0:
                raise UserError("messages: the conversation opens with an assistant turn; put a user turn before it")
            start = self.start_of_turn(number)
            end = self.end_of_turn(number, start)
            return start, end, end - 1 if self.ids[end - 1] in stops else None
        start, end = self.text_span(number)
        limit = len(self.ids) if number + 1 == len(self.messages) else self.start_of_message(number + 1)
        return start, end, next((place for place in range(end, limit) if self.ids[place] in stops), None)

    def start_of_message(self, number: int) -> int:
        is_answer = self.messages[number]["role"] == "assistant"
        return self.start_of_turn(number) if is_answer else self.text_span(number)[0]

    def text_span(self, number: int) -> tuple[int, int]:
        """Where the text of a message begins and ends: what changes if only this text does."""
        message, texts = self.messages[number], []
        for probe in (f"{_PROBE}x", f"y{_PROBE}"):
            others = [*self.messages[:number], {**message, "content": probe}, *self.messages[number + 1 :]]
            texts.append(self.render(others))
        head, tail = commonprefix(texts), commonprefix([text[::-1] for text in texts])[::-1]
        if not self.text.startswith(head) or not self.text.endswith(tail):
            raise UserError(
                f"messages[{number}]: the chat template writes other messages differently, depending on this one, so "
                "its loss mask cannot be placed; do not train this role, or use another template"
            )
        if f"{_PROBE}x" not in texts[0]:
            return 0, 0  # the template drops this message
        before, until = self.text[: len(head)], self.text[: len(self.text) - len(tail)]
        prefix = _encode(self.tokenizer, before)
        if self.ids[: len(prefix)] != prefix:
            raise UserError(
                f"messages[{number}]: the ids before this text are not a prefix of the conversation's ids, so its loss "
                "mask cannot be placed; strip white space at its start"
            )
        end = common_prefix(_encode(self.tokenizer, until), self.ids) if len(until) > len(before) else len(prefix)
        return len(prefix), end

    def start_of_turn(self, number: int) -> int:
        """Where the trained part of an assistant turn begins: after the generation prompt.

        Some templates end the generation prompt with more than they write before a turn, such as an opened <think>.
        The trained part then begins after their common prefix, as in a preference pair.
        """
        before = self.messages[:number]
        opening = self.render(before, generation_prompt=True)
        self.opened = len(opening)
        if self.text.startswith(opening):
            prefix = _ids_of(self.tokenizer, opening)
            if self.ids[: len(prefix)] != prefix:
                raise UserError(
                    f"messages[{number}]: the ids before this assistant turn are not a prefix of the conversation's "
                    "ids, so its loss mask cannot be placed; strip white space at its start"
                )
            return len(prefix)
        if not self.text.startswith(self.render(before)):
            raise UserError(_rewritten(number))
        # Found with a probe answer: the real one may begin with characters of the opened text, such as "<".
        answer = {key: value for key, value in self.messages[number].items() if key not in THOUGHT_KEYS}
        probe = self.render([*before, {**answer, "content": _PROBE}, *self.messages[number + 1 :]])
        head = commonprefix([opening, probe, self.text])
        self.opened = len(head)
        self.notes.append(_not_begun(opening[len(head) :]))
        return common_prefix(_ids_of(self.tokenizer, head), self.ids)

    def end_of_turn(self, number: int, start: int) -> int:
        """Where the turn ends: after its end-of-turn token, and never past the start of the next turn.

        Templates write more after that token (a newline, say), which an engine that stops there never produces.
        """
        stops, is_last = end_ids(self.tokenizer), number + 1 == len(self.messages)
        if stops:
            _check_content(self.tokenizer, self.messages[number], stops, f"messages[{number}]")
            if not is_last and self.closes(number, stops):  # the usual case, without tokenising again
                return _first_of(stops, self.ids, start) + 1
        alone = self.ids if is_last else _ids_of(self.tokenizer, self.render(self.messages[: number + 1]))
        is_prefix = self.ids[: len(alone)] == alone  # else the template rewrites this turn once others follow
        if not stops and not is_prefix:
            raise UserError(_rewritten(number))
        if not stops:
            return len(alone)
        limit = len(alone) if is_prefix else self.start_of_next(number)
        if not set(stops).isdisjoint(self.ids[start:limit]):
            return _first_of(stops, self.ids, start) + 1
        end = common_prefix(alone, self.ids)
        if is_last or end <= start:
            raise UserError(
                f"messages[{number}]: the chat template does not close this assistant turn; use another one"
            )
        if not is_prefix:
            self.notes.append("with an assistant turn that the chat template does not close before the next one, "
                              "trained without an end-of-turn token")  # fmt: skip
        return end

    def closes(self, number: int, stops: Sequence[int]) -> bool:
        """Whether a turn that others follow contains its end-of-turn token, which is never split."""
        own, added = self.render(self.messages[: number + 1]), self.tokenizer.added_tokens_decoder
        found = any(str(added[stop]) in own[self.opened :] for stop in stops if stop in added)
        return found and self.text.startswith(own)

    def start_of_next(self, number: int) -> int:
        """Upper bound for the start of the next message: everything before it stays if its text changes."""
        later = [{**message, "content": _PROBE + message["content"]} for message in self.messages[number + 1 :]]
        return common_prefix(_ids_of(self.tokenizer, self.render(self.messages[: number + 1] + later)), self.ids)


def _first_of(stops: Sequence[int], ids: Sequence[int], start: int = 0) -> int:
    """Position of the first of these ids, from `start` on."""
    return next(place for place in range(start, len(ids)) if ids[place] in stops)


def _rewritten(number: int) -> str:
    return (
        f"messages[{number}]: the chat template changes the text before this assistant turn once the turn follows, "
        "so its loss mask cannot be placed; use a template that only appends turns"
    )


def render_responses(
    tokenizer: Any, prompt: Messages, responses: Sequence[Messages], system_prompt: str | None = None,
    settings: Mapping[str, Any] | None = None, notes: list[str] | None = None,
) -> tuple[list[int], list[list[int]]]:  # fmt: skip
    """Ids of a prompt, and of the prompt with each response, closed by its end-of-turn token.

    The prompt is what an engine gets, up to where the responses diverge from it: the template may write its end
    differently before a response (a thinking stub, say). The text before the assistant's turn must be the same. If a
    token spans the end of the prompt and the start of a response, the prompt's ids are no prefix of the whole.
    notes: remarks about the row are appended to it.
    """
    prompt = clean_messages(prompt)
    if prompt[-1]["role"] == "assistant":
        raise UserError("the prompt ends with an assistant turn; it must end where the response begins")
    _check_ids(tokenizer, prompt)
    context = with_system(prompt, system_prompt)
    before, opening = (
        _render_text(tokenizer, context, generation_prompt=asked, settings=settings) for asked in (False, True)
    )
    responses = [clean_messages(response) for response in responses]
    texts = []
    for response in responses:
        _check_ids(tokenizer, response)
        _check_calls(tokenizer, prompt + response, settings)
        text = _render_text(tokenizer, context + response, generation_prompt=False, settings=settings)
        if not text.startswith(before):
            raise UserError(
                "chat_template: writes the prompt differently once a response follows it, so the start of the response "
                "cannot be found; use a template that only appends turns"
            )
        texts.append(text)
    if not all(text.startswith(opening) for text in texts):
        probe = [*context, {"role": "assistant", "content": _PROBE}]
        written = _render_text(tokenizer, probe, generation_prompt=False, settings=settings)
        shared = commonprefix([opening, written, *texts])
        if notes is not None:
            notes.append(_not_begun(opening[len(shared) :]))
        opening = shared
    head, stops = _ids_of(tokenizer, opening), end_ids(tokenizer)
    wholes = [_ids_of(tokenizer, text) for text in texts]
    if not stops:
        return head, wholes
    for number, (response, ids) in enumerate(zip(responses, wholes, strict=True)):
        _check_content(tokenizer, response[-1], stops, "the response")
        if set(stops).isdisjoint(ids[common_prefix(head, ids) :]):
            raise UserError("the chat template does not close the response's turn; use another one")
        wholes[number] = ids[: len(ids) - _first_of(stops, ids[::-1])]
    return head, wholes


def _not_begun(lost: str) -> str:
    return f"whose answer does not begin with {lost!r}, which the chat template puts before what a model writes"


def with_system(messages: Messages, system_prompt: str | None) -> Messages:
    """The conversation with system_prompt prepended, unless it starts with its own system message."""
    if system_prompt is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix."""
    differ = (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


# Messages: what templates can take, and what they leave out.


def _cleaned(tokenizer: Any, messages: Any, settings: Mapping[str, Any] | None) -> Messages:
    """clean_messages, and refuse what this tokenizer or its template would drop."""
    messages = clean_messages(messages)
    _check_ids(tokenizer, messages)
    _check_calls(tokenizer, messages, settings)
    return messages


def clean_messages(messages: Any) -> Messages:
    """The messages in a form that every template accepts; refuses those that none could render.

    Every content becomes text: text parts are joined, and null next to tool_calls becomes "". Keys with a null value
    are removed, since templates test whether a key is present. All other keys stay.
    """
    if not isinstance(messages, list) or not messages:
        raise UserError(f"messages={messages!r}: must be a list of at least one message")
    cleaned = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        if not isinstance(message, dict) or "role" not in message or ("content" not in message and not calls):
            raise UserError(f"{where}={message!r}: a message has the keys 'role' and 'content'")
        if message["role"] not in ROLES:  # most templates would write it unchecked
            raise UserError(
                f"{where}: role={message['role']!r} is unknown; use system, user or assistant (all: {', '.join(ROLES)})"
            )
        kept = {key: value for key, value in message.items() if value is not None and key != "tool_calls"}
        kept["content"] = "" if calls and message.get("content") is None else _text_of(message["content"], where)
        if calls:
            kept["tool_calls"] = _calls_of(calls, where)
        cleaned.append(kept)
    return cleaned


def _text_of(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UserError(f"{where}: its content is {content!r}, not text; fix the row")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise UserError(f"{where}: its content has a part of type {kind!r}; only text is supported, fix the row")
        texts.append(part["text"])
    return "".join(texts)


def _calls_of(calls: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(calls, str):  # tables whose rows differ in shape store them as JSON
        try:
            calls = json.loads(calls)
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: its tool_calls are not valid JSON ({error.msg}); fix the row") from None
    if not isinstance(calls, list) or not all(isinstance(_function(call).get("name"), str) for call in calls):
        raise UserError(f"{where}: its tool_calls are not a list of calls with the name of a function; fix the row")
    return calls


def _function(call: Any) -> dict[str, Any]:
    """The part of a call that holds the name and the arguments."""
    inner = call.get("function", call) if isinstance(call, dict) else None
    return inner if isinstance(inner, dict) else {}


def _check_calls(tokenizer: Any, messages: Messages, settings: Mapping[str, Any] | None) -> None:
    """Refuse tool calls that the template does not write: the model would see, or learn, an empty turn."""
    marks: dict[str, int] = {}  # probe name of a call -> index of its message

    def marked(call: dict[str, Any], number: int) -> dict[str, Any]:
        mark = f"{_PROBE}_call_{len(marks)}_"
        marks[mark] = number
        function = {**_function(call), "name": mark}
        return {**call, "function": function} if "function" in call else function

    changed = [
        {**message, "tool_calls": [marked(call, number) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for number, message in enumerate(messages)
    ]
    text = _render_text(tokenizer, changed, generation_prompt=False, settings=settings) if marks else ""
    for mark, number in marks.items():
        if mark not in text:
            raise UserError(
                f"messages[{number}]: has tool_calls that the chat template does not write; use a template that "
                "writes them (--chat-template), or put them into the content"
            )


def unwritten(
    tokenizer: Any, messages: Messages, settings: Mapping[str, Any] | None, *, first_trained: int = 0
) -> list[str]:
    """Notes on parts of a row that the template drops, or that may not be meant to be trained.

    These are tools, thoughts in trained turns, and nulls in the arguments of their tool calls: nothing shows whether
    the user wrote a null or a program filled a gap in a table.
    """
    messages = clean_messages(messages)
    settings = settings or {}
    found = []
    if settings.get("tools"):
        bare = {name: value for name, value in settings.items() if name != "tools"}
        texts = [_render_text(tokenizer, messages, generation_prompt=False, settings=s) for s in (settings, bare)]
        if texts[0] == texts[1]:
            found.append("with tools that the chat template does not write")
    marks: dict[str, str] = {}  # probe put into a thought -> note if the template does not write it
    changed = list(messages)
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or number < first_trained:
            continue
        if any(_has_null(_function(call).get("arguments")) for call in message.get("tool_calls", ())):
            found.append("with null in the arguments of a tool call, trained as it is written")
        for key in THOUGHT_KEYS:
            if isinstance(message.get(key), str) and message[key].strip():
                mark = f"{_PROBE}_{key}_{number}_"
                marks[mark] = f"with {key} that the chat template does not write"
                changed[number] = {**changed[number], key: mark}
        if "</think>" in message["content"]:
            mark = f"{_PROBE}_thought_{number}_"
            marks[mark] = "with thoughts before </think> that the chat template cuts out of a trained turn"
            content = message["content"].replace("</think>", f"{mark}</think>", 1)
            changed[number] = {**changed[number], "content": content}
    text = _render_text(tokenizer, changed, generation_prompt=False, settings=settings) if marks else ""
    return list(dict.fromkeys([*found, *(what for mark, what in marks.items() if mark not in text)]))


def _has_null(value: Any) -> bool:
    if isinstance(value, dict):
        return any(item is None or _has_null(item) for item in value.values())
    return isinstance(value, list) and any(_has_null(item) for item in value)


def _check_ids(tokenizer: Any, messages: Messages) -> None:
    """Refuse text for which the tokenizer gives no ids; the template's own tokens would hide that."""
    last = messages[-1]["content"]
    if last.strip() and not _encode(tokenizer, last):
        raise UserError(_no_ids(last))


def _check_content(tokenizer: Any, message: dict[str, Any], stops: Sequence[int], where: str) -> None:
    ids = _encode(tokenizer, message["content"])
    if found := [stop for stop in stops if stop in ids]:
        raise UserError(
            f"{where}: the assistant's text holds the template's own end-of-turn token "
            f"{tokenizer.convert_ids_to_tokens(found[0])!r}; remove it from the data"
        )


# Text to ids.


def _ids_of(tokenizer: Any, text: str) -> list[int]:
    ids = _encode(tokenizer, text)  # the template writes BOS itself, so the tokenizer must not add another
    if not ids:
        raise UserError(_no_ids(text) if text else "chat_template: renders this conversation to nothing; use another")
    return ids


def _render_text(
    tokenizer: Any, messages: Messages, *, generation_prompt: bool, settings: Mapping[str, Any] | None = None
) -> str:
    """Rendered text of messages that went through clean_messages."""
    if not tokenizer.chat_template:
        raise UserError(
            "chat_template=tokenizer_default: the rows are conversations but this tokenizer has no chat template; "
            f"choose one of {', '.join(DELIMITERS)}, or give a FILE.jinja"
        )

    def render(messages: Messages) -> str:
        try:
            return apply_template(tokenizer, messages, add_generation_prompt=generation_prompt, **(settings or {}))
        except TemplateTimeout:
            raise
        except Exception as error:  # templates are programs: Jinja errors, TypeErrors, their own raise_exception()
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(
                f"chat_template: cannot render this conversation ({reason}); change the rows or it"
            ) from None

    text = render(messages)
    # Some templates (DeepSeek's) write the calls of a turn only if its content is null.
    if re.search(r"content\W+is\s+(not\s+)?none", str(tokenizer.chat_template)):
        nulls = [{**m, "content": None} if m.get("tool_calls") and not m["content"] else m for m in messages]
        if nulls != messages and (other := render(nulls)).count("None") == text.count("None"):
            return other
    return text


def _encode(tokenizer: Any, text: str) -> list[int]:
    try:
        # not verbose: our loaders report texts that are too long
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    except TypeError:
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise UserError("the text holds half a character (a lone surrogate such as \\ud83d); fix it") from None
        raise


def _adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer opens plain text with BOS; tested, since its flags are not always right."""
    bos = tokenizer.bos_token_id
    return bos is not None and list(tokenizer(_PROBE)["input_ids"])[:1] == [bos] != _encode(tokenizer, _PROBE)[:1]


def _no_ids(text: str) -> str:
    shown = text if len(text) <= 40 else text[:40] + "..."
    return (
        f"tokenizer: gives no ids for the non-empty text {shown!r}; its files do not belong together (a model_type "
        "whose tokenizer class ignores tokenizer.json does this), so use the model's own tokenizer"
    )


# The time limit of templates. Jinja's sandbox bounds a single range() but not nested loops. A signal would only reach
# the main thread, and tool episodes render in others; a process per rendering would cost more than the rendering. So
# one thread watches all renderings of this process and raises an exception in the thread of a late one, which Python
# delivers between two operations of the template. A single endless operation (9**9**9**9) cannot be interrupted.

_running: dict[object, tuple[float, int]] = {}  # deadline and thread of each rendering
_watchdog: threading.Thread | None = None
_names: dict[str, str] = {}  # template -> how the user named it


class RenderTimeout(BaseException):
    """Raised inside a template that takes too long; not an Exception, so no handler in between catches it."""


class TemplateTimeout(UserError):
    """A chat template did not finish in time."""


def apply_template(tokenizer: Any, messages: Any, **settings: Any) -> str:
    """tokenizer.apply_chat_template as text; raises Endless, naming the template, after SECONDS."""
    try:
        return within(SECONDS, lambda: tokenizer.apply_chat_template(messages, tokenize=False, **settings))
    except TimeoutError:
        own = f"tokenizer_default (of {tokenizer.name_or_path})"
        name = _names.get(str(tokenizer.chat_template), own)
        raise TemplateTimeout(f"chat_template={name}: did not end within {SECONDS:g} s; use another template") from None


def within(seconds: float, call: Callable[[], T]) -> T:
    """call(), or TimeoutError after that many seconds; works in any thread."""
    _watch()
    key, arrived = object(), False
    try:
        _running[key] = (time.monotonic() + seconds, threading.get_ident())
        try:
            return call()
        except RenderTimeout:
            arrived = True
            raise
        finally:
            # Whoever removes the entry decides: we finished in time, or the exception is on its way to us.
            if _running.pop(key, None) is None:
                while not arrived:
                    time.sleep(0.01)
    except RenderTimeout:
        raise TimeoutError(f"did not end within {seconds:g} s") from None


def _watch() -> None:
    global _watchdog
    if _watchdog is None or not _watchdog.is_alive():  # not started, or lost in a fork
        _watchdog = threading.Thread(target=_look, name="template-time", daemon=True)
        _watchdog.start()


def _look() -> None:
    while True:
        time.sleep(LOOK_SECONDS)
        now = time.monotonic()
        for key, (deadline, thread) in list(_running.items()):
            if now > deadline and _running.pop(key, None) is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(RenderTimeout))
