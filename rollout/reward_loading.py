"""From what a user typed to something that can be called: built-in rewards, modules beside the user, files."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from data.nearest import suggest
from rollout import reward_functions

HERE = Path(__file__).parent
IMPORTLIB = Path(importlib.__file__).parent


def find_reward(spec: str) -> tuple[str, Callable[..., Any]]:
    """(short name, function) for what the user typed."""
    head, colon, argument = spec.partition(":")
    if spec in reward_functions.FUNCTIONS:
        return spec, reward_functions.FUNCTIONS[spec]
    if head in reward_functions.FACTORIES:
        return head, reward_functions.FACTORIES[head](argument if colon else None)
    path, colon, attribute = spec.rpartition(":")
    if colon and path.endswith(".py"):
        return attribute, _user_function(spec, _load_file(spec, Path(path).expanduser().resolve()), attribute)
    if colon or "." not in spec:
        builtin = (*reward_functions.FUNCTIONS, *reward_functions.FACTORIES)
        raise ValueError(
            f"reward_funcs={spec}: no such built-in reward; {suggest(head, builtin)} or give module.function or "
            "path/to/file.py:function"
        )
    module, _, attribute = spec.rpartition(".")
    return attribute, _user_function(spec, _import_module(spec, module), attribute)


def _import_module(spec: str, name: str) -> ModuleType:
    """The module of that name in the working folder if there is one, else an installed one."""
    folder = Path.cwd()
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))  # stays: the user's module may import its neighbours later
    base = folder.joinpath(*name.split("."))
    beside = next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)
    if beside is not None and _loaded_from_elsewhere(name.partition(".")[0], folder):
        return _load_file(spec, beside)
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:  # importing runs the user's code, a script's sys.exit() included
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise ValueError(
                f"reward_funcs={spec}: there is no module {name!r}, neither in {folder} nor installed; check the name"
            ) from None
        raise ValueError(f"reward_funcs={spec}: cannot be imported ({told(error)}{place(error)})") from None
    return module


def _loaded_from_elsewhere(package: str, folder: Path) -> bool:
    """Whether that name is in use by something outside the folder (a library, or ours): leave it, load the file."""
    loaded = sys.modules.get(package)
    if loaded is None:
        return False
    places = [loaded.__file__] if getattr(loaded, "__file__", None) else list(getattr(loaded, "__path__", []))
    inside = (folder / f"{package}.py", folder / package / "__init__.py", folder / package)
    return not any(Path(place) in inside for place in places)


def _load_file(spec: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"reward_funcs={spec}: the file {path} does not exist; check the path")
    name = f"_reward_file_{path}"
    if name in sys.modules:  # two functions of one file share its globals, as with any import
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None and module_spec.loader is not None, path
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses and pickling look a class's module up there
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # importing runs the user's code, a script's sys.exit() included
        del sys.modules[name]
        raise ValueError(f"reward_funcs={spec}: cannot be imported ({told(error)}{place(error)})") from None
    return module


def _user_function(spec: str, module: ModuleType, attribute: str) -> Callable[..., Any]:
    if not hasattr(module, attribute):
        public = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        hint = f"; {suggest(attribute, public)}" if public else ""
        raise ValueError(f"reward_funcs={spec}: {module.__file__} has no {attribute!r}{hint}")
    found = getattr(module, attribute)
    if inspect.isclass(found):
        try:
            found = found()
        except Exception as error:  # the constructor is the user's code
            raise ValueError(
                f"reward_funcs={spec}: the class cannot be made without arguments ({told(error)})"
            ) from None
    if not callable(found):
        raise ValueError(f"reward_funcs={spec}: is a {type(found).__name__}, not a function; name something callable")
    if hasattr(found, "state_dict") != hasattr(found, "load_state_dict"):
        raise ValueError(f"reward_funcs={spec}: has only one of state_dict and load_state_dict; give it both or none")
    return found


def told(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def place(error: BaseException, call: Callable[..., Any] | None = None) -> str:
    """Where in the user's file it happened, in place of a traceback."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).parent not in (HERE, IMPORTLIB) and not frame.filename.startswith("<frozen")
    ]
    home = getattr(sys.modules.get(getattr(call, "__module__", "")), "__file__", None)
    frames = [frame for frame in frames if frame.filename == home] or frames
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
