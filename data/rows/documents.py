"""Load documents for EBFT's strided mode: texts, prompts with completions, or conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from data.formats.ebft import EBFT_FORMATS, EBFT_STRIDED_FORMATS, reject_formats
from data.formats.registry import SFT_FORMATS
from data.rows.sft import load_examples
from data.rows.stored import Stored
from data.strided import Document
from data.types import Example


def load_documents(
    specs: Sequence[str], tokenizer: Any, *, data_format: str = "auto", system_prompt: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None, max_length: int = 1024, context_length: int | None = None,
    cfg: object = None,
) -> Stored[Document]:  # fmt: skip
    """Load the documents of all specs, in order, with load_examples.

    prompt_length covers a prompt, or everything before the first assistant turn; a text has no prompt.
    """
    reject_formats(specs, data_format, EBFT_FORMATS, "structured")
    return load_examples(
        specs, tokenizer, data_format=data_format, system_prompt=system_prompt,
        chat_template_kwargs=chat_template_kwargs, max_length=max_length, context_length=context_length, cfg=cfg,
        formats=SFT_FORMATS | EBFT_STRIDED_FORMATS, kind=Document, record=_document,
    )  # fmt: skip


def _document(example: Example) -> Document:
    first = example.mask.index(True)
    # A one-token prompt has the same mask as a text, whose first token is not trained; both are trained alike.
    if first == 1 and all(example.mask[1:]):
        return Document(example.ids, source=example.source, weight=example.weight)
    return Document(example.ids, first, example.mask, source=example.source, weight=example.weight)
