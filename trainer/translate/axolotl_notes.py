"""Console lines for intended differences from axolotl in how rows are rendered and trained.

    for line in differences(tree): ...       # tree: the translated config, with its data, template and tokens

docs/from_axolotl.md explains the differences. The tokenizer's files are read if they are on disk; otherwise lines that
may apply are returned too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data.chat import DELIMITERS, TEMPLATES
from data.formats.pairs import FAMILIES
from rollout.model_folder import read_local
from trainer.translate.axolotl_rows import HEADINGS, PLAIN

# axolotl's templates of these names differ, except qwen3 for SFT.
THEIR_TEMPLATES = {
    "phi_3": "starts with the bos token",
    "phi_4": "adds the system message of Phi-4-reasoning to conversations without one",
    "qwen3": "opens <think> in the generation prompt",
}


def differences(tree: Mapping[str, Any]) -> Iterator[str]:
    method, name = tree["method"], tree.get("chat_template")
    formats = {entry.get("format", "auto") for entry in tree.get("data", ())}
    tokenizer = json.loads(read_local(tree.get("model", ""), "tokenizer_config.json") or "{}")
    eos, bos = (_token(tree.get("special_tokens", {}), tokenizer, key) for key in ("eos_token", "bos_token"))
    template = _template(tree.get("model", ""), name, tokenizer)
    if name in THEIR_TEMPLATES and formats.difference(PLAIN) and (method, name) != ("sft", "qwen3"):
        yield f"chat_template={name}: axolotl's template {THEIR_TEMPLATES[name]}; strop's does not"
    if method == "sft":
        yield from _sft(tree, formats, template, eos)
    elif method == "prm" and bos and not tokenizer.get("add_bos_token"):
        yield f"bos_token: {bos} starts a prompt only if the tokenizer adds it; axolotl always adds it"
    elif method == "rm" and "bradley_terry.chat_template" in formats:
        yield (
            "type=bradley_terry.chat_template: an empty system adds no turn, and the score is read at the end-of-turn "
            "token; axolotl writes an empty turn, and reads the score after the template's last newline"
        )
    elif method in ("dpo", "ipo", "simpo", "orpo", "kto"):
        kinds = {kind for kind, _, _ in (name.partition(".") for name in formats)} & {*FAMILIES, "chat_template"}
        if not all(_has_eos(FAMILIES[kind].close if kind in FAMILIES else template, eos) for kind in kinds):
            yield f"eos_token: a response ends with its end-of-turn token; axolotl adds eos{_shown(eos)} if it differs"
        if method == "orpo" and "chat_template.argilla" in formats:
            yield (
                "type=chat_template.argilla: a response ends with its end-of-turn token; axolotl adds the text that "
                "the template writes after it, and eos"
            )


def _sft(tree: Mapping[str, Any], formats: set[str], template: str | None, eos: str | None) -> Iterator[str]:
    if formats.intersection(HEADINGS):
        yield "type=alpaca: the chat template renders these rows; axolotl writes fixed headings instead"
    if not formats.difference(PLAIN, HEADINGS):
        return
    if not _has_eos(template, eos) and "eot_tokens" not in tree and tree.get("train_on_eos") != "none":
        yield f"eot_tokens: the token that ends a turn is trained; axolotl trains it only if it is eos{_shown(eos)}"
    if "<think>" in (template or "") and not tree.get("chat_template_kwargs"):
        yield "chat_template: an empty <think> block of the last turn is trained; axolotl does not train it"


def _has_eos(template: str | None, eos: str | None) -> bool:
    """Return whether a template is known to end turns with eos, by axolotl's test."""
    return bool(template and eos and (eos in template or "eos_token" in template))


def _shown(token: str | None) -> str:
    return f" ({token})" if token else ""


def _token(given: Mapping[str, Any], tokenizer: Mapping[str, Any], key: str) -> str | None:
    token = given.get(key) or tokenizer.get(key)
    return token.get("content") if isinstance(token, Mapping) else token


def _template(model: str, name: str | None, tokenizer: Mapping[str, Any]) -> str | None:
    """Return the text of --chat-template (None: the tokenizer's own), or None if it is not on disk."""
    if name in DELIMITERS:
        return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    if name is not None:
        return name if "{" in name else Path(name).expanduser().read_text(encoding="utf-8")
    text = read_local(model, "chat_template.jinja") or tokenizer.get("chat_template")
    return text if isinstance(text, str) else None  # a list: several named templates
