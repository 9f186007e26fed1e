"""Tools that come with the project: `calculator`, and `lookup` in a table that only the tool can see."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

MAX_LENGTH = 200  # characters of an expression
MAX_BITS = 512  # of a whole number on the way: powers of powers would otherwise never end
OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def calculator(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % ** and parentheses, for example (3+4)*2.
    """
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"the expression has more than {MAX_LENGTH} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{expression!r} is not an expression") from None
    value = _evaluate(tree)
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.12g}"
    return str(value)


def _evaluate(node: ast.AST) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _evaluate(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Pow) and _bits(left) * max(abs(right), 1) > MAX_BITS:
            raise ValueError("a power is too large")
        value = OPERATORS[type(node.op)](left, right)
        if isinstance(value, complex) or _bits(value) > MAX_BITS:
            raise ValueError("a number is too large, or not a real one")
        return value
    raise ValueError("only numbers, + - * / // % ** and parentheses are allowed")


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 64


def lookup(key: str, episode: Any) -> str:
    """Look up what is stored under a key.

    Args:
        key: The key.
    """
    table = episode.columns["table"]
    if key not in table:
        raise KeyError(key)
    return str(table[key])


lookup.needs_columns = ("table",)  # type: ignore[attr-defined]

BUILTIN: dict[str, Callable[..., Any]] = {"calculator": calculator, "lookup": lookup}
