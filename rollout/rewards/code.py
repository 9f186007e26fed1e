"""code[:SECONDS]: 1 if the program in a completion passes its row's tests, otherwise 0.

The program is the last fenced block of the completion, or the whole completion if there is none. Columns of the row:

    tests        assert lines (a list or one text), or a text with check(candidate), as in HumanEval (also as `test`)
    entry_point  the function that is passed to check()

A completion may also continue a function from the prompt: prompt and completion then run together. A row without tests
gets None.

Every program runs in its own interpreter, in an empty folder, with limits on time, memory, file size and processes, and
without network (a network namespace if the system allows it, otherwise connections are blocked). If the trainer is
root, programs run as the user nobody (code_child.py, confine). This protects against accidents. It is not a security
boundary (docs/rewards.md lists what is enforced): run an untrusted policy in a container.

Tests that only compare return values, or arguments modified in place, with data (isolate() defines the forms) run in a
separate process. The program receives arguments as data, replies with data and never sees the tests (code_child.py).
Patching builtins, modules, frames or __eq__, or writing files, then gains nothing. A program can still earn an
undeserved reward as follows:

    All other tests (classes, attributes and items of results, expected exceptions, globals, functions as arguments,
    modules such as sys or unittest, many calls) run in the program's process. There an __eq__ that is always true
    passes, and code that walks frames can read the tests.
    A program may redefine functions from the prompt that the tests use in addition to the tested function (encode in a
    test of decode).
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
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
from data.limits import SLOWDOWN, WorkLimit, process_seconds
from rollout.rewards.code_child import ALIASES, PURE
from rollout.rewards.functions import text_of
from rollout.rewards.workers import kill_group

CHILD = Path(__file__).with_name("code_child.py")
SECONDS = 10.0  # of CPU time
START_SECONDS = 5.0  # to start the interpreter
MEMORY_GB = 1.0
FILE_MB = 16.0
MAX_PROGRAMS = 8  # concurrent programs
FENCE = re.compile(r"^[ ]{0,3}(```+|~~~+)[^\n`]*\n(.*?)(?:^[ ]{0,3}\1[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
PASSED_VARIABLES = ("PATH", "LANG", "LC_ALL", "SYSTEMROOT")  # environment variables of a program: no keys, no tokens


def code(argument: str | None) -> Callable[..., list[float | None]]:
    seconds = SECONDS
    if argument is not None:
        try:
            seconds = float(argument)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds <= 3600:
            raise UserError(
                f"reward_funcs=code:{argument}: write code:SECONDS, the CPU time limit of a program, at most 3600"
            )

    def score(
        completions: Sequence[Any],
        prompts: Sequence[Any],
        tests: Sequence[Any] | None = None,
        test: Sequence[Any] | None = None,
        entry_point: Sequence[Any] | None = None,
    ) -> list[float | None]:
        if tests is None and test is None:
            raise UserError("the data has neither a column 'tests' nor 'test'")
        missing = [None] * len(completions)
        rows = zip(completions, prompts, tests or missing, test or missing, entry_point or missing, strict=True)
        jobs = [_job(text_of(text), prompt, first or second, entry) for text, prompt, first, second, entry in rows]
        with ThreadPoolExecutor(min(MAX_PROGRAMS, os.cpu_count() or 1)) as threads:
            return list(threads.map(lambda job: None if job is None else float(passes(*job, seconds)), jobs))

    return score


def _job(text: str, prompt: Any, tests: Any, entry_point: str | None) -> tuple[str, str] | None:
    """Return (program, tests), or None without tests."""
    tests = "\n".join(str(line) for line in tests) if isinstance(tests, (list, tuple)) else tests
    if not tests or not str(tests).strip():
        return None
    tests = str(tests)
    if entry_point and re.search(r"^def check\(", tests, re.MULTILINE):
        tests = f"{tests}\n\ncheck({entry_point})\n"
    return program(text, prompt, entry_point), tests


def program(text: str, prompt: Any, entry_point: str | None = None) -> str:
    """Return the code to run: the completion's, after the prompt's if the prompt is code too."""
    block = last_block(text)
    prefix = prompt if isinstance(prompt, str) else last_block(str(prompt[-1].get("content") or ""))
    if not _is_code(prefix, entry_point):
        return block
    both = f"{prefix.rstrip()}\n\n{block}"  # if the completion repeats the function, its definition wins
    if _defines(block, entry_point) and _parses(both):
        return both
    return prefix + block if isinstance(prompt, str) else f"{prefix.rstrip()}\n{block}"


def last_block(text: str) -> str:
    """
    >>> last_block("First\\n```python\\nx = 1\\n```\\nthen\\n```\\nx = 2\\n```\\n")
    'x = 2\\n'
    """
    blocks = FENCE.findall(text)
    return textwrap.dedent(blocks[-1][1]) if blocks else text


def _is_code(text: str, entry_point: str | None) -> bool:
    """Return whether the text is Python, perhaps a function without its body.

    A single word also parses, so a definition or an import is required.
    """
    return any(_parses(text + end) for end in ("", "\n    pass\n")) and bool(
        re.search(r"^(def|class|import|from|@)\b", text, re.MULTILINE) or _defines(text, entry_point)
    )


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the parser raises all of these on odd text
        return False
    return True


def _defines(text: str, name: str | None) -> bool:
    return bool(name and re.search(rf"^(async def|def|class) {re.escape(name)}\b", text, re.MULTILINE))


def passes(source: str, tests: str, seconds: float) -> bool:
    """Return whether the tests ran to their end; a program that exits early fails."""
    isolation = isolate(tests)
    verdict = _verdict(source, tests, isolation, seconds)
    if isolation is not None and verdict == "unfit":  # detected at run time: a test passes a function to the program
        verdict = _verdict(source, tests, None, seconds)
    return verdict == "passed"


DATA_TYPES = (bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple)
METHODS = {name for kind in DATA_TYPES for name in dir(kind) if not name.startswith("_")}
CALLABLE = {  # builtins that isolated tests may use; not eval, next, type, open ...
    "__name__", "abs", "all", "any", "bin", "bytearray", "chr", "divmod", "enumerate", "filter", "hex", "isinstance",
    "len", "map", "max", "min", "oct", "ord", "pow", "print", "range", "repr", "reversed", "round", "sorted", "sum",
    "zip", *(kind.__name__ for kind in DATA_TYPES),
}  # fmt: skip
REFLECTION = {"__import__", "compile", "eval", "exec", "globals", "input", "locals", "vars"}  # find names at run time
MUTATORS = ("*", "seed", "setcontext", "seterr", "setstate")  # module attributes that change the program's behaviour
MAX_CALLS = 2000  # longest range() in isolated tests, because calls between processes are slow
STATEMENTS = (
    ast.Assert, ast.Assign, ast.AugAssign, ast.Break, ast.Continue, ast.Expr, ast.For, ast.FunctionDef, ast.If,
    ast.Import, ast.ImportFrom, ast.Pass, ast.Return,
)  # fmt: skip
NOT_DATA = (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)


def isolate(tests: str) -> dict[str, Any] | None:
    """Return how to run the tests in a separate process, or None if their meaning could change there.

    {"names": names that the tests take from the program, "imports": their import statements}. The result depends only
    on the tests, never on the program.
    """
    try:
        tree = ast.parse(tests)
        names = _global_names(symtable.symtable(tests, "<tests>", "exec"))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the parser raises all of these on odd text
        return None
    # If the tests name only builtins, the program defines one of them, e.g. its own `sum`.
    only_builtins = names <= {*dir(builtins), *PURE, *ALIASES}
    names = names if only_builtins else names - {*dir(builtins)}
    nodes = list(ast.walk(tree))
    test_functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    imported = {alias for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names}
    modules = {*PURE, *ALIASES, *((alias.asname or alias.name).partition(".")[0] for alias in imported)}
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    callees = {node.func for node in calls}
    # check(candidate) calls its argument.
    callees |= {x for node in calls if _root(node.func) in {*test_functions, "map"} for x in node.args}

    def fits(node: ast.AST) -> bool:
        match node:
            case ast.Import(names=aliases):
                return all(alias.name.partition(".")[0] in PURE for alias in aliases)
            case ast.ImportFrom(module=module, names=aliases):
                return str(module).partition(".")[0] in PURE and not any(alias.name in MUTATORS for alias in aliases)
            case ast.FunctionDef(decorator_list=decorators):
                return not decorators
            case ast.Name(id=name) if name in REFLECTION:
                return False
            case ast.Name(id=name) if name in names - {*PURE, *ALIASES} or (name in PURE and node in callees):
                is_class = name[:1].isupper() and "_" not in name  # tests may use its objects in any way
                return node in callees and not is_class and name not in modules
            case ast.Name(id=name):
                return name in CALLABLE or name not in dir(builtins)
            case ast.Attribute(attr=name):
                return isinstance(node.ctx, ast.Load) and (
                    name not in MUTATORS if _root(node) in modules else name in METHODS
                )
            case ast.Call(func=ast.Name(id="range"), args=args):
                return not any(
                    isinstance(x, ast.Constant) and isinstance(x.value, int) and x.value > MAX_CALLS for x in args
                )
            case ast.Call(func=ast.Name(id="str" | "repr"), args=args):  # a subclass may print differently
                return not any(isinstance(x, ast.Call) and _root(x.func) in names | test_functions for x in args)
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
    """Return the names that the tests read but do not define."""
    tables = [top]
    for table in tables:
        tables += table.get_children()
    read = {x.get_name() for t in tables for x in t.get_symbols() if x.is_referenced() and (t is top or x.is_global())}
    return read - {x.get_name() for x in top.get_symbols() if x.is_assigned() or x.is_imported() or x.is_namespace()}


def _root(node: ast.expr) -> str | None:
    """Return the first name of a dotted expression: datetime for datetime.timezone.utc."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _is_singleton(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and any(node.value is x for x in (None, True, False))


