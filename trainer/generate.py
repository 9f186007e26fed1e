"""python -m trainer.generate RUN: talk to a trained model, or print its answers to given prompts.

    python -m trainer.generate runs/grpo-20261115-093000                       # a conversation in the terminal
    python -m trainer.generate runs/grpo-20261115-093000 --prompt "7+5=" "2+2="
    echo "Why is the sky blue?" | python -m trainer.generate Qwen/Qwen3-0.6B

A prompt is a user message if the model has a chat template, else text to continue. A run that trained on plain text
prompts continues text even if its tokenizer has a template.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from data.chat import render_prompt, stop_ids
from data.command.config_file import load_config
from data.command.flags import parse_command, run_command
from data.errors import UserError
from data.types import Messages
from rollout.engine import Request, Sampling
from trainer.metrics.metrics import read_jsonl

NEW = "/new"  # typed instead of a message: forget the conversation


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Talk to a trained model, or print its answers to given prompts."""

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN|MODEL")]
    """A finished run, a model or adapter folder, a hub id, or builtin:tiny."""
    prompt: tuple[str, ...] = ()
    """Prompts to answer, each on its own. None given: lines typed, or read from a pipe, as one conversation."""
    system_prompt: str | None = None
    """System message. None: that of the run."""
    plain: bool = False
    """Continue the text as it is, without the chat template."""
    temperature: float = 0.0
    """Sampling temperature. 0: greedy."""
    top_p: float = 1.0
    """Sample from the most likely tokens that have this much probability together. 1: all tokens."""
    max_tokens: int = 512
    """Most tokens of an answer."""
    seed: int = 0
    """Seed of the first answer; the next one has the next seed."""
    trust_remote_code: bool = False
    """Allow running the Python code that comes with the model."""

    def __post_init__(self) -> None:
        if self.plain and self.system_prompt is not None:
            raise UserError("system_prompt: has no effect with plain, which has no messages; leave one of them out")
        if self.top_p != 1 and self.temperature == 0:
            raise UserError(f"top_p={self.top_p}: has no effect on greedy answers; set --temperature")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 after one sentence about what is wrong."""
    return run_command(lambda: generate(parse_command(GenerateConfig, argv, "python -m trainer.generate")))


def generate(cfg: GenerateConfig) -> None:
    answer = Answerer(cfg)
    if cfg.prompt:
        for number, prompt in enumerate(cfg.prompt):
            print(answer.to(prompt, [], cfg.seed + number))
        return
    messages: Messages = []
    for number, line in enumerate(lines_of(answer.is_chat)):
        if line == NEW:
            messages = []
            continue
        said = answer.to(line, messages, cfg.seed + number)
        print(said, flush=True)
        if answer.is_chat:
            messages += [{"role": "user", "content": line}, {"role": "assistant", "content": said}]


class Answerer:
    """A model with the settings it was trained with."""

    def __init__(self, cfg: GenerateConfig) -> None:
        from rollout.engines.load import load_model
        from rollout.engines.local import LocalEngine

        run = run_settings(cfg.source)
        model, self.tokenizer = load_model(cfg.source, trust_remote_code=cfg.trust_remote_code)
        self.is_chat = bool(self.tokenizer.chat_template) and not cfg.plain and not trained_on_text(cfg.source)
        if cfg.system_prompt is not None and not self.is_chat:
            raise UserError("system_prompt: has no effect on a model that continues plain text; leave it out")
        self.system_prompt = run.get("system_prompt") if cfg.system_prompt is None else cfg.system_prompt
        self.settings = run.get("chat_template_kwargs") or None
        self.context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.engine = LocalEngine(model, self.tokenizer)
        self.sampling = Sampling(
            temperature=cfg.temperature,
            top_p=cfg.top_p,
            max_tokens=cfg.max_tokens,
            stop_ids=stop_ids(self.tokenizer, getattr(model.generation_config, "eos_token_id", None)),
            stop=tuple(run.get("stop") or ()),
        )

    def to(self, line: str, before: Messages, seed: int) -> str:
        if self.is_chat:
            whole = [*before, {"role": "user", "content": line}]
            ids = render_prompt(self.tokenizer, whole, self.system_prompt, self.settings)
        else:
            ids = render_prompt(self.tokenizer, line)
        room = self.sampling.max_tokens if self.context is None else self.context - len(ids)
        if room < 1:
            raise UserError(
                f"the prompt has {len(ids)} tokens, and the model's context {self.context}; shorten it, or type {NEW}"
            )
        request = Request(prompt_ids=ids, seed=seed, max_tokens=min(room, self.sampling.max_tokens))
        return self.engine.generate([request], self.sampling)[0].text


def run_settings(source: str) -> dict[str, Any]:
    """config.yaml of a run folder; {} for a model that is none."""
    path = Path(source).expanduser() / "config.yaml"
    return load_config(path) if path.is_file() else {}


def trained_on_text(source: str) -> bool:
    """Whether a run sampled completions of plain text, not of conversations."""
    path = Path(source).expanduser() / "samples.jsonl"
    samples = read_jsonl(path) if path.is_file() else []
    return bool(samples) and isinstance(samples[-1].get("prompt"), str)


def lines_of(is_chat: bool) -> Iterator[str]:
    """Lines that somebody types, until Ctrl-D, or those of a pipe. Empty ones are left out."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin if line.strip())
        return
    kind = f"Ask something; {NEW} starts over" if is_chat else "Type a text to continue"
    print(f"{kind}, Ctrl-D ends.", file=sys.stderr)
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
