"""Composes losses, rollout, kernels and data into training runs.

A run from Python (docs/python.md), and the same with a typed Config:

    from trainer import train

    run = train("grpo", model="builtin:tiny", data="task:addition", reward_funcs=["exact_match", short], max_steps=10)

    from rollout.rewards.options import RewardConfig
    from trainer.config.blocks import ModelConfig, PromptConfig, RunConfig
    from trainer.methods.grpo import Config, train

    def short(completions, **columns):                               # for chat prompts: lists of messages
        return [-float(len(messages[0]["content"])) for messages in completions]

    train(Config(
        model=ModelConfig(model="builtin:tiny"),
        data=PromptConfig(data=("task:addition",)),
        reward=RewardConfig(reward_funcs=("exact_match", short)),    # a name, or the function itself
        run=RunConfig(max_steps=10, output_dir="runs/short"),
    ))

Every method has a Config and train. An invalid setting raises a ValueError. RunConfig(resume="runs/short") resumes the
run, as does `python -m trainer --resume runs/short` if each function can be imported by name: config.yaml stores
module.function, or python:module.function if it cannot be (a lambda, a function of the script itself).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import strop_names

if TYPE_CHECKING:
    from trainer.api import Run, train

__all__ = ["Run", "train"]
strop_names.take()


def __getattr__(name: str) -> Any:
    """Import train and Run when they are used: other modules of the package need neither."""
    if name in __all__:
        from trainer import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
