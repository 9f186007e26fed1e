"""Flags for environments of the package verifiers (`--verifiers.*`).

Separate from verifiers_env.py, so that flags can be parsed without importing it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from data.command.checks import check_numbers, reject_unused
from data.errors import UserError
from data.formats.template_settings import JsonObject
from rollout.gyms.options import PrefixMismatch


@dataclass(frozen=True, kw_only=True)
class VerifiersConfig:
    """Rows and episodes of a verifiers environment (extra `verifiers`). Use --reward-funcs env."""

    env: str | None = None
    """Environment: the name of an installed environment, a module in the working folder, or FILE.py."""
    args: JsonObject = field(default_factory=dict)
    (
        "Environment settings, as in the block env of verifiers' commands, as a JSON object (a mapping in YAML): "
        '\'{"taskset": {"split": "train"}, "agent": {"max_turns": 4}}\'.'
    )
    rows: int | None = None
    """Number of rows to use, from the start. None: all rows; their number must be finite."""
    max_concurrent: int = 64
    """Maximum concurrent episodes."""
    timeout: float = 600.0
    """Seconds that one episode may take."""
    agent: str | None = None
    """Agent to train, if there are several. None: the only agent that the environment marks as trainable."""
    renderer: JsonObject = field(default_factory=dict)
    (
        'Renderer of messages to tokens, named as in the package renderers: \'{"name": "qwen3"}\'. Empty: chosen by '
        "model name; for an unknown model, the chat template without tool calls."
    )
    prefix_mismatch: PrefixMismatch = "branch"
    """If an agent rewrites earlier turns. branch: train all branches; last: the last one; drop: the row; stop."""

    def __post_init__(self) -> None:
        if self.env is None:
            reject_unused(self, "without an environment; set --verifiers.env", prefix="verifiers.")
        elif not self.env.strip():
            raise UserError("verifiers.env='': empty name; pass an environment, a module or FILE.py")
        rules = {"1 or more": "rows max_concurrent", "a number of seconds above 0": "timeout"}
        check_numbers(self, rules, "verifiers.")


def check_verifiers(cfg: VerifiersConfig, *, has_data: bool, system_prompt: str | None, chat_template: str) -> None:
    """Raise for unsupported combinations. has_data: data, eval_data or nemo_gym.datasets is set."""
    if cfg.env is None:
        return
    name = f"verifiers.env={cfg.env}"
    if has_data:
        raise UserError(
            f"{name}: provides the rows; remove --data, --eval-data and --nemo-gym.datasets, and hold out rows with "
            "--val-set-size"
        )
    if system_prompt is not None:
        raise UserError(f"system_prompt={system_prompt}: {name} has its own prompts; remove --system-prompt")
    if chat_template != "tokenizer_default":
        raise UserError(
            f"chat_template={chat_template}: {name} uses the template in the model's folder; put it there and "
            "remove --chat-template"
        )
