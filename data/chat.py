"""Conversations to token ids: chat templates, loss masks, and the ids that end a turn.

    set_chat_template(tokenizer, "chatml")
    ids = render_prompt(tokenizer, [{"role": "user", "content": "2+2="}], None)     # ends where the answer begins
    ids, mask = render_conversation(tokenizer, messages, None)                      # every assistant turn trained

Masks are found by token ids: what the model would be given before a turn must be a prefix of the ids of the whole
conversation, otherwise the row is refused. A completion is never tokenised on its own to find its place: many
tokenizers open a text with a space, or join what stands on either side of a boundary (see render_completion).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from data.template_time import Endless, apply_template, name_template
from data.types import Messages

TEMPLATES = Path(__file__).parent / "templates"
# The tokens each built-in template is made of. A tokenizer that splits one of them has never seen this template.
DELIMITERS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
}
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation", "environment",
         "document")  # fmt: skip
_PROBE = "strop"  # an answer that no template rewrites


def set_chat_template(tokenizer: Any, name: str) -> None:
    """Give the tokenizer a built-in template, one from a file, or leave its own (tokenizer_default)."""
    if name == "tokenizer_default":
        return
    if name in DELIMITERS:
        check_delimiters(tokenizer, name, f"chat_template={name}", "tokenizer_default, another template")
        tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
        return
    path = Path(name).expanduser()
    choices = "tokenizer_default, " + ", ".join(DELIMITERS)
    if not path.is_file():
        raise ValueError(f"chat_template={name}: neither a file nor a built-in template ({choices})")
    try:
        template = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"chat_template={name}: cannot be read ({error}); give a UTF-8 text file") from None
    if not template.strip():
        raise ValueError(f"chat_template={name}: the file is empty; give a Jinja template or one of {choices}")
    tokenizer.chat_template = template
    name_template(template, name)
    try:  # refuse a broken one now, by its name
        _render_text(tokenizer, [{"role": "user", "content": _PROBE}], generation_prompt=True)
    except Endless:
        raise
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def check_delimiters(tokenizer: Any, family: str, what: str, instead: str) -> None:
    """Refuse a family of delimiters of which this tokenizer splits one: its model has never seen them as such."""
    for token in DELIMITERS[family]:
        ids = _encode(tokenizer, token)
        if len(ids) != 1:
            raise ValueError(
                f"{what}: its delimiter {token!r} is {len(ids)} tokens in this tokenizer, not one; use {instead}, or a "
                "tokenizer that has it"
            )


def stop_ids(tokenizer: Any, generation_config_eos: int | Iterable[int] | None = None) -> tuple[int, ...]:
    """Ids that end a completion: the model's own, the tokenizer's eos, and the end-of-turn token of the template."""
    own = [generation_config_eos] if isinstance(generation_config_eos, int) else list(generation_config_eos or [])
    found = [*own, tokenizer.eos_token_id, end_of_turn_id(tokenizer)]
    return tuple(dict.fromkeys(token for token in found if token is not None))


def end_of_turn_id(tokenizer: Any) -> int | None:
    """The special token with which the template in use closes an assistant turn; None when it has none."""
    if not tokenizer.chat_template:
        return None
    return _end_of_turn_id(tokenizer, str(tokenizer.chat_template), len(tokenizer))


@lru_cache(maxsize=8)
def _end_of_turn_id(tokenizer: Any, template: str, num_tokens: int) -> int | None:
    # template and num_tokens are here for the cache: either may change on the same tokenizer.
    turns = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _PROBE}]
    after_answer = _render_text(tokenizer, turns, generation_prompt=False).rpartition(_PROBE)[2]
    ids = _encode(tokenizer, after_answer.lstrip()) if after_answer.strip() else []
    return ids[0] if ids and ids[0] in tokenizer.added_tokens_decoder else None


def with_system(messages: Messages, system_prompt: str | None) -> Messages:
    """The conversation with system_prompt before it, unless it opens with a system message of its own."""
    if system_prompt is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def render_prompt(tokenizer: Any, prompt: str | Messages, system_prompt: str | None = None) -> list[int]:
    """Ids an engine completes. Plain text gets the tokenizer's BOS if it has that habit, and never a system prompt."""
    if not isinstance(prompt, str):
        check_messages(prompt)
        _check_ids(tokenizer, prompt)
        return _render_ids(tokenizer, with_system(prompt, system_prompt), generation_prompt=True)
    ids = _encode(tokenizer, prompt)
    if prompt and not ids:
        raise ValueError(_no_ids(prompt))
    bos = tokenizer.bos_token_id
    return [bos, *ids] if ids and ids[0] != bos and _adds_bos(tokenizer) else ids