def _verdict(source: str, tests: str, isolation: dict[str, Any] | None, seconds: float) -> str:
    """Return passed, failed or unfit."""
    secret = secrets.token_hex(16)
    limits = {"seconds": seconds, "alarm": SLOWDOWN * seconds, "memory_gb": MEMORY_GB, "file_mb": FILE_MB}
    job = json.dumps({"program": source, "tests": tests, "isolation": isolation, "limits": limits, "secret": secret})
    with tempfile.TemporaryDirectory(prefix="code-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
            | {"HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        limit = WorkLimit(seconds + START_SECONDS, lambda: process_seconds(process.pid))
        sent: bytes | None = job.encode()
        output = b""
        try:
            while (left := limit.left()) > 0:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    output, _ = process.communicate(sent, timeout=left)
                    break
                sent = None  # input is only accepted by the first call
        finally:
            _end(process)
    word, verdict, is_root = (*output.decode("ascii", "replace").split(" "), "", "", "")[:3]
    if word != secret:
        return "failed"
    if is_root == "1":
        warn_of_root()
    return verdict


@functools.cache
def warn_of_root() -> None:
    print(
        "warning: reward code: programs run as root, because they cannot switch to the user nobody or it cannot read "
        f"{sys.base_prefix}; they can write root's files and start processes: train as another user, or in a container",
        file=sys.stderr,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and everything it started."""
    kill_group(process)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
