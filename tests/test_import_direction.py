"""Imports point downward: trainer over rollout over data and kernels; losses, kernels and data stand alone."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

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

# Everything else a folder may import besides the standard library; no entry: anything.
THIRD_PARTY = {"kernels": {"torch", "triton"}, "losses": {"torch"}}

# data turns rows into ids and masks: a tokenizer, never a model.
NO_MODELS_IN_DATA = {"peft", "accelerate", "vllm", "torch.nn", "torch.optim"}

# Collectives belong to one file; the others named here use torch's fsdp, tensor and checkpoint modules, or own the
# separate process group for weights.
DISTRIBUTED = ("trainer/parallel", "trainer/policy/sharding.py", "trainer/policy/optim.py", "trainer/run/checkpoint.py",
               "trainer/policy/sharding.py", "trainer/run/checkpoint.py", "trainer/policy/optim.py", "rollout/sync",
               "rollout/servers/worker")  # fmt: skip


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Dotted names a file imports anywhere in it, also inside functions; relative ones made absolute."""
    names: set[str] = set()
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return names


def tops(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("folder", ALLOWED)
def test_folder_imports_only_those_below_it(folder):
    for path in sources(folder):
        extra = (tops(imported(path)) & OURS) - ALLOWED[folder] - {folder}
        assert not extra, f"{path.relative_to(ROOT)} imports {sorted(extra)}"


@pytest.mark.parametrize("folder", THIRD_PARTY)
def test_folder_depends_on_little(folder):
    for path in sources(folder):
        extra = tops(imported(path)) - THIRD_PARTY[folder] - {folder} - set(sys.stdlib_module_names)
        assert not extra, f"{path.relative_to(ROOT)} imports {sorted(extra)}"


def test_data_knows_no_model():
    for path in sources("data"):
        names = imported(path)
        extra = {name for name in names if any(f"{name}.".startswith(f"{word}.") for word in NO_MODELS_IN_DATA)}
        extra |= {name for name in names if name.startswith("transformers.") and "Model" in name}
        assert not extra, f"{path.relative_to(ROOT)} imports {sorted(extra)}"


def uses_distributed(path: Path) -> bool:
    if any(f"{name}.".startswith("torch.distributed.") for name in imported(path)):
        return True
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed" for node in ast.walk(tree))


def test_torch_distributed_stays_in_its_files():
    for folder in ("data", "kernels", "losses", "rollout", "trainer"):
        for path in sources(folder):
            name = path.relative_to(ROOT).as_posix()
            assert name.startswith(DISTRIBUTED) or not uses_distributed(path), f"{name} uses torch.distributed"


def reads_argv(path: Path) -> bool:
    """Touches sys.argv, or a parser that reads it."""
    names = tops(imported(path)) & {"argparse", "click", "fire"}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return bool(names) or any(
        isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.argv" for node in ast.walk(tree)
    )


@pytest.mark.parametrize("folder", ["kernels", "losses"])
def test_pure_folders_touch_no_argv_environment_or_files(folder):
    for path in sources(folder):
        assert not reads_argv(path), f"{path.relative_to(ROOT)} reads argv"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = ast.unparse(node) if isinstance(node, ast.Attribute | ast.Name) else ""
            assert text not in ("os.environ", "os.getenv", "open"), (
                f"{path.relative_to(ROOT)}:{node.lineno} uses {text}"
            )


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
