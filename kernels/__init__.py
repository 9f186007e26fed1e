"""Fast paths and their slow twins. Import the modules by name: importing this package imports nothing else.

Hugging Face distributes a package of the same name, and transformers imports names from it whenever its metadata is
found. Since this folder comes first on sys.path, such a name would be looked for here. So when that distribution is
installed, its folder is searched after ours and its public names are handed out on request: transformers gets the real
package, hub kernels keep working, and nothing of transformers is patched. None of our files may carry the name of one
of theirs (tests/test_kernels_name.py).
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
    """A name this package lacks: ask Hugging Face's, whose __init__ runs once, the first time this happens."""
    global _neighbour
    if _folder is None or name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if f"{__name__}.{name}" in sys.modules:  # a submodule that was imported before this package took its place
        return sys.modules[f"{__name__}.{name}"]
    if _neighbour is None:
        spec = importlib.util.spec_from_file_location(__name__, _folder / "__init__.py")
        assert spec is not None and spec.loader is not None, f"{_folder} holds no Python package"
        _neighbour = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(_neighbour)
        except BaseException:
            _neighbour = None  # a half-made module must not answer the next request
            raise
    return getattr(_neighbour, name)
