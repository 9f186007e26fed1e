"""python -m trainer.generate RUN: chat with a trained model, or print its answers to prompts.

    python -m trainer.generate runs/grpo-20261115-093000                       # a conversation in the terminal
    python -m trainer.generate runs/grpo-20261115-093000 --prompt "7+5=" "2+2="
    echo "Why is the sky blue?" | python -m trainer.generate Qwen/Qwen3-0.6B

A prompt is a user message if the model has a chat template, otherwise text to continue. A run trained on plain-text
prompts continues text even if its tokenizer has a template.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from data.chat import render_prompt, set_special_tokens, stop_ids
from data.command.config_file import load_config
from data.command.flags import parse_command, run_command
from data.errors import UserError
from data.formats.template_settings import check_kwargs
from data.types import Messages
from rollout.engine import Request, Sampling, context_of
from trainer.metrics.metrics import read_jsonl

NEW = "/new"  # typed instead of a message: start a new conversation


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Chat with a trained model, or print its answers to prompts."""

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN|MODEL")]
    """Finished run, model or LoRA adapter folder, hub id, or builtin:tiny."""
    prompt: tuple[str, ...] = ()
    """Independent prompts to answer. Default: lines from the terminal or a pipe, as one conversation."""
    system_prompt: str | None = None
    """System message. None: the run's."""
    plain: bool = False
    """Continue the text, without the chat template."""
    temperature: float = 0.0
    """Sampling temperature. 0: greedy."""
    top_p: float = 1.0
    """Sample from the most likely tokens whose total probability is this. 1: all tokens."""
    max_tokens: int = 512
    """Maximum tokens per answer."""
    seed: int = 0
    """Seed of the first answer; incremented for each further answer."""
    trust_remote_code: bool = False
    """Allow running the Python code that comes with the model."""

    def __post_init__(self) -> None:
        if self.plain and self.system_prompt is not None:
            raise UserError("system_prompt: has no effect with --plain, which sends no messages; use one of the two")
        if self.top_p != 1 and self.temperature == 0:
            raise UserError(f"top_p={self.top_p}: has no effect with greedy decoding; set --temperature")


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, or 2 after a one-line error."""
    return run_command(lambda: generate(parse_command(GenerateConfig, argv, "python -m trainer.generate")))


def generate(cfg: GenerateConfig) -> None:
    model = ChatModel(cfg)
    if cfg.prompt:
        for i, prompt in enumerate(cfg.prompt):
            print(model.answer(prompt, [], cfg.seed + i))
        return
    messages: Messages = []
    for i, line in enumerate(read_lines(model.is_chat)):
        if line == NEW:
            messages = []
            continue
        answer = model.answer(line, messages, cfg.seed + i)
        print(answer, flush=True)
        if model.is_chat:
            messages += [{"role": "user", "content": line}, {"role": "assistant", "content": answer}]


class ChatModel:
    """A model with the prompt settings it was trained with."""

    def __init__(self, cfg: GenerateConfig, loaded: tuple[Any, Any] | None = None) -> None:
        """`loaded`: the model and tokenizer, if they are in memory."""
        if loaded is None:
            print(f"loading {cfg.source}", file=sys.stderr, flush=True)  # importing torch takes seconds
        from rollout.engines.load import load_model
        from rollout.engines.local import LocalEngine

        run = run_settings(cfg.source)
        model, self.tokenizer = loaded or load_model(cfg.source, trust_remote_code=cfg.trust_remote_code)
        set_special_tokens(self.tokenizer, {}, allow_in_text=bool(run.get("allow_special_tokens")))
        self.is_chat = bool(self.tokenizer.chat_template) and not cfg.plain and not trained_on_text(cfg.source)
        if cfg.system_prompt is not None and not self.is_chat:
            raise UserError("system_prompt: has no effect on a model that continues text; remove --system-prompt")
        self.system_prompt = run.get("system_prompt") if cfg.system_prompt is None else cfg.system_prompt
        self.template_kwargs = run.get("chat_template_kwargs") or None
        check_kwargs(self.tokenizer, self.template_kwargs or {})
        self.context = context_of(model.config)
        self.engine = LocalEngine(model, self.tokenizer)
        self.sampling = Sampling(
            temperature=cfg.temperature,
            top_p=cfg.top_p,
            max_tokens=cfg.max_tokens,
            stop_ids=stop_ids(self.tokenizer, getattr(model.generation_config, "eos_token_id", None)),
            stop=tuple(run.get("stop") or ()),
        )

    def answer(self, line: str, before: Messages, seed: int) -> str:
        if self.is_chat:
            messages = [*before, {"role": "user", "content": line}]
            ids = render_prompt(self.tokenizer, messages, self.system_prompt, self.template_kwargs)
        else:
            ids = render_prompt(self.tokenizer, line)
        room = self.sampling.max_tokens if self.context is None else self.context - len(ids)
        if room < 1:
            raise UserError(
                f"{len(ids)} prompt tokens exceed the model's context of {self.context}; shorten it, or type {NEW}"
            )
        request = Request(prompt_ids=ids, seed=seed, max_tokens=min(room, self.sampling.max_tokens))
        return self.engine.generate([request], self.sampling)[0].text


def run_settings(source: str) -> dict[str, Any]:
    """Read config.yaml of a run folder; {} for any other model."""
    path = Path(source).expanduser() / "config.yaml"
    run = load_config(path) if path.is_file() else {}
    for name, kind in (("system_prompt", str), ("chat_template_kwargs", dict), ("stop", list)):
        value = run.get(name)
        is_text = not isinstance(value, list) or all(isinstance(item, str) for item in value)
        if value is not None and not (isinstance(value, kind) and is_text):
            raise UserError(f"{path}: {name}={str(value)[:80]}: must be a {kind.__name__}{' of str' * (kind is list)}")
    return run


def trained_on_text(source: str) -> bool:
    """Return whether a run's prompts were plain text rather than conversations."""
    path = Path(source).expanduser() / "samples.jsonl"
    samples = read_jsonl(path) if path.is_file() else []
    return bool(samples) and isinstance(samples[-1].get("prompt"), str)


def read_lines(is_chat: bool) -> Iterator[str]:
    """Yield nonempty lines from a pipe, or from the terminal until Ctrl-D."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin if line.strip())
        return
    hint = f"Type a message; {NEW} starts over" if is_chat else "Type a text to continue"
    print(f"{hint}, Ctrl-D ends.", file=sys.stderr)
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line.strip():
            yield line


if __name__ == "__main__":
    sys.exit(main())
