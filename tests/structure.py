"""python -m tests.structure [--root CLONE] [--files] [--step]: sizes, floors and circles, and what one GRPO step runs.

All tables but the last are read from the source text, without torch. An import counts wherever it stands, also inside a
function or under TYPE_CHECKING; a module looked up by name (importlib) does not count.

A unit is a sub-package, the "entries" of a folder (commands and other files on top) or its "ground" (the other files).
The floor of a unit is one above the highest unit of the same folder that it imports.
"""

from __future__ import annotations

import argparse
import ast
import functools
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

Graph = dict[str, set[str]]  # name -> the names it imports

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("kernels", "losses", "data", "rollout", "trainer", "bench")
ENTRIES = (
    "data/show.py", "rollout/serve.py", "rollout/rewards/__main__.py",
    "trainer/__init__.py", "trainer/__main__.py", "trainer/api.py", "trainer/cli.py", "trainer/plan.py",
    "trainer/dry_run.py", "trainer/export.py", "trainer/report.py", "trainer/generate.py", "trainer/evaluate.py",
    "trainer/harness.py", "trainer/push.py", "trainer/notebook.py", "trainer/from_trl.py",
    "trainer/translate/__main__.py", "trainer/tiny/build.py",
)  # fmt: skip

# Goals.
MOST_FLOORS = {"data": 3, "rollout": 6, "trainer": 8}  # entries not counted
MOST_FILES = 15  # directly in one folder, __init__.py not counted
FILES_ASIDE = {"trainer/methods": 99, "bench": 23}  # a file per method; a file per measurement
MOST_IN_A_STEP = 50


def sources(root: Path = ROOT) -> list[str]:
    """Paths of all source files, relative to the root."""
    return sorted(path.relative_to(root).as_posix() for folder in FOLDERS for path in (root / folder).rglob("*.py"))


@functools.cache
def imported(path: Path, root: Path = ROOT) -> frozenset[str]:
    """Dotted names a file imports anywhere in it, also inside functions; relative ones made absolute."""
    names: set[str] = set()
    package = path.relative_to(root).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def file_graph(root: Path = ROOT) -> Graph:
    """Source file -> the source files it imports; of `from data import chat` that is data/chat.py."""
    files = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in sources(root)}
    graph: Graph = {}
    for name in files.values():
        modules = imported(root / name, root) & files.keys()
        modules -= {module.rpartition(".")[0] for module in modules}
        graph[name] = {files[module] for module in modules} - {name}
    return graph


def unit_of(name: str) -> str:
    folder, *rest = name.split("/")
    return f"{folder}/entries" if name in ENTRIES else f"{folder}/{rest[0] if len(rest) > 1 else 'ground'}"


def within(folder: str, files: Graph, name_of: Callable[[str], str] = unit_of) -> Graph:
    """Unit of a folder -> the units of this folder that it imports; `name_of=str` leaves files as they are."""
    graph: Graph = defaultdict(set)
    for name, others in files.items():
        if name.startswith(f"{folder}/"):
            graph[name_of(name)] |= {name_of(other) for other in others if other.startswith(f"{folder}/")}
    return {unit: others - {unit} for unit, others in graph.items()}


def reach(graph: Graph) -> Graph:
    """Each node -> itself and all that it imports, directly or through others."""
    found: Graph = {}
    for start in graph:
        found[start], todo = {start}, [start]
        while todo:
            new = graph[todo.pop()] - found[start]
            found[start] |= new
            todo += new
    return found


def circles(graph: Graph) -> list[list[str]]:
    """Groups of nodes that all import each other, directly or through others: strongly connected components."""
    far = reach(graph)
    groups = {tuple(sorted(other for other in far[node] if node in far[other])) for node in graph}
    return sorted(list(group) for group in groups if len(group) > 1)


def floors(graph: Graph) -> dict[str, int]:
    """Floor of each node, from 1; nodes of one circle share a floor."""
    far, floor = reach(graph), {}
    for node in sorted(graph, key=lambda node: len(far[node])):  # what is below a node reaches fewer
        floor[node] = 1 + max((floor[other] for other in far[node] if node not in far[other]), default=0)
    return floor


def highest(graph: Graph) -> int:
    """The highest floor, entries not counted."""
    return max(floor for node, floor in floors(graph).items() if node not in ENTRIES and not node.endswith("/entries"))


def side_by_side(root: Path = ROOT) -> dict[str, int]:
    """Folder -> number of source files directly in it, __init__.py not counted."""
    count: dict[str, int] = defaultdict(int)
    for name in sources(root):
        count[name.rpartition("/")[0]] += not name.endswith("__init__.py")
    return count


