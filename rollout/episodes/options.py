"""Flags of episodes: tools (`--tools`, ...), or a user function that makes the completions (`--rollout-func`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

from data.command.flags import Common
from data.errors import UserError

ToolFormat = Literal["auto", "hermes", "llama3_json", "pythonic"]


@dataclass(frozen=True, kw_only=True)
class ToolConfig:
    """Tools that the model may call over several turns, or a function that makes the completions itself."""

    tools: Common[tuple[str, ...]] = ()
    """Functions the model may call: calculator, lookup, my_module.fn, FILE.py:fn, or a class (one per episode)."""
    tool_format: ToolFormat = "auto"
    """How the model writes a call: hermes (Qwen too), llama3_json, pythonic; auto reads it off the chat template."""
    max_turns: int = 8
    """Turns of the model in one episode; a call in the last one is not answered."""
    max_tool_tokens: int | None = None
    """Tokens of one tool result, the rest is cut; None: only max_completion_length, over all turns, limits it."""
    tool_timeout: float = 10.0
    """Seconds one tool call may take; after that the model gets an error."""
    rollout_func: str | None = None
    """Your function instead of the engine's sampling, my_module.fn or FILE.py:fn; its signature decides the kind."""

    def __post_init__(self) -> None:
        if self.tools and self.rollout_func:
            raise UserError(
                f"rollout_func={self.rollout_func}: makes the completions itself, so tools={' '.join(self.tools)} "
                "would never be called; give one of the two"
            )
        for field in fields(self):
            value = getattr(self, field.name)
            if not self.tools and field.name not in ("tools", "rollout_func") and value != field.default:
                raise UserError(f"{field.name}={value}: has no effect without tools; name some with --tools")
        if "" in self.tools:
            raise UserError("tools='': is not a name; give calculator, lookup, my_module.fn or FILE.py:fn")
        if self.rollout_func == "":
            raise UserError("rollout_func='': is not a name; give my_module.fn or FILE.py:fn, or leave it out")
        if self.max_turns < 2 and self.tools:
            raise UserError(f"max_turns={self.max_turns}: must be 2 or more, a call and what the model makes of it")
        if self.max_tool_tokens is not None and self.max_tool_tokens < 1:
            raise UserError(f"max_tool_tokens={self.max_tool_tokens}: must be 1 or more, or None for no limit")
        if not 0 < self.tool_timeout < math.inf:
            raise UserError(f"tool_timeout={self.tool_timeout}: must be a number of seconds above 0")
