"""code[:SECONDS]: 1 when the program in a completion passes the tests of its row, else 0.

The program is the last fenced block of the completion, or all of it where there is none. The row brings

    tests        assert lines (a list or one text), or a text with check(candidate), as in HumanEval (its `test` works)
    entry_point  the function that check() is given

A completion may also be the rest of a function that the prompt began: prompt and completion are then run as one.
Without tests a row gets None.

Every program runs in an interpreter of its own: an empty folder, limits on time, memory, file size and processes, no
network where the system lets a process leave it, no connections otherwise. That is protection from accidents. It is not
a security boundary: code made to break out will, so run a policy you do not trust in a container.

Tests that only call functions and look at data run in another process than the program, which gets arguments as data,
answers with data, and never sees the tests (rollout/code_child.py). What a program does to builtins, modules, frames or
__eq__, or writes anywhere, is then of no use to it. What still earns a reward it should not:

    tests with classes of the program, modules such as sys or unittest, or functions as arguments run in the program's
    own process: there __eq__ that is always true passes, and code that walks frames can read the tests and answer for
    them; no check in one Python process can prevent that
    functions besides the tested one that the tests use and the prompt defines (encode in a test of decode): a program
    may define them anew
    as root, where user namespaces are refused, a program can read the memory of the process that runs the tests
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rollout.code_child import PURE
from rollout.reward_functions import text_of
from rollout.reward_workers import kill_group

CHILD = Path(__file__).with_name("code_child.py")
SECONDS = 10.0
START_SECONDS = 5.0  # for the interpreter, on a busy machine
MEMORY_GB = 1.0
FILE_MB = 16.0
AT_ONCE = 8
FENCE = re.compile(r"^[ ]{0,3}(```+|~~~+)[^\n`]*\n(.*?)(?:^[ ]{0,3}\1[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
BY_NAME = {"globals", "locals", "vars", "eval", "exec", "compile", "__import__", "input"}  # reach the program otherwise
KEPT = ("PATH", "LANG", "LC_ALL", "SYSTEMROOT")  # of the environment: no keys, no tokens


def code(argument: str | None) -> Callable[..., list[float | None]]:
    seconds = SECONDS
    if argument is not None:
        try:
            seconds = float(argument)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds <= 3600:
            raise ValueError(f"reward_funcs=code:{argument}: write code:SECONDS, the time one program may take")

    def score(
        completions: Sequence[Any],
        prompts: Sequence[Any],
        tests: Sequence[Any] | None = None,
        test: Sequence[Any] | None = None,
        entry_point: Sequence[Any] | None = None,
    ) -> list[float | None]:
        if tests is None and test is None:
            raise ValueError("the data has neither a column 'tests' nor 'test'")
        nothing = [None] * len(completions)
        rows = zip(completions, prompts, tests or nothing, test or nothing, entry_point or nothing, strict=True)
        jobs = [_job(text_of(done), prompt, first or second, entry) for done, prompt, first, second, entry in rows]
        with ThreadPoolExecutor(min(AT_ONCE, os.cpu_count() or 1)) as threads:
            return list(threads.map(lambda job: None if job is None else float(passes(*job, seconds)), jobs))

    return score


def _job(text: str, prompt: Any, tests: Any, entry_point: str | None) -> tuple[str, str] | None:
    """(program, tests), or None where there is nothing to test."""
    tests = "\n".join(str(line) for line in tests) if isinstance(tests, (list, tuple)) else tests
    if not tests or not str(tests).strip():
        return None
    tests = str(tests)
    if entry_point and re.search(r"^def check\(", tests, re.MULTILINE):
        tests = f"{tests}\n\ncheck({entry_point})\n"
    return program(text, prompt, entry_point), tests


def program(text: str, prompt: Any, entry_point: str | None = None) -> str:
    """What to run: the completion's code, behind the prompt's where that is code, too."""
    found = last_block(text)
    begun = prompt if isinstance(prompt, str) else str(prompt[-1].get("content") or "")
    begun = begun if isinstance(prompt, str) else last_block(begun)
    if not _is_code(begun, entry_point):
        return found
    whole = f"{begun.rstrip()}\n\n{found}"  # the function again and in full: the later one counts
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
    """Python, perhaps of a function without its body, that does something: a word alone would parse, too."""
    return any(_parses(text + end) for end in ("", "\n    pass\n")) and bool(
        re.search(r"^(def|class|import|from|@)\b", text, re.MULTILINE) or _defines(text, entry_point)
    )


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # what odd text makes the parser raise
        return False
    return True


def _defines(text: str, name: str | None) -> bool:
    return bool(name and re.search(rf"^(async def|def|class) {re.escape(name)}\b", text, re.MULTILINE))


def passes(source: str, tests: str, seconds: float) -> bool:
    """Whether the tests ran to their end; a program that ends the process early has not passed."""
    if can_run_apart(tests):
        verdict = _verdict(source, tests, seconds, together=False)
        if verdict != "unfit":  # known only when they ran: a test that hands a function to the program, say
            return verdict == "passed"
    return _verdict(source, tests, seconds, together=True) == "passed"


def can_run_apart(tests: str) -> bool:
    """Whether tests can run in another process than the program, by what they say: the program has no part in this."""
    try:
        nodes = list(ast.walk(ast.parse(tests)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # what odd text makes the parser raise
        return False
    loaded = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    own = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            if any(name.partition(".")[0] not in PURE for name in names):
                return False
            own |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, (ast.AsyncFunctionDef, ast.Await)):
            return False
        elif isinstance(node, ast.Attribute) and (node.attr == "seed" or not isinstance(node.ctx, ast.Load)):
            return False  # the program draws numbers, or reads what the tests set
    theirs = [name for name in loaded - own if name.lstrip("_")[:1].isupper() and name not in dir(builtins)]
    return not (loaded & BY_NAME) and not any(_is_class(name, nodes) for name in theirs)


def _is_class(name: str, nodes: list[ast.AST]) -> bool:
    """Whether tests use a capitalised name as a class, of which they may ask anything, or as a function that is only
    called for its result (`assert Split(3) == [1, 2]`)."""
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    made = [node for node in calls if isinstance(node.func, ast.Name) and node.func.id == name]
    given = [x for node in calls if ast.unparse(node.func) == "check" for x in node.args if ast.unparse(x) == name]
    uses = [node for node in nodes if isinstance(node, ast.Name) and node.id == name]
    if len(uses) != len(made) + len(given):
        return True  # except, isinstance, a base class
    for node in nodes:
        parts = list(ast.iter_child_nodes(node))
        kept = isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.Attribute, ast.withitem))
        joined = isinstance(node, (ast.Compare, ast.BinOp))
        if (kept and any(x in made for x in parts)) or (joined and sum(x in made for x in parts) > 1):
            return True
    return False


def _verdict(source: str, tests: str, seconds: float, *, together: bool) -> str:
    """passed, failed or unfit."""
    secret = secrets.token_hex(16)
    limits = {"seconds": seconds, "memory_gb": MEMORY_GB, "file_mb": FILE_MB}
    job = json.dumps({"program": source, "tests": tests, "together": together, "limits": limits, "secret": secret})
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
            said, _ = process.communicate(job.encode(), timeout=seconds + START_SECONDS)
        except subprocess.TimeoutExpired:
            said = b""
        finally:
            _end(process)
    word, _, verdict = said.decode("ascii", "replace").partition(" ")
    return verdict if word == secret else "failed"


def _end(process: subprocess.Popen[bytes]) -> None:
    """It, and what it may have started in spite of everything."""
    kill_group(process)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
