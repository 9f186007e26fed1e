"""Pair formats: convert a row to a prompt with a chosen and a rejected response, for all pair methods.

A format is a function (columns, options) -> {"prompt", "chosen", "rejected"} of one of two kinds:

    text        three strings. The chatml and llama3 families write delimiters and close responses.
    messages    a prompt of messages and one assistant message per response, rendered by the tokenizer's chat template;
                `tools` and `chat_template_kwargs` are passed on, and messages keep keys such as reasoning_content.

zephyr.nectar pairs the best and the worst of a row's ranked answers; rank 1 is the best. axolotl's format of the same
name sorts by rank and takes the last two, so its chosen answer is the worst of all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from data.errors import UserError
from data.format_options import FormatOptions
from data.formats.fields import (
    CONVERSATION,
    DEFAULT,
    Columns,
    conversation_of,
    for_template,
    messages_of,
    need,
    response_after,
    system_turn,
    text_of,
    user_prompt,
    user_turn,
)
from data.types import Messages

PairFormat = Callable[[Columns, FormatOptions], Columns]


@dataclass(frozen=True)
class Family:
    """The delimiters of a family of text formats."""

    opening: str
    close: str
    gap: str  # between turns; not after a response, because an engine stops at `close`

    def prompt(self, turns: Messages) -> str:
        texts = [self.opening.format(role=turn["role"]) + turn["content"] + self.close + self.gap for turn in turns]
        return "".join(texts) + self.opening.format(role="assistant")


FAMILIES = {
    "chatml": Family("<|im_start|>{role}\n", "<|im_end|>", "\n"),
    "llama3": Family("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>", ""),
}
ZEPHYR_PROMPT = "<|system|>\n</s>\n<|user|>\n{prompt}</s>\n<|assistant|>\n"

# Columns of the prompt, the chosen and the rejected response in the text formats; the first that is present is used.
TEXT_COLUMNS = {
    "default": (
        ("prompt", "input", "question", "instruction"),
        ("chosen", "chosen_response"),
        ("rejected", "rejected_response"),
    ),
    "argilla": (("instruction",), ("chosen_response",), ("rejected_response",)),
    "icr": (("input",), ("chosen",), ("rejected",)),
    "intel": (("question",), ("chosen",), ("rejected",)),
    "prompt_pairs": (("prompt",), ("chosen",), ("rejected",)),
}


def two_message_chat(columns: Columns, name: str) -> str:
    """Return the assistant's text of a conversation with one user and one assistant message."""
    messages = messages_of(columns.get(name), name)
    roles = [message["role"] for message in messages]
    if roles != ["user", "assistant"]:
        raise UserError(
            f"{name!r} has the messages {', '.join(roles)}, not user, assistant; use "
            "--data-format chat_template.argilla_chat for longer conversations"
        )
    return text_of({name: messages[1]["content"]}, name)


def _text_pair(family: Family, columns_of: tuple, columns: Columns, options: FormatOptions) -> Columns:
    prompt, chosen, rejected = (text_of(columns, *names) for names in columns_of)
    turns = [*system_turn(columns), *user_turn(prompt)]
    return {"prompt": family.prompt(turns), "chosen": chosen + family.close, "rejected": rejected + family.close}


def _ultra(family: Family, columns: Columns, options: FormatOptions) -> Columns:
    flat = {name: columns.get(name) for name in ("system", "prompt")}
    need(columns, "prompt", "chosen", "rejected")
    flat |= {name: two_message_chat(columns, name) for name in ("chosen", "rejected")}
    return _text_pair(family, TEXT_COLUMNS["prompt_pairs"], flat, options)


def _argilla_chat(family: Family, columns: Columns, options: FormatOptions) -> Columns:
    """Read conversations of any length that are equal up to their last message."""
    pair = _template_argilla_chat(columns, DEFAULT)
    turns = pair["prompt"]
    if turns[0]["role"] != "system":
        turns = [*system_turn(columns), *turns]
    for index, turn in enumerate(turns):
        text_of({f"chosen[{index}]": turn["content"]}, f"chosen[{index}]")
    chosen, rejected = (text_of({name: pair[name][0]["content"]}, name) for name in ("chosen", "rejected"))
    return {"prompt": family.prompt(turns), "chosen": chosen + family.close, "rejected": rejected + family.close}


