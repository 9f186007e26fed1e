"""Built-in rewards, with the same interface as user functions: lists in, one number (or None) per completion out.

    exact_match                  1 if the text is the answer, up to surrounding whitespace
    last_number                  1 if the last number of the text is the last number of the answer
    tagged_format[:A,B]          1 if the text is exactly <A>...</A><B>...</B>; default think,answer
    tagged_format_partial[:A,B]  0.2 for each of the four tags in order, 0.2 for no text outside them
    length                       number of tokens; use a negative weight to reward short completions
    regex:PATTERN                1 if the pattern occurs in the text
    repetition[:N]               minus the fraction of repeated token N-grams (default 3)
    soft_overlong:MAX,MARGIN     0 up to MAX-MARGIN tokens, then linearly down to -1 at MAX
    math_verify                  1 if text and answer are mathematically equal (extra `rewards`)
    code[:SECONDS]               1 if the program in the text passes the row's tests (rollout/rewards/code.py)
    env                          the environment's reward; None if the environment returned none

`answer` is a data column. A row whose answer is None gets None: the reward does not apply.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

from data.errors import UserError

Scores = list[float | None]
RewardFunction = Callable[..., Any]

# A minus counts as a sign unless it follows a digit, a letter or a bracket: "10-3" ends in 3, "=-3" in -3.
NUMBER = re.compile(
    r"(?:(?<![\w.)\]])-)?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
)

MATH_SECONDS = 5.0  # CPU time to parse one text, or to compare two


def text_of(completion: Any) -> str:
    """Return the text of a completion, or of its last assistant turn if it is a list of messages."""
    if isinstance(completion, str):
        return completion
    turns = [message for message in completion if message.get("role") == "assistant"] or completion
    content = turns[-1].get("content") if turns else None
    if isinstance(content, list):  # content parts; some may not be text
        return "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return content or ""


def exact_match(completions: Sequence[Any], answer: Sequence[Any]) -> Scores:
    return [
        None if gold is None else float(text_of(completion).strip() == str(gold).strip())
        for completion, gold in zip(completions, answer, strict=True)
    ]


def last_number(completions: Sequence[Any], answer: Sequence[Any]) -> Scores:
    """None if the answer contains no number."""
    golds = [None if gold is None else find_last_number(str(gold)) for gold in answer]
    return [
        None if gold is None else float(find_last_number(text_of(completion)) == gold)
        for completion, gold in zip(completions, golds, strict=True)
    ]


def find_last_number(text: str) -> Decimal | None:
    """
    >>> find_last_number("that makes $1,234.50 in all.")
    Decimal('1234.50')
    """
    numbers = NUMBER.findall(text.replace("\u2212", "-"))
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def length(completion_ids: Sequence[Sequence[int]]) -> Scores:
    return [float(len(ids)) for ids in completion_ids]


def env(completions: Sequence[Any], env_reward: Sequence[Any] | None = None) -> Scores:
    return [None] * len(completions) if env_reward is None else list(env_reward)


env.episode_columns = ("env_reward",)  # required, but provided by the environment rather than the data


def tagged_format(argument: str | None) -> RewardFunction:
    tags = _tags("tagged_format", argument)
    return lambda completions: [float(_tag_parts(text_of(completion), tags) == 5) for completion in completions]


def tagged_format_partial(argument: str | None) -> RewardFunction:
    tags = _tags("tagged_format_partial", argument)
    return lambda completions: [_tag_parts(text_of(completion), tags) / 5 for completion in completions]


def _tags(name: str, argument: str | None) -> list[str]:
    tags = (argument or "think,answer").split(",")
    if len(tags) != 2 or tags[0] == tags[1] or not all(re.fullmatch(r"[\w-]+", tag) for tag in tags):
        raise UserError(f"reward_funcs={name}:{argument}: give two different tag names, as in {name}:think,answer")
    return [f"<{slash}{tag}>" for tag in tags for slash in ("", "/")]


def _tag_parts(text: str, tags: list[str]) -> int:
    """Return how many of five conditions hold: each tag occurs once and in order, and no text is outside the tags."""
    parts, end = 0, 0
    for tag in tags:
        start = text.find(tag, end)
        if text.count(tag) == 1 and start >= 0:
            parts += 1
            end = start + len(tag)
    if parts == 4:
        before, _, rest = text.partition(tags[0])
        between, after = rest.split(tags[1])[1].split(tags[2])[0], rest.split(tags[3])[1]
        parts += not (before + between + after).strip()
    return parts


def regex(argument: str | None) -> RewardFunction:
    if not argument:
        raise UserError("reward_funcs=regex: no pattern; write regex:PATTERN, for example regex:^[0-9]+$")
    try:
        pattern = re.compile(argument, re.DOTALL)
    except re.error as error:
        raise UserError(f"reward_funcs=regex:{argument}: invalid pattern ({error})") from None

    def score(completions: Sequence[Any]) -> Scores:
        return [float(pattern.search(text_of(completion)) is not None) for completion in completions]

    return score


def repetition(argument: str | None) -> RewardFunction:
    (size,) = _whole_numbers("repetition", argument or "3", "N", 1)

    def score(completion_ids: Sequence[Sequence[int]]) -> Scores:
        scores: Scores = []
        for ids in completion_ids:
            ngrams = [tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)]
            scores.append(len(set(ngrams)) / len(ngrams) - 1 if ngrams else 0.0)
        return scores

    return score


def soft_overlong(argument: str | None) -> RewardFunction:
    """DAPO's soft penalty: it grows over the last MARGIN tokens before MAX, so truncation is not the first signal."""
    limit, margin = _whole_numbers("soft_overlong", argument or "", "MAX,MARGIN", 2)
    if not 0 < margin <= limit:
        raise UserError(f"reward_funcs=soft_overlong:{argument}: MARGIN must be above 0 and at most MAX")

    def score(completion_ids: Sequence[Sequence[int]]) -> Scores:
        return [max(-1.0, min(0.0, (limit - margin - len(ids)) / margin)) for ids in completion_ids]

    return score


