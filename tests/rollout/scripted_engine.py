"""An in-process engine with scripted replies, for tests of schedules and conversations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from data.types import Prompt
from rollout.engine import Completion, Request, Sampling

TINY = Path(__file__).resolve().parents[2] / "trainer" / "tiny"


@lru_cache(maxsize=1)
def tiny_tokenizer() -> Any:
    """A byte tokenizer with the special tokens <|im_start|> and <|im_end|> (id 2)."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY)


def user_prompt(text: str, source: str = "rows.jsonl:1", **columns: Any) -> Prompt:
    messages = [{"role": "user", "content": text}]
    shown = tiny_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tiny_tokenizer()(shown, add_special_tokens=False)["input_ids"]
    return Prompt(source=source, prompt=messages, ids=ids, columns=columns)


class ScriptedEngine:
    """reply(text so far, seed) -> the next turn; <|im_end|> is appended unless the turn is too long."""

    concurrent = False

    def __init__(self, reply: Callable[[str, int], str], context: int = 512) -> None:
        self.reply, self.version = reply, 3
        self.tokenizer = tiny_tokenizer()
        config = SimpleNamespace(max_position_embeddings=context, vocab_size=len(self.tokenizer))
        self.model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config))
        self.batches: list[list[Request]] = []

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        self.batches.append(list(requests))
        return [self._one(request, sampling) for request in requests]

    def stream(self, requests: Sequence[Request], sampling: Sampling, more: Callable[[], Any] = tuple) -> Any:
        yield list(enumerate(self.generate(requests, sampling)))

    def forget(self) -> None:
        """Do nothing: no conversation is cached."""

    def _one(self, request: Request, sampling: Sampling) -> Completion:
        text = self.reply(self.tokenizer.decode(request.prompt_ids), request.seed)
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        limit = request.max_tokens or sampling.max_tokens
        is_complete = len(ids) <= limit
        ids = ids[:limit]
        return Completion(
            prompt_ids=list(request.prompt_ids),
            ids=ids,
            logps=[-0.5] * len(ids),
            finish_reason="stop" if is_complete else "length",
            text=text if is_complete else self.tokenizer.decode(ids),
            versions=[(self.version, len(ids))],
        )
