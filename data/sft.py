"""Examples to imitate: conversations, prompts with completions, or plain text, as token ids with a loss mask."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from data.chat import check_messages, render_completion, render_conversation, render_prompt
from data.formats import SFT_FORMATS, Columns, Format, apply, formatted_rows
from data.types import Example


def load_examples(
    specs: Sequence[str], tokenizer: Any, *, data_format: str = "auto", system_prompt: str | None = None,
    max_length: int = 1024, context_length: int | None = None, cfg: Any = None,
    formats: Mapping[str, Format] = SFT_FORMATS,
) -> list[Example]:  # fmt: skip
    """Read examples from every spec, in order, cut on the right to max_length tokens (or the context, if shorter).

    Examples with no trained token left are dropped; both cuts and drops are counted aloud.
    """
    if max_length < 2:
        raise ValueError(f"max_length={max_length}: must be 2 or more, a token and the one it predicts")
    limit = max_length if context_length is None else min(max_length, context_length)
    examples = []
    num_rows = num_cut = 0
    conversational = False
    for spec, row in formatted_rows(specs, formats, data_format=data_format, tokenizer=tokenizer, cfg=cfg):
        num_rows += 1
        conversational |= not _is_text(row.columns)
        ids, mask = apply(_tokenise, row, tokenizer, system_prompt)
        num_cut += len(ids) > limit
        ids, mask = ids[:limit], [False, *mask[1:limit]]  # nothing predicts the first token
        if any(mask):
            examples.append(Example(source=row.source, ids=ids, mask=mask, weight=spec.weight))
    num_dropped = num_rows - len(examples)
    if not examples and not num_cut:
        raise ValueError(f"data: none of the {num_rows} rows has an assistant turn to train; check the roles")
    if not examples:
        raise ValueError(f"data: none of the {num_rows} rows has a token to train within max_length={limit}; raise it")
    if num_cut:
        print(f"data: cut {num_cut} of {num_rows} examples to {limit} tokens", file=sys.stderr)
    if num_dropped:
        print(f"data: left out {num_dropped} of {num_rows} examples with no trained token", file=sys.stderr)
    if system_prompt is not None and not conversational:
        raise ValueError("system_prompt: has no effect, all rows are plain text; give messages, or put it in the text")
    return examples


def _is_text(columns: Columns) -> bool:
    if columns.get("messages") is not None:
        return False
    return columns.get("completion") is None or isinstance(columns.get("prompt"), str)


def _tokenise(columns: Columns, tokenizer: Any, system_prompt: str | None) -> tuple[list[int], list[bool]]:
    if columns.get("messages") is not None:
        return render_conversation(tokenizer, columns["messages"], system_prompt)
    if columns.get("prompt") is None or columns.get("completion") is None:
        return _tokenise_text(columns["text"], tokenizer)
    prompt, completion = columns["prompt"], columns["completion"]
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        raise ValueError("the prompt is empty; remove the row or fill it in")
    if isinstance(prompt, str):
        if not isinstance(completion, str):
            raise ValueError(
                "the prompt is text but the completion is not; give both as text, or the prompt as messages"
            )
        ids, start = render_completion(tokenizer, prompt, completion)
        trained = _with_eos(ids[start:], tokenizer)
        return ids[:start] + trained, [False] * start + [True] * len(trained)
    check_messages(prompt)
    if prompt[-1]["role"] == "assistant":
        raise ValueError("the prompt ends with an assistant turn; it must end where the completion begins")
    if not isinstance(completion, (str, list)):
        raise ValueError(f"the completion is a {type(completion).__name__}; give text or messages")
    answer = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    check_messages(answer)
    # Assistant turns within the prompt are context, not something to imitate.
    return render_conversation(tokenizer, prompt + answer, system_prompt, first_trained=len(prompt))


def _tokenise_text(text: Any, tokenizer: Any) -> tuple[list[int], list[bool]]:
    if not isinstance(text, str):
        raise ValueError(f"the text is a {type(text).__name__}; put it in quotes")
    if not text.strip():
        raise ValueError("the text is empty; remove the row or fill it in")
    ids = _with_eos(render_prompt(tokenizer, text), tokenizer)
    return ids, [False] + [True] * (len(ids) - 1)


def _with_eos(ids: list[int], tokenizer: Any) -> list[int]:
    eos = tokenizer.eos_token_id
    if eos is None:
        raise ValueError(
            "tokenizer: has no eos token, so plain text could not teach where to stop; set one, or use messages"
        )
    return ids if ids and ids[-1] == eos else [*ids, eos]
