"""Episode flags: tools (`--tools`, ...), or a user function that produces the completions (`--rollout-func`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from data.command.checks import check_numbers, reject_unused
from data.command.flags import Common
from data.errors import UserError

ToolFormat = Literal["auto", "hermes", "llama3_json", "pythonic", "harmony"]


@dataclass(frozen=True, kw_only=True)
class ToolConfig:
    """Tools that the model may call over several turns, or a function or program that produces the completions."""

    tools: Common[tuple[str, ...]] = ()
    """Tools the model may call: calculator, lookup, my_module.fn, FILE.py:fn, or a class (one object per episode)."""
    tool_format: ToolFormat = "auto"
    """Format of a call: hermes (Qwen), llama3_json, pythonic or harmony (gpt-oss). auto: as in the chat template."""
    max_turns: int = 8
    """Maximum model turns per episode. A call in the last turn is not answered."""
    max_tool_tokens: int | None = None
    """Maximum tokens per tool result; longer results are truncated. None: limited only by max_completion_length."""
    tool_timeout: float = 10.0
    """Seconds that one tool call may work or wait before the model gets an error. Waiting for a core does not count."""
    rollout_func: str | None = None
    """Function that samples instead of the engine: my_module.fn or FILE.py:fn. Its signature decides the kind."""
    harness: str | None = None
    (
        "Agent program to run for each completion, with the policy as its model: a command with {row} (a JSON file), "
        "{prompt}, {base_url} and {api_key}; the last two are also in its environment (OPENAI_BASE_URL, ...). Rewards "
        "get its stdout and folder."
    )
    harness_timeout: float = 600.0
    """Seconds that the program may take; then it is ended, and its completion has no reward."""
    harness_max_concurrent: int = 16
    """Maximum number of concurrent programs."""

    def __post_init__(self) -> None:
        if not self.harness:
            names = ("harness_timeout", "harness_max_concurrent")
            reject_unused(self, "without a program; set --harness", names)
        if self.harness == "":
            raise UserError("harness='': empty; pass a command such as 'python agent.py {row}'")
        check_numbers(
            self,
            {"a number of seconds above 0": "harness_timeout tool_timeout", "1 or more": "harness_max_concurrent"},
        )
        if self.tools and self.rollout_func:
            raise UserError(
                f"rollout_func={self.rollout_func}: never calls tools={' '.join(self.tools)}; use one of the two flags"
            )
        if not self.tools:
            names = ("max_turns", "max_tool_tokens", "tool_timeout", *(() if self.harness else ("tool_format",)))
            reject_unused(self, "without tools; set --tools", names)
        if "" in self.tools:
            raise UserError("tools='': empty name; pass calculator, lookup, my_module.fn or FILE.py:fn")
        if self.rollout_func == "":
            raise UserError("rollout_func='': empty name; pass my_module.fn or FILE.py:fn")
        if self.max_turns < 2 and self.tools:
            raise UserError(f"max_turns={self.max_turns}: must be 2 or more, for a call and the answer after it")
        if self.max_tool_tokens is not None and self.max_tool_tokens < 1:
            raise UserError(f"max_tool_tokens={self.max_tool_tokens}: must be 1 or more, or None for no limit")
