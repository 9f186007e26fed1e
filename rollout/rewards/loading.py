"""Find a reward function by name: built-in rewards, modules in the working folder, files.

Separate from table.py because workers import only this file; table.py imports asyncio, which would double their import
time (0.25 s -> 0.5 s).
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.hints import suggest
from data.user_code import describe_error, find_callable, import_name, load_module, refuse_python_object
from rollout.rewards import functions
from strop_names import module_file

MODELS = ("model", "prm")  # rollout/rewards/models.py
LAZY: dict[str, tuple[str, str]] = {  # (module, attribute) of built-ins that are imported only when used
    "code": ("rollout.rewards.code", "code"),  # called with the text after the colon
    "reasoning_gym": ("rollout.gyms.reasoning_gym", "score"),
    "nemo_gym": ("rollout.gyms.nemo_gym", "VerifyReward"),
}


def find_reward(spec: str | Callable[..., Any], *, trust_remote_code: bool = False) -> tuple[str, Callable[..., Any]]:
    """Return (short name, function) for a --reward-funcs entry or a callable; trust_remote_code: for reward models."""
    if callable(spec):
        return getattr(spec, "__name__", type(spec).__name__), _user_function(import_name(spec), spec)
    head, colon, argument = spec.partition(":")
    refuse_python_object(spec, "reward_funcs")
    if spec in functions.FUNCTIONS:
        return spec, functions.FUNCTIONS[spec]
    if head in functions.FACTORIES:
        return head, functions.FACTORIES[head](argument if colon else None)
    if head in MODELS:
        models = importlib.import_module("rollout.rewards.models")
        return head, models.load_reward_model(head, argument if colon else None, trust_remote_code)
    if head in LAZY:
        return head, _lazy(spec, head, argument if colon else None)
    module = spec.removesuffix(".py")
    if "." not in module and not colon and module_file(Path.cwd(), module) is not None:
        raise UserError(f"reward_funcs={spec}: {_module_hint(module)}")
    if "." not in spec or (colon and ".py:" not in spec):
        builtin = (*functions.FUNCTIONS, *functions.FACTORIES, *MODELS, *LAZY)
        raise UserError(
            f"reward_funcs={spec}: no such built-in reward; {suggest(head, builtin)} or pass module.function or "
            "path/to/file.py:function"
        )
    name, function = find_callable(spec, f"reward_funcs={spec}")
    return name, _user_function(spec, function)


def _module_hint(name: str) -> str:
    public: list[str] = []
    with contextlib.suppress(ValueError):  # an import error is reported once a function is named
        members = vars(load_module(name, name))
        public = [key for key, value in members.items() if inspect.isfunction(value) and not key.startswith("_")]
        public = [key for key in public if members[key].__module__ == members["__name__"]]
    listed = f" (it has {', '.join(public)})" if len(public) > 1 else ""
    return f"{name} is a module; name a function in it, e.g. {name}.{public[0] if public else 'my_function'}{listed}"


def runs_in_trainer(spec: str, call: Callable[..., Any]) -> bool:
    """Return whether the function must run in the trainer: it has checkpoint state, a model or connections."""
    return spec.partition(":")[0] in (*MODELS, "nemo_gym", "env") or hasattr(call, "state_dict")


def _lazy(spec: str, head: str, argument: str | None) -> Callable[..., Any]:
    module, attribute = LAZY[head]
    expected = {"nemo_gym": "verify", "reasoning_gym": None}.get(head, argument)
    if argument != expected:
        raise UserError(f"reward_funcs={spec}: no such reward; write {f'{head}:{expected}' if expected else head}")
    reward = getattr(importlib.import_module(module), attribute)
    if head == "code":
        return reward(argument)
    return reward() if inspect.isclass(reward) else reward


def _user_function(spec: str, function: Any) -> Callable[..., Any]:
    if inspect.isclass(function):
        try:
            function = function()
        except Exception as error:  # the constructor is user code
            raise UserError(
                f"reward_funcs={spec}: the class cannot be created without arguments ({describe_error(error)})"
            ) from None
    if not callable(function):
        raise UserError(f"reward_funcs={spec}: a {type(function).__name__} is not callable; name a function or class")
    try:
        inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C
        raise UserError(f"reward_funcs={spec}: no readable signature; wrap it in a Python function") from None
    if hasattr(function, "state_dict") != hasattr(function, "load_state_dict"):
        raise UserError(f"reward_funcs={spec}: defines only one of state_dict and load_state_dict; define both or none")
    return function
