"""code[:SECONDS]: 1 if the program in a completion passes the tests of its row, else 0.

The program is the last fenced block of the completion, or all of it if there is none. Columns of the row:

    tests        assert lines (a list or one text), or a text with check(candidate), as in HumanEval (also as `test`)
    entry_point  the function that is passed to check()

A completion may also continue a function that the prompt began: prompt and completion are then run together. A row
without tests gets None.

Every program runs in its own interpreter: in an empty folder, with limits on time, memory, file size and processes, and
without network (a network namespace if the system allows it, otherwise connections are refused). This protects against
accidents. It is not a security boundary: run an untrusted policy in a container.

Tests that only compare return values, or arguments changed in place, with data (apart() defines the forms) run in
another process than the program, which receives arguments as data, answers with data, and never sees the tests
(code_child.py). Changing builtins, modules, frames or __eq__, or writing files, then gains a program nothing. What can
still earn an undeserved reward:

    All other tests (classes, attributes and items of results, expected exceptions, globals, functions as arguments,
    modules such as sys or unittest, many calls) run in the program's own process. There an __eq__ that is always true
    passes, and code that walks frames can read the tests.
    Functions other than the tested one that the prompt defines and the tests use (encode in a test of decode): a
    program may redefine them.
    As root, if user namespaces are refused, a program can read the memory of the process that runs the tests.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import re
import secrets
import subprocess
import symtable
import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from data.errors import UserError
from rollout.rewards.code_child import ALIASES, PURE
from rollout.rewards.functions import text_of
from rollout.rewards.workers import kill_group

CHILD = Path(__file__).with_name("code_child.py")
SECONDS = 10.0
START_SECONDS = 5.0  # for the interpreter, on a busy machine
MEMORY_GB = 1.0
FILE_MB = 16.0
AT_ONCE = 8
FENCE = re.compile(r"^[ ]{0,3}(```+|~~~+)[^\n`]*\n(.*?)(?:^[ ]{0,3}\1[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
KEPT = ("PATH", "LANG", "LC_ALL", "SYSTEMROOT")  # environment variables that are passed on: no keys, no tokens


def code(argument: str | None) -> Callable[..., list[float | None]]:
    seconds = SECONDS
    if argument is not None:
        try:
            seconds = float(argument)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds <= 3600:
            raise UserError(f"reward_funcs=code:{argument}: write code:SECONDS, the time one program may take")

    def score(
        completions: Sequence[Any],
        prompts: Sequence[Any],
        tests: Sequence[Any] | None = None,
        test: Sequence[Any] | None = None,
        entry_point: Sequence[Any] | None = None,
    ) -> list[float | None]:
        if tests is None and test is None:
            raise UserError("the data has neither a column 'tests' nor 'test'")
        nothing = [None] * len(completions)
        rows = zip(completions, prompts, tests or nothing, test or nothing, entry_point or nothing, strict=True)
        jobs = [_job(text_of(done), prompt, first or second, entry) for done, prompt, first, second, entry in rows]
        with ThreadPoolExecutor(min(AT_ONCE, os.cpu_count() or 1)) as threads:
            return list(threads.map(lambda job: None if job is None else float(passes(*job, seconds)), jobs))

    return score


def _job(text: str, prompt: Any, tests: Any, entry_point: str | None) -> tuple[str, str] | None:
    """(program, tests), or None without tests."""
    tests = "\n".join(str(line) for line in tests) if isinstance(tests, (list, tuple)) else tests
    if not tests or not str(tests).strip():
        return None
    tests = str(tests)
    if entry_point and re.search(r"^def check\(", tests, re.MULTILINE):
        tests = f"{tests}\n\ncheck({entry_point})\n"
    return program(text, prompt, entry_point), tests


def program(text: str, prompt: Any, entry_point: str | None = None) -> str:
    """What to run: the completion's code, after the prompt's if that is code too."""
    found = last_block(text)
    begun = prompt if isinstance(prompt, str) else str(prompt[-1].get("content") or "")
    begun = begun if isinstance(prompt, str) else last_block(begun)
    if not _is_code(begun, entry_point):
        return found
    whole = f"{begun.rstrip()}\n\n{found}"  # the completion repeats the whole function: the later definition counts
    if _defines(found, entry_point) and _parses(whole):
        return whole
    return begun + found if isinstance(prompt, str) else f"{begun.rstrip()}\n{found}"


def last_block(text: str) -> str:
    """
    >>> last_block("First\\n```python\\nx = 1\\n```\\nthen\\n```\\nx = 2\\n```\\n")
    'x = 2\\n'
    """
    blocks = FENCE.findall(text)
    return textwrap.dedent(blocks[-1][1]) if blocks else text


def _is_code(text: str, entry_point: str | None) -> bool:
    """Whether it is Python, perhaps a function without its body. A word alone parses too, so it needs a definition."""
    return any(_parses(text + end) for end in ("", "\n    pass\n")) and bool(
        re.search(r"^(def|class|import|from|@)\b", text, re.MULTILINE) or _defines(text, entry_point)
    )


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # odd text makes the parser raise these
        return False
    return True


def _defines(text: str, name: str | None) -> bool:
    return bool(name and re.search(rf"^(async def|def|class) {re.escape(name)}\b", text, re.MULTILINE))


def passes(source: str, tests: str, seconds: float) -> bool:
    """Whether the tests ran to their end; a program that exits early has not passed."""
    found = apart(tests)
    verdict = _verdict(source, tests, found, seconds)
    if found is not None and verdict == "unfit":  # only seen at run time: a test that passes a function to the program
        verdict = _verdict(source, tests, None, seconds)
    return verdict == "passed"


DATA_TYPES = (bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple)
METHODS = {name for kind in DATA_TYPES for name in dir(kind) if not name.startswith("_")}
CALLABLE = {  # builtins that tests may use apart from the program; not eval, next, type, open ...
    "__name__", "abs", "all", "any", "bin", "bytearray", "chr", "divmod", "enumerate", "filter", "hex", "isinstance",
    "len", "map", "max", "min", "oct", "ord", "pow", "print", "range", "repr", "reversed", "round", "sorted", "sum",
    "zip", *(kind.__name__ for kind in DATA_TYPES),
}  # fmt: skip
BY_NAME = {"__import__", "compile", "eval", "exec", "globals", "input", "locals", "vars"}  # reach the program by name
STATE = ("*", "seed", "setcontext", "seterr", "setstate")  # of modules: change what the program does
MANY = 2000  # calls of the program, which are slow from another process
STATEMENTS = (
    ast.Assert, ast.Assign, ast.AugAssign, ast.Break, ast.Continue, ast.Expr, ast.For, ast.FunctionDef, ast.If,
    ast.Import, ast.ImportFrom, ast.Pass, ast.Return,
)  # fmt: skip
NOT_DATA = (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)


def apart(tests: str) -> dict[str, Any] | None:
    """{"names": what the tests take from the program, "imports": their import statements} if they may mean the same in
    another process than the program, else None. Depends on the tests only, never on the program."""
    try:
        tree = ast.parse(tests)
        names = _global_names(symtable.symtable(tests, "<tests>", "exec"))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # odd text makes the parser raise these
        return None
    # If only builtins are named, the program defines one of them: one that has to define `sum` does so.
    only_builtins = names <= {*dir(builtins), *PURE, *ALIASES}
    names = names if only_builtins else names - {*dir(builtins)}
    nodes = list(ast.walk(tree))
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    imported = {alias for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names}
    modules = {*PURE, *ALIASES, *((alias.asname or alias.name).partition(".")[0] for alias in imported)}
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    callees = {node.func for node in calls}
    callees |= {x for node in calls if _root(node.func) in {*own, "map"} for x in node.args}  # check(candidate)

    def fits(node: ast.AST) -> bool:
        match node:
            case ast.Import(names=aliases):
                return all(alias.name.partition(".")[0] in PURE for alias in aliases)
            case ast.ImportFrom(module=module, names=aliases):
                return str(module).partition(".")[0] in PURE and not any(alias.name in STATE for alias in aliases)
            case ast.FunctionDef(decorator_list=decorators):
                return not decorators
            case ast.Name(id=name) if name in BY_NAME:
                return False
            case ast.Name(id=name) if name in names - {*PURE, *ALIASES} or (name in PURE and node in callees):
                is_class = name[:1].isupper() and "_" not in name  # tests may do anything with its objects
                return node in callees and not is_class and name not in modules
            case ast.Name(id=name):
                return name in CALLABLE or name not in dir(builtins)
            case ast.Attribute(attr=name):
                return isinstance(node.ctx, ast.Load) and (
                    name not in STATE if _root(node) in modules else name in METHODS
                )
            case ast.Call(func=ast.Name(id="range"), args=args):
                return not any(
                    isinstance(x, ast.Constant) and isinstance(x.value, int) and x.value > MANY for x in args
                )
            case ast.Call(func=ast.Name(id="str" | "repr"), args=args):  # a subclass may print differently
                return not any(isinstance(x, ast.Call) and _root(x.func) in names | own for x in args)
            case ast.Compare(ops=ops, comparators=sides):
                return not any(
                    isinstance(op, (ast.Is, ast.IsNot)) and not _is_singleton(side)
                    for op, side in zip(ops, sides, strict=True)
                )
            case ast.stmt():
                return isinstance(node, STATEMENTS)
        return not isinstance(node, NOT_DATA)

    if not all(fits(node) for node in nodes):
        return None
    imports = [ast.unparse(node) for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    return {"names": sorted(names), "imports": "\n".join(imports)}


def _global_names(top: symtable.SymbolTable) -> set[str]:
    """Names that the tests read and do not define."""
    tables = [top]
    for table in tables:
        tables += table.get_children()
    read = {x.get_name() for t in tables for x in t.get_symbols() if x.is_referenced() and (t is top or x.is_global())}
    return read - {x.get_name() for x in top.get_symbols() if x.is_assigned() or x.is_imported() or x.is_namespace()}


def _root(node: ast.expr) -> str | None:
    """datetime of datetime.timezone.utc."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _is_singleton(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and any(node.value is x for x in (None, True, False))


def _verdict(source: str, tests: str, apart: dict[str, Any] | None, seconds: float) -> str:
    """passed, failed or unfit."""
    secret = secrets.token_hex(16)
    limits = {"seconds": seconds, "memory_gb": MEMORY_GB, "file_mb": FILE_MB}
    job = json.dumps({"program": source, "tests": tests, "apart": apart, "limits": limits, "secret": secret})
    with tempfile.TemporaryDirectory(prefix="code-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={name: os.environ[name] for name in KEPT if name in os.environ}
            | {"HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(job.encode(), timeout=seconds + START_SECONDS)
        except subprocess.TimeoutExpired:
            output = b""
        finally:
            _end(process)
    word, _, verdict = output.decode("ascii", "replace").partition(" ")
    return verdict if word == secret else "failed"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill it and whatever it may have started."""
    kill_group(process)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
