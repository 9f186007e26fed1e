"""Documents for the strided mode of EBFT: texts, prompts with completions, or conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from data.formats.ebft import EBFT_FORMATS, EBFT_STRIDED_FORMATS, refuse_formats
from data.formats.registry import SFT_FORMATS
from data.rows.sft import load_examples
from data.strided import Document
from data.types import Example


def load_documents(
    specs: Sequence[str], tokenizer: Any, *, data_format: str = "auto", system_prompt: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None, max_length: int = 1024, context_length: int | None = None,
    cfg: Any = None,
) -> list[Document]:  # fmt: skip
    """Read documents from every spec, in order, as load_examples reads examples; cuts and drops are logged.

    prompt_length covers a prompt, or everything before the first assistant turn; a text has no prompt.
    """
    refuse_formats(specs, data_format, EBFT_FORMATS, "structured")
    examples = load_examples(
        specs, tokenizer, data_format=data_format, system_prompt=system_prompt,
        chat_template_kwargs=chat_template_kwargs, max_length=max_length, context_length=context_length, cfg=cfg,
        formats=SFT_FORMATS | EBFT_STRIDED_FORMATS,
    )  # fmt: skip
    return [_document(example) for example in examples]


def _document(example: Example) -> Document:
    first = example.mask.index(True)
    # A one-token prompt looks like a text, whose first token nothing predicts; both are trained alike.
    if first == 1 and all(example.mask[1:]):
        return Document(example.ids, source=example.source, weight=example.weight)
    return Document(example.ids, first, example.mask, source=example.source, weight=example.weight)
