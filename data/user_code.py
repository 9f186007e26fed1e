"""Import the user's modules and files that flags name, once per process.

    module = load_module("my_code", "data_format=my_code.shorten")  # my_code.py in the working folder, or installed
    factory = attribute_of(module, "shorten", "data_format=my_code.shorten")
    name, function = find_callable("my_rewards.py:short", "reward_funcs=my_rewards.py:short")

`label` is the setting as the user wrote it; every error message starts with it.

A user's project may have a package `data` or a file trainer.py, but in this process those names are strop's
(strop_names.py). Import statements in the user's files still get the user's module if it exists, and strop's otherwise.
The user's module is then loaded under another name: data/x.py as `_user_folder_0.data.x`.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from data.errors import UserError
from data.hints import suggest
from strop_names import NAMES, ROOT, is_ours, module_file

R = TypeVar("R")
LIBRARY = str(Path(importlib.__file__).parent)
PYTHON = "python"  # prefix of objects that cannot be imported by name


class PythonObject(str):
    """A setting that was passed as an object from Python: its name, as config.yaml stores it, and the object."""

    value: Any

    def __new__(cls, name: str, value: Any) -> PythonObject:
        self = super().__new__(cls, name)
        self.value = value
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return PythonObject, (str(self), self.value)


def find_callable(spec: str, label: str) -> tuple[str, Any]:
    """Return (name, function or class) for FILE.py:fn, or my_module.fn in the working folder or installed."""
    if isinstance(spec, PythonObject):
        return getattr(spec.value, "__name__", type(spec.value).__name__), spec.value
    refuse_python_object(spec, label.partition("=")[0])
    attribute, value = find_attribute(
        spec, label, "not a function name; use my_module.function or path/to/file.py:function"
    )
    if not callable(value):
        raise UserError(f"{label}: must be a function, not {type(value).__name__}")
    return attribute, value


def find_attribute(spec: str, label: str, otherwise: str) -> tuple[str, Any]:
    """Return (name, value) for FILE.py:name or my_module.name; `otherwise`: the error for other texts."""
    path, colon, attribute = spec.rpartition(":")
    if colon and path.endswith(".py"):
        return attribute, attribute_of(load_file(Path(path).expanduser().resolve(), label), attribute, label)
    name, dot, attribute = spec.rpartition(".")
    if not dot or colon:
        raise UserError(f"{label}: {otherwise}")
    return attribute, attribute_of(load_module(name, label), attribute, label)


def load_module(name: str, label: str) -> ModuleType:
    """Call import_beside; raise UserError with the cause."""
    try:
        return import_beside(name)
    except (Exception, SystemExit) as error:  # importing runs the user's code, which may call sys.exit()
        if is_missing(name, error):
            raise UserError(f"{label}: no module {name!r} in {Path.cwd()} or installed; check the name") from None
        raise UserError(f"{label}: cannot be imported ({describe_error(error)}{where_raised(error)})") from None


def check_function_file(spec: str, label: str) -> None:
    """Raise if the file of FILE.py:fn does not exist; other specs pass."""
    path = Path(spec.rpartition(":")[0]).expanduser().resolve()
    if path.suffix == ".py":
        _check_file(path, label)


def _check_file(path: Path, label: str) -> None:
    if not path.is_file():
        raise UserError(f"{label}: the file {path} does not exist; check the path")


def load_file(path: Path, label: str) -> ModuleType:
    """Import a file as a module; raise UserError with the cause."""
    _check_file(path, label)
    _search(Path.cwd())
    try:
        return _run_file(path)
    except (Exception, SystemExit) as error:
        raise UserError(f"{label}: cannot be imported ({describe_error(error)}{where_raised(error)})") from None


def attribute_of(module: ModuleType, attribute: str, label: str) -> Any:
    if not hasattr(module, attribute):
        public = [name for name, value in vars(module).items() if _is_public(module, name, value)]
        hint = f"; {suggest(attribute, public)}" if public else ""
        home = getattr(module, "__file__", None) or module.__name__
        raise UserError(f"{label}: {home} has no {attribute!r}{hint}")
    return getattr(module, attribute)


def _is_public(module: ModuleType, name: str, value: Any) -> bool:
    """Return whether this is a function, class or record of the module, not one that it imports from elsewhere."""
    package = module.__name__.partition(".")[0]
    imported = hasattr(value, "__qualname__") and str(value.__module__).partition(".")[0] != package
    return callable(value) and not name.startswith("_") and not imported


def import_name(call: Callable[..., Any]) -> str:
    """Return module.name if that can be imported; otherwise python:module.name, which reading a config rejects.

    An object without a name, such as a loss record, is searched for in all loaded modules.
    """
    if not hasattr(call, "__qualname__"):
        likely = {getattr(value, "__module__", "") for value in vars(call).values() if callable(value)}
        for module, loaded in sorted(sys.modules.items(), key=lambda item: item[0] not in likely):
            names = {} if module in ("__main__", "__mp_main__") else getattr(loaded, "__dict__", {})
            for name, value in list(names.items()):
                if value is call and not name.startswith("_"):
                    return f"{module}.{name}"
    named = call if hasattr(call, "__qualname__") else type(call)
    module, name = named.__module__, named.__qualname__
    imported = getattr(sys.modules.get(module), name, None) if module != "__main__" else None
    return f"{module}.{name}" if imported is call else f"{PYTHON}:{module}.{name}"


def name_of(call: Callable[..., Any]) -> str:
    """Return FILE.py:name for errors; a partial has the name of its function."""
    while isinstance(call, partial):
        call = call.func
    named = call if hasattr(call, "__qualname__") else type(call)
    home = getattr(sys.modules.get(named.__module__), "__file__", None) or named.__module__
    return f"{Path(home).name}:{named.__qualname__}"


def find_record(flag: str, spec: str | Callable[..., Any], known: Mapping[str, R], kind: type[R], what: str) -> R:
    """Return the record that a flag names: a built-in record (`known`), or the user's record or function."""
    if isinstance(spec, str) and spec not in known:
        refuse_python_object(spec, flag)
        if "." not in spec:
            raise UserError(f"{flag}={spec}: no such {what}; {suggest(spec, known)}, or pass my_module.my_{what}")
        _, spec = find_callable(spec, f"{flag}={spec}")
    if isinstance(spec, str):
        return known[spec]
    return spec if isinstance(spec, kind) else kind(spec)


