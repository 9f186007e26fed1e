"""What `--compile auto` stands for: on for a run on a GPU with enough steps, else off.

    cfg = resolve_compile(cfg, policy, total_steps)    # model.compile is True or False from here on, and in config.yaml

Decided once, when the number of steps is known and before there is a run folder; --resume reads the decision from
config.yaml. `choose` is a function of numbers alone. With True the models are compiled as they are loaded. What torch
compiles it keeps in its own cache of the user; nothing of it is in a run folder.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from trainer.parallel.comm import is_main
from trainer.parallel.watch import log
from trainer.policy.load import blocks_of, compile_blocks
from trainer.policy.logps import Policy, causal_lm

# Compiling takes half a minute to a minute and makes a step 1.4 to 1.7 times as fast (one H200): steps of 1 s win that
# back within 70 to 210.
ENOUGH_STEPS = 200


class Choice(NamedTuple):
    compile: bool
    line: str  # for the log; empty where there was nothing to choose


def resolve_compile(cfg: Any, policy: Policy, total_steps: int) -> Any:
    """`cfg` with what auto stands for; compiles the blocks of the policy and of the models beside it if that is on."""
    if cfg.model.compile != "auto":
        return cfg
    models = (policy, *policy.companions)
    found = [obstacle(one, "the model" if one is policy else one.source) for one in models]
    choice = choose(policy.device.type, total_steps, next(filter(None, found), ""))
    if choice.line and is_main():
        log(choice.line)
    if choice.compile:
        for one in models:
            for model in (one.model, one.reference):
                if model is not None:
                    compile_blocks(causal_lm(model), one.source)
            one.is_compiled = True
    return replace(cfg, model=replace(cfg.model, compile=choice.compile))


def choose(device: str, total_steps: int, obstacle: str) -> Choice:
    if device != "cuda":
        return Choice(False, "")
    if obstacle:
        return Choice(False, f"compile=auto: off, {obstacle}; --compile turns it on")
    if total_steps < ENOUGH_STEPS:
        few = f"a run of {total_steps} steps is too short to win back the time that compiling takes"
        return Choice(False, f"compile=auto: off, {few} (from {ENOUGH_STEPS} on it is on)")
    long = f"{total_steps} steps win back the half to whole minute that compiling takes"
    return Choice(True, f"compile=auto: on, {long} (from {ENOUGH_STEPS} on)")


def obstacle(policy: Policy, name: str = "the model") -> str:
    """Why compiled blocks are not known to pay for this model; empty if nothing speaks against them.

    One such model beside the policy decides for all: --resume compiles each of them as it is loaded.
    """
    lm = causal_lm(policy.model)
    if policy.is_sharded:
        return f"{name} is sharded"
    if getattr(lm.config.get_text_config(), "num_experts_per_tok", None):
        return f"{name} has experts, whose shapes change with every batch"
    try:
        blocks_of(lm, policy.source)
    except ValueError:
        return f"the blocks of {name} were not found"
    return ""
