"""The numbers of DESIGN's tenth decision. Raising one is a line in a diff that a reviewer sees. No torch needed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("bench", "data", "kernels", "losses", "rollout", "trainer")

FILE_LINES = 400
KERNEL_FILE_LINES = 800
METHOD_FILE_LINES = 250
FUNCTION_LINES = 80
TRAIN_LINES = 120
CONFIG_FIELDS = 25
NESTING = 4

COMPOUND = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
SHAPE = re.compile(r"# \((?:\.\.\.|[A-Z0-9]|\))")  # (B, T), (N,), (..., V), ()


def sources() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, FUNCTION)]


def is_triton(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("triton" in ast.unparse(decorator) for decorator in function.decorator_list)


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def depth(node: ast.AST, inside: int = 0) -> int:
    """Deepest stack of compound statements; an elif stands at the level of its if; nested functions count alone."""
    deepest = inside
    for field, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        for child in children:
            if not isinstance(child, ast.AST) or isinstance(child, (*FUNCTION, ast.ClassDef)):
                continue
            is_elif = (
                isinstance(node, ast.If) and field == "orelse" and len(children) == 1 and isinstance(child, ast.If)
            )
            deepest = max(deepest, depth(child, inside + (isinstance(child, COMPOUND) and not is_elif)))
    return deepest


def file_limit(path: Path) -> int:
    name = name_of(path)
    if name.startswith("kernels/"):
        return KERNEL_FILE_LINES
    return METHOD_FILE_LINES if name.startswith("trainer/methods/") else FILE_LINES


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_file_keeps_to_its_budget(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= file_limit(path), f"{name_of(path)} has {lines} lines, at most {file_limit(path)}"
    for function in functions(tree_of(path)):
        limit = TRAIN_LINES if function.name == "train" else FUNCTION_LINES
        where = f"{name_of(path)}:{function.lineno} {function.name}"
        assert length(function) <= limit or is_triton(function), (
            f"{where} has {length(function)} lines, at most {limit}"
        )
        assert depth(function) <= NESTING, f"{where} nests {depth(function)} deep, at most {NESTING}"


@pytest.mark.parametrize("path", sorted((ROOT / "trainer").rglob("*.py")), ids=name_of)
def test_config_classes_are_small(path):
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
            fields = [line for line in node.body if isinstance(line, ast.AnnAssign)]
            assert len(fields) <= CONFIG_FIELDS, f"{name_of(path)} {node.name} has {len(fields)} fields"


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_file_keeps_to_the_house_rules(path):
    text = path.read_text(encoding="utf-8")
    assert text.isascii(), f"{name_of(path)} holds characters that are not ASCII"
    assert path.stem != "utils" and (path.stem != "common" or path.parent.name == "bench"), (
        f"{name_of(path)}: name the noun"
    )
    assert not re.search(r"\b(TODO|FIXME|XXX)\b", text), f"{name_of(path)}: finish it or leave it out"
    if text.strip():
        tree = tree_of(path)
        assert ast.get_docstring(tree), f"{name_of(path)} has no docstring"
        for node in ast.walk(tree):
            bare = isinstance(node, ast.ExceptHandler) and node.type is None
            silent = isinstance(node, ast.ExceptHandler) and [type(line) for line in node.body] == [ast.Pass]
            assert not bare and not silent, f"{name_of(path)}:{node.lineno} swallows an exception"


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


@pytest.mark.parametrize("path", PURE, ids=name_of)
def test_tensor_parameters_carry_a_shape_comment(path):
    missing = missing_shapes(path.read_text(encoding="utf-8"))
    assert not missing, f"{name_of(path)}: no `# (B, T) what it is` after {', '.join(missing)}"


DEEP = """
def f():
    for a in b:
        if a:
            pass
        elif b:
            pass
        else:
            with c:
                try:
                    x
                except E:
                    y
"""

COMMENTED = """
def f(
    x: Tensor,  # (B, T) a
    y: torch.Tensor | None,  # (N,) b
    z: Tensor,  # () c
    n: int,
): ...
"""


def test_depth_counts_compound_statements():
    assert depth(functions(ast.parse(DEEP))[0]) == 4
    assert depth(functions(ast.parse("def f():\n if a:\n  x\n elif b:\n  y\n elif c:\n  z"))[0]) == 1
    assert depth(functions(ast.parse("def f():\n if a:\n  def g():\n   if b:\n    x"))[0]) == 1


def test_shape_comment_is_looked_for_on_the_parameter_line():
    assert missing_shapes(COMMENTED) == []
    assert missing_shapes("def f(x: Tensor, n: int): ...") == ["f(x)"]
    assert missing_shapes("def f(\n    x: Tensor,  # the input (see above)\n): ...") == ["f(x)"]
    assert missing_shapes("def _f(x: Tensor): ...") == []