def render_text(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text by itself, no special tokens around it; SentencePiece opens it with a space all the same."""
    ids = _encode(tokenizer, text)
    if text and not ids:
        raise ValueError(_no_ids(text))
    return ids


def render_completion(tokenizer: Any, prompt: str, completion: str) -> tuple[list[int], int]:
    """Ids of a plain-text prompt and its completion, tokenised as the one text they are, and where the latter begins.

    The prompt is what these ids have in common with its own. So a token that straddles the boundary is the
    completion's: a model that is given the prompt without it has to produce it.
    """
    ids = render_prompt(tokenizer, prompt + completion)
    start = common_prefix(render_prompt(tokenizer, prompt), ids)
    if completion and start == len(ids):
        raise ValueError(_no_ids(completion))
    return ids, start


def render_conversation(
    tokenizer: Any, messages: Messages, system_prompt: str | None = None, *, first_trained: int = 0
) -> tuple[list[int], list[bool]]:
    """Ids of a whole conversation, and a mask that trains each assistant turn with its end-of-turn token.

    first_trained: number of the first message that may be trained; earlier assistant turns are context.
    """
    check_messages(messages)
    _check_ids(tokenizer, messages)
    whole = with_system(messages, system_prompt)
    first_trained += len(whole) - len(messages)
    ids = _render_ids(tokenizer, whole, generation_prompt=False)
    mask = [False] * len(ids)
    for number, message in enumerate(whole):
        if message["role"] != "assistant" or number < first_trained:
            continue
        if number == 0:
            raise ValueError("messages: the conversation opens with an assistant turn; put a user turn before it")
        start = _length_of_prefix(ids, _render_ids(tokenizer, whole[:number], generation_prompt=True), number)
        end = _end_of_turn(tokenizer, ids, whole, number, start)
        mask[start:end] = [True] * (end - start)
    return ids, mask


def render_responses(
    tokenizer: Any, prompt: Messages, responses: Sequence[Messages], system_prompt: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> tuple[list[int], list[list[int]]]:  # fmt: skip
    """Ids of a prompt as an engine gets it, and of the prompt with each response, closed by its end-of-turn token.

    The template may write the end of the prompt differently once a response follows (a thinking stub, say), so the
    prompt's ids need not be a prefix of the others; what comes before the assistant's turn must be.
    settings: what the template is given besides messages: tools and its own switches.
    """
    check_messages(prompt)
    if prompt[-1]["role"] == "assistant":
        raise ValueError("the prompt ends with an assistant turn; it must end where the response begins")
    _check_ids(tokenizer, prompt)
    context = with_system(prompt, system_prompt)
    before = _render_text(tokenizer, context, generation_prompt=False, settings=settings)
    head = _ids_of(tokenizer, _render_text(tokenizer, context, generation_prompt=True, settings=settings))
    wholes = []
    for response in responses:
        check_messages(response)
        _check_ids(tokenizer, response)
        text = _render_text(tokenizer, context + response, generation_prompt=False, settings=settings)
        if not text.startswith(before):
            raise ValueError(
                "chat_template: writes the prompt differently once a response follows it, so the response has no place "
                "of its own; use a template that adds turn by turn"
            )
        ids = _ids_of(tokenizer, text)
        wholes.append(ids[: _end_of_response(tokenizer, ids, response[-1], common_prefix(head, ids))])
    return head, wholes


def check_messages(messages: Any) -> None:
    """Refuse what no template could render."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages={messages!r}: must be a list of at least one message")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            raise ValueError(f"messages[{number}]={message!r}: a message has the keys 'role' and 'content'")
        if message["role"] not in ROLES:  # most templates would write it down unseen
            raise ValueError(
                f"messages[{number}]: role={message['role']!r} is unknown; use system, user or assistant "
                f"(all: {', '.join(ROLES)})"
            )
        content = message["content"]
        if not isinstance(content, (str, list)) and not (content is None and message.get("tool_calls")):
            raise ValueError(f"messages[{number}]: its content is {content!r}, not text; fix the row")


