"""Resolve `--compile auto`: on for a GPU run with enough steps, otherwise off.

    cfg = resolve_compile(cfg, policy, total_steps)    # model.compile is True or False from here on, and in config.yaml

The choice is made once, when the number of steps is known and before the run folder is created; --resume reads it from
config.yaml. With --compile True the models are compiled as they are loaded. Compiled code is in torch's user cache, not
in the run folder.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch

from rollout.state_layers import carried_state
from trainer.config.blocks import MethodConfig
from trainer.parallel.comm import is_main
from trainer.parallel.watch import log
from trainer.policy.load import blocks_of, compile_blocks
from trainer.policy.logps import Policy, causal_lm

Config = TypeVar("Config", bound=MethodConfig)
# Compiling takes 30 to 60 s and makes a step with recomputed blocks 1.4 to 1.7 times as fast (one H200): 1 s steps
# recover that time within 70 to 210 steps. Without recomputation, DPO of a 1.7B gained nothing.
ENOUGH_STEPS = 200


class Choice(NamedTuple):
    compile: bool
    line: str  # log line; empty on a CPU


def resolve_compile(cfg: Config, policy: Policy, total_steps: int) -> Config:
    """Replace auto in `cfg` by True or False; if True, compile the blocks of the policy and its companions."""
    if cfg.model.compile != "auto":
        return cfg
    policies = (policy, *policy.companions)
    obstacles = [obstacle(each, "the model" if each is policy else each.source) for each in policies]
    choice = choose(policy.device.type, total_steps, next(filter(None, obstacles), ""))
    if choice.line and is_main():
        log(choice.line)
    if choice.compile:
        for each in policies:
            for model in (each.model, each.reference):
                if model is not None:
                    compile_blocks(causal_lm(model), each.source)
            each.is_compiled = True
    return replace(cfg, model=replace(cfg.model, compile=choice.compile))


def choose(device: str, total_steps: int, obstacle: str) -> Choice:
    if device != "cuda":
        return Choice(False, "")
    if obstacle:
        return Choice(False, f"compile=auto: off, {obstacle}; --compile turns it on")
    if total_steps < ENOUGH_STEPS:
        return Choice(False, f"compile=auto: off, {total_steps} steps are too few to recover the compile time "
                             f"(on from {ENOUGH_STEPS} steps)")  # fmt: skip
    return Choice(True, f"compile=auto: on, {total_steps} steps recover the 30 to 60 s compile time "
                        f"(on from {ENOUGH_STEPS} steps)")  # fmt: skip


def obstacle(policy: Policy, name: str = "the model") -> str:
    """Return why compiled blocks may not pay off for this model, or "".

    One companion with an obstacle decides for all models: --resume compiles each of them as it is loaded.
    """
    lm = causal_lm(policy.model)
    if policy.is_exact:
        return "the sampler runs the same kernels (exact_sampling)"
    if getattr(lm.config.get_text_config(), "num_experts_per_tok", None):
        # A loop over experts breaks the graph, and in float32 there is no grouped matmul (trainer/policy/experts.py).
        if lm.config.get_text_config()._experts_implementation != "grouped_mm":
            return f"{name} loops over its experts"
        if policy.compute_dtype != torch.bfloat16:
            return f"{name} has experts, which compile only with --dtype bfloat16"
    if kind := carried_state(lm.config, type(lm)):
        return f"{name} has {kind} layers, whose kernels loop over chunks of the row"
    try:
        blocks_of(lm, policy.source)
    except ValueError:
        return f"the blocks of {name} were not found"
    return ""
