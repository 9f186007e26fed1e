"""Rules that every source file keeps: docstrings, shape comments, no swallowed exceptions. No torch needed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("bench", "data", "docs", "kernels", "losses", "rollout", "trainer")

FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
SHAPE = re.compile(r"# \((?:\.\.\.|[A-Z0-9]|\))")  # (B, T), (N,), (..., V), ()


def sources() -> list[Path]:
    return sorted([*ROOT.glob("*.py"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))])


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def is_triton(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("triton" in ast.unparse(decorator) for decorator in function.decorator_list)


def broken_rules(path: Path) -> list[str]:
    name, text = name_of(path), path.read_text(encoding="utf-8")
    found = []
    if not text.isascii():
        found.append(f"{name} holds characters that are not ASCII")
    if path.stem == "utils" or (path.stem == "common" and path.parent.name != "bench"):
        found.append(f"{name}: name the noun")
    if re.search(r"\b(TODO|FIXME|XXX)\b", text):
        found.append(f"{name}: finish it or leave it out")
    if text.strip():
        tree = tree_of(path)
        if not ast.get_docstring(tree):
            found.append(f"{name} has no docstring")
        handlers = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
        found += [
            f"{name}:{node.lineno} swallows an exception"
            for node in handlers
            if node.type is None or [type(line) for line in node.body] == [ast.Pass]
        ]
    return found


def test_files_keep_to_the_house_rules():
    assert [line for path in sources() for line in broken_rules(path)] == []


def tensor_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [arg for arg in every if arg.annotation and re.search(r"(?<!\w)Tensor\b", ast.unparse(arg.annotation))]


def public_functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods of public classes that a caller outside may use; autograd plumbing takes a ctx."""
    found = [node for node in tree.body if isinstance(node, FUNCTION)]
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            found += [method for method in node.body if isinstance(method, FUNCTION)]
    return [function for function in found if not function.name.startswith("_") and not is_triton(function)]


def missing_shapes(text: str) -> list[str]:
    lines = text.splitlines()
    return [
        f"{function.name}({arg.arg})"
        for function in public_functions(ast.parse(text))
        for arg in tensor_parameters(function)
        if not SHAPE.search(lines[(arg.end_lineno or arg.lineno) - 1])
    ]


PURE = sorted(path for folder in ("kernels", "losses") for path in (ROOT / folder).rglob("*.py"))


def test_tensor_parameters_carry_a_shape_comment():
    """`# (B, T) what it is` behind each."""
    missing = {name_of(path): missing_shapes(path.read_text(encoding="utf-8")) for path in PURE}
    assert not {name: found for name, found in missing.items() if found}


COMMENTED = """
def f(
    x: Tensor,  # (B, T) a
    y: torch.Tensor | None,  # (N,) b
    z: Tensor,  # () c
    n: int,
): ...
"""


def test_shape_comment_is_looked_for_on_the_parameter_line():
    assert missing_shapes(COMMENTED) == []
    assert missing_shapes("def f(x: Tensor, n: int): ...") == ["f(x)"]
    assert missing_shapes("def f(\n    x: Tensor,  # the input (see above)\n): ...") == ["f(x)"]
    assert missing_shapes("def _f(x: Tensor): ...") == []