def _check_ids(tokenizer: Any, messages: Messages) -> None:
    """The template's own tokens would hide that the tokenizer has none for the text."""
    last = messages[-1]["content"]
    if isinstance(last, str) and last.strip() and not _encode(tokenizer, last):
        raise ValueError(_no_ids(last))


def _end_of_turn(tokenizer: Any, ids: list[int], messages: Messages, number: int, start: int) -> int:
    """Where the trained part of an assistant turn ends: after its end-of-turn token.

    Templates put more behind that token (a newline, say), which an engine that stops there never produces. Templates
    may also write an earlier turn differently from a last one (Qwen3 drops its thinking), so the token is looked for in
    the ids of the whole; only a template without one is rendered up to this turn instead.
    """
    stop = end_of_turn_id(tokenizer)
    if stop is None:
        return _length_of_prefix(ids, _render_ids(tokenizer, messages[: number + 1], generation_prompt=False), number)
    _check_content(tokenizer, messages[number], stop, f"messages[{number}]")
    if stop not in ids[start:]:
        raise ValueError(f"messages[{number}]: the chat template does not close this assistant turn; use another one")
    return ids.index(stop, start) + 1


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids both begin with."""
    differ = (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


def _end_of_response(tokenizer: Any, ids: list[int], response: dict[str, Any], start: int) -> int:
    """Where the last turn ends: after its end-of-turn token, or at the end where the template has none."""
    stop = end_of_turn_id(tokenizer)
    if stop is None:
        return len(ids)
    _check_content(tokenizer, response, stop, "the response")
    if stop not in ids[start:]:
        raise ValueError("the chat template does not close the response's turn; use another one")
    return len(ids) - ids[::-1].index(stop)


def _check_content(tokenizer: Any, message: dict[str, Any], stop: int, where: str) -> None:
    content = message["content"]
    if isinstance(content, str) and stop in _encode(tokenizer, content):
        raise ValueError(
            f"{where}: the assistant's text holds the template's own end-of-turn token "
            f"{tokenizer.convert_ids_to_tokens(stop)!r}; remove it from the data"
        )


def _length_of_prefix(ids: list[int], prefix: list[int], number: int) -> int:
    if ids[: len(prefix)] != prefix:
        raise ValueError(
            f"messages[{number}]: the ids before this assistant turn are not a prefix of the conversation's ids, so "
            "its loss mask cannot be placed; strip white space at its start, or use a template that adds turn by turn"
        )
    return len(prefix)


def _render_ids(tokenizer: Any, messages: Messages, *, generation_prompt: bool) -> list[int]:
    return _ids_of(tokenizer, _render_text(tokenizer, messages, generation_prompt=generation_prompt))


def _ids_of(tokenizer: Any, text: str) -> list[int]:
    ids = _encode(tokenizer, text)  # the template writes BOS itself, so the tokenizer must not add another
    if not ids:
        raise ValueError(_no_ids(text) if text else "chat_template: renders this conversation to nothing; use another")
    return ids


def _render_text(
    tokenizer: Any, messages: Messages, *, generation_prompt: bool, settings: Mapping[str, Any] | None = None
) -> str:
    if not tokenizer.chat_template:
        raise ValueError(
            "chat_template=tokenizer_default: the rows are conversations but this tokenizer has no chat template; "
            f"choose one of {', '.join(DELIMITERS)}, or give a FILE.jinja"
        )
    try:
        return apply_template(tokenizer, messages, add_generation_prompt=generation_prompt, **(settings or {}))
    except Endless:
        raise
    except Exception as error:  # templates are programs: Jinja errors, TypeErrors and their own raise_exception()
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"chat_template: cannot render this conversation ({reason}); change the rows or it") from None


def _encode(tokenizer: Any, text: str) -> list[int]:
    try:
        # verbose: what is too long is our loaders' business, and they say so
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    except TypeError:
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ValueError("the text holds half a character (a lone surrogate such as \\ud83d); fix it") from None
        raise


def _adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer opens plain text with BOS; asked of the tokenizer, whose flags are not always true."""
    bos = tokenizer.bos_token_id
    return bos is not None and list(tokenizer(_PROBE)["input_ids"])[:1] == [bos] != _encode(tokenizer, _PROBE)[:1]


def _no_ids(text: str) -> str:
    shown = text if len(text) <= 40 else text[:40] + "..."
    return (
        f"tokenizer: gives no ids for the non-empty text {shown!r}; its files do not belong together (a model_type "
        "whose tokenizer class ignores tokenizer.json does this), so use the model's own tokenizer"
    )