def _whole_numbers(name: str, argument: str, names: str, count: int) -> list[int]:
    parts = argument.split(",")
    if len(parts) != count or not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"reward_funcs={name}:{argument}: write {name}:{names} with whole numbers above 0")
    return [int(part) for part in parts]


def math_verify(argument: str | None) -> RewardFunction:
    if argument is not None:
        raise UserError(f"reward_funcs=math_verify:{argument}: takes no argument; write math_verify")
    try:
        from math_verify import parse, verify
    except ImportError:
        raise UserError(
            "reward_funcs=math_verify: the package math-verify is not installed; pip install 'strop[rewards]'"
        ) from None
    from data.chat import within

    # math-verify's time limits count wall time and use signals, which only the main thread can set; it warns if off.
    for module in ("parser", "grader"):
        logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)

    def parsed(text: str) -> list[Any]:
        with contextlib.suppress(TimeoutError):
            return within(MATH_SECONDS, lambda: parse(_delimited(text), parsing_timeout=None))
        return []

    def equal(want: list[Any], got: list[Any]) -> bool:
        with contextlib.suppress(TimeoutError):
            return within(MATH_SECONDS, lambda: verify(want, got, timeout_seconds=None))
        return False

    def score(completions: Sequence[Any], answer: Sequence[Any]) -> Scores:
        golds = [parsed(str(gold)) if gold is not None else [] for gold in answer]
        # None: no mathematics in the answer
        return [float(equal(gold, parsed(text_of(completion)))) if gold else None
                for completion, gold in zip(completions, golds, strict=True)]  # fmt: skip

    return score


def _delimited(text: str) -> str:
    """Put dollar signs around a bare formula; without them math-verify parses 3\\pi as 3."""
    prose = re.search(r"[A-Za-z]{3,}", re.sub(r"\\[A-Za-z]+", " ", text))
    if prose or "$" in text or "\\boxed" in text or "\\(" in text or "\\[" in text or not text.strip():
        return text
    return f"${text.strip()}$"


FUNCTIONS: dict[str, RewardFunction] = {
    "exact_match": exact_match,
    "last_number": last_number,
    "length": length,
    "env": env,
}
FACTORIES: dict[str, Callable[[str | None], RewardFunction]] = {  # called with the text after the colon
    "tagged_format": tagged_format,
    "tagged_format_partial": tagged_format_partial,
    "regex": regex,
    "repetition": repetition,
    "soft_overlong": soft_overlong,
    "math_verify": math_verify,
}