def _nectar(columns: Columns, options: FormatOptions) -> Columns:
    prompt = text_of(columns, "prompt")
    need(columns, "answers")
    answers = columns["answers"]
    if not isinstance(answers, list) or len(answers) < 2:
        raise UserError("'answers' is not a list of two or more answers")
    for index, answer in enumerate(answers):
        rank = answer.get("rank") if isinstance(answer, dict) else None
        if isinstance(rank, bool) or not isinstance(rank, (int, float)):
            raise UserError(f"answers[{index}] has rank {rank!r}, not a number; fix the row")
    best, worst = (pick(answers, key=lambda answer: answer["rank"]) for pick in (min, max))  # rank 1 is the best
    if best["rank"] == worst["rank"]:
        raise UserError(f"'answers' all have rank {best['rank']}; remove the row")
    chosen, rejected = text_of(best, "answer"), text_of(worst, "answer")
    return {"prompt": ZEPHYR_PROMPT.format(prompt=prompt), "chosen": chosen, "rejected": rejected}


def _user_defined(columns: Columns, options: FormatOptions) -> Columns:
    return {
        "prompt": user_prompt(columns, options),
        "chosen": options.chosen_format.format(chosen=text_of(columns, options.field_chosen)),
        "rejected": options.rejected_format.format(rejected=text_of(columns, options.field_rejected)),
    }


def _template_default(columns: Columns, options: FormatOptions) -> Columns:
    need(columns, options.field_messages, options.field_chosen, options.field_rejected)
    messages = columns[options.field_messages]
    if isinstance(messages, str):
        prompt = user_turn(text_of(columns, options.field_messages))
    else:
        prompt = messages_of(messages, options.field_messages, options)
    return _responses(columns, prompt, options)


def _template_argilla_chat(columns: Columns, options: FormatOptions) -> Columns:
    """Read whole conversations that are equal up to their last message."""
    need(columns, options.field_chosen, options.field_rejected)
    chosen = messages_of(columns[options.field_chosen], options.field_chosen, options)
    messages_of(columns[options.field_rejected], options.field_rejected, options)
    if len(chosen) < 2:
        raise UserError(f"{options.field_chosen!r} has one message; add the turns before the answer")
    return _responses(columns, chosen[:-1], options)


def _template_argilla(columns: Columns, options: FormatOptions) -> Columns:
    """Read argilla_chat rows that alternate user and assistant, with `system`, and `prompt` for a single user turn."""
    pair = _template_argilla_chat(columns, options)
    turns = pair["prompt"]
    opening = [turns.pop(0)] if turns[0]["role"] == "system" else system_turn(columns)
    roles = [turn["role"] for turn in turns]
    if len(turns) % 2 == 0 or roles != ["user", "assistant"] * (len(turns) // 2) + ["user"]:
        raise UserError(f"'chosen' has the messages {', '.join([*roles, 'assistant'])}; they must alternate from user")
    if len(turns) == 1 and columns.get("prompt") is not None:
        turns = user_turn(text_of(columns, "prompt"))
    return {**pair, "prompt": [*opening, *turns]}


def _bradley_terry(columns: Columns, options: FormatOptions) -> Columns:
    prompt = [*system_turn(columns), *user_turn(text_of(columns, "input"))]
    return _responses(columns, prompt, DEFAULT)


def _responses(columns: Columns, prompt: Messages, options: FormatOptions) -> Columns:
    need(columns, options.field_chosen, options.field_rejected)
    return {
        "prompt": prompt,
        "chosen": response_after(prompt, columns[options.field_chosen], options.field_chosen, options),
        "rejected": response_after(prompt, columns[options.field_rejected], options.field_rejected, options),
        **for_template(columns),
    }


def _passthrough(columns: Columns, options: FormatOptions) -> Columns:
    """Read rows that already have prompt, chosen and rejected, as text or as messages."""
    need(columns, "prompt", "chosen", "rejected")
    if isinstance(columns["prompt"], str):
        return {name: text_of(columns, name) for name in ("prompt", "chosen", "rejected")}
    return _responses(columns, messages_of(columns["prompt"], "prompt"), DEFAULT)


def _sharegpt(columns: Columns, options: FormatOptions) -> Columns:
    """Read `conversations` with one message each in `chosen` and `rejected`, or whole conversations in both."""
    need(columns, options.field_chosen, options.field_rejected)
    if all(columns.get(name) is None for name in {*CONVERSATION, options.field_messages}):
        return _template_argilla_chat(columns, options)
    return _responses(columns, conversation_of(columns, options), options)


QUESTIONS = ("question", "input", "instruction", "query", "system")  # prompt columns of other formats


def _auto(columns: Columns, options: FormatOptions) -> Columns:
    """Read TRL's rows: text or messages, with a prompt column or the responses' common prefix as the prompt."""
    need(columns, "chosen", "rejected")
    prompt = columns.get("prompt")
    if prompt is None and columns.get("conversations") is not None:
        return _sharegpt(columns, DEFAULT)
    texts = [isinstance(columns[name], str) for name in ("chosen", "rejected")]
    if isinstance(prompt, list) or (prompt is not None and all(texts)):
        return _passthrough(columns, options)
    if prompt is None and all(texts):
        questions = [name for name in QUESTIONS if isinstance(columns.get(name), str) and columns[name].strip()]
        if questions:  # using the common prefix as the prompt would silently drop the question
            raise UserError(
                f"has no 'prompt', but {' and '.join(map(repr, questions))}; rename the column to 'prompt', or set "
                "--data-format (chatml.intel for question, chatml.icr for input, chatml.argilla for instruction)"
            )
        return _shared_text(text_of(columns, "chosen"), text_of(columns, "rejected"))
    chosen, rejected = (messages_of(columns[name], name) for name in ("chosen", "rejected"))
    pairs = zip(chosen[:-1], rejected[:-1], strict=False)
    shared = [one for one, _ in takewhile(lambda two: two[0] == two[1], pairs)]
    if not shared and len(chosen) == len(rejected) == 1 and isinstance(prompt, str):
        shared = user_turn(text_of(columns, "prompt"))
    if not shared:
        raise UserError("'chosen' and 'rejected' share no message to use as the prompt; add a 'prompt'")
    return _responses(columns, shared, DEFAULT)


def _shared_text(chosen: str, rejected: str) -> Columns:
    if chosen == rejected:
        raise UserError("'chosen' and 'rejected' are the same text, so there is no response; add a 'prompt'")
    length = sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(chosen, rejected, strict=False)))
    if length == min(len(chosen), len(rejected)):  # one continues the other: start the response at the last common word
        end = len(chosen[:length].rstrip())
        length = max(chosen.rfind(space, 0, end) for space in " \n\t")
    elif chosen[length - 1] == " ":  # a space belongs to the word after it
        length -= 1
    prompt = chosen[: max(length, 0)]
    if not prompt.strip():
        raise UserError("'chosen' and 'rejected' share no prefix to use as the prompt; add a 'prompt'")
    return {"prompt": prompt, "chosen": chosen[length:], "rejected": rejected[length:]}


