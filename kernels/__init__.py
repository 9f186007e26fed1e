"""Fast kernels and their plain-torch references. Importing this package imports none of its modules.

Hugging Face distributes a package of the same name, and transformers imports names from it if its metadata is found.
This folder comes first on sys.path, so Python looks for those names here. If that distribution is installed, its folder
is appended to our __path__ and __getattr__ forwards its public names: transformers gets the real package, hub kernels
work, and transformers is not patched. None of our files may have the name of one of theirs
(tests/test_kernels_name.py).
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType
from typing import Any

_neighbour: ModuleType | None = None


def _neighbour_folder() -> Path | None:
    try:
        folder = Path(str(distribution("kernels").locate_file("kernels")))
    except PackageNotFoundError:
        return None
    is_ours = folder.resolve() == Path(__file__).resolve().parent
    return folder if (folder / "__init__.py").is_file() and not is_ours else None


_folder = _neighbour_folder()
if _folder is not None:
    __path__.append(str(_folder))


def __getattr__(name: str) -> Any:
    """Look up a name this package lacks in Hugging Face's, whose __init__ runs once, on the first such lookup."""
    global _neighbour
    if _folder is None or name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if f"{__name__}.{name}" in sys.modules:  # a submodule imported before this package replaced theirs
        return sys.modules[f"{__name__}.{name}"]
    if _neighbour is None:
        spec = importlib.util.spec_from_file_location(__name__, _folder / "__init__.py")
        assert spec is not None and spec.loader is not None, f"{_folder} is not a Python package"
        _neighbour = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(_neighbour)
        except BaseException:
            _neighbour = None  # do not keep a partly executed module for the next lookup
            raise
    return getattr(_neighbour, name)
