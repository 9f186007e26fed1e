"""Imports point downward: trainer over rollout over data and kernels; losses, kernels and data stand alone.

Inside data, rollout and trainer, sub-packages import downward too. No torch needed.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Set
from pathlib import Path

import pytest

from tests import structure

ROOT = Path(__file__).resolve().parents[1]

# Which of our folders each folder may import, besides itself.
ALLOWED = {
    "kernels": set(),
    "losses": set(),
    "data": set(),
    "rollout": {"data", "kernels"},
    "trainer": {"data", "kernels", "losses", "rollout"},
    "bench": {"data", "kernels", "losses", "rollout", "trainer"},
}
OURS = {*ALLOWED, "tests"}
# A command that reads axolotl's files as the trainer does imports their translation, inside a function.
ALSO_ALLOWED = {"rollout/serve.py": {"trainer"}}

# Units of a folder, from the ground up: each imports only those before it. tests/structure.py says what a unit is.
ORDER = {
    "data": "ground command formats rows entries",
    "rollout": "ground schedule servers sync engines episodes rewards gyms entries",
    "trainer": "recipes parallel files config translate metrics policy run rl offline ebft methods entries",
}

# Core files import no edge at module level; a run imports an edge where it attaches. An edge's options are flags.
EDGES = ("rollout/servers", "rollout/sync", "rollout/gyms", "rollout/episodes", "rollout/engines/vllm.py",
         "rollout/engines/weights.py", "rollout/engines/probe.py", "rollout/engines/load.py", "rollout/serve.py",
         "trainer/translate", "trainer/metrics/report.py", "trainer/metrics/compare.py", "trainer/metrics/card.py",
         "trainer/metrics/page.py", "trainer/metrics/samples.py",
         "trainer/rl/servers.py", "trainer/rl/teacher_server.py", "trainer/policy/weights.py", "trainer/plan.py",
         "trainer/push.py", "trainer/evaluate.py", "trainer/harness.py", "trainer/generate.py", "trainer/export.py",
         "trainer/report.py", "trainer/notebook.py", "trainer/from_trl.py", "data/show.py",
         "data/reasoning_gym.py")  # fmt: skip
CORE = ("kernels", "losses", "data/rows", "data/packing.py", "data/strided.py", "data/loader.py", "data/types.py",
        "rollout/engine.py", "rollout/engines", "rollout/rewards", "rollout/schedule", "trainer/methods", "trainer/rl",
        "trainer/offline", "trainer/ebft", "trainer/policy", "trainer/run")  # fmt: skip

# Everything else a folder may import besides the standard library; no entry: anything.
THIRD_PARTY = {"kernels": {"torch", "triton"}, "losses": {"torch"}}

# data turns rows into ids and masks: a tokenizer, never a model.
NO_MODELS_IN_DATA = {"peft", "accelerate", "vllm", "torch.nn", "torch.optim"}

# Collectives belong to one file; the others named here use torch's fsdp, tensor and checkpoint modules, or own the
# separate process group for weights.
DISTRIBUTED = ("trainer/parallel", "trainer/policy/sharding.py", "trainer/policy/optim.py", "trainer/run/checkpoint.py",
               "rollout/sync", "rollout/servers/worker")  # fmt: skip


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.fixture(scope="module")
def files() -> structure.Graph:
    return structure.file_graph()


def imported(path: Path) -> frozenset[str]:
    return structure.imported(path, ROOT)


def tops(names: Set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def test_folders_import_only_those_below_them_and_little_else():
    for folder, below in ALLOWED.items():
        for path in sources(folder):
            found = tops(imported(path))
            extra = (found & OURS) - below - {folder} - ALSO_ALLOWED.get(path.relative_to(ROOT).as_posix(), set())
            if folder in THIRD_PARTY:
                extra |= found - THIRD_PARTY[folder] - {folder} - set(sys.stdlib_module_names)
            assert not extra, f"{path.relative_to(ROOT)} imports {sorted(extra)}"


def is_edge(path: Path) -> bool:
    return path.relative_to(ROOT).as_posix().startswith(EDGES) or path.name == "__main__.py"


def core_files() -> list[Path]:
    paths = [path for name in CORE for path in ([ROOT / name] if name.endswith(".py") else sources(name))]
    return [path for path in paths if not is_edge(path)]


def test_readme_states_the_size_of_the_core():
    stated = re.search(r"core is ([\d,]+) lines", (ROOT / "README.md").read_text(encoding="utf-8"))
    counted = sum(path.read_text(encoding="utf-8").count("\n") for path in core_files())
    assert stated and abs(int(stated[1].replace(",", "")) - counted) <= 250, f"the core has {counted} lines"


def test_core_imports_no_edge_at_module_level():
    edges = {edge.removesuffix(".py").replace("/", ".") for edge in EDGES}
    for path in core_files():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = [node.module for node in tree.body if isinstance(node, ast.ImportFrom) and node.module]
        names = [name for name in names if not name.endswith("options")]
        found = {name for name in names if any(f"{name}.".startswith(f"{edge}.") for edge in edges)}
        assert not found, f"{path.relative_to(ROOT)} imports {sorted(found)}"


def test_sub_packages_import_only_those_below_them(files):
    for folder, names in ORDER.items():
        units = structure.within(folder, files)
        order = [f"{folder}/{unit}" for unit in names.split()]
        assert sorted(units) == sorted(order), "ORDER names every sub-package"
        for unit, others in units.items():
            above = {other for other in others if order.index(other) > order.index(unit)}
            assert not above, f"{unit} imports {sorted(above)}"


def test_nothing_imports_in_a_circle(files):
    assert structure.circles(files) == []
    assert [c for folder in structure.FOLDERS for c in structure.circles(structure.within(folder, files))] == []


def test_floors_are_few_and_folders_not_crowded(files):
    for folder, most in structure.MOST_FLOORS.items():
        assert structure.highest(structure.within(folder, files)) <= most, folder
    for folder, count in structure.side_by_side().items():
        most = structure.FILES_ASIDE.get(folder, structure.MOST_FILES)
        assert count <= most, f"{folder} has {count} files side by side, more than {most}: make a sub-package"


def test_data_knows_no_model():
    for path in sources("data"):
        names = imported(path)
        extra = {name for name in names if any(f"{name}.".startswith(f"{word}.") for word in NO_MODELS_IN_DATA)}
        extra |= {name for name in names if name.startswith("transformers.") and "Model" in name}
        assert not extra, f"{path.relative_to(ROOT)} imports {sorted(extra)}"


def has_attribute(path: Path, name: str) -> bool:
    """Whether the code, not only its text, has `a.b`."""
    text = path.read_text(encoding="utf-8")
    return name in text and any(
        isinstance(node, ast.Attribute) and ast.unparse(node) == name for node in ast.walk(ast.parse(text))
    )


def uses_distributed(path: Path) -> bool:
    imports = any(f"{name}.".startswith("torch.distributed.") for name in imported(path))
    return imports or has_attribute(path, "torch.distributed")


def test_torch_distributed_stays_in_its_files():
    for folder in ("data", "kernels", "losses", "rollout", "trainer"):
        for path in sources(folder):
            name = path.relative_to(ROOT).as_posix()
            assert name.startswith(DISTRIBUTED) or not uses_distributed(path), f"{name} uses torch.distributed"


def reads_argv(path: Path) -> bool:
    """Touches sys.argv, or a parser that reads it."""
    return bool(tops(imported(path)) & {"argparse", "click", "fire"}) or has_attribute(path, "sys.argv")


def test_pure_folders_touch_no_argv_environment_or_files():
    for path in [*sources("kernels"), *sources("losses")]:
        name = path.relative_to(ROOT)
        assert not reads_argv(path), f"{name} reads argv"
        assert not has_attribute(path, "os.environ") and not has_attribute(path, "os.getenv"), name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.Name) and node.id == "open"), f"{name}:{node.lineno} opens a file"


def test_losses_never_leave_the_device():
    for path in sources("losses"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            assert not (is_call and node.func.attr in ("item", "tolist", "cpu")), (
                f"{path.relative_to(ROOT)}:{node.lineno} calls .{node.func.attr}()"
            )


def test_checks_find_what_they_look_for(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "losses" / "deep").mkdir(parents=True)
    path = tmp_path / "losses" / "deep" / "bad.py"
    path.write_text("import torch.distributed as d\ndef f():\n from data import x\n from ..top import y\n sys.argv\n")
    assert {"torch.distributed", "data", "data.x", "losses.top", "losses.top.y"} <= imported(path)
    assert uses_distributed(path) and reads_argv(path)


CLONE = {
    "data/types.py": "",
    "data/rows/a.py": "def f():\n    from data import types\n    from . import b\n",
    "data/rows/b.py": "if TYPE_CHECKING:\n    from data.rows.a import f\n",
    "data/show.py": "import data.rows.a\nimport importlib\nimportlib.import_module('trainer.cli')\n",
    "trainer/cli.py": "from data.show import x\n",
}


def test_structure_finds_circles_and_floors(tmp_path):
    for name, text in CLONE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    files = structure.file_graph(tmp_path)
    assert files["data/rows/a.py"] == {"data/types.py", "data/rows/b.py"}
    assert files["data/show.py"] == {"data/rows/a.py"} and files["trainer/cli.py"] == {"data/show.py"}
    assert structure.circles(files) == [["data/rows/a.py", "data/rows/b.py"]]
    units = structure.within("data", files)
    assert structure.floors(units) == {"data/ground": 1, "data/rows": 2, "data/entries": 3}
    assert structure.highest(units) == 2 and structure.circles(units) == []
    below = structure.floors(structure.within("data", files, name_of=str))
    assert below == {"data/types.py": 1, "data/rows/a.py": 2, "data/rows/b.py": 2, "data/show.py": 3}
    assert structure.side_by_side(tmp_path) == {"data": 2, "data/rows": 2, "trainer": 1}