PAIR_FORMATS: dict[str, PairFormat] = {
    "auto": _auto,
    "zephyr.nectar": _nectar,
    "chat_template.default": _template_default,
    "chat_template.argilla_chat": _template_argilla_chat,
    "chat_template.argilla": _template_argilla,
    "bradley_terry.chat_template": _bradley_terry,
    "user_defined": _user_defined,
    "sharegpt": _sharegpt,
    "passthrough": _passthrough,
}
for _name, _family in FAMILIES.items():
    PAIR_FORMATS |= {f"{_name}.{kind}": partial(_text_pair, _family, names) for kind, names in TEXT_COLUMNS.items()}
    PAIR_FORMATS[f"{_name}.argilla_chat"] = partial(_argilla_chat, _family)
    PAIR_FORMATS[f"{_name}.ultra"] = partial(_ultra, _family)
# NAME and NAME.default are aliases.
for _name in ("chatml", "llama3", "chat_template"):
    PAIR_FORMATS[_name] = PAIR_FORMATS[f"{_name}.default"]
for _name in ("user_defined", "passthrough"):
    PAIR_FORMATS[f"{_name}.default"] = PAIR_FORMATS[_name]

_RESPONSES = {"field_chosen", "field_rejected"}
_MESSAGES = {"role_key", "content_key", "roles"}
# The options that each format reads. Setting an option that no format in use reads is an error.
PAIR_OPTIONS: dict[str, set[str]] = {
    "user_defined": {"field_prompt", "field_system", "prompt_format", "chosen_format", "rejected_format", *_RESPONSES},
    "chat_template.default": {"field_messages", *_RESPONSES, *_MESSAGES},
    "chat_template.argilla_chat": {*_RESPONSES, *_MESSAGES},
    "chat_template.argilla": {*_RESPONSES, *_MESSAGES},
    "sharegpt": {"field_messages", *_RESPONSES, *_MESSAGES},
}
PAIR_OPTIONS |= {
    "user_defined.default": PAIR_OPTIONS["user_defined"],
    "chat_template": PAIR_OPTIONS["chat_template.default"],
}