def refuse_python_object(spec: str, flag: str) -> None:
    """Raise for a name that import_name wrote for an object that cannot be imported."""
    if spec.startswith(f"{PYTHON}:"):
        raise UserError(
            f"{flag}={spec}: a Python object that cannot be imported; resume from the program that started the run, "
            f"with resume=FOLDER, or pass another --{flag.replace('_', '-')}"
        )


# Errors in the user's code.


def describe_error(error: BaseException) -> str:
    """Return type and message in one printable line."""
    return printable(" ".join(f"{type(error).__name__}: {error}".split()))


def printable(text: str) -> str:
    """Escape control characters such as \\x1b, which could control the user's terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text)


def where_raised(error: BaseException, call: Callable[..., Any] | None = None) -> str:
    """Return " (FILE, line N)" in the user's code, or "" if the error was not raised there."""
    frames = users_part(error)
    home = getattr(sys.modules.get(getattr(call, "__module__", "")), "__file__", None)
    frames = [frame for frame in frames if frame.filename == home] or frames
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def users_part(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the traceback's frames in the user's code."""
    return [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not is_ours(frame.filename) and not frame.filename.startswith((LIBRARY, "<frozen"))
    ]


def is_missing(name: str, error: BaseException) -> bool:
    """Return whether this module is missing, rather than a module that it imports."""
    return isinstance(error, ModuleNotFoundError) and bool(error.name) and f"{name}.".startswith(f"{error.name}.")


# Importing.


def import_beside(name: str) -> ModuleType:
    """Import the module from the working folder, or an installed module; errors of the import propagate.

    The file is loaded under another name only if a module outside the folder already has this name (a library, or a
    strop package). Otherwise it is an ordinary import, and every caller gets the same module.
    """
    folder = Path.cwd()
    _search(folder)
    file = module_file(folder, name)
    importlib.invalidate_caches()  # the file may be newer than the cached directory listing
    if _is_hidden(folder, name):
        return importlib.import_module(f"{_alias(folder)}.{name}")
    if file is not None and _in_use_elsewhere(name.partition(".")[0], folder):
        return _run_file(file)
    module = importlib.import_module(name)
    if file is None or Path(getattr(module, "__file__", None) or "").resolve() == file.resolve():
        return module
    return _run_file(file)  # an earlier working folder had a module of this name


def _in_use_elsewhere(package: str, folder: Path) -> bool:
    loaded = sys.modules.get(package)
    if loaded is None:
        return False
    paths = [loaded.__file__] if getattr(loaded, "__file__", None) else list(getattr(loaded, "__path__", []))
    inside = {path.resolve() for path in (folder / f"{package}.py", folder / package / "__init__.py", folder / package)}
    return not any(Path(path).resolve() in inside for path in paths)


def _run_file(path: Path) -> ModuleType:
    name = f"_user_file_{path}"
    if name in sys.modules:  # functions of one file share its globals, as with any import
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path, loader=_UserLoader(name, path, path.parent))
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up the module of a class there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


# User modules with the same names as strop's.

_folders: dict[Path, str] = {}  # user's folder -> package under which its modules with strop's names are loaded


def _search(folder: Path) -> None:
    """Make modules in the user's folder importable."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))  # not removed: the user's module may import others of its folder later
    _alias(folder)
    if _UserModules not in sys.meta_path:
        sys.meta_path.insert(sys.meta_path.index(PathFinder), _UserModules)


def _alias(folder: Path) -> str:
    """Return the name of a package without a file whose submodules are the folder's modules."""
    if folder not in _folders:
        package = ModuleType(f"_user_folder_{len(_folders)}")
        package.__path__ = [str(folder)]
        sys.modules[package.__name__] = package
        _folders[folder] = package.__name__
    return _folders[folder]


def _is_hidden(folder: Path, name: str) -> bool:
    """Return whether the folder has this module but strop's package of the same name would hide it."""
    return name.partition(".")[0] in NAMES and folder != ROOT and module_file(folder, name) is not None


class _UserModules:
    """Finder that loads modules in the user's folders with _UserLoader."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path)
        if spec is None or not isinstance(spec.loader, SourceFileLoader):
            return None
        file = Path(str(spec.origin))
        home = next((folder for folder in _folders if file.is_relative_to(folder)), None)
        if home is None or is_ours(file) or "site-packages" in file.parts:
            return None
        spec.loader = _UserLoader(name, file, home)
        return spec


class _UserLoader(SourceFileLoader):
    """Loader whose __import__ prefers the user's modules over strop's of the same name."""

    def __init__(self, name: str, file: Path, home: Path) -> None:
        super().__init__(name, str(file))
        self.home = home

    def exec_module(self, module: ModuleType) -> None:
        folders = [folder for folder in dict.fromkeys([self.home, Path.cwd()]) if _has_strop_names(folder)]
        if folders:
            vars(module)["__builtins__"] = _Builtins({**vars(builtins), "__import__": _importer(folders)})
        super().exec_module(module)


class _Builtins(dict):
    """Python's builtins with another __import__, including builtins that are added later."""

    def __missing__(self, name: str) -> Any:
        return vars(builtins)[name]


def _has_strop_names(folder: Path) -> bool:
    return folder != ROOT and any(
        (folder / f"{name}.py").is_file() or any(path.is_file() for path in (folder / name).rglob("*.py"))
        for name in NAMES
    )


def _importer(folders: Sequence[Path]) -> Callable[..., ModuleType]:
    def import_user_module(
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        modules = [name, *(f"{name}.{item}" for item in fromlist or ())]
        folder = next((f for f in folders if level == 0 and any(_is_hidden(f, module) for module in modules)), None)
        if folder is None:
            return builtins.__import__(name, globals, locals, fromlist, level)
        alias = _alias(folder)
        if fromlist:
            return builtins.__import__(f"{alias}.{name}", globals, locals, fromlist, 0)
        importlib.import_module(f"{alias}.{name}")
        return sys.modules[f"{alias}.{name.partition('.')[0]}"]

    return import_user_module
