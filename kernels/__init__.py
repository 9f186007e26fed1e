"""Fast kernels and their plain-torch references. Importing this package imports none of its modules.

Hugging Face distributes a package with the same name, and transformers imports names from it if its metadata is found.
This folder comes first on sys.path, so Python looks for those names here. If the distribution is installed, its folder
is appended to __path__ and __getattr__ forwards its public names: transformers gets the real package without a patch,
and hub kernels work. No file here may have the name of a file there (tests/test_kernels_name.py).
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType
from typing import Any

_hub_package: ModuleType | None = None


def _hub_folder() -> Path | None:
    try:
        folder = Path(str(distribution("kernels").locate_file("kernels")))
    except PackageNotFoundError:
        return None
    is_this_package = folder.resolve() == Path(__file__).resolve().parent
    return folder if (folder / "__init__.py").is_file() and not is_this_package else None


_folder = _hub_folder()
if _folder is not None:
    __path__.append(str(_folder))


def __getattr__(name: str) -> Any:
    """Look up missing names in Hugging Face's package, whose __init__ runs once, on the first lookup."""
    global _hub_package
    if _folder is None or name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if f"{__name__}.{name}" in sys.modules:  # a submodule imported before this package replaced the other
        return sys.modules[f"{__name__}.{name}"]
    if _hub_package is None:
        spec = importlib.util.spec_from_file_location(__name__, _folder / "__init__.py")
        assert spec is not None and spec.loader is not None, f"{_folder} is not a Python package"
        _hub_package = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(_hub_package)
        except BaseException:
            _hub_package = None  # do not keep a partially executed module for the next lookup
            raise
    return getattr(_hub_package, name)
