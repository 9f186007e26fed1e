"""Find a reward function by name: built-in rewards, modules in the user's folder, files.

Not part of table.py: workers import only this, and table.py would double their import time (0.25 s -> 0.5 s, asyncio).
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
LAZY: dict[str, tuple[str, str]] = {  # built-ins that are imported only when used: module, attribute
    "code": ("rollout.rewards.code", "code"),  # called with the text after the colon
    "reasoning_gym": ("rollout.gyms.reasoning_gym", "score"),
    "nemo_gym": ("rollout.gyms.nemo_gym", "VerifyReward"),
}


def find_reward(spec: str | Callable[..., Any], *, trust_remote_code: bool = False) -> tuple[str, Callable[..., Any]]:
    """(short name, function) for a --reward-funcs entry, or for a callable passed from Python.

    trust_remote_code is for reward models.
    """
    if callable(spec):
        return getattr(spec, "__name__", type(spec).__name__), _user_function(import_name(spec), spec)
    head, colon, argument = spec.partition(":")
    refuse_python_object(spec, "reward_funcs")
    if spec in functions.FUNCTIONS:
        return spec, functions.FUNCTIONS[spec]
    if head in functions.FACTORIES:
        return head, functions.FACTORIES[head](argument if colon else None)
    if head in MODELS:
        models = importlib.import_module("rollout.rewards.models").MODELS
        return head, models[head](argument if colon else None, trust_remote_code)
    if head in LAZY:
        return head, _lazy(spec, head, argument if colon else None)
    module = spec.removesuffix(".py")
    if "." not in module and not colon and module_file(Path.cwd(), module) is not None:
        raise UserError(f"reward_funcs={spec}: {_module_hint(module)}")
    if "." not in spec or (colon and ".py:" not in spec):
        builtin = (*functions.FUNCTIONS, *functions.FACTORIES, *MODELS, *LAZY)
        raise UserError(
            f"reward_funcs={spec}: no such built-in reward; {suggest(head, builtin)} or give module.function or "
            "path/to/file.py:function"
        )
    name, found = find_callable(spec, f"reward_funcs={spec}")
    return name, _user_function(spec, found)


def _module_hint(name: str) -> str:
    found: list[str] = []
    with contextlib.suppress(ValueError):  # it cannot be imported, which is said once a function is named
        members = vars(load_module(name, name))
        found = [key for key, value in members.items() if inspect.isfunction(value) and not key.startswith("_")]
        found = [key for key in found if members[key].__module__ == members["__name__"]]
    listed = f" (it has {', '.join(found)})" if len(found) > 1 else ""
    return f"{name} is a module; name a function in it, e.g. {name}.{found[0] if found else 'my_function'}{listed}"


def stays_here(spec: str, call: Callable[..., Any]) -> bool:
    """Whether it must run in the trainer's process: it has checkpoint state, a model, or connections."""
    return spec.partition(":")[0] in (*MODELS, "nemo_gym", "env") or hasattr(call, "state_dict")


def _lazy(spec: str, head: str, argument: str | None) -> Callable[..., Any]:
    module, attribute = LAZY[head]
    wanted = {"nemo_gym": "verify", "reasoning_gym": None}.get(head, argument)
    if argument != wanted:
        right = head if wanted is None else f"{head}:{wanted}"
        raise UserError(f"reward_funcs={spec}: no such reward; write {right}")
    found = getattr(importlib.import_module(module), attribute)
    if head == "code":
        return found(argument)
    return found() if inspect.isclass(found) else found


def _user_function(spec: str, found: Any) -> Callable[..., Any]:
    if inspect.isclass(found):
        try:
            found = found()
        except Exception as error:  # the constructor is the user's code
            raise UserError(
                f"reward_funcs={spec}: the class cannot be created without arguments ({describe_error(error)})"
            ) from None
    if not callable(found):
        raise UserError(f"reward_funcs={spec}: is a {type(found).__name__}, not a function; name something callable")
    try:
        inspect.signature(found)
    except (TypeError, ValueError):  # some functions written in C
        raise UserError(f"reward_funcs={spec}: has no readable signature; wrap it in a Python function") from None
    if hasattr(found, "state_dict") != hasattr(found, "load_state_dict"):
        raise UserError(f"reward_funcs={spec}: has only one of state_dict and load_state_dict; give it both or none")
    return found
