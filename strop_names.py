"""Our packages have plain names (data, losses, trainer), and a user's project may have packages of the same names.

    strop_names.take()    # first thing in every package of ours that has a `python -m` entry

From then on the six names are ours in this process, wherever the user's folder stands on sys.path. The user's own code
still gets the user's modules: that is data/user_code.py, which loads it.

`python -m trainer` itself would run a trainer.py in the working folder, as Python puts that folder first. So an
editable install has Python call take_entry() when it starts (strop_build.py).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent
NAMES = ("bench", "data", "kernels", "losses", "rollout", "trainer")


def is_ours(file: str | Path) -> bool:
    """Whether a source file belongs to one of our packages."""
    path = Path(file).resolve()
    return path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in NAMES


def module_file(folder: Path, name: str) -> Path | None:
    """The file that `import a.b` would run if it looked in this folder: a/b/__init__.py or a/b.py."""
    base = folder.joinpath(*name.split("."))
    return next((path for path in (base / "__init__.py", base.with_name(f"{base.name}.py")) if path.is_file()), None)


class OurPackages:
    """A finder that comes before sys.path."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        package = name.partition(".")[0]
        if package not in NAMES:
            return None
        spec = PathFinder.find_spec(name, [str(ROOT)] if path is None else path)
        if spec is None and path is not None:
            _refuse_hidden(name, package)
        return spec


def _refuse_hidden(name: str, package: str) -> None:
    """A module that is not there, though a package of the same name has it: Python alone would only say the former."""
    for entry in sys.path:
        folder = Path(entry).absolute()
        file = module_file(folder, name) if folder != ROOT else None
        if file is not None:
            raise ModuleNotFoundError(
                f"no module {name!r} in {ROOT / package}, which has the name {package!r} here, and {file} cannot be "
                f"imported under it; rename the package {folder / package}",
                name=name,
            )


def take() -> None:
    """Make the names ours.

    A foreign `kernels` that was imported earlier makes way, as ours hands its names on (kernels/__init__.py). A foreign
    `data`, `losses` or `rollout` cannot, and is refused.
    """
    for package in ("data", "losses", "rollout", "kernels"):
        loaded = sys.modules.get(package)
        if loaded is None:
            continue
        places = [str(loaded.__file__)] if getattr(loaded, "__file__", None) else list(loaded.__path__)
        if is_ours(places[0]):
            continue
        if package != "kernels":
            raise ImportError(
                f"{places[0]}: is imported as {package!r}, a name that {ROOT / package} needs in the same process; "
                "rename your package, or start training from a process that does not import it"
            )
        del sys.modules[package]  # what others took from it stays valid; its submodules stay loaded
    if OurPackages not in sys.meta_path:
        sys.meta_path.insert(0, OurPackages)


def take_entry() -> None:
    """At the start of `python -m NAME`: take the names if that is an entry of ours, and do nothing else.

    sys.argv begins with "-m" at that time, and sys.orig_argv has the name before what follows in sys.argv. The site
    module may call this twice.
    """
    name = sys.orig_argv[len(sys.orig_argv) - len(sys.argv)].removeprefix("-m")
    if OurPackages in sys.meta_path or not _is_entry(name):
        return
    if (Path.cwd() / Path(__file__).name).is_file():  # a clone: its own modules are run
        return
    take()
    theirs = module_file(Path.cwd(), name)
    if theirs is not None and not is_ours(theirs):
        print(
            f"python -m {name}: runs {ROOT / name.partition('.')[0]}, not {theirs}; to run yours, rename it or use an "
            "environment without strop",
            file=sys.stderr,
        )


def _is_entry(name: str) -> bool:
    if name.partition(".")[0] not in NAMES or name.partition(".")[0] == "bench":  # that is run from a clone
        return False
    base = ROOT.joinpath(*name.split("."))
    file = base.with_name(f"{base.name}.py")
    return (base / "__main__.py").is_file() or (file.is_file() and '__name__ == "__main__"' in file.read_text())
