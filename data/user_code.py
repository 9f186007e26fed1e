"""A user's own code: modules beside them and files, imported once and shared by everything that names them.

    module = load_module("my_code", "data_format=my_code.shorten")  # my_code.py in the working folder, else installed
    factory = attribute_of(module, "shorten", "data_format=my_code.shorten")

The second argument is what the user typed, as the sentences about it begin.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from data.nearest import suggest

ROOT = Path(__file__).resolve().parents[1]
NOT_THEIRS = (ROOT / "data", ROOT / "rollout", ROOT / "trainer", Path(importlib.__file__).parent)


def load_module(name: str, label: str) -> ModuleType:
    """import_beside, or a sentence with the cause."""
    try:
        return import_beside(name)
    except (Exception, SystemExit) as error:  # importing runs the user's code, a script's sys.exit() included
        if is_missing(name, error):
            raise ValueError(
                f"{label}: there is no module {name!r}, neither in {Path.cwd()} nor installed; check the name"
            ) from None
        raise ValueError(f"{label}: cannot be imported ({told(error)}{place(error)})") from None


def load_file(path: Path, label: str) -> ModuleType:
    """The file as a module, or a sentence with the cause."""
    if not path.is_file():
        raise ValueError(f"{label}: the file {path} does not exist; check the path")
    try:
        return _run_file(path)
    except (Exception, SystemExit) as error:  # as above
        raise ValueError(f"{label}: cannot be imported ({told(error)}{place(error)})") from None


def attribute_of(module: ModuleType, attribute: str, label: str) -> Any:
    if not hasattr(module, attribute):
        public = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        hint = f"; {suggest(attribute, public)}" if public else ""
        home = getattr(module, "__file__", None) or module.__name__
        raise ValueError(f"{label}: {home} has no {attribute!r}{hint}")
    return getattr(module, attribute)


def import_beside(name: str) -> ModuleType:
    """The module of that name in the working folder if there is one, else an installed one; errors are its own.

    It is imported as any module is, so whoever names it gets the same one. Only where the name is in use by something
    outside the folder (a library, or a package of ours) is the file loaded under another name, and that one left alone.
    """
    folder = Path.cwd()
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))  # stays: the user's module may import its neighbours later
    base = folder.joinpath(*name.split("."))
    beside = next((path for path in (base / "__init__.py", base.with_name(f"{base.name}.py")) if path.is_file()), None)
    if beside is not None and _in_use_elsewhere(name.partition(".")[0], folder):
        return _run_file(beside)
    importlib.invalidate_caches()  # the file may be younger than the last look into the folder
    module = importlib.import_module(name)
    if beside is None or Path(getattr(module, "__file__", None) or "").resolve() == beside.resolve():
        return module
    return _run_file(beside)  # an earlier working folder had one of that name


def is_missing(name: str, error: BaseException) -> bool:
    """Whether the import failed for want of that very module, not of something it imports."""
    return isinstance(error, ModuleNotFoundError) and bool(error.name) and f"{name}.".startswith(f"{error.name}.")


def told(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def place(error: BaseException, call: Callable[..., Any] | None = None) -> str:
    """Where in the user's file it happened, in place of a traceback."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).parent not in NOT_THEIRS and not frame.filename.startswith("<frozen")
    ]
    home = getattr(sys.modules.get(getattr(call, "__module__", "")), "__file__", None)
    frames = [frame for frame in frames if frame.filename == home] or frames
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def _in_use_elsewhere(package: str, folder: Path) -> bool:
    loaded = sys.modules.get(package)
    if loaded is None:
        return False
    places = [loaded.__file__] if getattr(loaded, "__file__", None) else list(getattr(loaded, "__path__", []))
    inside = {path.resolve() for path in (folder / f"{package}.py", folder / package / "__init__.py", folder / package)}
    return not any(Path(place).resolve() in inside for place in places)


def _run_file(path: Path) -> ModuleType:
    name = f"_user_file_{path}"
    if name in sys.modules:  # two functions of one file share its globals, as with any import
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look a class's module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