def files_of_a_step(root: Path = ROOT) -> dict[str, set[str]]:
    """File -> its functions that run from the end of Run.log of step 1 to the end of that of step 2, in any thread.

    The run is a small one of `--method grpo`, in this process. Not counted: imports, methods that dataclasses generate
    (they have no file), and a loop that another thread entered earlier, such as a watchdog.
    """
    sys.path.insert(0, str(root))
    import trainer.__main__ as entry

    try:
        from trainer.run.run import Run
    except ImportError:  # commits in which trainer/ was flat
        from trainer.run import Run
    assert Path(entry.__file__).is_relative_to(root), f"{entry.__file__} is not in {root}: set PYTHONPATH"
    ours = tuple(f"{root}/{folder}/" for folder in FOLDERS)
    ran: set[CodeType] = set()
    counting = False

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if not counting or frame.f_code in ran or not frame.f_code.co_filename.startswith(ours):
            return
        caller: FrameType | None = frame
        while caller:
            if caller.f_code.co_name == "<module>" and caller.f_code.co_filename.startswith(ours):
                return  # part of an import
            caller = caller.f_back
        ran.add(frame.f_code)
        if event == "call" and frame.f_back and frame.f_back.f_code.co_filename.startswith(ours):
            ran.add(frame.f_back.f_code)  # a loop entered before the step, such as train(), runs on in it

    log = Run.log

    def counted_log(run: Any, step: int, metrics: Any) -> None:
        nonlocal counting
        log(run, step, metrics)
        counting = step == 1

    Run.log = counted_log
    threading.setprofile(lambda frame, event, argument: profile(frame, event, argument) if event == "call" else None)
    sys.setprofile(profile)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            small = ["--per-device-train-batch-size", "16", "--max-eval-rows", "4"]
            code = entry.main(["--method", "grpo", "--max-steps", "3", *small, "--output-dir", f"{scratch}/run"])
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        Run.log = log
    assert code == 0 and ran, f"exit code {code}, {len(ran)} functions seen"
    files: dict[str, set[str]] = defaultdict(set)
    for code in ran:  # a comprehension or lambda belongs to the function around it
        files[Path(code.co_filename).relative_to(root).as_posix()].add(code.co_qualname.split(".<locals>.<")[0])
    return dict(sorted(files.items()))


def show(title: str, rows: list[tuple[Any, ...]]) -> None:
    print(f"\n{title}")
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [f"{cell:{'>' if isinstance(cell, int) else '<'}{w}}" for cell, w in zip(row, widths, strict=True)]
        print("  " + "  ".join(cells).rstrip())


def show_sizes(root: Path) -> None:
    tests = [path.relative_to(root).as_posix() for path in (root / "tests").rglob("*.py")]
    size = {name: len((root / name).read_text(encoding="utf-8").splitlines()) for name in sources(root) + tests}
    beside = side_by_side(root)
    rows: list[tuple[Any, ...]] = [("folder", "lines", "files", "side by side")]
    for folder in [*sorted(beside), "tests"]:
        sizes = [lines for name, lines in size.items() if name.startswith(f"{folder}/")]
        rows.append((folder, sum(sizes), len(sizes), beside.get(folder, "")))
    rows.append(("the six folders", sum(size[name] for name in sources(root)), len(sources(root)), ""))
    show(f"Sizes; side by side: directly in the folder, without __init__.py (goal: {MOST_FILES})", rows)


def show_floors(title: str, graph: Graph) -> None:
    floor = floors(graph)
    rows = [(floor[node], node, " ".join(sorted(other.partition("/")[2] for other in graph[node])))
            for node in sorted(graph, key=lambda node: (floor[node], node))]  # fmt: skip
    show(f"{title}: {highest(graph)} floors without entries", rows)


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(prog="python -m tests.structure", description=__doc__.partition(": ")[2])
    parser.add_argument("--root", type=Path, default=ROOT, help="the clone to look at; for --step, PYTHONPATH names it")
    parser.add_argument("--files", action="store_true", help="also the floors of single files in rollout/ and trainer/")
    parser.add_argument(
        "--step", action="store_true", help="also train three steps, and list the files that step 2 runs"
    )
    args = parser.parse_args()
    root = args.root.resolve()

    files = file_graph(root)
    show_sizes(root)
    for folder, most in MOST_FLOORS.items():
        show_floors(f"Units of {folder}/ (goal: {most})", within(folder, files))
    for folder in ("rollout", "trainer") if args.files else ():
        show_floors(f"Files of {folder}/", within(folder, files, name_of=str))
    found = {"files": circles(files), "units": [c for folder in FOLDERS for c in circles(within(folder, files))]}
    for kind, groups in found.items():
        show(f"Circles of {kind} (goal: none)", [(" <-> ".join(group),) for group in groups] or [("none",)])
    if args.step:
        ran = files_of_a_step(root)
        rows = [(name, len(functions), " ".join(sorted(functions))) for name, functions in ran.items()]
        show(f"Files that one GRPO step runs, and their functions: {len(ran)} (goal: {MOST_IN_A_STEP})", rows)


if __name__ == "__main__":
    main()
