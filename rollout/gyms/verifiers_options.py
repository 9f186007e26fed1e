"""Flags of environments of the package verifiers (`--verifiers.*`).

Separate from verifiers_env.py, so that the flags can be parsed without importing it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from data.errors import UserError
from data.formats.template_settings import JsonObject


@dataclass(frozen=True, kw_only=True)
class VerifiersConfig:
    """Rows and episodes of a verifiers environment (extra `verifiers`); its reward is that of --reward-funcs env."""

    env: str | None = None
    """The environment: the name of an installed one, a module in the working folder, or FILE.py."""
    args: JsonObject = field(default_factory=dict)
    (
        "Its settings, those of the block env in verifiers' own commands, as a JSON object (a mapping in YAML): "
        '\'{"taskset": {"split": "train"}, "agent": {"max_turns": 4}}\'.'
    )
    rows: int | None = None
    """Use only its first rows; None: all, which must be a finite number."""
    max_concurrent: int = 64
    """Concurrent episodes; the rest wait."""
    timeout: float = 600.0
    """Seconds one episode may take."""
    agent: str | None = None
    """If several agents play: the one to train; None: the only one that the environment marks as trainable."""
    renderer: JsonObject = field(default_factory=dict)
    (
        'How messages become tokens, as the package renderers names it: \'{"name": "qwen3"}\'. Empty: by the name of '
        "the model, and for a model it does not know by its chat template, without tool calls."
    )
    prefix_mismatch: Literal["last", "drop", "stop"] = "last"
    """If a turn's prompt does not continue the turns before: train on the last turns that do, drop the row, or stop."""

    def __post_init__(self) -> None:
        if self.env is None:
            default = _defaults()
            for name, value in default.items():
                if (given := getattr(self, name)) != value:
                    raise UserError(
                        f"verifiers.{name}={given}: has no effect without an environment; name one with --verifiers.env"
                    )
        elif not self.env.strip():
            raise UserError("verifiers.env='': is empty; name an environment, a module or FILE.py")
        for name in ("rows", "max_concurrent"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UserError(f"verifiers.{name}={getattr(self, name)}: must be 1 or more")
        if not 0 < self.timeout < math.inf:
            raise UserError(f"verifiers.timeout={self.timeout}: must be a number of seconds above 0")


def _defaults() -> dict[str, Any]:
    return {one.name: {} if one.name in ("args", "renderer") else one.default for one in fields(VerifiersConfig)}


def check_verifiers(cfg: Any) -> None:
    """Refuse combinations that cannot work; for the Config of a method that samples."""
    if cfg.verifiers.env is None:
        return
    name = f"verifiers.env={cfg.verifiers.env}"
    if cfg.data.data or cfg.data.eval_data or cfg.nemo_gym.datasets:
        raise UserError(
            f"{name}: brings its own rows; leave out data, eval_data and nemo_gym.datasets, and hold rows out with "
            "--val-set-size"
        )
    if cfg.rollout.engine == "local":  # auto becomes vllm
        raise UserError(f"rollout.engine=local: {name} asks vLLM servers; use --rollout.engine vllm")
    if cfg.model.system_prompt is not None:
        raise UserError(f"system_prompt={cfg.model.system_prompt}: {name} has its own prompts; leave it out")
    if cfg.model.chat_template != "tokenizer_default":
        raise UserError(
            f"chat_template={cfg.model.chat_template}: {name} renders prompts with the template in the model's folder; "
            "put it there, and leave the flag out"
        )
